"""Lines of the command `generate`: input with prefixes, constraints and languages; output in its formats."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from transduce.errors import InputError

if TYPE_CHECKING:
    from transduce.inference import Prediction
    from transduce.inference.terminology import Constraints, Glossary

OutputFormat = Literal["text", "multiline", "timestamps", "json", "alignment", "pairs", "nbest"]


@dataclass(frozen=True)
class InputReader:
    """Reads input lines as arguments of `Model.generate`: texts, prefixes and constraints."""

    file: str
    prefix: str | None  # of every output
    json: bool  # True: lines are JSON objects
    glossary: Glossary | None
    avoided: tuple[str, ...]
    language: str | None = None  # of every output
    languages: tuple[str, ...] = ()  # of the model

    def arguments(self, lines: list[str], first_number: int) -> dict[str, Any]:
        from transduce.inference.terminology import ConstrainedLine, Constraints

        given: dict[str, Any] = {"first_number": first_number}
        rows = [ConstrainedLine(line) for line in lines]
        if self.json:
            name = "standard input" if self.file == "-" else self.file
            rows = [ConstrainedLine.parse(line, f"{name}:{first_number + row + 1}") for row, line in enumerate(lines)]
        prefixes = [row.prefix or self.prefix or "" for row in rows]
        if any(prefixes):
            given["prefixes"] = prefixes
        if self.json or self.glossary is not None or self.avoided:
            terms = Constraints(banned=self.avoided)
            given["constraints"] = [row.constraints + terms + self._terms(row.text) for row in rows]
        texts = [self._tagged(row.text, first_number + number) for number, row in enumerate(rows, 1)]
        return {"texts": texts, **given}

    def _tagged(self, text: str, number: int) -> str:
        """The text with the tag of its language, where the model has several."""
        from transduce.data.languages import split_language, tagged

        if self.language is not None:
            return tagged(text, self.language)
        if self.languages and split_language(text)[0] is None:
            raise InputError(
                f"in which language? This run has {', '.join(self.languages)}",
                where=f"{'standard input' if self.file == '-' else self.file}:{number}",
                remedy=f"give --to {self.languages[0]}, or begin the line with <2{self.languages[0]}>",
            )
        return text

    def _terms(self, text: str) -> Constraints:
        from transduce.inference.terminology import Constraints

        return Constraints() if self.glossary is None else self.glossary.constraints(text)


@dataclass
class OutputWriter:
    """Formats predictions, and counts the unusual ones."""

    format: OutputFormat
    file: str
    source_columns: int
    line_number: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    warnings: bool = True  # whether failure detectors run; those of attention with JSON alone

    def line(self, prediction: Prediction) -> str:
        from transduce.cli.display import prediction_json
        from transduce.explain.alignment import pharaoh
        from transduce.storage import single_line

        self.line_number += 1
        self.counts["empty lines"] += not prediction.tokens
        self.counts["sources split at `max_source_length`"] += bool(prediction.parts)
        self.counts["sources cut to `max_source_length`"] += prediction.source_cut
        self.counts["outputs cut at the maximum length"] += not prediction.complete
        if self.warnings:
            found = prediction.warnings if self.format == "json" else prediction.token_warnings
            for kind in {one.kind for one in found if not one.kind.startswith("truncated")}:
                self.counts[f"outputs with a warning, {kind.replace('_', ' ')}"] += 1
        if self.format == "json":
            return prediction_json(prediction, warnings=self.warnings)
        if self.format == "alignment":
            unaligned = bool(prediction.tokens) and (prediction.parts or (prediction,))[0].attention is None
            self.counts["lines without alignment, because the model has no attention"] += unaligned
            return pharaoh(prediction.alignment)
        if self.format == "pairs":
            where = f"{self.file}:{self.line_number}"
            return pair_line(prediction.source, single_line(prediction.text), self.source_columns, where)
        if self.format == "nbest":
            hypotheses = prediction.nbest or (prediction,)
            return "\n".join(nbest_line(self.line_number - 1, single_line(one.text), one.score) for one in hypotheses)
        if self.format == "timestamps":
            return " ".join(f"[{one.start:.2f}-{one.end:.2f}] {single_line(one.text)}" for one in prediction.segments)
        return prediction.text if self.format == "multiline" else single_line(prediction.text)

    def print_counts(self) -> None:
        for what, count in self.counts.items():
            if count:
                print(f"{what}: {count:,}", file=sys.stderr)


def nbest_line(number: int, text: str, score: float) -> str:
    """A line of an n-best list as Moses and Marian write it; sources are counted from 0."""
    return f"{number} ||| {text} ||| F0= {score:.6g} ||| {score:.6g}"


def pair_line(source: str, output: str, source_columns: int, where: str) -> str:
    """`source TAB output`. A tab inside a text is an error: it would end a column, and an escaped one would be learned.

    The student model reads the same number of source columns as the teacher.
    """
    if source.count("\t") != source_columns - 1 and source.strip():
        raise InputError(
            f"{source.count(chr(9))} tabs in a source of {source_columns} columns",
            where=where,
            remedy="a tab ends a column: remove it from the text, or generate with --json",
        )
    if "\t" in output:
        raise InputError("the output contains a tab, which would end a column", where=where, remedy="use --json")
    return f"{source}\t{output}"
