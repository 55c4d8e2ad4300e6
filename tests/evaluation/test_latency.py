"""Latency of simultaneous translation: values computed by hand from the definitions of the papers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_fixtures import Command

import transduce
from transduce.errors import InputError
from transduce.evaluation.held_out import (
    average_lagging,
    average_proportion,
    differentiable_average_lagging,
    mean_latencies,
)
from transduce.inference.streaming import simulate_alignatt, simulate_wait_k

BY_HAND = [  # delays, |x|, AL, AP, DAL
    ([3, 4, 5, 5, 5], 5, 3.0, 22 / 25, 3.0),  # wait-3, equal lengths: (3 + (4 - 1) + (5 - 2)) / 3
    ([2, 4], 4, 2.0, 6 / 8, 2.0),  # gamma 1/2: (2 + (4 - 2)) / 2
    ([1, 2, 2, 2], 2, 1.25, 7 / 8, 1.375),  # gamma 2: (1 + (2 - 0.5)) / 2; g' = 1, 2, 2.5, 3
    ([4, 4, 4, 4], 4, 4.0, 1.0, 4.0),  # the whole source first: tau = 1; g' = 4, 5, 6, 7
    ([1, 2, 3], 3, 1.0, 6 / 9, 1.0),
    ([1, 1], 4, 0.0, 2 / 8, 1.0),  # an output that never reads the end: (1 + (1 - 2)) / 2; g' = 1, 3
]


@pytest.mark.parametrize(("delays", "length", "lagging", "proportion", "differentiable"), BY_HAND)
def test_latencies_are_those_computed_by_hand(delays, length, lagging, proportion, differentiable):
    assert average_lagging(delays, length) == pytest.approx(lagging)
    assert average_proportion(delays, length) == pytest.approx(proportion)
    assert differentiable_average_lagging(delays, length) == pytest.approx(differentiable)


def test_the_mean_is_over_lines_with_an_output():
    found = mean_latencies([[3, 4, 5, 5, 5], [], [4, 4, 4, 4]], [5, 3, 4])
    assert found["average_lagging"] == pytest.approx(3.5)


def test_a_run_streams_words_and_reports_latencies(attention_run: Path, tmp_path: Path, command: Command):
    model = transduce.load(attention_run)
    texts = ["red blue green", "blue", "green green red blue"]
    whole = simulate_wait_k(model, texts, 2)
    for text, one in zip(texts, whole, strict=True):
        steps = list(model.stream_translate(text.split(), k=2))
        assert "".join(map(str, steps)) == one.text
        assert tuple(step.delay for step in steps) == one.delays
    greedy = model.generate(texts, strategy="greedy")
    assert [one.text for one in simulate_wait_k(model, texts, 100)] == [one.text for one in greedy]
    assert list(model.stream_translate([])) == []
    said = command("generate", attention_run, "--wait-k", "2", stdin=("\n".join(texts) + "\n\n").encode())
    assert said.out == "".join(one.text + "\n" for one in whole) + "\n"
    assert "simultaneous translation writes text" in command("generate", attention_run, "--wait-k", "2", "--json").err
    command("evaluate", attention_run, "--wait-k", "100", "--json", tmp_path / "scores.json")
    found = json.loads((tmp_path / "scores.json").read_text())["latency"]
    assert found["wait_k"] == 100
    assert found["average_proportion"] == 1.0
    with pytest.raises(InputError, match="takes words"):
        next(model.stream_translate("red blue"))


def test_a_run_streams_by_its_attention(attention_run: Path, bottleneck_run: Path, tmp_path: Path, command: Command):
    model = transduce.load(attention_run)
    texts = ["red blue green", "blue", "green green red blue"]
    simulated = simulate_alignatt(model, texts, 1)
    for text, one in zip(texts, simulated, strict=True):
        steps = list(model.stream_translate(text.split(), alignatt=1))
        assert "".join(map(str, steps)) == one.text
        assert list(one.delays) == sorted(one.delays)
    greedy = [one.text for one in model.generate(texts, strategy="greedy")]
    assert [one.text for one in simulate_alignatt(model, texts, 100)] == greedy
    assert [one.text for one in simulated] == greedy  # words are reversed: the first attends to the end of the source
    said = command("generate", attention_run, "--alignatt", "1", stdin=("\n".join(texts) + "\n").encode())
    assert said.out == "".join(one.text + "\n" for one in simulated)
    command("evaluate", attention_run, "--alignatt", "1", "--json", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text())["latency"]["alignatt"] == 1
    assert "two policies" in command("generate", attention_run, "--alignatt", "1", "--wait-k", "2").err
    assert "this one has none" in command("generate", bottleneck_run, "--alignatt", "1", stdin=b"red blue\n").err
