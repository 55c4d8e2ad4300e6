"""Claim about gradients: how much of the gradient of the last output reaches distant source positions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from transduce.claims.claim import (
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
    random_batch,
    recipe,
    untrained,
)
from transduce.flow import Batch, Example, Padded
from transduce.model import DecoderOnly, EncoderDecoder, Transducer
from transduce.objectives import CrossEntropy, Objective
from transduce.objectives.language_modelling import TruncatedBPTT

LENGTH, FAR, WINDOW = 56, 50, 20
SYMBOLS = tuple("abcdefgh")


def models() -> dict[str, dict[str, Any]]:
    """Recurrent encoders that read from left to right, with one vector or attention, and a Transformer."""

    def one_vector(cell: str) -> dict[str, Any]:
        part = {"kind": "recurrent", "cell": cell, "width": 64, "dropout": 0.0}
        return {"encoder": {**part, "bidirectional": False}, "decoder": {**part, "context": "initial"}}

    gru = one_vector("gru")
    attention = {**gru["decoder"], "context": {"kind": "luong", "input_feeding": False}}
    names = {"rnn": "plain RNN", "gru": "GRU", "lstm": "LSTM"}
    return {
        **{name: one_vector(cell) for cell, name in names.items()},
        "GRU with attention": {**gru, "decoder": attention},
        "Transformer": TRANSFORMER,
    }


class _Captured:
    """The outputs of an embedding, with their gradients."""

    def __init__(self, embedding: nn.Module) -> None:
        self.outputs: list[Tensor] = []
        self.handle = embedding.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        self.outputs.append(output)

    def norms(self) -> Tensor:
        """The norm of the gradient at each position, the mean over the rows of the batch."""
        self.handle.remove()
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.outputs]
        return torch.cat(parts, 1).norm(dim=-1).mean(0).detach()


def source_gradients(model: Transducer, batch: Batch) -> Tensor:
    """The norm of the gradient of the first target token's logit at each source position (S).

    Of the logit, not of the loss: that of a trained model is near 0, and its gradient too.
    """
    assert isinstance(model, EncoderDecoder)
    captured = _Captured(model.encoder.embedding)  # type: ignore[arg-type]
    labels = batch.labels.values[:, 0]
    logits = model.advance(batch.decoder_inputs.values[:, :1], model.start(batch)).logits[:, 0]
    logits.gather(1, labels[:, None]).sum().backward()
    model.zero_grad()
    return captured.norms().cpu()


def by_distance(norms: Tensor) -> list[float]:
    """The norms at distance 1, 2, ... before the </s> of the source."""
    return [float(value) for value in norms[:-1].flip(0)]


def truncated_gradients(objective: Objective, seed: int) -> Tensor:
    """The norm of the gradient of the last token's loss at each input of a recurrent language model."""
    part = {"kind": "recurrent", "cell": "gru", "width": 64, "dropout": 0.0}
    model = untrained({"decoder": part}, seed)
    assert isinstance(model, DecoderOnly)
    target = random_batch(8, 1, LENGTH, seed).target
    assert target is not None
    last = torch.zeros_like(target.mask)
    last[:, -1] = True
    captured = _Captured(model.decoder.embedding)  # type: ignore[arg-type]
    objective(model, Batch(target=target, loss_mask=Padded(last, target.mask))).total.backward()
    return captured.norms()


def first_letters(seed: int) -> Iterator[Example]:
    """Sources of 56 letters; the target is the first of them."""
    chance = random.Random(seed)
    while True:
        words = chance.choices(SYMBOLS, k=LENGTH)
        yield Example(" ".join(words), words[0])


