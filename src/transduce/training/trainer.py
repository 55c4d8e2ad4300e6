"""Training loop: updates, validation, checkpoints, early stopping, interruption."""

from __future__ import annotations

import copy
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Self

import torch
from torch import nn

from transduce.data.batching import DataPosition
from transduce.errors import InputError, nearest
from transduce.flow import Batch
from transduce.objectives import CrossEntropy, Objective
from transduce.recipe import TrainingRecipe
from transduce.training.checkpoint import CheckpointManager
from transduce.training.distributed import Processes, autocast, deterministic, environment, peak_memory
from transduce.training.optimisers import build_optimiser, decay_end, schedule_factor
from transduce.training.report import LogEntry, Report, SilentReport
from transduce.training.resume import LogSums, Progress, Provenance, TrainingState
from transduce.training.update import (
    BatchSource,
    FetchedBatch,
    Prefetch,
    Update,
    UpdateFuture,
    UpdateResult,
    fetch,
    fingerprint,
)

FIRST_ESTIMATE = 5  # updates before the number of updates in a time budget is estimated
MAX_WARMUP = 0.1  # share of the updates in a time budget that may be warm-up
StopReason = Literal["steps", "minutes", "patience", "perfect", "interrupted"]
Validate = Callable[[nn.Module], dict[str, float]]
LOWER_IS_BETTER = frozenset({"loss"})  # the caller adds its metrics
ROLLBACK_FACTOR = 0.5  # of the learning rate, each time that training returns to a checkpoint
ROUNDING = 1e-6  # within which a score is the perfect one


