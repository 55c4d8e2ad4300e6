"""Checkpoint folder: JSON files and safetensors, read without running code.

Sizes, headers and offsets are checked before memory is allocated, and no name may lead out of the folder.
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
from transduce.parsing import parse_json

MAX_JSON = 64 * 2**20  # bytes of a config or a tokenizer
MAX_HEADER = 16 * 2**20  # bytes of a safetensors header
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # dtypes of weights, with their size in bytes
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
OTHER_LIBRARIES = ("tf_model.h5", "flax_model.msgpack")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the header of its file describes it."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # F32, F16 ...


def inside(folder: Path, name: str) -> Path:
    """The path of a file in this folder: no subfolder, and no symbolic link that leads out of it."""
    path = folder / name
    if Path(name).name != name or name in ("", ".", ".."):
        raise InputError(f"{name!r} is outside this folder", where=str(folder), remedy="all files must be in it")
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise InputError(
            "this symbolic link leads out of its folder",
            where=str(path),
            remedy="if you trust it, copy the files themselves: cp -rL FOLDER COPY",
        )
    return path


def read_text(folder: Path, name: str) -> bytes:
    """The content of a small file."""
    path = inside(folder, name)
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"larger than {MAX_JSON:,} bytes", where=str(path), remedy="this is no such file")
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
    content = parse_json(read_text(folder, name), str(path))
    if not isinstance(content, dict):
        raise InputError("expected a JSON object", where=str(path), remedy="fetch it again")
    return content


def list_weights(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor by name, from one file or from the shards that an index names."""
    if inside(folder, WEIGHTS).is_file():
        return _header(folder / WEIGHTS)
    shards = list_shards(folder, INDEX)
    if not shards:
        raise _no_weights(folder)
    found: dict[str, StoredTensor] = {}
    for file, names in shards.items():
        for name, stored in _header(file).items():
            if name not in names:
                raise InputError(f"{name} is in {file.name}, but the index does not say so", where=str(folder / INDEX))
            found[name] = stored
    if missing := sorted(set().union(*shards.values()) - set(found)):
        raise InputError(f"{missing[0]} is in the index, but in no file", where=str(folder / INDEX))
    return found


def list_shards(folder: Path, index: str) -> dict[Path, set[str]]:
    """The files that an index names, with the tensors of each; empty: there is no index."""
    content = read_json(folder, index)
    if not content:
        return {}
    listed = content.get("weight_map")
    if not isinstance(listed, Mapping) or not all(isinstance(file, str) for file in listed.values()):
        raise InputError("it has no weight_map of names to files", where=str(folder / index), remedy="fetch it again")
    shards: dict[Path, set[str]] = {}
    for file in sorted(set(listed.values())):
        path = inside(folder, file)
        if not path.is_file():
            raise InputError(f"the index names {file}, which is missing", where=str(folder), remedy="fetch it")
        shards[path] = {name for name in listed if listed[name] == file}
    return shards


def pickled_files(folder: Path) -> list[Path]:
    """Files of pickled weights, where the folder has no safetensors."""
    if inside(folder, WEIGHTS).is_file() or inside(folder, INDEX).is_file():
        return []
    one = inside(folder, PICKLED)
    return [one] if one.is_file() else list(list_shards(folder, PICKLED_INDEX))


def _no_weights(folder: Path) -> InputError:
    other = next((name for name in OTHER_LIBRARIES if (folder / name).exists()), None)
    if other is None:
        remedy = f"nor {INDEX}, nor {PICKLED}: fetch one of them"
        return InputError(f"there is no {WEIGHTS}", where=str(folder), remedy=remedy)
    return InputError(
        f"the weights are in {other}, which belongs to another library",
        where=str(folder),
        remedy=f"fetch {WEIGHTS} of the same model",
    )


def _header(path: Path) -> dict[str, StoredTensor]:
    """Names and shapes of a safetensors file, checked against its size."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 0 < length <= min(size - 8, MAX_HEADER):
            problem = f"the header would be {length:,} bytes long" if length else "too short"
            raise InputError(f"not a safetensors file: {problem}", where=str(path), remedy="fetch it again")
        try:
            content = json.loads(file.read(length))
            entries = {name: entry for name, entry in content.items() if name != "__metadata__"}
            found = {
                name: (str(entry["dtype"]), tuple(map(int, entry["shape"])), tuple(map(int, entry["data_offsets"])))
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"the header is damaged: {error}", where=str(path), remedy="fetch it again") from None
    for name, (dtype, shape, offsets) in found.items():
        begin, end = offsets if len(offsets) == 2 else (0, -1)
        count = 1
        for side in shape:
            count = count * side if side >= 0 else -1
        in_file = 0 <= begin <= end <= size - 8 - length
        if not in_file or (dtype in DTYPES and count * DTYPES[dtype] != end - begin):
            raise InputError(
                f"{name} does not fit in the file: it was truncated, or the header is wrong",
                where=str(path),
                remedy="fetch it again",
            )
    return {name: StoredTensor(path, name, shape, dtype) for name, (dtype, shape, _) in found.items()}


def read_tensor(stored: StoredTensor) -> Tensor:
    """One tensor in fp32; NaN and infinity are refused."""
    if stored.dtype not in DTYPES:
        raise InputError(
            f"{stored.name} has the dtype {stored.dtype}",
            where=str(stored.file),
            remedy=f"weights are {', '.join(DTYPES)}: use the model before quantisation",
        )
    try:
        with safe_open(stored.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored.name).to(torch.float32, copy=True)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", where=str(stored.file), remedy="fetch it again") from None
    if not torch.isfinite(tensor).all():
        problem = f"{stored.name} has values that are not finite"
        raise InputError(problem, where=str(stored.file), remedy="fetch it again")
    return tensor
