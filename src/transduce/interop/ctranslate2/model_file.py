"""Binary file of CTranslate2, `model.bin`: numbers with checked bounds. Quantised weights become fp32."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transduce.errors import InputError

FILE = "model.bin"
VERSIONS = range(4, 7)  # of the binary format
TRANSFORMER, WHISPER = "TransformerSpec", "WhisperSpec"
SPECIFICATIONS = {TRANSFORMER: "an encoder and a decoder", WHISPER: "Whisper"}
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
MAX_DIMENSIONS, MAX_VARIABLES = 4, 100_000
REMEDY = "fetch it again, or convert the original model"


@dataclass(frozen=True)
class Variables:
    """Everything in a model.bin: weights in fp32, and single numbers."""

    specification: str  # TransformerSpec, WhisperSpec ...
    weights: dict[str, Tensor]
    numbers: dict[str, float]

    def number(self, name: str, default: float) -> float:
        return self.numbers.get(name, default)


class _Reader:
    """Numbers and names in a file, none beyond its end."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where, self.place = data, where, 0

    def take(self, size: int) -> int:
        """Skips bytes; returns where they begin."""
        begin = self.place
        if size < 0 or begin + size > len(self.data):
            raise InputError(f"it ends before byte {begin + size:,}", where=self.where, remedy=REMEDY)
        self.place += size
        return begin

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        (value,) = struct.unpack_from(form, self.data, self.take(size))
        return int(value)

    def name(self) -> str:
        size = self.number("<H")
        begin = self.take(size)
        try:
            return self.data[begin : begin + size].rstrip(b"\0").decode()
        except UnicodeDecodeError:
            raise InputError("a name is not UTF-8", where=self.where, remedy=REMEDY) from None

    def tensor(self) -> Tensor:
        rank = self.number("<B")
        if rank > MAX_DIMENSIONS:
            raise InputError(f"a weight has {rank} dimensions", where=self.where, remedy=REMEDY)
        shape = [self.number("<I") for _ in range(rank)]
        kind, size = self.number("<B"), self.number("<I")
        count = 1
        for one in shape:
            count *= one
        if kind >= len(DTYPES) or count * DTYPES[kind].itemsize != size:
            raise InputError("a weight has another size than its shape says", where=self.where, remedy=REMEDY)
        begin = self.take(size)
        content = bytearray(self.data[begin : begin + size])
        return torch.frombuffer(content, dtype=DTYPES[kind]).view(shape) if count else torch.zeros(shape)


def read_variables(path: Path) -> Variables:
    """The content of a model.bin."""
    where = str(path)
    with path.open("rb") as file:
        if path.stat().st_size < 16:
            raise InputError("it is too short for a model", where=where, remedy=REMEDY)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, where)
            if (version := reader.number("<I")) not in VERSIONS:
                known = f"{VERSIONS[0]} to {VERSIONS[-1]}"
                raise InputError(f"version {version} of the format is not {known}", where=where, remedy=REMEDY)
            if (name := reader.name()) not in SPECIFICATIONS:
                problem = f"the specification {name[:60]!r} is not supported"
                known = ", ".join(f"{one} ({words})" for one, words in SPECIFICATIONS.items())
                raise InputError(problem, where=where, remedy=f"supported: {known}")
            reader.number("<I")  # revision
            found = _read_all(reader)
    return _dequantised(name, found, where)


def _read_all(reader: _Reader) -> dict[str, Tensor | str]:
    """Tensors by name, and the names of tensors that aliases repeat."""
    found: dict[str, Tensor | str] = {}
    for read_one in (reader.tensor, reader.name):
        count = reader.number("<I")
        if count > MAX_VARIABLES:
            raise InputError(f"it has {count:,} weights", where=reader.where, remedy=REMEDY)
        for _ in range(count):
            name = _dotted(reader.name())
            if name in found:
                raise InputError(f"{name} occurs twice", where=reader.where, remedy=REMEDY)
            value = read_one()
            found[name] = _dotted(value) if isinstance(value, str) else value
    return found


def _dotted(name: str) -> str:
    """`encoder/layer_3/ffn` -> `encoder.layer.3.ffn`"""
    return re.sub(r"layer_(\d+)/", r"layer.\1.", name).replace("/", ".")


def _dequantised(specification: str, found: Mapping[str, Tensor | str], where: str) -> Variables:
    """Integers are divided by their scale, one for each row (int8) or for all of them (int16)."""
    weights: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, str) or (name.endswith("_scale") and name.removesuffix("_scale") in found):
            continue
        if value.dim() == 0:
            numbers[name] = float(value)
            continue
        scale, tensor = found.get(f"{name}_scale"), value.float()
        if value.dtype in (torch.int8, torch.int16):
            if not isinstance(scale, Tensor) or scale.numel() not in (1, len(value)):
                raise InputError(f"{name} has integers, but no scale", where=where, remedy=REMEDY)
            tensor = tensor / scale.float().reshape(-1, *[1] * (value.dim() - 1))
        weights[name] = tensor
    for name, value in found.items():
        if isinstance(value, str) and not name.endswith("_scale"):
            if value not in weights:
                raise InputError(f"{name} repeats {value[:80]}, which is missing", where=where, remedy=REMEDY)
            weights[name] = weights[value]
    return Variables(specification, weights, numbers)
