"""Pronouns whose gender another sentence decides are translated with document context, and guessed without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import transduce
from transduce.synthetic import generate

pytestmark = pytest.mark.slow

PART = {"kind": "transformer", "width": 64, "heads": 4, "ff_width": 128, "layers": 1, "dropout": 0.0}
JOINED = {"kind": "multi_source", "width": 64, "parts": {"sentence": PART, "context": PART}}


NAMED = {"context": 2, "document_column": "column1", "sources": {"sentence": "text", "context": "text"}}


def recipe(folder: Path, steps: int, seed: int = 1, **data) -> dict:
    files = {name: str(folder / f"{name}.tsv") for name in ("train", "dev", "test")}
    return {
        "data": {**files, "columns": ["column2", "column3"], "cache": str(folder / "cache"), **data},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {"encoder": JOINED if data else PART, "decoder": PART},
        "training": {
            "steps": steps,
            "seed": seed,
            "batch_tokens": 800,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 4e-3},
            "schedule": {"kind": "cosine", "warmup": 30},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 200},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pronouns")
    for name, count, seed, held_out in (("train", 3000, 1, False), ("dev", 30, 2, True), ("test", 240, 3, True)):
        lines = generate("pronouns", count, seed, held_out=held_out)
        (folder / f"{name}.tsv").write_text("".join(f"{one.source}\t{one.target}\n" for one in lines))
    transduce.train(recipe(folder, 150, **NAMED), folder / "context")
    return folder


def test_context_decides_the_gender_of_pronouns(folder, command) -> None:
    transduce.train(recipe(folder, 80), folder / "plain")  # more updates cannot pass the bound below
    options = ("--against", folder / "plain", "--without-context", "--json", folder / "scores.json")
    called = command("evaluate", folder / "context", *options)
    assert called.code == 0, called.err
    found = json.loads((folder / "scores.json").read_text())
    assert found["scores"]["exact"]["value"] >= 80
    # A third of the lines names the noun. Of the others, three eighths have the most frequent gender.
    for name in ("against", "without_context"):
        assert found[name]["scores"]["exact"]["value"] <= 70
        assert "is better than" in found[name]["verdicts"]["exact"]
    swapped = command("evaluate", folder / "plain", "--against", folder / "context")
    assert "name the run with data.context first" in swapped.err


def test_documents_are_generated_in_order(folder, command) -> None:
    (folder / "in.txt").write_text("here is a red lamp .\nit is old .\n\nhere is a small dog .\nit is old .\n")
    called = command("generate", folder / "context", folder / "in.txt")
    assert called.code == 0, called.err
    lines = called.out.splitlines()
    assert [lines[1], lines[2], lines[4]] == ["sie ist alt .", "", "er ist alt ."]
    refused = command("generate", folder / "context", folder / "in.txt", "--document")
    assert refused.code == 2
