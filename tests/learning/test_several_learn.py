"""Questions about pictures are learned from both sources together, and cannot be answered from either one alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

import transduce
from transduce.made.filed import write_set
from transduce.sets import FILED

pytestmark = pytest.mark.slow

WIDTH = 64
SEEN = {
    "kind": "transformer",
    "width": WIDTH,
    "layers": 1,
    "heads": 4,
    "hidden": 2 * WIDTH,
    "position": "none",
    "dropout": 0.0,
    "front": {"kind": "patches", "patch": 4, "places": "waves"},
}
PART = {"kind": "recurrent", "width": WIDTH, "dropout": 0.0}
STEPS = 1500


def lines(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()]


def share(right: list[bool]) -> float:
    return sum(right) / len(right)


def test_both_sources_together_answer(tmp_path):
    write_set(FILED, "looks", tmp_path / "train", 3000, 1, False)
    write_set(FILED, "looks", tmp_path / "test", 300, 2, False)
    recipe = {
        "data": {
            "train": str(tmp_path / "train" / "pairs.tsv"),
            "sources": {"picture": {"kind": "image", "size": 12}, "question": "text"},
            "cache": str(tmp_path / "cache"),
            "dev_size": 50,
        },
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {
            "encoder": {"kind": "joined", "width": WIDTH, "parts": {"picture": SEEN, "question": PART}},
            "decoder": {"kind": "transformer", "width": WIDTH, "layers": 2, "heads": 4, "hidden": 128, "dropout": 0.0},
        },
        "training": {
            "steps": STEPS,
            "batch_tokens": 64 * 22,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 2.5e-3},
            "schedule": {"kind": "cosine", "warmup": 30},
            "validate_every": STEPS,
            "checkpoint_every": STEPS,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    transduce.train(recipe, tmp_path / "run")
    model, tested = transduce.load(tmp_path / "run"), lines(tmp_path / "test")
    pictures = [str(tmp_path / "test" / name) for name, _, _ in tested]
    questions, answers = [question for _, question, _ in tested], [answer for *_, answer in tested]

    def right(shown: list[str], asked: list[str]) -> float:
        found = model.generate([f"{picture}\t{question}" for picture, question in zip(shown, asked, strict=True)])
        return share([one.text == answer for one, answer in zip(found, answers, strict=True)])

    assert right(pictures, questions) >= 0.95
    # The best that any model could do with the questions alone: the commonest answer of each.
    known = defaultdict(Counter)
    for question, answer in zip(questions, answers, strict=True):
        known[question][answer] += 1
    assert sum(max(counts.values()) for counts in known.values()) <= 0.4 * len(tested)
    # And with the pictures alone: each has three colours, asked for equally often. Another question, and it is lost.
    assert right(pictures[1:] + pictures[:1], questions) <= 0.5
    assert right(pictures, questions[1:] + questions[:1]) <= 0.5
