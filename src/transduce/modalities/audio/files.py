"""Audio files: waveforms, and files of precomputed frames.

A waveform is read as one channel at one sampling rate in 16 bits: channels are averaged, and values beyond full scale
are clipped. A recording longer than the limit is refused before it is decoded; so is a file with fewer samples than its
header states, and one with non-finite values.

Frames are read from a .npy file with one array, or from a .npz file with many (`FILE#17`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.errors import InputError, UnreadableError
from transduce.storage import open_atomic

ZERO_CROSSINGS = 16  # of the sinc on each side: more give a steeper filter
CUTOFF = 0.95  # of the low-pass filter, as a share of half the lower rate
EXTENSIONS = (".wav", ".flac", ".ogg")
FRAME_EXTENSIONS = (".npy", ".npz")
FULL_SCALE = 32768  # the 16-bit value of amplitude 1


def resample(samples: np.ndarray, rate: int, new: int) -> np.ndarray:
    """S -> S * new / rate, rounded up: y_m = sum_n x_n h(m rate / new - n), with a windowed sinc h."""
    common = gcd(rate, new)
    down, up = rate // common, new // common
    if down == up or not len(samples):
        return samples
    filters, half_width = _filters(down, up)
    count = ceil(len(samples) * up / down)
    steps = ceil(count / up)  # each gives one sample of every phase
    right = max(0, (steps - 1) * down + filters.size(-1) - half_width - len(samples))
    padded = F.pad(torch.from_numpy(np.ascontiguousarray(samples, np.float32))[None, None], (half_width, right))
    phases = F.conv1d(padded, filters, stride=down)[0, :, :steps]  # up steps
    result: np.ndarray = phases.T.flatten()[:count].numpy()
    return result


@lru_cache(maxsize=64)
def _filters(down: int, up: int) -> tuple[Tensor, int]:
    """up 1 K: the filter of each phase; and the number of its taps to the left of the centre."""
    cutoff = CUTOFF * min(1.0, up / down)
    half_width = ceil(ZERO_CROSSINGS / cutoff)
    taps = torch.arange(-half_width, half_width + down + 1, dtype=torch.double)
    phase = torch.arange(up, dtype=torch.double)[:, None] * down / up
    offset = phase - taps  # up K
    window = torch.cos(offset / half_width * torch.pi / 2).square()
    window = window.where(offset.abs() < half_width, torch.zeros(()).double())
    filters = cutoff * torch.sinc(cutoff * offset) * window
    # Normalised, so that every phase has unit gain at frequency 0.
    return (filters / filters.sum(1, keepdim=True)).float()[:, None], half_width


def soundfile() -> Any:
    """The soundfile library, or an error that says how to install it."""
    try:
        import soundfile as library
    except (ImportError, OSError):  # OSError: the package is installed, but libsndfile is missing
        raise InputError("audio needs soundfile", remedy="pip install 'transduce[sound]'") from None
    return library


def duration(path: str | Path) -> float:
    """Seconds of an audio file, according to its header; 0 where it cannot be read."""
    try:
        return float(soundfile().info(str(path)).duration)
    except (RuntimeError, OSError, TypeError):  # of libsndfile: reading the file says what is wrong with it
        return 0.0


def read_waveform(path: str | Path, rate: int, seconds: float) -> np.ndarray:
    """S: 16-bit samples at `rate` samples per second."""
    library = soundfile()
    if not Path(path).is_file():
        raise UnreadableError("no such audio file", str(path))
    try:
        with library.SoundFile(str(path)) as opened:
            stated, file_rate = opened.frames, opened.samplerate
            _check_header(path, stated, file_rate, seconds, opened.extra_info)
            samples = opened.read(dtype="float32", always_2d=True)  # S C
    except UnreadableError:
        raise
    except Exception as error:  # decoders raise exceptions of any type
        raise UnreadableError("not a readable audio file", f"{path}: {error}") from None
    if len(samples) != stated:
        raise UnreadableError("audio shorter than its header says", f"{path}: {len(samples):,} of {stated:,} samples")
    if not np.isfinite(samples).all():
        raise UnreadableError("audio with non-finite samples", str(path))
    return to_int16(resample(samples.mean(1), file_rate, rate))


def _check_header(path: str | Path, stated: int, rate: int, seconds: float, extra_info: str) -> None:
    if stated == 0:
        raise UnreadableError("empty audio file", str(path))
    if stated > seconds * rate:
        remedy = "cut it into pieces, or raise the limit: data.sources.NAME.seconds"
        raise UnreadableError("audio too long", f"{path}: {stated / rate:.1f} of {seconds:g} seconds", remedy)
    # libsndfile takes the length of a truncated WAV file from its size, and reports that only here.
    if "should be" in extra_info:
        raise UnreadableError("audio shorter than its header says", str(path))


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Amplitudes from -1 to 1 -> 16-bit integers."""
    return np.clip(np.round(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def read_frames(source: str, width: int, max_frames: int) -> np.ndarray:
    """S F of `file.npy`, or of `file.npz#17`: the frames from offsets[17] to offsets[18]."""
    file, mark, number = source.partition("#")
    if not Path(file).is_file():
        raise UnreadableError("no such file of frames", file)
    try:
        frames = _item_frames(file, number) if mark else np.load(file, allow_pickle=False)
    except Exception as error:  # of zipfile, zlib and numpy
        raise UnreadableError("not a readable file of frames", f"{source}: {error}") from None
    if not isinstance(frames, np.ndarray) or frames.ndim != 2 or frames.dtype.kind != "f":
        raise UnreadableError("not a table of frames", source)
    if frames.shape[1] != width:
        remedy = f"set data.sources.NAME.size: {frames.shape[1]}"
        raise UnreadableError("frames of another width", f"{source}: {frames.shape[1]}, not {width}", remedy)
    if not len(frames):
        raise UnreadableError("no frames", source)
    if len(frames) > max_frames:
        raise UnreadableError("too many frames", f"{source}: {len(frames):,}, more than {max_frames:,}")
    if not np.isfinite(frames).all():
        raise UnreadableError("frames with non-finite values", source)
    return frames.astype(np.float32)


def stored_frame_width(source: str) -> int:
    """The number of values per frame in a file."""
    file, mark, number = source.partition("#")
    try:
        frames = _item_frames(file, number) if mark else np.load(file, mmap_mode="r", allow_pickle=False)
        return int(frames.shape[1])
    except Exception as error:  # of zipfile, zlib and numpy
        raise UnreadableError("not a readable file of frames", f"{source}: {error}") from None


def _item_frames(file: str, number: str) -> np.ndarray:
    if not number.isdecimal():
        raise ValueError(f"#{number} is no number")
    frames, offsets = _load_archive(file, Path(file).stat().st_mtime_ns)
    item = int(number)
    if item + 1 >= len(offsets):
        raise IndexError(f"there are {len(offsets) - 1}, counted from 0")
    begin, end = int(offsets[item]), int(offsets[item + 1])
    if not 0 <= begin <= end <= len(frames):
        raise ValueError("offsets beyond the frames")
    result: np.ndarray = frames[begin:end]
    return result


@lru_cache(maxsize=4)
def _load_archive(file: str, modified: int) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of a .npz file, decompressed once per process."""
    with np.load(file, allow_pickle=False) as arrays:
        frames, offsets = arrays["frames"], arrays["offsets"]
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ValueError("offsets must be integers")
    return frames, offsets


def write_frames(items: Sequence[np.ndarray], path: Path) -> None:
    """Several tables S F in one file: item 17 is then `path#17`."""
    offsets = np.cumsum([0, *(len(item) for item in items)], dtype=np.int64)
    with open_atomic(path) as file:
        np.savez_compressed(file, frames=np.concatenate(items), offsets=offsets)
