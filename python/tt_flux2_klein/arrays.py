# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library that speaks DLPack, as the f32 bytes that the native part takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import RequestError

#: DLPack's numbers of memory that the CPU reads: its own, and pinned by CUDA or ROCm.
_READABLE = (1, 3, 11)


def to_f32(name: str, value: Any, shape: tuple[int | None, ...]) -> npt.NDArray[np.float32]:
    """``value`` as a contiguous f32 array of ``shape``, in which ``None`` is any length.

    Raises:
        RequestError: another shape, or memory of another device.
        TypeError: no array, or one that holds no floating-point numbers.
    """
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "__dlpack__"):
        kind = value.__dlpack_device__()[0]
        if int(kind) not in _READABLE:
            raise RequestError(f"{name}: is in the memory of another device; copy it to the CPU first", name)
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(f"{name}: cannot be read by DLPack ({error}); give it as float32") from error
    else:
        wanted = "a numpy array or one with __dlpack__"
        raise TypeError(f"{name}: got {type(value).__name__}, wanted {wanted}")
    if array.dtype.kind != "f":
        raise TypeError(f"{name}: holds {array.dtype}, wanted float32")
    right = len(array.shape) == len(shape) and all(
        want in (None, got) for got, want in zip(array.shape, shape, strict=True)
    )
    if not right:
        wanted = ", ".join("n" if length is None else str(length) for length in shape)
        raise RequestError(f"{name}: has the shape {list(array.shape)}, wanted [{wanted}]", name)
    return np.ascontiguousarray(array, dtype=np.float32)


def from_f32(data: bytearray, *shape: int) -> npt.NDArray[np.float32]:
    """A writable array over ``data``."""
    return np.frombuffer(data, dtype=np.float32).reshape(shape)
