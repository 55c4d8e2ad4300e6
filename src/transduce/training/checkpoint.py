"""Checkpoint directory: atomic writes, hashes, recovery.

checkpoints/step-00000500/   weights.safetensors optimiser.safetensors ema.safetensors state.json manifest.json
                             with FSDP, a file shard-*.safetensors of every process instead of the first three
checkpoints/final/           weights.safetensors state.json manifest.json: the weights of a finished run
checkpoints/best.json        the step with the best validation score, as the state of the newest checkpoint records it

A manifest has the SHA-256 of every file beside it, and of the recipe and the tokenizers that the weights belong to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transduce.errors import InputError
from transduce.storage import TEMPORARY, WriteError, make_folder, replace_file, sync, write_file, write_tensors

FORMAT = 3
SHARD = "shard-"  # prefix of the file of one process, as torch.distributed.checkpoint names it
SHARD_OFFSETS = "DCP_SHARDING_INFO"  # where it records which part of each tensor the file has
REPLACED = f"{TEMPORARY}replaced-"  # prefix of a checkpoint until the one that replaces it has its name
DAMAGED = "damaged-"  # prefix of checkpoints that a resumed run could not read
Tensors = Mapping[str, Tensor]


class DamagedCheckpointError(Exception):
    """A file of the checkpoint is missing or differs from what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of one checkpoint directory."""

    folder: Path
    step: int
    state: dict[str, Any]  # everything but tensors, as JSON
    tensors: dict[str, dict[str, Tensor]]  # groups `weights`, `optimiser`, `ema`; tensors by parameter name

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights for inference: the exponential moving average where there is one."""
        return {**self.tensors["weights"], **self.tensors.get("ema", {})}


