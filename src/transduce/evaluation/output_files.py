"""Evaluation of output files without a model: scores, paired tests, and an HTML report of differences."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from transduce.contracts import TextMetric
from transduce.data.readers.corpus import numbered_texts
from transduce.data.readers.files import stored_lines
from transduce.errors import InputError
from transduce.evaluation.evaluate import Evaluation, MetricSpec, SystemOutput, evaluate, find_metrics, line_statistics
from transduce.evaluation.significance import PairedTestResult, paired_bootstrap, verdict

RESAMPLES = 1000


@dataclass(frozen=True)
class FileTest:
    """Paired test of two files of outputs by one metric: first minus other."""

    metric: str
    first: str
    other: str
    result: PairedTestResult
    verdict: str


@dataclass(frozen=True)
class OutputComparison:
    """The scores of files of outputs, and the paired tests of the first against each other one."""

    systems: dict[str, Evaluation]
    tests: tuple[FileTest, ...]
    texts: dict[str, list[str]]
    references: list[tuple[str, ...]]

    @property
    def verdicts(self) -> list[str]:
        return [f"{test.metric}: {test.verdict}" for test in self.tests]

    @property
    def signatures(self) -> list[str]:
        first = next(iter(self.systems.values()))
        return [score.signature for score in first.scores.values()]

    def to_json(self) -> dict[str, Any]:
        systems = {name: evaluation.to_json() for name, evaluation in self.systems.items()}
        return {"systems": systems, "tests": [asdict(test) for test in self.tests], "errors": self._errors()}

    def closest(self, name: str, line: int) -> tuple[str, list[ErrorSpan]]:
        """The reference with the fewest wrong words, and the error spans of this output."""
        spans = {reference: error_spans(self.texts[name][line], reference) for reference in self.references[line]}
        return min(spans.items(), key=lambda item: wrong_words(item[1]))

    def _errors(self) -> dict[str, list[dict[str, Any]]]:
        """The lines of each system that differ from all references, with their error spans."""
        lines = range(len(self.references))
        found = {name: {line: self.closest(name, line) for line in lines} for name in self.texts}
        return {
            name: [
                {
                    "line": line + 1,
                    "reference": reference,
                    "spans": [span.to_json() for span in spans],
                }
                for line, (reference, spans) in rows.items()
                if spans
            ]
            for name, rows in found.items()
        }


def evaluate_files(
    hypotheses: Sequence[str | Path],
    references: Sequence[str | Path],
    metrics: Sequence[MetricSpec],
    sources: str | Path | None = None,
) -> OutputComparison:
    """Scores each file of outputs against the references, which may be several files.

    Some metrics read the sources too.
    """
    for metric in find_metrics(metrics):
        if not isinstance(metric, TextMetric):
            raise InputError(f"{metric.name} needs a model", where="--metrics", remedy="choose a metric of texts")
    gold = [_lines(path) for path in references]
    source_lines = None if sources is None else _lines(sources)
    texts = {str(path): _lines(path) for path in hypotheses}
    if len(texts) < len(hypotheses):
        raise InputError("a file of outputs is given twice", where="--hypotheses", remedy="name different files")
    others = [] if source_lines is None else [(str(sources), source_lines)]
    for path, lines in [*texts.items(), *zip(map(str, references), gold, strict=True), *others]:
        if len(lines) != len(gold[0]):
            raise InputError(
                f"{len(lines):,} lines, but {references[0]} has {len(gold[0]):,}",
                where=path,
                remedy="all files need one line for each source, in the same order",
            )
    found: list[tuple[str, ...]] = list(zip(*gold, strict=True))
    outputs = {name: SystemOutput(rows, sources=source_lines) for name, rows in texts.items()}
    systems = {name: evaluate(output, found, None, metrics, RESAMPLES) for name, output in outputs.items()}
    return OutputComparison(systems, tuple(_paired_tests(outputs, found, metrics)), texts, found)


def _lines(path: str | Path) -> list[str]:
    return list(numbered_texts(stored_lines(str(path)), str(path)))


def _paired_tests(
    outputs: dict[str, SystemOutput], references: list[tuple[str, ...]], metrics: Sequence[MetricSpec]
) -> Iterator[FileTest]:
    """One test for each metric and each system but the first."""
    first, *others = outputs
    for metric in find_metrics(metrics) if others else ():
        baseline = line_statistics(metric, outputs[first], references)
        for other in others:
            statistics = line_statistics(metric, outputs[other], references)
            result = paired_bootstrap(metric, baseline, statistics, RESAMPLES, seed=1)
            yield FileTest(metric.name, first, other, result, verdict(result, (first, other)))


@dataclass(frozen=True)
class ErrorSpan:
    """Words of an output that differ from the reference: output[begin:end] should be `expected`."""

    begin: int
    end: int
    expected: tuple[str, ...]

    @property
    def kind(self) -> str:
        if not self.expected:
            return "insertion"
        return "deletion" if self.begin == self.end else "substitution"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind} | asdict(self)


def error_spans(output: str, reference: str) -> list[ErrorSpan]:
    """The smallest differences in words, in order; without them the two texts have the same words."""
    own, gold = output.split(), reference.split()
    matcher = SequenceMatcher(None, own, gold, autojunk=False)
    changes = (change for change in matcher.get_opcodes() if change[0] != "equal")
    return [ErrorSpan(begin, end, tuple(gold[first:last])) for _, begin, end, first, last in changes]


def wrong_words(spans: Sequence[ErrorSpan]) -> int:
    """Words that are inserted, missing or substituted."""
    return sum(max(span.end - span.begin, len(span.expected)) for span in spans)


KINDS = ("insertion", "deletion", "substitution")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{vertical-align:top;text-align:left;border-top:1px solid #ccc;"
    "padding:.3em .6em}del{background:#ffd9d9}ins{background:#d9f2d9}del,ins{text-decoration:none}"
    ".substitution{background:#ffe9bf}ins.substitution{border-bottom:2px solid #2a7}"
    ".name{color:#666;white-space:nowrap}"
)


def difference_report(found: OutputComparison) -> str:
    """A self-contained page: scores, paired tests, counts of errors, and every line, most wrong words first.

    Words of an output that the closest reference lacks are <del>, words that the output lacks are <ins>.
    """
    marks = {name: [found.closest(name, line) for line in range(len(found.references))] for name in found.texts}
    wrong = [sum(wrong_words(rows[line][1]) for rows in marks.values()) for line in range(len(found.references))]
    order = sorted(range(len(wrong)), key=lambda line: (-wrong[line], line))
    verdicts = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in found.verdicts)
    signatures = "".join(f"<p class=name>{html.escape(one)}</p>" for one in found.signatures)
    rows = (_line_row(found, line, {name: marks[name][line] for name in marks}) for line in order)
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>Differences</title>"
        f"<style>{STYLE}</style><h1>Scores</h1>{_score_table(found)}{verdicts}{signatures}"
        f"<h1>Errors</h1>{_error_table(marks)}<h1>Lines</h1><table>{''.join(rows)}</table>\n"
    )


def _score_table(found: OutputComparison) -> str:
    cells = (
        (name, metric, f"{score.value:.2f}", f"{score.low:.2f} to {score.high:.2f}")
        for name, evaluation in found.systems.items()
        for metric, score in evaluation.scores.items()
    )
    return _table(("system", "metric", "score", "95 % interval"), cells)


def _error_table(marks: dict[str, list[tuple[str, list[ErrorSpan]]]]) -> str:
    """The number of spans of each kind."""
    counts = {name: Counter(span.kind for _, spans in rows for span in spans) for name, rows in marks.items()}
    return _table(("system", *KINDS), ((name, *(str(count[kind]) for kind in KINDS)) for name, count in counts.items()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr><td>{'<td>'.join(map(html.escape, row))}</tr>" for row in rows)
    return f"<table><tr><th>{'<th>'.join(head)}</tr>{body}</table>"


def _line_row(found: OutputComparison, line: int, marks: dict[str, tuple[str, list[ErrorSpan]]]) -> str:
    """The references of a line, and the marked output of each system."""
    rows = [
        f"<tr><td class=name>{line + 1} reference<td>{html.escape(reference)}</tr>"
        for reference in dict.fromkeys(found.references[line])
    ]
    for name, (_, spans) in marks.items():
        rows.append(f"<tr><td class=name>{html.escape(name)}<td>{_marked(found.texts[name][line], spans)}</tr>")
    return "".join(rows)


def _marked(output: str, spans: Sequence[ErrorSpan]) -> str:
    words, place = output.split(), 0
    parts: list[str] = []
    for span in spans:
        parts += map(html.escape, words[place : span.begin])
        if span.end > span.begin:
            parts.append(f"<del class={span.kind}>{html.escape(' '.join(words[span.begin : span.end]))}</del>")
        if span.expected:
            parts.append(f"<ins class={span.kind}>{html.escape(' '.join(span.expected))}</ins>")
        place = span.end
    return " ".join([*parts, *map(html.escape, words[place:])])
