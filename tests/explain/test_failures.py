"""Failure detectors: constructed outputs and attention, a model that is made to fail, counts in commands."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from run_fixtures import Command, colour_pairs

import transduce
from transduce.explain.attention import Explanation
from transduce.explain.failures import (
    Loop,
    attention_warnings,
    count_warnings,
    longest_loop,
    low_confidence,
    repetition,
    truncation,
)


def explanation(weights: np.ndarray, source: str, target: str) -> Explanation:
    """One layer and one head over words; the last row and column are </s>."""
    tokens, words = [*source.split(), "</s>"], [*range(len(source.split())), -1]
    outputs = [*target.split(), "</s>"]
    own = [*range(len(outputs) - 1), -1]
    return Explanation(source, target, tokens, outputs, words, own, [-0.1] * len(outputs), -0.1 * len(outputs), weights)


def kinds(explained: Explanation) -> list[str]:
    return [one.kind for one in attention_warnings(explained)]


def test_loops_by_exhaustive_search() -> None:
    chance = np.random.default_rng(5)
    for _ in range(60):
        tokens = chance.integers(0, 2, int(chance.integers(2, 13))).tolist()
        covered = 0
        for begin in range(len(tokens)):
            for period in range(1, 9):
                count = 1
                while (
                    tokens[begin + count * period :][:period] == tokens[begin:][:period]
                    and len(tokens) >= begin + (count + 1) * period
                ):
                    count += 1
                covered = max(covered, count * period if count > 1 else 0)
        found = longest_loop(tokens)
        assert (0 if found is None else found.count * found.period) == covered
        if found is not None:
            part = tokens[found.begin : found.begin + found.period]
            assert tokens[found.begin : found.begin + found.count * found.period] == part * found.count
    assert longest_loop(list("xabcabcabc")) == Loop(1, 3, 3)


def test_repetition_is_a_loop_that_the_source_does_not_have() -> None:
    found = repetition(["the", "cat", "sat", "the", "cat", "sat", "the", "cat", "sat"], "le chat était assis")
    assert found is not None
    assert (found.value, found.begin, found.end) == (3, 0, 9)
    assert repetition(["no", "no", "no", "no", "no", "no"], "non") is not None
    assert repetition(["no", "no", "no", "no", "no", "no"], "non non non non non non") is None
    assert repetition(list("2000-01-01"), "1. Januar 2000") is None
    assert repetition(["a", "b", "a", "b", "c"], "x") is None


def test_confidence_is_the_geometric_mean() -> None:
    assert low_confidence([math.log(0.9), math.log(0.2)]) is None  # 0.42
    found = low_confidence([math.log(0.2), math.log(0.2)])
    assert found is not None
    assert found.value == pytest.approx(0.2)
    assert low_confidence([]) is None


def test_truncation_of_output_and_source() -> None:
    assert [one.kind for one in truncation(False, True, 9)] == ["truncated_output", "truncated_source"]
    assert truncation(True, False, 9) == []


def test_attention_on_the_end_of_the_source_is_detached() -> None:
    source, target = "a b c d e f", "A B C D E F"
    aligned, stuck = np.eye(7)[None, None], np.zeros((1, 1, 7, 7))
    stuck[..., -1], stuck[..., 0] = 0.9, 0.1
    assert kinds(explanation(aligned, source, target)) == []
    found = attention_warnings(explanation(stuck, source, target))
    assert [one.kind for one in found] == ["detached_attention", "dropped_source"]
    assert found[0].value == pytest.approx(0.9)
    assert "'</s>'" in found[0].message
    assert (found[1].begin, found[1].end) == (1, 6)


def test_words_that_no_head_sees_are_dropped() -> None:
    weights = np.zeros((1, 2, 5, 9))
    for row in range(5):
        weights[0, 0, row, row] = weights[0, 1, row, 0] = 1  # the last four words of eight are never seen
    explained = explanation(weights, "a b c d e f g h", "A B C D")
    assert kinds(explained) == ["dropped_source"]
    weights[0, 1, 2] = np.eye(9)[5]
    weights[0, 1, 1] = np.eye(9)[6]
    assert kinds(explanation(weights, "a b c d e f g h", "A B C D")) == []


def test_counts_are_of_lines() -> None:
    lines = [truncation(False, True, 3), truncation(False, False, 3), []]
    assert count_warnings(lines) == {"lines": 2, "truncated_output": 2, "truncated_source": 1}


def test_a_model_that_is_made_to_fail(model: transduce.Model) -> None:
    source = "red blue green white red blue"
    (good,) = model.generate(["red blue"])
    assert good.warnings == ()
    word = colour_pairs(1)[0][1].split()[0]
    looped = model.generate([source], interventions=[f"force-token:{step}:{word}" for step in range(6)])[0]
    assert {"repetition", "low_confidence"} <= {one.kind for one in looped.warnings}
    assert looped.token_warnings == looped.warnings[: len(looped.token_warnings)]
    forced = model.intervene(["force-attention:cross:all:0", *(f"force-token:{n}:{word}" for n in range(4))])
    stuck = {one.kind for one in forced.generate([source])[0].warnings}
    assert {"detached_attention", "dropped_source"} <= stuck
    (short,) = model.generate([source], max_length=2)
    assert "truncated_output" in {one.kind for one in short.warnings}


def test_commands_show_and_count_warnings(attention_run: Path, tmp_path: Path, command: Command) -> None:
    lines, record = tmp_path / "lines.txt", tmp_path / "scores.json"
    lines.write_text("red blue\n")
    word = colour_pairs(1)[0][1].split()[0]
    loop = [part for step in range(6) for part in ("--intervene", f"force-token:{step}:{word}")]
    called = command("generate", attention_run, lines, "--json", *loop)
    shown = json.loads(called.out)
    assert "repetition" in [one["kind"] for one in shown["warnings"]], called.err
    assert "outputs with a warning, repetition: 1" in called.err
    called = command("generate", attention_run, lines, *loop)
    assert "repetition: 1" in called.err
    called = command("generate", attention_run, lines, "--json", "--no-warnings", *loop)
    assert "warnings" not in json.loads(called.out)
    assert "repetition" not in called.err
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(20)))
    called = command("evaluate", attention_run, pairs, "--json", record, "--set", "max_length=1", "--beam", "1")
    assert "outputs with warnings: 20 of 20: " in called.out, called.err
    assert json.loads(record.read_text())["warnings"]["truncated_output"] == 20
    called = command("evaluate", attention_run, pairs, "--no-warnings")
    assert "outputs with warnings" not in called.out
