"""Hints about data before training: missing targets, few examples, labels, tags, files, headers, columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from transduce.autoconfig.sizes import FEW_PAIRS
from transduce.autoconfig.statistics import SAMPLE, CorpusStatistics
from transduce.data.readers.corpus import Invalid, read_corpus
from transduce.data.readers.delimited import find_columns, looks_like_header, sampled_cells
from transduce.data.readers.files import corpus_format, located
from transduce.errors import InputError
from transduce.recipe import Corpus

LINES = 20  # of which all must look alike
SUFFIXES = {
    "images": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm"),
    "recordings": (".wav", ".flac", ".ogg", ".mp3", ".opus"),
    "videos": (".mp4", ".webm", ".avi", ".mkv", ".mov"),
}
FILE_TASKS = {
    "images": "--task caption (--task classify-images for labels)",
    "recordings": "--task transcribe",
    "videos": "--task caption-videos (--task classify-videos for labels)",
}


def hints(corpora: Sequence[Corpus], invalid: Invalid, statistics: CorpusStatistics, task: str) -> Iterator[str]:
    """What a user should know about the data before training."""
    if 1 < statistics.pairs < FEW_PAIRS:  # a single one cannot be trained on
        yield (
            f"{statistics.pairs} examples are few: the model may learn them by heart, and its scores say little; "
            "give more, or start from a trained run with init.model=RUN"
        )
    if statistics.target.distinct == 1 and statistics.pairs > 1:
        yield "all targets are the same line: is this the right column? --columns SOURCE,TARGET names others"
    if task == "generate":
        yield from _task_hints(corpora[0], invalid, statistics)
    for corpus in corpora:
        yield from _column_hints(corpus, task)


def check_targets(corpus: Corpus) -> None:
    """Refuses text without targets, with the tasks that need none: the reader would only name its first line."""
    kind = corpus_format(corpus)
    if kind not in ("tsv", "csv") or corpus.format != "pairs" or corpus.columns or corpus.modalities:
        return
    try:
        rows = [cells for cells in sampled_cells(corpus, LINES, quoted=kind == "csv") if cells != [""]]
    except (InputError, ValueError):
        return  # reported with its place when it is read
    if rows and all(len(cells) == 1 for cells in rows):
        raise InputError(
            f"no line has a {'comma' if kind == 'csv' else 'tab'}: these are texts without targets",
            where=str(corpus.path),
            remedy="--task lm trains a language model on them, --task mask a masked one; pairs are "
            "`source TAB target`, or two parallel files: FILE.en,FILE.de",
        )


def _task_hints(corpus: Corpus, invalid: Invalid, statistics: CorpusStatistics) -> Iterator[str]:
    """The task that these pairs look like."""
    if kind := _kind_of_files(corpus, invalid):
        yield f"the sources name {kind}: {FILE_TASKS[kind]} reads the files; as pairs of texts their names are spelled"
    elif statistics.has_tags:
        yield (
            f"every target has as many words as its source, and {statistics.target.vocabulary} different ones: if they "
            "are tags, --task tag trains a tagger in place of a decoder that writes them one after another"
        )
    elif statistics.has_labels:
        yield (
            f"the targets are {statistics.target.distinct} different lines that repeat: if they are labels, "
            "--task classify trains a classifier in place of a decoder that spells them"
        )


def _kind_of_files(corpus: Corpus, invalid: Invalid) -> str | None:
    """What the first sources name, if all of them name files of one kind: images, recordings or videos."""
    if corpus.modalities or corpus.format != "pairs":
        return None
    folder, found = Path(str(corpus.path or corpus.source)).parent, set[str | None]()
    for number, example in enumerate(read_corpus(corpus, invalid)):
        if number == LINES:
            break
        suffix = Path(located(folder, example.source)).suffix.lower() if example.source else ""
        found.add(next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None))
    return found.pop() if len(found) == 1 else None


def _column_hints(corpus: Corpus, task: str) -> Iterator[str]:
    """A first line that may be a header, and columns that are not read."""
    kind = corpus_format(corpus)
    if kind not in ("tsv", "csv") or corpus.format != "pairs" or corpus.header is not None:
        return
    if corpus.columns:  # stated, or found in a header
        return
    try:
        first, *rest = sampled_cells(corpus, SAMPLE, quoted=kind == "csv")
    except (InputError, ValueError):
        return  # reported with its place when it is read
    wanted = corpus.source_columns + 1
    if looks_like_header(first, rest):
        names = find_columns(first, corpus.source_columns) or tuple(first[:wanted])
        yield (
            f"{corpus.path}:1: {', '.join(first[:6])!r} looks like the names of columns, and is read as an example: "
            f"--columns {','.join(names)} takes it as the header"
        )
    counts = [len(cells) for cells in rest or [first]]
    used = {corpus.language_column, corpus.alignment, corpus.document_column} - {None}
    unread = sum(count > wanted for count in counts) >= len(counts) / 2
    if unread and not used and task != "embed":  # its third column may be a similarity
        if wanted == 2 and all(len(cells) > 2 and _is_number(cells[2]) for cells in rest or [first]):
            yield (
                f"{corpus.path}: column 3 holds numbers: if they are similarities of the two texts, --task embed "
                "trains sentence embeddings on them"
            )
            return
        sources = "column 1 is the source" if wanted == 2 else f"columns 1 to {wanted - 1} are the sources"
        yield (
            f"{corpus.path}: of {max(counts)} columns, {sources} and column {wanted} the target: "
            f"--columns {','.join(map(str, range(2, wanted + 2)))} reads others"
        )


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[+-]?\d+(\.\d+)?", cell.strip()) is not None
