"""Stateful attention against plain loops: coverage, location, monotonic attention, windows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from transduce.attention.multihead import WINDOWS
from transduce.attention.scores import MLP, NORMALISERS, Coverage, Location, Monotonic
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def _monotonic_by_hand(energies: list[float], mask: list[bool], before: list[float]) -> list[float]:
    """Walks on from each earlier stop, row by row, and splits the chance at every visible row."""
    result = [0.0] * len(mask)
    for place, chance in enumerate(before):
        for row in range(place, len(mask)):
            if mask[row]:
                stop = chance / (1 + math.exp(-energies[row]))
                result[row] += stop
                chance -= stop
        result[max(row for row, visible in enumerate(mask) if visible)] += chance
    return result


def test_monotonic_attention_against_its_equation():
    normaliser = Monotonic(offset=-0.5, noise=0.0).double()
    for length in (1, 4, 7):
        mask = (torch.arange(7) < length).expand(2, 3, 7)
        scores, before = double(2, 3, 7), torch.rand(2, 3, 7, dtype=torch.double) * mask
        before /= before.sum(-1, keepdim=True)
        weights = normaliser.stateful_forward(scores, mask, {"stops": before})
        for row in itertools.product(range(2), range(3)):
            energies = (scores[row] - 0.5).tolist()
            expected = _monotonic_by_hand(energies, mask[row].tolist(), before[row].tolist())
            assert_close(weights[row], torch.tensor(expected, dtype=torch.double))
        arguments = (scores, before.requires_grad_())
        assert torch.autograd.gradcheck(lambda s, b, m=mask: normaliser.stateful_forward(s, m, {"stops": b}), arguments)


def test_monotonic_attention_is_hard_at_inference():
    """It never goes back, and where chances are 0 or 1 the mean that was trained is the very path that is taken."""
    normaliser = Monotonic(noise=0.0)
    mask = torch.arange(8)[None, None] < torch.tensor([8, 5, 1])[:, None, None]
    hard = soft = normaliser.start(mask.expand(3, 4, 8))
    places = torch.zeros(3, 4)
    for _ in range(6):
        scores = torch.where(torch.rand(3, 4, 8) < 0.3, 1000.0, -1000.0)
        weights = normaliser.eval().stateful_forward(scores, mask, hard)
        assert_close(normaliser.train().stateful_forward(scores, mask, soft), weights)
        assert ((weights == 0) | (weights == 1)).all()
        assert (weights.argmax(-1) >= places).all()
        places = weights.argmax(-1)
        hard, soft = normaliser.update(hard, weights), normaliser.update(soft, weights)
    assert places[0].sum() > 0


def test_coverage_is_the_sum_of_weights_and_enters_the_score():
    score = Coverage(4, 6)
    query, memory, mask = torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool)
    past = score.start(mask)
    steps = torch.rand(4, 2, 5)
    for weights in steps:
        past = score.update(past, weights)
    assert_close(past["sum"], steps.sum(0))
    covered = torch.rand(2, 3, 5)
    found = score.stateful_forward(query, score.keys(memory), {"sum": covered})
    for b, t, s in itertools.product(range(2), range(3), range(5)):
        inner = (
            score.q_proj(query[b, t]) + score.k_proj(memory[b, s]) + score.coverage_proj.weight[:, 0] * covered[b, t, s]
        )
        assert_close(found[b, t, s], score.energy_proj(torch.tanh(inner))[0])


def test_location_score_convolves_the_previous_weights():
    score = Location(4, 6, filters=3, radius=2)
    query, memory, before = torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.rand(2, 3, 5)
    found = score.stateful_forward(query, score.keys(memory), {"weights": before})
    for b, t, s in itertools.product(range(2), range(3), range(5)):
        near = [before[b, t, s + shift] if 0 <= s + shift < 5 else torch.tensor(0.0) for shift in range(-2, 3)]
        features = score.location_conv.weight[:, 0] @ torch.stack(near)
        inner = score.q_proj(query[b, t]) + score.k_proj(memory[b, s]) + score.location_proj(features)
        assert_close(found[b, t, s], score.energy_proj(torch.tanh(inner))[0])


@pytest.mark.parametrize("kind", [Coverage, Location])
def test_stateless_score_ignores_the_history(kind):
    score, plain = kind(4, 6), MLP(4, 6)
    plain.load_state_dict(score.state_dict(), strict=False)
    query, memory = torch.randn(2, 3, 4), torch.randn(2, 5, 6)
    (past,) = score.start(torch.ones(2, 5, dtype=torch.bool)).items()
    expected = plain(query, plain.keys(memory))
    assert_close(score(query, score.keys(memory)), expected)
    assert_close(
        score.stateful_forward(query, score.keys(memory), {past[0]: past[1][:, None].expand(-1, 3, -1)}), expected
    )


def test_predicted_window_is_a_gaussian_within_the_radius():
    """Under a softmax the weights are those of the equation, align(s, h) * exp(-(j - p)^2 / (2 sigma^2)), over
    their sum."""
    window = WINDOWS["predicted"](4, radius=3)
    query, scores = torch.randn(2, 6, 4) * 3, torch.randn(2, 6, 12)
    lengths = torch.tensor([12, 5])
    mask = torch.arange(12) < lengths[:, None]
    sight = window(query, mask[:, None], None)
    weights = NORMALISERS["softmax"]()(scores + sight.bias, sight.mask)
    for b, t in itertools.product(range(2), range(6)):
        hidden = torch.tanh(window.q_proj.weight @ query[b, t])
        centre = lengths[b] * torch.sigmoid(window.position_proj.weight[0] @ hidden)
        rows = [row for row in range(int(lengths[b])) if abs(row - centre) <= 3]
        gaussian = [math.exp(-(float(row - centre.detach()) ** 2) / (2 * (3 / 2) ** 2)) for row in rows]
        expected = torch.zeros(12)
        expected[rows] = scores[b, t, rows].exp() * torch.tensor(gaussian)
        assert_close(weights[b, t], expected / expected.sum())
    assert sight.mask.any(-1).all()


def test_centre_of_predicted_window_gets_a_gradient():
    window = WINDOWS["predicted"](4, radius=3).double()
    query, mask = double(2, 3, 4), torch.ones(2, 1, 7, dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda q: window(q, mask, None).bias, query)


def test_monotonic_window_advances_each_step():
    window = WINDOWS["monotonic"](4, radius=1)
    mask = torch.arange(6) < torch.tensor([6, 3])[:, None]
    past = window.start(mask)
    seen = []
    for _ in range(5):
        at_once = {"steps": past["steps"][:, None]}  # B N 1
        seen.append(window(torch.zeros(2, 1, 4), mask[:, None], at_once).mask[:, 0])
        past = window.update(past, mask.float())
    found = [["".join("x" if row else "." for row in rows.tolist()) for rows in step] for step in seen]
    assert [one[0] for one in found] == ["xx....", "xxx...", ".xxx..", "..xxx.", "...xxx"]
    assert [one[1] for one in found] == ["xx....", "xxx...", ".xx...", ".xx...", ".xx..."]


REMEMBERING = {
    "sum": {"score": "coverage"},
    "weights": {"score": "location"},
    "stops": {"normaliser": {"kind": "monotonic", "offset": 2.0}, "score": "mlp"},  # stops where it is
}


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("kind", ["bahdanau", "luong"])
def test_state_holds_the_attention_history(kind, name):
    """What a part keeps is made of the weights that were told, and other memories give other scores."""
    torch.manual_seed(2)
    part = {"kind": "recurrent", "width": 8, "dropout": 0.0}
    decoder = {**part, "context": {"kind": kind, **REMEMBERING[name]}}
    model = build_model(complete_recipe(parse({"model": {"encoder": part, "decoder": decoder}})).model, 9, 9).eval()
    batch = Batch(Padded.from_rows([[4, 5, 6, 7, EOS], [8, 4, EOS]]))
    step = model.advance(torch.tensor([[BOS, 5, 6], [BOS, 7, 4]]), model.start(batch), with_attention=True)
    weights = step.attention.cross[:, 0, 0]  # R T S
    (held,) = [past for past in step.state.past["context"]["history"].values() if past]
    assert_close(held[name], weights.sum(1) if name == "sum" else weights[:, -1])
    changed = held[name].roll(1, 1) * 3 if name != "stops" else batch.source.mask * F.one_hot(torch.tensor(2), 5)
    before = model.advance(torch.tensor([[5], [5]]), step.state).logits
    held[name] = changed.to(weights.dtype)
    assert not torch.allclose(model.advance(torch.tensor([[5], [5]]), step.state).logits, before)


def refused(decoder: dict[str, object], match: str, encoder: dict[str, object] | None = None) -> None:
    model = {"encoder": encoder or {"kind": "recurrent"}, "decoder": decoder}
    with pytest.raises(InputError, match=match):
        complete_recipe(parse({"model": model}))


def test_stateful_attention_needs_a_recurrent_decoder():
    for part in ({"score": "coverage"}, {"score": "location"}, {"normaliser": "monotonic"}):
        (name,) = part.values()
        refused({"kind": "transformer", **part}, f"{name}.*recurrent decoder")
        refused({"kind": "recurrent"}, f"{name}.*recurrent decoder", {"kind": "transformer", **part})


@pytest.mark.parametrize("kind", ["bahdanau", "luong"])
def test_the_options_of_a_window_are_checked(kind):
    refused({"kind": "recurrent", "context": {"kind": kind, "radius": 4}}, "radius")
    refused({"kind": "recurrent", "context": {"kind": kind, "window": {"kind": "predicted", "radius": -1}}}, "radius")
    refused({"kind": "recurrent", "context": {"kind": kind, "window": {"kind": "windy", "radius": 1}}}, "windy")
