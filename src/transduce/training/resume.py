"""Training state: progress, and saving and restoring it with the model and the optimiser."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from transduce.data.batching import DataPosition
from transduce.errors import InputError
from transduce.recipe import TrainingRecipe
from transduce.training.checkpoint import SHARD, Checkpoint, CheckpointManager, average_checkpoints
from transduce.training.distributed import Processes, all_sharded_like, gathered
from transduce.training.optimisers import (
    ExponentialMovingAverage,
    Plateau,
    copy_parameters,
    load_optimiser_state,
    optimiser_state,
)
from transduce.training.update import UpdateResult

if TYPE_CHECKING:
    from transduce.training.fsdp import ShardedModel, ShardedSave

FIRST_BATCH = "the first batch"
FIXED = frozenset({"model", "training.optimiser.kind", "training.ema"})  # the tensors of a checkpoint depend on them


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
    planned_steps: int | None = None  # with a time budget: the updates that it allows, as estimated last
    position: DataPosition = field(default_factory=DataPosition)  # of the next batch
    best_step: int | None = None
    best_value: float | None = None
    stale_validations: int = 0  # since the best one
    plateau_step: int | None = None  # with warmup_stable_decay: the update after which patience ran out
    validated_step: int = 0  # step of the last validation
    best_scores: dict[str, float | None] = field(default_factory=dict)
    plateau: Plateau = field(default_factory=Plateau)
    consecutive_nonfinite: int = 0  # non-finite updates in a row
    skipped_updates: int = 0  # all non-finite updates
    rollbacks: int = 0  # returns to a checkpoint because of non-finite updates
    rate_factor: float = 1.0  # of the learning rate: lower after each of them
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
class Provenance:
    """What the weights of a run come from besides the settings of the trainer. Every checkpoint records it."""

    recipe: Mapping[str, Any] | None = None  # as JSON
    data: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the data sets, by their recipe key
    allowed_changes: Sequence[str] = ()  # recipe keys, or sections, that may have changed since


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether a recipe key, or a section that contains it, is among the allowed ones."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


@dataclass(frozen=True)
class Restored:
    """The result of restoring a training state."""

    progress: Progress
    resumed: bool  # False: there was no checkpoint, training starts
    notices: list[tuple[str, str]]  # kinds of events and texts: damaged checkpoints, accepted changes, the environment


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
    first_batch: str  # its fingerprint
    provenance: Provenance = field(default_factory=Provenance)
    sharded: ShardedModel | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.saving: ShardedSave | None = None  # the checkpoint that is written in the background
        self.ema: ExponentialMovingAverage | None = None
        self.checkpoints.keep = max(self.settings.keep, self.settings.average_checkpoints)
        self.checkpoints.every = self.settings.checkpoint_every

    def restore(self) -> Restored:
        """Loads the newest undamaged checkpoint; without one, every process gets the weights of the first."""
        loaded: list[Checkpoint] = []
        state, notices = self.processes.on_main(lambda: self._load_latest(loaded))
        if state is None:
            if self.sharded is None:  # else the model got them before it was sharded
                self._load_weights(self.processes.broadcast_tensors(self.model.state_dict()))
            self.ema = ExponentialMovingAverage(self.model, self.settings.ema) if self.settings.ema > 0 else None
            return Restored(Progress(), False, notices)
        shards = self.processes.on_main(lambda: str(loaded[0].folder) if not loaded[0].tensors else "")
        if shards:
            tensors = self._read_shards(Path(shards))
        else:
            groups = self.processes.on_main(lambda: list(loaded[0].tensors))
            found = loaded[0].tensors if loaded else {}
            tensors = {group: self.processes.broadcast_tensors(found.get(group, {})) for group in groups}
        self._load_weights(tensors["weights"])
        self.ema = ExponentialMovingAverage(self.model, self.settings.ema) if self.settings.ema > 0 else None
        load_optimiser_state(self.optimiser, self.model, tensors.get("optimiser", {}))
        if self.ema:
            self.ema.restore(all_sharded_like(tensors.get("ema", {}), self.ema.values))
        return Restored(Progress.from_json(state["progress"]), True, notices)

    def _read_shards(self, folder: Path) -> dict[str, dict[str, Tensor]]:
        """The tensor groups of a sharded checkpoint, sharded as the model is: each process reads its part."""
        from transduce.training.fsdp import load_shards, shard_shapes

        references = self.model.state_dict()
        flat: dict[str, Tensor] = {}
        for key, shape in shard_shapes(folder).items():
            group, _, name = key.partition("/")
            reference = references.get(name.rpartition(".")[0] if group == "optimiser" else name)
            alike = reference is not None and reference.shape == shape
            flat[key] = torch.zeros_like(reference) if alike else torch.zeros(shape)  # type: ignore[arg-type]
        load_shards(folder, flat)
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in flat.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        groups["weights"] |= {name: groups["weights"][first] for name, first in self._aliases().items()}
        return groups

    def _aliases(self) -> dict[str, str]:
        """The other names of tied weights, with their first name; of those that a checkpoint has (adapters: few)."""
        first: dict[int, str] = {}
        named, saved = self.model.named_parameters(remove_duplicate=False), self.model.state_dict().keys()
        return {name: one for name, p in named if name in saved and (one := first.setdefault(id(p), name)) != name}

    def _load_latest(self, loaded: list[Checkpoint]) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
        """Appends the newest undamaged checkpoint to `loaded`, after checking that it belongs to this run."""
        self.checkpoints.remove_incomplete()
        self.checkpoints.bind()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint = self.checkpoints.latest() if self.sharded is None else self._latest_for_shards()
        notices = [("damaged", str(warning.message)) for warning in caught]
        if checkpoint is None:
            return None, notices
        loaded.append(checkpoint)
        changed = self._accepted_changes(checkpoint)
        notices += [("changed", f"{name} has changed, as allowed") for name in changed]
        notices += [("environment", text) for text in self._environment_changes(checkpoint)]
        self.checkpoints.quarantine_after(checkpoint.step)
        progress = Progress.from_json(checkpoint.state["progress"])
        if changed & {FIRST_BATCH, "data.train"}:  # the position is one in data that no longer exist
            progress.position = DataPosition(progress.position.epoch + 1)
        if changed & {"data.train", "data.dev"}:  # scores on other data: the next validation is the best
            progress.best_value = None
        elif progress.best_step is not None and progress.best_value is not None:
            self.checkpoints.mark_best(progress.best_step, progress.best_value)
        return {**checkpoint.state, "progress": progress.to_json()}, notices

    def _latest_for_shards(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; without tensors if it is sharded, as each process reads its part."""
        checkpoint = self.checkpoints.latest(only=())
        if checkpoint is None or any(checkpoint.folder.glob(f"{SHARD}*")):
            return checkpoint
        return self.checkpoints.load(checkpoint.step)

    def _accepted_changes(self, checkpoint: Checkpoint) -> set[str]:
        """What has changed since the checkpoint and is allowed; any other change is an error."""
        saved, allowed = checkpoint.state["identity"], self.provenance.allowed_changes
        changed = {name: value for name, value in self._identity().items() if saved.get(name) != value}
        for name, value in changed.items():
            option = "data" if name == FIRST_BATCH else name
            follows = name == FIRST_BATCH and bool(allowed)  # from a change that was allowed by its own name
            if name not in FIXED and (follows or is_allowed(option, allowed)):
                continue
            way = "" if name in FIXED else f", or accept it with --allow-change {option}"
            raise InputError(
                f"cannot resume: {name} was {saved.get(name)} and is now {value}",
                where=str(checkpoint.folder),
                remedy=f"restore it, start a new run{way}",
            )
        return set(changed)

    def _environment_changes(self, checkpoint: Checkpoint) -> list[str]:
        """Differences that may change the last bits of the result."""
        saved = checkpoint.state.get("environment", {})
        changed = [
            f"{name}: {saved.get(name)} -> {value}"
            for name, value in self.environment.items()
            if saved.get(name) != value
        ]
        if not changed:
            return []
        return [f"the last bits may differ from those of an uninterrupted run: {'; '.join(changed)}"]

    def _identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed."""
        settings = self.settings
        shapes = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in self.model.state_dict().items()]
        return {
            **self.provenance.data,
            FIRST_BATCH: self.first_batch,
            "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "training.seed": settings.seed,
            "training.batch_tokens": settings.batch_tokens,
            "training.bucket_batches": settings.bucket_batches,
            "training.optimiser.kind": settings.optimiser.kind,
            "training.ema": settings.ema,
        }

    def save(self, progress: Progress, seconds: float) -> None:
        """Saves a checkpoint of this step, unless the run was resumed from it: then the weights are the same.

        With FSDP this returns when the tensors are copied; the checkpoint counts when it is on the disk.
        """
        self.finish_saving()
        state = {**self._record(), "progress": {**progress.to_json(), "seconds": seconds}}
        state["best"] = {"step": progress.best_step}

        def is_new() -> bool:
            recorded = self.checkpoints.recorded("best", final=False)
            return progress.step not in self.checkpoints.steps() or recorded != state["best"]

        best = progress.best_value if progress.best_step == progress.step else None
        if self.sharded is not None and self.processes.on_main(is_new):
            self._save_shards(self.sharded, progress.step, state, partial(self._publish, progress.step, best))
            return

        def write() -> None:
            if self.sharded is None and is_new():
                self.checkpoints.save(progress.step, self._groups(), state)
                self.checkpoints.remove_final()  # of an earlier end of this run, which now continues
            self._publish(progress.step, best)

        self.processes.on_main(write)

    def _groups(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of a checkpoint."""
        groups: dict[str, Mapping[str, Tensor]] = {
            "weights": self.model.state_dict(),
            "optimiser": optimiser_state(self.optimiser, self.model),
        }
        return {**groups, "ema": self.ema.values} if self.ema else groups

    def _publish(self, step: int, best: float | None) -> None:
        """What follows from a checkpoint that is on the disk."""
        if best is not None:
            self.checkpoints.mark_best(step, best)
        self.checkpoints.prune()

    def _save_shards(
        self, sharded: ShardedModel, step: int, state: Mapping[str, Any], publish: Callable[[], None]
    ) -> None:
        from transduce.training.fsdp import ShardedSave

        part, aliases = Path(self.processes.on_main(lambda: str(self.checkpoints.begin_shards(step)))), self._aliases()
        tensors = {
            f"{group}/{name}": sharded.on_cpu(tensor)
            for group, content in self._groups().items()
            for name, tensor in content.items()
            if group != "weights" or name not in aliases
        }

        def complete() -> None:
            if self.processes.is_main:
                self.checkpoints.complete_shards(step, state, aliases)
                self.checkpoints.remove_final()
                publish()

        self.saving = ShardedSave(tensors, part, sharded.save_group, complete)

    def finish_saving(self) -> None:
        """Waits until the checkpoint that is written in the background is on the disk."""
        saving, self.saving = self.saving, None
        if saving is not None:
            self.processes.on_main(saving.wait)
            if not self.processes.is_main:
                saving.wait()

    def _record(self) -> dict[str, Any]:
        """What a checkpoint records besides the progress."""
        record = {"identity": self._identity(), "environment": dict(self.environment)}
        return record if self.provenance.recipe is None else {**record, "recipe": self.provenance.recipe}

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights of the moving average, if there is one."""
        return self.ema.swapped(self.model) if self.ema else nullcontext()

    def load_best(self) -> None:
        """The weights of the best validation, else the last ones; of the moving average if there is one."""
        self._load(lambda groups: self._best(groups).tensors)

    def load_mean(self) -> int:
        """The mean of the last checkpoints, as many as `training.average_checkpoints` says; their number."""
        steps = self.checkpoints.steps_to_average(self.settings.average_checkpoints)

        def mean(groups: Sequence[str]) -> dict[str, dict[str, Tensor]]:
            last = [self.checkpoints.load(step, groups) for step in steps]
            return {group: average_checkpoints(last, group) for group in groups}

        self._load(mean)
        return len(steps)

    def save_final(self, step: int) -> None:
        """Saves the present weights as those of the finished run."""
        weights = {name: gathered(tensor) for name, tensor in self.model.state_dict().items()}
        weights |= {name: weights[first] for name, first in self._aliases().items()}
        self.processes.on_main(lambda: str(self.checkpoints.save_final(step, weights, self._record())))

    def _best(self, groups: Sequence[str]) -> Checkpoint:
        best = self.checkpoints.best(groups)
        assert best is not None, "a finished run has a checkpoint"
        return best

    def _load(self, read: Callable[[Sequence[str]], Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Reads tensor groups in the first process and loads them into the model of every process."""
        self.finish_saving()
        groups = ("weights", "ema") if self.ema else ("weights",)
        found: dict[str, Mapping[str, Tensor]] = {}
        self.processes.on_main(lambda: found.update(read(groups)))
        self._load_weights(self.processes.broadcast_tensors(dict(found.get("weights", {}))))
        if self.ema:
            values = self.processes.broadcast_tensors(dict(found.get("ema", {})))
            copy_parameters(self.model, all_sharded_like(values, self.ema.values))

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self.model.load_state_dict(all_sharded_like(weights, self.model.state_dict()))
        except RuntimeError as error:
            raise InputError(f"the checkpoint does not fit the model: {error}") from None
