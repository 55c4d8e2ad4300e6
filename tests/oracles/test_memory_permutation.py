"""Permutation of the memory: attention weights are permuted, outputs do not change."""

from __future__ import annotations

import pytest
import torch

from transduce.attention.multihead import WINDOWS
from transduce.attention.scores import NORMALISERS, SCORES
from transduce.decoders import DECODERS
from transduce.flow import Memory
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

# These know the order of the rows, and must show it: filters over neighbours, a walk, a neighbourhood.
ORDERED = {"location", "monotonic", *WINDOWS}
WIDTH, SIZE = 8, 9
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def build(decoder: dict) -> torch.nn.Module:
    torch.manual_seed(2)
    model = {"encoder": {"kind": "recurrent", "width": WIDTH}, "decoder": {"width": WIDTH, **decoder}}
    objective = {"kind": "reinforce" if "sampled" in str(decoder) else "cross_entropy"}
    recipe = complete_recipe(parse({"model": model, "training": {"objective": objective}}))
    return build_model(recipe.model, SIZE, SIZE).eval().decoder


def read(decoder: torch.nn.Module, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and attention of four tokens after a memory whose rows stand in this order; a part of them is padding."""
    torch.manual_seed(4)
    values, summary = torch.randn(2, 6, WIDTH) * 3, torch.randn(2, WIDTH)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    memory = Memory(values[:, order], mask[:, order], summary)
    step = decoder.advance(torch.tensor([[1, 5, 6, 4], [1, 4, 4, 8]]), decoder.start(memory), with_attention=True)
    weights = step.attention.cross if step.attention.cross is not None else step.attention.past[..., : len(order)]
    return step.logits, weights


def compare(decoder: torch.nn.Module) -> bool:
    """Whether the order of the rows leaves the output as it was, the weights going with the rows."""
    order = torch.tensor([3, 1, 5, 4, 0, 2])
    logits, cross = read(decoder, torch.arange(6))
    moved, moved_cross = read(decoder, order)
    return torch.allclose(moved, logits, **CLOSE) and torch.allclose(moved_cross, cross[..., order], **CLOSE)


@pytest.mark.parametrize("normaliser", [kind for kind in NORMALISERS if kind not in ORDERED])
@pytest.mark.parametrize("score", [kind for kind in SCORES if kind not in ORDERED])
@pytest.mark.parametrize("context", ["bahdanau", "luong"])
def test_context_mechanisms_are_permutation_invariant(context, score, normaliser):
    part = {"score": score, "normaliser": normaliser}
    assert compare(build({"kind": "recurrent", "context": {"kind": context, **part}}))


@pytest.mark.parametrize(
    "part",
    [{"score": "location"}, {"score": "dot", "normaliser": "monotonic"}]
    + [{"window": {"kind": window, "radius": 1}} for window in WINDOWS],
    ids=str,
)
@pytest.mark.parametrize("context", ["bahdanau", "luong"])
def test_order_dependent_parts_are_not_permutation_invariant(context, part):
    assert {value["kind"] if isinstance(value, dict) else value for value in part.values()} & ORDERED
    assert not compare(build({"kind": "recurrent", "context": {"kind": context, **part}}))


@pytest.mark.parametrize("normaliser", [kind for kind in NORMALISERS if kind not in ("monotonic", "sampled")])
@pytest.mark.parametrize("score", [kind for kind, part in SCORES.items() if not part.stateful])
@pytest.mark.parametrize(
    "kind", [kind for kind in DECODERS if kind not in ("recurrent", "hard_attention", "edit_transducer")]
)
def test_cross_attention_is_permutation_invariant(kind, score, normaliser):
    heads = {"heads": 2, "layers": 2, "score": score, "normaliser": normaliser}
    assert compare(build({"kind": kind, **heads}))
