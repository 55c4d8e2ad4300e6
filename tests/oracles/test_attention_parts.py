"""Scores, normalisers and positions: gradients by finite differences, definitions by brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from transduce.attention.multihead import Attend
from transduce.attention.positions import POSITIONS
from transduce.attention.scores import NORMALISERS, SCORES, Entmax, Gumbel, Hard, Sparsemax
from transduce.errors import InputError

SMOOTH = ("softmax", "sparsemax", "entmax")
PLAIN_SCORES = [kind for kind, part in SCORES.items() if not part.stateful]
PLAIN_NORMALISERS = [kind for kind, part in NORMALISERS.items() if not part.stateful]


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


@pytest.mark.parametrize("kind", SCORES)
def test_score_gradients(kind):
    score = SCORES[kind](4, 4).double()
    query, memory = double(2, 3, 4), double(2, 5, 4)
    assert torch.autograd.gradcheck(lambda q, m: score(q, score.keys(m)), (query, memory))
    if score.stateful:
        (name,) = score.start(torch.ones(2, 5, dtype=torch.bool))
        inputs = (query, memory, torch.rand(2, 3, 5, dtype=torch.double, requires_grad=True))
        function = lambda q, m, past: score.stateful_forward(q, score.keys(m), {name: past})  # noqa: E731
        assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("kind", SMOOTH)
def test_normaliser_gradients_and_masks(kind):
    normaliser = NORMALISERS[kind]()
    scores = double(2, 3, 5)
    mask = torch.tensor([True, True, False, True, False])
    assert torch.autograd.gradcheck(lambda s: normaliser(s, mask), scores)
    kept = normaliser(scores[..., mask] * 3, None)
    assert_close(normaliser(scores * 3, mask)[..., mask], kept)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NORMALISERS)
@given(seed=st.integers(0, 2**32), columns=st.integers(1, 9), size=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
@examples(max_examples=25, deadline=None)
def test_weights_are_a_distribution_over_unmasked_rows(kind, training, seed, columns, size):
    torch.manual_seed(seed)
    normaliser = NORMALISERS[kind]().train(training)
    scores = (torch.randn(4, 3, columns) * size).requires_grad_()
    mask = torch.rand(4, 1, columns) > 0.5
    mask[torch.arange(4), 0, torch.randint(columns, (4,))] = True
    weights = normaliser(scores, mask)
    assert (weights >= 0).all()
    assert (weights[~mask.expand_as(weights)] == 0).all()
    assert_close(weights.sum(-1), torch.ones(4, 3))
    if weights.requires_grad:  # a monotonic walk has no gradient once training is over
        (weights * torch.randn_like(weights)).sum().backward()
        assert scores.grad.isfinite().all()


@given(seed=st.integers(0, 2**32), columns=st.integers(1, 30), size=st.floats(0, 50))
@examples(max_examples=50, deadline=None)
def test_entmax_against_bisection(seed, columns, size):
    """tau is the root of sum max(e / 2 - tau, 0)^2 = 1, found here by halving an interval that must hold it."""
    torch.manual_seed(seed)
    scores = torch.randn(5, columns, dtype=torch.double) * size
    high = scores.amax(-1, keepdim=True) / 2
    low = high - 1
    for _ in range(60):
        middle = (low + high) / 2
        heavy = (scores / 2 - middle).clamp(min=0).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    assert_close(Entmax()(scores, None), (scores / 2 - low).clamp(min=0).square(), rtol=1e-7, atol=1e-9)


def test_entmax_lies_between_softmax_and_sparsemax():
    scores = torch.randn(200, 8) * 2
    supports = [(NORMALISERS[kind]()(scores, None) > 0).sum(-1) for kind in ("sparsemax", "entmax", "softmax")]
    assert (supports[0] <= supports[1]).all()
    assert (supports[1] <= supports[2]).all()
    assert supports[0].sum() < supports[1].sum() < supports[2].sum()


def test_straight_through_is_one_hot_with_the_gradient_of_softmax():
    scores, direction = double(6, 5), torch.randn(6, 5, dtype=torch.double)
    for normaliser in (Hard(), Gumbel().eval()):
        weights = normaliser(scores, None)
        assert_close(weights, F.one_hot(scores.argmax(-1), 5).double(), rtol=0, atol=0)
        (found,) = torch.autograd.grad((weights * direction).sum(), scores)
        (expected,) = torch.autograd.grad((scores.softmax(-1) * direction).sum(), scores)
        assert_close(found, expected)


def test_gumbel_samples_from_the_softmax():
    torch.manual_seed(5)
    scores, mask = torch.randn(4), torch.tensor([True, True, True, False])
    normaliser, many = Gumbel(temperature=0.5), scores.expand(20000, 4)
    drawn = normaliser(many, mask)
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert_close(drawn.mean(0), scores.masked_fill(~mask, -torch.inf).softmax(-1), rtol=0, atol=0.02)
    torch.manual_seed(5)
    torch.randn(4)
    assert_close(normaliser(many, mask), drawn)


def test_sparsemax_is_the_projection_onto_the_simplex():
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


@pytest.mark.parametrize("normaliser", PLAIN_NORMALISERS)
@pytest.mark.parametrize("kind", PLAIN_SCORES)
def test_weights_reproduce_the_context(kind, normaliser):
    """The weights told are the weights used, fused kernel or not, with mask, bias and causal triangle."""
    attend = Attend(SCORES[kind](4, 4), NORMALISERS[normaliser](), carries_past=True).eval()
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


@pytest.mark.parametrize("normaliser", PLAIN_NORMALISERS)
@pytest.mark.parametrize("kind", PLAIN_SCORES)
def test_attention_is_invariant_to_permutations_of_the_memory(kind, normaliser):
    """Rows in another order: the weights go with them, the context stays."""
    attend = Attend(SCORES[kind](4, 4), NORMALISERS[normaliser](), carries_past=True).eval()
    query, memory, order = torch.randn(2, 3, 4), torch.randn(2, 6, 4), torch.randperm(6)
    mask = torch.arange(6) < torch.tensor([[[6]], [[4]]])
    context, weights = attend(query, attend.keys(memory), memory, mask, with_attention=True)
    moved = memory[:, order]
    other, others = attend(query, attend.keys(moved), moved, mask[..., order], with_attention=True)
    assert_close(other, context)
    assert_close(others, weights[..., order])


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_position_encodings_distinguish_order(kind, causal):
    """Moving one row changes what a query sees, except for `none`."""
    position = POSITIONS[kind](8, 2, causal)
    values = torch.randn(1, 5, 8)

    def scores(order: list[int]) -> torch.Tensor:
        places = torch.arange(5)[None]
        rows = position.add(values[:, order], places)
        heads = position.rotate(rows.unflatten(-1, (2, 4)).transpose(1, 2), places)
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
        raw = position.rotate(query, places) @ position.rotate(key, places).transpose(-1, -2)
        return raw if bias is None else raw + bias

    assert_close(scores(0), scores(100), rtol=1e-3, atol=1e-4)


def test_t5_buckets_are_those_of_transformers():
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    offsets = torch.arange(-300, 300)[None]
    for causal in (True, False):
        own = POSITIONS["relative"](8, 2, causal, buckets=32, max_distance=128)._bucket(offsets)
        assert_close(own, attention._relative_position_bucket(offsets, not causal, 32, 128))


def test_learned_positions_have_a_maximum():
    position = POSITIONS["learned"](8, 2, True, max_positions=4)
    with pytest.raises(InputError, match="end at 4"):
        position.add(torch.zeros(1, 5, 8), torch.arange(5)[None])
