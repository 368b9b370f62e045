# SPDX-License-Identifier: Apache-2.0
"""What a run tells: how far it is, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Keys of :attr:`Timing.values`, in the order of the stages.
STAGES = ("text_encoder_s", "reference_encode_s", "context_s", "dit_s", "vae_decode_s")


@dataclass
class Timing:
    """Seconds of a run."""

    #: Seconds of each stage: ``text_encoder_s``, ``reference_encode_s``, ``context_s``, ``dit_s``, ``vae_decode_s``.
    #: A stage that did not run has 0.
    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    #: Seconds of each denoising step; they are part of ``dit_s``.
    step_s: list[float] = field(default_factory=list)
    #: Reference images whose encoding was taken from the cache.
    cached_references: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a run is; what a ``callback`` is given."""

    #: ``text_encoder``, ``reference_encode``, ``context``, ``dit`` or ``vae_decode``; empty before the first.
    stage: str
    #: Denoising steps done.
    step: int
    #: Denoising steps of the run.
    steps: int
    #: Part of the whole run's arithmetic that is done, 0 to 1. Known in ``generate`` alone.
    fraction: float
