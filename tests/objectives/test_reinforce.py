"""REINFORCE for sampled attention: gradient estimator, baseline, entropy bonus, learning, resumption."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from transduce.attention.scores import Softmax, StochasticHard
from transduce.decoding.search import search
from transduce.decoding.strategies import Greedy
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.inference import load
from transduce.objectives import Reinforce
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.run import Run
from transduce.training.experiment import train

SIZE, PLACES, STEPS = 8, 3, 3
FED = {"kind": "luong", "normaliser": "sampled"}
UNFED = {**FED, "input_feeding": False}
CONTEXT_MECHANISMS = {
    "luong": FED,
    "unfed": UNFED,
    "bahdanau": {"kind": "bahdanau", "normaliser": "sampled"},
    "coverage": {"kind": "luong", "score": "coverage", "normaliser": "sampled"},
}
BATCH = Batch(Padded.from_rows([[5, 6, EOS]]), Padded.from_rows([[BOS, 6, 5, EOS]]))


def build(context: dict):
    part = {"kind": "recurrent", "width": 6, "dropout": 0.0}
    recipe = {
        "model": {"encoder": part, "decoder": {**part, "context": context}},
        "training": {"objective": {"kind": "reinforce"}},
    }
    torch.manual_seed(3)
    model = build_model(complete_recipe(parse(recipe)).model, SIZE, SIZE)
    with torch.no_grad():  # far from even, so that draws matter
        for parameter in model.parameters():
            parameter.mul_(2.5)
    return model.train()


class Forced:
    """Attends to the rows of a given path instead of random ones.

    `draw` replaces the random draw. `choose` replaces the normaliser: its weights are 0 and 1, and it records the
    log-probability of the path with its gradient.
    """

    def __init__(self, path) -> None:
        self.path, self.logs = list(path), []

    def draw(self, logs: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.path.pop(0) for _ in range(logs.size(-2))]).view(*logs.shape[:-1], 1)

    def choose(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows = self.draw(scores)
        self.logs.append(scores.log_softmax(-1).gather(-1, rows).sum())
        return torch.zeros_like(scores.detach()).scatter(-1, rows, 1.0)


def gradient(total: torch.Tensor, model) -> torch.Tensor:
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    zeros = [torch.zeros_like(parameter) for parameter in model.parameters()]
    return torch.cat([(g if g is not None else z).flatten() for g, z in zip(found, zeros, strict=True)])


PATHS = list(itertools.product(range(PLACES), repeat=STEPS))


def exact_gradient(model, monkeypatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient of the expected cross-entropy, and the probability of each path."""
    expected, chances = torch.zeros(()), []
    for path in PATHS:
        forced = Forced(path)
        with monkeypatch.context() as patch:
            patch.setattr(StochasticHard, "forward", lambda _, scores, mask, forced=forced: forced.choose(scores, mask))
            scores = model(BATCH).logits.log_softmax(-1)
        cost = -scores.gather(-1, BATCH.labels.values[..., None]).sum()
        chance = sum(forced.logs).exp()
        expected = expected + chance * cost
        chances.append(chance.detach())
    return gradient(expected, model), chances


