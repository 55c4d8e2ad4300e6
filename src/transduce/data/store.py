"""Corpora enter once; a memory-mapped store of ids and raw text leaves, found again by what went into it.

    <folder>/<key>/   source.ids target.ids             uint16 or uint32, all pairs end to end
                      source.text target.text extra.text   UTF-8; extra is a JSON object, or nothing
                      *.ends                            int64: where each pair ends in the file beside it
                      corpus.uint8 line.int64           where each pair came from
                      group.uint64                      a hash of its source, or of a line of text
                      part.* source.rows                sources that are more than text: see items.py
                      meta.json                         counts, sizes, what was dropped; written last

The key is a hash of the content of the files, of the tokenizers and of the filters. A store is written in a folder of
another name and renamed when it is complete, so a build that dies leaves nothing that looks finished, and of two
builders at once the first one's store is used by both.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.draws import Draw
from transduce.data.filters import FilterReport, Filters
from transduce.data.items import Items
from transduce.data.perceived import Perceived
from transduce.data.rows import Lengths, Rows
from transduce.data.sources import Invalid, fingerprint, named_files
from transduce.data.text import Tokenizer
from transduce.data.writer import TEXTS, StoreWriter
from transduce.disk import sync
from transduce.errors import InputError
from transduce.flow import Example
from transduce.recipe import Corpus

FORMAT = 4  # 3: sources may be more than text; 4: groups
_STALE = 24 * 3600.0  # seconds after which an unfinished folder has no living builder


def build_store(
    corpora: Sequence[Corpus],
    source: Tokenizer | Perceived,
    target: Tokenizer,
    filters: Filters,
    invalid: Invalid,
    folder: str | Path,
    *,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """The store of these corpora, found in `folder` or built there. `progress` is told the pairs read so far."""
    if not 1 <= len(corpora) <= 256:
        raise InputError(f"expected 1 to 256 corpora, got {len(corpora)}")
    names = [str(corpus.path or corpus.source) for corpus in corpora]
    facts = {
        "format": FORMAT,
        "corpora": [fingerprint(corpus) for corpus in corpora],
        "tokenizers": [source.fingerprint, target.fingerprint],
        "filters": asdict(filters),
        "invalid": invalid,
        "forms": [corpus.form for corpus in corpora],
        "files": [named_files(corpus, invalid) for corpus in corpora] if isinstance(source, Perceived) else [],
    }
    folder = Path(folder)
    place = folder / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
        writer = StoreWriter(unfinished, source, target, filters)
        try:
            writer.add_all(corpora, invalid, progress)
            writer.finish(facts, names)
            _settle(unfinished, place)
        except OSError as error:
            raise InputError(f"the store cannot be written: {error}", where=str(folder)) from None
        finally:
            writer.close()
            shutil.rmtree(unfinished, ignore_errors=True)
    return Store(place, names, source if isinstance(source, Perceived) else None)


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(".unfinished-*"):
        newest = max((file.stat().st_mtime for file in [path, *path.iterdir()] if file.exists()), default=0.0)
        if newest < time.time() - _STALE:
            shutil.rmtree(path, ignore_errors=True)


def _settle(unfinished: Path, place: Path) -> None:
    """Gives the complete store its name, unless another builder was first: then the other one's store serves."""
    unfinished.chmod(0o755)
    try:
        os.rename(unfinished, place)
    except OSError:
        if not (place / "meta.json").exists():
            raise
    sync(place.parent)


