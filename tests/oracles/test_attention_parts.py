"""Scores, normalisers and positions: gradients by finite differences, definitions by brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close

from transduce.attention.attend import Attend
from transduce.attention.normalisers import NORMALISERS, Sparsemax
from transduce.attention.positions import POSITIONS
from transduce.attention.scores import SCORES
from transduce.errors import InputError


@pytest.mark.parametrize("kind", SCORES)
def test_score_gradients(kind):
    score = SCORES[kind](4, 4).double()
    query = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    memory = torch.randn(2, 5, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, m: score(q, score.keys(m)), (query, memory))


@pytest.mark.parametrize("kind", NORMALISERS)
def test_normaliser_gradients_and_masks(kind):
    normaliser = NORMALISERS[kind]()
    scores = torch.randn(2, 3, 5, dtype=torch.double, requires_grad=True)
    mask = torch.tensor([True, True, False, True, False])
    assert torch.autograd.gradcheck(lambda s: normaliser(s, mask), scores)
    weights = normaliser(scores * 3, mask)
    assert (weights[..., ~mask] == 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 3, dtype=torch.double))
    kept = normaliser(scores[..., mask] * 3, None)
    assert_close(weights[..., mask], kept)


def test_sparsemax_is_the_nearest_point_of_the_simplex():
    """Every support is tried: on each, the projection is a plain mean shift."""
    for scores in torch.randn(50, 4, dtype=torch.double) * 2:
        best = None
        for size in range(1, 5):
            for support in itertools.combinations(range(4), size):
                point = torch.zeros(4, dtype=torch.double)
                inside = scores[list(support)]
                point[list(support)] = inside - (inside.sum() - 1) / size
                distance = (point - scores).norm()
                if (point >= 0).all() and (best is None or distance < best[0]):
                    best = (distance, point)
        assert_close(Sparsemax()(scores, None), best[1])


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("kind", SCORES)
def test_weights_reproduce_the_context(kind, normaliser):
    """The weights told are the weights used, fused kernel or not, with mask, bias and causal triangle."""
    attend = Attend(SCORES[kind](4, 4), NORMALISERS[normaliser]())
    query, memory, values = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4)
    mask = torch.rand(2, 1, 1, 6) > 0.3
    mask[..., 0] = True
    bias = torch.randn(2, 3, 6, 6)
    keys = attend.keys(memory)
    for options in ({}, {"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
        plain, none = attend(query, keys, values, **options)
        context, weights = attend(query, keys, values, **options, with_attention=True)
        assert none is None
        assert_close(weights @ values, plain, rtol=1e-4, atol=1e-5)
        assert_close(context, plain)
    for options in ({}, {"bias": bias}):
        plain, _ = attend(query, keys, values, **options, causal=True)
        _, weights = attend(query, keys, values, **options, causal=True, with_attention=True)
        assert_close(weights @ values, plain, rtol=1e-4, atol=1e-5)
        assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_positions_can_tell_order(kind, causal):
    """Moving one row changes what a query sees, except for `none`."""
    position = POSITIONS[kind](8, 2, causal)
    values = torch.randn(1, 5, 8)

    def scores(order: list[int]) -> torch.Tensor:
        places = torch.arange(5)[None]
        rows = position.add(values[:, order], places)
        heads = position.turn(rows.unflatten(-1, (2, 4)).transpose(1, 2), places)
        bias = position.bias(heads, places, places)
        raw = heads @ heads.transpose(-1, -2)
        raw = raw if bias is None else raw + bias
        back = torch.tensor(order).argsort()
        return raw[:, :, back][..., back]

    same = torch.allclose(scores([0, 1, 2, 3, 4]), scores([3, 1, 2, 0, 4]), atol=1e-5)
    assert same == (kind == "none")


@pytest.mark.parametrize("kind", ["rotary", "relative", "shaw", "alibi"])
def test_relative_positions_depend_on_distance_alone(kind):
    position = POSITIONS[kind](8, 2, True)
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)

    def scores(shift: int) -> torch.Tensor:
        places = torch.arange(5)[None] + shift
        bias = position.bias(query, places, places)
        raw = position.turn(query, places) @ position.turn(key, places).transpose(-1, -2)
        return raw if bias is None else raw + bias

    assert_close(scores(0), scores(100), rtol=1e-3, atol=1e-4)


def test_t5_buckets_are_those_of_transformers():
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    offsets = torch.arange(-300, 300)[None]
    for causal in (True, False):
        own = POSITIONS["relative"](8, 2, causal, buckets=32, distance=128)._bucket(offsets)
        assert_close(own, attention._relative_position_bucket(offsets, not causal, 32, 128))


def test_learned_positions_end():
    position = POSITIONS["learned"](8, 2, True, longest=4)
    with pytest.raises(InputError, match="end at 4"):
        position.add(torch.zeros(1, 5, 8), torch.arange(5)[None])
