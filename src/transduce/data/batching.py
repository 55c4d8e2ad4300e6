"""Batches of a store by data position: the plan of an epoch, packing, collation. Resuming seeks, it does not replay.

The batches of an epoch are a pure function of the seed, the epoch and the lengths, so a position is two numbers and
there is no other state.

A bucket is a contiguous part of a random permutation of the rows, which is computed, not stored. Only the buckets in
use are in memory; of the others the plan knows where they begin and how many batches they have.

Padding has two sides: a batch is as wide as its longest source and its longest target. Sorting by one side leaves the
other ragged. So a bucket is sorted by the longer side and cut into strips of two or three batches; inside a strip rows
are sorted by the difference of the two sides, ascending and descending in turn, which keeps both sides of a batch
similar. On 20,000 pairs of log-normal lengths (about 25 tokens, target within a quarter of the source) in batches of
4,096 tokens this pads 9 %, while sorting by source, then target, pads 20 %. Larger batches, small buckets and little
data pad more.

Packed batches (several pairs in a row) always have the same shape and almost no padding, so on a GPU one CUDA graph
serves every update. They are not sorted: the pairs of a bucket are assigned to bins (rows of a packed batch), and a
batch is a fixed number of bins. Pairs too long for a bin go into padded batches.
"""

from __future__ import annotations

import math
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Protocol, Self

import numpy as np
import torch

from transduce.data.annotations import ALIGNMENT, token_alignment
from transduce.data.readers.corpus import gold_similarity
from transduce.data.row_selection import CHUNK, CorpusMixture, RandomPermutation, RowSubset, SeededRandom, corpus_sizes
from transduce.data.store import Store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SIMILARITY, Batch, PackedLayout, Padded
from transduce.modalities.sources import ItemStore
from transduce.recipe import CurriculumRecipe

TARGET_FILL = 0.99  # initial number of bins: total length / capacity / this; pairs that do not fit open further bins
SIMILAR_PAIRS = 64  # pairs of similar length among which the best for both sides of a bin are chosen
LENGTH_MULTIPLE = 16  # row lengths are multiples of this
# Maximum row length of the short-row attention kernel. Attention over rows of 64, forward and backward, took 66
# microseconds a layer where rows of 128 took 140 (16,384 tokens), but rows of 64 were filled to 87 %, of 128 to 95 %.
ROW_LENGTH = 128

Ragged = tuple[np.ndarray, np.ndarray]  # ids of several sequences end to end, and the length of each
STRIP = 0.25  # batches in a strip, as a share of the square root of the batches in the bucket
CACHED_BUCKETS = 4  # readers in several threads are never far apart
SIDES = ("source", "target")


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


