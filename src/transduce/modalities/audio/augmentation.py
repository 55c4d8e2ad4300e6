"""Audio augmentation: SpecAugment and speed perturbation."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from transduce.modalities.audio.files import resample

MAX_TIME_SHARE = 0.2  # of an utterance that one time mask may cover


@dataclass(frozen=True)
class SpecAugment:
    """Normalisation per utterance, then random masks over time and frequency (Park et al. 2019)."""

    normalise: bool
    time_masks: int
    time_width: int  # maximum frames of a time mask, and never more than a fifth of the utterance
    frequency_masks: int
    frequency_width: int  # maximum bands of a frequency mask

    def __call__(self, frames: Tensor, rng: np.random.Generator | None) -> Tensor:
        """S F -> S F; without a random generator nothing is masked."""
        if self.normalise:
            frames = (frames - frames.mean(0)) / frames.std(0, correction=0).clamp_min(1e-5)
        if rng is None or not (self.time_masks or self.frequency_masks):
            return frames
        masked = torch.zeros(frames.shape, dtype=torch.bool)
        for _ in range(self.time_masks):
            begin, end = _span(rng, len(frames), min(self.time_width, int(MAX_TIME_SHARE * len(frames))))
            masked[begin:end] = True
        for _ in range(self.frequency_masks):
            begin, end = _span(rng, frames.size(1), min(self.frequency_width, frames.size(1)))
            masked[:, begin:end] = True
        return torch.where(masked, frames.mean(), frames)


def _span(rng: np.random.Generator, size: int, max_width: int) -> tuple[int, int]:
    width = int(rng.integers(0, max_width + 1))
    begin = int(rng.integers(0, size - width + 1))
    return begin, begin + width


def perturb_speed(samples: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """One of five speeds from 1 - strength to 1 + strength (Ko et al. 2015); five, so that their filters are cached."""
    speed = Fraction(1 + strength * (int(rng.integers(5)) - 2) / 2).limit_denominator(40)
    return resample(samples.astype(np.float32), speed.numerator, speed.denominator)
