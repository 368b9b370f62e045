# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 [klein] 4B: text to image, editing, and one to three reference images. No torch, no diffusers.

>>> from tt_flux2_klein import KleinTT, open_device
>>> with open_device() as dev:
...     image, timing = KleinTT(dev).generate("A red fox in fresh snow", width=1024, height=1024, seed=42)
"""

from ._native import REF_CACHE_SIZE
from .device import Device, close_device, open_device
from .errors import (
    CheckpointError,
    DeviceError,
    DownloadError,
    KleinError,
    NonFiniteError,
    RequestError,
    ServeError,
    Stopped,
)
from .pipeline import KleinTT
from .timing import Progress, Timing

__all__ = [
    "REF_CACHE_SIZE",
    "CheckpointError",
    "Device",
    "DeviceError",
    "DownloadError",
    "KleinError",
    "KleinTT",
    "NonFiniteError",
    "Progress",
    "RequestError",
    "ServeError",
    "Stopped",
    "Timing",
    "close_device",
    "open_device",
]
