#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the small image files of tests/fixtures/references: kinds that the `image` crate cannot write itself.

usage: python3 -m venv .venv && .venv/bin/pip install pillow==13.0.0 numpy && .venv/bin/python make_reference_fixtures.py
"""
import pathlib

import numpy as np
from PIL import Image

OUT = pathlib.Path(__file__).parent.parent / "fixtures" / "references"
OUT.mkdir(parents=True, exist_ok=True)

# 20 x 12, red to the right, green downwards: the formula of `gradient` in the Rust tests.
y, x = np.mgrid[0:12, 0:20]
RGB = Image.fromarray(np.stack([x * 12, y * 20, np.full_like(x, 40)], -1).astype(np.uint8))
GREY = Image.fromarray((x * 12).astype(np.uint8))
# Left half transparent over red, right half opaque.
ALPHA = Image.fromarray(np.where(x < 10, 0, 255).astype(np.uint8))
RGBA = RGB.copy()
RGBA.putalpha(ALPHA)
EXIF = Image.Exif()
EXIF[0x0112] = 6  # shown after a quarter turn clockwise

GREY.save(OUT / "grey.png")
Image.merge("LA", (GREY, ALPHA)).save(OUT / "grey_alpha.png")
PALETTE = RGB.quantize(240)
PALETTE.save(OUT / "palette.png")
FOUR = Image.fromarray((x // 5).astype(np.uint8), "P")
FOUR.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
FOUR.save(OUT / "palette_transparent.png", bits=2, transparency=3)
RGB.save(OUT / "turned.png", exif=EXIF)
RGB.save(OUT / "turned.webp", lossless=True, exif=EXIF)
RGB.save(OUT / "turned.jpg", quality=95, subsampling=0, exif=EXIF)
RGB.save(OUT / "progressive.jpg", quality=95, subsampling=0, progressive=True)
GREY.save(OUT / "grey.jpg", quality=95)
RGB.convert("CMYK").save(OUT / "cmyk.jpg", quality=95)
RGBA.save(OUT / "alpha.webp", lossless=True, exact=True)
RGB.save(OUT / "lossy.webp", quality=95)
RGB.save(OUT / "animated.webp", save_all=True, append_images=[RGB.rotate(180)], lossless=True)
RGB.save(OUT / "animated.png", save_all=True, append_images=[RGB.rotate(180)])
GREY.save(OUT / "image.gif")
for path in sorted(OUT.iterdir()):
    print(path.name, path.stat().st_size)
