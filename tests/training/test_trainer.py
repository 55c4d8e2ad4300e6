"""Training loop: non-finite updates, resumption, early stopping, averaging, logging."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_fixtures import (
    FULL_SETTINGS,
    RecordingReport,
    TinyBatches,
    TinyModel,
    assert_same_checkpoints,
    latest_tensors,
    run_training,
)

from transduce.data.batching import DataPosition
from transduce.errors import InputError
from transduce.flow import Batch, Step
from transduce.objectives import CrossEntropy
from transduce.training.checkpoint import CheckpointManager, average_checkpoints
from transduce.training.trainer import Outcome
from transduce.training.update import Update


class Poison(nn.Module):
    """The identity, except in the training calls from `since` to `until`: there it multiplies by `value`."""

    def __init__(self, value: float, since: int, until: int = 10**9) -> None:
        super().__init__()
        self.value, self.since, self.until, self.calls = value, since, until, 0

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return values * self.value if self.training and self.since <= self.calls < self.until else values


class PoisonedModel(TinyModel):
    def __init__(self, poison: Poison) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(12), poison)  # type: ignore[assignment]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_update_is_skipped_counted_and_traced_to_its_module(value: float, tmp_path: Path) -> None:
    report = RecordingReport()
    # Called once for each update, and once more to trace the non-finite numbers.
    model = PoisonedModel(Poison(value, since=3, until=7))
    outcome = run_training(tmp_path, model=model, report=report, steps=8)
    assert outcome.reason == "steps"
    skipped = [(step, text) for kind, step, text in report.events if kind == "skipped"]
    assert [step for step, _ in skipped] == [3, 4]
    assert all("norm.1" in text for _, text in skipped)
    assert [entry.step for entry in report.entries if entry.loss is None] == [3, 4]
    checkpoint = CheckpointManager(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.state["progress"]["skipped_updates"] == 2
    assert checkpoint.state["progress"]["consecutive_nonfinite"] == 0
    assert all(tensor.isfinite().all() for tensor in checkpoint.weights.values())


def test_nonfinite_updates_in_a_row_return_to_the_checkpoint_before_them_with_half_the_learning_rate(
    tmp_path: Path,
) -> None:
    """Then the run is that of half the learning rate from this checkpoint on, to the bit."""
    report, made = RecordingReport(), {"max_nonfinite": 3, "validate_every": 100, "checkpoint_every": 4}
    # Updates 6 to 8 are not finite, with the two calls of each; the checkpoint of update 8 is not written.
    model = PoisonedModel(Poison(float("nan"), since=6, until=12))
    assert run_training(tmp_path / "returned", model=model, report=report, **made).reason == "steps"
    ((step, text),) = [(step, text) for kind, step, text in report.events if kind == "rolled back"]
    assert step == 4
    assert "3 updates in a row were not finite, first in norm.1 (update 8): continued after update 4" in text
    assert "0.5 of the learning rate" in text
    assert [entry.step for entry in report.entries] == [*range(1, 9), *range(5, 13)]
    rates = {entry.step: entry.learning_rate for entry in report.entries[-8:]}
    run_training(tmp_path / "halved", model=PoisonedModel(Poison(1.0, 0)), steps=4, **(made | {"max_nonfinite": 5}))
    other = RecordingReport()
    halved = {"optimiser": {"learning_rate": 0.005}}
    run_training(tmp_path / "halved", model=PoisonedModel(Poison(1.0, 0)), report=other, **made, **halved)
    assert {entry.step: entry.learning_rate for entry in other.entries} == pytest.approx(rates)
    assert_same_checkpoints(tmp_path / "returned", tmp_path / "halved")
    checkpoint = CheckpointManager(tmp_path / "returned").latest()
    assert checkpoint is not None
    progress = checkpoint.state["progress"]
    assert (progress["skipped_updates"], progress["rollbacks"], progress["rate_factor"]) == (3, 1, 0.5)


def test_nonfinite_updates_before_the_first_checkpoint_lower_the_learning_rate(tmp_path: Path) -> None:
    report = RecordingReport()
    model = PoisonedModel(Poison(float("nan"), since=2, until=6))
    outcome = run_training(tmp_path, model=model, report=report, max_nonfinite=2, steps=8, checkpoint_every=100,
                           validate_every=100)  # fmt: skip
    assert outcome.reason == "steps"
    assert [kind for kind, _, _ in report.events if kind == "rolled back"] == ["rolled back"]
    assert [entry.step for entry in report.entries] == list(range(1, 9))
    assert report.entries[-1].learning_rate == pytest.approx(0.005 * (4 / 8) ** 0.5)


def test_too_many_returns_to_a_checkpoint_end_training_with_the_origin(tmp_path: Path) -> None:
    report, model = RecordingReport(), PoisonedModel(Poison(float("nan"), since=6))
    problem = r"3 updates in a row were not finite, first in norm\.1; after 2 returns to a checkpoint"
    with pytest.raises(InputError, match=problem) as raised:
        run_training(tmp_path, model=model, report=report, max_nonfinite=3)
    assert "learning_rate" in raised.value.remedy
    assert [step for kind, step, _ in report.events if kind == "rolled back"] == [5, 5]
    assert CheckpointManager(tmp_path).steps() == [4, 5]  # good weights, from before
    with pytest.raises(InputError, match=r"3 updates in a row were not finite, first in norm\.1\n"):
        run_training(tmp_path / "other", model=PoisonedModel(Poison(float("nan"), since=6)), max_nonfinite=3,
                     max_rollbacks=0)  # fmt: skip


def test_a_nonfinite_gradient_of_finite_outputs_is_traced_to_its_parameter(tmp_path: Path) -> None:
    class Spoil(TinyModel):
        def forward(self, batch: Batch) -> Step:
            step = super().forward(batch)
            if self.training and torch.is_grad_enabled():
                step.logits.register_hook(lambda gradient: gradient * float("inf"))
            return step

    with pytest.raises(InputError, match=r"first in the gradient of embedding\.weight"):
        run_training(tmp_path, model=Spoil(), max_nonfinite=1, max_rollbacks=0)


PLATEAU = {"schedule": {"kind": "plateau", "warmup": 2, "patience": 0}}


STABLE = {"schedule": {"kind": "warmup_stable_decay", "warmup": 2, "decay": 0.4}, "patience": 1, "min_epochs": 1}


@pytest.fixture(scope="module", params=[("adamw", PLATEAU), ("sgd", PLATEAU), ("adamw", STABLE)])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with dropout, momentum, EMA, accumulation and a schedule that depends on validations."""
    folder, report = tmp_path_factory.mktemp("uninterrupted"), RecordingReport()
    optimiser, schedule = request.param
    changes = FULL_SETTINGS | schedule | {"optimiser": {"kind": optimiser}}
    if schedule is STABLE:  # the first score is the best: patience runs out at update 12, after an epoch
        changes |= {"validate": lambda model: {"loss": float(model.embedding.weight.std() > 0)}, "steps": 40}
    run_training(folder, report=report, **changes)
    return {"folder": folder, "report": report, "changes": changes}


