"""Stored pairs in, p(target token | source token) out by IBM model 1 (Brown 1993), and the shortlist made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from transduce.data.store import Store
from transduce.data.text import Tokenizer
from transduce.errors import InputError
from transduce.flow import BOS, SPECIALS
from transduce.shortlist.lists import Shortlist

NULL = BOS  # stands in front of every source: what comes from no word of it. No source has a <s> of its own
LINKS = 1 << 22  # pairs of a source and a target token that are looked at together
ROUNDS = 5


@dataclass(frozen=True)
class Translations:
    """p(target | source) of every pair of tokens that were met in one line; sorted by source, then target."""

    sources: np.ndarray
    targets: np.ndarray
    chances: np.ndarray

    def likeliest(self, size: int, count: int) -> np.ndarray:
        """(size, count) int32: the best of each source token, best first, filled up with <pad>."""
        kept = np.flatnonzero((self.chances > 0) & (self.sources != NULL))
        kept = kept[np.lexsort((-self.chances[kept], self.sources[kept]))]
        sources = self.sources[kept]
        rank = np.arange(len(kept)) - np.searchsorted(sources, sources)  # among those of its source
        lists, near = np.zeros((size, count), np.int32), rank < count
        lists[sources[near], rank[near]] = self.targets[kept][near]
        return lists


def make_shortlist(
    store: Store,
    tokenizers: tuple[Tokenizer, Tokenizer],
    *,
    likeliest: int = 100,
    frequent: int = 100,
    lines: int = 100_000,
) -> Shortlist:
    """From so many lines of a store, evenly taken, so that time and memory have an end."""
    if store.sourceless or store.items is not None:
        raise InputError("a shortlist is made from pairs of texts", where=store.names[0])
    rows = np.arange(0, len(store), -(-len(store) // lines))
    source, target = tokenizers
    counts = np.zeros(target.size, np.int64)
    for some in np.array_split(rows, -(-len(rows) // 10_000)):
        counts += np.bincount(store.side("target", some)[0], minlength=target.size)
    common = np.argsort(-counts, kind="stable")[:frequent]
    always = np.union1d([*range(len(SPECIALS)), *target.numbers], common[counts[common] > 0])
    lists = translate(store, rows, target.size).likeliest(source.size, likeliest)
    prints = source.fingerprint, target.fingerprint
    return Shortlist(torch.from_numpy(lists), torch.from_numpy(always.astype(np.int32)), target.size, prints)


def translate(store: Store, rows: np.ndarray, size: int, rounds: int = ROUNDS) -> Translations:
    """EM: c(t, s) = sum of p(t | s) / sum over s' of p(t | s'), p(t | s) = c(t, s) / sum over t' of c(t', s)."""
    table = np.zeros(0, np.int64)  # source * size + target
    for codes, _ in _links(store, rows, size):
        table = np.union1d(table, codes)
    sources, chances = table // size, np.ones(len(table))
    for _ in range(rounds):
        counts = np.zeros(len(table))
        for codes, owner in _links(store, rows, size):
            index = np.searchsorted(table, codes)
            share = chances[index]
            share /= np.bincount(owner, share)[owner]
            counts += np.bincount(index, share, len(table))
        chances = counts / np.bincount(sources, counts)[sources]
    return Translations(sources, table % size, chances)


def _links(store: Store, rows: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every pair of tokens of every line, as one number, and which target token of the stretch it belongs to."""
    lengths = store.lengths[rows].astype(np.int64)
    filled = np.cumsum((lengths[:, 0] + 1) * lengths[:, 1])
    for some in np.split(rows, np.flatnonzero(np.diff(filled // LINKS)) + 1):
        flat, of_source = store.side("source", some)
        targets, of_target = store.side("target", some)
        if not len(targets):
            continue
        ends = np.cumsum(of_source)
        sources = np.insert(flat.astype(np.int64), ends - of_source, NULL)
        counts = np.repeat(of_source + 1, of_target)  # of each target token: the source tokens it may come from
        begins = np.repeat(ends - of_source + np.arange(len(some)), of_target)
        owner = np.repeat(np.arange(len(targets)), counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        yield sources[begins[owner] + place] * size + targets[owner], owner
