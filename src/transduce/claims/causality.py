"""Claim about causality: an emitted output never changes, and what breaks without the causal mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from transduce.claims.claim import (
    LAYERS,
    TRANSFORMER,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    encode_pairs,
    exact_match,
    letters,
    random_batch,
    recipe,
    teacher_forced,
    untrained,
)
from transduce.decoders import DECODERS
from transduce.flow import Batch
from transduce.model import Transducer

TARGET = 12
EXACT = 1e-10  # in double precision
SMALL: dict[str, Any] = {"dropout": 0.0, "width": 32}
UNMASKED = {**TRANSFORMER, "decoder": {**LAYERS, "kind": f"{Path(__file__).parent / 'unmasked.py'}:UnmaskedDecoder"}}


def models() -> dict[str, dict[str, Any]]:
    """A model for every decoder of the registry, and a Transformer without the mask."""
    every = {kind: {"encoder": {"kind": "recurrent", **SMALL}, "decoder": {"kind": kind, **SMALL}} for kind in DECODERS}
    return {**every, "transformer without the mask": UNMASKED}


@torch.no_grad()
def changes(model: Transducer, batch: Batch) -> list[float]:
    """The largest change of the probabilities of the first token, while 1, 2, ... later tokens are added."""
    tokens = batch.decoder_inputs.values
    first = torch.softmax(model.advance(tokens[:, :1], model.start(batch)).logits[:, 0], -1)
    grown = (model.advance(tokens[:, :length], model.start(batch)) for length in range(2, tokens.size(1) + 1))
    return [float((torch.softmax(step.logits[:, 0], -1) - first).abs().max()) for step in grown]


def largest_changes(seed: int) -> dict[str, list[float]]:
    batch = random_batch(4, 8, TARGET, seed)
    return {name: changes(untrained(spec, seed).double(), batch) for name, spec in models().items()}


def measure_causality(budget: Budget) -> Measurement:
    found = largest_changes(budget.seed)
    masked = {name: max(values) for name, values in found.items() if name in DECODERS}
    unmasked = max(found["transformer without the mask"])
    data, test = letters(budget, length=(3, 8), symbols=tuple("abcdefghij"))
    forced, exact = {}, {}
    for name, model in (("with the mask", TRANSFORMER), ("without the mask", UNMASKED)):
        steps = budget.pick(250, 600)
        trained = budget.train(f"causality-{name.replace(' ', '-')}", recipe(data, model, steps, batch_tokens=1024))
        batch = encode_pairs(trained, test)
        forced[name] = float(teacher_forced(trained, batch)[batch.labels.mask].float().mean())
        exact[name] = exact_match(trained, test)
    with_mask, without = exact.values()
    checks = [
        Check(
            "no decoder of the registry changes an emitted output when later tokens are added",
            max(masked.values()) <= EXACT,
            {"largest change of a probability": max(masked.values()), "limit": EXACT},
        ),
        Check("without the mask it changes", unmasked > 1e-3, {"largest change of a probability": unmasked}),
        Check(
            "a model that is trained without the mask predicts the next token after reference prefixes, which it sees",
            forced["without the mask"] > 0.7,
            {"share of right tokens": forced["without the mask"]},
        ),
        Check(
            "and collapses in generation",
            without < 0.5 * with_mask,
            {"exact match with the mask": with_mask, "without": without},
        ),
    ]
    return Measurement(_tables(found, forced, exact), _panels(found, forced, exact), checks)


def _tables(found: dict[str, list[float]], forced: dict[str, float], exact: dict[str, float]) -> list[ClaimTable]:
    rows = [(name, max(values)) for name, values in found.items()]
    trained = [(name, forced[name], exact[name]) for name in forced]
    columns = ["Transformer trained", "tokens right after reference prefixes", "exact match in generation"]
    return [
        ClaimTable("Untrained networks", ["decoder", "largest change of a probability of the first output"], rows),
        ClaimTable("Trained on reversed letters", columns, trained),
    ]


def _panels(found: dict[str, list[float]], forced: dict[str, float], exact: dict[str, float]) -> list[Panel]:
    curves = [
        Series(name, list(range(1, len(values) + 1)), [max(value, 1e-18) for value in values])
        for name, values in found.items()
    ]
    bars = [Series("after reference prefixes", list(forced), list(forced.values()))]
    bars.append(Series("exact match in generation", list(exact), list(exact.values())))
    return [
        Panel("Change of the first output", "tokens added", "change of a probability", curves, log_y=True),
        Panel("Training with and without the mask", "", "share right", bars, "bar"),
    ]


CAUSALITY = Claim(
    "causality",
    "An emitted output never changes when later ones are added, because the decoder is masked; without the mask it "
    "does, and a model trained without it cannot generate.",
    "Vaswani et al. 2017, Attention Is All You Need, section 3.1",
    "For every decoder of the registry, untrained and in double precision: the distribution of the first token, while "
    "later tokens are appended. Then two Transformers learn to reverse letters, one with and one without the mask: the "
    "second sees the token that it has to predict, learns to copy it, and has nothing to copy in generation.",
    measure_causality,
)
