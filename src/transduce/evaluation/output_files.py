"""Evaluation of output files without a model: scores, paired tests, and an HTML report of differences."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from transduce.contracts import TextMetric
from transduce.data.readers.corpus import numbered_texts
from transduce.data.readers.files import stored_lines
from transduce.errors import InputError
from transduce.evaluation.evaluate import Evaluation, SystemOutput, evaluate, find_metric, line_statistics
from transduce.evaluation.significance import paired_bootstrap, verdict

RESAMPLES = 1000


@dataclass(frozen=True)
class OutputComparison:
    """The scores of files of outputs, and the paired tests of the first against each other one."""

    systems: dict[str, Evaluation]
    verdicts: tuple[str, ...]
    texts: dict[str, list[str]]
    references: list[tuple[str, ...]]

    @property
    def signatures(self) -> list[str]:
        first = next(iter(self.systems.values()))
        return [score.signature for score in first.scores.values()]

    def to_json(self) -> dict[str, Any]:
        systems = {name: evaluation.to_json() for name, evaluation in self.systems.items()}
        return {"systems": systems, "verdicts": list(self.verdicts)}


def evaluate_files(
    hypotheses: Sequence[str | Path], references: Sequence[str | Path], metrics: Sequence[str]
) -> OutputComparison:
    """Scores each file of outputs against the references, which may be several files."""
    for name in metrics:
        if not isinstance(find_metric(name), TextMetric):
            raise InputError(f"{name} needs a model", where="--metrics", remedy="choose a metric of texts")
    gold = [_lines(path) for path in references]
    texts = {str(path): _lines(path) for path in hypotheses}
    if len(texts) < len(hypotheses):
        raise InputError("a file of outputs is given twice", where="--hypotheses", remedy="name different files")
    for path, lines in [*texts.items(), *zip(map(str, references), gold, strict=True)]:
        if len(lines) != len(gold[0]):
            raise InputError(
                f"{len(lines):,} lines, but {references[0]} has {len(gold[0]):,}",
                where=path,
                remedy="all files need one line for each source, in the same order",
            )
    found: list[tuple[str, ...]] = list(zip(*gold, strict=True))
    systems = {name: evaluate(rows, found, None, metrics, RESAMPLES) for name, rows in texts.items()}
    return OutputComparison(systems, tuple(_paired_tests(texts, found, metrics)), texts, found)


def _lines(path: str | Path) -> list[str]:
    return list(numbered_texts(stored_lines(str(path)), str(path)))


def _paired_tests(texts: dict[str, list[str]], references: list[tuple[str, ...]], metrics: Sequence[str]) -> list[str]:
    """One sentence for each metric and each system but the first."""
    first, *others = texts
    found = []
    for metric in map(find_metric, metrics):
        baseline = line_statistics(metric, SystemOutput(texts[first]), references) if others else None
        for other in others:
            statistics = line_statistics(metric, SystemOutput(texts[other]), references)
            assert baseline is not None
            result = paired_bootstrap(metric, baseline, statistics, RESAMPLES, seed=1)
            found.append(f"{metric.name}: {verdict(result, (first, other))}")
    return found


@dataclass(frozen=True)
class ErrorSpan:
    """Words of an output that differ from the reference: output[begin:end] should be `expected`."""

    begin: int
    end: int
    expected: tuple[str, ...]


def error_spans(output: str, reference: str) -> list[ErrorSpan]:
    """The smallest differences in words, in order; without them the two texts have the same words."""
    own, gold = output.split(), reference.split()
    matcher = SequenceMatcher(None, own, gold, autojunk=False)
    changes = (change for change in matcher.get_opcodes() if change[0] != "equal")
    return [ErrorSpan(begin, end, tuple(gold[first:last])) for _, begin, end, first, last in changes]


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td{vertical-align:top;border-top:1px solid #ccc;padding:.3em .6em}"
    "del{background:#ffd9d9;text-decoration:none}ins{background:#d9f2d9;text-decoration:none}"
    ".name{color:#666;white-space:nowrap}"
)


def difference_report(found: OutputComparison) -> str:
    """A self-contained page: the scores, then every line with the words that differ, lines with most errors first.

    Words of an output that the first reference lacks are <del>, words that the output lacks are <ins>.
    """
    scores = "".join(
        f"<tr><td>{html.escape(name)}<td>{metric}<td>{score.value:.2f}<td>{score.low:.2f} to {score.high:.2f}</tr>"
        for name, evaluation in found.systems.items()
        for metric, score in evaluation.scores.items()
    )
    verdicts = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in found.verdicts)
    lines = sorted(range(len(found.references)), key=lambda line: (-_errors(found, line), line))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Differences</title><style>{STYLE}</style>"
        f"<h1>Scores</h1><table>{scores}</table>{verdicts}<h1>Lines</h1>"
        f"<table>{''.join(_line_rows(found, line) for line in lines)}</table>\n"
    )


def _errors(found: OutputComparison, line: int) -> int:
    return sum(len(error_spans(rows[line], found.references[line][0])) for rows in found.texts.values())


def _line_rows(found: OutputComparison, line: int) -> str:
    reference = found.references[line][0]
    rows = [f"<tr><td class=name>{line + 1} reference<td>{html.escape(reference)}</tr>"]
    for name, texts in found.texts.items():
        rows.append(f"<tr><td class=name>{html.escape(name)}<td>{_marked(texts[line], reference)}</tr>")
    return "".join(rows)


def _marked(output: str, reference: str) -> str:
    words, place = output.split(), 0
    parts: list[str] = []
    for span in error_spans(output, reference):
        parts += map(html.escape, words[place : span.begin])
        if span.end > span.begin:
            parts.append(f"<del>{html.escape(' '.join(words[span.begin : span.end]))}</del>")
        if span.expected:
            parts.append(f"<ins>{html.escape(' '.join(span.expected))}</ins>")
        place = span.end
    return " ".join([*parts, *map(html.escape, words[place:])])
