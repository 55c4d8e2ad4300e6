"""Sequence packing: several pairs in each row of a batch.

A packed batch always has the same shape and almost no padding, so on a GPU one CUDA graph serves every update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from transduce.flow import BOS, PAD, Batch, PackedLayout, Padded

TARGET_FILL = 0.99  # initial number of bins: total length / capacity / this; pairs that do not fit open further bins
SIMILAR_PAIRS = 64  # pairs of similar length among which the best for both sides of a bin are chosen
LENGTH_MULTIPLE = 16  # row lengths are multiples of this
# Maximum row length of the short-row attention kernel. Attention over rows of 64, forward and backward, took 66
# microseconds a layer where rows of 128 took 140 (16,384 tokens), but rows of 64 were filled to 87 %, of 128 to 95 %.
ROW_LENGTH = 128

Ragged = tuple[np.ndarray, np.ndarray]  # ids of several sequences end to end, and the length of each


@dataclass(frozen=True)
class Packing:
    """The shape of a packed batch."""

    rows: int  # B
    source: int  # S
    target: int  # T

    @classmethod
    def for_budget(cls, budget: int, lengths: np.ndarray) -> Packing | None:
        """The shape for batches of `budget` tokens, given packed lengths (n, 2); None: one row exceeds the budget.

        The side that is longer in total gets the maximum row length.
        """
        totals = lengths.sum(0)
        source, target = (
            LENGTH_MULTIPLE * math.ceil(ROW_LENGTH * side / totals.max() / LENGTH_MULTIPLE) for side in totals
        )
        rows = budget // (source + target)
        return cls(rows, source, target) if rows else None

    @property
    def slots(self) -> int:
        return self.rows * (self.source + self.target)

    @property
    def capacity(self) -> np.ndarray:
        """(2): source and target positions of a row."""
        return np.array([self.source, self.target])

    def fits(self, widths: np.ndarray) -> np.ndarray:
        """Which pairs of these widths (n, 2) fit into a row; the others go into padded batches."""
        return np.all(packed_lengths(widths) <= self.capacity, axis=1)

    def pack(self, sides: tuple[Ragged, Ragged], bins: np.ndarray) -> Batch:
        """Packs sources `x1 .. xm </s>` and targets `y1 .. yn </s>`, pair i into row bins[i]; `bins` is sorted."""
        (sources, source_lengths), (targets, target_lengths) = sides
        source = self._lay_out(sources, source_lengths, bins, self.source)
        labels = self._lay_out(targets, target_lengths, bins, self.target)
        assert labels.layout is not None
        segment_ids, positions = labels.layout.segment_ids, labels.layout.positions
        # Decoder inputs are the labels shifted right. Padding positions get the segment of the last pair, since
        # attention needs at least one visible position; no token of that pair attends to them.
        inputs = labels.values.roll(1, 1).masked_fill(positions == 0, BOS).masked_fill(~labels.mask, PAD)
        padded_segments = segment_ids.cummax(1).values
        target = Padded(inputs, labels.mask, PackedLayout(padded_segments, positions))
        return Batch(source, target, packed_labels=labels)

    def _lay_out(self, ids: np.ndarray, lengths: np.ndarray, bins: np.ndarray, width: int) -> Padded:
        """Sequences end to end in their rows."""
        begins = np.cumsum(lengths) - lengths
        first = np.searchsorted(bins, bins)  # of each pair: the first pair of its row
        pair = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(ids)) - begins[pair]
        slot = bins[pair] * width + (begins - begins[first])[pair] + position
        values, segment_ids, positions = (np.zeros(self.rows * width, np.int64) for _ in range(3))
        values[slot], segment_ids[slot], positions[slot] = ids, (np.arange(len(bins)) - first + 1)[pair], position
        tensors = [torch.from_numpy(part.reshape(self.rows, width)) for part in (values, segment_ids, positions)]
        return Padded(tensors[0], tensors[1] > 0, PackedLayout(*tensors[1:]))


def packed_lengths(widths: np.ndarray) -> np.ndarray:
    """Positions of both sides in a packed row, from slots in a padded batch: decoder inputs are one shorter."""
    return widths - np.array([0, 1])


def assign_bins(widths: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """A bin for each pair, counted from 0: in rounds, longest pairs first, to the bins with the most free space.

    Pairs of similar length are distributed so that both sides of a bin fill up equally. On 70,000 pairs of log-normal
    lengths (about 25 tokens, target within a quarter of the source) bins of 128 and 128 positions are filled to 95 %.
    """
    needed, bins, opened = packed_lengths(widths), np.zeros(len(widths), np.int64), 0
    left = np.argsort(-needed.max(1), kind="stable")
    while len(left):
        count = max(1, math.ceil((needed[left].sum(0) / capacity).max() / TARGET_FILL))
        free, missed = np.tile(capacity, (count, 1)), []
        for begin in range(0, len(left), count):
            pairs = left[begin : begin + count]
            candidates = np.argsort(-free.min(1), kind="stable")[: len(pairs)]
            strip = np.arange(len(pairs)) // SIMILAR_PAIRS
            pairs = pairs[np.lexsort((needed[pairs] @ [1, -1], strip))]
            candidates = candidates[np.lexsort((free[candidates] @ [1, -1], strip))]
            fits = (needed[pairs] <= free[candidates]).all(1)
            bins[pairs[fits]] = opened + candidates[fits]
            free[candidates[fits]] -= needed[pairs[fits]]
            missed.append(pairs[~fits])
        opened += count
        left = np.concatenate(missed)
        left = left[np.argsort(-needed[left].max(1), kind="stable")]
    return bins
