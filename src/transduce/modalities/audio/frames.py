"""Frames of several utterances in, one tensor out: brought to one level, hidden here and there, padded.

Files of frames in, their numbers out: one array a file, or one of many in a file of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transduce.errors import UnreadableError
from transduce.flow import Padded

SHARE = 0.2  # of an utterance that one mask may hide at most


@dataclass(frozen=True)
class SpecAugment:
    """How much of an utterance is hidden from whoever learns (SpecAugment, Park 2019), and how it is levelled."""

    normalise: bool
    time: int  # so many masks over frames
    time_width: int  # each of at most so many, and never more than a fifth
    bands: int
    band_width: int

    def __call__(self, frames: Tensor, draw: np.random.Generator | None) -> Tensor:
        """S F -> S F; without chance nothing is hidden."""
        if self.normalise:
            frames = (frames - frames.mean(0)) / frames.std(0, correction=0).clamp_min(1e-5)
        if draw is None or not (self.time or self.bands):
            return frames
        hidden = torch.zeros(frames.shape, dtype=torch.bool)
        for _ in range(self.time):
            begin, end = _span(draw, len(frames), min(self.time_width, int(SHARE * len(frames))))
            hidden[begin:end] = True
        for _ in range(self.bands):
            begin, end = _span(draw, frames.size(1), min(self.band_width, frames.size(1)))
            hidden[:, begin:end] = True
        return torch.where(hidden, frames.mean(), frames)


def _span(draw: np.random.Generator, room: int, longest: int) -> tuple[int, int]:
    width = int(draw.integers(0, longest + 1))
    begin = int(draw.integers(0, room - width + 1))
    return begin, begin + width


def pad_frames(rows: Sequence[Tensor]) -> Padded:
    """Each S F -> B S F"""
    lengths = torch.tensor([len(row) for row in rows])
    values = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return Padded(values, torch.arange(values.size(1)) < lengths[:, None])


def read_frames(named: str, width: int, most: int) -> np.ndarray:
    """S F of `file.npy`, or of `file.npz#17`: the frames from offsets[17] to offsets[18]."""
    file, mark, number = named.partition("#")
    if not Path(file).is_file():
        raise UnreadableError("no such file of frames", file)
    try:
        frames = _one_of(file, number) if mark else np.load(file, allow_pickle=False)
    except (ValueError, KeyError, IndexError, OSError, EOFError) as error:
        raise UnreadableError("not a readable file of frames", f"{named}: {error}") from None
    if not isinstance(frames, np.ndarray) or frames.ndim != 2 or frames.dtype.kind != "f":
        raise UnreadableError("not a table of frames", named)
    if frames.shape[1] != width:
        remedy = f"set data.sources.NAME.size: {frames.shape[1]}"
        raise UnreadableError("frames of another width", f"{named}: {frames.shape[1]}, not {width}", remedy)
    if not len(frames):
        raise UnreadableError("no frames", named)
    if len(frames) > most:
        raise UnreadableError("too many frames", f"{named}: {len(frames):,}, more than {most:,}")
    if not np.isfinite(frames).all():
        raise UnreadableError("frames with numbers that are none", named)
    return frames.astype(np.float32)


def stored_frame_width(named: str) -> int:
    """How many numbers a frame of this file has."""
    file, mark, number = named.partition("#")
    try:
        frames = _one_of(file, number) if mark else np.load(file, mmap_mode="r", allow_pickle=False)
        return int(frames.shape[1])
    except (ValueError, KeyError, IndexError, OSError, EOFError, AttributeError) as error:
        raise UnreadableError("not a readable file of frames", f"{named}: {error}") from None


def _one_of(file: str, number: str) -> np.ndarray:
    if not number.isdecimal():
        raise ValueError(f"#{number} is no number")
    frames, offsets = _opened(file, Path(file).stat().st_mtime_ns)
    place = int(number)
    if place + 1 >= len(offsets):
        raise IndexError(f"there are {len(offsets) - 1}, counted from 0")
    begin, end = int(offsets[place]), int(offsets[place + 1])
    if not 0 <= begin <= end <= len(frames):
        raise ValueError("offsets lead out of the frames")
    result: np.ndarray = frames[begin:end]
    return result


@lru_cache(maxsize=4)
def _opened(file: str, written: int) -> tuple[np.ndarray, np.ndarray]:
    """A file of many, unpacked once in a process."""
    with np.load(file, allow_pickle=False) as arrays:
        frames, offsets = arrays["frames"], arrays["offsets"]
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ValueError("offsets must be whole numbers")
    return frames, offsets


def write_frames(rows: Sequence[np.ndarray], path: Path) -> None:
    """Tables S F as one file: number 17 is then `path#17`."""
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    np.savez_compressed(path, frames=np.concatenate(rows), offsets=offsets)
