"""The loop: the same run whatever its micro-batches, processes, deaths and misfortunes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch import Tensor, nn
from training_fixtures import TinyBatches, TinyModel, loss_on, settings

from transduce.data.batching import DataPosition
from transduce.errors import InputError
from transduce.flow import Batch, Step
from transduce.objectives import CrossEntropy, Loss, Model
from transduce.training.checkpoint import CheckpointManager, average_checkpoints
from transduce.training.distributed import Processes
from transduce.training.feed import Prefetch
from transduce.training.optimisers import build_optimiser
from transduce.training.report import LogEntry, SilentReport, read_log
from transduce.training.trainer import Outcome, train
from transduce.training.update import Update, UpdateBatch, UpdateResult, split_batch

CPU = torch.device("cpu")


class Diary(SilentReport):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[LogEntry] = []
        self.events: list[tuple[str, int, str]] = []
        self.scores: dict[int, dict[str, float]] = {}

    def log(self, line: LogEntry) -> None:
        self.lines.append(line)

    def validation(self, step: int, scores: Any) -> None:
        self.scores[step] = dict(scores)

    def event(self, kind: str, step: int, text: str) -> None:
        self.events.append((kind, step, text))


def run(folder: Path, *, model: nn.Module | None = None, diary: Diary | None = None, **changes: Any) -> Outcome:
    batches = changes.pop("batches", TinyBatches())
    validate = changes.pop("validate", loss_on(batches))
    return train(
        model or TinyModel(0.1),
        batches,
        settings(**changes),
        checkpoints=CheckpointManager(folder),
        report=diary or SilentReport(),
        validate=validate,
    )


def weights(folder: Path, kind: str = "weights") -> dict[str, Tensor]:
    found = CheckpointManager(folder).latest()
    assert found is not None
    return found.tensors[kind]


def equal(first: Path, second: Path) -> None:
    one, two = CheckpointManager(first).latest(), CheckpointManager(second).latest()
    assert one is not None
    assert two is not None
    assert one.step == two.step
    assert one.tensors.keys() == two.tensors.keys()
    for kind, group in one.tensors.items():
        for name, tensor in group.items():
            assert torch.equal(tensor, two.tensors[kind][name]), f"{kind} {name}"


# One update


def update_of(model: nn.Module, objective: CrossEntropy | None = None, **changes: Any) -> Update:
    made = settings(optimiser={"kind": "sgd", "learning_rate": 1.0, "momentum": 0.0}, clip=None, **changes)
    optimiser = build_optimiser(made.optimiser, model)
    return Update(model, optimiser, objective or CrossEntropy(label_smoothing=0.1), made, Processes(), CPU)


def moved(pieces: int, objective: CrossEntropy | None = None, rows: int = 7) -> tuple[dict[str, Tensor], UpdateResult]:
    """What one update with rate 1 subtracts from the weights: the gradient."""
    model = TinyModel().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update = update_of(model, objective)
    batch = TinyBatches(rows).at(DataPosition())
    result = update(UpdateBatch(split_batch(batch, Processes(), pieces), CrossEntropy().count(batch)), 1, 1.0)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, result


@trials(deadline=None, max_examples=15)
@given(st.integers(1, 9), st.integers(1, 9))
def test_micro_batches_give_the_gradient_of_the_whole(rows: int, pieces: int) -> None:
    whole, result = moved(1, rows=rows)
    parts, other = moved(pieces, rows=rows)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-6, atol=1e-6)
    assert other.loss == pytest.approx(result.loss)
    assert other.count == result.count
    assert other.gradient_norm == pytest.approx(result.gradient_norm)


def test_the_gradient_is_that_of_the_mean_over_real_tokens() -> None:
    gradients, result = moved(3)
    model = TinyModel().double()
    batch = TinyBatches(7).at(DataPosition())
    logits = model(batch).logits.flatten(0, 1)
    gold = batch.labels.values.masked_fill(~batch.labels.mask, -1).flatten()
    loss = nn.functional.cross_entropy(logits, gold, ignore_index=-1, label_smoothing=0.1)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)
    assert result.loss / result.count == pytest.approx(float(loss.detach()), rel=1e-6)


class Narrow(CrossEntropy):
    """A device whose memory holds few rows: too many fail in the forward pass, or half-way through the backward."""

    def __init__(self, rows: int, when: str, never: int = -1) -> None:
        super().__init__(label_smoothing=0.1)
        self.fits, self.when, self.never, self.tries = rows, when, never, 0

    def __call__(self, model: Model, batch: Batch) -> Loss:
        self.tries += 1
        if batch.size <= self.fits and self.never not in batch.rows:
            return super().__call__(model, batch)
        if self.when == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        assert isinstance(model, TinyModel)
        # The output layer's gradient is there by then, that of the layer before is not.
        hook = model.mix.register_forward_hook(spoil)
        try:
            return super().__call__(model, batch)
        finally:
            hook.remove()


def spoil(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(fail)


def fail(gradient: Tensor) -> None:
    raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("fits", [1, 2, 3, 6])
def test_out_of_memory_splits_the_batch_and_keeps_the_gradient(when: str, fits: int) -> None:
    whole, expected = moved(1)
    parts, result = moved(2, Narrow(fits, when))
    assert result.loss == pytest.approx(expected.loss)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-6, atol=1e-6)
    assert (result.splits > 0) == (fits < 4)
    assert not result.dropped


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_row_that_does_not_fit_alone_is_left_out_and_named(when: str) -> None:
    parts, result = moved(1, Narrow(7, when, never=4))
    assert result.dropped == (4,)
    rest = torch.tensor([0, 1, 2, 3, 5, 6])
    model = TinyModel().double()
    batch = TinyBatches(7).at(DataPosition()).select(rest)
    objective = CrossEntropy(label_smoothing=0.1)
    loss = objective(model, batch)
    (loss.total / objective.count(batch)).backward()
    assert result.count == objective.count(batch)
    assert result.loss == pytest.approx(loss.total.item())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parts[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_size_that_failed_is_not_tried_again() -> None:
    model, objective = TinyModel(), Narrow(3, "forward")
    update = update_of(model, objective)
    batch = TinyBatches(8).at(DataPosition())
    work = UpdateBatch(split_batch(batch, Processes(), 1), CrossEntropy().count(batch))
    assert update(work, 1, 0.1).splits > 0
    objective.tries = 0
    assert update(work, 2, 0.1).splits == 0
    assert objective.tries <= 4


def test_other_errors_are_not_taken_for_memory() -> None:
    class Broken(CrossEntropy):
        def __call__(self, model: Model, batch: Batch) -> Loss:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        moved(1, Broken())


# Numbers that are not finite


class Poison(nn.Module):
    """Lets values through until its time comes."""

    def __init__(self, value: float, since: int, until: int = 10**9) -> None:
        super().__init__()
        self.value, self.since, self.until, self.calls = value, since, until, 0

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return values * self.value if self.training and self.since <= self.calls < self.until else values


class Poisoned(TinyModel):
    def __init__(self, poison: Poison) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(12), poison)  # type: ignore[assignment]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_update_is_skipped_counted_and_blamed(value: float, tmp_path: Path) -> None:
    diary = Diary()
    # Called once an update, and once more to find out where the bad numbers came from.
    model = Poisoned(Poison(value, since=3, until=7))
    outcome = run(tmp_path, model=model, diary=diary, steps=8)
    assert outcome.reason == "steps"
    skipped = [(step, text) for kind, step, text in diary.events if kind == "skipped"]
    assert [step for step, _ in skipped] == [3, 4]
    assert all("norm.1" in text for _, text in skipped)
    assert [line.step for line in diary.lines if line.loss is None] == [3, 4]
    checkpoint = CheckpointManager(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.state["progress"]["skipped_updates"] == 2
    assert checkpoint.state["progress"]["consecutive_nonfinite"] == 0
    assert all(tensor.isfinite().all() for tensor in checkpoint.weights.values())


def test_too_many_bad_updates_in_a_row_end_training(tmp_path: Path) -> None:
    model = Poisoned(Poison(float("nan"), since=6))
    with pytest.raises(InputError, match=r"3 updates in a row were not finite, first in norm\.1") as raised:
        run(tmp_path, model=model, max_nonfinite=3)
    assert "learning_rate" in raised.value.remedy
    assert CheckpointManager(tmp_path).steps() == [4, 5]  # good weights, from before


def test_a_bad_gradient_behind_good_outputs_is_named(tmp_path: Path) -> None:
    class Spoil(TinyModel):
        def forward(self, batch: Batch) -> Step:
            step = super().forward(batch)
            if self.training and torch.is_grad_enabled():
                step.logits.register_hook(lambda gradient: gradient * float("inf"))
            return step

    with pytest.raises(InputError, match=r"first in the gradient of embedding\.weight"):
        run(tmp_path, model=Spoil(), max_nonfinite=1)


# The whole run

FULL: dict[str, Any] = {
    "steps": 20,
    "checkpoint_every": 3,
    "validate_every": 4,
    "accumulate": 2,
    "ema": 0.9,
    "log_every": 2,
}


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("stop", [1, 3, 4, 11, 12])
def test_stopped_anywhere_and_resumed_is_the_same_run(stop: int, optimiser: str, tmp_path: Path) -> None:
    """Interrupted after update `stop`, with dropout, momentum, EMA, accumulation and a plateau schedule."""
    changes = FULL | {"optimiser": {"kind": optimiser}, "schedule": {"kind": "plateau", "warmup": 2, "patience": 0}}
    whole, twice = Diary(), Diary()
    run(tmp_path / "whole", diary=whole, **changes)

    class Signalling(Diary):
        def advance(self, step: int) -> None:
            if step == stop - 1:  # noted while the next update is made
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    first = Signalling()
    if stop == 1:
        first.start = lambda *args: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[method-assign]
    outcome = run(tmp_path / "twice", diary=first, **changes)
    assert outcome == Outcome(
        stop, outcome.best_step, outcome.best_value, "interrupted", outcome.scores, signal.SIGTERM
    )
    assert signal.getsignal(signal.SIGTERM) is before
    outcome = run(tmp_path / "twice", diary=twice, **changes)
    assert outcome.reason == "steps"
    equal(tmp_path / "whole", tmp_path / "twice")
    told = {line.step: line.loss for line in first.lines + twice.lines}
    assert told == {line.step: line.loss for line in whole.lines}
    assert first.scores | twice.scores == whole.scores
    finals = [CheckpointManager(tmp_path / name).final() for name in ("whole", "twice")]
    assert finals[0] is not None
    assert finals[1] is not None
    assert all(torch.equal(tensor, finals[1].weights[name]) for name, tensor in finals[0].weights.items())


def test_a_damaged_checkpoint_costs_steps_but_not_the_run(tmp_path: Path) -> None:
    run(tmp_path / "whole", **FULL)
    run(tmp_path / "hurt", **FULL | {"steps": 12})
    (tmp_path / "hurt" / "step-00000012" / "optimiser.safetensors").write_bytes(b"")
    diary = Diary()
    run(tmp_path / "hurt", diary=diary, **FULL)
    assert [(kind, step) for kind, step, _ in diary.events[:2]] == [("damaged", 9), ("resumed", 9)]
    equal(tmp_path / "whole", tmp_path / "hurt")
    assert (tmp_path / "hurt" / "damaged-step-00000012").is_dir()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 2}, "training.seed was 1 and is now 2"),
        ({"optimiser": {"kind": "sgd"}}, "training.optimiser.kind was adamw and is now sgd"),
        ({"model": TinyModel(width=8)}, "model was"),
        ({"batches": TinyBatches(5)}, "data was"),
    ],
)
def test_another_run_is_not_resumed(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    run(tmp_path, steps=5)
    with pytest.raises(InputError, match=named):
        run(tmp_path, **{"steps": 10} | changes)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, **FULL)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(tmp_path, **FULL) == first
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_patience_ends_training_and_the_best_weights_are_the_final_ones(tmp_path: Path) -> None:
    values = iter([5.0, 3.0, 4.0, float("nan"), 9.0])
    seen: list[Tensor] = []

    def validate(model: nn.Module) -> dict[str, float]:
        seen.append(next(model.parameters()).detach().clone())
        return {"loss": next(values), "bleu": 1.0}

    model = TinyModel()
    outcome = run(tmp_path, model=model, validate=validate, validate_every=2, patience=3, steps=50)
    assert outcome == Outcome(10, 4, 3.0, "patience", {"loss": 3.0, "bleu": 1.0})
    assert torch.equal(next(model.parameters()), seen[1])
    best = CheckpointManager(tmp_path).best()
    assert best is not None
    assert best.step == 4
    again = run(tmp_path, validate=validate, validate_every=2, patience=3, steps=50)
    assert again.reason == "patience"
    assert again.step == 10


def test_a_metric_may_be_better_when_higher(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, 2.0])
    outcome = run(tmp_path, validate=lambda model: {"bleu": next(values)}, monitor="bleu", validate_every=4, steps=12)
    assert (outcome.best_step, outcome.best_value) == (8, 3.0)


def test_an_unknown_monitor_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'accuracy'"):
        run(tmp_path, monitor="acuracy")


def test_minutes_end_training(tmp_path: Path) -> None:
    outcome = run(tmp_path, minutes=0.5 / 60, steps=10**6, validate_every=10**6, checkpoint_every=10**6)
    assert outcome.reason == "minutes"
    assert outcome.best_step == outcome.step
    assert CheckpointManager(tmp_path).steps() == [outcome.step]
    assert run(tmp_path, minutes=0.5 / 60, steps=10**6, validate_every=10**6).step == outcome.step


def test_validation_does_not_disturb_training(tmp_path: Path) -> None:
    run(tmp_path / "often", **FULL | {"validate_every": 1})
    run(tmp_path / "never", **FULL, validate=None)
    for kind in ("weights", "optimiser", "ema"):
        for name, tensor in weights(tmp_path / "often", kind).items():
            assert torch.equal(tensor, weights(tmp_path / "never", kind)[name])


def test_the_moving_average_is_what_is_validated_and_what_training_ends_with(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def validate(model: nn.Module) -> dict[str, float]:
        seen.append(next(model.parameters()).detach().clone())
        return {"loss": -float(len(seen))}

    model = TinyModel()
    run(tmp_path, model=model, validate=validate, ema=0.8, steps=6, validate_every=1, checkpoint_every=1)
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
def test_averaging_takes_the_last_planned_checkpoints(ema: float, tmp_path: Path) -> None:
    model = TinyModel()
    outcome = run(tmp_path, model=model, steps=20, checkpoint_every=4, validate_every=3, average_checkpoints=4, ema=ema)
    found = CheckpointManager(tmp_path)
    kind = "ema" if ema else "weights"
    mean = average_checkpoints([found.load(step) for step in (8, 12, 16, 20)], kind)
    assert torch.equal(model.embedding.weight, mean["embedding.weight"])
    assert outcome.scores == pytest.approx(loss_on(TinyBatches())(model.eval()))
    final = found.final()
    assert final is not None
    assert torch.equal(final.weights["output.weight"], mean["embedding.weight"])


def test_half_precision_trains(tmp_path: Path) -> None:
    diary = Diary()
    run(tmp_path, diary=diary, precision="bf16", steps=40, optimiser={"learning_rate": 0.02})
    losses = [line.loss for line in diary.lines if line.loss is not None]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.2
    assert weights(tmp_path)["mix.weight"].dtype == torch.float32


def test_deterministic_mode_refuses_what_is_not(tmp_path: Path) -> None:
    class Unsure(TinyModel):
        def forward(self, batch: Batch) -> Step:
            assert torch.are_deterministic_algorithms_enabled()
            return super().forward(batch)

    run(tmp_path, model=Unsure(), deterministic=True, steps=2)
    assert not torch.are_deterministic_algorithms_enabled()


def test_lines_tell_speed_padding_and_time_left(tmp_path: Path) -> None:
    diary = Diary()
    run(tmp_path, diary=diary, steps=20, log_every=5)
    assert [line.step for line in diary.lines] == [5, 10, 15, 20]
    assert [line.epoch for line in diary.lines] == [0, 1, 1, 2]  # nine batches an epoch
    batches, position = TinyBatches(), DataPosition()
    tokens = slots = 0
    for _ in range(5):
        batch = batches.at(position)
        tokens, slots, position = tokens + batch.tokens, slots + batch.slots, batches.after(position)
    assert diary.lines[0].padding == pytest.approx(1 - tokens / slots)
    assert all(line.tokens_per_second > 0 and line.peak_memory > 0 for line in diary.lines)
    assert diary.lines[-1].seconds_left == 0
    assert diary.lines[0].learning_rate == pytest.approx(0.01 * (4 / 5) ** 0.5)


# Fetching ahead


def test_prefetching_keeps_the_order_and_the_errors() -> None:
    def items() -> Iterator[int]:
        yield from range(50)
        raise InputError("the file ends here")

    fetched = Prefetch(items())
    assert [next(fetched) for _ in range(50)] == list(range(50))
    with pytest.raises(InputError, match="ends here"):
        next(fetched)
    assert list(Prefetch(iter(range(3)))) == [0, 1, 2]


def test_prefetching_stops_when_it_is_closed() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    before = threading.active_count()
    with Prefetch(items(), ahead=2) as fetched:
        assert next(fetched) == 0
    assert threading.active_count() == before
    assert len(made) <= 5


def test_an_error_in_the_data_ends_training(tmp_path: Path) -> None:
    class Broken(TinyBatches):
        def at(self, position: DataPosition) -> Batch:
            if position.index == 3:
                raise InputError("unreadable", where="pairs.tsv:17")
            return super().at(position)

    threads = threading.active_count()
    with pytest.raises(InputError, match=r"pairs\.tsv:17"):
        run(tmp_path, batches=Broken())
    assert threading.active_count() == threads


# Real processes


def processes(*requests: dict[str, Any]) -> list[Any]:
    """Carried out one after the other in one process that forks, so torch is loaded once."""
    here = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    command = [sys.executable, str(here / "training_fixtures.py"), json.dumps(requests)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    result: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def losses(folder: Path) -> dict[int, float]:
    lines = [line for line in read_log(folder / "log.jsonl") if line["kind"] == "update"]
    assert len({line["step"] for line in lines}) == len(lines), "a step is logged twice"
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow
def test_killed_at_random_moments_the_weights_are_the_same_bits(tmp_path: Path) -> None:
    made = FULL | {"steps": 150, "log_every": 1, "checkpoint_every": 7, "validate_every": 10}
    options = {"settings": made, "dropout": 0.1}
    whole, killed = ({**options, "folder": str(tmp_path / name)} for name in ("whole", "killed"))
    code, result = processes(
        {"do": "train", "options": whole}, {"do": "kill", "options": killed, "kills": 24, "seed": 3}
    )
    assert code == result["code"] == 0
    assert result["died"] >= 12
    equal(tmp_path / "whole" / "checkpoints", tmp_path / "killed" / "checkpoints")
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    assert len(losses(tmp_path / "whole")) == 150
    left = {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()}
    assert left == {path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()}


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    """Also when the number changes half-way, and, slice by slice, with dropout."""
    plain = {"steps": 12, "ema": 0.9, "checkpoint_every": 4, "optimiser": {"learning_rate": 0.01, "weight_decay": 0.1}}
    half, twice = plain | {"steps": 6}, plain | {"accumulate": 2}

    def task(folder: str, made: dict[str, Any], size: int, dropout: float = 0.0) -> dict[str, Any]:
        options = {"settings": made, "folder": str(tmp_path / folder), "dropout": dropout, "rows": 5}
        return {"do": "together" if size > 1 else "train", "options": options, "size": size}

    codes = processes(
        task("one", plain, 1),
        task("two", plain, 2),
        task("six", plain, 6),  # more processes than rows: one of them has none
        task("mixed", half, 2),
        task("mixed", plain, 1),
        task("dropout one", twice, 1, 0.2),
        task("dropout two", plain, 2, 0.2),
    )
    assert all(set(code) == {0} if isinstance(code, list) else code == 0 for code in codes)
    expected = losses(tmp_path / "one")
    assert len(expected) == 12
    for folder in ("two", "six", "mixed"):
        assert losses(tmp_path / folder) == pytest.approx(expected, abs=1e-5)
        for kind in ("weights", "ema"):
            for name, tensor in weights(tmp_path / "one" / "checkpoints", kind).items():
                other = weights(tmp_path / folder / "checkpoints", kind)[name]
                torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
    assert losses(tmp_path / "dropout two") == pytest.approx(losses(tmp_path / "dropout one"), abs=1e-5)


@pytest.mark.slow
def test_misfortune_in_one_process_is_shared_by_all(tmp_path: Path) -> None:
    """Out of memory and a bad loss strike one of two; both do the same, and what one alone would have done."""
    folders = {size: tmp_path / str(size) for size in (1, 2)}
    codes = processes(
        *(
            {
                "do": "together",
                "size": size,
                "options": {"settings": {"steps": 12, "clip": 0.5}, "folder": str(folder), "unlucky": True},
            }
            for size, folder in folders.items()
        )
    )
    assert codes == [[0], [0, 0]]
    logs = {size: read_log(folder / "log.jsonl") for size, folder in folders.items()}
    events = {
        size: [(line["event"], line["step"], line["text"]) for line in log if line["kind"] == "event"]
        for size, log in logs.items()
    }
    told = [(kind, step) for kind, step, _ in events[2] if kind != "split"]
    assert told == [("dropped", 2), ("skipped", 4), ("dropped", 11), ("ended", 12)]
    assert "example 7" in next(text for kind, _, text in events[2] if kind == "dropped")
    assert "first in the loss" in next(text for kind, _, text in events[2] if kind == "skipped")
    assert [event for event in events[1] if event[0] != "split"] == [
        event for event in events[2] if event[0] != "split"
    ]
    assert losses(folders[2]) == pytest.approx(losses(folders[1]), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_signals_end_a_process_with_a_checkpoint(size: int, tmp_path: Path) -> None:
    made = FULL | {"steps": 10**6, "checkpoint_every": 10**6, "validate_every": 10**6}
    options = {"settings": made, "folder": str(tmp_path), "dropout": 0.1}
    tasks = [
        {"do": "interrupt", "options": options, "signal": number, "size": size}
        for number in (signal.SIGTERM, signal.SIGINT)
    ]
    codes = processes(*tasks)
    assert [code[0] for code in codes] == [143, 130]
    assert all(other == 0 for code in codes for other in code[1:])  # they were not sent a signal
    steps = CheckpointManager(tmp_path / "checkpoints").steps()
    assert steps
    assert read_log(tmp_path / "log.jsonl")[-1]["text"].endswith("interrupted")
