#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hashes of Pillow's LANCZOS on integer pictures, for the tests of code/src/reference.rs.

usage: python3 -m venv .venv && .venv/bin/pip install pillow==13.0.0 numpy && .venv/bin/python pillow_lanczos.py
Prints a line a size: from, to, sha256 of the RGB bytes.
"""
import hashlib
import math

import numpy as np
from PIL import Image

SIZES = [(1300, 900), (1920, 1080), (1025, 1024), (900, 3000), (4096, 513), (2000, 2000)]


def picture(width, height):
    """The same formula as `picture` in the Rust test."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    red = (x * 7 + y * 3) % 256
    green = ((x * x + y * y) // 5) % 256
    blue = ((x // 8 + y // 8) % 2) * 200 + (x * y) % 56
    return Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8))


for width, height in SIZES:
    scale = math.sqrt(1024 * 1024 / (width * height))
    size = (int(width * scale), int(height * scale))
    resized = picture(width, height).resize(size, Image.Resampling.LANCZOS)
    print(f"({width}, {height}, {size[0]}, {size[1]}, \"{hashlib.sha256(resized.tobytes()).hexdigest()[:16]}\"),")
for size in [(150, 101), (300, 202), (64, 64), (333, 77)]:
    resized = picture(200, 140).resize(size, Image.Resampling.LANCZOS)
    print(f"(200, 140, {size[0]}, {size[1]}, \"{hashlib.sha256(resized.tobytes()).hexdigest()[:16]}\"),")
