"""Token mixers and tied layers beside their equations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from transduce.attention.self_attention import TransformerXLAttention
from transduce.errors import InputError
from transduce.layers.option_groups import AttentionOptions, SublayerOptions
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe, count_parameters


def test_transformer_xl_scores_are_those_of_the_equation() -> None:
    """((q_t + u) . k_s + (q_t + v) . W r_{t-s}) / sqrt(K), pair by pair."""
    torch.manual_seed(0)
    mixer = TransformerXLAttention(8, SublayerOptions(attention=AttentionOptions(heads=2)))
    for bias in (mixer.content_bias, mixer.position_bias):
        nn.init.normal_(bias)
    query, keys, positions = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.arange(5)[None]
    plain = torch.einsum("rhtk,rhsk->rhts", query, keys) / 2
    found = plain + mixer.relative_scores(query, keys, positions[:, 2:], positions)
    frequencies = [10000 ** -(2 * one / 8) for one in range(4)]
    for head, row, column in itertools.product(range(2), range(3), range(5)):
        angles = [(2 + row - column) * one for one in frequencies]
        vector = torch.tensor([math.sin(one) for one in angles] + [math.cos(one) for one in angles])
        relative = mixer.relative_proj(vector).view(2, 4)[head]
        asked = query[0, head, row]
        content = (asked + mixer.content_bias[head]) @ keys[0, head, column]
        expected = (content + (asked + mixer.position_bias[head]) @ relative) / 2
        torch.testing.assert_close(found[0, head, row, column], expected)


def test_tied_layers_have_the_parameters_of_one() -> None:
    def encoder(layers: int, **options: object) -> nn.Module:
        part = {"kind": "transformer", "width": 8, "heads": 2, "ff_width": 16, "layers": layers, **options}
        recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": {"kind": "recurrent", "width": 8}}}))
        return build_model(recipe.model, 20, 20).encoder

    assert count_parameters(encoder(3, tie_layers=True)) == count_parameters(encoder(1))
    with pytest.raises(InputError, match="equal layers"):
        encoder(3, tie_layers=True, experts=2, experts_every=2)
