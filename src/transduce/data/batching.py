"""Batches of a store by data position: resuming seeks, it does not replay.

The batches of an epoch are a pure function of the seed, the epoch and the lengths (epoch_plan.py), so a position is two
numbers and there is no other state.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Self

import numpy as np
import torch

from transduce.data.epoch_plan import EpochPlan, IndexMap, Packing, batch_starts
from transduce.data.readers.corpus import gold_similarity
from transduce.data.rng import RandomPermutation, SeededRandom
from transduce.data.row_selection import CorpusMixture, RowSubset, corpus_sizes
from transduce.data.store import Store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.word_alignment import ALIGNMENT, token_alignment
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SIMILARITY, Batch, Padded
from transduce.modalities.sources import ItemStore

SIDES = ("source", "target")


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
        order: IndexMap
        if self._weights is None:
            order = RandomPermutation(len(widths), rng)
        else:
            mixture = self._mixture(self._weights, epoch)
            order = _Composition(RandomPermutation(len(mixture), rng), mixture)
        return EpochPlan(widths, order, self._budget, self._bucket_batches, rng, self._packing)

    def _mixture(self, weights: Sequence[float], epoch: int) -> CorpusMixture:
        last = int(self.store.corpus_of[self.indices[len(self.indices) - 1]])
        if last >= len(weights):
            raise InputError(f"{len(weights)} mixing weights for {last + 1} corpora")
        sizes = corpus_sizes(self.indices, self.store.corpus_of, len(weights))
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
