"""Attention penalties against plain loops; refused models."""

from __future__ import annotations

import pytest
import torch

from transduce.errors import InputError
from transduce.flow import BOS, EOS, Attention, Batch, Padded, State, Step
from transduce.objectives import AttentionPenalty, CrossEntropy
from transduce.objectives.attention_losses import coverage
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

SIZE = 9
RECURRENT = {"kind": "recurrent", "width": 8, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": 8, "layers": 2, "heads": 2, "ff_width": 12, "dropout": 0.0}


def a_batch() -> Batch:
    sources = [[5, 6, 7, EOS], [8, EOS], [4, 4, EOS]]
    targets = [[BOS, 5, EOS], [BOS, 8, 7, 6, EOS], [BOS, EOS]]
    return Batch(Padded.from_rows(sources), Padded.from_rows(targets), rows=(0, 1, 2))


def build(decoder, **objective):
    recipe = {"model": {"encoder": RECURRENT, "decoder": decoder}, "training": {"objective": objective}}
    torch.manual_seed(1)
    return build_model(complete_recipe(parse(recipe)).model, SIZE, SIZE)


def direct(kind: str, weights: torch.Tensor, batch: Batch) -> float:
    """weights B T S, cell by cell."""
    total = 0.0
    for row in range(batch.size):
        steps, places = int(batch.labels.mask[row].sum()), int(batch.source.mask[row].sum())
        for place in range(places):
            looks = [float(weights[row, step, place]) for step in range(steps)]
            if kind == "doubly_stochastic":
                total += (1 - sum(looks)) ** 2
            else:
                total += sum(min(look, sum(looks[:step])) for step, look in enumerate(looks))
    return total


@torch.no_grad()
@pytest.mark.parametrize("kind", ["doubly_stochastic", "coverage"])
@pytest.mark.parametrize(
    ("decoder", "options"), [(RECURRENT, {}), (TRANSFORMER, {}), (TRANSFORMER, {"layer": 0, "head": 1})]
)
def test_attention_penalty_equals_its_formula(kind, decoder, options):
    model, batch = build(decoder), a_batch()
    found = AttentionPenalty(penalty=kind, weight=0.7, label_smoothing=0.1, **options)(model, batch)
    cross = model(batch, with_attention=True).attention.cross[:, options.get("layer", -1)]
    wanted = direct(kind, cross.mean(1) if "head" not in options else cross[:, options["head"]], batch)
    plain = CrossEntropy(label_smoothing=0.1)(model, batch)
    assert float(found.parts["penalty"]) == pytest.approx(wanted, rel=1e-5)
    assert float(found.total) == pytest.approx(float(plain.total) + 0.7 * wanted, rel=1e-5)
    assert AttentionPenalty(penalty=kind).count(batch) == CrossEntropy().count(batch)


@pytest.mark.parametrize("kind", ["doubly_stochastic", "coverage"])
def test_attention_penalty_is_a_sum_over_rows(kind):
    model, batch, objective = build(TRANSFORMER), a_batch(), AttentionPenalty(penalty=kind)
    objective(model, batch).total.backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    slices = [batch.select(torch.tensor(rows)) for rows in ([0], [1, 2])]
    assert sum(objective.count(part) for part in slices) == objective.count(batch)
    for part in slices:
        objective(model, part).total.backward()
    for one, parameter in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, one, rtol=1e-4, atol=1e-5)


def test_attention_penalty_of_best_and_worst_attention():
    """The penalty is 0 where every row is attended to once, and largest where one row is attended to at every step."""
    once, again = torch.eye(3)[None], torch.eye(3)[:1].expand(1, 3, 3)
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert float(coverage(once, mask)) == 0
    assert float(coverage(again, mask)) == 2
    batch = Batch(Padded(torch.tensor([[5, 6, EOS]]), mask), Padded.from_rows([[BOS, 5, 6, EOS]]))

    def model(batch: Batch, with_attention: bool = False) -> Step:
        return Step(torch.zeros(1, 3, SIZE), State({}, {}), Attention(cross=once[:, None, None]))

    assert float(AttentionPenalty()(model, batch).parts["penalty"]) == 0


@pytest.mark.parametrize(
    ("decoder", "options", "words"),
    [
        ({**RECURRENT, "context": "initial"}, {}, "attends to the source"),
        (TRANSFORMER, {"layer": 5}, "2 layers of 2 heads"),
        (TRANSFORMER, {"head": -3}, "2 layers of 2 heads"),
    ],
)
@pytest.mark.parametrize("kind", ["attention_penalty", "guided_alignment"])
def test_unsuitable_models_are_refused_by_the_recipe(kind, decoder, options, words):
    with pytest.raises(InputError, match=words) as refused:
        build(decoder, kind=kind, **options)
    assert "training.objective" in str(refused.value)


def test_a_model_without_attention_is_refused_at_the_first_batch():
    def model(batch: Batch, with_attention: bool = False) -> Step:
        return Step(torch.zeros(3, 4, SIZE), State({}, {}), Attention())

    with pytest.raises(InputError, match="attends to the source"):
        AttentionPenalty()(model, a_batch())
