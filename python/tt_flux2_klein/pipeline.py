# SPDX-License-Identifier: Apache-2.0
"""From a prompt to a picture."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex, Union

import numpy as np
import numpy.typing as npt
from PIL import Image

from . import _native
from .arrays import from_f32, to_f32
from .device import Device
from .errors import RequestError
from .images import Picture, to_files
from .timing import Progress, Timing

#: Called during a run; ``False`` stops it, an exception ends it and is raised by the call.
Callback = Callable[[Progress], Union[bool, None]]
#: A directory.
PathLike = Union[str, "os.PathLike[str]"]
#: Encodings of reference images that a model keeps.
REF_CACHE_SIZE = _native.REF_CACHE_SIZE

_PRECISIONS = ("bf16", "f32")
#: Channels of a latent token, and pixels of its side.
_CHANNELS, _TOKEN = 128, 16


class KleinTT:
    """FLUX.2 [klein] 4B on a device.

    May be used from several threads: runs take turns, and none holds the GIL while it computes. Ctrl-C ends a run in the
    main thread within one operation.
    """

    #: Encodings of reference images that a model keeps.
    REF_CACHE_SIZE = REF_CACHE_SIZE

    def __init__(
        self,
        dev: Device,
        snapshot: PathLike | None = None,
        te_dir: PathLike | None = None,
        dit_prec: str | None = None,
        te_prec: str | None = None,
        device_vae: bool = True,
        *,
        small_sizes: bool = False,
    ) -> None:
        """Load the text encoder, the DiT and the VAE.

        Args:
            dev: what :func:`open_device` returned.
            snapshot: checkpoint directory in diffusers layout. By default ``KLEIN_SNAPSHOT``, else the pinned revision of
                black-forest-labs/FLUX.2-klein-4B in the Hugging Face cache, downloaded (16 GB) if it is not complete there.
            te_dir: another directory for the text encoder, as one of Qwen/Qwen3-4B. By default ``KLEIN_TEXT_ENCODER``,
                else the checkpoint's own.
            dit_prec: ``"bf16"`` (default, the fast one) or ``"f32"`` (the reference). Each draws its own noise from a seed.
            te_prec: as ``dit_prec``. The CPU has one precision for both; one that is given holds for the other.
            device_vae: whether the VAE runs on the device. On the CPU it does either way.
            small_sizes: accept sizes from 16 pixels, for tests and small checkpoints.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete, damaged or of another model.
            DownloadError: the weights could not be downloaded.
            DeviceError: the device is closed.
            ValueError: an unknown precision, or two that differ.
        """
        dev._check()
        dtype = _precision(dit_prec, te_prec)
        del device_vae
        checkpoint, text_encoder = _native.find_weights(_path(snapshot), _path(te_dir))
        self._dev = dev
        self._model = _native.Model(checkpoint, text_encoder, dtype, dev.threads, small_sizes)
        dev._add(self._model)

    @property
    def name(self) -> str:
        """``FLUX.2-klein-4B``, or the name of the checkpoint's directory if its sizes are others."""
        return self._model.name

    @property
    def device(self) -> str:
        """The device's name, with its kernels."""
        return self._model.device

    @property
    def dtype(self) -> str:
        """``bf16`` or ``f32``."""
        return self._model.dtype

    def generate(
        self,
        prompt: str,
        width: SupportsIndex,
        height: SupportsIndex,
        seed: SupportsIndex,
        images: Sequence[Picture] | None = None,
        *,
        callback: Callback | None = None,
    ) -> tuple[Image.Image, Timing]:
        """Make a picture of exactly the size asked for, in four steps.

        The same request gives the same pixels here, from ``flux2-server generate`` and from ``POST /predict``.

        Args:
            prompt: 1 to 4000 characters; the model sees the first 512 tokens.
            width: 512 to 1920 pixels, a multiple of 8.
            height: as the width; at most 1920 x 1088 pixels in all.
            seed: of the noise, 0 to 2^53 - 1; the noise is that of ``torch.manual_seed`` for its low 32 bits.
            images: none for text to image, else 1 to 3 PIL images (or bytes of PNG, JPEG or WebP files) to edit or to be
                guided by. They keep their aspect, are reduced to an area of 1024 x 1024 and cropped to multiples of 16.
            callback: is given a :class:`Progress` at each stage and step, and ten times a second in between.

        Returns:
            The picture (mode ``RGB``) and the seconds of each stage.

        Raises:
            RequestError: a ``ValueError`` with the sentence of the server's 422.
            Stopped: the callback returned ``False``.
            DeviceError: the device is closed.
            NonFiniteError: the weights gave NaN or infinity.
        """
        pixels, size, seconds, step_s, cached = self._model.generate(
            prompt, _digits(width), _digits(height), _digits(seed), to_files(images), _told(callback)
        )
        return Image.frombytes("RGB", size, pixels), Timing(dict(seconds), step_s, cached)

    def encode(self, prompt: str, *, callback: Callback | None = None) -> npt.NDArray[np.float32]:
        """Prompt embeddings ``[512, 7680]``, float32: layers 9, 18 and 27 side by side, padding rows included.

        Raises:
            RequestError: an empty prompt, one with NUL, or one of more than 4000 characters.
        """
        return from_f32(self._model.encode(prompt, _told(callback)), *self._model.embeds_shape)

    def references(
        self, images: Sequence[Picture] | None, *, callback: Callback | None = None
    ) -> tuple[npt.NDArray[np.float32], list[tuple[int, int]]]:
        """Latent tokens of reference images, and their grids.

        The last ``REF_CACHE_SIZE`` (4) encodings are kept by pixel content and geometry.

        Args:
            images: none to 3, as in :meth:`generate`.

        Returns:
            Tokens ``[n, 128]``, float32, of all references in turn, and ``(height, width)`` of each in tokens (pixels /
            16): ``n`` is the sum of their products.
        """
        tokens, grids = self._model.references(to_files(images), _told(callback))
        return from_f32(tokens, -1, _CHANNELS) if tokens else np.zeros((0, _CHANNELS), np.float32), grids

    def denoise(
        self,
        emb: Any,
        width: SupportsIndex,
        height: SupportsIndex,
        seed: SupportsIndex,
        timing: Timing | None = None,
        ref_tokens: Any = None,
        grids: Sequence[tuple[int, int]] | None = None,
        *,
        callback: Callback | None = None,
    ) -> npt.NDArray[np.float32]:
        """The four-step loop.

        Args:
            emb: ``[512, 7680]`` as :meth:`encode` gives it; numpy or anything with ``__dlpack__``, floating point.
            width: 512 to 1920 pixels, a multiple of 16.
            height: as the width.
            seed: of the noise.
            timing: gets ``context_s`` and ``dit_s``, and the seconds of each step.
            ref_tokens: ``[n, 128]`` as :meth:`references` gives them; none without references.
            grids: ``(height, width)`` of each reference, as :meth:`references` gives them.

        Returns:
            Latents ``[height / 16, width / 16, 128]``, float32, for :meth:`decode`.

        Raises:
            RequestError: a size, seed or shape that does not fit.
        """
        embeds = to_f32("emb", emb, self._model.embeds_shape)
        sides = [(int(rows), int(columns)) for rows, columns in grids or ()]
        rows = sum(height * width for height, width in sides)
        tokens = np.zeros((0, _CHANNELS), np.float32) if ref_tokens is None else ref_tokens
        tokens = to_f32("ref_tokens", tokens, (None, _CHANNELS))
        if any(side < 1 for grid in sides for side in grid) or tokens.shape[0] != rows:
            message = f"grids: {sides} are {rows} tokens, but ref_tokens has {tokens.shape[0]}"
            raise RequestError(message, "grids")
        latents, grid, seconds, step_s = self._model.denoise(
            embeds.tobytes(),
            _digits(width),
            _digits(height),
            _digits(seed),
            tokens.tobytes(),
            sides,
            _told(callback),
        )
        if timing is not None:
            timing.values.update(seconds)
            timing.step_s[:] = step_s
        return from_f32(latents, *grid, _CHANNELS)

    def decode(self, latents: Any, *, callback: Callback | None = None) -> npt.NDArray[np.uint8]:
        """Decode latents with the VAE.

        Args:
            latents: ``[rows, columns, 128]`` as :meth:`denoise` gives them; numpy or anything with ``__dlpack__``.

        Returns:
            Pixels ``[16 * rows, 16 * columns, 3]``, uint8, RGB: what ``PIL.Image.fromarray`` takes.
        """
        values = to_f32("latents", latents, (None, None, _CHANNELS))
        rows, columns, _ = values.shape
        if rows * columns == 0:
            raise RequestError("latents: are empty, wanted at least one token", "latents")
        pixels, (width, height) = self._model.decode(values.tobytes(), rows, columns, _told(callback))
        return np.frombuffer(pixels, dtype=np.uint8).reshape(height, width, 3)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a KleinTT cannot be pickled or copied: it holds weights on this process's device; load one in each process"
        )

    def __repr__(self) -> str:
        return f"<KleinTT {self.name} on {self.device}, {self.dtype}>"


def _path(path: PathLike | None) -> str | None:
    return None if path is None else os.fspath(path)


def _digits(number: SupportsIndex) -> str:
    """A whole number as text; Python's own have no bounds, and the pipeline says what they are."""
    return str(operator.index(number))


def _precision(dit: str | None, text_encoder: str | None) -> str:
    for name, given in (("dit_prec", dit), ("te_prec", text_encoder)):
        if given not in (None, *_PRECISIONS):
            raise ValueError(f'{name}: got {given!r}, wanted "bf16" or "f32"')
    if dit and text_encoder and dit != text_encoder:
        raise ValueError(f"te_prec: is {text_encoder} and dit_prec is {dit}; the CPU has one precision for both")
    return dit or text_encoder or _PRECISIONS[0]


def _told(callback: Callback | None) -> Callable[[str, int, int, float], bool | None] | None:
    if callback is None:
        return None
    return lambda stage, step, steps, fraction: callback(Progress(stage, step, steps, fraction))
