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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.epoch_plan import PairLengths, RowSubset
from transduce.data.filters import FilterReport, Filters, PairHashSet
from transduce.data.readers.corpus import DropCounter, Invalid, file_fingerprint, fingerprint, read_corpus
from transduce.data.rng import SeededRandom
from transduce.data.tokenizers.oov import encode_sources, encode_targets
from transduce.data.tokenizers.running_text import encode_running_text
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.modalities import item_store as items
from transduce.modalities.item_store import ItemStore, ItemWriter
from transduce.modalities.sources import ModalitySource
from transduce.recipe import Corpus
from transduce.storage import sync

CHUNK = 4096  # pairs tokenised in one call
TEXTS = ("source", "target", "extra")


def id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)


class StoreWriter:
    """Appends chunk after chunk, so memory stays the same however long the corpora are."""

    def __init__(self, folder: Path, source: Tokenizer | ModalitySource, target: Tokenizer, filters: Filters) -> None:
        self._folder, self._filters, self._seen = folder, filters, PairHashSet(folder)
        parts = list(source.parts) if isinstance(source, ModalitySource) else []
        names = [*file_names(), *items.file_names(parts)]
        self._files = {name: open(folder / name, "wb") for name in names}  # noqa: SIM115 (see close)
        self._items = ItemWriter(source, self._files) if isinstance(source, ModalitySource) else None
        # What is perceived has no ids, so it matters little whose they are.
        self._tokenizers = {"source": target if isinstance(source, ModalitySource) else source, "target": target}
        self._ends = dict.fromkeys(["source.ids", "target.ids", *(f"{side}.text" for side in TEXTS)], 0)
        self._form = "pairs"  # of the corpus that is being added
        self.report = FilterReport()

    def add_all(self, corpora: Sequence[Corpus], invalid: Invalid, progress: Callable[[int], None] | None) -> None:
        for number, corpus in enumerate(corpora):
            self._form, unreadable = corpus.format, DropCounter()
            examples = read_corpus(corpus, invalid, unreadable)
            while chunk := list(islice(examples, CHUNK)):
                self._add(number, self._readable(number, chunk, invalid))
                if progress is not None:
                    progress(self.report.read)
            for reason, count in unreadable.items():
                self.report.drop(reason, (number, unreadable.places[reason][1]), count)

    def _readable(self, corpus: int, chunk: list[Example], invalid: Invalid) -> list[Example]:
        """The examples whose files can be read; of the others the first is an error, or all are dropped and counted."""
        if self._items is None:
            return chunk
        kept = []
        for example in chunk:
            try:
                self._items.read(example.source)
                kept.append(example)
            except UnreadableError as bad:
                if invalid == "error":
                    remedy = bad.remedy or "correct the line, or set `data.invalid=drop` to drop and count such lines"
                    raise InputError(bad.problem, where=f"{example.file}:{example.line}", remedy=remedy) from None
                self.report.drop(bad.reason, (corpus, example.line))
        return kept

    def _add(self, corpus: int, chunk: list[Example]) -> None:
        pairs = [(example.source, example.target or "") for example in chunk]
        texts = [source for source, _ in pairs]
        sources = encode_sources(self._tokenizers["source"], texts) if self._items is None else [[] for _ in texts]
        if self._form == "running":
            targets = encode_running_text(self._tokenizers["target"], [target for _, target in pairs])
        else:
            targets = encode_targets(self._tokenizers["target"], [target for _, target in pairs], texts)
        kept = []
        for place, (source, target) in enumerate(pairs):
            blank = not source.strip() or not target.strip()
            lengths = len(sources[place]), len(targets[place])
            if self._form != "pairs" or self._items is not None:  # there is no source whose length could be wrong
                blank, lengths = not target.strip(), (lengths[1], lengths[1])
            reason = self._filters.reason(*lengths, blank=blank)
            if reason is None and self._filters.drop_duplicates:
                reason = self._filters.reason(*lengths, duplicate=self._seen.before(source, target))
            if reason is None:
                kept.append(place)
            else:
                self.report.drop(reason, (corpus, chunk[place].line))
        self.report.kept += len(kept)
        if self._items is not None:
            self._items.append([texts[place] for place in kept])
        self._add_ids("source", [sources[place] for place in kept])
        self._add_ids("target", [targets[place] for place in kept])
        self._add_text("source", [pairs[place][0] for place in kept])
        self._add_text("target", [pairs[place][1] for place in kept])
        extras = [dict(chunk[place].extra) for place in kept]
        self._add_text("extra", [json.dumps(extra, ensure_ascii=False) if extra else "" for extra in extras])
        groups = [pairs[place][0 if self._form == "pairs" else 1] for place in kept]
        self._write("group.uint64", np.fromiter(map(_hash, groups), np.uint64, len(kept)))
        self._write("corpus.uint8", np.full(len(kept), corpus, np.uint8))
        self._write("line.int64", np.array([chunk[place].line for place in kept], np.int64))

    def _add_ids(self, side: str, rows: list[list[int]]) -> None:
        flat = np.fromiter(chain.from_iterable(rows), id_type(self._tokenizers[side]))
        self._append(f"{side}.ids", flat, [len(row) for row in rows])

    def _add_text(self, side: str, texts: list[str]) -> None:
        encoded = [text.encode() for text in texts]
        flat = np.frombuffer(b"".join(encoded), np.uint8)
        self._append(f"{side}.text", flat, [len(text) for text in encoded])

    def _append(self, name: str, flat: np.ndarray, lengths: list[int]) -> None:
        ends = np.cumsum(np.array(lengths, np.int64)) + self._ends[name]
        self._ends[name] += len(flat)
        self._write(name, flat)
        self._write(f"{name}.ends", ends)

    def _write(self, name: str, values: np.ndarray) -> None:
        self._files[name].write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())

    def finish(self, facts: dict[str, Any], names: list[str]) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if self.report.kept == 0:
            raise InputError("no pairs are left", where=names[0], remedy="; ".join(self.report.lines(names)))
        meta = {
            **facts,
            "types": {side: str(id_type(tokenizer)) for side, tokenizer in self._tokenizers.items()},
            "parts": {} if self._items is None else self._items.dtypes,
            "sizes": {name: (self._folder / name).stat().st_size for name in self._files},
            "report": self.report.to_json(),
        }
        (self._folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        sync(self._folder / "meta.json")
        sync(self._folder)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def file_names() -> Iterator[str]:
    for name in ("source.ids", "target.ids", *(f"{side}.text" for side in TEXTS)):
        yield from (name, f"{name}.ends")
    yield from ("corpus.uint8", "line.int64", "group.uint64")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


FORMAT = 4  # 3: sources may be more than text; 4: groups
_STALE = 24 * 3600.0  # seconds after which an unfinished folder has no living builder


def build_store(
    corpora: Sequence[Corpus],
    source: Tokenizer | ModalitySource,
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
        "forms": [corpus.format for corpus in corpora],
        "files": [file_fingerprint(corpus, invalid) for corpus in corpora]
        if isinstance(source, ModalitySource)
        else [],
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
    return Store(place, names, source if isinstance(source, ModalitySource) else None)


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

    def __init__(self, folder: str | Path, names: Sequence[str] = (), perceived: ModalitySource | None = None) -> None:
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
            self.items = None if perceived is None else ItemStore(self.folder, perceived, meta["parts"])
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
    def lengths(self) -> PairLengths:
        """(n, 2) int32: tokens of source and target, without special ones; of what is no text, rows in a batch."""
        read_corpus = None if self.items is None else self.items.rows
        return PairLengths(self._id_ends["source"], self._id_ends["target"], read_corpus)

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


def split(n: int, size: int, seed: int, groups: np.ndarray) -> tuple[RowSubset, np.ndarray]:
    """(train, development) rows in order; pairs of one group (an equal source) are never on both sides.

    Whole groups are drawn until `size` pairs are reached; a group too large for what is missing is passed over.
    """
    if len(groups) != n or not 0 <= size < n:
        raise InputError(f"cannot split {size:,} development pairs off {n:,}", remedy="lower `data.dev_size`")
    salt = SeededRandom("split", seed).below(2**64)
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
    return RowSubset(n, development), development


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
