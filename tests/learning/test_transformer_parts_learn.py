"""What stands in for self-attention learns: convolutions, the simpler simple recurrent unit, averages."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.data.synthetic import split
from transduce.experiment import train
from transduce.flow import Example

pytestmark = pytest.mark.slow

CONVOLUTIONAL = {"kind": "convolutional", "width": 64, "layers": 3, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": 64, "heads": 4, "hidden": 128, "layers": 2, "dropout": 0.0}

# name: encoder, decoder, updates, batches sorted together, exact match to reach (%)
PARTS = {
    "convolutional": (CONVOLUTIONAL, CONVOLUTIONAL, 280, 100, 90),
    "SSRU decoder": (TRANSFORMER, {**TRANSFORMER, "own": "ssru"}, 250, 100, 95),
    "average decoder": (TRANSFORMER, {**TRANSFORMER, "own": "average"}, 250, 100, 95),
    "grouped, in reach, RMS, gated": (
        {**TRANSFORMER, "key_heads": 2, "normalisation": "rms", "gated": True, "activation": "silu", "bias": False},
        {**TRANSFORMER, "key_heads": 1, "normalisation": "rms", "gated": True, "reach": 3, "position": "rotary"},
        250,
        100,
        95,
    ),
    # Its statistics need batches that are alike: none sorted by length.
    "batch norm": ({**TRANSFORMER, "normalisation": "batch"}, {**TRANSFORMER, "normalisation": "batch"}, 250, 1, 95),
}


def write(folder: Path, name: str, examples: list[Example]) -> str:
    path = folder / f"{name}.tsv"
    path.write_text("".join(f"{one.source}\t{one.target}\n" for one in examples))
    return str(path)


@pytest.mark.parametrize("part", PARTS)
def test_part_learns(part, tmp_path):
    encoder, decoder, steps, pool, exact = PARTS[part]
    examples = dict(
        zip(
            ("train", "dev", "test"),
            split("reverse", 6000, 100, 300, seed=2, length=(2, 7), symbols=tuple("abcdefgh")),
            strict=True,
        )
    )
    tokens = {"kind": "words", "size": 100}
    recipe = {
        "data": {
            **{name: write(tmp_path, name, pairs) for name, pairs in examples.items()},
            "cache": str(tmp_path / "cache"),
        },
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": {"encoder": encoder, "decoder": decoder},
        "training": {
            "steps": steps,
            "batch_tokens": 1024,
            "pool": pool,
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
