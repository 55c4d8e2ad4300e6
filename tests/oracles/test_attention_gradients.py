"""Gradients of every score and normaliser of the registries, in double precision, against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close

from transduce.attention.multihead import WINDOWS
from transduce.attention.scores import NORMALISERS, SCORES

# How each kind learns decides what its gradient must be. A new row has to say which it is.
SMOOTH = ("softmax", "sparsemax", "entmax")  # its own gradient, which finite differences know
STRAIGHT_THROUGH = ("hard", "gumbel")  # one row, with the gradient of the soft weights it was taken from
REWARDED = ("sampled",)  # one row, with the gradient of the logarithm of its chance
WALKING = ("monotonic",)  # in training the mean of all walks, which is smooth; afterwards one walk without a gradient
MASK = torch.tensor([True, True, False, True, True])


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def test_every_normaliser_has_a_rule():
    assert sorted((*SMOOTH, *STRAIGHT_THROUGH, *REWARDED, *WALKING)) == sorted(NORMALISERS)


@pytest.mark.parametrize("kind", SCORES)
def test_score_gradients_against_finite_differences(kind):
    """By query, memory, past and every weight of its own."""
    score = SCORES[kind](4, 4).double()
    names = [name for name, _ in score.named_parameters()]
    weights = [double(*parameter.shape) for parameter in score.parameters()]
    query, memory = double(2, 3, 4), double(2, 5, 4)
    past = {name: double(2, 3, 5) for name in score.start(torch.ones(2, 5, dtype=torch.bool))}

    class Whole(torch.nn.Module):
        """keys and recall in one call, as functional_call wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.score = score

        def forward(self, query, memory, *history):
            return self.score.stateful_forward(query, self.score.keys(memory), dict(zip(past, history, strict=True)))

    def run(query, memory, *rest):
        history, chosen = rest[: len(past)], rest[len(past) :]
        replaced = {f"score.{name}": weight for name, weight in zip(names, chosen, strict=True)}
        return functional_call(Whole(), replaced, (query, memory, *history))

    assert torch.autograd.gradcheck(run, (query, memory, *past.values(), *weights))
    assert score.stateful == bool(past)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("kind", SMOOTH)
def test_smooth_normaliser_gradients(kind, mask):
    normaliser = NORMALISERS[kind]()
    for size in (0.3, 3.0):  # all rows in the support, and few of them
        assert torch.autograd.gradcheck(lambda s, size=size: normaliser(s * size, mask), double(2, 3, 5))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("kind", STRAIGHT_THROUGH)
def test_straight_through_gradients(kind, mask, training):
    """Finite differences of a softmax of the scores, with the noise that was drawn."""
    normaliser = NORMALISERS[kind](**({"temperature": 0.7} if kind == "gumbel" else {})).train(training)
    scores, direction = double(2, 3, 5), torch.randn(2, 3, 5, dtype=torch.double)
    torch.manual_seed(7)
    weights = normaliser(scores, mask)
    assert ((weights == 0) | (weights - 1).abs().lt(1e-12)).all()
    (found,) = torch.autograd.grad((weights * direction).sum(), scores)
    torch.manual_seed(7)
    drawn = kind == "gumbel" and training
    noise = -torch.empty_like(scores).exponential_().log() if drawn else torch.zeros_like(scores)

    def soft(scores: torch.Tensor) -> torch.Tensor:
        energies = (scores + noise) / (0.7 if kind == "gumbel" else 1.0)
        return (energies if mask is None else energies.masked_fill(~mask, -torch.inf)).softmax(-1)

    assert_close(found, differences(lambda s: (soft(s) * direction).sum(), scores), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("kind", REWARDED)
def test_sampled_attention_gradients(kind, mask, training):
    """Finite differences of sum_t reward_t log p(row_t), for the rows that were drawn."""
    normaliser = NORMALISERS[kind]().train(training)
    scores, reward = double(2, 3, 5), torch.randn(2, 3, dtype=torch.double)
    weights = normaliser(scores, mask)
    rows = weights.argmax(-1, keepdim=True)
    assert_close(weights, torch.zeros_like(weights).scatter(-1, rows, 1.0), rtol=0, atol=0)
    (found,) = torch.autograd.grad((weights.sum(-1) * reward).sum(), scores)

    def expected(scores: torch.Tensor) -> torch.Tensor:
        hidden = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return (hidden.log_softmax(-1).gather(-1, rows).squeeze(-1) * reward).sum()

    assert_close(found, differences(expected, scores), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", WALKING)
def test_monotonic_attention_gradients(kind):
    """By scores, by where the last step stopped and by its own weights, with the noise it drew."""
    normaliser = NORMALISERS[kind]().double().train()
    (name,) = normaliser.start(torch.ones(2, 5, dtype=torch.bool))
    (own,) = dict(normaliser.named_parameters())
    before = torch.rand(2, 3, 5, dtype=torch.double) * MASK
    before = (before / before.sum(-1, keepdim=True)).requires_grad_()

    class Recall(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = normaliser

        def forward(self, scores, past):
            torch.manual_seed(11)
            return self.part.stateful_forward(scores, MASK, {name: past})

    def run(scores, past, weight):
        return functional_call(Recall(), {f"part.{own}": weight}, (scores, past))

    assert torch.autograd.gradcheck(run, (double(2, 3, 5), before, double()))
    after = normaliser.eval().stateful_forward(double(2, 3, 5), MASK, {name: before.detach()})
    assert not after.requires_grad or torch.autograd.grad(after.sum(), before, allow_unused=True)[0] is None


@pytest.mark.parametrize("kind", WINDOWS)
def test_window_gradients(kind):
    """The bias of a window, by query and weights, where it has one."""
    window = WINDOWS[kind](4, radius=2).double()
    mask = torch.ones(2, 1, 9, dtype=torch.bool)
    past = {name: value[:, None].expand(2, 3, -1) for name, value in window.start(mask[:, 0]).items()}
    query = double(2, 3, 4)
    sight = window(query, mask, past)
    if sight.bias is None:
        assert not list(window.parameters())
        return
    names, weights = zip(*window.named_parameters(), strict=True)

    def run(query, *chosen):
        return functional_call(window, dict(zip(names, chosen, strict=True)), (query, mask, past)).bias

    assert torch.autograd.gradcheck(run, (query, *weights))


def differences(function, place: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """The gradient of a number, one coordinate at a time."""
    place = place.detach()
    result = torch.zeros_like(place)
    for index in range(place.numel()):
        shift = torch.zeros(place.numel(), dtype=place.dtype)
        shift[index] = step
        shift = shift.view_as(place)
        result.view(-1)[index] = (function(place + shift) - function(place - shift)) / (2 * step)
    return result
