"""Pretraining on unlabelled text helps with few labels: masked, denoising and bidirectional language models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from transduce.training.experiment import TrainingResult, train

pytestmark = pytest.mark.slow

ANIMALS, TOOLS = [f"a{number}" for number in range(30)], [f"t{number}" for number in range(30)]
DOES = {"a": ("eats", "sleeps", "runs"), "t": ("cuts", "turns", "breaks")}
RECURRENT = {"kind": "recurrent", "width": 32, "dropout": 0.0}
BOTH_WAYS = {"kind": "elmo", "width": 32, "layers": 1, "cell": "gru", "dropout": 0.0}
WORDS = {"kind": "words", "size": 200}
PARTS = [
    "encoder.forward_layers",
    "encoder.backward_layers",
    "encoder.embedding",
    "encoder.input_proj",
]  # all but w and gamma


def text(count: int, seed: int) -> list[str]:
    """What a thing does tells what kind of thing it is, and nothing else does."""
    chance, lines = random.Random(seed), []
    for _ in range(count):
        thing = chance.choice(ANIMALS + TOOLS)
        lines.append(f"the {thing} {chance.choice(DOES[thing[0]])} and {chance.choice(DOES[thing[0]])}")
    return lines


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def settings(folder: Path, steps: int, data: dict[str, Any], **more: Any) -> dict[str, Any]:
    training = {
        "steps": steps,
        "batch_tokens": 1024,
        "objective": {"label_smoothing": 0.0},
        "optimiser": {"learning_rate": 0.01},
        "schedule": {"kind": "cosine", "warmup": 10},
        "validate_every": steps,
        "checkpoint_every": steps,
        **more.pop("training", {}),
    }
    return {
        "data": {**data, "cache": str(folder / "cache")},
        "training": training,
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy"], "resamples": 10},
        **more,
    }


def pretrain(folder: Path, name: str, noise: dict[str, Any], model: dict[str, Any], steps: int) -> Path:
    data = {"format": "text", "noise": noise, "train": write(folder / "text.txt", text(2000, seed=1))}
    tokens = {"source": WORDS, "target": WORDS}
    train(settings(folder, steps, data, tokens=tokens, model=model), folder / name)
    return folder / name


def learn(folder: Path, name: str, head: str, encoder: dict[str, Any], origin: Path, **training: Any) -> float:
    """Accuracy on things that no labelled line names, after ten labelled ones of each kind."""
    label = {"classifier": ("animal", "tool"), "tagger": ("DET ANIMAL", "DET TOOL")}[head]
    lines = [f"the {thing}\t{label[thing[0] == 't']}" for thing in ANIMALS + TOOLS]
    known = [line for line in lines if int(line.split("\t")[0][5:]) < 10]
    data = {
        "train": write(folder / f"{name}.tsv", known * 3),
        "dev": write(folder / f"{name}-dev.tsv", [line for line in lines if line not in known]),
    }
    tokens = {"source": WORDS, "target": {"kind": "labels" if head == "classifier" else "words"}}
    model = {"encoder": encoder, "head": {"kind": head, "dropout": 0.0}}
    recipe = settings(folder, 60, data, tokens=tokens, model=model, init={"encoder": str(origin)}, training=training)
    return train(recipe, folder / name).scores["dev"].scores["accuracy"].value


def test_masked_lm_reaches_the_possible_accuracy(tmp_path):
    """`x` and `f(x)`, twice, where f puts four words on two: of a masked x half is luck, f(x) is certain: 75 %."""
    chance = random.Random(3)

    def line() -> str:
        pairs = [chance.choice(("p m", "q m", "r n", "s n")), chance.choice(("P M", "Q M", "R N", "S N"))]
        return " ".join(pairs)

    data = {
        "format": "text",
        "noise": {"kind": "mask_tokens", "masked": 1.0, "replaced": 0.0},
        "train": write(tmp_path / "text.txt", [line() for _ in range(2000)]),
        "dev": write(tmp_path / "dev.txt", [line() for _ in range(1000)]),
    }
    model = {
        "encoder": {"kind": "transformer", "width": 32, "heads": 2, "ff_width": 64, "layers": 2, "dropout": 0.0},
        "head": {"kind": "mlm", "dropout": 0.0},
        "tie": "target",
    }
    recipe = settings(tmp_path, 150, data, tokens={"source": WORDS, "target": WORDS}, model=model)
    recipe["evaluation"] = {"metrics": ["accuracy", "perplexity"], "resamples": 10}
    recipe["training"]["validate_examples"] = 1000
    found = train(recipe, tmp_path / "run")
    scores = {name: score.value for name, score in found.scores["dev"].scores.items()}
    assert 70 <= scores["accuracy"] <= 80
    assert 1.35 <= scores["perplexity"] <= 1.48  # at best 2 ** 0.5 = 1.414
    (one,) = found.model.generate(["p <mask> <mask> N"])
    assert one.text in ("p m R N", "p m S N")


def test_pretrained_masked_lm_helps_a_classifier(tmp_path):
    model = {"encoder": RECURRENT, "head": {"kind": "mlm", "dropout": 0.0}}
    noise = {"kind": "mask_tokens", "rate": 0.3}
    taught = pretrain(tmp_path, "taught", noise, model, 200)
    fresh = pretrain(tmp_path, "fresh", noise, model, 1)
    gently = {"learning_rate": 0.003}
    for head in ("classifier", "tagger"):
        with_text = learn(tmp_path, f"taught-{head}", head, RECURRENT, taught, optimiser=gently)
        without = learn(tmp_path, f"fresh-{head}", head, RECURRENT, fresh, optimiser=gently)
        assert with_text >= 85
        assert with_text >= without + 15


def test_frozen_elmo_helps_a_tagger_and_a_classifier(tmp_path):
    """Only the mixing weights and the head learn from the labels."""
    model = {"encoder": BOTH_WAYS, "head": {"kind": "bilm", "dropout": 0.0}}
    taught = pretrain(tmp_path, "taught", {"kind": "nothing"}, model, 150)
    fresh = pretrain(tmp_path, "fresh", {"kind": "nothing"}, model, 1)
    for head in ("tagger", "classifier"):
        with_text = learn(tmp_path, f"taught-{head}", head, BOTH_WAYS, taught, freeze=PARTS)
        without = learn(tmp_path, f"fresh-{head}", head, BOTH_WAYS, fresh, freeze=PARTS)
        assert with_text >= 90
        assert with_text >= without + 10


@pytest.mark.parametrize("kind", ["delete", "mask_spans"])
def test_denoising_pretraining_helps_a_task(tmp_path, kind):
    part = {"kind": "recurrent", "width": 32, "dropout": 0.0}
    model = {"encoder": part, "decoder": {**part, "context": "bahdanau"}}
    taught = pretrain(tmp_path, "taught", {"kind": kind}, model, 150)
    lines = [f"{' '.join(sorted(line.split()))}\t{line}" for line in text(60, seed=9)]
    data = {"train": write(tmp_path / "few.tsv", lines[:30]), "dev": write(tmp_path / "few-dev.tsv", lines[30:])}
    tokens = {"source": WORDS, "target": WORDS, "shared": True}

    def train_from(name: str, **more: Any) -> TrainingResult:
        return train(settings(tmp_path, 5, data, tokens=tokens, model=model, **more), tmp_path / name)

    ahead, fresh = train_from("ahead", init={"model": str(taught)}), train_from("new")
    assert ahead.outcome.scores["loss"] < fresh.outcome.scores["loss"] - 0.5
