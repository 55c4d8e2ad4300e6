"""Corpus preparation: filtered, deduplicated shards of Parquet or Arrow files, with a manifest.

    <output>/shard-000000.parquet ...   pairs in the order of the corpora; one shard for each part of an input file
             manifest.json              settings, counts by reason, shards with their hashes; written last
             .work/                     what is not finished; removed at the end

Three steps, each resumable: every part is read, normalised and filtered by itself; duplicates are found among all
parts, where the first occurrence in the order of the corpora stays; every part is tokenised, packed and written. A
shard is a function of the inputs and the options, so its bytes do not depend on the number of workers or on where they
run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from transduce.data import sharded_work
from transduce.data.batching import assign_bins
from transduce.data.filters import FilterReport, TextFilters, pair_digest
from transduce.data.language_identification import LanguageIdentifier
from transduce.data.languages import split_language, tagged
from transduce.data.near_duplicates import first_rows, near_duplicates, signatures
from transduce.data.readers.corpus import CorpusPart, DropCounter, Invalid, read_corpus, read_lines, split_corpus
from transduce.data.readers.remote import file_state
from transduce.data.sharded_work import Backend, mark_done, run_tasks, unfinished
from transduce.data.tokenizers import normalisation
from transduce.data.tokenizers.tokenizer import encode_sources, encode_targets
from transduce.errors import InputError
from transduce.flow import Example
from transduce.modalities.sources import map_array
from transduce.parsing import read_json
from transduce.recipe import Corpus
from transduce.storage import atomic_path, open_atomic, replace_file

CHUNK = 4096  # pairs at a time
SAMPLE = 20_000  # pairs from which the languages of the two sides are learned
KEEP, DUPLICATE, NEAR_DUPLICATE = range(3)
REASONS = {DUPLICATE: "duplicate", NEAR_DUPLICATE: "near duplicate"}
MANIFEST, WORK, IDENTIFIER = "manifest.json", ".work", "languages.bin"
SIDES = "source", "target"


@dataclass(frozen=True)
class PipelineOptions:
    """What is done with every pair."""

    filters: TextFilters = field(default_factory=TextFilters)
    normalisation: tuple[str, ...] = ()  # one-way steps
    invalid: Invalid = "error"
    drop_duplicates: bool = False
    near_duplicates: float | None = None  # smallest Jaccard similarity
    languages: Mapping[str, str] = field(default_factory=dict)  # of source, target, others: sample, or empty
    scored_by: str = ""  # a run from source to target
    min_score: float | None = None  # mean log-probability of a target token
    tokenizers: str = ""  # a run
    pack: tuple[int, int] | None = None  # positions of source and target in a packed row
    shard_lines: int = 500_000
    format: Literal["parquet", "arrow"] = "parquet"

    def __post_init__(self) -> None:
        unknown = [step for step in self.normalisation if step not in normalisation.ONE_WAY]
        if unknown:
            remedy = f"known: {', '.join(normalisation.ONE_WAY)}"
            raise InputError(f"no step {unknown[0]!r}", where="normalisation", remedy=remedy)
        if self.pack is not None and not self.tokenizers:
            raise InputError("packing needs tokens", where="pack", remedy="name the run whose tokenizers are used")
        if self.min_score is not None and not self.scored_by:
            raise InputError("a lowest score without a model", where="min_score", remedy="name the run that scores")


AUTO = {"source": "", "target": ""}  # languages that are learned from the corpora themselves


def prepare_corpora(
    corpora: Sequence[Corpus],
    output: Path,
    options: PipelineOptions,
    *,
    workers: int = 1,
    backend: Backend = "local",
    progress: Callable[[str, int, int], None] = lambda *_: None,  # step, parts done, all parts
) -> dict[str, Any]:
    """Prepares all corpora, and returns the manifest. After an interruption, the same call continues."""
    _require_pyarrow(output)
    corpora, output = [corpus.absolute() for corpus in corpora], output.absolute()  # workers have folders of their own
    settings = _settings(corpora, options)
    if (output / MANIFEST).is_file():
        found: dict[str, Any] = read_json(output / MANIFEST, max_bytes=1 << 28)
        if found["settings"] != json.loads(json.dumps(settings)):
            remedy = "write to another folder, or remove this one"
            raise InputError("another corpus, or other options, are prepared here", where=str(output), remedy=remedy)
        return found
    with sharded_work.work_folder(output / WORK, settings):
        return _prepare(corpora, settings, PreparationJob(str(output), options), workers, backend, progress)


def _prepare(
    corpora: Sequence[Corpus],
    settings: Mapping[str, Any],
    job: PreparationJob,
    workers: int,
    backend: Backend,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    if not (job.work / "parts.json").is_file():
        _plan(corpora, job.work, job.options)
    tasks = range(len(job.parts))

    def step(name: str, function: Any, folder: Path) -> None:
        todo = unfinished(folder, tasks)
        done = len(tasks) - len(todo)
        run_tasks(function, todo, workers=workers, backend=backend, done=lambda n: progress(name, done + n, len(tasks)))

    with sharded_work.cluster(backend, workers):
        step("read", ReadStep(job), job.work / "read")
        if not (job.work / "duplicates.json").is_file():
            _find_duplicates(job)
        step("write", WriteStep(job), job.work / "write")
    manifest = _manifest(job, settings)
    replace_file(Path(job.output) / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(job.work)
    return manifest


def _settings(corpora: Sequence[Corpus], options: PipelineOptions) -> dict[str, Any]:
    files = [file for corpus in corpora for file in (corpus.path, corpus.source, corpus.target) if file]
    return {
        "options": asdict(options),
        "corpora": [corpus.model_dump(mode="json", exclude_defaults=True) for corpus in corpora],
        "files": {file: file_state(file) for file in files},
    }


def _plan(corpora: Sequence[Corpus], work: Path, options: PipelineOptions) -> None:
    """Writes the parts of all corpora, and the identifier of languages."""
    for name in ("read", "write"):
        (work / name).mkdir(exist_ok=True)
    if options.languages:
        _identifier(corpora, options).save(work / IDENTIFIER)
    parts = [part for corpus in corpora for part in split_corpus(corpus, options.shard_lines)]
    content = [
        {
            "corpus": part.corpus.model_dump(mode="json"),
            "first": part.first,
            "lines": part.lines,
            "offsets": part.offsets,
        }
        for part in parts
    ]
    replace_file(work / "parts.json", json.dumps(content))


def _identifier(corpora: Sequence[Corpus], options: PipelineOptions) -> LanguageIdentifier:
    """An identifier of languages by their sample files or their words, or of the two sides of the corpora."""
    if options.languages != AUTO:
        files = options.languages.items()
        samples = {name: list(read_lines(one)) if one else LanguageIdentifier.known_words(name) for name, one in files}
        return LanguageIdentifier.train(samples)
    if any(corpus.language or corpus.language_column or corpus.format != "pairs" for corpus in corpora):
        remedy = "name the languages: de,en"
        raise InputError("two languages are learned from pairs of two languages", where="languages", remedy=remedy)
    share = -(-SAMPLE // len(corpora))
    pairs = [pair for corpus in corpora for pair in islice(read_corpus(corpus, "drop"), share)]
    return LanguageIdentifier.train(
        {"source": [one.source for one in pairs], "target": [one.target or "" for one in pairs]}
    )


@dataclass(frozen=True)
class PreparationJob:
    """A folder and its options: what a worker needs to do any of the parts."""

    output: str
    options: PipelineOptions

    @property
    def work(self) -> Path:
        return Path(self.output) / WORK

    @cached_property
    def parts(self) -> list[CorpusPart]:
        content = json.loads((self.work / "parts.json").read_bytes())
        return [
            CorpusPart(Corpus(**one["corpus"]), one["first"], one["lines"], tuple(one["offsets"])) for one in content
        ]

    @cached_property
    def identifier(self) -> LanguageIdentifier | None:
        path = self.work / IDENTIFIER
        return LanguageIdentifier.load(path) if path.is_file() else None

    def shard_name(self, number: int) -> str:
        return f"shard-{number:06}.{self.options.format}"

    def __getstate__(self) -> dict[str, Any]:  # cached values are made again in each worker
        return {"output": self.output, "options": self.options}


@dataclass(frozen=True)
class PreparedPair:
    """A pair after normalisation."""

    source: str
    target: str
    language: str  # of the target; empty: not stated
    example: Example
    score: float = 0.0

    @property
    def sides(self) -> tuple[str, ...]:
        return (self.source, self.target) if self.source or self.language else (self.target,)


@dataclass(frozen=True)
class ReadStep:
    """Reads, normalises and filters one part."""

    job: PreparationJob

    def __call__(self, number: int) -> None:
        part, folder, options = self.job.parts[number], self.job.work / "read", self.job.options
        dropped, report = DropCounter(), FilterReport()
        schema = _table([], scored=bool(options.scored_by)).schema
        with (
            _table_writer(folder / f"{number:06}.arrow", "arrow", schema) as write,
            open_atomic(folder / f"{number:06}.digests") as digests,
            open_atomic(folder / f"{number:06}.signatures") as signed,
        ):
            examples = read_corpus(part.corpus, options.invalid, dropped, part)
            while chunk := list(islice(examples, CHUNK)):
                rows = self._kept(chunk, part.corpus, report)
                report.kept += len(rows)
                if options.drop_duplicates:
                    digests.write(b"".join(pair_digest(row.source, row.target) for row in rows))
                if options.near_duplicates is not None:
                    signed.write(_little_endian(signatures([f"{row.source}\n{row.target}" for row in rows])))
                write(_table(rows, scored=bool(options.scored_by)))
        for reason, count in dropped.items():
            report.drop(reason, (0, dropped.places[reason][1]), count)
        mark_done(folder, number, report.to_json())

    def _kept(self, chunk: list[Example], corpus: Corpus, report: FilterReport) -> list[PreparedPair]:
        """The rows that no filter drops."""
        options, text = self.job.options, corpus.format != "pairs"
        rows = []
        for example in chunk:
            language, source = split_language(example.source)
            source, target = (normalisation.apply(one, options.normalisation) for one in (source, example.target or ""))
            reason = options.filters.reason((target,) if text else (source, target))
            if reason is None:
                rows.append(PreparedPair(source, target, language or "", example))
            else:
                report.drop(reason, (0, example.line))
        rows = self._in_language(rows, text, report)
        return self._scored(rows, report)

    def _in_language(self, rows: list[PreparedPair], text: bool, report: FilterReport) -> list[PreparedPair]:
        identifier = self.job.identifier
        if identifier is None or not rows:
            return rows
        named = list(self.job.options.languages)
        found = identifier.languages([row.target for row in rows])
        own = [row.language if row.language in named else named[0 if text else 1] for row in rows]
        right = [one == other for one, other in zip(found, own, strict=True)]
        if not text:
            found = identifier.languages([row.source for row in rows])
            right = [one and language == named[0] for one, language in zip(right, found, strict=True)]
        for row, good in zip(rows, right, strict=True):
            if not good:
                report.drop("language", (0, row.example.line))
        return [row for row, good in zip(rows, right, strict=True) if good]

    def _scored(self, rows: list[PreparedPair], report: FilterReport) -> list[PreparedPair]:
        """The rows with the mean log-probability of a target token; without those below the lowest."""
        options = self.job.options
        if not options.scored_by or not rows:
            return rows
        scores = _scores(options.scored_by, rows)
        least = -np.inf if options.min_score is None else options.min_score
        kept = []
        for row, score in zip(rows, scores, strict=True):
            if score >= least:
                kept.append(PreparedPair(row.source, row.target, row.language, row.example, score))
            else:
                report.drop("score", (0, row.example.line))
        return kept


def _scores(run: str, rows: Sequence[PreparedPair]) -> list[float]:
    pairs = [(tagged(row.source, row.language) if row.language else row.source, row.target) for row in rows]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums have another order, and other last digits, with more
    try:
        found = _model(run).score(pairs)
    finally:
        torch.set_num_threads(threads)
    return [one.score / max(len(one.token_scores), 1) for one in found]


@lru_cache(1)
def _model(run: str) -> Any:
    from transduce.inference import load

    return load(run)


@lru_cache(1)
def _tokenizers(run: str) -> Any:
    from transduce.run import Run

    return Run(Path(run)).tokenizers()


def _find_duplicates(job: PreparationJob) -> None:
    """Writes for each part which of its rows are duplicates of earlier ones."""
    options, folder = job.options, job.work / "read"
    counts = [int(record["kept"]) for record in sharded_work.records(folder, range(len(job.parts)))]
    marks = np.zeros(sum(counts), np.uint8)
    if options.near_duplicates is not None:
        with _joined(job, "signatures", "<u4") as signed:
            marks[near_duplicates(signed.reshape(len(marks), -1), options.near_duplicates)] = NEAR_DUPLICATE
    if options.drop_duplicates:
        with _joined(job, "digests", "<u8") as joined:
            digests = joined.reshape(-1, 2)
            firsts = first_rows(digests[:, 0])
            same = (firsts < np.arange(len(marks))) & (digests[firsts, 1] == digests[:, 1])
        marks[same] = DUPLICATE
    ends = np.cumsum(counts)
    for number, (end, count) in enumerate(zip(ends, counts, strict=True)):
        replace_file(job.work / "write" / f"{number:06}.marks", marks[end - count : end].tobytes())
    replace_file(job.work / "duplicates.json", "{}")


@contextmanager
def _joined(job: PreparationJob, name: str, dtype: str) -> Iterator[np.ndarray]:
    """The arrays of all parts as one, mapped from a temporary file."""
    path = job.work / f"all.{name}"
    with open_atomic(path) as file:
        for number in range(len(job.parts)):
            file.write((job.work / "read" / f"{number:06}.{name}").read_bytes())
    yield map_array(path, dtype)
    path.unlink()


@dataclass(frozen=True)
class WriteStep:
    """Tokenises, packs and writes the rows of one part that stay."""

    job: PreparationJob

    def __call__(self, number: int) -> None:
        job, folder = self.job, self.job.work / "write"
        marks = np.frombuffer((folder / f"{number:06}.marks").read_bytes(), np.uint8)
        path = Path(job.output) / job.shard_name(number)
        kept = int((marks == KEEP).sum())
        record: dict[str, Any] = {"rows": kept}
        record["dropped"] = {
            reason: int((marks == mark).sum()) for mark, reason in REASONS.items() if (marks == mark).any()
        }
        record["lines"] = {}
        rows = self._tables(number, marks, record["lines"])
        if not kept:  # all are duplicates, and the manifest names the first
            deque(rows, maxlen=0)
        else:
            tables = self._tokenised(rows)
            first = next(tables)
            with _table_writer(path, job.options.format, first.schema) as write:
                for table in chain([first], tables):
                    write(table)
            record |= {"file": path.name, "sha256": _sha256(path), "bytes": path.stat().st_size}
        mark_done(folder, number, record)

    def _tables(self, number: int, marks: np.ndarray, firsts: dict[str, int]) -> Iterator[Any]:
        """The rows that stay; in `firsts` the first line of each reason."""
        import pyarrow as arrow

        begin = 0
        with arrow.memory_map(str(self.job.work / "read" / f"{number:06}.arrow")) as stream:
            reader = arrow.ipc.open_file(stream)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                own = marks[begin : begin + batch.num_rows]
                for mark, reason in REASONS.items():
                    if reason not in firsts and (places := np.flatnonzero(own == mark)).size:
                        firsts[reason] = batch.column("line")[int(places[0])].as_py()
                begin += batch.num_rows
                yield arrow.Table.from_batches([batch]).filter(arrow.array(own == KEEP))

    def _tokenised(self, tables: Iterator[Any]) -> Iterator[Any]:
        """The tables with the token ids of both sides, and the packed row of each pair."""
        import pyarrow as arrow

        options, opened = self.job.options, 0
        for table in tables:
            if options.tokenizers:
                source, target = _tokenizers(options.tokenizers)
                sources, targets = (table.column(side).to_pylist() for side in SIDES)
                ids = encode_sources(source, sources), encode_targets(target, targets, sources)
                for side, rows in zip(SIDES, ids, strict=True):
                    table = table.append_column(f"{side}_ids", arrow.array(rows, arrow.list_(arrow.int32())))
                if options.pack is not None:
                    bins = _bins(ids, options.pack, opened)
                    opened = max([opened, *(1 + one for one in bins)])
                    table = table.append_column("bin", arrow.array(bins, arrow.int32()))
            yield table


def _bins(ids: tuple[list[list[int]], list[list[int]]], capacity: tuple[int, int], opened: int) -> list[int]:
    """The packed row of each pair, with one end-of-sentence token on each side; -1: it is too long for a row."""
    widths = np.array([[len(one) + 1, len(other) + 2] for one, other in zip(*ids, strict=True)], np.int64).reshape(
        -1, 2
    )
    fits = np.all(widths - [0, 1] <= capacity, axis=1)
    bins = np.full(len(widths), -1)
    if fits.any():
        bins[fits] = opened + assign_bins(widths[fits], np.array(capacity))
    found: list[int] = bins.tolist()
    return found


def _manifest(job: PreparationJob, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Counts by reason with the first place of each, and the shards that were written."""
    tasks = range(len(job.parts))
    report, places, shards = FilterReport(), dict[str, str](), []
    reads, writes = (sharded_work.records(job.work / name, tasks) for name in ("read", "write"))
    for part, read, written in zip(job.parts, reads, writes, strict=True):
        found = FilterReport.from_json(read)
        report.kept += written["rows"]
        lines = {reason: line for reason, (_, line) in found.first.items()} | written["lines"]
        for reason, count in (found.dropped | written["dropped"]).items():
            report.drop(reason, (0, 0), count)
            places.setdefault(reason, f"{part.corpus.path or part.corpus.source}:{lines[reason]}")
        if "file" in written:
            shards.append({name: written[name] for name in ("file", "rows", "bytes", "sha256")})
    counts = {"read": report.read, "kept": report.kept, "dropped": dict(sorted(report.dropped.items()))}
    return {**counts, "first": dict(sorted(places.items())), "shards": shards, "settings": settings}


