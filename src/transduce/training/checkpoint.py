"""The tensors and facts of a run enter; the newest whole checkpoint, the best one or their mean leaves.

checkpoints/step-00000500/   weights.safetensors optimiser.safetensors ema.safetensors state.json manifest.json
checkpoints/final/           weights.safetensors state.json manifest.json: what a finished run ended with
checkpoints/best.json        which step was best on the development set
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.disk import TEMPORARY, replace_file
from transduce.errors import InputError
from transduce.training.folder import (
    DamageError,
    Tensors,
    read_folder,
    remove,
    write_folder,
)

BROKEN = "broken-"


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    facts: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]  # weights, optimiser, ema: by name

    @property
    def weights(self) -> dict[str, Tensor]:
        """What to predict with: the moving average where one is kept."""
        return {**self.tensors["weights"], **self.tensors.get("ema", {})}


class Checkpoints:
    """The checkpoints of one run. Readers change nothing on the disk; only `clean`, `save` and `mark_best` do."""

    def __init__(self, folder: str | Path, keep: int = 3, every: int = 1) -> None:
        self.folder = Path(folder)
        self.keep = keep  # newest ones kept, besides the best
        self.every = every  # only multiples of it count among them: an interruption pushes none of them out

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, oldest first."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def load(self, step: int, only: Sequence[str] | None = None) -> Checkpoint:
        """The checkpoint of this step, or an error that says what is wrong with it."""
        try:
            return _open(self.path(step), only)
        except DamageError as error:
            raise InputError(f"damaged checkpoint: {error}", where=str(self.path(step))) from None

    def latest(self, only: Sequence[str] | None = None) -> Checkpoint | None:
        """The newest one that is whole; damaged ones are passed over with a warning. None: there is none yet."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                return _open(self.path(step), only)
            except DamageError as error:
                warnings.warn(f"{self.path(step)} is damaged ({error}): using the one before it", stacklevel=2)
        if steps:
            raise InputError(
                f"all {len(steps)} checkpoints are damaged",
                where=str(self.folder),
                remedy="restore the folder from a copy, or remove it and train again",
            )
        return None

    def best_step(self) -> int | None:
        try:
            return int(json.loads((self.folder / "best.json").read_bytes())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def best(self, only: Sequence[str] | None = None) -> Checkpoint | None:
        """The best one by validation, else the newest that is whole."""
        step = self.best_step()
        if step is not None:
            try:
                return _open(self.path(step), only)
            except DamageError as error:
                warnings.warn(f"{self.path(step)}, the best, is damaged ({error}): using the newest", stacklevel=2)
        return self.latest(only)

    def final(self) -> Checkpoint | None:
        """What a finished run ended with: the averaged, the best or the last weights."""
        folder = self.folder / "final"
        try:
            return _open(folder, None) if folder.is_dir() else None
        except DamageError as error:
            warnings.warn(f"{folder} is damaged ({error})", stacklevel=2)
            return None

    def chosen(self) -> Checkpoint | None:
        """The weights to predict with: the final ones, else the best so far."""
        return self.final() or self.best(only=("weights", "ema"))

    def save(self, step: int, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]) -> Path:
        """Writes one checkpoint; whatever happens while it does, the earlier ones stay whole."""
        place = self.path(step)
        write_folder(place, tensors, {**facts, "step": step})
        return place

    def save_final(self, step: int, weights: Tensors, facts: Mapping[str, Any]) -> Path:
        place = self.folder / "final"
        write_folder(place, {"weights": weights}, {**facts, "step": step})
        return place

    def drop_final(self) -> None:
        remove(self.folder / "final")

    def mark_best(self, step: int, value: float) -> None:
        """A small file, replaced in one move."""
        content = json.dumps({"step": step, "value": value}).encode()
        try:
            replace_file(self.folder / "best.json", content)
        except OSError as error:
            raise InputError(f"cannot write: {error}", where=str(self.folder / "best.json")) from error

    def prune(self) -> None:
        """Drops all but the newest, the best, and the newest `keep` multiples of `every`."""
        steps = self.steps()
        kept = {*steps[-1:], *[step for step in steps if step % self.every == 0][-self.keep :], self.best_step()}
        for step in steps:
            if step not in kept:
                try:
                    remove(self.path(step))
                except OSError as error:  # a full checkpoint too many is no reason to stop training
                    warnings.warn(f"cannot remove {self.path(step)}: {error}", stacklevel=2)

    def newest(self, count: int) -> list[int]:
        """The steps that averaging takes: the last one and the multiples of `every` before it."""
        steps = self.steps()
        return [*[step for step in steps[:-1] if step % self.every == 0], *steps[-1:]][-count:]

    def clean(self) -> None:
        """Before training goes on: what a killed process left half-written goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def set_aside_after(self, step: int) -> None:
        """Training resumes at `step`: later checkpoints are damaged ones, kept under another name for the curious."""
        for later in self.steps():
            if later > step:
                place = self.path(later)
                remove(place.with_name(BROKEN + place.name))
                os.replace(place, place.with_name(BROKEN + place.name))


def _open(folder: Path, only: Sequence[str] | None) -> Checkpoint:
    tensors, facts = read_folder(folder, only)
    return Checkpoint(folder, int(facts["step"]), facts, tensors)


def average(checkpoints: Sequence[Checkpoint], name: str = "weights") -> dict[str, Tensor]:
    """The mean of their weights, summed in double precision; whole numbers are the last checkpoint's."""
    last = checkpoints[-1].tensors[name]
    result = {}
    for key, tensor in last.items():
        if tensor.is_floating_point():
            total = torch.zeros(tensor.shape, dtype=torch.float64)
            for checkpoint in checkpoints:
                total += checkpoint.tensors[name][key]
            tensor = (total / len(checkpoints)).to(tensor.dtype)
        result[key] = tensor
    return result
