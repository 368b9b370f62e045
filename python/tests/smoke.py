# SPDX-License-Identifier: Apache-2.0
"""The package in an environment of its own: a picture, its stages, a refusal. Also how a typed program uses it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from tt_flux2_klein import KleinTT, Progress, RequestError, Timing, open_device
from tt_flux2_klein.server import app

TINY = Path(__file__).resolve().parents[2] / "code/tests/fixtures/tiny"


def follow(progress: Progress) -> bool:
    return progress.step <= progress.steps


with open_device(device="cpu") as dev:
    model = KleinTT(dev, TINY, small_sizes=True)
    image, timing = model.generate("x", width=64, height=64, seed=1, images=[Image.new("RGB", (64, 64))], callback=follow)
    tokens, grids = model.references([Image.new("RGB", (64, 64))])
    seconds = Timing()
    latents = model.denoise(model.encode("x"), 64, 64, 1, seconds, tokens, grids)
    assert Image.fromarray(model.decode(latents)).tobytes() == image.tobytes()
    assert np.isfinite(latents).all() and seconds.values["dit_s"] > 0 and timing.values["vae_decode_s"] > 0
    try:
        model.generate("x", 65, 64, 1)
    except RequestError as error:
        assert error.parameter == "width" and "a multiple of 8" in str(error)
    else:
        raise AssertionError("65 pixels were accepted")
assert callable(app) and "torch" not in sys.modules
print(f"ok: {sys.version.split()[0]}, numpy {np.__version__}")
