"""A sound file in, its waveform out: one channel, at one rate, in 16 bits; what cannot be trusted is refused by name.

The rules: channels are averaged; numbers beyond full scale are cut off; a sound longer than the limit is refused before
it is decoded; so is a file with fewer samples than its header tells of, and one with numbers that are none.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.errors import InputError, UnreadableError

ZEROS = 16  # of the sinc on each side: more, a sharper edge
EDGE = 0.95  # where the filter begins to cut, as a share of half the lower rate


def resample(samples: np.ndarray, rate: int, new: int) -> np.ndarray:
    """S -> S * new / rate, rounded up: y_m = sum_n x_n h(m rate / new - n)."""
    common = gcd(rate, new)
    down, up = rate // common, new // common
    if down == up or not len(samples):
        return samples
    filters, reach = _filters(down, up)
    count = ceil(len(samples) * up / down)
    steps = ceil(count / up)  # each gives one number of every phase
    right = max(0, (steps - 1) * down + filters.size(-1) - reach - len(samples))
    around = F.pad(torch.from_numpy(np.ascontiguousarray(samples, np.float32))[None, None], (reach, right))
    phases = F.conv1d(around, filters, stride=down)[0, :, :steps]  # up steps
    result: np.ndarray = phases.T.flatten()[:count].numpy()
    return result


@lru_cache(maxsize=64)
def _filters(down: int, up: int) -> tuple[Tensor, int]:
    """up 1 K: for each phase, h at the places of its neighbours; and how many of them lie on the left."""
    cut = EDGE * min(1.0, up / down)
    reach = ceil(ZEROS / cut)
    places = torch.arange(-reach, reach + down + 1, dtype=torch.double)
    phase = torch.arange(up, dtype=torch.double)[:, None] * down / up
    apart = phase - places  # up K
    window = torch.cos(apart / reach * torch.pi / 2).square().where(apart.abs() < reach, torch.zeros(()).double())
    filters = cut * torch.sinc(cut * apart) * window
    # Every phase lets what does not change through as it is.
    return (filters / filters.sum(1, keepdim=True)).float()[:, None], reach


ENDINGS = (".wav", ".flac", ".ogg")
FULL = 32768  # what stands for 1 in 16 bits, as in the files themselves


def soundfile() -> Any:
    """The library, and a word of help where it is missing."""
    try:
        import soundfile as library
    except (ImportError, OSError):  # the second: it is there, and what it wraps is not
        raise InputError("sounds need soundfile", remedy="pip install 'transduce[sound]'") from None
    return library


def read_waveform(path: str | Path, rate: int, seconds: float) -> np.ndarray:
    """S: numbers of 16 bits, so many a second."""
    library = soundfile()
    if not Path(path).is_file():
        raise UnreadableError("no such sound", str(path))
    try:
        with library.SoundFile(str(path)) as opened:
            told, own = opened.frames, opened.samplerate
            _check_header(path, told, own, seconds, opened.extra_info)
            samples = opened.read(dtype="float32", always_2d=True)  # S C
    except UnreadableError:
        raise
    except Exception as error:  # the library raises whatever a format's decoder raises
        raise UnreadableError("not a readable sound", f"{path}: {error}") from None
    if len(samples) != told:
        raise UnreadableError("sound shorter than its header says", f"{path}: {len(samples):,} of {told:,} samples")
    if not np.isfinite(samples).all():
        raise UnreadableError("sound with numbers that are none", str(path))
    return to_int16(resample(samples.mean(1), own, rate))


def _check_header(path: str | Path, told: int, rate: int, seconds: float, more: str) -> None:
    if told == 0:
        raise UnreadableError("empty sound", str(path))
    if told > seconds * rate:
        remedy = "cut it into pieces, or raise the limit: data.sources.NAME.seconds"
        raise UnreadableError("sound too long", f"{path}: {told / rate:.1f} of {seconds:g} seconds", remedy)
    # libsndfile takes the length of a cut-off WAV file from its size, and only says so here.
    if "should be" in more:
        raise UnreadableError("sound shorter than its header says", str(path))


def to_int16(samples: np.ndarray) -> np.ndarray:
    """-1 to 1 -> whole numbers."""
    return np.clip(np.round(samples * FULL), -FULL, FULL - 1).astype(np.int16)
