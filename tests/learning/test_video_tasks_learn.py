"""Video captioning and classification of moving shapes are learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transduce.synthetic import write_files
from transduce.training.experiment import TrainingResult, train

pytestmark = pytest.mark.slow

ENCODER = {
    "kind": "recurrent",
    "width": 64,
    "dropout": 0.0,
    "front": {"kind": "frames", "stages": 3, "channels": 8},
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, captions, and the kind of motion as the label of the same videos."""
    folder = tmp_path_factory.mktemp("videos")
    for part, (count, seed) in {"train": (1200, 1), "test": (150, 2)}.items():
        pairs = write_files("moving-shapes", folder / part, count, seed)
        truth = [json.loads(line) for line in (folder / part / "truth.jsonl").read_text().splitlines()]
        names = [line.partition("\t")[0] for line in pairs.read_text().splitlines()]
        labelled = (f"{name}\t{true['action']}\n" for name, true in zip(names, truth, strict=True))
        (folder / part / "actions.tsv").write_text("".join(labelled))
    return folder


def learn(videos: Path, folder: Path, name: str, model: dict, target: str, rate: float, steps: int) -> TrainingResult:
    recipe = {
        "data": {
            "train": str(videos / "train" / f"{name}.tsv"),
            "test": str(videos / "test" / f"{name}.tsv"),
            "sources": {"video": {"kind": "video", "frames": 4, "size": 16}},
            "cache": str(videos / "cache"),
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


def test_video_captioning_learns(videos, tmp_path):
    """Colour and motion are correct. The shape is not checked: at 16 pixels a circle looks like a square."""
    block = {"kind": "transformer", "width": 64, "layers": 2, "heads": 4, "ff_width": 128, "dropout": 0.0}
    trained = learn(videos, tmp_path, "pairs", {"encoder": ENCODER, "decoder": block}, "words", 1e-3, 500)
    lines = [line.split("\t") for line in (videos / "test" / "pairs.tsv").read_text().splitlines()]
    found = trained.model.generate([str(videos / "test" / name) for name, _ in lines])
    right = [
        one.text.split()[1:2] + one.text.split()[3:] == reference.split()[1:2] + reference.split()[3:]
        for one, (_, reference) in zip(found, lines, strict=True)
    ]
    assert sum(right) >= 0.8 * len(right)  # by chance one of 36; three seeds reach 0.88 to 0.93


def test_video_classification_learns(videos, tmp_path):
    model = {"encoder": ENCODER, "head": {"kind": "classifier", "pooling": "mean"}}
    trained = learn(videos, tmp_path, "actions", model, "labels", 4e-3, 110)
    assert trained.scores["test"].scores["accuracy"].value >= 90
