"""Objectives against torch and their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch import Tensor, nn
from training_fixtures import WORDS, TinyBatches, TinyModel

from transduce.contracts import Forward
from transduce.data.batching import DataPosition
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Padded, State, Step
from transduce.objectives import (
    OBJECTIVES,
    CrossEntropy,
    Distillation,
    GuidedAlignment,
    Objective,
    RDrop,
    ScheduledSampling,
)
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

RECURRENT = {"kind": "recurrent", "width": 12, "dropout": 0.0}
TRANSFORMER = {"kind": "transformer", "width": 12, "layers": 2, "heads": 3, "ff_width": 16, "dropout": 0.0}
PARTS = {"recurrent": RECURRENT, "transformer": TRANSFORMER}


def saying(*answers: Tensor) -> Forward:
    """A model that returns these logits, one tensor per call and then the last one, for any input."""
    left = list(answers)
    return lambda batch: Step(left.pop(0) if len(left) > 1 else left[0], State({}, {}))


def built(kind: str, *sides: str, **more: Any) -> nn.Module:
    torch.manual_seed(3)
    parts = dict.fromkeys(sides or ("encoder", "decoder"), PARTS[kind])
    objective = {"kind": "joint_ctc" if "ctc" in more else "ctc" if "head" in more else "cross_entropy"}
    settings = {"tokens": {"shared": True}, "model": {**parts, **more}, "training": {"objective": objective}}
    recipe = complete_recipe(parse(settings))
    return build_model(recipe.model, WORDS, WORDS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Batch, Tensor]:
    rows = draw(st.lists(st.lists(st.integers(3, 8), min_size=2, max_size=6), min_size=1, max_size=4))
    target = Padded.from_rows(rows)
    torch.manual_seed(draw(st.integers(0, 1000)))
    return Batch(target=target), 3 * torch.randn(len(rows), target.values.size(1) - 1, 9)


@trials(deadline=None)
@given(cases(), st.sampled_from([0.0, 0.1, 0.5]))
def test_cross_entropy_equals_that_of_torch_and_its_formula(case: tuple[Batch, Tensor], smoothing: float) -> None:
    batch, logits = case
    logits.requires_grad_()
    objective = CrossEntropy(label_smoothing=smoothing)
    loss = objective(saying(logits), batch)
    (own,) = torch.autograd.grad(loss.total, logits)
    gold = batch.labels.values.masked_fill(~batch.labels.mask, -1)
    expected = F.cross_entropy(
        logits.flatten(0, 1), gold.flatten(), ignore_index=-1, label_smoothing=smoothing, reduction="sum"
    )
    (reference,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(own, reference)
    direct = 0.0
    for row, column in batch.labels.mask.nonzero().tolist():
        scores = logits[row, column].detach().double().log_softmax(-1)
        direct += float((1 - smoothing) * -scores[gold[row, column]] + smoothing * -scores.mean())
    # Single precision: the error is as large as the rounding of the largest logit, however small the loss.
    assert loss.total.item() == pytest.approx(direct, rel=1e-5, abs=1e-5)
    assert objective.count(batch) == sum(int(part) for part in batch.labels.mask.sum(1))
    plain = CrossEntropy(label_smoothing=0.0)(saying(logits), batch)
    torch.testing.assert_close(loss.parts["nll"], plain.total)


# Options under which nothing is left to chance but what is drawn from a generator seeded alike.
STEADY: dict[str, dict[str, Any]] = {"scheduled_sampling": {"rate": 1.0}, "minimum_risk": {"samples": 3}}


# What else a model needs to be trained so.
SPELT: dict[str, dict[str, Any]] = {
    "ctc": {"head": {"kind": "ctc", "dropout": 0.0}},
    "joint_ctc": {"ctc": {}},
    "imitation": {"decoder": {"kind": "edit_transducer", "cell": "gru", "width": 16, "dropout": 0.0}},
}


# Those over tokens; where rows are compared with each other, the sum depends on who is there. So do the negatives of
# skip_gram, which has a test of its own (test_skip_gram.py).
@pytest.mark.parametrize(
    "name", sorted(name for name, one in OBJECTIVES.items() if not one.uses_embeddings and name != "skip_gram")
)
def test_every_objective_is_a_sum_over_rows(name: str) -> None:
    """So micro-batches and processes add up to the loss of the whole batch."""
    parts = [built("recurrent")] if name == "distillation" else []
    objective: Objective = OBJECTIVES[name](*parts, **STEADY.get(name, {}))  # type: ignore[call-arg]
    sides = {"prefix_lm": ["decoder"], "ctc": ["encoder"]}.get(name, [])
    model = built("transformer", *sides, **SPELT.get(name, {}))
    batch = linked(7)

    def seeded(part: Batch) -> Any:
        torch.manual_seed(5)
        return objective(model, part)

    whole = seeded(batch)
    slices = [batch.select(rows) for rows in torch.arange(7).split([3, 4])]
    low, high = map(seeded, slices)
    torch.testing.assert_close(low.total + high.total, whole.total)
    assert sum(map(objective.count, slices)) == objective.count(batch)
    assert set(whole.parts) == set(objective.parts)
    for part in objective.parts:
        torch.testing.assert_close(low.parts[part] + high.parts[part], whole.parts[part])
        assert not whole.parts[part].requires_grad
    assert whole.total.requires_grad


def test_bf16_logits_are_summed_in_single_precision() -> None:
    batch = TinyBatches(4).at(DataPosition())
    model = TinyModel()
    logits = model(batch).logits
    exact, half = (CrossEntropy()(saying(x), batch).total for x in (logits.bfloat16().float(), logits.bfloat16()))
    assert exact.dtype == half.dtype == torch.float32
    torch.testing.assert_close(half, exact)


@trials(deadline=None, max_examples=30)
@given(cases(), st.floats(0, 9), st.integers(0, 99))
def test_r_drop_equals_its_formula(case: tuple[Batch, Tensor], weight: float, seed: int) -> None:
    batch, first = case
    torch.manual_seed(seed)
    second = first + torch.randn_like(first)
    loss = RDrop(weight=weight, label_smoothing=0.0)(saying(first, second), batch)
    nll = apart = 0.0
    for row, column in batch.labels.mask.nonzero().tolist():
        p, q = (x[row, column].double().softmax(-1) for x in (first, second))
        truth = int(batch.labels.values[row, column])
        nll -= float(p[truth].log() + q[truth].log()) / 2
        apart += float((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2
    assert loss.parts["nll"].item() == pytest.approx(nll, rel=1e-4, abs=1e-4)
    assert loss.parts["divergence"].item() == pytest.approx(apart, rel=1e-4, abs=1e-4)
    assert loss.total.item() == pytest.approx(nll + weight * apart / 2, rel=1e-4, abs=1e-4)


def test_r_drop_needs_dropout() -> None:
    batch = TinyBatches(4).at(DataPosition())
    plain, dropped = TinyModel(), TinyModel(dropout=0.4)
    assert RDrop()(plain, batch).parts["divergence"].item() == pytest.approx(0, abs=1e-5)
    assert RDrop()(dropped, batch).parts["divergence"] > 0.01
    torch.testing.assert_close(RDrop()(plain, batch).total, CrossEntropy()(plain, batch).total)


class InputRecorder(nn.Module):
    """Calls a model and records its inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.given: list[Batch] = []
        self.learned: list[bool] = []

    def forward(self, batch: Batch) -> Step:
        self.given.append(batch)
        self.learned.append(torch.is_grad_enabled())
        step: Step = self.model(batch)
        return step


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_scheduled_sampling_feeds_back_predictions(kind: str) -> None:
    model, batch = InputRecorder(built(kind)), TinyBatches(5).at(DataPosition())
    loss = ScheduledSampling(rate=1.0, label_smoothing=0.0)(model, batch)
    first, second = model.given
    assert model.learned == [False, True]
    logits = model.model(batch).logits.detach()
    logits[..., [PAD, BOS, EOS]] = -torch.inf
    predicted = logits.argmax(-1)
    read = second.decoder_inputs.values
    assert (read[:, 0] == BOS).all()
    inside = batch.labels.mask[:, 1:]
    assert torch.equal(read[:, 1:][inside], predicted[:, :-1][inside])
    assert torch.equal(second.labels.mask, batch.labels.mask)
    assert first is batch
    # The gold is what it was: the loss is that of the original target after the mixed inputs.
    scores = model.model(second).logits.log_softmax(-1)
    direct = -scores.gather(-1, batch.labels.values[..., None]).squeeze(-1)[batch.labels.mask].sum()
    torch.testing.assert_close(loss.total, direct)