class Store:
    """A finished store; nothing is read from disk before it is asked for."""

    def __init__(self, folder: str | Path, names: Sequence[str] = (), perceived: Perceived | None = None) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}, expected {FORMAT}")
            for name, size in meta["sizes"].items():
                if (found := (self.folder / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {found:,} bytes, not {size:,}")
            self._types = {side: np.dtype(meta["types"][side]).newbyteorder("<") for side in ("source", "target")}
            self.report = FilterReport.from_json(meta["report"])
            corpora = len(meta["corpora"])
            self.sourceless = meta["forms"][0] != "pairs"  # text: there is no other side
            self.what = {"running": "blocks of text"}.get(meta["forms"][0], meta["forms"][0])
            self.items = None if perceived is None else Items(self.folder, perceived, meta["parts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = f"delete the folder {self.folder}: it is built again"
            raise InputError(f"a damaged store: {error}", where=str(self.folder), remedy=remedy) from None
        self.names = list(names) or [f"corpus {number + 1}" for number in range(corpora)]
        self._ids = {side: self._map(f"{side}.ids", kind) for side, kind in self._types.items()}
        self._text = {side: self._map(f"{side}.text", np.dtype(np.uint8)) for side in TEXTS}
        whole = np.dtype("<i8")
        self._id_ends = {side: self._map(f"{side}.ids.ends", whole) for side in self._ids}
        self._text_ends = {side: self._map(f"{side}.text.ends", whole) for side in TEXTS}
        self._line = self._map("line.int64", whole)
        self.corpus_of = self._map("corpus.uint8", np.dtype(np.uint8))
        self._groups = self._map("group.uint64", np.dtype("<u8"))

    def _map(self, name: str, kind: np.dtype[Any]) -> np.ndarray:
        path = self.folder / name
        # An empty file cannot be mapped. Plain arrays over the mapping: np.memmap's own slices are slow.
        return np.asarray(np.memmap(path, kind, "r")) if path.stat().st_size else np.zeros(0, kind)

    def __len__(self) -> int:
        return self.report.kept

    def describe(self) -> list[str]:
        """What was kept and dropped, in words."""
        return self.report.lines(self.names, self.what)

    @cached_property
    def lengths(self) -> Lengths:
        """(n, 2) int32: tokens of source and target, without special ones; of what is no text, rows in a batch."""
        read = None if self.items is None else self.items.rows
        return Lengths(self._id_ends["source"], self._id_ends["target"], read)

    def side(self, side: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of one side of these pairs, end to end, and how many each has."""
        ends = self._id_ends[side][rows]
        lengths = self.lengths[rows, 0 if side == "source" else 1].astype(np.int64)
        shift = ends - np.cumsum(lengths)
        return self._ids[side][np.repeat(shift, lengths) + np.arange(lengths.sum())], lengths

    def ids(self, row: int) -> tuple[list[int], list[int]]:
        source, target = (self.side(side, np.array([row]))[0].tolist() for side in ("source", "target"))
        return source, target

    def stretch(self, side: str, first: int, last: int) -> np.ndarray:
        """All ids of one side from row `first` up to `last`, still on disk."""
        begin, end = (int(self._id_ends[side][row - 1]) if row else 0 for row in (first, last))
        return self._ids[side][begin:end]

    def text(self, side: str, row: int) -> str:
        end = int(self._text_ends[side][row])
        begin = int(self._text_ends[side][row - 1]) if row else 0
        return self._text[side][begin:end].tobytes().decode()

    def example(self, row: int) -> Example:
        if not 0 <= row < len(self):
            raise IndexError(row)
        extra = self.text("extra", row)
        file, line = self.names[self.corpus_of[row]], int(self._line[row])
        return Example(self.text("source", row), self.text("target", row), json.loads(extra or "{}"), file, line)

    def groups(self) -> np.ndarray:
        """(n,) uint64: equal for pairs with equal source text, or for equal lines of text."""
        return self._groups


def split(n: int, size: int, seed: int, groups: np.ndarray) -> tuple[Rows, np.ndarray]:
    """(train, development) rows in order; pairs of one group (an equal source) are never on both sides.

    Whole groups are drawn until `size` pairs are reached; a group too large for what is missing is passed over.
    """
    if len(groups) != n or not 0 <= size < n:
        raise InputError(f"cannot split {size:,} development pairs off {n:,}", remedy="lower `data.dev_size`")
    salt = Draw("split", seed).below(2**64)
    # Groups come in the order of their keys. A part of the keys, a few times what is wanted, is all that is looked at;
    # where groups were too large for it, twice as many. The keys are even, so the choice does not depend on the part.
    part = 4 * (size + 100) / n
    development = np.zeros(0, np.int64)
    while len(development) < size:
        below = min(int(part * 2**64), 2**64 - 1)
        development = np.sort(_draw_groups(groups, salt, below, size))
        if below == 2**64 - 1:
            break
        part *= 2
    if size and not len(development):
        raise InputError(f"every source stands in more than {size:,} pairs: no development set can be split off")
    return Rows(n, development), development


def _draw_groups(groups: np.ndarray, salt: int, below: int, size: int, chunk: int = 1 << 16) -> np.ndarray:
    """Rows of whole groups, `size` at most, in the order of their keys, of those whose key is not above `below`."""
    rows, keys = [], []
    for begin in range(0, len(groups), chunk):
        key = _mixed(groups[begin : begin + chunk] ^ np.uint64(salt))
        near = np.flatnonzero(key <= np.uint64(below))
        rows.append(begin + near)
        keys.append(key[near])
    met = np.concatenate(rows)
    _, group_of, counts = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)  # in their order
    chosen, missing = np.zeros(len(counts), bool), size
    for group, count in enumerate(counts.tolist()):
        if count <= missing:
            chosen[group] = True
            missing -= count
        if not missing:
            break
    return met[chosen[group_of]]


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Different numbers for different ones, with all bits of each in every bit (splitmix64: Steele 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
