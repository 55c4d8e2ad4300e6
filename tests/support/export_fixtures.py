"""Runs with random weights, as training would have written them, for export tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.flow import BOS, EOS, PAD
from transduce.recipe import build, parse
from transduce.run import Run

WORDS = [f"w{number}" for number in range(20)]
TEXTS = ["w1 w2 w3 w4 w5 w6 w7", "w9", "w3 w3 w12 w0", "w19 w18 w17 w2 w1 w0 w5 w6 w7 w8 w11", "w4 w14"]
SIZES = {"layers": 2, "width": 16, "heads": 4, "ff_width": 24, "dropout": 0.0}


def transformer(**changes: Any) -> dict[str, Any]:
    return {"kind": "transformer", **SIZES, **changes}


def pair(**changes: Any) -> dict[str, Any]:
    """An encoder and a decoder of the same options, one table for all tokens."""
    return {"encoder": transformer(**changes), "decoder": transformer(**changes), "tie": "all"}


def make_run(folder: Path, model: dict[str, Any], *, kind: str = "words", seed: int = 3, **sections: Any) -> Run:
    """A run with shaken weights: norms and biases start at one and zero, where a mistake would not show."""
    side = {"kind": kind, "size": 300}
    form = "pairs" if model.get("encoder") else "text"
    content = {
        "data": {"format": form, "max_length": 20},
        "tokens": {"source": side, "target": side, "shared": True},
        "generation": {"max_length": 12},
        "model": model,
        **sections,
    }
    recipe = build.complete_recipe(parse(content))
    tokenizer = Tokenizer.train([" ".join(WORDS), *TEXTS], kind, 300)
    torch.manual_seed(seed)
    network = build.build_model(recipe.model, tokenizer.size, tokenizer.size, tokenizer.word_starts)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if model.get("decoder"):
            weights = network.state_dict()
            bias = next(tensor for name, tensor in weights.items() if name.endswith("output.projection.bias"))
            bias[EOS] += 1.5  # some outputs end by themselves
            bias[[PAD, BOS]] -= 100.0  # as training teaches: both have no probability
    run = Run(folder)
    run.save_model(recipe, (tokenizer, tokenizer), network.state_dict())
    return run
