"""A model, its optimiser and its progress enter; they leave on the disk, and come back from it in every process."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.recipe import TrainingRecipe
from transduce.training.checkpoint import Checkpoint, Checkpoints, average
from transduce.training.distributed import Processes
from transduce.training.optimisers import MovingAverage, fill, flatten, restore
from transduce.training.progress import Progress

Value = TypeVar("Value")


@dataclass(frozen=True)
class Resumed:
    progress: Progress
    again: bool  # False: this is the beginning
    damage: list[str]  # what was wrong with checkpoints newer than the one resumed from


@dataclass
class Keeper:
    """The first process reads and writes; the others get what it read, so they need not see its disk."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    settings: TrainingRecipe
    checkpoints: Checkpoints
    processes: Processes
    data: str  # names the data: the same text for the same batches

    def __post_init__(self) -> None:
        self.average: MovingAverage | None = None
        self.checkpoints.keep = max(self.checkpoints.keep, self.settings.average)
        self.checkpoints.every = self.settings.checkpoint_every

    def on_main(self, action: Callable[[], Value]) -> Value:
        """The result (JSON) of the first process, or its error, in all of them: none waits for one that gave up."""
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

    def resume(self) -> Resumed:
        """Everything as the newest whole checkpoint has it; with none yet, the weights of the first process."""
        found: list[Checkpoint] = []
        facts, damage = self.on_main(lambda: self._find(found))
        tensors = found[0].tensors if found else {"weights": self.model.state_dict()}
        self._load(self.processes.share(tensors["weights"]))
        self.average = MovingAverage(self.model, self.settings.ema) if self.settings.ema > 0 else None
        if facts is None:
            return Resumed(Progress(), False, damage)
        restore(self.optimiser, self.model, self.processes.share(tensors.get("optimiser", {})))
        if self.average:
            self.average.restore(self.processes.share(tensors.get("ema", {})))
        return Resumed(Progress.from_json(facts["progress"]), True, damage)

    def _find(self, found: list[Checkpoint]) -> tuple[dict[str, Any] | None, list[str]]:
        """Puts the newest whole checkpoint into `found`, after asking whether it is one of this very run."""
        self.checkpoints.clean()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint = self.checkpoints.latest()
        damage = [str(warning.message) for warning in caught]
        if checkpoint is None:
            return None, damage
        found.append(checkpoint)
        for name, value in self._identity().items():
            kept = checkpoint.facts["identity"].get(name)
            if kept != value:
                raise InputError(
                    f"cannot resume: {name} was {kept} and is now {value}",
                    where=str(checkpoint.folder),
                    remedy="resume with what the run began with, or begin a new run",
                )
        self.checkpoints.set_aside_after(checkpoint.step)
        progress = checkpoint.facts["progress"]
        if progress["best_step"] is not None and progress["best_step"] != self.checkpoints.best_step():
            self.checkpoints.mark_best(progress["best_step"], progress["best_value"])
        return checkpoint.facts, damage

    def _identity(self) -> dict[str, Any]:
        """What must not change between two lives of a run, or it would be another run."""
        settings = self.settings
        shapes = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in self.model.state_dict().items()]
        return {
            "data": self.data,
            "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "training.seed": settings.seed,
            "training.batch_tokens": settings.batch_tokens,
            "training.pool": settings.pool,
            "training.optimiser.kind": settings.optimiser.kind,
            "training.ema": settings.ema,
        }

    def save(self, progress: Progress, seconds: float) -> None:
        """A checkpoint of this step, unless the run was resumed from one: that has the same weights."""
        facts = {"identity": self._identity(), "progress": {**progress.to_json(), "seconds": seconds}}

        def write() -> None:
            if progress.step not in self.checkpoints.steps():
                tensors: dict[str, Mapping[str, Tensor]] = {
                    "weights": self.model.state_dict(),
                    "optimiser": flatten(self.optimiser, self.model),
                }
                if self.average:
                    tensors["ema"] = self.average.values
                self.checkpoints.save(progress.step, tensors, facts)
                self.checkpoints.drop_final()  # of an earlier end, which is passed now
            if progress.best_step == progress.step and progress.best_value is not None:
                self.checkpoints.mark_best(progress.step, progress.best_value)
            self.checkpoints.prune()

        self.on_main(write)

    def validating(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that count: the moving average where there is one."""
        return self.average.swapped(self.model) if self.average else nullcontext()

    def finish(self, step: int) -> None:
        """Gives the model the weights that the run ends with, and keeps them as the final ones.

        The mean of the last checkpoints where one was asked for, else the best by validation, else the last; of the
        moving average where there is one.
        """
        chosen: dict[str, dict[str, Tensor]] = {}
        self.on_main(lambda: chosen.update(self._choose()))
        self._load(self.processes.share(chosen.get("weights", {})))
        if self.average:
            fill(self.model, self.processes.share(chosen.get("ema", {})))
        self.on_main(lambda: str(self.checkpoints.save_final(step, self.model.state_dict(), {})))

    def _choose(self) -> dict[str, dict[str, Tensor]]:
        kinds = ("weights", "ema") if self.average else ("weights",)
        if self.settings.average > 1:
            steps = self.checkpoints.newest(self.settings.average)
            last = [self.checkpoints.load(number, kinds) for number in steps]
            return {kind: average(last, kind) for kind in kinds}
        best = self.checkpoints.best(kinds)
        assert best is not None, "a run ends with a checkpoint"
        return best.tensors

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit the model: {error}") from None
