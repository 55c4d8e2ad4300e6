"""One small task that every rung must learn: letters copied or reversed, trained through the whole line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from transduce.flow import Example
from transduce.synthetic.algorithmic import split
from transduce.training.experiment import TrainingResult, train

TRANSFORMER = {"kind": "transformer", "width": 64, "heads": 4, "ff_width": 128, "layers": 2, "dropout": 0.0}


@cache
def examples_of(task: str, dev: int, longest: int) -> tuple[list[Example], list[Example], list[Example]]:
    return split(task, 6000, dev, 300, seed=2, length=(2, longest), symbols=tuple("abcdefgh"))


def learn(
    task: str,
    encoder: dict | None,
    decoder: dict,
    steps: int,
    folder: Path,
    *,
    pool: int = 100,
    longest: int = 5,
    dev: int = 50,
    rate: float = 6e-3,
    warmup: int = 30,
) -> tuple[TrainingResult, list[Example]]:
    """The trained run and its test examples."""
    sets = examples_of(task, dev, longest)
    return learn_examples(sets, encoder, decoder, steps, folder, pool=pool, rate=rate, warmup=warmup), sets[2]


def learn_examples(
    sets: Sequence[Sequence[Example]],
    encoder: dict | None,
    decoder: dict,
    steps: int,
    folder: Path,
    *,
    pool: int = 100,
    rate: float = 6e-3,
    warmup: int = 30,
    vocabulary: int = 100,
) -> TrainingResult:
    """The run of a training on given examples: those to train on, development and test examples."""
    data = {}  # of the common cache: runs on equal files share one store
    for name, examples in zip(("train", "dev", "test"), sets, strict=True):
        path = folder / f"{name}.tsv"
        path.write_text("".join(f"{one.source}\t{one.target}\n" for one in examples))
        data[name] = str(path)
    tokens = {"kind": "words", "size": vocabulary}
    recipe = {
        "data": data,
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": {"encoder": encoder, "decoder": decoder},
        "training": {
            "steps": steps,
            "batch_tokens": 1024,
            "bucket_batches": pool,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": rate},
            "schedule": {"kind": "cosine", "warmup": warmup},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    return train(recipe, folder / "run")
