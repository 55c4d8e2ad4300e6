"""The fuzzing harness itself: it finds crashes, hangs, differences and great memory, and repeats a case by its seed."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
from fuzzing import GIGABYTE, Outcome, fuzz, mutate_bytes, mutate_tree, run_case

from transduce.errors import InputError


def outcome_of(attempt, seconds: float = 120.0) -> str:
    return run_case(attempt, "0", seconds, GIGABYTE)[0]


def test_outcomes_are_distinguished() -> None:
    def hang(draw: random.Random) -> Outcome:
        while True:
            with suppress(Exception):  # a program that hides exceptions does not hide a hang
                time.sleep(0.01)

    def different(draw: random.Random) -> Outcome:
        raise AssertionError

    def refuse(draw: random.Random) -> Outcome:
        raise InputError("no")

    def crash(draw: random.Random) -> Outcome:
        raise KeyError("x")

    def swell(draw: random.Random) -> Outcome:
        return "accepted" if bytearray(4 * GIGABYTE) else "equal"

    assert outcome_of(hang, 0.3) == "hang"
    found = [outcome_of(one) for one in (different, refuse, crash, swell, lambda draw: "equal")]
    assert found == ["difference", "refused", "crash", "crash", "equal"]


def test_failing_seeds_are_reported_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_RECORD", str(tmp_path))
    monkeypatch.setenv("FUZZ_FACTOR", "2")
    monkeypatch.setenv("FUZZ_SEED", "100")

    def attempt(draw: random.Random) -> Outcome:
        if draw.random() < 0.2:
            raise ValueError("bad")
        return "accepted"

    with pytest.raises(AssertionError, match="ValueError: bad"):
        fuzz("some numbers", "numbers", attempt, cases=20)
    record = json.loads((tmp_path / "some-numbers.json").read_text())
    assert record["cases"] == 40 == sum(record["outcomes"].values())
    assert record["outcomes"]["crash"] == len(record["failures"]) > 0
    seed = record["failures"][0]["seed"]
    assert seed >= 100
    assert run_case(attempt, f"some numbers {seed}", 120.0, GIGABYTE)[0] == "crash"


def test_mutations_repeat_by_seed_and_differ_between_seeds() -> None:
    content, tree = bytes(range(256)) * 4, {"a": {"b": [1, 2, {"c": "x"}]}, "d": 0.5}
    mutated = [mutate_bytes(random.Random(seed), content) for seed in range(200)]
    assert mutated == [mutate_bytes(random.Random(seed), content) for seed in range(200)]
    assert len(set(mutated)) > 150
    trees = [repr(mutate_tree(random.Random(seed), tree)) for seed in range(200)]
    assert trees == [repr(mutate_tree(random.Random(seed), tree)) for seed in range(200)]
    assert len(set(trees)) > 100
    assert tree == {"a": {"b": [1, 2, {"c": "x"}]}, "d": 0.5}
