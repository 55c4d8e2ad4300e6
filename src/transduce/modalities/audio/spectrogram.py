"""Log-mel spectrograms, compatible with Kaldi or Whisper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

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

    rate: int
    bands: int
    window: float  # milliseconds
    hop: float
    scale: Scale

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
                _kaldi_mel(MIN_FREQUENCY), _kaldi_mel(self.rate / 2), self.bands + 2, dtype=torch.double
            )
            weights = _triangles(1127 * (1 + hertz / 700).log(), edges)
            weights[-1] = 0.0  # the highest frequency belongs to no filter
            return weights.float()
        hertz = torch.linspace(0, self.rate / 2, self.width // 2 + 1, dtype=torch.double)
        steps = torch.linspace(0, _slaney_mel(self.rate / 2), self.bands + 2, dtype=torch.double)
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
