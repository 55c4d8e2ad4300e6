"""A waveform in, the logarithm of its energy in bands of pitch out, frame by frame: as Kaldi or as Whisper counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["kaldi", "whisper"]
EMPHASIS = 0.97  # of each sample, what the one before takes away
LOWEST = 20.0  # hertz: where Kaldi's bands begin


@dataclass(frozen=True)
class LogMelSpectrogram:
    """How sound is cut into frames and bands.

    kaldi: whole windows only, each without its mean, pre-emphasised, under Povey's window; triangles over 1127 ln(1 +
    f/700); natural logarithm of the power of 16-bit numbers. whisper: windows around every hop, Hann's window, Slaney's
    triangles of equal area, log10 within 8 of the loudest, (x + 4) / 4 (Radford 2022).
    """

    rate: int
    bands: int
    window: float  # milliseconds
    hop: float
    scale: Scale

    @property
    def width(self) -> int:
        """Samples of a window."""
        return int(self.rate * self.window / 1000)

    @property
    def step(self) -> int:
        return int(self.rate * self.hop / 1000)

    def frames(self, samples: int) -> int:
        """How many frames so many samples give."""
        return samples // self.step if self.scale == "whisper" else max(0, 1 + (samples - self.width) // self.step)

    def __call__(self, waveform: Tensor) -> Tensor:
        """S, numbers of 16 bits -> S' F"""
        return self._whisper(waveform) if self.scale == "whisper" else self._kaldi(waveform)

    def _kaldi(self, waveform: Tensor) -> Tensor:
        frames = waveform.float().unfold(0, self.width, self.step)
        frames = frames - frames.mean(1, keepdim=True)
        frames = frames - EMPHASIS * torch.cat((frames[:, :1], frames[:, :-1]), 1)
        hann = torch.hann_window(self.width, periodic=False)
        size = 1 << (self.width - 1).bit_length()
        power = torch.fft.rfft(frames * hann**0.85, size).abs().square()  # S' size/2+1
        return (power @ self._triangles).clamp_min(torch.finfo(torch.float).eps).log()

    def _whisper(self, waveform: Tensor) -> Tensor:
        hann = torch.hann_window(self.width)
        found = torch.stft(waveform.float() / 32768, self.width, self.step, window=hann, return_complex=True)
        power = found[:, :-1].abs().square().T  # S' F; the last window lies half beyond the end
        logs = (power @ self._triangles).clamp_min(1e-10).log10()
        return (torch.maximum(logs, logs.max() - 8) + 4) / 4

    @cached_property
    def _triangles(self) -> Tensor:
        """frequencies F"""
        if self.scale == "kaldi":
            size = 1 << (self.width - 1).bit_length()
            hertz = torch.arange(size // 2 + 1).double() * self.rate / size
            edges = torch.linspace(_kaldi_mel(LOWEST), _kaldi_mel(self.rate / 2), self.bands + 2, dtype=torch.double)
            weights = _triangles(1127 * (1 + hertz / 700).log(), edges)
            weights[-1] = 0.0  # the highest frequency belongs to no band
            return weights.float()
        hertz = torch.linspace(0, self.rate / 2, self.width // 2 + 1, dtype=torch.double)
        steps = torch.linspace(0, _slaney_mel(self.rate / 2), self.bands + 2, dtype=torch.double)
        edges = torch.tensor([_slaney_hertz(step) for step in steps.tolist()], dtype=torch.double)
        return (_triangles(hertz, edges) * 2 / (edges[2:] - edges[:-2])).float()


def _triangles(places: Tensor, edges: Tensor) -> Tensor:
    """Each band rises from one edge to the next and falls to the one after: P places, F + 2 edges -> P F."""
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (places[:, None] - left) / (middle - left)
    falling = (right - places[:, None]) / (right - middle)
    return torch.minimum(rising, falling).clamp_min(0)


def _kaldi_mel(hertz: float) -> float:
    return 1127 * math.log1p(hertz / 700)


def _slaney_mel(hertz: float) -> float:
    """Even up to 1,000 hertz, then 27 steps for each factor of 6.4."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _slaney_hertz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)