@pytest.mark.parametrize("stop", [1, 3, 4, 11, 12, 15])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(
    stop: int, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    class SendingReport(RecordingReport):
        def advance(self, step: int) -> None:
            if step == stop - 1:  # recorded while the next update is computed
                os.kill(os.getpid(), signal.SIGTERM)

    handler, changes = signal.getsignal(signal.SIGTERM), uninterrupted["changes"]
    first, second, expected = SendingReport(), RecordingReport(), uninterrupted["report"]
    if stop == 1:
        first.start = lambda *args: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[method-assign]
    outcome = run_training(tmp_path, report=first, **changes)
    assert outcome == Outcome(
        stop, outcome.best_step, outcome.best_value, "interrupted", outcome.scores, signal.SIGTERM
    )
    assert signal.getsignal(signal.SIGTERM) is handler
    outcome = run_training(tmp_path, report=second, **changes)
    assert (outcome.step, outcome.reason) == ((20, "patience") if "min_epochs" in changes else (20, "steps"))
    assert_same_checkpoints(uninterrupted["folder"], tmp_path)
    logged = {entry.step: entry.loss for entry in first.entries + second.entries}
    assert logged == {entry.step: entry.loss for entry in expected.entries}
    assert first.scores | second.scores == expected.scores
    finals = [CheckpointManager(folder).final() for folder in (uninterrupted["folder"], tmp_path)]
    assert finals[0] is not None
    assert finals[1] is not None
    assert all(torch.equal(tensor, finals[1].weights[name]) for name, tensor in finals[0].weights.items())


def test_a_damaged_checkpoint_is_skipped_on_resume(tmp_path: Path) -> None:
    run_training(tmp_path / "whole", **FULL_SETTINGS)
    run_training(tmp_path / "damaged", **FULL_SETTINGS | {"steps": 12})
    (tmp_path / "damaged" / "step-00000012" / "optimiser.safetensors").write_bytes(b"")
    report = RecordingReport()
    run_training(tmp_path / "damaged", report=report, **FULL_SETTINGS)
    assert [(kind, step) for kind, step, _ in report.events[:2]] == [("damaged", 9), ("resumed", 9)]
    assert_same_checkpoints(tmp_path / "whole", tmp_path / "damaged")
    assert (tmp_path / "damaged" / "damaged-step-00000012").is_dir()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 2}, "training.seed was 1 and is now 2"),
        ({"optimiser": {"kind": "sgd"}}, "training.optimiser.kind was adamw and is now sgd"),
        ({"model": TinyModel(width=8)}, "model was"),
        ({"batches": TinyBatches(5)}, "the first batch was"),
    ],
)
def test_resume_with_other_settings_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    run_training(tmp_path, steps=5)
    with pytest.raises(InputError, match=named):
        run_training(tmp_path, **{"steps": 10} | changes)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run_training(tmp_path, **FULL_SETTINGS)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run_training(tmp_path, **FULL_SETTINGS) == first
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_early_stopping_ends_with_the_best_weights(tmp_path: Path) -> None:
    values = iter([5.0, 3.0, 4.0, float("nan"), 9.0])
    seen: list[Tensor] = []

    def validate(model: nn.Module) -> dict[str, float]:
        seen.append(next(model.parameters()).detach().clone())
        return {"loss": next(values), "bleu": 1.0}

    model = TinyModel()
    outcome = run_training(tmp_path, model=model, validate=validate, validate_every=2, patience=3, steps=50)
    assert outcome == Outcome(10, 4, 3.0, "patience", {"loss": 3.0, "bleu": 1.0})
    assert torch.equal(next(model.parameters()), seen[1])
    best = CheckpointManager(tmp_path).best()
    assert best is not None
    assert best.step == 4
    again = run_training(tmp_path, validate=validate, validate_every=2, patience=3, steps=50)
    assert again.reason == "patience"
    assert again.step == 10


