# SPDX-License-Identifier: Apache-2.0
"""The same request gives the same picture, and the same refusal, wherever it is asked."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BINARY, MINI, TINY, picture, post
from PIL import Image

from tt_flux2_klein import Device, KleinTT, RequestError, Timing

PROMPT = "a red circle on a blue background, é ❄"
KEYS = {"text_encoder_s", "reference_encode_s", "context_s", "dit_s", "vae_decode_s"}


def by_command(directory: Path, checkpoint: Path, *arguments: str) -> Image.Image:
    command = [BINARY, "generate", PROMPT, "--checkpoint", str(checkpoint), "--allow-small", "--out", "out.png", "--json"]
    done = subprocess.run([*command, *arguments], cwd=directory, capture_output=True, check=True)
    assert json.loads(done.stdout)["seed"] == 7
    return Image.open(directory / "out.png")


def by_http(server: str, files: list[bytes], width: int, height: int) -> Image.Image:
    images = [base64.b64encode(file).decode() for file in files]
    body = {"prompt": PROMPT, "width": width, "height": height, "seed": 7, "images": images}
    status, answer = post(f"{server}/predict", body)
    assert status == 200, answer
    return Image.open(io.BytesIO(base64.b64decode(answer["image"])))


def file_of(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kinds", [[], ["PNG"], ["JPEG", "WEBP", "PNG"]], ids=" ".join)
def test_python_the_command_and_the_server_agree_byte_for_byte(
    kinds: list[str], model: KleinTT, server: str, tmp_path: Path
) -> None:
    files = [file_of(picture(96 + 16 * index, 80), kind) for index, kind in enumerate(kinds)]
    for index, file in enumerate(files):
        (tmp_path / str(index)).write_bytes(file)
    opened = [Image.open(tmp_path / str(index)) for index in range(len(files))]
    ours, timing = model.generate(PROMPT, 72, 64, 7, opened)
    images = [word for index in range(len(files)) for word in ("--image", str(index))]
    command = by_command(tmp_path, TINY, "--width", "72", "--height", "64", "--seed", "7", "--threads", "1", *images)
    assert ours.size == (72, 64) and ours.mode == "RGB"
    assert ours.tobytes() == command.tobytes() == by_http(server, files, 72, 64).tobytes()
    assert set(timing.values) == KEYS and len(timing.step_s) == 4
    assert (timing.values["reference_encode_s"] > 0) == bool(files)
    # The same from bytes, and from pixels that are loaded already, where no JPEG is decoded by another library.
    assert model.generate(PROMPT, 72, 64, 7, files)[0].tobytes() == ours.tobytes()
    if "JPEG" not in kinds:
        loaded = [Image.open(io.BytesIO(file)).copy() for file in files]
        assert model.generate(PROMPT, 72, 64, 7, loaded)[0].tobytes() == ours.tobytes()


def test_a_trained_model_agrees_too(dev: Device, tmp_path: Path) -> None:
    for precision in ("bf16", "f32"):
        ours, _ = KleinTT(dev, MINI, dit_prec=precision, small_sizes=True).generate(PROMPT, 128, 128, 7)
        size = ("--width", "128", "--height", "128", "--seed", "7", "--dtype", precision)
        assert ours.tobytes() == by_command(tmp_path, MINI, *size).tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": " "},
        {"prompt": "x\0y"},
        {"prompt": "é" * 4001},
        {"width": -8},
        {"width": 8},
        {"width": 65},
        {"height": 1928},
        {"height": 10**30},
        {"width": 1920, "height": 1096},
        {"seed": -1},
        {"seed": 1 << 53},
        {"images": [picture(64, 64)] * 4},
        {"images": [picture(63, 64)]},
        {"images": [picture(64, 64), picture(64, 520)]},
        {"images": [b"no image"]},
        {"images": [b""]},
    ],
    ids=lambda change: " ".join(change),
)
def test_refusals_are_value_errors_with_the_sentence_of_the_servers_422(
    change: dict[str, Any], model: KleinTT, server: str
) -> None:
    asked: dict[str, Any] = {"prompt": "x", "width": 64, "height": 64, "seed": 1} | change
    with pytest.raises(ValueError) as refusal:
        model.generate(**asked)
    files = [image if isinstance(image, bytes) else file_of(image, "PNG") for image in asked.pop("images", [])]
    if files != [b""]:  # The server's base64 has its own word for nothing.
        status, answer = post(f"{server}/predict", asked | {"images": [base64.b64encode(f).decode() for f in files]})
        assert (status, answer["detail"]) == (422, str(refusal.value))
        assert answer["error"]["param"] == refusal.value.parameter
    assert isinstance(refusal.value, RequestError)


def test_wrong_types_are_type_errors(model: KleinTT) -> None:
    right: dict[str, Any] = {"prompt": "x", "width": 64, "height": 64, "seed": 1}
    for change in ({"prompt": 5}, {"width": 64.0}, {"seed": "1"}, {"images": picture(64, 64)}, {"images": ["a.png"]}):
        with pytest.raises(TypeError):
            model.generate(**right | change)
    # Numbers of numpy are whole numbers.
    assert model.generate("x", np.int32(64), np.uint16(64), np.int64(1))[0].size == (64, 64)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "YCbCr", "HSV", "La", "RGBa", "PA"])
def test_pictures_of_every_mode_are_read_by_one_rule(mode: str, model: KleinTT) -> None:
    source = picture(80, 64)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(source.convert("L")).astype(np.uint16) * 257)
        wanted = source.convert("L").convert("RGB")
    else:
        via = {"La": "LA", "RGBa": "RGBA", "PA": "P"}.get(mode)
        image = source.convert(via).convert(mode) if via else source.convert(mode)
        wanted = image.convert({"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}.get(mode, "RGB")).convert("RGB")
    tokens, grids = model.references([image])
    assert grids == [(4, 5)] and (tokens == model.references([wanted])[0]).all()


def test_orientation_alpha_and_what_cannot_be_read(model: KleinTT) -> None:
    source = picture(80, 64)
    turned = source.copy()
    turned.getexif()[0x0112] = 6  # Turned by a quarter: shown as 64 wide, 80 high.
    tokens, grids = model.references([turned])
    assert grids == [(5, 4)] and (tokens == model.references([source.rotate(-90, expand=True)])[0]).all()
    clear = source.convert("RGBA")
    clear.putalpha(0)
    white = Image.new("RGB", source.size, "white")
    assert (model.references([clear])[0] == model.references([white])[0]).all()
    for image in (source.convert("CMYK"), source.convert("F"), source.convert("I")):
        with pytest.raises(RequestError, match=r"images\[0\]: is a .* image, wanted RGB or grey"):
            model.references([image])
    frames = io.BytesIO()
    source.save(frames, "PNG", save_all=True, append_images=[white])
    with pytest.raises(RequestError, match="is animated, wanted a picture of one frame"):
        model.references([Image.open(frames)])


class Foreign:
    """An array of another library: nothing but DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OnCard(Foreign):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_the_stages_one_by_one_give_the_same_picture(model: KleinTT) -> None:
    whole, _ = model.generate("x", 96, 64, 5, [picture(80, 64), picture(64, 96)])
    emb = model.encode("x")
    tokens, grids = model.references([picture(80, 64), picture(64, 96)])
    timing = Timing()
    latents = model.denoise(emb, 96, 64, 5, timing, tokens, grids)
    pixels = model.decode(latents)
    assert emb.shape == (512, emb.shape[1]) and emb.dtype == np.float32 and emb.flags.writeable
    assert tokens.shape == (4 * 5 + 6 * 4, 128) and grids == [(4, 5), (6, 4)]
    assert latents.shape == (4, 6, 128) and latents.dtype == np.float32
    assert pixels.shape == (64, 96, 3) and pixels.dtype == np.uint8
    assert pixels.tobytes() == whole.tobytes()
    assert timing.values["dit_s"] > 0 and timing.values["context_s"] > 0 and timing.values["vae_decode_s"] == 0
    assert len(timing.step_s) == 4
    assert sum(timing.step_s) <= timing.values["dit_s"]
    # Any library's arrays, any layout, any width of float.
    foreign = model.denoise(Foreign(emb), 96, 64, 5, None, Foreign(tokens), grids)
    assert (foreign == latents).all()
    assert (model.decode(Foreign(np.asfortranarray(latents).astype(np.float64))) == pixels).all()
    # Text alone.
    assert model.denoise(emb, 64, 64, 5).tobytes() == model.denoise(emb, 64, 64, 5, Timing(), None, None).tobytes()
    none, no_grids = model.references(None)
    assert none.shape == (0, 128) and no_grids == []