class IndexMap(Protocol):
    """A mapping from the integers below its length to integers; an array is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class PlannedBatch:
    """The rows of a batch."""

    rows: np.ndarray
    bins: np.ndarray | None = None  # the bin of each row in a packed batch, ascending; None: the batch is padded


@dataclass(frozen=True)
class _Bucket:
    """The batches of a bucket, in random order, as spans of its rows."""

    rows: np.ndarray
    bins: np.ndarray  # of each row; -1: its batch is not packed
    begins: np.ndarray
    ends: np.ndarray
    slots: int
    tokens: int

    def batch(self, index: int) -> PlannedBatch:
        span = slice(self.begins[index], self.ends[index])
        return PlannedBatch(self.rows[span], self.bins[span] if self.bins[span.start] >= 0 else None)


class EpochPlan:
    """The batches of an epoch.

    `widths` (n, 2) gives the slots of source and target of a row, special tokens included; `order` gives the row at
    each position of the epoch, before buckets are sorted. `budget` is the number of slots per batch.
    """

    def __init__(
        self,
        widths: IndexMap,
        order: IndexMap,
        budget: int,
        bucket_batches: int,
        rng: SeededRandom,
        packing: Packing | None = None,
    ) -> None:
        self._widths, self._order, self._budget, self._packing = widths, order, budget, packing
        # A short first batch shifts all others; without it, data smaller than a bucket would form the same batches in
        # every epoch.
        self._short, self._seed = rng.below(budget), rng.below(2**63)
        self._edges = self._bucket_edges(bucket_batches * budget)
        self.bucket = lru_cache(CACHED_BUCKETS)(self._make_bucket)
        counts, slots, tokens = [], 0, 0
        for number in range(len(self._edges) - 1):
            bucket = self._make_bucket(number)
            counts.append(len(bucket.begins))
            slots, tokens = slots + bucket.slots, tokens + bucket.tokens
        self._ends = np.cumsum(counts)
        self.padding = 1 - tokens / slots  # share of the slots without a token

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, index: int) -> PlannedBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of an epoch of {len(self)}")
        number = int(np.searchsorted(self._ends, index, "right"))
        return self.bucket(number).batch(index - (int(self._ends[number - 1]) if number else 0))

    def _bucket_edges(self, capacity: int) -> list[int]:
        """The first position of each bucket of about `capacity` slots, and the end of the last bucket."""
        edges, before, last = [], 0, -1
        for begin in range(0, len(self._order), CHUNK):
            rows = self._order[np.arange(begin, min(begin + CHUNK, len(self._order)))]
            sizes = self._widths[rows].sum(1, dtype=np.int64)
            filled = before + np.cumsum(sizes)
            buckets = (filled - sizes) // capacity
            edges += (begin + np.flatnonzero(np.diff(buckets, prepend=last))).tolist()
            before, last = int(filled[-1]), int(buckets[-1])
        return [*edges, len(self._order)]

    def _make_bucket(self, number: int) -> _Bucket:
        rows = self._order[np.arange(*self._edges[number : number + 2])]
        widths = self._widths[rows]
        short = np.zeros(len(rows), bool) if self._packing is None else self._packing.fits(widths)
        rng = SeededRandom("batches", self._seed, number)
        packed = _empty_bucket()
        if self._packing is not None:
            packed = _packed_bucket(rows[short], widths[short], self._packing, rng)
        padded = self._padded_bucket(rows[~short])
        begins = np.concatenate((packed.begins, len(packed.rows) + padded.begins))
        ends = np.concatenate((packed.ends, len(packed.rows) + padded.ends))
        order = rng.permutation(len(begins))
        return _Bucket(
            np.concatenate((packed.rows, padded.rows)),
            np.concatenate((packed.bins, padded.bins)),
            begins[order],
            ends[order],
            packed.slots + padded.slots,
            packed.tokens + padded.tokens,
        )

    def _padded_bucket(self, rows: np.ndarray) -> _Bucket:
        """Batches of rows of similar lengths."""
        if not len(rows):
            return _empty_bucket()
        rows = _sort(rows, self._widths, self._budget)
        widths = self._widths[rows]
        filled = np.cumsum(widths.sum(1, dtype=np.int64))
        head = int(np.searchsorted(filled, self._short))
        begins = np.concatenate(
            (batch_starts(widths[:head], self._budget), head + batch_starts(widths[head:], self._budget))
        )
        ends = np.append(begins[1:], len(rows))
        widest = np.maximum.reduceat(widths, begins, axis=0).sum(1, dtype=np.int64)
        slots = int((widest * (ends - begins)).sum())
        return _Bucket(rows, np.full(len(rows), -1), begins, ends, slots, int(filled[-1]))


def _empty_bucket() -> _Bucket:
    none = np.zeros(0, np.int64)
    return _Bucket(none, none, none, none, 0, 0)


def _packed_bucket(rows: np.ndarray, widths: np.ndarray, packing: Packing, rng: SeededRandom) -> _Bucket:
    """Bins in random order, `packing.rows` to a batch."""
    if not len(rows):
        return _empty_bucket()
    bins = assign_bins(widths, packing.capacity)
    bins = rng.permutation(int(bins.max()) + 1)[bins]
    order = np.argsort(bins, kind="stable")
    batches, bins = np.divmod(bins[order], packing.rows)
    begins = np.flatnonzero(np.diff(batches, prepend=-1))
    ends = np.append(begins[1:], len(rows))
    return _Bucket(rows[order], bins, begins, ends, len(begins) * packing.slots, int(packed_lengths(widths).sum()))


def _sort(rows: np.ndarray, widths: IndexMap, budget: int) -> np.ndarray:
    """The rows of a bucket by strip of the longer side, then by difference; ties keep their random order."""
    source, target = widths[rows].T.astype(np.int64)
    by_length = np.lexsort((source + target, np.maximum(source, target)))
    rows, source, target = rows[by_length], source[by_length], target[by_length]
    filled = np.cumsum(source + target) / budget  # in batches
    strip = STRIP * math.sqrt(filled[-1])
    if strip < 2:
        return rows  # too few batches to balance both sides
    strips = filled // strip
    difference = np.where(strips % 2 == 0, source - target, target - source)
    return rows[np.lexsort((difference, strips))]


def batch_starts(widths: np.ndarray, budget: int) -> np.ndarray:
    """The first row of each batch when rows fill batches in this order: count * (widest source + target) <= budget.

    A row that exceeds the budget alone is a batch of its own.
    """
    starts = []
    begin, guess = 0, 64
    while begin < len(widths):
        window = widths[begin : begin + guess]
        slots = np.maximum.accumulate(window, 0).sum(1, dtype=np.int64) * np.arange(1, len(window) + 1)
        fitting = int(np.searchsorted(slots, budget, "right"))
        if fitting == len(window) and begin + guess < len(widths):
            guess *= 2
            continue
        starts.append(begin)
        begin += max(fitting, 1)
        guess = 2 * fitting + 8
    return np.array(starts, np.int64)


@dataclass(frozen=True)
class DataPosition:
    """The position of training in the data: the next batch."""

    epoch: int = 0
    index: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(int(content["epoch"]), int(content["index"]))


class Batches:
    """Endless batches of some rows of a store, epoch after epoch."""

    def __init__(
        self,
        store: Store,
        indices: RowSubset | np.ndarray,
        *,
        batch_tokens: int,
        bucket_batches: int,
        seed: int,
        weights: Sequence[float] | None = None,
        dropout: tuple[float, float] = (0.0, 0.0),  # BPE dropout of source and target
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
        packing: Packing | None = None,  # None: one pair per row
        curriculum: CurriculumRecipe | None = None,
    ) -> None:
        if len(indices) == 0:
            raise InputError("no pairs to form batches of")
        if any(dropout) and tokenizers is None:
            raise ValueError("BPE dropout needs the tokenizers")
        if packing is not None and (any(dropout) or store.sourceless or store.items is not None):
            raise ValueError("only text pairs of known lengths can be packed")
        self.store, self.indices = store, indices if isinstance(indices, RowSubset) else np.sort(np.asarray(indices))
        self._budget, self._bucket_batches, self._seed = batch_tokens, bucket_batches, seed
        self._weights = None if weights is None or set(weights) == {1.0} else tuple(weights)
        self._dropout, self._tokenizers, self._packing = dropout, tokenizers, packing
        self._curriculum = curriculum
        self._plans: dict[int, EpochPlan] = {}
        self._lock = threading.Lock()  # batches are prefetched in another thread

    def plan(self, epoch: int) -> EpochPlan:
        with self._lock:
            if epoch not in self._plans:
                cached = {number: plan for number, plan in self._plans.items() if number == epoch - 1}
                self._plans = {**cached, epoch: self._make_plan(epoch)}
            return self._plans[epoch]

    def _make_plan(self, epoch: int) -> EpochPlan:
        rng, widths = SeededRandom("order", self._seed, epoch), _PaddedWidths(self.store, self.indices)
        used = self._used(epoch)
        order: IndexMap
        if self._weights is None:
            order = RandomPermutation(len(widths) if used is None else len(used), rng)
        else:
            mixture = self._mixture(self._weights, epoch, self.indices if used is None else self.indices[used])
            order = _Composition(RandomPermutation(len(mixture), rng), mixture)
        order = order if used is None else _Composition(order, used)
        return EpochPlan(widths, order, self._budget, self._bucket_batches, rng, self._packing)

    def _used(self, epoch: int) -> np.ndarray | None:
        """The places in `indices` of the pairs that the curriculum has in this epoch; None: all."""
        if self._curriculum is None or self._curriculum.share(epoch) == 1:
            return None
        count = math.ceil(self._curriculum.share(epoch) * len(self.indices))
        return np.sort(self._by_score[:count])

    @cached_property
    def _by_score(self) -> np.ndarray:
        """The places in `indices`, those with the highest scores first; equal ones keep their order."""
        assert self._curriculum is not None
        return np.argsort(-self.store.numbers(self._curriculum.column, iter(self.indices)), kind="stable")

    def _mixture(self, weights: Sequence[float], epoch: int, rows: RowSubset | np.ndarray) -> CorpusMixture:
        last = int(self.store.corpus_of[self.indices[len(self.indices) - 1]])
        if last >= len(weights):
            raise InputError(f"{len(weights)} mixing weights for {last + 1} corpora")
        sizes = corpus_sizes(rows, self.store.corpus_of, len(weights))
        return CorpusMixture(sizes, weights, SeededRandom("mixture", self._seed, epoch))

    def at(self, position: DataPosition) -> Batch:
        planned = self.plan(position.epoch).batch(position.index)
        rows = self.indices[planned.rows]
        target = self._side(1, rows, position.epoch)
        if planned.bins is not None and self._packing is not None:
            source = self._side(0, rows, position.epoch)
            return self._packing.pack((source.with_eos(), target.with_eos()), planned.bins)
        if self.store.items is not None:
            rngs = [SeededRandom("change", self._seed, position.epoch, int(row)).generator() for row in rows]
            return _modality_batch(self.store.items, target, rows.tolist(), rngs)
        return _batch(None if self.store.sourceless else self._side(0, rows, position.epoch), target, rows.tolist())

    def after(self, position: DataPosition) -> DataPosition:
        if position.index + 1 < self.batches_in(position.epoch):
            return DataPosition(position.epoch, position.index + 1)
        return DataPosition(position.epoch + 1, 0)

    def batches_in(self, epoch: int) -> int:
        return len(self.plan(epoch))

    def padding(self, epoch: int) -> float:
        """Share of the slots of an epoch without a token."""
        return self.plan(epoch).padding

    def _side(self, side: int, rows: np.ndarray, epoch: int) -> _Ragged:
        rate = self._dropout[side]
        if not rate or self._tokenizers is None:
            return _Ragged(*self.store.token_ids(SIDES[side], rows))
        encoded = []
        for row in rows.tolist():
            rng = random.Random(f"{self._seed} {epoch} {row} {side}")
            text = self.store.text(SIDES[side], row)
            tokenizer = self._tokenizers[side]
            encoded.append([*tokenizer.prefix, *tokenizer.encode_with_dropout(text, rate, rng, parts=side == 0)])
        return _Ragged.of(encoded)


class _PaddedWidths:
    """Slots of both sides of the chosen rows of a store, special tokens included."""

    def __init__(self, store: Store, indices: RowSubset | np.ndarray) -> None:
        self._store, self._indices = store, indices
        specials = [0 if store.sourceless or store.items is not None else 1, 2]  # </s>; <s> and </s>
        self._specials = np.array(specials, np.int32)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        widths: np.ndarray = self._store.lengths[self._indices[indices]] + self._specials
        return widths


@dataclass(frozen=True)
class _Composition:
    """The composition of two index maps."""

    first: IndexMap
    second: IndexMap

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return self.second[self.first[indices]]


@dataclass(frozen=True)
class _Ragged:
    """Several sequences end to end."""

    ids: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        lengths = np.array([len(row) for row in rows], np.int64)
        return cls(np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum())), lengths)

    def with_eos(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths with </s> appended to each sequence."""
        return np.insert(self.ids.astype(np.int64), np.cumsum(self.lengths), EOS), self.lengths + 1

    def padded(self, bos: int) -> Padded:
        """Padded rows with `bos` (0 or 1) <s> before and one </s> after each sequence."""
        ends = self.lengths + bos
        columns = np.arange(int(ends.max(initial=0)) + 1 if len(ends) else 0)
        values = np.full((len(ends), len(columns)), PAD, np.int64)  # B S
        values[(columns >= bos) & (columns < ends[:, None])] = self.ids
        values[:, :bos] = BOS
        values[np.arange(len(ends)), ends] = EOS
        return Padded(torch.from_numpy(values), torch.from_numpy(columns <= ends[:, None]))


