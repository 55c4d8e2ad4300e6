"""Truncated back-propagation through time and the prefix language-model objective."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.model import Transducer
from transduce.objectives import CrossEntropy, PrefixLM, TruncatedBPTT
from transduce.objectives.language_modelling import joined
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

WORDS = 11
PARTS: dict[str, dict[str, Any]] = {
    "gru": {"kind": "recurrent", "cell": "gru", "layers": 2, "width": 6, "dropout": 0.0},
    "lstm": {"kind": "recurrent", "cell": "lstm", "width": 6, "dropout": 0.0},
    "transformer": {"kind": "transformer", "width": 8, "heads": 2, "ff_width": 8, "layers": 2, "dropout": 0.0},
    "ssru": {
        "kind": "transformer",
        "width": 8,
        "heads": 2,
        "ff_width": 8,
        "layers": 1,
        "dropout": 0.0,
        "token_mixer": "ssru",
    },
    "convolutional": {"kind": "convolutional", "width": 8, "layers": 2, "dropout": 0.0},
}


def built(kind: str, encoder: bool = False, form: str = "text") -> Transducer:
    torch.manual_seed(1)
    parts = {"decoder": PARTS[kind], **({"encoder": {"kind": "recurrent", "width": 8}} if encoder else {})}
    recipe = {"data": {"format": "pairs" if encoder else form}, "tokens": {"shared": True}, "model": parts}
    return build_model(complete_recipe(parse(recipe)).model, WORDS, WORDS).double().eval()


def text(rows: int = 3, longest: int = 10) -> Batch:
    draw = torch.Generator().manual_seed(2)
    lengths = [longest - row for row in range(rows)]
    ids = [torch.randint(4, WORDS, (length - 1,), generator=draw).tolist() for length in lengths]
    return Batch(target=Padded.from_rows([[BOS, *row] for row in ids]))


def with_source(batch: Batch) -> Batch:
    return Batch(Padded.from_rows([[5, 6, 7, EOS][row:] for row in range(batch.size)]), batch.target)


def gradient(objective: Any, model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = objective(model, batch)
    loss.total.backward()
    return loss.total.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("encoder", [False, True])
def test_tbptt_loss_equals_cross_entropy(kind: str, encoder: bool) -> None:
    model, batch = built(kind, encoder), text()
    batch = with_source(batch) if encoder else batch
    expected, whole = gradient(CrossEntropy(label_smoothing=0.1), model, batch)
    for window in (1, 3, 9, 50):
        value, parts = gradient(TruncatedBPTT(window=window, label_smoothing=0.1), model, batch)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(parts, whole, strict=True))
        assert same == (window >= 9)  # nine tokens are foretold in the longest row


@pytest.mark.parametrize("window", [1, 2, 4])
def test_tbptt_gradient_equals_that_of_a_detached_state(window: int) -> None:
    """The oracle is torch's own GRU with the same weights, its state detached between windows."""
    model, batch = built("gru"), text()
    decoder: Any = model.decoder
    names = dict(model.named_parameters())
    (table,) = [one for name, one in names.items() if name.endswith("embedding.weight")]
    layers = [one.weight_ih_l0.size(1) for one in decoder.rnn.layers]
    own = nn.GRU(layers[0], 6, num_layers=2, batch_first=True).double()
    for number, layer in enumerate(decoder.rnn.layers):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(own, f"{name}_l{number}").data.copy_(getattr(layer, f"{name}_l0"))
    words = table.detach().clone().requires_grad_()
    weight, bias = (names[f"decoder.output.projection.{name}"].detach().clone() for name in ("weight", "bias"))
    state, total = torch.zeros(2, batch.size, 6).double(), torch.zeros(()).double()
    for begin in range(0, batch.decoder_inputs.values.size(1), window):
        now = slice(begin, begin + window)
        hidden, state = own(F.embedding(batch.decoder_inputs.values[:, now], words) * math.sqrt(6), state.detach())
        gold = batch.labels.values[:, now].masked_fill(~batch.labels.mask[:, now], -1)
        logits = F.linear(hidden, weight, bias)
        total = total + F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=-1, reduction="sum")
    total.backward()
    value, _ = gradient(TruncatedBPTT(window=window), model, batch)
    torch.testing.assert_close(value, total.detach(), rtol=1e-6, atol=1e-6, check_dtype=False)
    assert own.weight_hh_l0.grad is not None
    torch.testing.assert_close(decoder.rnn.layers[0].weight_hh_l0.grad, own.weight_hh_l0.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(decoder.rnn.layers[1].weight_ih_l0.grad, own.weight_ih_l1.grad, rtol=1e-4, atol=1e-6)


def test_prefix_lm_stream_contains_source_and_target() -> None:
    batch = with_source(text())
    whole = joined(batch)
    assert whole.source is None
    assert batch.source is not None
    assert batch.target is not None
    assert whole.target is not None
    for row in range(batch.size):
        sides = [part.values[row][part.mask[row]].tolist() for part in (batch.source, batch.target)]
        assert whole.target.values[row][whole.target.mask[row]].tolist() == sides[0] + sides[1]
        assert whole.target.mask[row].tolist() == sorted(whole.target.mask[row].tolist(), reverse=True)


@pytest.mark.parametrize("kind", ["gru", "transformer"])
def test_prefix_lm_loss_is_that_of_source_and_target(kind: str) -> None:
    model, batch = built(kind), with_source(text())
    with torch.no_grad():
        target = CrossEntropy(label_smoothing=0.0)(model, batch)
        found = PrefixLM()(model, batch)
        source = torch.zeros(()).double()
        assert batch.source is not None
        for row, real in zip(batch.source.values, batch.source.mask, strict=True):
            ids = torch.cat((row[real], torch.tensor([BOS])))  # what is foretold before the target: x2 .. </s> <s>
            alone = Batch(target=Padded(ids[None], torch.ones(1, len(ids), dtype=torch.bool)))
            source += CrossEntropy(label_smoothing=0.0)(model, alone).total
    torch.testing.assert_close(found.total.double(), target.total.double() + source, rtol=1e-5, atol=1e-5)
    assert PrefixLM().count(batch) == CrossEntropy().count(batch) + int(batch.source.mask.sum())
    with pytest.raises(InputError, match="one sequence"):
        PrefixLM().check(built(kind, encoder=True))
