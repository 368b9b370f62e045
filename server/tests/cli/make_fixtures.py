#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the image files of fixtures/ that Rust's encoders cannot make. Needs Pillow and numpy."""
from pathlib import Path

import numpy as np
from PIL import Image

out = Path(__file__).parent / "fixtures"
out.mkdir(exist_ok=True)
cmyk = np.zeros((64, 64, 4), np.uint8)
cmyk[..., 0], cmyk[..., 3] = 40, 20
Image.fromarray(cmyk, "CMYK").save(out / "cmyk.jpg", quality=60)
black, white = (Image.fromarray(np.full((64, 64, 3), v, np.uint8)) for v in (0, 255))
black.save(out / "animated.webp", save_all=True, append_images=[white], lossless=True)
black.save(out / "still.gif")