def mean_estimate(model, objective, chances, monkeypatch) -> tuple[torch.Tensor, float]:
    """The mean of the gradients that the objective estimates along each path, and their variance."""
    mean, square = torch.zeros(1), 0.0
    for path, chance in zip(PATHS, chances, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(StochasticHard, "draw", staticmethod(Forced(path).draw))
            estimate = gradient(objective(model, BATCH).total, model)
        mean = mean + chance * estimate
        square += float(chance * estimate.square().sum())
    return mean, square - float(mean.square().sum())


@pytest.mark.parametrize("context", CONTEXT_MECHANISMS)
def test_mean_over_samples_is_the_gradient_of_the_expected_loss(context, monkeypatch):
    model = build(CONTEXT_MECHANISMS[context])
    exact, chances = exact_gradient(model, monkeypatch)
    mean, noise = mean_estimate(model, Reinforce(entropy=0.0), chances, monkeypatch)
    assert_close(mean, exact, rtol=1e-4, atol=1e-5)
    assert exact.norm() > 0.1
    # A baseline, whatever it says, changes nothing in the mean; one that has learned lowers the variance.
    objective = Reinforce(entropy=0.0)
    baseline = objective.auxiliary_module(6)
    torch.nn.init.normal_(baseline.weight)
    other, _ = mean_estimate(model, objective, chances, monkeypatch)
    assert_close(other, exact, rtol=1e-4, atol=1e-5)
    fit(baseline, objective, model)
    same, quieter = mean_estimate(model, objective, chances, monkeypatch)
    assert_close(same, exact, rtol=1e-4, atol=1e-5)
    assert quieter < 0.9 * noise


def fit(baseline: torch.nn.Module, objective: Reinforce, model) -> None:
    """Fits the baseline by squared error over samples, as training does, with fixed model weights."""
    torch.manual_seed(1)
    optimiser = torch.optim.Adam(baseline.parameters(), 0.1)
    for _ in range(70):
        optimiser.zero_grad()
        objective(model, BATCH).total.backward()
        optimiser.step()


def test_step_baseline_is_exact_without_later_dependence(monkeypatch):
    """Without input feeding, the reward of one step has the same mean gradient and less variance."""
    model = build(UNFED)
    exact, chances = exact_gradient(model, monkeypatch)
    _, noise = mean_estimate(model, Reinforce(entropy=0.0), chances, monkeypatch)
    alone, quieter = mean_estimate(model, Reinforce(reward="step", entropy=0.0), chances, monkeypatch)
    assert_close(alone, exact, rtol=1e-4, atol=1e-5)
    assert quieter < noise
    fed = build(FED)
    exact, chances = exact_gradient(fed, monkeypatch)
    mean, _ = mean_estimate(fed, Reinforce(reward="step", entropy=0.0), chances, monkeypatch)
    assert not torch.allclose(mean, exact, rtol=1e-2, atol=1e-3)


def test_sampling_frequencies_equal_the_probabilities():
    torch.manual_seed(1)
    scores, mask = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([True, True, True, False])
    weights = StochasticHard().train()(scores.expand(20000, 1, 4), mask)
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    wanted = torch.tensor([math.exp(x) if x < 5 else 0.0 for x in scores.tolist()])
    assert_close(weights.mean((0, 1)), wanted / wanted.sum(), atol=0.015, rtol=0)
    assert StochasticHard().eval()(scores[None], mask).tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_sampled_weights_have_the_score_function_gradient():
    scores = torch.randn(5, dtype=torch.double, requires_grad=True)
    weights = StochasticHard().eval()(scores[None], None)
    (found,) = torch.autograd.grad(weights.sum(), scores)
    (wanted,) = torch.autograd.grad(scores.log_softmax(-1).max(), scores)
    assert_close(found, wanted)


def test_entropy_equals_its_definition():
    mask = torch.tensor([True, True, False])
    found = StochasticHard().entropy(torch.tensor([[0.0, math.log(3), 9.0]]), mask)
    assert_close(found, torch.tensor([0.25 * math.log(4) + 0.75 * math.log(4 / 3)]))
    assert_close(StochasticHard().entropy(torch.full((2, 5), 3.0), None), torch.full((2,), math.log(5)))
    assert StochasticHard().entropy(torch.tensor([[7.0, 1.0, 9.0]]), torch.tensor([True, False, False])).tolist() == [
        0.0
    ]
    assert Softmax().entropy(torch.zeros(1, 3), None) is None


def test_entropy_gradient_equals_finite_differences():
    scores = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    mask = torch.tensor([[[True, True, False, True]], [[True, False, True, True]]])
    assert torch.autograd.gradcheck(lambda x: StochasticHard().entropy(x, mask), (scores,))
    (found,) = torch.autograd.grad(StochasticHard().entropy(scores, mask).sum(), scores)
    assert found.isfinite().all()
    assert not found.masked_select(~mask).any()


@pytest.mark.parametrize("context", CONTEXT_MECHANISMS)
def test_the_objective_increases_the_entropy_of_every_step(context, monkeypatch):
    """With fixed samples, the reported entropy is that of the scores, and it changes the directional derivative of the
    objective by its finite difference."""
    model, seen = build(CONTEXT_MECHANISMS[context]).double(), []

    def draw(logs: torch.Tensor) -> torch.Tensor:
        seen.append(-(logs.exp() * logs).sum(-1).flatten())
        return paths.draw(logs)

    def entropy() -> torch.Tensor:
        return model(BATCH, with_attention=True).attention.entropy

    monkeypatch.setattr(StochasticHard, "draw", staticmethod(draw))
    path, totals = (2, 0, 1), []
    paths = Forced(path)
    assert_close(entropy().flatten(), torch.cat(seen))
    for weight in (0.0, 0.7):
        paths = Forced(path)
        loss = Reinforce(entropy=weight)(model, BATCH)
        totals.append(gradient(loss.total, model))
    torch.manual_seed(1)
    direction, small, ends = [torch.randn_like(one) for one in model.parameters()], 1e-5, []
    for sign in (1, -2):
        paths = Forced(path)
        with torch.no_grad():
            for one, along in zip(model.parameters(), direction, strict=True):
                one.add_(along, alpha=sign * small)
            ends.append(entropy().sum())
    slope = float(ends[0] - ends[1]) / (2 * small)
    flat = torch.cat([along.flatten() for along in direction])
    assert abs(slope) > 1e-3
    assert float((totals[1] - totals[0]) @ flat) == pytest.approx(-0.7 * slope, rel=1e-3)


def test_padding_has_no_entropy():
    """The entropy of a batch is the sum of the entropies of its rows, also beside a longer row."""
    model = build(UNFED).eval()
    rows = [([5, 6, EOS], [BOS, 6, 5, EOS]), ([4, 5, 6, 7, EOS], [BOS, 7, 6, 5, 4, EOS])]
    batches = [
        Batch(Padded.from_rows([s for s, _ in part]), Padded.from_rows([t for _, t in part]))
        for part in (rows, rows[:1], rows[1:])
    ]
    both, one, other = (float(Reinforce()(model, batch).parts["entropy"]) for batch in batches)
    assert both == pytest.approx(one + other, rel=1e-5)
    assert one > 0.1


REFUSED = [
    ({"context": FED}, {"kind": "cross_entropy"}, {}, "kind: reinforce"),
    ({"context": "luong"}, {"kind": "reinforce"}, {}, "has none"),
    (
        {"kind": "transformer", "normaliser": "sampled"},
        {"kind": "reinforce"},
        {},
        "context of a recurrent decoder",
    ),
    ({"context": FED}, {"kind": "reinforce"}, {"copy": {}}, "another normaliser"),
    ({"context": FED}, {"kind": "attention_penalty"}, {}, "kind: reinforce"),
]


@pytest.mark.parametrize(("decoder", "objective", "more", "words"), REFUSED)
def test_unsuitable_recipes_are_refused(decoder, objective, more, words):
    model = {"encoder": {"kind": "recurrent"}, "decoder": {"kind": "recurrent", **decoder}, **more}
    with pytest.raises(InputError) as message:
        complete_recipe(parse({"tokens": {"shared": True}, "model": model, "training": {"objective": objective}}))
    assert words in str(message.value)


def pairs(count: int, draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(4, SIZE) for _ in range(draw.randint(2, 4))] for _ in range(count)]


