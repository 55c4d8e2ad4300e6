"""A waveform at one rate in, the same sound at another rate out: a sinc under a window, one filter a phase."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

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
