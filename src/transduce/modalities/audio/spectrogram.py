"""Log-mel spectrograms compatible with Kaldi or Whisper; SpecAugment and speed perturbation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from transduce.contracts import Count
from transduce.errors import InputError
from transduce.modalities.audio.files import resample

NonNegative = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Scale = Literal["kaldi", "whisper"]
EMPHASIS = 0.97  # coefficient of the pre-emphasis filter
MIN_FREQUENCY = 20.0  # hertz: lower edge of Kaldi's filter bank


@dataclass(frozen=True)
class LogMelSpectrogram:
    """Framing, windowing, and mel filter bank.

    kaldi: complete windows only, mean removed, pre-emphasis, Povey window; triangular filters on the mel scale
    1127 ln(1 + f/700); natural logarithm of the power of 16-bit samples. whisper: windows centred on every hop, Hann
    window, Slaney's filters of equal area, log10 clipped at 8 below the maximum, (x + 4) / 4 (Radford et al. 2022).
    """

    rate: Count = 16_000  # samples per second
    mels: Count = 80
    window: Positive = 25.0  # milliseconds
    hop: Positive = 10.0  # milliseconds
    scale: Scale = "kaldi"

    def __post_init__(self) -> None:
        if self.step < 1:
            raise InputError(f"a hop of {self.hop:g} ms is less than a sample", remedy="raise hop or rate")

    @property
    def width(self) -> int:
        """Samples per window."""
        return int(self.rate * self.window / 1000)

    @property
    def step(self) -> int:
        return int(self.rate * self.hop / 1000)

    def frames(self, samples: int) -> int:
        """The number of frames of a number of samples."""
        return samples // self.step if self.scale == "whisper" else max(0, 1 + (samples - self.width) // self.step)

    def __call__(self, waveform: Tensor) -> Tensor:
        """S, 16-bit samples -> S' F"""
        return self._whisper(waveform) if self.scale == "whisper" else self._kaldi(waveform)

    def _kaldi(self, waveform: Tensor) -> Tensor:
        frames = waveform.float().unfold(0, self.width, self.step)
        frames = frames - frames.mean(1, keepdim=True)
        frames = frames - EMPHASIS * torch.cat((frames[:, :1], frames[:, :-1]), 1)
        hann = torch.hann_window(self.width, periodic=False)
        size = 1 << (self.width - 1).bit_length()
        power = torch.fft.rfft(frames * hann**0.85, size).abs().square()  # S' size/2+1
        return (power @ self._filter_bank).clamp_min(torch.finfo(torch.float).eps).log()

    def _whisper(self, waveform: Tensor) -> Tensor:
        hann = torch.hann_window(self.width)
        spectrum = torch.stft(waveform.float() / 32768, self.width, self.step, window=hann, return_complex=True)
        power = spectrum[:, :-1].abs().square().T  # S' F; the last window extends beyond the end
        logs = (power @ self._filter_bank).clamp_min(1e-10).log10()
        return (torch.maximum(logs, logs.max() - 8) + 4) / 4

    @cached_property
    def _filter_bank(self) -> Tensor:
        """frequencies F"""
        if self.scale == "kaldi":
            size = 1 << (self.width - 1).bit_length()
            hertz = torch.arange(size // 2 + 1).double() * self.rate / size
            edges = torch.linspace(
                _kaldi_mel(MIN_FREQUENCY), _kaldi_mel(self.rate / 2), self.mels + 2, dtype=torch.double
            )
            weights = _triangles(1127 * (1 + hertz / 700).log(), edges)
            weights[-1] = 0.0  # the highest frequency belongs to no filter
            return weights.float()
        hertz = torch.linspace(0, self.rate / 2, self.width // 2 + 1, dtype=torch.double)
        steps = torch.linspace(0, _slaney_mel(self.rate / 2), self.mels + 2, dtype=torch.double)
        edges = torch.tensor([_slaney_hertz(step) for step in steps.tolist()], dtype=torch.double)
        return (_triangles(hertz, edges) * 2 / (edges[2:] - edges[:-2])).float()


def _triangles(frequencies: Tensor, edges: Tensor) -> Tensor:
    """Triangular filters between consecutive edges: P frequencies, F + 2 edges -> P F."""
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies[:, None] - left) / (centre - left)
    falling = (right - frequencies[:, None]) / (right - centre)
    return torch.minimum(rising, falling).clamp_min(0)


def _kaldi_mel(hertz: float) -> float:
    return 1127 * math.log1p(hertz / 700)


def _slaney_mel(hertz: float) -> float:
    """Linear up to 1,000 hertz, then 27 steps for each factor of 6.4."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _slaney_hertz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


MAX_TIME_SHARE = 0.2  # of an utterance that one time mask may cover


@dataclass(frozen=True)
class SpecAugment:
    """Normalisation per utterance, then random masks over time and frequency (Park et al. 2019)."""

    normalise: bool = True
    time_masks: NonNegative = 0
    time_width: Count = 40  # maximum frames of a time mask, and never more than a fifth of the utterance
    frequency_masks: NonNegative = 0
    frequency_width: Count = 15  # maximum bands of a frequency mask

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