def _batch(source: _Ragged | None, target: _Ragged | None, rows: Sequence[int]) -> Batch:
    sides = source.padded(0) if source is not None else None, target.padded(1) if target is not None else None
    return Batch(*sides, rows=tuple(rows))


def gather(store: Store, rows: np.ndarray | Sequence[int]) -> Batch:
    """These pairs of a store as one batch."""
    numbers = np.asarray(rows, np.int64)
    target = _Ragged(*store.token_ids("target", numbers))
    if store.items is not None:
        return _modality_batch(store.items, target, numbers.tolist())
    source = None if store.sourceless else _Ragged(*store.token_ids("source", numbers))
    return _batch(source, target, numbers.tolist())


def _modality_batch(
    items: ItemStore, target: _Ragged, rows: list[int], rngs: Sequence[np.random.Generator] | None = None
) -> Batch:
    return items.source.add_to(_batch(None, target, rows), items.items(rows), rngs)


def collate(pairs: Sequence[tuple[Sequence[int] | None, Sequence[int] | None]], rows: Sequence[int]) -> Batch:
    """Pairs of ids as one batch; without sources or targets where the pairs have none."""
    given = [source for source, _ in pairs if source is not None]
    sources = _Ragged.of(given) if len(given) == len(pairs) else None
    targets = [target for _, target in pairs if target is not None]
    if targets and len(targets) < len(pairs):
        raise ValueError("some pairs of a batch have a target, some have none")
    return _batch(sources, _Ragged.of(targets) if targets else None, rows)