class CheckpointManager:
    """The checkpoints of one run.

    Reading never changes the disk; only `remove_incomplete`, `quarantine_after`, the `save` and the `remove` methods,
    `mark_best`, `rebind` and `prune` do.
    """

    def __init__(self, folder: str | Path, keep: int = 3, every: int = 1, *, run_files: Sequence[Path] = ()) -> None:
        self.folder = Path(folder)
        self.run_files = tuple(run_files)  # recipe and tokenizers: manifests have their hashes
        self._run_hashes: dict[str, Any] | None = None
        self.keep = keep  # number of recent checkpoints to keep, in addition to the best one
        # Only multiples of `every` count towards `keep`, so that a checkpoint saved at an interruption displaces none.
        self.every = every

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def load(self, step: int, only: Sequence[str] | None = None) -> Checkpoint:
        """The checkpoint of one step. Raises `InputError` when it is damaged."""
        try:
            return _open(self.path(step), only)
        except DamagedCheckpointError as error:
            raise InputError(f"damaged checkpoint: {error}", where=str(self.path(step))) from None

    def latest(self, only: Sequence[str] | None = None) -> Checkpoint | None:
        """The newest undamaged checkpoint, with a warning for each damaged one. None: the run has no checkpoint."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                return _open(self.path(step), only)
            except DamagedCheckpointError as error:
                warnings.warn(f"{self.path(step)} is damaged ({error}): using the previous one", stacklevel=2)
        if steps:
            raise InputError(
                f"all {len(steps)} checkpoints are damaged",
                where=str(self.folder),
                remedy="restore the folder from a backup, or remove it and train again",
            )
        return None

    def recorded(self, key: str, *, final: bool = True) -> Any:
        """An entry of the newest undamaged state that has it, also of the final weights; None: there is none."""
        for folder in self._newest_first(final):
            with suppress(DamagedCheckpointError, KeyError, TypeError):
                return read_checkpoint(folder, (), check=("state.json",))[1][key]
        return None

    def best_step(self) -> int | None:
        """The step with the best validation score, with a warning where best.json differs from the newest state."""
        path, recorded = self.folder / "best.json", self.recorded("best", final=False)
        named, problem = None, "is missing"
        try:
            named = int(json.loads(path.read_bytes())["step"])
            problem = f"names step {named}"
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"is damaged ({error})"
            if recorded is None:
                remedy = "restore it from a backup, or remove it to use the newest checkpoint"
                raise InputError("damaged: the best checkpoint is unknown", where=str(path), remedy=remedy) from None
        if recorded is None or named == recorded["step"]:
            return named
        best: int | None = recorded["step"]
        warnings.warn(f"{path} {problem}: the newest checkpoint records step {best} as the best", stacklevel=2)
        return best

    def best(self, only: Sequence[str] | None = None) -> Checkpoint | None:
        """The checkpoint with the best validation score, else the newest undamaged one."""
        step = self.best_step()
        if step is not None:
            try:
                return _open(self.path(step), only)
            except DamagedCheckpointError as error:
                warnings.warn(f"{self.path(step)}, the best, is damaged ({error}): using the newest", stacklevel=2)
        return self.latest(only)

    def mismatch(self, path: Path) -> str:
        """How this file of the run differs from the one that the newest weights were saved with; empty: it does not."""
        for folder in self._newest_first():
            try:
                expected = read_manifest(folder)["run"][path.name]
                wanted, found = expected["sha256"], _size_and_hash(path)["sha256"]
            except (DamagedCheckpointError, KeyError, TypeError):  # reported where the weights are read
                continue
            return "" if found == wanted else f"SHA-256 expected {wanted}, found {found}"
        return ""

    def bind(self) -> None:
        """Reads the files of the run: the weights saved from now on belong to them."""
        self._run_hashes = {path.name: _size_and_hash(path) for path in self.run_files}

    def rebind(self) -> None:
        """Binds the saved weights to the files of the run, which were changed on purpose.

        The newest weights come last: after a crash, the change is noticed again.
        """
        self.bind()
        for folder in reversed(self._newest_first()):
            with suppress(DamagedCheckpointError):
                manifest = {**read_manifest(folder), "run": self._run_hashes}
                replace_file(folder / "manifest.json", _encode(manifest))

    def _newest_first(self, final: bool = True) -> list[Path]:
        folders = [self.path(step) for step in reversed(self.steps())]
        return [self.folder / "final", *folders] if final and (self.folder / "final").is_dir() else folders

    def final(self) -> Checkpoint | None:
        """The weights of a finished run: averaged, best or last, as the recipe says."""
        folder = self.folder / "final"
        try:
            return _open(folder, None) if folder.is_dir() else None
        except DamagedCheckpointError as error:
            warnings.warn(f"{folder} is damaged ({error})", stacklevel=2)
            return None

    def for_inference(self) -> Checkpoint | None:
        """The weights to predict with: the final ones, else the best so far."""
        return self.final() or self.best(only=("weights", "ema"))

    def save(self, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> Path:
        """Writes one checkpoint. If the process dies meanwhile, the earlier checkpoints are intact."""
        return self._write(self.path(step), tensors, {**state, "step": step})

    def save_final(self, step: int, weights: Tensors, state: Mapping[str, Any]) -> Path:
        return self._write(self.folder / "final", {"weights": weights}, {**state, "step": step})

    def _write(self, folder: Path, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> Path:
        if self._run_hashes is None:
            self.bind()
        write_checkpoint(folder, tensors, state, self._run_hashes)
        return folder

    def begin_shards(self, step: int) -> Path:
        """The folder in which the processes of a sharded model write their parts of a checkpoint."""
        part = self.path(step).with_name(TEMPORARY + self.path(step).name)
        shutil.rmtree(part, ignore_errors=True)
        return make_folder(part)

    def complete_shards(self, step: int, state: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        """Makes the parts of all processes, which are written now, a checkpoint."""
        if self._run_hashes is None:
            self.bind()
        folder = self.path(step)
        with _reporting(folder):
            part = folder.with_name(TEMPORARY + folder.name)
            _complete(part, folder, {**state, "step": step}, {"run": self._run_hashes, "aliases": dict(aliases)})

    def remove_final(self) -> None:
        _remove(self.folder / "final")

    def mark_best(self, step: int, value: float) -> None:
        """Replaces best.json atomically."""
        replace_file(self.folder / "best.json", json.dumps({"step": step, "value": value}))

    def prune(self) -> None:
        """Removes all but the newest checkpoint, the best one, and the newest `keep` multiples of `every`."""
        steps = self.steps()
        keep = {*steps[-1:], *[step for step in steps if step % self.every == 0][-self.keep :], self.best_step()}
        for step in steps:
            if step not in keep:
                try:
                    _remove(self.path(step))
                except OSError as error:  # one checkpoint too many is no reason to stop training
                    warnings.warn(f"cannot remove {self.path(step)}: {error}", stacklevel=2)

    def steps_to_average(self, count: int) -> list[int]:
        """The last `count` checkpoints: the newest one and the multiples of `every` before it."""
        steps = self.steps()
        return [*[step for step in steps[:-1] if step % self.every == 0], *steps[-1:]][-count:]

    def remove_incomplete(self) -> None:
        """Removes what a killed process left half-written, and puts back a checkpoint that it was replacing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"{REPLACED}*"):
            if not (folder := self.folder / old.name.removeprefix(REPLACED)).exists():
                os.replace(old, folder)
        for entry in [*self.folder.glob(f"*/{TEMPORARY}*"), *self.folder.glob(f"{TEMPORARY}*")]:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def quarantine_after(self, step: int) -> None:
        """Renames the damaged checkpoints that are newer than `step`, where training resumes."""
        for later in self.steps():
            if later > step:
                folder = self.path(later)
                _remove(folder.with_name(DAMAGED + folder.name))
                os.replace(folder, folder.with_name(DAMAGED + folder.name))