class SignalHandler:
    """Inside its block, records the first SIGINT, SIGTERM or SIGUSR1; a second one has its usual effect."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # SLURM announces a limit with the last
                self._previous[number] = signal.signal(number, self._record)
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __exit__(self, *error: object) -> None:
        self._restore()


@dataclass(frozen=True)
class Outcome:
    """How a training run ended."""

    step: int
    best_step: int | None
    best_value: float | None
    reason: StopReason
    scores: dict[str, float | None]  # of the final weights on the development set
    signal: int | None = None  # the signal that interrupted the run, in any process


class NonFiniteUpdatesError(Exception):
    """Several updates in a row had a loss or a gradient that is not finite."""

    def __init__(self, step: int, origin: str) -> None:
        super().__init__(step, origin)
        self.step, self.origin = step, origin


@dataclass(frozen=True)
class PendingUpdate:
    """An update that was launched and whose result is not logged yet."""

    future: UpdateFuture
    step: int
    learning_rate: float
    batch: FetchedBatch
    started: float


@dataclass
class Trainer:
    """One training run. It resumes from the newest undamaged checkpoint, if there is one.

    Every random number is a function of (seed, step, row), the order of the data of (seed, epoch), and the learning
    rate of the step. Therefore a run that was killed and resumed computes the same updates, to the bit.
    """

    model: nn.Module
    batches: BatchSource
    settings: TrainingRecipe
    checkpoints: CheckpointManager
    report: Report
    processes: Processes
    device: torch.device
    validate: Validate | None
    objective: Objective
    lower_is_better: frozenset[str]
    perfect: Mapping[str, float]
    provenance: Provenance
    largest_batch: Batch | None = None  # tried before the first update

    def __post_init__(self) -> None:
        settings, processes, device = self.settings, self.processes, self.device
        self.sharded = None
        if settings.parallel == "fsdp" and processes.in_group:  # one process has all parts: it trains as without FSDP
            from transduce.training.fsdp import ShardedModel

            # `model` stays whole, in main memory: the first process validates with it.
            self.model.load_state_dict(processes.broadcast_tensors(self.model.state_dict()))
            trained = copy.deepcopy(self.model)
            if hasattr(self.model, "auxiliary"):  # a module that the objective has, too
                trained, self.objective = copy.deepcopy((self.model, self.objective))
            self.sharded = ShardedModel(trained, device, processes.size)
        self.trained = self.model.to(device) if self.sharded is None else self.sharded.model
        optimiser = build_optimiser(
            settings.optimiser, self.trained, layer_decay=settings.layer_decay, unfreeze=settings.unfreeze
        )
        self.update = Update(self.trained, optimiser, self.objective, settings, processes, device, self.sharded)
        first_batch = fingerprint(self.batches.at(DataPosition()))
        self.state = TrainingState(
            self.trained,
            optimiser,
            settings,
            self.checkpoints,
            processes,
            first_batch,
            self.provenance,
            self.sharded,
        )
        self.progress = Progress()
        self.pending: PendingUpdate | None = None
        self.last_result_time = 0.0
        self.validation_seconds = 0.0  # of the last validation
        self.interrupted, self.out_of_time = False, False  # the same in all processes

    def run(self) -> Outcome:
        self.started = time.monotonic()
        with deterministic(self.settings.deterministic), SignalHandler() as signals:
            try:
                self._resume()
                self._preflight()
                while (reason := self._train(signals)) is None:
                    pass
                return self._finish(reason, self.processes.maximum(signals.signal or 0) or None)
            finally:
                self.report.close()

    def _train(self, signals: SignalHandler) -> StopReason | None:
        """Updates until training is over; None: it went back to a checkpoint, and goes on from there."""
        try:
            with Prefetch(fetch(self.batches, self.progress.position, self.update)) as fetched:
                while not (reason := self._validate_and_save()):
                    self._step(fetched, signals)
            return reason
        except NonFiniteUpdatesError as problem:
            self._roll_back(problem)
            return None

    def _resume(self) -> None:
        self.state.environment = environment(self.device, self.processes.size * self.settings.accumulate)
        restored = self.state.restore()
        self.progress = restored.progress
        self.out_of_time = self._exceeds_minutes(self.progress.seconds)
        self.trained.train()
        self.report.start(self.progress.step, self.settings.steps, self.progress.validated_step)
        for kind, text in restored.notices:
            self.report.event(kind, self.progress.step, text)
        if restored.resumed:
            self.report.event("resumed", self.progress.step, f"resumed after update {self.progress.step}")

    def _preflight(self) -> None:
        """A pass over the largest batch before the first update, which reports whether it fits into memory."""
        if self.largest_batch is None:
            return
        result = self.update.preflight(self.largest_batch)
        if result.splits or result.dropped:
            text = f"out of memory with the largest batch: it was split {result.splits} times"
            text += f", and {len(result.dropped)} examples do not fit alone" if result.dropped else ""
            self.report.event("preflight", self.progress.step, text)

    def _step(self, fetched: Iterator[FetchedBatch], signals: SignalHandler) -> None:
        """Launches one update, then logs the previous one: between them the device does not wait for the host."""
        progress = self.progress
        started = time.monotonic()
        batch = next(fetched)
        step = progress.step + 1
        learning_rate = self._learning_rate(step)
        flags = (signals.signal is not None, self._exceeds_minutes(self._seconds()))
        future = self.update.launch(batch.update_batch, step, learning_rate, flags)
        self.interrupted, self.out_of_time = future.flags
        progress.step, progress.position = step, batch.next_position
        progress.tokens += batch.tokens
        before, self.pending = self.pending, PendingUpdate(future, step, learning_rate, batch, started)
        self._complete(before)
        if self.state.ema is not None:  # the average needs the weights of this update
            self._complete_pending()

    def _learning_rate(self, step: int) -> float:
        """That of the schedule, which is shortened to the updates that the time budget and the patience allow."""
        settings, progress = self.settings, self.progress
        self._plan_steps(step)
        steps, schedule = self._last_step(), settings.schedule
        if progress.planned_steps is not None and progress.planned_steps < steps:
            steps = progress.planned_steps
            longest_warmup = math.ceil(MAX_WARMUP * steps)
            schedule = schedule.model_copy(update={"warmup": min(schedule.warmup, longest_warmup)})
        factor = schedule_factor(step, steps, schedule, progress.plateau) * progress.rate_factor
        return factor * settings.optimiser.learning_rate

    def _last_step(self) -> int:
        """The last update: `steps`, or the end of the decay that began when patience ran out."""
        plateau_step = self.progress.plateau_step
        if plateau_step is None:
            return self.settings.steps
        return min(self.settings.steps, decay_end(plateau_step, self.settings.schedule))

    def _plan_steps(self, step: int) -> None:
        """Estimates now and then how many updates the time budget allows, from the mean time of an update so far.

        The time of validations counts, and that of the first, slow updates less and less.
        """
        settings, progress = self.settings, self.progress
        if settings.minutes is None or step <= FIRST_ESTIMATE:
            return
        if progress.planned_steps is not None and step % max(1, min(50, progress.planned_steps // 20)):
            return
        left = max(0.0, 60 * settings.minutes - self.validation_seconds - self._seconds())
        more = left / max(self._seconds() / (step - 1), 1e-9)
        progress.planned_steps = self.processes.on_main(lambda: min(settings.steps, max(step, step - 1 + int(more))))

    def _complete_pending(self) -> None:
        """Waits for the result of the update that was launched last, if it is pending, and logs it."""
        pending, self.pending = self.pending, None
        self._complete(pending)

    def _complete(self, pending: PendingUpdate | None) -> None:
        if pending is None:
            return
        progress = self.progress
        result = pending.future.result()
        now = time.monotonic()
        seconds = now - max(pending.started, self.last_result_time)
        progress.log_sums.add(result, pending.batch.tokens, pending.batch.slots, seconds)
        self.last_result_time = now
        self._report_problems(result, pending.step)
        if self.state.ema is not None and not result.nonfinite:
            self.state.ema.update(self.trained, pending.step)
        self.report.advance(pending.step)
        if pending.step % self.settings.log_every == 0:
            self.report.log(self._log_entry(pending, result))
            progress.log_sums = LogSums()
        if progress.consecutive_nonfinite >= self.settings.max_nonfinite:
            raise NonFiniteUpdatesError(pending.step, result.nonfinite)

    def _report_problems(self, result: UpdateResult, step: int) -> None:
        """Reports and counts the problems of an update."""
        progress = self.progress
        if result.splits:
            text = f"out of memory: {result.splits} micro-batches were split and the update recomputed"
            self.report.event("split", step, text)
        if result.dropped:
            progress.dropped_examples += len(result.dropped)
            rows = ", ".join(map(str, result.dropped))
            self.report.event("dropped", step, f"out of memory even alone: dropped example {rows}")
        if not result.nonfinite:
            progress.consecutive_nonfinite = 0
            return
        progress.consecutive_nonfinite += 1
        progress.skipped_updates += 1
        self.report.event("skipped", step, f"update skipped: not finite, first in {result.nonfinite}")

    def _roll_back(self, problem: NonFiniteUpdatesError) -> None:
        """Returns to the newest checkpoint with a lower learning rate; after `max_rollbacks`, an error ends training.

        Updates that are not finite change no weights, but the weights that they began with are of no use any more.
        """
        before, seconds = self.progress, self._seconds()
        count = f"{self.settings.max_nonfinite} updates in a row were not finite, first in {problem.origin}"
        if before.rollbacks >= self.settings.max_rollbacks:
            tried = f"; after {before.rollbacks} returns to a checkpoint, with a lower learning rate each time"
            raise InputError(
                count + (tried if before.rollbacks else ""),
                where=f"update {problem.step}",
                remedy="lower training.optimiser.learning_rate, lengthen training.schedule.warmup, "
                "set training.clip, or use precision fp32",
            ) from None
        self.state.finish_saving()
        if self.processes.on_main(lambda: bool(self.checkpoints.steps())):
            self.pending = None
            self.progress = self.state.restore().progress
            self.report.start(self.progress.step, self.settings.steps, self.progress.validated_step)
        self.progress.consecutive_nonfinite, self.progress.skipped_updates = 0, before.skipped_updates
        self.progress.rollbacks = before.rollbacks + 1
        self.progress.rate_factor = before.rate_factor * ROLLBACK_FACTOR
        self.progress.seconds, self.started = seconds, time.monotonic()
        text = f"{count} (update {problem.step}): continued after update {self.progress.step}"
        text += f" with {self.progress.rate_factor:g} of the learning rate"
        self.report.event("rolled back", self.progress.step, text)

    def _log_entry(self, pending: PendingUpdate, result: UpdateResult) -> LogEntry:
        sums, settings = self.progress.log_sums, self.settings
        count, seconds = max(sums.count, 1), self._seconds()
        last = min(self._last_step(), self.progress.planned_steps or settings.steps)
        seconds_left = max(0, last - pending.step) * seconds / pending.step
        if settings.minutes is not None:
            seconds_left = min(seconds_left, max(0.0, 60 * settings.minutes - seconds))
        return LogEntry(
            step=pending.step,
            epoch=pending.batch.epoch,
            loss=sums.loss / count if sums.count else None,
            parts={name: value / count for name, value in sums.parts.items()},
            learning_rate=pending.learning_rate,
            gradient_norm=result.gradient_norm,
            tokens_per_second=sums.tokens / max(sums.seconds, 1e-9),
            padding=1 - sums.tokens / max(sums.slots, 1),
            seconds=seconds,
            peak_memory=peak_memory(self.device),
            seconds_left=seconds_left,
        )

    def _validate_and_save(self) -> StopReason | None:
        """Between two updates: validates and saves if it is due; returns why training is over, or None."""
        progress, settings = self.progress, self.settings
        reason: StopReason | None = None
        if progress.step >= settings.steps:
            reason = "steps"
        elif progress.step >= self._last_step():
            reason = "patience"
        elif self.out_of_time:
            reason = "minutes"
        intervals = (settings.validate_every, settings.checkpoint_every)
        if self.interrupted or reason is not None or any(progress.step % interval == 0 for interval in intervals):
            self._complete_pending()
        if self.interrupted and reason is None:
            # A validation that is due now takes place after resuming, which returns to this point.
            self.state.save(progress, self._seconds())
            return "interrupted"
        improved = False
        due = progress.step > 0 and (progress.step % settings.validate_every == 0 or reason is not None)
        if due and progress.validated_step < progress.step and self.validate is not None:
            improved = self._record_validation(self._validation_scores(self.validate))
        reason = reason or self._early_stopping()
        # The last checkpoint before updates that are not finite is the one to return to.
        periodic = progress.step % settings.checkpoint_every == 0 and not progress.consecutive_nonfinite
        if improved or reason is not None or (progress.step and periodic):
            self.state.save(progress, self._seconds())
        return reason

    def _early_stopping(self) -> StopReason | None:
        """After a validation: why training ends; with `warmup_stable_decay`, lost patience first begins the decay."""
        progress, settings = self.progress, self.settings
        if settings.patience is None or progress.validated_step != progress.step:
            return None
        if progress.position.epoch < settings.min_epochs:
            return None
        perfect = self.perfect.get(settings.monitor)
        if perfect is not None and progress.best_value is not None and abs(progress.best_value - perfect) < ROUNDING:
            return "perfect"
        if progress.stale_validations < settings.patience or progress.plateau_step is not None:
            return None
        if settings.schedule.kind != "warmup_stable_decay":
            return "patience"
        progress.plateau_step = progress.step
        text = f"{settings.monitor} has stopped improving: the learning rate decays until update {self._last_step()}"
        self.report.event("plateau", progress.step, text)
        return None

    def _validation_scores(self, validate: Validate) -> dict[str, float]:
        """Scores from the first process. Validation does not affect training: each update seeds its generators."""
        began = time.monotonic()
        precision = autocast(self.device, self.settings.precision)
        with torch.no_grad(), self.state.averaged_weights(), self._whole_model() as model, precision:
            scores = self.processes.on_main(lambda: {name: float(value) for name, value in validate(model).items()})
        self.validation_seconds = time.monotonic() - began
        return scores

    @contextmanager
    def _whole_model(self) -> Iterator[nn.Module]:
        """The model with the present weights, for inference; with FSDP, in the first process alone."""
        if self.sharded is not None:
            self.sharded.copy_weights_to(self.model, receive=self.processes.is_main)
            if self.processes.is_main:
                self.model.to(self.device)
        self.model.eval()
        yield self.model
        if self.sharded is not None:
            self.model.to("cpu")
        self.model.train()

    def _record_validation(self, scores: dict[str, float]) -> bool:
        """Reports the scores and updates the schedule; True if they are the best so far."""
        monitor, step = self.settings.monitor, self.progress.step
        self.report.validation(step, scores)
        if monitor not in scores:
            raise InputError(f"training.monitor: there is no {monitor!r}", remedy=nearest(monitor, scores))
        lower = monitor in self.lower_is_better
        self.progress.plateau = self.progress.plateau.after(scores[monitor], self.settings.schedule, lower)
        return self.progress.record_validation(scores[monitor], scores, lower)

    def _finish(self, reason: StopReason, signal: int | None) -> Outcome:
        progress = self.progress
        self.state.finish_saving()
        self.report.event("ended", progress.step, f"training ended after update {progress.step}: {reason}")
        scores = progress.best_scores
        if reason != "interrupted":
            scores = self._load_final_weights()
            self.state.save_final(progress.step)
        if self.sharded is not None:
            self.sharded.copy_weights_to(self.model, receive=True)
            self.model.to(self.device)
        self.model.eval()
        return Outcome(progress.step, progress.best_step, progress.best_value, reason, scores, signal)

    def _load_final_weights(self) -> dict[str, float | None]:
        """Loads the mean of the last checkpoints if one was asked for and is as good as the best one, else the best.

        Returns the scores of the chosen weights on the development set. A mean of checkpoints that are far apart, as in
        a short run, can be much worse than each of them.
        """
        progress, monitor = self.progress, self.settings.monitor
        if self.settings.average_checkpoints == 1:
            self.state.load_best()
            return progress.best_scores
        count = self.state.load_mean()
        if self.validate is None:
            return progress.best_scores
        ema, self.state.ema = self.state.ema, None  # the model has the mean of the moving averages
        scores: dict[str, float | None] = {**self._validation_scores(self.validate)}
        self.state.ema = ema
        mean, best = scores[monitor], progress.best_value
        assert mean is not None
        sign = -1 if monitor in self.lower_is_better else 1
        worse = best is not None and not sign * mean >= sign * best  # also where the mean is not a number
        last = f"the mean of the last {count} checkpoints" if count > 1 else "the last checkpoint"
        of_mean = f"{last} has {monitor} {mean:.4g}"
        of_best = (
            "no other score is finite" if best is None else f"the best, at update {progress.best_step}, {best:.4g}"
        )
        chosen = "the best" if worse else "the mean" if count > 1 else "the last"
        self.report.event("averaged", progress.step, f"{of_mean}, {of_best}: {chosen} is kept")
        if not worse:
            return scores
        self.state.load_best()
        return progress.best_scores

    def _exceeds_minutes(self, seconds: float) -> bool:
        """Whether the time budget is spent, less the time of a last validation."""
        return self.settings.minutes is not None and seconds + self.validation_seconds >= 60 * self.settings.minutes

    def _seconds(self) -> float:
        """Training time so far, without interruptions."""
        return self.progress.seconds + time.monotonic() - self.started


def train(
    model: nn.Module,
    batches: BatchSource,
    settings: TrainingRecipe,
    *,
    checkpoints: CheckpointManager,
    report: Report | None = None,
    processes: Processes | None = None,
    device: torch.device | None = None,
    validate: Validate | None = None,
    objective: Objective | None = None,
    lower_is_better: frozenset[str] = LOWER_IS_BETTER,
    perfect: Mapping[str, float] | None = None,
    provenance: Provenance | None = None,
    largest_batch: Batch | None = None,
) -> Outcome:
    """Trains until a limit, the end of patience, a perfect score or a signal. The model then has its final weights.

    `validate` returns scores of the model on the development set, among them `settings.monitor`. `perfect` has the
    best possible values of scores that have one.
    """
    trainer = Trainer(
        model,
        batches,
        settings,
        checkpoints,
        report or SilentReport(),
        processes or Processes(),
        device or torch.device("cpu"),
        validate,
        objective or CrossEntropy(),
        lower_is_better,
        perfect or {},
        provenance or Provenance(),
        largest_batch,
    )
    return trainer.run()
