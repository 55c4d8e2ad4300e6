"""A model, batches and settings enter; the trained model, its checkpoints and an outcome leave."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Self

import torch
from torch import nn

from transduce.data.batching import DataPosition
from transduce.errors import InputError, nearest
from transduce.objectives import CrossEntropy, Objective
from transduce.recipe import TrainingRecipe
from transduce.training.checkpoint import Checkpoints
from transduce.training.distributed import Processes, autocast, deterministic, memory_peak
from transduce.training.feed import Batches, Fetched, Prefetch, fetch, fingerprint
from transduce.training.micro_batch import Launched, Result
from transduce.training.optimisers import build_optimiser, rate_at
from transduce.training.progress import Progress, Window
from transduce.training.report import Line, Report, Silent
from transduce.training.resume import Keeper
from transduce.training.update import Update


class Interruption:
    """While it is open the first signal is noted; a second one acts at once, as it would have without us."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *error: object) -> None:
        self._restore()


Reason = Literal["steps", "minutes", "patience", "interrupted"]
Validate = Callable[[nn.Module], dict[str, float]]
LOWER_IS_BETTER = frozenset({"loss"})  # the caller adds the metrics it knows


@dataclass(frozen=True)
class Outcome:
    step: int
    best_step: int | None
    best_value: float | None
    reason: Reason
    scores: dict[str, float | None]  # on the development set, of the weights the model ends with
    signal: int | None = None  # what interrupted it


@dataclass(frozen=True)
class Untold:
    """An update that was begun and not told of yet."""

    launched: Launched
    step: int
    rate: float
    batch: Fetched
    started: float


