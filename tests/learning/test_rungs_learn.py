"""Every rung learns, and where the right alignment is known, attention finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.data.synthetic import gold_alignment, split
from transduce.experiment import train
from transduce.explain.alignment import alignment_error_rate
from transduce.flow import Example

pytestmark = pytest.mark.slow

GRU = {"kind": "recurrent", "width": 64, "dropout": 0.0}
LSTM = {**GRU, "cell": "lstm"}
RNN = {**GRU, "cell": "rnn"}
TRANSFORMER = {"kind": "transformer", "width": 64, "heads": 4, "hidden": 128, "layers": 2, "dropout": 0.0}


def reader(kind: str, **options: object) -> dict[str, object]:
    return {"reader": {"kind": kind, **options}}


# name: encoder, decoder, updates, exact match to reach (%), whether attention must align
RUNGS = {
    "bottleneck at the start": (GRU, {**GRU, **reader("start")}, 700, 60, False),
    "bottleneck at every step": (LSTM, {**LSTM, **reader("every")}, 700, 60, False),
    "plain cells with attention": (RNN, {**RNN, **reader("luong", score="mlp")}, 400, 90, False),
    "Bahdanau": (GRU, {**GRU, **reader("bahdanau")}, 400, 95, False),
    "Luong": (GRU, {**GRU, **reader("luong", score="mlp")}, 400, 95, True),
    "Luong without input feeding": (LSTM, {**LSTM, **reader("luong", input_feeding=False)}, 400, 95, False),
    "Transformer": (TRANSFORMER, TRANSFORMER, 500, 95, False),
    "rotary Transformer": (
        {**TRANSFORMER, "position": "rotary"},
        {**TRANSFORMER, "position": "rotary"},
        500,
        95,
        False,
    ),
    "Transformer > GRU": (TRANSFORMER, {**GRU, **reader("luong", score="mlp")}, 400, 95, False),
    "GRU > Transformer": (GRU, TRANSFORMER, 400, 95, False),
    "decoder alone": (None, {**TRANSFORMER, "position": "rotary"}, 600, 90, False),
}


def write(folder: Path, name: str, examples: list[Example]) -> str:
    path = folder / f"{name}.tsv"
    path.write_text("".join(f"{one.source}\t{one.target}\n" for one in examples))
    return str(path)


@pytest.mark.parametrize(("task", "rung"), [*(("reverse", rung) for rung in RUNGS), ("copy", "Luong")])
def test_learns(task, rung, tmp_path):
    encoder, decoder, steps, exact, aligned = RUNGS[rung]
    pairs, dev, test = split(task, 6000, 100, 300, seed=2, length=(2, 7), symbols=tuple("abcdefgh"))
    tokens = {"kind": "words", "size": 100}
    recipe = {
        "data": {
            "train": write(tmp_path, "train", pairs),
            "dev": write(tmp_path, "dev", dev),
            "test": write(tmp_path, "test", test),
            "cache": str(tmp_path / "cache"),
        },
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": {"encoder": encoder, "decoder": decoder},
        "training": {
            "steps": steps,
            "batch_tokens": 1024,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 3e-3},
            "schedule": {"kind": "cosine", "warmup": 50},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    trained = train(recipe, tmp_path / "run")
    assert trained.scores["test"].scores["exact"].value >= exact
    if aligned:
        found = trained.model.generate([one.source for one in test[:100]])
        links, gold = set(), set()
        for number, (example, output) in enumerate(zip(test, found, strict=False)):
            links |= {(number, *link) for link in output.alignment}
            gold |= {(number, *link) for link in gold_alignment(task, example)}
        assert alignment_error_rate(links, gold) <= 0.05
