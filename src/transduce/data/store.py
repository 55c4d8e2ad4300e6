"""Memory-mapped store of token ids and raw text, cached by the hash of its inputs.

    <folder>/<key>/   source.ids target.ids             uint16 or uint32, all pairs end to end
                      source.text target.text extra.text   UTF-8; extra is a JSON object or empty
                      *.ends                            int64: end offset of each pair in the corresponding file
                      corpus.uint16 line.int64          origin of each pair
                      group.uint64                      hash of its source, or of a line of text
                      part.* source.rows                multimodal sources: see modalities/sources.py
                      meta.json                         counts, dropped pairs, checksums of all files; written last

The key is a hash of the content of the files, of the tokenizers and of the filters. A store is written in a temporary
folder and renamed when it is complete, so an interrupted build leaves nothing that looks finished, and two concurrent
builders use the store of the first one to finish. The checksums are compared when a store is opened, and a damaged
store is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from transduce.data.augmentation import ARTIFICIAL, ArtificialCorpus
from transduce.data.filters import FilterReport, Filters, PairHashSet
from transduce.data.languages import split_language
from transduce.data.readers.corpus import DropCounter, Invalid, file_fingerprint, fingerprint, read_corpus
from transduce.data.readers.remote import is_remote
from transduce.data.row_selection import PairLengths
from transduce.data.tokenizers.tokenizer import Tokenizer, encode_running_text, encode_sources, encode_targets
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.modalities import sources
from transduce.modalities.sources import ItemStore, ItemWriter, ModalitySource, map_array
from transduce.recipe import Corpus
from transduce.storage import cache, make_folder, open_new, reporting, sync, write_file

FORMAT = 7  # of the files in a store
META, UNFINISHED = "meta.json", ".unfinished-"
HASHED = 1 << 24  # bytes hashed by one thread at a time
CHUNK = 4096  # pairs tokenised in one call
TEXTS = ("source", "target", "extra")
_STALE = 24 * 3600.0  # seconds after which an unfinished folder is abandoned
Progress = Callable[[int], None]  # called with the number of pairs read so far


def build_store(
    corpora: Sequence[Corpus | ArtificialCorpus],
    source: Tokenizer | ModalitySource,
    target: Tokenizer,
    filters: Filters,
    invalid: Invalid,
    folder: str | Path,
    *,
    progress: Progress | None = None,
) -> Store:
    """The store of these corpora: found in `folder`, or built there."""
    if not 1 <= len(corpora) <= 1 << 16:
        raise InputError(f"expected 1 to {1 << 16:,} corpora, got {len(corpora)}")
    files = [corpus for corpus in corpora if isinstance(corpus, Corpus)]
    names = [str(corpus.path or corpus.source) if isinstance(corpus, Corpus) else ARTIFICIAL for corpus in corpora]
    multimodal = isinstance(source, ModalitySource)
    prints, formats = [_fingerprint(corpus) for corpus in corpora], [corpus.format for corpus in corpora]
    facts = store_facts(prints, source, target, filters, invalid, formats)
    if multimodal:
        facts["files"] = [file_fingerprint(corpus, invalid) for corpus in files]
    folder = Path(folder)
    place = folder / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    items = source if isinstance(source, ModalitySource) else None
    with reporting(folder, "free space, or set `data.cache` to a folder on another disk"):
        if place.exists():
            try:
                cache.mark_used(place)
                return Store(place, names, items)
            except InputError as error:
                warnings.warn(f"{place}: {error.problem}: building it again", stacklevel=2)
                _remove(place)
        make_folder(folder)
        _remove_stale(folder)
        with _unfinished(folder) as part, closing(StoreWriter(part, source, target, filters)) as writer:
            writer.add_corpora(corpora, invalid, progress)
            writer.finish(facts, names[: len(files)])
            _rename_finished(part, place)
        cache.entry_added(place)
    return Store(place, names, items)


def store_facts(
    fingerprints: list[str],
    source: Tokenizer | ModalitySource,
    target: Tokenizer,
    filters: Filters,
    invalid: Invalid,
    formats: list[str],
) -> dict[str, Any]:
    """What determines the content of a store."""
    return {
        "format": FORMAT,
        "corpora": fingerprints,
        "tokenizers": [source.fingerprint, target.fingerprint],
        "filters": asdict(filters),
        "invalid": invalid,
        "formats": formats,
        "files": [],
    }


def _fingerprint(corpus: Corpus | ArtificialCorpus) -> str:
    return fingerprint(corpus) if isinstance(corpus, Corpus) else corpus.fingerprint


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    part = make_folder(folder / f"{UNFINISHED}{uuid4().hex}")
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove(place: Path) -> None:
    """Renames a store before removing it: a killed removal leaves nothing that looks like a store."""
    renamed = place.with_name(f"{UNFINISHED}{place.name}.{os.getpid()}")
    os.rename(place, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{UNFINISHED}*"):
        newest = max((file.stat().st_mtime for file in [path, *path.iterdir()] if file.exists()), default=0.0)
        if newest < time.time() - _STALE:
            shutil.rmtree(path, ignore_errors=True)


def _rename_finished(unfinished: Path, place: Path) -> None:
    """Gives the complete store its name, unless another builder was faster: then its store is used."""
    try:
        os.rename(unfinished, place)
    except OSError:
        if not (place / META).exists():
            raise
    sync(place.parent)


class GivenExamples(Protocol):
    """Examples that take the place of a file: artificial ones, or a part of a stream."""

    @property
    def examples(self) -> Iterable[Example]: ...

    @property
    def format(self) -> str: ...

    @property
    def source_parts(self) -> int: ...


class StoreWriter:
    """Writes a store chunk by chunk, in constant memory."""

    def __init__(self, folder: Path, source: Tokenizer | ModalitySource, target: Tokenizer, filters: Filters) -> None:
        self._folder, self._filters, self._seen = folder, filters, PairHashSet(folder)
        parts = list(source.parts) if isinstance(source, ModalitySource) else []
        names = [*_file_names(), *sources.file_names(parts)]
        self._files = {name: open(open_new(folder / name), "wb") for name in names}  # noqa: SIM115 (see close)
        self._items = ItemWriter(source, self._files) if isinstance(source, ModalitySource) else None
        # Multimodal sources have no ids, so any tokenizer serves for their empty rows.
        self._tokenizers = {"source": target if isinstance(source, ModalitySource) else source, "target": target}
        self._ends = dict.fromkeys(["source.ids", "target.ids", *(f"{side}.text" for side in TEXTS)], 0)
        self._format, self._columns = "pairs", 1  # of the corpus being added
        self.report = FilterReport()

    def add_corpora(
        self, corpora: Sequence[Corpus | GivenExamples], invalid: Invalid, progress: Progress | None
    ) -> None:
        for number, corpus in enumerate(corpora):
            self._format, self._columns, dropped = corpus.format, corpus.source_parts, DropCounter()
            examples = read_corpus(corpus, invalid, dropped) if isinstance(corpus, Corpus) else iter(corpus.examples)
            while chunk := list(islice(examples, CHUNK)):
                self._add(number, self._readable(number, chunk, invalid))
                if progress is not None:
                    progress(self.report.read)
            for reason, count in dropped.items():
                self.report.drop(reason, (number, dropped.places[reason][1]), count)

    def _readable(self, corpus: int, chunk: list[Example], invalid: Invalid) -> list[Example]:
        """The examples whose files can be read; others raise an error, or are dropped and counted."""
        if self._items is None:
            return chunk
        readable = []
        for example in chunk:
            try:
                self._items.read(example.source)
                readable.append(example)
            except UnreadableError as bad:
                if invalid == "error":
                    remedy = bad.remedy or "correct the line, or set `data.invalid=drop` to drop and count such lines"
                    raise InputError(bad.problem, where=f"{example.file}:{example.line}", remedy=remedy) from None
                self.report.drop(bad.reason, (corpus, example.line))
        return readable

    def _add(self, corpus: int, chunk: list[Example]) -> None:
        sources = [example.source for example in chunk]
        targets = [example.target or "" for example in chunk]
        source_ids, target_ids = self._encode(sources, targets)
        kept = []
        for index, pair in enumerate(zip(sources, targets, strict=True)):
            reason = self._drop_reason(pair, len(source_ids[index]), len(target_ids[index]))
            if reason is None:
                kept.append(index)
            else:
                self.report.drop(reason, (corpus, chunk[index].line))
        self.report.kept += len(kept)
        if self._items is not None:
            self._items.append([sources[index] for index in kept])
        self._add_ids("source", [source_ids[index] for index in kept])
        self._add_ids("target", [target_ids[index] for index in kept])
        self._add_text("source", [sources[index] for index in kept])
        self._add_text("target", [targets[index] for index in kept])
        extras = [dict(chunk[index].extra) for index in kept]
        self._add_text("extra", [json.dumps(extra, ensure_ascii=False) if extra else "" for extra in extras])
        grouped = sources if self._format == "pairs" else targets
        groups = (_hash(split_language(grouped[index])[1]) for index in kept)  # one group in all languages
        self._write("group.uint64", np.fromiter(groups, np.uint64, len(kept)))
        self._write("corpus.uint16", np.full(len(kept), corpus, np.uint16))
        self._write("line.int64", np.array([chunk[index].line for index in kept], np.int64))

    def _encode(self, sources: list[str], targets: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        source_ids: list[list[int]] = [[] for _ in sources]
        if self._items is None:
            tokenizer = self._tokenizers["source"]
            source_ids = encode_sources(tokenizer, sources, separated=tokenizer.separates(self._columns))
        if self._format == "running":
            return source_ids, encode_running_text(self._tokenizers["target"], targets)
        return source_ids, encode_targets(self._tokenizers["target"], targets, sources)

    def _drop_reason(self, pair: tuple[str, str], source_length: int, target_length: int) -> str | None:
        source, target = pair
        blank = not split_language(source)[1].strip() or not target.strip()
        lengths = source_length, target_length
        if self._format != "pairs" or self._items is not None:  # only the target has a length in tokens
            blank, lengths = not target.strip(), (target_length, target_length)
        reason = self._filters.reason(*lengths, blank=blank)
        if reason is None and self._filters.drop_duplicates:
            reason = self._filters.reason(*lengths, duplicate=not self._seen.add(source, target))
        return reason

    def _add_ids(self, side: str, rows: list[list[int]]) -> None:
        flat = np.fromiter(chain.from_iterable(rows), _id_type(self._tokenizers[side]))
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
            "id_types": {side: str(_id_type(tokenizer)) for side, tokenizer in self._tokenizers.items()},
            "part_types": {} if self._items is None else self._items.dtypes,
            "names": [name if is_remote(name) else str(Path(name).absolute()) for name in names],
            "checksums": checksums(self._folder, self._files),
            "report": self.report.to_json(),
        }
        content = {**meta, "checksum": _checksum_of(meta)}
        write_file(self._folder / META, json.dumps(content, indent=1).encode())
        sync(self._folder)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    ids = tokenizer.size * (2 if tokenizer.vocabulary.word_marks else 1)
    return np.dtype(np.uint16 if ids <= 1 << 16 else np.uint32)


def _file_names() -> Iterator[str]:
    for name in ("source.ids", "target.ids", *(f"{side}.text" for side in TEXTS)):
        yield from (name, f"{name}.ends")
    yield from ("corpus.uint16", "line.int64", "group.uint64")


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the chunks of each file, hashed by as many threads as there are cores."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = {}
        for name in names:
            content = map_array(folder / name, "u1")
            chunks = (content[begin : begin + HASHED] for begin in range(0, len(content), HASHED))
            digests = pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks)
            found[name] = hashlib.sha256(b"".join(digests)).hexdigest()
    return found


def _checksum_of(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Store:
    """A finished store; data are read from disk on demand."""

    def __init__(self, folder: str | Path, names: Sequence[str] = (), source: ModalitySource | None = None) -> None:
        self.folder = Path(folder)
        try:
            meta = self._read_meta()
            types = {side: np.dtype(meta["id_types"][side]).newbyteorder("<") for side in ("source", "target")}
            self.report = FilterReport.from_json(meta["report"])
            corpora = len(meta["corpora"])
            # Of the data alone: stores of the same files may differ in their format, tokenizers or filters.
            items = {name: value for name, value in meta["checksums"].items() if name.startswith("part.")}
            self.content_hash = hashlib.sha256(json.dumps([meta["corpora"], items]).encode()).hexdigest()
            self.sourceless = meta["formats"][0] != "pairs"  # text has no source side
            self.unit = {"running": "chunks of text"}.get(meta["formats"][0], meta["formats"][0])
            self.items = None if source is None else ItemStore(self.folder, source, meta["part_types"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = f"delete the folder {self.folder}: it will be built again"
            raise InputError(f"a damaged store: {error}", where=str(self.folder), remedy=remedy) from None
        self.names = list(names) or [f"corpus {number + 1}" for number in range(corpora)]
        self._ids = {side: map_array(self.folder / f"{side}.ids", kind) for side, kind in types.items()}
        self._text = {side: map_array(self.folder / f"{side}.text", "u1") for side in TEXTS}
        self._id_ends = {side: map_array(self.folder / f"{side}.ids.ends", "<i8") for side in self._ids}
        self._text_ends = {side: map_array(self.folder / f"{side}.text.ends", "<i8") for side in TEXTS}
        self._line = map_array(self.folder / "line.int64", "<i8")
        self.corpus_of = map_array(self.folder / "corpus.uint16", "<u2")
        self._groups = map_array(self.folder / "group.uint64", "<u8")

    def _read_meta(self) -> dict[str, Any]:
        try:
            meta: dict[str, Any] = json.loads((self.folder / META).read_bytes())
        except ValueError:
            raise ValueError(f"{META} differs from what was written") from None
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, expected {FORMAT}")
        if meta.pop("checksum") != _checksum_of(meta):
            raise ValueError(f"{META} differs from what was written")
        for name, actual in checksums(self.folder, meta["checksums"]).items():
            if actual != meta["checksums"][name]:
                raise ValueError(f"{name} differs from what was written")
        return meta

    def __len__(self) -> int:
        return self.report.kept

    def describe(self) -> list[str]:
        """The numbers of pairs kept and dropped, as lines of text."""
        lines = self.report.lines(self.names, self.unit)
        if artificial := sum(
            np.count_nonzero(self.corpus_of == n) for n, one in enumerate(self.names) if one == ARTIFICIAL
        ):
            lines.append(f"{artificial:,} of them artificial")
        return lines

    @cached_property
    def lengths(self) -> PairLengths:
        """(n, 2) int32: tokens of source and target without special tokens; of a multimodal source, rows in a batch."""
        source_rows = None if self.items is None else self.items.rows
        return PairLengths(self._id_ends["source"], self._id_ends["target"], source_rows)

    def token_ids(self, side: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of one side of these pairs, end to end, and the length of each."""
        ends = self._id_ends[side][rows]
        lengths = self.lengths[rows, 0 if side == "source" else 1].astype(np.int64)
        shift = ends - np.cumsum(lengths)
        return self._ids[side][np.repeat(shift, lengths) + np.arange(lengths.sum())], lengths

    def ids(self, row: int) -> tuple[list[int], list[int]]:
        source, target = (self.token_ids(side, np.array([row]))[0].tolist() for side in ("source", "target"))
        return source, target

    def id_range(self, side: str, first: int, last: int) -> np.ndarray:
        """All ids of one side from row `first` up to `last`, memory-mapped."""
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

    def numbers(self, column: str, rows: Iterable[int]) -> np.ndarray:
        """(n,) float32: the number in another column of these rows."""
        found = []
        for row in rows:
            value = json.loads(self.text("extra", row) or "{}").get(column)
            try:
                found.append(float(value))
            except (TypeError, ValueError):
                problem = f"no column {column!r}" if value is None else f"column {column!r} is not a number: {value!r}"
                where = f"{self.names[self.corpus_of[row]]}:{self._line[row]}"
                raise InputError(problem, where=where, remedy="give every pair a score, or leave it out") from None
        return np.array(found, np.float32)

    def groups(self) -> np.ndarray:
        """(n,) uint64: equal for pairs with equal source text, or for equal lines of text."""
        return self._groups
