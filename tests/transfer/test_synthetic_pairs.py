"""`transduce backtranslate`: pairs of monolingual text, filters, mixing, continuation after an interruption."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from rich.console import Console
from run_fixtures import colour_pairs

import transduce
from transduce.inference import Model, Prediction
from transduce.transfer.synthetic_pairs import STUDENT, PairOptions, write_pairs


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mono.txt"
    path.write_text("".join(f"{source}\n" for source, _ in colour_pairs(12, seed=5)) + "\nred blue\nred blue\n")
    return path


def test_pairs_are_the_outputs_of_the_model_in_both_directions(attention_run, text, tmp_path, command):
    lines = text.read_text().splitlines()
    outputs = [one.text for one in transduce.load(attention_run).generate(lines, beam=2)]
    expected = dict.fromkeys((output, line) for line, output in zip(lines, outputs, strict=True) if line)
    back, forward = tmp_path / "back.tsv", tmp_path / "forward.tsv"
    called = command("backtranslate", attention_run, text, "--output", back, "--beam", "2", "--tag", "<BT>")
    assert called.code == 0, called.err
    assert back.read_text().splitlines() == [f"<BT> {output}\t{line}" for output, line in expected]
    assert f"synthetic pairs: {len(expected)}" in called.err
    assert "empty: 1" in called.err
    assert not (tmp_path / "back.tsv.parts").exists()
    assert command("backtranslate", attention_run, text, "--output", forward, "--beam", "2", "--forward").code == 0
    assert forward.read_text().splitlines() == [f"{line}\t{output}" for output, line in expected]


def test_pairs_in_json_are_those_in_columns(attention_run, text, tmp_path, command):
    (tmp_path / "real.tsv").write_text("a\tb\n")
    for name in ("all.tsv", "all.jsonl"):
        called = command(
            "backtranslate", attention_run, text, "--output", tmp_path / name, "--mix", tmp_path / "real.tsv"
        )
        assert called.code == 0, called.err
    objects = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    lines = (tmp_path / "all.tsv").read_text().splitlines()
    assert [f"{one['source']}\t{one['target']}" for one in objects] == lines
    assert lines[0] == "a\tb"


def test_pairs_of_a_student_are_filtered_for_empty_and_truncated_outputs_only(model, tmp_path):
    console, output = Console(quiet=True), tmp_path / "train.jsonl"
    texts = ["red blue", "red blue", "", "green"]
    counts = write_pairs(model, [texts[:3], texts[3:]], output, STUDENT, {}, console)
    assert counts == {"synthetic pairs": 3, "empty": 1}
    expected = [{"source": one.source, "target": one.text} for one in model.generate(texts) if one.source]
    assert [json.loads(line) for line in output.read_text().splitlines()] == expected


def test_real_pairs_are_mixed_in_and_upsampled(attention_run, text, tmp_path, command):
    (tmp_path / "real.tsv").write_text("a\tb\nc\td\n")
    options = ("--output", tmp_path / "all.tsv", "--mix", tmp_path / "real.tsv", "--upsample", "2")
    called = command("backtranslate", attention_run, text, *options)
    assert called.code == 0, called.err
    assert (tmp_path / "all.tsv").read_text().startswith("a\tb\nc\td\na\tb\nc\td\n")
    (tmp_path / "real.tsv").write_text("a\tb\nc\n")
    called = command("backtranslate", attention_run, text, *options)
    assert (called.code, "real.tsv:2: 1 columns" in called.err) == (2, True)


def test_an_interrupted_command_continues_to_the_same_bytes(attention_run, text, tmp_path, command, monkeypatch):
    monkeypatch.setattr("transduce.data.readers.corpus.in_windows.__kwdefaults__", {"size": 4, "ready": lambda: True})
    whole, output = tmp_path / "whole.tsv", tmp_path / "part.tsv"
    assert command("backtranslate", attention_run, text, "--output", whole, "--sample").code == 0
    calls, generate = Counter(), Model.generate

    def interrupted(self, *arguments, **settings):
        calls["generate"] += 1
        if calls["generate"] == 3:
            raise KeyboardInterrupt
        return generate(self, *arguments, **settings)

    monkeypatch.setattr(Model, "generate", interrupted)
    assert command("backtranslate", attention_run, text, "--output", output, "--sample").code != 0
    assert not output.exists()
    changed = command("backtranslate", attention_run, text, "--output", output, "--beam", "2")
    assert (changed.code, "another model, text or setting" in changed.err) == (2, True)
    assert command("backtranslate", attention_run, text, "--output", output, "--sample").code == 0
    assert output.read_bytes() == whole.read_bytes()
    assert calls["generate"] == 5  # two windows before the interruption, which cost one call, and the two others


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [
        (Prediction("a b", "c d", (), ()), None),
        (Prediction("a b", " ", (), ()), "empty"),
        (Prediction("a b", "a b", (), ()), "copies"),
        (Prediction("a b", "c\td", (), ()), "with a tab"),
        (Prediction("a b", "c d", (), (), complete=False), "cut at the maximum length"),
        (Prediction("a", "c d e f g", (), ()), "beyond the length ratio"),
    ],
)
def test_pairs_are_left_out_by_reason(prediction, reason):
    assert PairOptions().reason(prediction) == reason