def test_arrays_that_do_not_fit_are_refused(model: KleinTT) -> None:
    emb = model.encode("x")
    tokens, grids = model.references([picture(64, 64)])
    with pytest.raises(RequestError, match=r"emb: has the shape \[511, \d+\], wanted \[512, \d+\]"):
        model.denoise(emb[1:], 64, 64, 1)
    with pytest.raises(RequestError, match="grids: .* are 0 tokens, but ref_tokens has 16"):
        model.denoise(emb, 64, 64, 1, None, tokens)
    with pytest.raises(RequestError, match="width: is 72, wanted a multiple of 16 from 16 to 1920"):
        model.denoise(emb, 72, 64, 1)
    with pytest.raises(RequestError, match=r"latents: has the shape \[4, 128\], wanted \[n, n, 128\]"):
        model.decode(np.zeros((4, 128), np.float32))
    with pytest.raises(RequestError, match="latents: are empty"):
        model.decode(np.zeros((0, 4, 128), np.float32))
    with pytest.raises(RequestError, match="emb: is in the memory of another device"):
        model.denoise(OnCard(emb), 64, 64, 1)
    for wrong in (emb.astype(np.int32), [[1.0]], None):
        with pytest.raises(TypeError, match="emb: "):
            model.denoise(wrong, 64, 64, 1)
    with pytest.raises(ArithmeticError, match="not finite"):
        model.denoise(np.full_like(emb, np.nan), 64, 64, 1, None, tokens, grids)


def test_four_encodings_are_kept(dev: Device) -> None:
    from tt_flux2_klein import REF_CACHE_SIZE

    assert REF_CACHE_SIZE == KleinTT.REF_CACHE_SIZE == 4
    model = KleinTT(dev, TINY, small_sizes=True)
    images = [picture(64, 64 + 16 * index) for index in range(5)]

    def cached(index: int) -> int:
        return model.generate("x", 16, 16, 1, [images[index]])[1].cached_references

    assert [cached(index) for index in (0, 1, 2, 3, 0, 4, 0, 1)] == [0, 0, 0, 0, 1, 0, 1, 0]