def batch_by_length(lengths: np.ndarray | Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers in batches of similar length within a budget of slots, longest first: memory runs out early or never.

    `lengths` is (n,), or (n, 2) for both sides; the caller decides whether they include special tokens.
    """
    widths = np.asarray(lengths, np.int64)
    widths = widths[:, None] if widths.ndim == 1 else widths
    if len(widths) == 0:
        return []
    order = np.lexsort((np.arange(len(widths)), -widths.sum(1), -widths.max(1)))
    return [part.tolist() for part in np.split(order, batch_starts(widths[order], budget)[1:])]


class TransformedBatches(ABC):
    """Batches in the order of others, each of them transformed."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    @abstractmethod
    def at(self, position: DataPosition) -> Batch: ...

    def after(self, position: DataPosition) -> DataPosition:
        return self.batches.after(position)

    def batches_in(self, epoch: int) -> int:
        return self.batches.batches_in(epoch)

    def padding(self, epoch: int) -> float:
        return self.batches.padding(epoch)


class GradedBatches(TransformedBatches):
    """Batches with the gold similarities of their pairs."""

    def at(self, position: DataPosition) -> Batch:
        return with_similarities(self.batches.at(position), self.batches.store)


def with_similarities(batch: Batch, store: Store) -> Batch:
    """The batch with the gold similarity of each pair in `extra["similarity"]` (B 1 1)."""
    found = []
    for example in map(store.example, batch.rows):
        if (gold := gold_similarity(example)) is None:
            raise InputError(
                "this pair has no gold similarity",
                where=f"{example.file}:{example.line}",
                remedy="write: sentence TAB sentence TAB similarity; or set training.objective.kind: contrastive",
            )
        found.append(gold)
    similarities = Padded(torch.tensor(found).view(-1, 1, 1), torch.ones(len(found), 1, dtype=torch.bool))
    return replace(batch, extra={**batch.extra, SIMILARITY: similarities})


class AlignedBatches(TransformedBatches):
    """Batches whose `extra["alignment"]` holds the alignment links of their tokens (B M 2)."""

    def __init__(self, batches: Batches, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
        super().__init__(batches)
        self.tokenizers = tokenizers

    def at(self, position: DataPosition) -> Batch:
        batch = self.batches.at(position)
        examples = [self.batches.store.example(row) for row in batch.rows]
        rows = [
            token_alignment(one.extra.get(ALIGNMENT, ""), one.source, one.target or "", self.tokenizers)
            for one in examples
        ]
        counts, max_count = torch.tensor([len(row) for row in rows]), max(map(len, rows))
        values = torch.zeros(len(rows), max_count, 2, dtype=torch.long)  # B M 2
        for number, row in enumerate(rows):
            values[number, : len(row)] = torch.tensor(row, dtype=torch.long).view(-1, 2)
        links = Padded(values, torch.arange(max_count) < counts[:, None])
        return replace(batch, extra={**batch.extra, ALIGNMENT: links})
