"""One small task that every rung must learn: two to four letters reversed, trained through the whole line."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transduce.flow import Example
from transduce.synthetic.algorithmic import split
from transduce.training.experiment import TrainingResult, train

TRANSFORMER = {"kind": "transformer", "width": 48, "heads": 4, "ff_width": 96, "layers": 2, "dropout": 0.0}


@cache
def examples() -> tuple[list[Example], list[Example], list[Example]]:
    return split("reverse", 2000, 50, 200, seed=2, length=(2, 4), symbols=tuple("abcdefgh"))


def learn(
    encoder: dict | None, decoder: dict, steps: int, folder: Path, *, pool: int = 100, rate: float = 6e-3, seed: int = 1
) -> tuple[TrainingResult, list[Example]]:
    """The trained run and its test examples."""
    sets = examples()
    data = {}  # of the common cache: runs on equal files share one store
    for name, part in zip(("train", "dev", "test"), sets, strict=True):
        path = folder / f"{name}.tsv"
        path.write_text("".join(f"{one.source}\t{one.target}\n" for one in part))
        data[name] = str(path)
    tokens = {"kind": "words", "size": 100}
    recipe = {
        "data": data,
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": {"encoder": encoder, "decoder": decoder},
        "training": {
            "steps": steps,
            "seed": seed,
            "batch_tokens": 512,
            "bucket_batches": pool,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": rate},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    return train(recipe, folder / "run"), sets[2]