def _open(folder: Path, only: Sequence[str] | None) -> Checkpoint:
    tensors, state = read_checkpoint(folder, only)
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, int):
        raise DamagedCheckpointError("state.json has no step")
    return Checkpoint(folder, step, state, tensors)


def average_checkpoints(checkpoints: Sequence[Checkpoint], group: str = "weights") -> dict[str, Tensor]:
    """The mean of the weights, summed in double precision; integer tensors are those of the last checkpoint."""
    last = checkpoints[-1].tensors[group]
    result = {}
    for name, tensor in last.items():
        if tensor.is_floating_point():
            total = torch.zeros(tensor.shape, dtype=torch.float64)
            for checkpoint in checkpoints:
                total += checkpoint.tensors[group][name]
            tensor = (total / len(checkpoints)).to(tensor.dtype)
        result[name] = tensor
    return result


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensors],
    state: Mapping[str, Any],
    run_hashes: Mapping[str, Any] | None = None,
) -> None:
    """Writes one file for each tensor group and the state; an existing folder is replaced atomically."""
    part = folder.with_name(TEMPORARY + folder.name)
    with _reporting(folder):
        shutil.rmtree(part, ignore_errors=True)
        make_folder(part)
        for group, content in tensors.items():
            _write_tensors(part / f"{group}.safetensors", content)
        _complete(part, folder, state, {"run": run_hashes or {}})


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    """Inside, `folder` is written: an error removes the unfinished part of it."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(folder.with_name(TEMPORARY + folder.name), ignore_errors=True)
        remedy = "earlier checkpoints are intact: free space on the disk and resume"
        raise WriteError(folder, error, remedy) from error


def _complete(part: Path, folder: Path, state: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Writes the state, and last the manifest with the hash of every file; then the folder gets its name."""
    old = folder.with_name(REPLACED + folder.name)
    write_file(part / "state.json", _encode({"format": FORMAT, "state": dict(state)}))
    files = {path.name: _size_and_hash(path) for path in sorted(part.iterdir())}
    write_file(part / "manifest.json", _encode({"format": FORMAT, "files": files, **manifest}))
    sync(part)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(part, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Hashes of the files of a checkpoint (`files`), and of the files of its run (`run`)."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        if not {"format", "files", "run"} <= manifest.keys():
            raise DamagedCheckpointError("unknown manifest or format")
    except FileNotFoundError:
        raise DamagedCheckpointError("manifest.json is missing") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"unreadable: {error}") from None
    return manifest


