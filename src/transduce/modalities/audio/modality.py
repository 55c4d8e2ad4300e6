"""The names of sounds, or of frames made of them, in; frames in batches out."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from transduce.contracts import Count, Modality, VisualSource
from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.modalities.audio.files import ENDINGS, read_waveform, resample
from transduce.modalities.audio.frames import SpecAugment, pad_frames, read_frames, write_frames
from transduce.modalities.audio.spectrogram import LogMelSpectrogram, Scale

Number = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]


class Audio(Modality):
    """a waveform, as frames of log energies in bands of pitch"""

    endings = ENDINGS

    def __init__(
        self,
        *,
        rate: Count = 16_000,
        mels: Count = 80,
        window: Positive = 25.0,
        hop: Positive = 10.0,
        seconds: Positive = 30.0,
        scale: Scale = "kaldi",
        fill: bool = False,
        normalise: bool = True,
        speed: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
        time_masks: Number = 0,
        time_width: Count = 40,
        frequency_masks: Number = 0,
        frequency_width: Count = 15,
    ) -> None:
        """`fill`: silence up to `seconds`. `speed`: how much faster or slower a sound may be heard in training."""
        self._spectrum = LogMelSpectrogram(rate, mels, window, hop, scale)
        if self._spectrum.step < 1:
            raise InputError(f"a hop of {hop:g} ms is less than a sample", remedy="raise hop or rate")
        self._rate, self._seconds, self._fill, self._speed = rate, seconds, fill, speed
        self._masks = SpecAugment(normalise, time_masks, time_width, frequency_masks, frequency_width)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._spectrum.bands,)

    def read(self, named: str) -> np.ndarray:
        samples = read_waveform(named, self._rate, self._seconds)
        if not self.length(samples) or len(samples) <= self._spectrum.width // 2:
            raise UnreadableError("sound too short", f"{named}: {len(samples)} samples, less than one window")
        return samples

    def length(self, kept: np.ndarray) -> int:
        return self._spectrum.frames(max(len(kept), self._full) if self._fill else len(kept))

    def padded(self, kept: Sequence[np.ndarray], draws: Sequence[np.random.Generator] | None = None) -> Padded:
        chances = [None] * len(kept) if draws is None else draws
        return pad_frames([self._frames(one, draw) for one, draw in zip(kept, chances, strict=True)])

    def _frames(self, samples: np.ndarray, draw: np.random.Generator | None = None) -> Tensor:
        if draw is not None and self._speed:
            samples = self._at_speed(samples, draw)
        return self._masks(self._bands(samples), draw)

    def _bands(self, samples: np.ndarray) -> Tensor:
        if self._fill and len(samples) < self._full:
            samples = np.pad(samples, (0, self._full - len(samples)))
        return self._spectrum(torch.tensor(samples))

    def _at_speed(self, samples: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """One of five speeds, the middle one its own (Ko 2015): few, so that filters are made once."""
        faster = Fraction(1 + self._speed * (int(draw.integers(5)) - 2) / 2).limit_denominator(40)
        changed = resample(samples.astype(np.float32), faster.numerator, faster.denominator)
        return changed if self._spectrum.frames(len(changed)) else samples

    @property
    def _full(self) -> int:
        return int(self._seconds * self._rate)

    def label(self, kept: np.ndarray, grid: Sequence[int]) -> list[str]:
        return time_labels(self._lasts(kept), grid)

    def scene(self, kept: np.ndarray, grid: Sequence[int]) -> VisualSource:
        return spectrogram_image(self._bands(kept).numpy(), grid, self._lasts(kept))

    def _lasts(self, kept: np.ndarray) -> float:
        """Seconds that the frames stand for, a hop each."""
        return self.length(kept) * self._spectrum.step / self._rate


class AudioFeatures(Modality):
    """frames that were made before: a file.npy of each, or file.npz#17 of many"""

    endings = (".npy", ".npz")

    def __init__(
        self,
        *,
        size: Count = 13,
        rate: Positive = 100.0,
        seconds: Positive = 30.0,
        normalise: bool = True,
        time_masks: Number = 0,
        time_width: Count = 40,
        frequency_masks: Number = 0,
        frequency_width: Count = 3,
    ) -> None:
        """`size`: numbers of a frame. `rate`: frames a second."""
        self._size, self._rate, self._most = size, rate, int(seconds * rate)
        self._masks = SpecAugment(normalise, time_masks, time_width, frequency_masks, frequency_width)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._size,)

    def read(self, named: str) -> np.ndarray:
        return read_frames(named, self._size, self._most)

    def length(self, kept: np.ndarray) -> int:
        return len(kept)

    def padded(self, kept: Sequence[np.ndarray], draws: Sequence[np.random.Generator] | None = None) -> Padded:
        chances = [None] * len(kept) if draws is None else draws
        return pad_frames([self._masks(torch.tensor(one), draw) for one, draw in zip(kept, chances, strict=True)])

    def label(self, kept: np.ndarray, grid: Sequence[int]) -> list[str]:
        return time_labels(len(kept) / self._rate, grid)

    def scene(self, kept: np.ndarray, grid: Sequence[int]) -> VisualSource:
        levelled = SpecAugment(True, 0, 1, 0, 1)(torch.tensor(kept), None)
        return spectrogram_image(levelled.numpy(), grid, len(kept) / self._rate)


def time_labels(seconds: float, grid: Sequence[int]) -> list[str]:
    """Where each row of the memory begins."""
    rows = int(np.prod(grid))
    return [f"{row * seconds / rows:.2f}s" for row in range(rows)]


def spectrogram_image(frames: np.ndarray, grid: Sequence[int], seconds: float) -> VisualSource:
    """S F -> time from left to right, pitch from the bottom up, the loud dark."""
    low, high = np.percentile(frames, [1, 99])
    level = np.clip((frames - low) / max(float(high - low), 1e-9), 0, 1)
    grey = (255 * (1 - level)).astype(np.uint8).T[::-1]  # F S
    return VisualSource(np.repeat(grey[..., None], 3, 2), (1, int(np.prod(grid))), across="seconds", extent=seconds)


def extract_features(pairs: str | Path, folder: str | Path, **options: Any) -> Path:
    """FILE TAB TEXT in each line -> FOLDER/pairs.tsv and FOLDER/frames.npz; options are those of `Sound`."""
    pairs, folder = Path(pairs), Path(folder)
    sound = Audio(normalise=False, **options)
    rows: list[np.ndarray] = []
    lines: list[str] = []
    for number, line in enumerate(pairs.read_text(encoding="utf-8").splitlines(), 1):
        named, tab, text = line.partition("\t")
        try:
            if not tab:
                raise UnreadableError("missing column", "FILE TAB TEXT")
            kept = sound.read(str(pairs.parent / named))
        except UnreadableError as bad:
            raise InputError(bad.problem, where=f"{pairs}:{number}", remedy=bad.remedy) from None
        lines.append(f"frames.npz#{len(rows)}\t{text}\n")
        rows.append(sound.padded([kept]).values[0].numpy())
    if not rows:
        raise InputError("no lines", where=str(pairs), remedy="give lines: FILE TAB TEXT")
    folder.mkdir(parents=True, exist_ok=True)
    write_frames(rows, folder / "frames.npz")
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    return folder / "pairs.tsv"