WSD = {"kind": "warmup_stable_decay", "warmup": 4, "decay": 0.25}


def train_on_curve(folder: Path, curve: Callable[[int], float], **changes: Any) -> tuple[Outcome, list[float]]:
    """A run whose n-th validation has the score curve(n), and the learning rates of its updates."""
    report, count = RecordingReport(), itertools.count(1)
    options = {"monitor": "bleu", "validate_every": 4, "checkpoint_every": 100, "schedule": WSD, "patience": 3}
    outcome = run_training(folder, report=report, validate=lambda _: {"bleu": curve(next(count))}, **options | changes)
    return outcome, [entry.learning_rate for entry in report.entries]


def test_a_rising_curve_is_not_cut(tmp_path: Path) -> None:
    """Two steps forward, one back: training goes on to the last update, and its last quarter is the decay."""
    outcome, rates = train_on_curve(tmp_path, lambda n: n + 3 * (n % 2), steps=100)
    assert (outcome.step, outcome.reason) == (100, "steps")
    assert rates[4:75] == [rates[4]] * 71
    assert rates[75:] == sorted(rates[75:], reverse=True)
    assert rates[-1] == 0


def test_a_flat_curve_begins_the_decay_and_ends(tmp_path: Path) -> None:
    outcome, rates = train_on_curve(tmp_path / "flat", lambda n: min(n, 5), steps=1000)
    # The best is the fifth validation; three more are update 32, and the decay is a quarter of all updates.
    assert (outcome.step, outcome.reason, outcome.best_step) == (43, "patience", 20)
    assert rates[31] == max(rates) > rates[32] > rates[-1] == 0
    outcome, rates = train_on_curve(tmp_path / "epochs", lambda n: min(n, 5), steps=1000, min_epochs=5)
    assert (outcome.step, rates[47]) == (64, max(rates))  # five epochs are 45 updates, and the next validation 48


