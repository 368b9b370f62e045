# SPDX-License-Identifier: Apache-2.0
"""Pictures of PIL as the files that the pipeline's own decoder reads, so that every rule about them is in one place."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Union

from PIL import Image

from .errors import RequestError

#: A picture, or the bytes of a PNG, JPEG or WebP file.
Picture = Union[Image.Image, bytes]

#: Modes that a PNG file holds without loss.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
#: Modes with the same colours in another notation.
_SAME_COLOURS = {"La": "LA", "RGBa": "RGBA", "RGBX": "RGB", "PA": "RGBA", "YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB"}


def to_files(images: Sequence[Picture] | None) -> list[bytes]:
    """One file for each picture.

    Raises:
        RequestError: a picture that means nothing without a profile (CMYK), has no 8-bit form or is animated.
        TypeError: no picture.
    """
    if images is None:
        return []
    if isinstance(images, (Image.Image, bytes, str)):
        raise TypeError(f"images: got one {type(images).__name__}, wanted a list of PIL images")
    return [_to_file(image, index) for index, image in enumerate(images)]


def _to_file(image: Picture, index: int) -> bytes:
    name = f"images[{index}]"
    if isinstance(image, bytes):
        return image
    if not isinstance(image, Image.Image):
        raise TypeError(f"{name}: got {type(image).__name__}, wanted a PIL image or the bytes of an image file")
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise RequestError(f"{name}: is animated, wanted a picture of one frame", name)
    untouched = _untouched(image)
    if untouched is not None:
        return untouched
    image = image.convert(_SAME_COLOURS[image.mode]) if image.mode in _SAME_COLOURS else image
    if image.mode not in _PNG_MODES:
        raise RequestError(f"{name}: is a {image.mode} image, wanted RGB or grey; convert it first", name)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1, exif=image.getexif(), icc_profile=None)
    return file.getvalue()


def _untouched(image: Image.Image) -> bytes | None:
    """The file of a picture that was opened and not looked at: its pixels are decoded as the server decodes them.

    Libraries may decode a JPEG to bytes that differ by one.
    """
    if image.format not in ("PNG", "JPEG", "WEBP"):
        return None
    file = getattr(image, "fp", None)
    # A JPEG that is told to decode at another scale is another picture.
    draft = getattr(image, "decoderconfig", ()) not in ((), (1, 0))
    if file is None or not getattr(image, "tile", None) or draft:
        return None
    try:
        at = file.tell()
        file.seek(0)
        data = file.read()
        file.seek(at)
    except (OSError, ValueError):
        return None
    return bytes(data)