def _table(rows: Sequence[PreparedPair], *, scored: bool) -> Any:
    import pyarrow as arrow

    extras = [json.dumps(dict(one), ensure_ascii=False) if (one := row.example.extra) else "" for row in rows]
    columns = {
        "source": arrow.array([row.source for row in rows], arrow.string()),
        "target": arrow.array([row.target for row in rows], arrow.string()),
        "language": arrow.array([row.language for row in rows], arrow.string()),
        "file": arrow.array([row.example.file for row in rows], arrow.string()),
        "line": arrow.array([row.example.line for row in rows], arrow.int64()),
        "extra": arrow.array(extras, arrow.string()),
    }
    if scored:
        columns["score"] = arrow.array([row.score for row in rows], arrow.float32())
    return arrow.table(columns)


@contextmanager
def _table_writer(path: Path, kind: str, schema: Any) -> Iterator[Callable[[Any], None]]:
    """Writes tables to one file, which appears when it is complete."""
    import pyarrow as arrow
    import pyarrow.parquet

    opened = pyarrow.parquet.ParquetWriter if kind == "parquet" else arrow.ipc.new_file
    with atomic_path(path) as part, opened(str(part), schema) as writer:
        yield writer.write_table


def _require_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        remedy = "pip install 'transduce[parquet]'"
        raise InputError("prepared corpora need pyarrow", where=str(path), remedy=remedy) from None


def _little_endian(values: np.ndarray) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