def test_scheduled_sampling_replaces_tokens_at_its_rate() -> None:
    batch = TinyBatches(200).at(DataPosition())
    assert batch.target is not None
    for rate in (0.0, 0.3, 1.0):
        model = InputRecorder(TinyModel())
        torch.manual_seed(1)
        ScheduledSampling(rate=rate, choice="sample")(model, batch)
        changed = (model.given[1].labels.values != batch.labels.values)[batch.labels.mask].float().mean()
        assert changed <= rate
        assert changed >= 0.8 * rate  # a few own predictions are the gold itself
        outside = ~batch.target.mask
        assert torch.equal(model.given[1].labels.values[outside[:, 1:]], batch.labels.values[outside[:, 1:]])
    plain, none = CrossEntropy()(TinyModel(), batch), ScheduledSampling(rate=0.0)(TinyModel(), batch)
    torch.testing.assert_close(plain.total, none.total)


@pytest.mark.parametrize("name", ["scheduled_sampling", "minimum_risk", "imitation"])
def test_a_pass_without_gradients_does_not_affect_the_next_one(name: str) -> None:
    """Autocast caches the weights it has cast; those of a first pass without gradient must not be reused."""
    model, batch = built("transformer", **SPELT.get(name, {})), TinyBatches(4).at(DataPosition())
    with torch.autocast("cpu", torch.bfloat16):
        OBJECTIVES[name]()(model, batch).total.backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None]
    assert not dead


