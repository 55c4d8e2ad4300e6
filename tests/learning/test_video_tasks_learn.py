"""Video captioning and classification of moving shapes are learned."""

from __future__ import annotations

from pathlib import Path

import pytest

import transduce
from transduce.synthetic import write_files
from transduce.training.experiment import TrainingResult, train

pytestmark = pytest.mark.slow

ENCODER = {
    "kind": "recurrent",
    "width": 64,
    "dropout": 0.0,
    "front": {"kind": "frames", "stages": 3, "channels": 8},
}


def learn(folder: Path, name: str, model: dict, target: str, rate: float, steps: int, count: int) -> TrainingResult:
    for part, (videos, seed) in {"train": (count, 1), "test": (150, 2)}.items():
        write_files(name, folder / part, videos, seed)
    recipe = {
        "data": {
            "train": str(folder / "train" / "pairs.tsv"),
            "test": str(folder / "test" / "pairs.tsv"),
            "sources": {"video": {"kind": "video", "frames": 4, "size": 16}},
            "cache": str(folder / "cache"),
            "dev_size": 50,
        },
        "tokens": {"target": {"kind": target}},
        "model": model,
        "training": {
            "steps": steps,
            "batch_tokens": 64 * 11,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": rate},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy" if target == "labels" else "exact"], "resamples": 10},
    }
    return train(recipe, folder / "run")


def test_video_captioning_learns(tmp_path):
    """Colour and motion are correct. The shape is not checked: at 16 pixels a circle looks like a square."""
    block = {"kind": "transformer", "width": 64, "layers": 2, "heads": 4, "ff_width": 128, "dropout": 0.0}
    learn(tmp_path, "moving-shapes", {"encoder": ENCODER, "decoder": block}, "words", 1e-3, 350, 1200)
    lines = [line.split("\t") for line in (tmp_path / "test" / "pairs.tsv").read_text().splitlines()]
    found = transduce.load(tmp_path / "run").generate([str(tmp_path / "test" / name) for name, _ in lines])
    right = [
        one.text.split()[1:2] + one.text.split()[3:] == reference.split()[1:2] + reference.split()[3:]
        for one, (_, reference) in zip(found, lines, strict=True)
    ]
    assert sum(right) >= 0.85 * len(right)


def test_video_classification_learns(tmp_path):
    model = {"encoder": ENCODER, "head": {"kind": "classifier", "pooling": "mean"}}
    trained = learn(tmp_path, "actions", model, "labels", 4e-3, 110, 600)
    assert trained.scores["test"].scores["accuracy"].value >= 90
