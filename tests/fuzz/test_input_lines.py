"""Input lines of any bytes: one output line for each, the same as alone, or an error that names the line."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
from fuzzing import Outcome, fuzz
from run_fixtures import Called, call

import transduce
import transduce.cli.embed
import transduce.cli.evaluate
import transduce.cli.explain
import transduce.cli.generate
from transduce.errors import InputError
from transduce.storage import single_line

PIECES = (
    "red", "green", "blue white", " ", "  ", "\t", "", "é", "e\u0301", "ß", "語", "🙂", "👩\u200d👩\u200d👧",
    "\u202eabc", "שלום", "مرحبا", "\u200b", "\ufeff", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\r", "\x01",
    "\x1b[31m", "\x7f", "\ufffd", "\uffff", "\U0010ffff", "<s>", "</s>", "<unk>", "<pad>", "<mask>", "▁", "0" * 50,
    "%s", "{}", "\\n", "red" * 2000,
)  # fmt: skip
BAD = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\xf5\x80\x80\x80", b"\xc0\xaf", b"\xe2\x82")
COMMANDS = (transduce.cli.generate, transduce.cli.evaluate, transduce.cli.explain, transduce.cli.embed)


@pytest.fixture(autouse=True)
def _one_model(model: transduce.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands use one loaded model, so that a case takes milliseconds."""
    for module in COMMANDS:
        for name in ("load_model", "load_ensemble"):
            monkeypatch.setattr(module, name, lambda *_: model, raising=False)


def draw_line(draw: random.Random) -> str:
    return "".join(draw.choice(PIECES) for _ in range(draw.choice((0, 1, 2, 3, 5, 9))))


def draw_input(draw: random.Random, lines: list[str]) -> tuple[bytes, int | None]:
    """The lines as a file, and the number of the first line that is no text."""
    raw, bad = [line.encode() for line in lines], None
    if raw and draw.random() < 0.2:
        bad = draw.randrange(len(raw))
        where = draw.randrange(len(raw[bad]) + 1)
        if b"\n" not in raw[bad][:where] and raw[bad][:where].decode(errors="ignore").encode() == raw[bad][:where]:
            raw[bad] = raw[bad][:where] + draw.choice(BAD) + b"x" + raw[bad][where:]
        else:
            bad = None
    return draw.choice((b"\n", b"\r\n")).join(raw) + b"\n" * bool(raw), None if bad is None else bad + 1


def check_refusal(called: Called, bad: int | None) -> None:
    """An error of the command becomes an InputError of the case, if it names the line."""
    assert "Traceback" not in called.err
    if called.code == 0:
        assert bad is None, "a line that is no text was accepted"
        return
    assert called.code == 2, called
    assert re.search("^error: ", called.err, re.MULTILINE), called.err
    assert bad is None or f":{bad}:" in called.err, called.err
    raise InputError(called.err)


def seen(line: str, first: bool) -> str:
    """A line as the program reads it: without carriage return at its end and byte order mark at the start."""
    line = line.removesuffix("\r")
    return line.removeprefix("\ufeff") if first else line


def test_lines_to_generate(model: transduce.Model, tmp_path: Path) -> None:
    def attempt(draw: random.Random) -> Outcome:
        lines = [draw_line(draw) for _ in range(draw.choice((0, 1, 2, 5)))]
        raw, bad = draw_input(draw, lines)
        form = draw.choice(((), ("--json",), ("--align",), ("--pairs",)))
        if draw.random() < 0.5:
            called = call("generate", "run", *form, stdin=raw)
        else:
            (tmp_path / "lines").write_bytes(raw)
            called = call("generate", "run", tmp_path / "lines", *form)
        check_refusal(called, bad)
        texts = [seen(line, number == 0) for number, line in enumerate(lines)]
        answers = called.out.removesuffix("\n").split("\n") if lines else []
        assert len(answers) == len(texts), (lines, called.out)
        alone = [model.generate([text])[0] for text in texts]
        if form == ("--json",):
            assert [json.loads(answer)["text"] for answer in answers] == [one.text for one in alone]
        elif form == ("--pairs",):
            assert answers == [f"{one.source}\t{single_line(one.text)}" for one in alone]
        elif form == ():
            assert answers == [single_line(one.text) for one in alone]
        else:
            assert all(re.fullmatch(r"(\d+-\d+( \d+-\d+)*)?", answer) for answer in answers)
        return "accepted"

    fuzz("input lines", "lines of odd characters, invalid UTF-8, NUL and great length", attempt, cases=40)


def test_pairs_to_score(model: transduce.Model, tmp_path: Path) -> None:
    def attempt(draw: random.Random) -> Outcome:
        odd = draw.random() < 0.8  # without a tab of its own in a text, a line has two columns
        count = draw.randrange(1, 5)
        sides = [[draw_line(draw).replace("\t", "" if odd else "\t") for _ in "ab"] for _ in range(count)]
        raw, bad = draw_input(draw, ["\t".join(pair) for pair in sides])
        (tmp_path / "pairs.tsv").write_bytes(raw)
        name = draw.choice(("score", "align", "similarity", "embed"))
        called = call(name, "run", tmp_path / "pairs.tsv", *["--tsv"] * (name == "embed"))
        check_refusal(called, bad)
        answers = called.out.removesuffix("\n").split("\n")
        assert len(answers) == len(sides), (name, called.out)
        if name != "align":
            assert all(math.isfinite(float(value)) for answer in answers for value in answer.split("\t"))
        return "accepted"

    fuzz("pairs", "pairs of odd texts for score, align, similarity and embed", attempt, cases=30)
