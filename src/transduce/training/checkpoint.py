"""The tensors and facts of a run enter; the newest whole checkpoint, the best one or their mean leaves.

checkpoints/step-00000500/   weights.safetensors optimiser.safetensors ema.safetensors state.json manifest.json
checkpoints/final/           weights.safetensors state.json manifest.json: what a finished run ended with
checkpoints/best.json        which step was best on the development set
"""

from __future__ import annotations

import hashlib
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transduce.errors import InputError
from transduce.storage import TEMPORARY, replace_file, sync, write_file

FORMAT = 1
Tensors = Mapping[str, Tensor]


class DamageError(Exception):
    """This folder is not the one that was written."""


def write_folder(place: Path, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]) -> None:
    """One file for each entry of `tensors`, and the facts; a folder already in that place is replaced."""
    part, old = place.with_name(TEMPORARY + place.name), place.with_name(f"{TEMPORARY}old-{place.name}")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name, content in tensors.items():
            _write_tensors(part / f"{name}.safetensors", content)
        write_file(part / "state.json", _encode({"format": FORMAT, "facts": dict(facts)}))
        files = {path.name: _describe(path) for path in sorted(part.iterdir())}
        write_file(part / "manifest.json", _encode({"format": FORMAT, "files": files}))
        sync(part)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(place, old)
        os.replace(part, place)
        sync(place.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise InputError(
            f"cannot write the checkpoint: {error}",
            where=str(place),
            remedy="earlier checkpoints are untouched: make room on the disk and resume",
        ) from error


def read_folder(folder: Path, only: Sequence[str] | None = None) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors (those named in `only`) and facts, after every file was checked; else a `DamageError`."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        for name, expected in files.items():
            if _describe(folder / name) != expected:
                raise DamageError(f"{name} is not as it was written")
        state = json.loads((folder / "state.json").read_bytes())
        if "state.json" not in files or "weights.safetensors" not in files or state["format"] != FORMAT:
            raise DamageError("its manifest or its format is not known")
        kinds = [name.removesuffix(".safetensors") for name in files if name.endswith(".safetensors")]
        wanted = [kind for kind in kinds if only is None or kind in only]
        return {kind: _read_tensors(folder / f"{kind}.safetensors") for kind in wanted}, state["facts"]
    except FileNotFoundError as error:
        raise DamageError(f"{Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamageError(f"unreadable: {error}") from None


def _write_tensors(path: Path, tensors: Tensors) -> None:
    """Tied tensors are written once; the other names stand in the file's own metadata."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in names:
            aliases[name] = names[place]
            continue
        names[place] = name
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        # Two views of one buffer (the flat weights of a fused LSTM) must not look like tied tensors.
        kept[name] = tensor.detach().cpu().contiguous() if whole else tensor.detach().cpu().clone().contiguous()
    save_file(kept, path, metadata={"aliases": json.dumps(aliases)})
    os.chmod(path, 0o644)  # the library writes 0600
    sync(path)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        # Copies: the file may be pruned or replaced while its memory map is still in use.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    return tensors | {name: tensors[original] for name, original in aliases.items()}


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode()


def remove(folder: Path) -> None:
    """First renamed away, so that a killed removal leaves nothing that looks like a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f"{TEMPORARY}old-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
        shutil.rmtree(doomed)


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