def measure_gradient(budget: Budget) -> Measurement:
    batch = random_batch(16, LENGTH, 1, budget.seed)
    fresh = {
        name: by_distance(source_gradients(untrained(spec, budget.seed), batch)) for name, spec in models().items()
    }
    trained, right = _trained(budget)
    whole, cut = (truncated_gradients(one, budget.seed) for one in (CrossEntropy(), TruncatedBPTT(window=WINDOW)))
    # The input of the last step is at distance 0; the windows begin at multiples of WINDOW.
    first_kept = (LENGTH // WINDOW) * WINDOW
    beyond, within = float(cut[:first_kept].max()), float(cut[first_kept:].min())
    shares = {
        kind: found["plain RNN"][FAR - 1] / found["Transformer"][FAR - 1] for kind, found in _both(fresh, trained)
    }
    checks = [
        Check(
            f"{kind}: at distance {FAR} the plain RNN has less than 1 % of the gradient of the Transformer",
            share < 0.01,
            {"share": share, "limit": 0.01},
        )
        for kind, share in shares.items()
    ]
    checks.append(
        Check(
            f"truncated back-propagation (window {WINDOW}) cuts the gradient to exactly 0 before its window",
            beyond == 0 and within > 0 and float(whole[first_kept - 1]) > 0,
            {"largest before": beyond, "smallest within": within, "untruncated, before": float(whole[first_kept - 1])},
        )
    )
    checks.append(
        Check(
            "attention learns what the plain RNN cannot: the letter 56 positions back",
            right["GRU with attention"] > right["plain RNN"] + 0.3,
            {"GRU with attention": right["GRU with attention"], "plain RNN": right["plain RNN"]},
        )
    )
    return Measurement([_table(fresh, trained, right)], _panels(fresh, trained, whole, cut), checks)


Curves = dict[str, list[float]]


def _both(fresh: Curves, trained: Curves) -> list[tuple[str, Curves]]:
    return [("untrained", fresh), ("trained", trained)]


def _trained(budget: Budget) -> tuple[Curves, dict[str, float]]:
    """The gradients of trained models on test sources, and the share of them that they answer."""
    data = {"train": budget.write_pairs("first-letter-train", islice(first_letters(1), 4000))}
    data |= {"dev": budget.write_pairs("first-letter-dev", islice(first_letters(2), 100))}
    data["cache"] = str(budget.folder / "cache")
    test = list(islice(first_letters(3), 64))
    found, right = {}, {}
    for name, spec in models().items():
        settings = recipe(data, spec, budget.pick(150, 600))
        model = budget.train(f"gradient-{name.lower().replace(' ', '-')}", settings)
        found[name] = by_distance(source_gradients(model.network, encode_pairs(model, test)))
        right[name] = exact_match(model, test)
    return found, right


def _table(fresh: Curves, trained: Curves, right: dict[str, float]) -> ClaimTable:
    columns = ["model", "untrained, distance 1", f"distance {FAR}", "trained, distance 1", f"distance {FAR}", "right"]
    rows = [
        (name, fresh[name][0], fresh[name][FAR - 1], trained[name][0], trained[name][FAR - 1], right[name])
        for name in fresh
    ]
    return ClaimTable("Gradient norm at a source position, and share of first letters that are recalled", columns, rows)


def _panels(fresh: Curves, trained: Curves, whole: Tensor, cut: Tensor) -> list[Panel]:
    panels = []
    for kind, curves in _both(fresh, trained):
        series = [
            Series(name, list(range(1, len(norms) + 1)), [max(norm, 1e-20) for norm in norms])
            for name, norms in curves.items()
        ]
        panels.append(Panel(f"{kind.capitalize()}", "distance", "gradient norm", series, log_y=True))
    inputs = list(range(len(whole)))
    series = [Series("whole", inputs, whole.tolist()), Series(f"window of {WINDOW}", inputs, cut.tolist())]
    return [*panels, Panel("Truncated back-propagation", "input position", "gradient norm", series)]


GRADIENT = Claim(
    "gradient",
    "The gradient that reaches a distant source position vanishes in a plain RNN, less in GRU and LSTM, and not with "
    "attention or in a Transformer.",
    "Bengio et al. 1994, Learning Long-Term Dependencies with Gradient Descent is Difficult; Vaswani et al. 2017",
    "The logit of the first output, after a source of 56 letters, is differentiated with respect to the embedding of "
    "every source position: for untrained models, and for models that learned to recall the first of the letters. "
    "Recurrent encoders read from left to right. Truncated back-propagation is measured on a recurrent language model.",
    measure_gradient,
)
