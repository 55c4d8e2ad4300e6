"""Run directory: recipe, tokenizers, log, metrics, learning curves, checkpoints, and the lock of its training."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.parsing import read_json
from transduce.recipe import Recipe, changed_keys, describe_changes, dump, load, override, parse
from transduce.storage import is_alive, make_folder, replace_file, staged_folder
from transduce.storage.folder_lock import SILENCE, FolderLock, read_holder
from transduce.training.checkpoint import CheckpointManager
from transduce.training.distributed import Processes

MAX_METRICS = 64 * 2**20  # bytes of metrics.json
LOCK_FILE = "training.lock"


@dataclass(frozen=True)
class Run:
    """The files of one training run."""

    folder: Path

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.json"

    @property
    def curves(self) -> Path:
        return self.folder / "curves.png"

    @property
    def ensemble_file(self) -> Path:
        return self.folder / "ensemble.json"

    def tokenizer_file(self, side: str) -> Path:
        return self.folder / f"tokenizer.{side}.json"

    @property
    def checkpoints(self) -> CheckpointManager:
        files = (self.recipe_file, self.tokenizer_file("source"), self.tokenizer_file("target"))
        return CheckpointManager(self.folder / "checkpoints", run_files=files)

    @property
    def exists(self) -> bool:
        return self.recipe_file.is_file()

    @property
    def is_ensemble(self) -> bool:
        """Whether the folder is that of an ensemble or a search, or one where their training has begun."""
        begun = (self.ensemble_file.name, "members", "trials")
        return not self.exists and any((self.folder / name).exists() for name in begun)

    @property
    def prepared(self) -> bool:
        return all(self.tokenizer_file(side).is_file() for side in ("source", "target"))

    def recipe(self) -> Recipe:
        """The completed recipe of the run, which must be the one that its weights were saved with."""
        if not self.exists and (members := self.members()):
            raise InputError(
                f"an ensemble of {len(members)} runs, where one model is needed",
                where=str(self.folder),
                remedy=f"give one of its members, such as {members[0]}, or distil it: transduce distil {self.folder}",
            )
        if not self.exists:
            raise InputError(
                "not a run directory: it has no recipe.yaml",
                where=str(self.folder),
                remedy="give the folder that `transduce train` wrote",
            )
        if problem := self.checkpoints.mismatch(self.recipe_file):
            changes = "".join(f"\n  {line}" for line in self._edits())
            raise InputError(
                f"not the recipe that the weights were saved with: {problem}{changes}",
                where=str(self.recipe_file),
                remedy=f"restore it: transduce edit-recipe {self.folder}; the same with key=value changes a key",
            )
        return load(self.recipe_file)

    def _edits(self) -> list[str]:
        """How recipe.yaml differs from the recipe of the newest weights, a line for each key."""
        recorded = self.checkpoints.recorded("recipe")
        try:
            return [] if recorded is None else describe_changes(changed_keys(parse(recorded), load(self.recipe_file)))
        except InputError as error:
            return [error.problem]

    def recorded_recipe(self) -> Recipe:
        """The recipe that the newest weights were saved with, also where recipe.yaml was changed or damaged since."""
        recorded = self.checkpoints.recorded("recipe")
        if recorded is None or (self.exists and not self.checkpoints.mismatch(self.recipe_file)):
            return self.recipe()
        return parse(recorded, where=str(self.recipe_file))

    def edit_recipe(self, overrides: Sequence[str]) -> list[str]:
        """Restores recipe.yaml where it was changed, applies the overrides, and binds the weights to the result.

        Returns a line for each key that was changed on purpose.
        """
        recorded = self.recorded_recipe()
        edited = parse(override(recorded.model_dump(mode="json"), overrides), where=str(self.recipe_file))
        changes = changed_keys(recorded, edited)
        for key in changes:
            if key.partition(".")[0] in ("model", "tokens"):
                raise InputError(
                    f"the weights belong to their {key}",
                    where=str(self.folder),
                    remedy=f"train a new run with it; init.model={self.folder} starts from these weights",
                )
        self.save_recipe(edited)
        self.checkpoints.rebind()
        return describe_changes(changes)

    def save_recipe(self, recipe: Recipe) -> None:
        """Writes the recipe atomically."""
        make_folder(self.folder)
        replace_file(self.recipe_file, dump(recipe).encode())

    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Source and target tokenizer; one object if both sides share a vocabulary."""
        if not self.prepared:
            raise InputError(
                "the tokenizers are missing",
                where=str(self.folder),
                remedy="the run is damaged or was interrupted before training: train it again with --resume",
            )
        for side in ("source", "target"):
            if problem := self.checkpoints.mismatch(self.tokenizer_file(side)):
                raise InputError(
                    f"not the tokenizer that the weights were saved with: {problem}",
                    where=str(self.tokenizer_file(side)),
                    remedy="restore it from a backup, or train again",
                )
        source, target = (Tokenizer.load(self.tokenizer_file(side)) for side in ("source", "target"))
        return (source, source) if source.fingerprint == target.fingerprint else (source, target)

    def save_tokenizers(self, source: Tokenizer, target: Tokenizer) -> None:
        source.save(self.tokenizer_file("source"))
        target.save(self.tokenizer_file("target"))

    def save_model(
        self, recipe: Recipe, tokenizers: tuple[Tokenizer, Tokenizer], weights: Mapping[str, Tensor], step: int = 0
    ) -> None:
        """Writes a finished run: tokenizers, recipe, and last the weights, which are bound to them."""
        make_folder(self.folder)
        self.save_tokenizers(*tokenizers)
        self.save_recipe(recipe)
        self.checkpoints.save_final(step, weights, {"recipe": recipe.model_dump(mode="json")})

    def members(self) -> list[Path]:
        """The runs of an ensemble; empty where this is a single run."""
        remedy = "train the ensemble again with --resume"
        if not os.path.isfile(self.ensemble_file):  # false for a path that no file can have, too
            return []
        content = read_json(self.ensemble_file, max_bytes=MAX_METRICS, remedy=remedy)
        names = content.get("members") if isinstance(content, dict) else None
        if not isinstance(names, list) or not names or not all(map(_is_below, names)):
            raise InputError("it names no members below its folder", where=str(self.ensemble_file), remedy=remedy)
        return [self.folder / name for name in names]

    def save_members(self, folders: Sequence[Path]) -> None:
        """Makes this folder an ensemble of runs below it."""
        names = [folder.relative_to(self.folder).as_posix() for folder in folders]
        replace_file(self.ensemble_file, (json.dumps({"members": names}, indent=2) + "\n").encode())

    def metrics(self) -> dict[str, Any]:
        """The scores of a finished run; empty before its evaluation."""
        remedy = "remove the file: `transduce evaluate` computes the scores again"
        try:
            content = read_json(self.metrics_file, max_bytes=MAX_METRICS, remedy=remedy)
        except FileNotFoundError:
            return {}
        if not isinstance(content, dict):
            raise InputError("expected a JSON object", where=str(self.metrics_file), remedy=remedy)
        return content

    @property
    def in_training(self) -> bool:
        """Whether a process that is alive holds the lock of this run."""
        try:
            with (self.folder / LOCK_FILE).open("rb") as lock:
                holder, silence = read_holder(lock.fileno()), time.time() - os.fstat(lock.fileno()).st_mtime
        except OSError:
            return False
        if holder.get("host") != socket.gethostname():
            return silence < SILENCE
        return isinstance(holder.get("pid"), int) and is_alive(holder["pid"])

    def save_metrics(self, content: dict[str, Any]) -> None:
        replace_file(self.metrics_file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _is_below(name: Any) -> bool:
    """Whether this is the relative path of a folder below another."""
    return isinstance(name, str) and bool(parts := Path(name).parts) and not {"/", ".."} & {*parts}


@contextmanager
def new_run(folder: str | Path) -> Iterator[Run]:
    """A run that appears in `folder`, which must not have one yet, when the block ends without an error."""
    run = Run(Path(folder))
    if run.exists or run.checkpoints.steps():
        raise InputError("there is already a run here", where=str(folder), remedy="give another folder")
    with staged_folder(folder) as part:
        yield Run(part)


class RunLock(FolderLock):
    """The lock of a run directory, which a training holds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder / LOCK_FILE,
            "is training",
            "wait until it ends, or stop it (SIGTERM saves a checkpoint), and continue the run with --resume; "
            "to train another model, give another --run",
        )


@contextmanager
def lock_run(folder: Path, processes: Processes) -> Iterator[RunLock]:
    """Inside, this run belongs to these processes: the first of them holds the lock for all."""
    lock = RunLock(folder)
    processes.on_main(lock.acquire)
    try:
        yield lock
    finally:
        lock.release()
