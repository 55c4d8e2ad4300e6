"""Captioning and classification of images of shapes; the word of a shape attends to that shape."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile

import pytest

from transduce.synthetic import write_files
from transduce.training.experiment import TrainingResult, train

pytestmark = pytest.mark.slow

SIDE = 64  # of a picture as it is drawn, in which boxes are told
SEEN = {
    "kind": "identity",
    "width": 64,
    "dropout": 0.0,
    "front": {"kind": "cnn_grid", "channels": 24, "stages": 2, "blocks": 0},
}
SPOKEN = {"kind": "recurrent", "cell": "gru", "width": 64, "context": "bahdanau", "dropout": 0.0}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    write_files("shapes", folder / "train", 3000, 1)
    write_files("shapes", folder / "test", 150, 2)
    return folder


def learn(shapes: Path, folder: Path, model: dict, steps: int, **training) -> TrainingResult:
    recipe = {
        "data": {
            "train": str(shapes / "train" / "pairs.tsv"),
            "test": str(shapes / "test" / "pairs.tsv"),
            "sources": {"picture": {"kind": "image", "size": 24}},
            "cache": str(shapes / "cache"),
            "dev_size": 50,
        },
        "tokens": {"target": {"kind": "words"}},
        "model": model,
        "training": {
            "steps": steps,
            "batch_tokens": 32 * 41,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 5e-3},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": steps,
            "checkpoint_every": steps,
            "validate_examples": 20,
            **training,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    return train(recipe, folder / "run")


def on_its_shape(trained: TrainingResult, folder: Path) -> float:
    """Of the right captions: how often the cell that a shape's word looked at most overlaps the box of that shape."""
    lines = (line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines())
    truth = map(json.loads, (folder / "truth.jsonl").read_text().splitlines())
    hits = []
    for (name, caption), true in zip(lines, truth, strict=True):
        explained = trained.model.explain(str(folder / name))
        if explained.output != caption:
            continue
        (scene,), weights = explained.visual_sources, explained.map().weights
        high, wide = SIDE / scene.grid[0], SIDE / scene.grid[1]
        for word, (left, top, right, bottom) in true["boxes"].items():
            y, x = divmod(int(weights[int(word), scene.begin :].argmax()), scene.grid[1])
            hits.append(x * wide < right and (x + 1) * wide > left and y * high < bottom and (y + 1) * high > top)
    return sum(hits) / max(1, len(hits))


def test_captioning_learns_and_attends_to_the_objects(shapes, tmp_path):
    """Nothing that was seen goes into the state: a word that did not look could not be said.

    With entmax a word looks at a few cells only. With softmax some weight stays on all cells, and a shape may be read
    from many cells around it.
    """
    reader = {"kind": "luong", "score": "mlp", "input_feeding": False, "normaliser": "entmax"}
    trained = learn(shapes, tmp_path, {"encoder": SEEN, "decoder": {**SPOKEN, "context": reader}}, 800)
    assert trained.scores["test"].scores["exact"].value >= 55  # 64.7 is the least that was seen
    assert on_its_shape(trained, shapes / "test") >= 0.9


@pytest.mark.parametrize(
    ("decoder", "objective"),
    [
        ({**SPOKEN, "context": {"kind": "bahdanau", "normaliser": "hard"}}, {"kind": "cross_entropy"}),
        ({**SPOKEN, "context": {"kind": "luong", "normaliser": "sampled"}}, {"kind": "reinforce"}),
        (SPOKEN, {"kind": "attention_penalty", "penalty": "doubly_stochastic", "weight": 0.05}),
        ({"kind": "transformer", "width": 64, "heads": 4, "ff_width": 128, "layers": 1, "dropout": 0.0}, {}),
    ],
    ids=["straight-through", "reinforce", "doubly-stochastic", "transformer"],
)
def test_captioning_learns_with_other_normalisers(shapes, tmp_path, decoder, objective):
    trained = learn(
        shapes,
        tmp_path,
        {"encoder": SEEN, "decoder": decoder},
        90,
        objective={"label_smoothing": 0.0, **objective},
        optimiser={"learning_rate": 3e-3},
    )
    losses = [json.loads(line) for line in (trained.run.folder / "log.jsonl").read_text().splitlines()]
    nll = [line["nll"] for line in losses if line["kind"] == "update"]
    assert nll[-1] < 0.55 * nll[0]


def test_vision_transformer_classifies_image_folders(shapes, tmp_path):
    for part, count in (("train", 700), ("test", 100)):
        lines = [line.split("\t") for line in (shapes / part / "pairs.tsv").read_text().splitlines()]
        alone = [(name, caption.split()[1]) for name, caption in lines if len(caption.split()) == 3]
        for name, colour in alone[:count]:
            place = tmp_path / part / colour / Path(name).name
            place.parent.mkdir(parents=True, exist_ok=True)
            copyfile(shapes / part / name, place)
    encoder = {
        "kind": "transformer",
        "width": 48,
        "layers": 2,
        "heads": 4,
        "ff_width": 96,
        "position": "none",
        "dropout": 0.0,
        "front": {"kind": "patches", "patch_size": 8, "leading": 1},
    }
    recipe = {
        "data": {
            "train": str(tmp_path / "train"),
            "test": str(tmp_path / "test"),
            "sources": {"picture": {"kind": "image", "size": 32, "flip": 0.5, "shift": 0.1}},
            "cache": str(tmp_path / "cache"),
            "dev_size": 50,
        },
        "tokens": {"target": {"kind": "labels"}},
        "model": {"encoder": encoder, "head": {"kind": "classifier", "pooling": "first", "activation": "none"}},
        "training": {
            "steps": 200,
            "batch_tokens": 32 * 34,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 2e-3},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": 200,
            "checkpoint_every": 200,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy"], "resamples": 10},
    }
    trained = train(recipe, tmp_path / "run")
    assert trained.scores["test"].scores["accuracy"].value >= 90
