"""Latency of simultaneous translation: average lagging, average proportion, differentiable average lagging.

A delay g(t) is the number of source tokens that had been read when output token t was written, from t = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def average_lagging(delays: Sequence[int], source_length: int) -> float:
    """AL = 1/tau sum_{t=1}^{tau} g(t) - (t - 1) / gamma, gamma = |y| / |x|, tau the first t with g(t) = |x|

    (Ma et al. 2019). Source tokens by which the output lags behind one that keeps pace with the source.
    """
    rate = len(delays) / source_length
    last = next((t for t, delay in enumerate(delays) if delay >= source_length), len(delays) - 1)
    return sum(delay - t / rate for t, delay in enumerate(delays[: last + 1])) / (last + 1)


def average_proportion(delays: Sequence[int], source_length: int) -> float:
    """AP = 1 / (|x| |y|) sum_t g(t) (Cho and Esipova 2016): the share of the source that the mean token has read"""
    return sum(delays) / (source_length * len(delays))


def differentiable_average_lagging(delays: Sequence[int], source_length: int) -> float:
    """DAL = 1/|y| sum_t g'(t) - (t - 1) / gamma, g'(t) = max(g(t), g'(t - 1) + 1 / gamma) (Cherry and Foster 2019)

    Every token takes the time 1 / gamma, so that tokens written at once after the end of the source count too.
    """
    pace, total, previous = source_length / len(delays), 0.0, 0.0
    for t, delay in enumerate(delays):
        previous = float(delay) if t == 0 else max(float(delay), previous + pace)
        total += previous - t * pace
    return total / len(delays)


LATENCIES: dict[str, Callable[[Sequence[int], int], float]] = {
    "average_lagging": average_lagging,
    "average_proportion": average_proportion,
    "differentiable_average_lagging": differentiable_average_lagging,
}


def mean_latencies(delays: Sequence[Sequence[int]], source_lengths: Sequence[int]) -> dict[str, float]:
    """The mean of each measure over all lines with an output."""
    lines = [(own, length) for own, length in zip(delays, source_lengths, strict=True) if own and length]
    return {
        name: float(np.mean([measure(own, length) for own, length in lines])) if lines else 0.0
        for name, measure in LATENCIES.items()
    }