def reversed_batch(rows: list[list[int]]) -> Batch:
    return Batch(
        Padded.from_rows([[*row, EOS] for row in rows]), Padded.from_rows([[BOS, *row[::-1], EOS] for row in rows])
    )


def learn(weight: float, entropy: float, steps: int) -> float:
    """The share of 300 short sequences that are reversed correctly (%).

    A row of the memory depends on its own token and position only, and there is no summary, so a token can be
    generated only by attending to it.
    """
    torch.manual_seed(1)
    draw = random.Random(1)
    part = {"kind": "recurrent", "width": 32, "dropout": 0.0}
    blind = {"kind": "convolutional", "width": 32, "layers": 1, "kernel": 1, "dropout": 0.0}
    model_recipe = {"encoder": blind, "decoder": {**part, "context": {**FED, "score": "mlp"}}}
    recipe = parse({"model": model_recipe, "training": {"objective": {"kind": "reinforce"}}})
    model = build_model(complete_recipe(recipe).model, SIZE, SIZE)
    model.encoder.register_forward_hook(lambda *a: replace(a[-1], summary=torch.zeros_like(a[-1].summary)))
    objective = Reinforce(weight=weight, entropy=entropy)
    model.auxiliary = objective.auxiliary_module(32)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = reversed_batch(pairs(64, draw))
        loss = objective(model, batch)
        optimiser.zero_grad()
        (loss.total / objective.count(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    test = reversed_batch(pairs(300, draw))
    found = search(model.eval(), test, Greedy(), max_lengths=torch.full((300,), 6))
    gold = zip(test.labels.values, test.labels.mask, strict=True)
    right = [list(one[0].ids) == row[mask].tolist() for one, (row, mask) in zip(found, gold, strict=True)]
    return 100 * sum(right) / len(right)


@pytest.mark.slow
def test_sampled_attention_learns_with_reward_only():
    assert learn(weight=1.0, entropy=0.3, steps=200) >= 70
    assert learn(weight=0.0, entropy=0.3, steps=80) <= 35  # without reward the draws learn nothing


def a_recipe(folder, steps: int) -> dict:
    draw = random.Random(1)
    rows = [[draw.choice("abcdef") for _ in range(draw.randint(2, 4))] for _ in range(80)]
    path = folder / "train.tsv"
    path.write_text("".join(f"{' '.join(row)}\t{' '.join(row[::-1])}\n" for row in rows))
    part = {"kind": "recurrent", "width": 8, "dropout": 0.1}
    return {
        "data": {"train": str(path), "dev_size": 10, "cache": str(folder / "cache")},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {"encoder": part, "decoder": {**part, "context": {**FED, "score": "mlp"}}},
        "training": {
            "steps": steps,
            "batch_tokens": 128,
            "objective": {"kind": "reinforce"},
            "schedule": {"kind": "constant", "warmup": 0},
            "validate_every": steps,
            "checkpoint_every": 4,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }


@pytest.mark.slow
def test_a_resumed_reinforce_run_equals_an_uninterrupted_one(tmp_path):
    recipe = a_recipe(tmp_path, 8)
    straight = train(recipe, tmp_path / "straight")
    short = {**recipe, "training": {**recipe["training"], "steps": 4}}
    train(short, tmp_path / "stopped")
    train(recipe, tmp_path / "stopped", resume=True)
    one, other = (train_weights(tmp_path / name) for name in ("straight", "stopped"))
    assert {"auxiliary.weight", "auxiliary.bias"} <= one.keys()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not hasattr(straight.model.network, "auxiliary")
    (prediction,) = straight.model.generate(["a b c"])
    assert set(prediction.attention.flatten().tolist()) == {0.0, 1.0}
    (loaded,) = load(tmp_path / "straight").generate(["a b c"])
    assert loaded.text == prediction.text
    assert loaded.token_scores == pytest.approx(prediction.token_scores, abs=1e-5)


def train_weights(folder) -> dict[str, torch.Tensor]:
    return Run(folder).checkpoints.load(8, ("weights",)).weights
