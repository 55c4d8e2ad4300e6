"""Minimum risk training: candidates, costs and expected risk against direct computations."""

from __future__ import annotations

import math

import jiwer
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from training_fixtures import WORDS, TinyBatches

from transduce.data.batching import DataPosition
from transduce.flow import BOS, EOS, Batch
from transduce.model import Transducer
from transduce.objectives import MinimumRisk
from transduce.objectives.sequence_level import COSTS, edit_cost, f1_cost
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

IDS = st.lists(st.integers(4, 7), max_size=6)
PARTS = {
    "recurrent": {"kind": "recurrent", "width": 12, "dropout": 0.0},
    "transformer": {"kind": "transformer", "width": 12, "layers": 1, "heads": 2, "ff_width": 16, "dropout": 0.0},
}


def built(kind: str) -> Transducer:
    torch.manual_seed(3)
    recipe = complete_recipe(parse({"model": {"encoder": PARTS[kind], "decoder": PARTS[kind]}}))
    model = build_model(recipe.model, WORDS, WORDS)
    assert isinstance(model, Transducer)
    return model


@given(IDS, IDS.filter(bool))
def test_edit_cost_equals_that_of_jiwer(hypothesis: list[int], reference: list[int]) -> None:
    found = jiwer.process_words(" ".join(map(str, reference)), " ".join(map(str, hypothesis)))
    edits = found.substitutions + found.deletions + found.insertions
    assert edit_cost(hypothesis, reference) * (len(reference) + 1) == pytest.approx(edits)


@given(IDS, IDS)
def test_f1_cost_is_the_harmonic_mean(hypothesis: list[int], reference: list[int]) -> None:
    rest, shared = list(reference), 0
    for token in hypothesis:
        if token in rest:
            rest.remove(token)
            shared += 1
    if shared:
        precision, recall = shared / len(hypothesis), shared / len(reference)
        assert f1_cost(hypothesis, reference) == pytest.approx(1 - 2 * precision * recall / (precision + recall))
    else:
        assert f1_cost(hypothesis, reference) == (1.0 if hypothesis or reference else 0.0)
    assert f1_cost(reference, reference) == edit_cost(reference, reference) == 0


@trials(deadline=None, max_examples=12)
@given(
    st.sampled_from(sorted(PARTS)),
    st.sampled_from(sorted(COSTS)),
    st.sampled_from([0.005, 0.5, 1.0]),
    st.sampled_from([0.3, 1.0]),
)
def test_minimum_risk_equals_its_formula(kind: str, cost: str, sharpness: float, weight: float) -> None:
    model, batch = built(kind), TinyBatches(3).at(DataPosition())
    objective = MinimumRisk(samples=4, sharpness=sharpness, cost=cost, weight=weight)  # type: ignore[arg-type]
    torch.manual_seed(7)
    candidates = objective._candidates(model, batch)
    torch.manual_seed(7)
    loss = objective(model, batch)
    risk = nll = 0.0
    for row in range(batch.size):
        ids = [
            one for one, source in zip(candidates.ids, candidates.source_index.tolist(), strict=True) if source == row
        ]
        gold = ids[0]
        assert len(set(ids)) == len(ids) > 1
        assert list(gold) == batch.labels.values[row][batch.labels.mask[row]].tolist()
        alone = batch.select(torch.tensor([row]))
        logs = [one_by_one(model, alone, one) for one in ids]
        powers = [math.exp(sharpness * log) for log in logs]
        words = [one[:-1] if one[-1] == EOS else one for one in ids]
        costs = [COSTS[cost](one, words[0]) for one in words]
        risk += len(gold) * sum(p * c for p, c in zip(powers, costs, strict=True)) / sum(powers)
        nll -= logs[0]
    assert loss.parts["risk"].item() == pytest.approx(risk, rel=1e-4)
    assert loss.parts["nll"].item() == pytest.approx(nll, rel=1e-4)
    assert loss.total.item() == pytest.approx((1 - weight) * nll + weight * risk, rel=1e-4)


def one_by_one(model: Transducer, batch: Batch, ids: tuple[int, ...]) -> float:
    """log p of these ids, a token at a time."""
    state, total, token = model.start(batch), 0.0, BOS
    for wanted in ids:
        step = model.advance(torch.tensor([[token]]), state)
        total += float(step.logits[0, 0].detach().log_softmax(-1)[wanted])
        state, token = step.state, wanted
    return total


def test_samples_do_not_depend_on_other_rows() -> None:
    model, batch, objective = built("recurrent"), TinyBatches(6).at(DataPosition()), MinimumRisk(samples=5)
    torch.manual_seed(1)
    together = objective._candidates(model, batch)
    torch.manual_seed(1)
    alone = objective._candidates(model, batch.select(torch.tensor([4])))
    pairs = zip(together.ids, together.source_index.tolist(), strict=True)
    assert alone.ids == [ids for ids, source in pairs if source == 4]


def test_training_reduces_the_risk() -> None:
    model, batch = built("transformer"), TinyBatches(4).at(DataPosition())
    objective = MinimumRisk(samples=8, sharpness=0.5)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    risks = []
    for step in range(30):
        torch.manual_seed(step)
        optimiser.zero_grad()
        loss = objective(model, batch)
        (loss.total / objective.count(batch)).backward()
        optimiser.step()
        risks.append(loss.parts["risk"].item())
    assert sum(risks[-5:]) < 0.7 * sum(risks[:5])