@pytest.mark.parametrize("schedule", [WSD, {"kind": "cosine"}])
def test_a_perfect_score_ends_training(schedule: dict[str, Any], tmp_path: Path) -> None:
    def curve(n: int) -> float:
        return min(25.0 * n, 100.0 + 1e-9)  # scores of libraries are rounded

    outcome, _ = train_on_curve(tmp_path / "ended", curve, steps=100, schedule=schedule, perfect={"bleu": 100.0})
    assert (outcome.step, outcome.reason) == (16, "perfect")
    again, _ = train_on_curve(tmp_path / "ended", curve, steps=100, schedule=schedule, perfect={"bleu": 100.0})
    assert (again.step, again.reason) == (16, "perfect")
    for name, changes in {"no limit": {}, "no patience": {"patience": None, "perfect": {"bleu": 100.0}}}.items():
        outcome, _ = train_on_curve(tmp_path / name, curve, steps=24, schedule=schedule, **changes)
        assert (outcome.step, outcome.reason) == (24, "steps")


def test_a_real_curve_that_rises_is_not_cut_and_its_plateau_ends_training(tmp_path: Path) -> None:
    """Three training batches: the loss on them falls for long, that on others soon rises."""
    batches = TinyBatches(per_epoch=3)
    batches.after = lambda position: DataPosition(0, (position.index + 1) % 3)  # type: ignore[method-assign]

    def loss_at(position: DataPosition) -> Callable[[nn.Module], dict[str, float]]:
        return lambda model: {"loss": CrossEntropy()(model, batches.at(position)).total.item()}

    options = {"batches": batches, "steps": 240, "validate_every": 8, "checkpoint_every": 240}
    options |= {"schedule": WSD, "patience": 4, "optimiser": {"learning_rate": 0.005}}
    seen = run_training(tmp_path / "seen", validate=loss_at(DataPosition(0, 0)), **options)
    unseen = run_training(tmp_path / "unseen", validate=loss_at(DataPosition(7, 0)), **options)
    assert (seen.step, seen.reason) == (240, "steps")
    assert unseen.reason == "patience"
    assert unseen.step < 220


def test_a_monitored_metric_may_be_higher_is_better(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, 2.0])
    outcome = run_training(
        tmp_path, validate=lambda model: {"bleu": next(values)}, monitor="bleu", validate_every=4, steps=12
    )
    assert (outcome.best_step, outcome.best_value) == (8, 3.0)


def test_an_unknown_monitor_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'accuracy'"):
        run_training(tmp_path, monitor="acuracy")


