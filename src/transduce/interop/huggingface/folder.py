"""A folder from elsewhere in; its JSON files, and the names, shapes and numbers of its weights out, never any code.

Everything is checked before room is made for it: sizes of files, headers, offsets, and that no name leads outside.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transduce.errors import InputError

LONGEST_JSON = 64 * 2**20  # bytes of a configuration or a tokenizer
LONGEST_HEADER = 16 * 2**20  # bytes of the names and shapes of one file of weights
NUMBERS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # kinds of numbers that weights may be, in bytes
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


@dataclass(frozen=True)
class Stored:
    """One weight as its file announces it."""

    file: Path
    name: str  # there
    shape: tuple[int, ...]
    kind: str  # F32, F16 ...


def inside(folder: Path, name: str) -> Path:
    """A file of this very folder: no other folder, and no link that leads out of it."""
    path = folder / name
    if Path(name).name != name or name in ("", ".", ".."):
        raise InputError(f"{name!r} lies outside this folder", where=str(folder), remedy="all files belong in it")
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise InputError(
            "this link leads out of its folder",
            where=str(path),
            remedy="if you trust it, make a copy with the files themselves: cp -rL FOLDER COPY",
        )
    return path


def read_text(folder: Path, name: str) -> bytes:
    """What a small file holds."""
    path = inside(folder, name)
    if path.stat().st_size > LONGEST_JSON:
        raise InputError(f"larger than {LONGEST_JSON:,} bytes", where=str(path), remedy="this is no such file")
    return path.read_bytes()


def read_json(folder: Path, name: str, *, needed: bool = False) -> dict[str, Any]:
    """The object in a JSON file; an empty one where the file is missing and not needed."""
    path = inside(folder, name)
    if not path.is_file():
        if needed:
            raise InputError(
                f"there is no {name}",
                where=str(folder),
                remedy="a Hugging Face folder has config.json, model.safetensors and tokenizer.json",
            )
        return {}
    try:
        content = json.loads(read_text(folder, name))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not readable as JSON: {error}", where=str(path), remedy="fetch it again") from None
    if not isinstance(content, dict):
        raise InputError("expected a JSON object", where=str(path), remedy="fetch it again")
    return content


def list_weights(folder: Path) -> dict[str, Stored]:
    """Every weight by its name, from one file or from the several that an index names."""
    if inside(folder, WEIGHTS).is_file():
        return _header(folder / WEIGHTS)
    content = read_json(folder, INDEX)
    if not content:
        raise _no_weights(folder)
    listed = content.get("weight_map")
    if not isinstance(listed, Mapping) or not all(isinstance(file, str) for file in listed.values()):
        raise InputError("it has no weight_map of names to files", where=str(folder / INDEX), remedy="fetch it again")
    found: dict[str, Stored] = {}
    for file in sorted(set(listed.values())):
        path = inside(folder, file)
        if not path.is_file():
            raise InputError(f"the index names {file}, which is missing", where=str(folder), remedy="fetch it")
        for name, stored in _header(path).items():
            if listed.get(name) != file:
                raise InputError(f"{name} is in {file}, but not so in the index", where=str(folder / INDEX))
            found[name] = stored
    if missing := sorted(set(listed) - set(found)):
        raise InputError(f"{missing[0]} is in the index, but in no file", where=str(folder / INDEX))
    return found


def _no_weights(folder: Path) -> InputError:
    pickled = next((name for name in PICKLED if (folder / name).exists()), None)
    if pickled is None:
        return InputError(f"there is no {WEIGHTS}", where=str(folder), remedy=f"nor {INDEX}: fetch one of them")
    return InputError(
        f"its weights are in {pickled}, which can run code when it is opened",
        where=str(folder),
        remedy="take the safetensors file of the same model; or convert it in a machine you can lose: "
        "torch.load(FILE, weights_only=True), then safetensors.torch.save_file",
    )


def _header(path: Path) -> dict[str, Stored]:
    """Names and shapes of a file of weights, once they were found to fit the bytes that are there."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 0 < length <= min(size - 8, LONGEST_HEADER):
            problem = f"its header would be {length:,} bytes long" if length else "too short"
            raise InputError(f"not a safetensors file: {problem}", where=str(path), remedy="fetch it again")
        try:
            content = json.loads(file.read(length))
            entries = {name: entry for name, entry in content.items() if name != "__metadata__"}
            found = {
                name: (str(entry["dtype"]), tuple(map(int, entry["shape"])), tuple(map(int, entry["data_offsets"])))
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"its header is damaged: {error}", where=str(path), remedy="fetch it again") from None
    for name, (kind, shape, offsets) in found.items():
        begin, end = offsets if len(offsets) == 2 else (0, -1)
        count = 1
        for side in shape:
            count = count * side if side >= 0 else -1
        whole = 0 <= begin <= end <= size - 8 - length
        if not whole or (kind in NUMBERS and count * NUMBERS[kind] != end - begin):
            raise InputError(
                f"{name} does not fit in the file: it was cut, or its header is wrong",
                where=str(path),
                remedy="fetch it again",
            )
    return {name: Stored(path, name, shape, kind) for name, (kind, shape, _) in found.items()}


def read_weight(stored: Stored) -> Tensor:
    """The numbers of one weight, in fp32; numbers that are none are refused."""
    if stored.kind not in NUMBERS:
        raise InputError(
            f"{stored.name} has numbers of the kind {stored.kind}",
            where=str(stored.file),
            remedy=f"weights are {', '.join(NUMBERS)}: take the model before it was quantised",
        )
    try:
        with safe_open(stored.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored.name).to(torch.float32, copy=True)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", where=str(stored.file), remedy="fetch it again") from None
    if not torch.isfinite(tensor).all():
        problem = f"{stored.name} has numbers that are not finite"
        raise InputError(problem, where=str(stored.file), remedy="fetch it again")
    return tensor
