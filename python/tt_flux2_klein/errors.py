# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, in classes that a caller can act on. Every message is one sentence."""

from __future__ import annotations


class KleinError(Exception):
    """Any failure of this package."""


class RequestError(KleinError, ValueError):
    """The model cannot do what is asked; nothing was run. The sentence is that of the server's 422."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        #: The parameter at fault: ``prompt``, ``width``, ``height``, ``seed``, ``images[i]``, an array's name.
        self.parameter = parameter


class CheckpointError(KleinError, OSError):
    """The checkpoint is missing, incomplete, damaged or of another model."""


class DownloadError(KleinError, OSError):
    """The weights could not be downloaded whole and right. What arrived is kept: the next call goes on from there."""


class DeviceError(KleinError, RuntimeError):
    """The device cannot be opened, is closed, or failed."""


class NonFiniteError(KleinError, ArithmeticError):
    """NaN or infinity where a picture was being made; no picture was made."""


class Stopped(KleinError):
    """The callback returned ``False``."""


class ServeError(KleinError, RuntimeError):
    """The server did not start, or lost its device."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        #: The exit code that ``flux2-server`` gives this failure.
        self.exit_code = exit_code
