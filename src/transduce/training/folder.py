"""Named tensors and facts enter; a folder leaves that is whole or absent, and that is checked when it is read.

A folder is written beside its place, synced to the disk and renamed into it; manifest.json, written last, holds the
size and the SHA-256 of every other file. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transduce.disk import TEMPORARY, sync, write_file
from transduce.errors import InputError

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
