# SPDX-License-Identifier: Apache-2.0
"""Which device runs the model, and for how long."""

from __future__ import annotations

import glob
import threading
import warnings
import weakref
from types import TracebackType
from typing import Literal, NoReturn

from . import _native
from .errors import DeviceError

_warned = threading.Event()


class Device:
    """An open device: what :func:`open_device` returns. Also a context manager that closes it."""

    def __init__(self, kind: str, trace_region_size: int, l1_small_size: int, threads: int | None) -> None:
        #: ``cpu`` or ``ttnn``.
        self.kind = kind
        #: Bytes, as given; a card reserves them for traces, the CPU needs none.
        self.trace_region_size = trace_region_size
        #: Bytes, as given; a card reserves them in each core's memory, the CPU needs none.
        self.l1_small_size = l1_small_size
        #: Threads of the CPU; ``None`` is one per physical core.
        self.threads = threads
        self._closed = False
        self._models: weakref.WeakSet[_native.Model] = weakref.WeakSet()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def close(self) -> None:
        """Close it: a run that is going on ends with :class:`DeviceError`, and the models on it free their weights."""
        self._closed = True
        for model in list(self._models):
            model.close()

    def _add(self, model: _native.Model) -> None:
        self._models.add(model)
        if self._closed:
            model.close()

    def _check(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed; open it again with open_device()")

    def __enter__(self) -> Device:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Device cannot be pickled or copied: it is this process's own; open one in each process")

    def __repr__(self) -> str:
        return f"<Device {self.kind}{', closed' if self._closed else ''}>"


def open_device(
    trace_region_size: int = 0,
    l1_small_size: int = 98304,
    *,
    device: Literal["cpu", "ttnn"] | None = None,
    threads: int | None = None,
) -> Device:
    """Open the device that models are loaded onto.

    Args:
        trace_region_size: bytes that a card reserves for traces.
        l1_small_size: bytes that a card reserves in each core's memory.
        device: ``"cpu"`` or ``"ttnn"``. Without it: a Tenstorrent card if there is one and this build can drive it, else
            the CPU, with one warning for the life of the process.
        threads: threads of the CPU; by default one per physical core.

    Raises:
        DeviceError: this build cannot drive the device asked for.
        ValueError: a size below 0, no thread, an unknown device.
    """
    for name, size in (("trace_region_size", trace_region_size), ("l1_small_size", l1_small_size)):
        if size < 0:
            raise ValueError(f"{name}: got {size}, wanted bytes from 0")
    if threads is not None and threads < 1:
        raise ValueError(f"threads: got {threads}, wanted at least 1")
    built = _native.DEVICES.split()
    if device not in (None, "cpu", "ttnn"):
        raise ValueError(f'device: got {device!r}, wanted "cpu" or "ttnn"')
    if device == "ttnn" and "ttnn" not in built:
        raise DeviceError('device: this build has no "ttnn"; use device="cpu", or a build with the feature ttnn')
    kind = device or ("ttnn" if "ttnn" in built and _cards() else "cpu")
    if device is None and kind == "cpu" and not _warned.is_set():
        _warned.set()
        why = "this build cannot drive the Tenstorrent card that is here" if _cards() else "there is no Tenstorrent card"
        warnings.warn(f'the model runs on the CPU: {why}; device="cpu" says that it is meant', RuntimeWarning, 2)
    return Device(kind, trace_region_size, l1_small_size, threads)


def close_device(dev: Device) -> None:
    """Close ``dev``; see :meth:`Device.close`. Closing it twice is no error."""
    dev.close()


def _cards() -> bool:
    return bool(glob.glob("/dev/tenstorrent/*"))
