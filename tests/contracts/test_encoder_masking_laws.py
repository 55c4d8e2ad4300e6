"""What a row of an encoder depends on: causality, and the receptive field of convolutions."""

from __future__ import annotations

import pytest
import torch
from contract_fixtures import SIZE, SMALL
from torch.testing import assert_close

from transduce.encoders import ENCODERS
from transduce.errors import InputError
from transduce.flow import Batch, Memory, Padded
from transduce.layers.convolution import dilations
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

LENGTH = 12
CAUSAL = [
    {**SMALL["transformer"], "causal": True},
    {**SMALL["transformer"], "causal": True, "position": "relative"},
    {**SMALL["transformer"], "causal": True, "window": 2, "position": "rotary"},
    {**SMALL["convolutional"], "causal": True, "dilation": 2},
    {**SMALL["recurrent"], "bidirectional": False},
]


def encoder_of(spec: dict) -> torch.nn.Module:
    torch.manual_seed(2)
    recipe = complete_recipe(parse({"model": {"encoder": spec, "decoder": SMALL["recurrent"]}}))
    return build_model(recipe.model, SIZE, SIZE).encoder.eval()


def encoded(encoder: torch.nn.Module, ids: torch.Tensor) -> Memory:
    with torch.no_grad():
        return encoder(Batch(Padded(ids, torch.ones_like(ids, dtype=torch.bool))))


@pytest.mark.parametrize("spec", CAUSAL, ids=str)
def test_rows_of_a_causal_encoder_do_not_change_with_later_tokens(spec):
    encoder, ids = encoder_of(spec), torch.arange(4, 4 + LENGTH)[None] % SIZE
    before = encoded(encoder, ids).values
    for place in (1, LENGTH // 2, LENGTH - 1):
        changed = ids.clone()
        changed[0, place] = (ids[0, place] + 1) % SIZE
        after = encoded(encoder, changed).values
        assert_close(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place], before[:, place])
        assert_close(encoded(encoder, ids[:, :place]).values, before[:, :place], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted({*ENCODERS} - {"identity", "multi_source"}))
def test_other_encoders_read_later_tokens_too(kind):
    encoder, ids = encoder_of(SMALL[kind]), torch.arange(4, 4 + LENGTH)[None] % SIZE
    changed = ids.clone()
    changed[0, 5] = ids[0, 5] + 1
    before, after = encoded(encoder, ids).values, encoded(encoder, changed).values
    assert not torch.allclose(after[:, 4], before[:, 4])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"kernel": 3, "layers": 2}, 5),
        ({"kernel": 3, "layers": 3, "dilation": 2}, 15),  # 1 + 2 (1 + 2 + 4)
        ({"kernel": 2, "layers": 4, "dilation": 2, "causal": True}, 16),  # a binary tree
        ({"kernel": 3, "layers": 3, "dilation": 3}, 27),  # a ternary tree
    ],
    ids=str,
)
def test_measured_receptive_field_equals_the_formula(options, rows):
    """The gradient of one row of the memory reaches exactly the rows of the formula; in a tree each by one path."""
    encoder = encoder_of({**SMALL["convolutional"], "position": "none", **options})
    length = 4 * rows + 1
    ids = torch.full((1, length), 5)
    captured: list[torch.Tensor] = []
    encoder.embedding.register_forward_hook(lambda module, given, output: captured.append(output.requires_grad_()))
    memory = encoder(Batch(Padded(ids, torch.ones_like(ids, dtype=torch.bool))))
    middle = length // 2
    (gradient,) = torch.autograd.grad(memory.values[0, middle].square().sum(), captured)
    reached = gradient[0].abs().sum(-1).nonzero()[:, 0]
    kernel, layers = options["kernel"], options["layers"]
    distances = dilations(layers, kernel, options.get("dilation", 1))
    assert 1 + (kernel - 1) * sum(distances) == rows
    assert len(reached) == rows
    assert reached.diff().eq(1).all()
    last = middle if options.get("causal") else middle + rows // 2
    assert reached[-1] == last
    if options.get("dilation") == kernel:
        assert rows == kernel**layers  # as many rows as paths: each is reached by one


def test_receptive_fields_without_end_are_refused():
    with pytest.raises(InputError, match="field of 2,097,"):
        encoder_of({**SMALL["convolutional"], "kernel": 2, "dilation": 2, "layers": 21, "causal": True})
    with pytest.raises(InputError, match="no middle row"):
        encoder_of({**SMALL["convolutional"], "kernel": 2})
