"""Training state: progress, and saving and restoring it with the model and the optimiser."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from transduce.data.batching import DataPosition
from transduce.errors import InputError
from transduce.recipe import TrainingRecipe
from transduce.training.checkpoint import Checkpoint, CheckpointManager, average_checkpoints
from transduce.training.distributed import Processes
from transduce.training.optimisers import (
    ExponentialMovingAverage,
    Plateau,
    copy_parameters,
    load_optimiser_state,
    optimiser_state,
)
from transduce.training.update import UpdateResult

Value = TypeVar("Value")


@dataclass
class LogSums:
    """Sums since the last log entry. They are part of a checkpoint, so a resumed run logs the same numbers."""

    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    count: int = 0
    tokens: int = 0
    slots: int = 0
    seconds: float = 0.0

    def add(self, result: UpdateResult, tokens: int, slots: int, seconds: float) -> None:
        self.tokens, self.slots, self.seconds = self.tokens + tokens, self.slots + slots, self.seconds + seconds
        if result.nonfinite:
            return
        self.loss, self.count = self.loss + result.loss, self.count + result.count
        for name, value in result.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value


@dataclass
class Progress:
    """Everything but tensors that a resumed run needs."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)  # of the next batch
    best_step: int | None = None
    best_value: float | None = None
    stale_validations: int = 0  # since the best one
    validated_step: int = 0  # step of the last validation
    best_scores: dict[str, float | None] = field(default_factory=dict)
    plateau: Plateau = field(default_factory=Plateau)
    consecutive_nonfinite: int = 0  # non-finite updates in a row
    skipped_updates: int = 0  # all non-finite updates
    dropped_examples: int = 0  # examples that do not fit into memory
    tokens: int = 0
    seconds: float = 0.0
    log_sums: LogSums = field(default_factory=LogSums)

    def record_validation(self, value: float, scores: dict[str, float], lower_is_better: bool) -> bool:
        """Records the scores of one validation; True if they are the best so far."""
        self.validated_step = self.step
        best = self.best_value
        improved = best is None or (value < best if lower_is_better else value > best)
        if value == best:  # the loss decides between equal values
            improved = scores.get("loss", math.inf) < (self.best_scores.get("loss") or math.inf)
        if math.isfinite(value) and improved:
            self.best_step, self.best_value, self.stale_validations = self.step, value, 0
            self.best_scores = {name: score if math.isfinite(score) else None for name, score in scores.items()}
            return True
        self.stale_validations += 1
        return False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "position": self.position.to_json(), "plateau": self.plateau.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(
            **{
                **content,
                "position": DataPosition.from_json(content["position"]),
                "plateau": Plateau.from_json(content["plateau"]),
                "log_sums": LogSums(**content["log_sums"]),
            }
        )


@dataclass(frozen=True)
class Restored:
    """The result of restoring a training state."""

    progress: Progress
    resumed: bool  # False: there was no checkpoint, training starts
    damage: list[str]  # problems of checkpoints newer than the one resumed from