class TimedBatches(TinyBatches):
    """Batches that take a second each, by a clock of their own."""

    now = 0.0

    def at(self, position: DataPosition) -> Batch:
        self.now += 1.0
        return super().at(position)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_time_budget_shapes_the_schedule(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate warms up, and has decayed when the time is over, whatever `steps` and `warmup` say."""
    report, batches = RecordingReport(), TimedBatches()
    monkeypatch.setattr("transduce.training.trainer.time", SimpleNamespace(monotonic=lambda: batches.now))
    outcome = run_training(
        tmp_path,
        report=report,
        batches=batches,
        validate=None,
        minutes=5,
        steps=100_000,
        schedule={"kind": kind, "warmup": 1000},
        validate_every=10**6,
        checkpoint_every=10**6,
    )
    rates = [entry.learning_rate for entry in report.entries]
    assert outcome.reason == "minutes"
    assert 270 < outcome.step <= 301  # of 300 seconds; batches are prefetched
    assert max(rates) > 0.9 * 0.01
    assert rates.index(max(rates)) < 0.2 * len(rates)
    assert rates[-1] < 0.01 * max(rates)


def test_a_generous_time_budget_changes_nothing(tmp_path: Path) -> None:
    rates = []
    for minutes in (None, 60.0):
        report = RecordingReport()
        run_training(tmp_path / str(minutes), report=report, minutes=minutes, steps=20, schedule={"kind": "cosine"})
        rates.append([entry.learning_rate for entry in report.entries])
    assert rates[0] == rates[1]


def test_a_time_budget_is_kept_within_a_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations take two fifths of the time here, and the last one is part of the budget."""
    batches = TimedBatches()
    monkeypatch.setattr("transduce.training.trainer.time", SimpleNamespace(monotonic=lambda: batches.now))

    def validate(model: nn.Module) -> dict[str, float]:
        batches.now += 20.0
        return {"loss": 1.0}

    options = {"steps": 10**6, "validate_every": 30, "checkpoint_every": 10**6, "schedule": WSD, "log_every": 50}
    outcome = run_training(tmp_path, batches=batches, validate=validate, minutes=5, **options)
    assert outcome.reason == "minutes"
    assert 270 < batches.now < 330


def test_training_ends_after_the_given_minutes(tmp_path: Path) -> None:
    outcome = run_training(tmp_path, minutes=0.5 / 60, steps=10**6, validate_every=10**6, checkpoint_every=10**6)
    assert outcome.reason == "minutes"
    assert outcome.best_step == outcome.step
    assert CheckpointManager(tmp_path).steps() == [outcome.step]
    assert run_training(tmp_path, minutes=0.5 / 60, steps=10**6, validate_every=10**6).step == outcome.step


def test_validation_does_not_affect_training(tmp_path: Path) -> None:
    run_training(tmp_path / "often", **FULL_SETTINGS | {"validate_every": 1})
    run_training(tmp_path / "never", **FULL_SETTINGS, validate=None)
    for kind in ("weights", "optimiser", "ema"):
        for name, tensor in latest_tensors(tmp_path / "often", kind).items():
            assert torch.equal(tensor, latest_tensors(tmp_path / "never", kind)[name])


def test_the_moving_average_is_validated_and_becomes_the_final_weights(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def validate(model: nn.Module) -> dict[str, float]:
        seen.append(next(model.parameters()).detach().clone())
        return {"loss": -float(len(seen))}

    model = TinyModel()
    run_training(tmp_path, model=model, validate=validate, ema=0.8, steps=6, validate_every=1, checkpoint_every=1)
    raw = [TinyModel().embedding.weight.detach()]
    found = CheckpointManager(tmp_path)
    expected = raw[0].double()
    for step in range(1, 7):
        if step in found.steps():
            assert torch.equal(found.load(step).tensors["ema"]["embedding.weight"], seen[step - 1])
    assert found.steps() == [4, 5, 6]
    for step in (5, 6):
        decay = min(0.8, (1 + step) / (10 + step))
        now = found.load(step).tensors["weights"]["embedding.weight"].double()
        expected = decay * seen[step - 2].double() + (1 - decay) * now
        torch.testing.assert_close(seen[step - 1].double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(model.embedding.weight, seen[-1])
    assert model.output.weight is model.embedding.weight


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_checkpoint_averaging_takes_the_last_planned_checkpoints(ema: float, tmp_path: Path) -> None:
    model = TinyModel()
    falling = iter([5.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 1.0])
    outcome = run_training(
        tmp_path,
        model=model,
        validate=lambda _: {"loss": next(falling)},
        steps=20,
        checkpoint_every=4,
        validate_every=3,
        average_checkpoints=4,
        ema=ema,
    )
    found = CheckpointManager(tmp_path)
    kind = "ema" if ema else "weights"
    mean = average_checkpoints([found.load(step) for step in (8, 12, 16, 20)], kind)
    assert torch.equal(model.embedding.weight, mean["embedding.weight"])
    assert outcome.scores == {"loss": 1.0}
    final = found.final()
    assert final is not None
    assert torch.equal(final.weights["output.weight"], mean["embedding.weight"])


@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize(("scores", "monitor"), [((3.0, 1.0, 2.0, 1.5), "loss"), ((3.0, 7.0, 5.0, 6.0), "bleu")])
@pytest.mark.parametrize("mean_is_finite", [True, False])
def test_a_mean_that_is_worse_than_the_best_checkpoint_is_not_kept(
    scores: tuple[float, ...], monitor: str, mean_is_finite: bool, ema: float, tmp_path: Path
) -> None:
    model, report = TinyModel(), RecordingReport()
    values = iter([*scores[:3], scores[3] if mean_is_finite else math.nan])
    outcome = run_training(
        tmp_path,
        model=model,
        report=report,
        validate=lambda _: {"loss": 1.0, monitor: next(values)},
        monitor=monitor,
        steps=12,
        checkpoint_every=4,
        validate_every=4,
        average_checkpoints=3,
        ema=ema,
    )
    best = CheckpointManager(tmp_path).load(8)
    assert torch.equal(model.embedding.weight, best.tensors["ema" if ema else "weights"]["embedding.weight"])
    assert outcome.scores[monitor] == scores[1]
    assert any("update 8" in text and text.endswith("the best is kept") for _, _, text in report.events)


def test_a_single_checkpoint_is_not_called_a_mean(tmp_path: Path) -> None:
    report = RecordingReport()
    steps = {"steps": 4, "checkpoint_every": 4, "validate_every": 4}
    run_training(tmp_path, report=report, validate=lambda _: {"loss": 1.0}, average_checkpoints=3, **steps)
    (text,) = [text for kind, _, text in report.events if kind == "averaged"]
    assert text == "the last checkpoint has loss 1, the best, at update 4, 1: the last is kept"


def test_bf16_training_reduces_the_loss(tmp_path: Path) -> None:
    report = RecordingReport()
    run_training(tmp_path, report=report, precision="bf16", steps=40, optimiser={"learning_rate": 0.02})
    losses = [line.loss for line in report.entries if line.loss is not None]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.2
    assert latest_tensors(tmp_path)["mix.weight"].dtype == torch.float32


def test_deterministic_mode_is_on_during_training_only(tmp_path: Path) -> None:
    class Unsure(TinyModel):
        def forward(self, batch: Batch) -> Step:
            assert torch.are_deterministic_algorithms_enabled()
            return super().forward(batch)

    run_training(tmp_path, model=Unsure(), deterministic=True, steps=2)
    assert not torch.are_deterministic_algorithms_enabled()


def test_log_entries_have_speed_padding_and_time_left(tmp_path: Path) -> None:
    report = RecordingReport()
    run_training(tmp_path, report=report, steps=20, log_every=5)
    assert [entry.step for entry in report.entries] == [5, 10, 15, 20]
    assert [line.epoch for line in report.entries] == [0, 1, 1, 2]  # nine batches an epoch
    batches, position = TinyBatches(), DataPosition()
    tokens = slots = 0
    for _ in range(5):
        batch = batches.at(position)
        tokens, slots, position = tokens + batch.tokens, slots + batch.slots, batches.after(position)
    assert report.entries[0].padding == pytest.approx(1 - tokens / slots)
    assert all(line.tokens_per_second > 0 and line.peak_memory > 0 for line in report.entries)
    assert report.entries[-1].seconds_left == 0
    assert report.entries[0].learning_rate == pytest.approx(0.01 * (4 / 5) ** 0.5)


def test_an_error_in_the_data_ends_training(tmp_path: Path) -> None:
    class Broken(TinyBatches):
        def at(self, position: DataPosition) -> Batch:
            if position.index == 3:
                raise InputError("unreadable", where="pairs.tsv:17")
            return super().at(position)

    threads = threading.active_count()
    with pytest.raises(InputError, match=r"pairs\.tsv:17"):
        run_training(tmp_path, batches=Broken())
    assert threading.active_count() == threads


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_asynchronous_updates_give_the_same_log_validations_and_weights(
    ema: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for asynchronous in (False, True):
        monkeypatch.setattr(Update, "asynchronous", property(lambda self, value=asynchronous: value))
        validations: list[float] = []

        def validate(model: nn.Module, validations: list[float] = validations) -> dict[str, float]:
            validations.append(float(next(model.parameters()).sum()))
            return {"loss": -validations[-1]}

        options = {"steps": 11, "log_every": 2, "validate_every": 4, "checkpoint_every": 3, "ema": ema}
        model, report = TinyModel(), RecordingReport()
        # Clipping is off: an asynchronous step divides by the norm where the other multiplies by its inverse.
        folder = tmp_path / str(asynchronous)
        outcome = run_training(folder, model=model, report=report, validate=validate, clip=None, **options)
        entries = [(one.step, one.epoch, one.loss, one.learning_rate, one.gradient_norm) for one in report.entries]
        events = [(kind, step) for kind, step, _ in report.events]
        results.append((outcome, entries, events, validations, model.state_dict()))
    synchronous, other = results
    assert synchronous[:4] == other[:4]
    assert [step for step, *_ in synchronous[1]] == [2, 4, 6, 8, 10]
    assert all(torch.equal(synchronous[4][name], other[4][name]) for name in synchronous[4])