@trials(deadline=None, max_examples=30)
@given(cases(), st.floats(0.5, 4), st.floats(0, 1), st.integers(0, 99))
def test_distillation_equals_its_formula(
    case: tuple[Batch, Tensor], temperature: float, weight: float, seed: int
) -> None:
    batch, logits = case
    torch.manual_seed(seed)
    taught = torch.randn_like(logits)
    objective = Distillation(saying(taught), temperature=temperature, weight=weight)
    loss = objective(saying(logits), batch)
    total = 0.0
    for row, column in batch.labels.mask.nonzero().tolist():
        q, p = ((x[row, column].double() / temperature).softmax(-1) for x in (taught, logits))
        nll = -logits[row, column].double().log_softmax(-1)[int(batch.labels.values[row, column])]
        total += float((1 - weight) * nll + weight * temperature**2 * (q * (q / p).log()).sum())
    assert loss.total.item() == pytest.approx(total, rel=1e-4, abs=1e-4)


def test_the_teacher_gets_no_gradient() -> None:
    teacher, student = TinyModel(seed=1), TinyModel(seed=2)
    batch = TinyBatches(4).at(DataPosition())
    Distillation(teacher, weight=1.0)(student, batch).total.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert student.mix.weight.grad is not None
    same = Distillation(student, weight=1.0)(student, batch)
    assert same.total.item() == pytest.approx(0, abs=1e-4)


def linked(rows: int) -> Batch:
    """The tiny task with its links: target word t is source word n - 1 - t, and the first word has two links."""
    batch = TinyBatches(rows).at(DataPosition())
    assert batch.source is not None
    links = []
    for length in batch.source.mask.sum(1).tolist():
        links.append([(length - 2 - t, t) for t in range(length - 1)] + [(length - 1, 0)])
    most = max(map(len, links))
    values = torch.tensor([row + [(0, 0)] * (most - len(row)) for row in links])
    mask = torch.arange(most) < torch.tensor([len(row) for row in links])[:, None]
    return Batch(batch.source, batch.target, {"alignment": Padded(values, mask)}, batch.rows)


@pytest.mark.parametrize("kind", sorted(PARTS))
@pytest.mark.parametrize("head", [None, 0])
def test_guided_alignment_equals_its_formula(kind: str, head: int | None) -> None:
    model, batch = built(kind), linked(5)
    objective = GuidedAlignment(weight=2.0, head=head)
    loss = objective(model, batch)
    cross = model(batch, with_attention=True).attention.cross[:, -1].detach().double()
    cross = cross.mean(1) if head is None else cross[:, head]
    direct = 0.0
    for row, (values, mask) in enumerate(
        zip(batch.extra["alignment"].values, batch.extra["alignment"].mask, strict=True)
    ):
        for source, target in values[mask].tolist():
            direct -= float(cross[row, target, source].log()) / (2 if target == 0 else 1)
    assert loss.parts["alignment"].item() == pytest.approx(direct, rel=1e-4)
    plain = CrossEntropy()(model, batch)
    assert loss.total.item() == pytest.approx(plain.total.item() + 2 * direct, rel=1e-4)
    halves = [objective(model, batch.select(rows)) for rows in torch.arange(5).split([2, 3])]
    torch.testing.assert_close(halves[0].total + halves[1].total, loss.total)


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_attention_learns_from_alignment_links_alone(kind: str) -> None:
    model, batch = built(kind), linked(12)
    objective = GuidedAlignment(weight=100.0)
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        loss = objective(model, batch)
        loss.total.backward()
        optimiser.step()
        losses.append(loss.parts["alignment"].item())
    assert losses[-1] < 0.5 * losses[0]


def test_guided_alignment_reports_missing_alignments() -> None:
    with pytest.raises(InputError, match="links"):
        GuidedAlignment()(built("transformer"), TinyBatches(2).at(DataPosition()))