@dataclass
class TrainingState:
    """Model, optimiser and moving average of one run, with their checkpoints.

    The first process reads and writes the disk and broadcasts what it read, so the others need no access to it.
    """

    model: nn.Module
    optimiser: torch.optim.Optimizer
    settings: TrainingRecipe
    checkpoints: CheckpointManager
    processes: Processes
    data: str  # fingerprint of the data

    def __post_init__(self) -> None:
        self.ema: ExponentialMovingAverage | None = None
        self.checkpoints.keep = max(self.checkpoints.keep, self.settings.average_checkpoints)
        self.checkpoints.every = self.settings.checkpoint_every

    def on_main(self, action: Callable[[], Value]) -> Value:
        """The result (JSON) of the action in the first process, or its `InputError`, in every process.

        Raising everywhere keeps the other processes from waiting for one that has given up.
        """
        answer: dict[str, Any] = {}
        if self.processes.is_main:
            try:
                answer = {"value": action()}
            except InputError as error:
                answer = {"error": error.problem, "where": error.where, "remedy": error.remedy}
        answer = self.processes.broadcast(answer)
        if "error" in answer:
            raise InputError(answer["error"], where=answer["where"], remedy=answer["remedy"])
        value: Value = answer["value"]
        return value

    def restore(self) -> Restored:
        """Loads the newest undamaged checkpoint; without one, every process gets the weights of the first."""
        loaded: list[Checkpoint] = []
        state, damage = self.on_main(lambda: self._load_latest(loaded))
        tensors = loaded[0].tensors if loaded else {"weights": self.model.state_dict()}
        self._load_weights(self.processes.broadcast_tensors(tensors["weights"]))
        self.ema = ExponentialMovingAverage(self.model, self.settings.ema) if self.settings.ema > 0 else None
        if state is None:
            return Restored(Progress(), False, damage)
        optimiser_tensors = self.processes.broadcast_tensors(tensors.get("optimiser", {}))
        load_optimiser_state(self.optimiser, self.model, optimiser_tensors)
        if self.ema:
            self.ema.restore(self.processes.broadcast_tensors(tensors.get("ema", {})))
        return Restored(Progress.from_json(state["progress"]), True, damage)

    def _load_latest(self, loaded: list[Checkpoint]) -> tuple[dict[str, Any] | None, list[str]]:
        """Appends the newest undamaged checkpoint to `loaded`, after checking that it belongs to this run."""
        self.checkpoints.remove_incomplete()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint = self.checkpoints.latest()
        damage = [str(warning.message) for warning in caught]
        if checkpoint is None:
            return None, damage
        loaded.append(checkpoint)
        for name, value in self._identity().items():
            saved = checkpoint.state["identity"].get(name)
            if saved != value:
                raise InputError(
                    f"cannot resume: {name} was {saved} and is now {value}",
                    where=str(checkpoint.folder),
                    remedy="resume with the settings that the run started with, or start a new run",
                )
        self.checkpoints.quarantine_after(checkpoint.step)
        progress = checkpoint.state["progress"]
        if progress["best_step"] is not None and progress["best_step"] != self.checkpoints.best_step():
            self.checkpoints.mark_best(progress["best_step"], progress["best_value"])
        return checkpoint.state, damage

    def _identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed."""
        settings = self.settings
        shapes = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in self.model.state_dict().items()]
        return {
            "data": self.data,
            "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "training.seed": settings.seed,
            "training.batch_tokens": settings.batch_tokens,
            "training.bucket_batches": settings.bucket_batches,
            "training.optimiser.kind": settings.optimiser.kind,
            "training.ema": settings.ema,
        }

    def save(self, progress: Progress, seconds: float) -> None:
        """Saves a checkpoint of this step, unless the run was resumed from it: then the weights are the same."""
        state = {"identity": self._identity(), "progress": {**progress.to_json(), "seconds": seconds}}

        def write() -> None:
            if progress.step not in self.checkpoints.steps():
                tensors: dict[str, Mapping[str, Tensor]] = {
                    "weights": self.model.state_dict(),
                    "optimiser": optimiser_state(self.optimiser, self.model),
                }
                if self.ema:
                    tensors["ema"] = self.ema.values
                self.checkpoints.save(progress.step, tensors, state)
                self.checkpoints.remove_final()  # of an earlier end of this run, which now continues
            if progress.best_step == progress.step and progress.best_value is not None:
                self.checkpoints.mark_best(progress.step, progress.best_value)
            self.checkpoints.prune()

        self.on_main(write)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights of the moving average, if there is one."""
        return self.ema.swapped(self.model) if self.ema else nullcontext()

    def save_final(self, step: int) -> None:
        """Loads the final weights into the model and saves them.

        They are the average of the last checkpoints if `training.average_checkpoints` is above 1, else those of the
        best validation, else the last ones; of the moving average if there is one.
        """
        final: dict[str, dict[str, Tensor]] = {}
        self.on_main(lambda: final.update(self._final_weights()))
        self._load_weights(self.processes.broadcast_tensors(final.get("weights", {})))
        if self.ema:
            copy_parameters(self.model, self.processes.broadcast_tensors(final.get("ema", {})))
        self.on_main(lambda: str(self.checkpoints.save_final(step, self.model.state_dict(), {})))

    def _final_weights(self) -> dict[str, dict[str, Tensor]]:
        groups = ("weights", "ema") if self.ema else ("weights",)
        if self.settings.average_checkpoints > 1:
            steps = self.checkpoints.steps_to_average(self.settings.average_checkpoints)
            last = [self.checkpoints.load(step, groups) for step in steps]
            return {group: average_checkpoints(last, group) for group in groups}
        best = self.checkpoints.best(groups)
        assert best is not None, "a finished run has a checkpoint"
        return best.tensors

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit the model: {error}") from None
