"""Corpora enter, the files of a store leave (see store.py for what they hold)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data import items
from transduce.data.filters import FilterReport, Filters, Seen
from transduce.data.items import ItemWriter
from transduce.data.perceived import Perceived
from transduce.data.running import encode_running
from transduce.data.sources import Invalid, Tally, read
from transduce.data.text import Tokenizer
from transduce.data.unknowns import encode_sources, encode_targets
from transduce.disk import sync
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus

CHUNK = 4096  # pairs tokenised in one call
TEXTS = ("source", "target", "extra")


def id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)


class StoreWriter:
    """Appends chunk after chunk, so memory stays the same however long the corpora are."""

    def __init__(self, folder: Path, source: Tokenizer | Perceived, target: Tokenizer, filters: Filters) -> None:
        self._folder, self._filters, self._seen = folder, filters, Seen(folder)
        parts = list(source.parts) if isinstance(source, Perceived) else []
        names = [*file_names(), *items.file_names(parts)]
        self._files = {name: open(folder / name, "wb") for name in names}  # noqa: SIM115 (see close)
        self._items = ItemWriter(source, self._files) if isinstance(source, Perceived) else None
        # What is perceived has no ids, so it matters little whose they are.
        self._tokenizers = {"source": target if isinstance(source, Perceived) else source, "target": target}
        self._ends = dict.fromkeys(["source.ids", "target.ids", *(f"{side}.text" for side in TEXTS)], 0)
        self._form = "pairs"  # of the corpus that is being added
        self.report = FilterReport()

    def add_all(self, corpora: Sequence[Corpus], invalid: Invalid, progress: Callable[[int], None] | None) -> None:
        for number, corpus in enumerate(corpora):
            self._form, unreadable = corpus.form, Tally()
            examples = read(corpus, invalid, unreadable)
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
                self._items.rows(example.source)
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
            targets = encode_running(self._tokenizers["target"], [target for _, target in pairs])
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
            self._items.keep([texts[place] for place in kept])
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
            "parts": {} if self._items is None else self._items.kinds,
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
