"""A language model learns a language whose every probability is known, to within a few per cent of the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transduce.training.experiment import train

SYMBOLS = "abcd \n"
CLOSE = 1.04  # trained perplexity over the true one


class Chain:
    """A Markov chain of order two: what comes next depends on the last two symbols."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.next = self.draw.dirichlet(np.full(len(SYMBOLS), 0.4), size=(len(SYMBOLS), len(SYMBOLS)))

    def text(self, length: int) -> str:
        symbols = [0, 1]
        for chance in self.draw.random(length):
            after = np.cumsum(self.next[symbols[-2], symbols[-1]])
            symbols.append(min(int(np.searchsorted(after, chance)), len(SYMBOLS) - 1))
        return "".join(SYMBOLS[number] for number in symbols[2:])

    def perplexity(self, text: str) -> float:
        """Of the chain itself, on this text: nobody who does not know the future does better in the long run."""
        numbers = [SYMBOLS.index(symbol) for symbol in text]
        logs = [math.log(self.next[a, b, c]) for a, b, c in zip(numbers, numbers[1:], numbers[2:], strict=False)]
        return math.exp(-sum(logs) / len(logs))


GRU = {"kind": "recurrent", "cell": "gru", "width": 48, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": 64, "heads": 2, "ff_width": 192, "layers": 1, "dropout": 0.0}


@pytest.mark.parametrize(
    ("decoder", "objective", "steps", "rate"),
    [
        (GRU, {"kind": "tbptt", "window": 8}, 170, 0.01),
        ({**TRANSFORMER, "position": "rotary"}, {"kind": "cross_entropy", "label_smoothing": 0.0}, 320, 0.01),
    ],
    ids=["gru", "transformer"],
)
def test_perplexity_approaches_the_entropy_of_the_source(
    decoder: dict[str, Any], objective: dict[str, Any], steps: int, rate: float, tmp_path: Path
) -> None:
    chain = Chain(3)
    texts = {"train": chain.text(60_000), "dev": chain.text(6_000)}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    recipe = {
        "data": {name: str(tmp_path / f"{name}.txt") for name in texts}
        | {"format": "text", "block_size": 64, "cache": str(tmp_path / "cache")},
        "tokens": {"target": {"kind": "chars"}},
        "model": {"decoder": decoder},
        "training": {
            "steps": steps,
            "batch_tokens": 1280,
            "objective": objective,
            "optimiser": {"learning_rate": rate},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "evaluation": {"resamples": 10},
    }
    found = train(recipe, tmp_path / "run").scores["dev"].scores["perplexity"].value
    true = chain.perplexity(texts["dev"])
    assert true < 3.5  # of six symbols: there is something to learn
    assert found / true < CLOSE
    assert found / true > 0.99  # and nothing was seen of the future