@dataclass
class Trainer:
    """One training run. It continues from the newest whole checkpoint, where there is one.

    Everything random is a function of (seed, step, row), the order of the data of (seed, epoch) and the rate of the
    step: a run that was killed and resumed makes the same updates, to the bit, as one that was not.
    """

    model: nn.Module
    batches: Batches
    settings: TrainingRecipe
    checkpoints: Checkpoints
    report: Report
    processes: Processes
    device: torch.device
    validate: Validate | None
    objective: Objective
    lower_is_better: frozenset[str]

    def __post_init__(self) -> None:
        self.model.to(self.device)
        layer_decay, unfreeze = self.settings.layer_decay, self.settings.unfreeze
        optimiser = build_optimiser(self.settings.optimiser, self.model, layer_decay=layer_decay, unfreeze=unfreeze)
        self.update = Update(self.model, optimiser, self.objective, self.settings, self.processes, self.device)
        data = fingerprint(self.batches.at(DataPosition()))
        self.keeper = Keeper(self.model, optimiser, self.settings, self.checkpoints, self.processes, data)
        self.progress = Progress()
        self.untold: Untold | None = None
        self.told = 0.0  # when the last update was
        self.stop, self.late = False, False  # interrupted, out of time: agreed on by all processes

    def run(self) -> Outcome:
        self.began = time.monotonic()
        with deterministic(self.settings.deterministic), Interruption() as interruption:
            try:
                self._resume()
                with Prefetch(fetch(self.batches, self.progress.position, self.update)) as fetched:
                    while not (reason := self._settle()):
                        self._step(fetched, interruption)
                return self._finish(reason, interruption.signal)
            finally:
                self.report.close()

    def _resume(self) -> None:
        resumed = self.keeper.resume()
        self.progress = resumed.progress
        self.late = self._late(self.progress.seconds)
        self.model.train()
        self.report.start(self.progress.step, self.settings.steps, self.progress.validated)
        for problem in resumed.damage:
            self.report.event("damaged", self.progress.step, problem)
        if resumed.again:
            self.report.event("resumed", self.progress.step, f"resumed after update {self.progress.step}")

    def _step(self, fetched: Iterator[Fetched], interruption: Interruption) -> None:
        """One update begun, and the one before told: the device need not wait for us between them."""
        progress, settings = self.progress, self.settings
        started = time.monotonic()
        batch = next(fetched)
        step = progress.step + 1
        share = rate_at(step, settings.steps, settings.schedule, progress.plateau)
        rate = share * settings.optimiser.learning_rate
        flags = (interruption.signal is not None, self._late(self._seconds()))
        launched = self.update.launch(batch.work, step, rate, flags)
        self.stop, self.late = launched.flags
        progress.step, progress.position = step, batch.following
        progress.tokens += batch.tokens
        self._tell()
        self.untold = Untold(launched, step, rate, batch, started)
        if self.keeper.average is not None:
            self._tell()

    def _tell(self) -> None:
        """Counts and tells the update that was begun last, if there is one."""
        if self.untold is None:
            return
        progress, one, self.untold = self.progress, self.untold, None
        result = one.launched.result()
        now = time.monotonic()
        progress.window.add(result, one.batch.tokens, one.batch.slots, now - max(one.started, self.told))
        self.told = now
        self._mind(result, one.step)
        if self.keeper.average is not None and not result.bad:
            self.keeper.average.update(self.model, one.step)
        self.report.advance(one.step)
        if one.step % self.settings.log_every == 0:
            self.report.line(self._line(one, result))
            progress.window = Window()

    def _mind(self, result: Result, step: int) -> None:
        """Tells what went wrong in an update; too much of it ends training."""
        progress = self.progress
        if result.splits:
            self.report.event("split", step, f"out of memory: the batch was split {result.splits} times and redone")
        if result.lost:
            progress.lost += len(result.lost)
            rows = ", ".join(map(str, result.lost))
            self.report.event("lost", step, f"out of memory even alone: left out example {rows}")
        if not result.bad:
            progress.bad = 0
            return
        progress.bad += 1
        progress.skipped += 1
        told = f"update skipped: not finite, first in {result.bad}"
        self.report.event("skipped", step, told)
        if progress.bad >= self.settings.bad_updates:
            raise InputError(
                f"{progress.bad} updates in a row were not finite, first in {result.bad}",
                where=f"update {step}",
                remedy="lower training.optimiser.learning_rate, lengthen training.schedule.warmup, "
                "set training.clip, or use precision fp32",
            )

    def _line(self, one: Untold, result: Result) -> Line:
        window, settings = self.progress.window, self.settings
        count, seconds = max(window.count, 1), self._seconds()
        left = (settings.steps - one.step) * seconds / one.step
        if settings.minutes is not None:
            left = min(left, max(0.0, 60 * settings.minutes - seconds))
        return Line(
            step=one.step,
            epoch=one.batch.epoch,
            loss=window.loss / count if window.count else None,
            parts={name: value / count for name, value in window.parts.items()},
            learning_rate=one.rate,
            gradient_norm=result.gradient_norm,
            tokens_per_second=window.tokens / max(window.seconds, 1e-9),
            padding=1 - window.tokens / max(window.slots, 1),
            seconds=seconds,
            memory=memory_peak(self.device),
            seconds_left=left,
        )

    def _settle(self) -> Reason | None:
        """Between two updates: validates and saves what is due, and says whether training is over and why."""
        progress, settings = self.progress, self.settings
        reason: Reason | None = "steps" if progress.step >= settings.steps else "minutes" if self.late else None
        every = (settings.validate_every, settings.checkpoint_every)
        if self.stop or reason is not None or any(progress.step % number == 0 for number in every):
            self._tell()
        if self.stop and reason is None:
            # A validation that is due now is made after the resume, which comes to this same place.
            self.keeper.save(progress, self._seconds())
            return "interrupted"
        improved = False
        due = progress.step > 0 and (progress.step % settings.validate_every == 0 or reason is not None)
        if due and progress.validated < progress.step and self.validate is not None:
            improved = self._judge(self._scores(self.validate))
        if reason is None and settings.patience is not None and progress.stale >= settings.patience:
            reason = "patience"
        if improved or reason is not None or (progress.step and progress.step % settings.checkpoint_every == 0):
            self.keeper.save(progress, self._seconds())
        return reason

    def _scores(self, validate: Validate) -> dict[str, float]:
        """Validates in the first process. Training is not disturbed: each update seeds its own randomness."""
        self.model.eval()
        with torch.no_grad(), self.keeper.validating(), autocast(self.device, self.settings.precision):
            scores = self.keeper.on_main(lambda: {name: float(value) for name, value in validate(self.model).items()})
        self.model.train()
        return scores

    def _judge(self, scores: dict[str, float]) -> bool:
        monitor, step = self.settings.monitor, self.progress.step
        self.report.validation(step, scores)
        if monitor not in scores:
            raise InputError(f"training.monitor: there is no {monitor!r}", remedy=nearest(monitor, scores))
        lower = monitor in self.lower_is_better
        self.progress.plateau = self.progress.plateau.after(scores[monitor], self.settings.schedule, lower)
        return self.progress.judge(scores[monitor], scores, lower)

    def _finish(self, reason: Reason, signal: int | None) -> Outcome:
        progress = self.progress
        self.report.event("ended", progress.step, f"training ended after update {progress.step}: {reason}")
        scores = progress.scores
        if reason != "interrupted":
            self.keeper.finish(progress.step)
            if self.settings.average > 1 and self.validate is not None:
                self.keeper.average = None  # the model has its final weights now
                scores = {**self._scores(self.validate)}
        self.model.eval()
        return Outcome(progress.step, progress.best_step, progress.best_value, reason, scores, signal)

    def _late(self, seconds: float) -> bool:
        return self.settings.minutes is not None and seconds >= 60 * self.settings.minutes

    def _seconds(self) -> float:
        return self.progress.seconds + time.monotonic() - self.began


def train(
    model: nn.Module,
    batches: Batches,
    settings: TrainingRecipe,
    *,
    checkpoints: Checkpoints,
    report: Report | None = None,
    processes: Processes | None = None,
    device: torch.device | None = None,
    validate: Validate | None = None,
    objective: Objective | None = None,
    lower_is_better: frozenset[str] = LOWER_IS_BETTER,
) -> Outcome:
    """Trains until a limit is reached, patience runs out or a signal comes; then the model has its final weights.

    `validate` gives scores of the model on the development set, among them `settings.monitor`.
    """
    place = device or torch.device("cpu")
    objective = objective or CrossEntropy()
    parts = (checkpoints, report or Silent(), processes or Processes(), place, validate, objective, lower_is_better)
    return Trainer(model, batches, settings, *parts).run()