def read_checkpoint(
    folder: Path, only: Sequence[str] | None = None, check: Sequence[str] | None = None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensor groups (those in `only`) and the state, after the hash of every file (in `check`) was checked."""
    try:
        manifest = read_manifest(folder)
        files = manifest["files"]
        for name, expected in files.items():
            if (check is None or name in check) and _size_and_hash(folder / name) != expected:
                raise DamagedCheckpointError(f"{name} differs from what was written")
        content = json.loads((folder / "state.json").read_bytes())
        shards = [folder / name for name in files if name.startswith(SHARD)]
        has_weights = bool(shards) or "weights.safetensors" in files
        if "state.json" not in files or not has_weights or content["format"] != FORMAT:
            raise DamagedCheckpointError("unknown manifest or format")
        if shards:
            return read_shards(shards, manifest["aliases"], only), content["state"]
        groups = [name.removesuffix(".safetensors") for name in files if name.endswith(".safetensors")]
        selected = [group for group in groups if only is None or group in only]
        return {group: _read_tensors(folder / f"{group}.safetensors") for group in selected}, content["state"]
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpointError(f"unreadable: {error}") from None


def _write_tensors(path: Path, tensors: Tensors) -> None:
    """Tied tensors are written once; their other names are stored in the metadata of the file."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in names:
            aliases[name] = names[identity]
            continue
        names[identity] = name
        owns_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
        # Two views of one buffer (the flat weights of a fused LSTM) must not look like tied tensors.
        copy = tensor.detach().cpu()
        unique[name] = copy.contiguous() if owns_storage else copy.clone().contiguous()
    write_tensors(path, unique, {"aliases": json.dumps(aliases)})


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        # Copies: the file may be pruned or replaced while its memory map is still in use.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    return tensors | {name: tensors[original] for name, original in aliases.items()}


def read_shards(
    paths: Sequence[Path], aliases: Mapping[str, str], only: Sequence[str] | None = None
) -> dict[str, dict[str, Tensor]]:
    """The whole tensors of the groups (those in `only`) from the parts that the processes wrote."""
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()[SHARD_OFFSETS])
            for key in file.keys():  # noqa: SIM118
                if only is None or key.partition("/")[0] in only:
                    parts.setdefault(key, []).append((offsets[key]["saved_offsets"], file.get_tensor(key).clone()))
    groups: dict[str, dict[str, Tensor]] = {}
    for key, pieces in parts.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = _assemble(pieces)
    if "weights" in groups:
        groups["weights"] |= {name: groups["weights"][original] for name, original in aliases.items()}
    return groups


def _assemble(pieces: Sequence[tuple[list[int], Tensor]]) -> Tensor:
    """A tensor from its pieces at their offsets."""
    ends = [[offset + size for offset, size in zip(at, piece.shape, strict=True)] for at, piece in pieces]
    whole = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=pieces[0][1].dtype)
    for at, piece in pieces:
        whole[tuple(slice(start, start + size) for start, size in zip(at, piece.shape, strict=True))] = piece
    return whole


def _size_and_hash(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode()


def _remove(folder: Path) -> None:
    """Renames the folder before removing it: a killed removal leaves nothing that looks like a checkpoint."""
    if folder.exists():
        renamed = folder.with_name(f"{TEMPORARY}old-{folder.name}")
        shutil.rmtree(renamed, ignore_errors=True)
        os.replace(folder, renamed)
        shutil.rmtree(renamed)
