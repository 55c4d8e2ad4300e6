"""Conversion of a PyTorch checkpoint, an .npz file or a Marian binary to safetensors and JSON: no code of it runs.

This runs in a child process that needs only the standard library (and numpy for strided tensors), within limits of
memory and time. A checkpoint is a zip of `data.pkl` and raw storages, an .npz file a zip of arrays. Before PyTorch 1.6
a checkpoint was a series of pickles (a magic number, the version, facts about the machine, the object, the keys of its
storages), followed by the storages in the order of these keys, each after the number of its elements.

A binary of Marian (its src/common/binary.cpp) is the version, the number of items, for each the length of its name,
type, dimensions and bytes, then all names, all shapes, padding, and all contents. Students of Bergamot and Firefox have
int8 matrices q of weights q / m; m, a float, follows the matrix, which is transposed unless it is an embedding.
"""

from __future__ import annotations

import ast
import errno
import json
import math
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from transduce.interop.legacy.safe_pickle import (
    PickleReader,
    RefusedError,
    StorageRef,
    TensorView,
    checked_size,
    to_json,
)

MAX_PICKLE = 256 * 2**20  # bytes of data.pkl
MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # of checkpoints before PyTorch 1.6
MARIAN_BINARY = struct.pack("<Q", 1)  # the version of the format
MARIAN_FLOAT32, MARIAN_INT8 = 0x404, (0x4101, 0x10001)  # int8 of Bergamot's fork, and of Marian 1.12
ACTIVATION_SCALE = "QuantMultA"  # of items that quantise activations, which stay fp32 here
MAX_EXPANSION = 8  # bytes written per byte of the file: tied weights are written more than once
MAX_SECONDS = 600
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no more can be written
WEIGHTS = ("model", "model_state", "generator")  # top-level keys of weights
SETTINGS = ("args", "cfg", "opt", "vocab")  # top-level keys of settings
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ARRAY_DTYPES = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "<i8": "I64",
    "<i4": "I32",
    "i1": "I8",
    "u1": "U8",
    "b1": "BOOL",
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: the location and the meaning of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    member: str  # of the zip, or the key of a storage
    begin: int  # in bytes; in elements where there are strides
    strides: tuple[int, ...] | None = None  # in elements; None: contiguous

    @property
    def length(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    def extract(self, content: bytes) -> bytes:
        if self.strides is None:
            return content[self.begin : self.begin + self.length]
        import numpy as np

        element = np.dtype(f"V{SIZES[self.dtype]}")
        steps = tuple(stride * element.itemsize for stride in self.strides)
        return np.ndarray(self.shape, element, content, self.begin * element.itemsize, steps).tobytes()


def check_tensor(name: str, tensor: TensorView, capacity: int) -> TensorEntry:
    """Checks that every element is inside the storage of `capacity` bytes, and none is repeated."""
    size, count = SIZES[tensor.storage.dtype], 1
    contiguous, last = True, tensor.offset
    for side, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        contiguous &= side <= 1 or stride == count
        count *= side
        last += (side - 1) * stride
        if side > 1 and stride == 0:
            raise RefusedError(f"{name} repeats its elements")
    if count and (last + 1) * size > capacity:
        raise RefusedError(f"{name} reaches beyond its storage")
    if count * size > capacity:
        raise RefusedError(f"{name} would be larger than its storage")
    strides = None if contiguous else tensor.strides
    begin = tensor.offset * size if contiguous else tensor.offset
    return TensorEntry(name, tensor.storage.dtype, tensor.shape, tensor.storage.key, begin, strides)


def members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The members of the zip: safe names, no compression, no more bytes than the file has."""
    found: dict[str, zipfile.ZipInfo] = {}
    for one in archive.infolist():
        parts = one.filename.split("/")
        if ".." in parts or "" in parts[:-1] or "\\" in one.filename or one.filename in found:
            raise RefusedError(f"it has a member named {one.filename[:80]!r}")
        if one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size:
            raise RefusedError(f"{one.filename[:80]} is compressed, but neither PyTorch nor Marian compresses")
        found[one.filename] = one
    if sum(one.file_size for one in found.values()) > size:
        raise RefusedError("its members are larger than the file")
    return found


def read_checkpoint(
    archive: zipfile.ZipFile, found: dict[str, zipfile.ZipInfo]
) -> tuple[dict[str, Any], list[TensorEntry]]:
    pickled = [name for name in found if name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise RefusedError("it has no data.pkl, as every checkpoint of PyTorch has")
    root = pickled[0].removesuffix("data.pkl")
    if f"{root}byteorder" in found and archive.read(f"{root}byteorder").strip() != b"little":
        raise RefusedError("its storages are big-endian")
    if found[pickled[0]].file_size > MAX_PICKLE:
        raise RefusedError(f"data.pkl is larger than {MAX_PICKLE:,} bytes")
    content = PickleReader().run(archive.read(pickled[0]))
    return collect(content, f"{root}data/", {name: one.file_size for name, one in found.items()})


def collect(content: Any, root: str, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[TensorEntry]]:
    """The settings and the tensors of an unpickled checkpoint; `sizes`: the bytes of each storage."""
    if not isinstance(content, dict):
        raise RefusedError("it does not hold a dictionary")
    entries = []
    parts = {f"{part}/": content[part] for part in WEIGHTS if isinstance(content.get(part), dict)}
    for part, weights in (parts or {"": content}).items():  # without parts: a plain state_dict
        for name, tensor in weights.items():
            if isinstance(tensor, TensorView):
                member = f"{root}{tensor.storage.key}"
                if member not in sizes:
                    raise RefusedError(f"the storage of {name} is missing")
                entry = check_tensor(str(name), tensor, sizes[member])
                entries.append(replace(entry, name=f"{part}{name}", member=member))
    settings = {name: to_json(content[name]) for name in SETTINGS if name in content}
    return {**settings, "parts": sorted(map(str, content))}, entries


class LegacyReader(PickleReader):
    """Reader of a checkpoint from before PyTorch 1.6, which keeps the dtype of each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, str] = {}

    def _binpersid(self, argument: Any) -> None:
        super()._binpersid(argument)
        storage: StorageRef = self.stack[-1]
        if self.dtypes.setdefault(storage.key, storage.dtype) != storage.dtype:
            raise RefusedError(f"the storage {storage.key} has two dtypes")


def legacy_spans(file: BinaryIO, keys: Any, dtypes: Mapping[str, str], size: int) -> dict[str, tuple[int, int]]:
    """Begin and length in bytes of each storage; the file is at the first of them."""
    spans: dict[str, tuple[int, int]] = {}
    if not isinstance(keys, list):
        raise RefusedError("it has no list of storages")
    for key in keys:
        count = checked_size(struct.unpack("<q", file.read(8))[0])
        if key not in dtypes or key in spans:
            raise RefusedError(f"it has a storage {str(key)[:80]} that no tensor, or one before, refers to")
        spans[key] = (file.tell(), count * SIZES[dtypes[key]])
        if sum(spans[key]) > size:
            raise RefusedError(f"the storage {key} reaches beyond the file")
        file.seek(sum(spans[key]))
    return spans


def unpack_legacy(file: BinaryIO, size: int, folder: Path) -> dict[str, Any]:
    """A checkpoint from before PyTorch 1.6."""
    first = [PickleReader().run(file) for _ in range(3)]
    if first[:2] != [MAGIC, LEGACY_VERSION] or not isinstance(first[2], dict) or not first[2].get("little_endian"):
        raise RefusedError("neither a zip nor a checkpoint of PyTorch before 1.6")
    reader = LegacyReader()
    content, keys = reader.run(file), PickleReader().run(file)
    spans = legacy_spans(file, keys, reader.dtypes, size)
    settings, entries = collect(content, "", {key: length for key, (_, length) in spans.items()})

    def read(key: str) -> bytes:
        begin, length = spans[key]
        file.seek(begin)
        return file.read(length)

    write(folder, entries, size, read)
    return settings


def read_arrays(
    archive: zipfile.ZipFile, found: dict[str, zipfile.ZipInfo]
) -> tuple[dict[str, Any], list[TensorEntry]]:
    """The arrays of an .npz file; Marian stores its settings as text in one of them."""
    entries, settings = [], {}
    for member, one in found.items():
        with archive.open(one) as file:
            start = file.read(10)
            if start[:6] != b"\x93NUMPY" or start[6:8] != b"\x01\x00":
                raise RefusedError(f"{member[:80]} is not an array")
            length = struct.unpack("<H", start[8:10])[0]
            header = ast.literal_eval(file.read(length).decode("latin-1"))
        dtype = ARRAY_DTYPES.get(str(header["descr"]).replace("|", "").replace("<i1", "i1"))
        shape = tuple(map(checked_size, header["shape"]))
        if dtype is None or (header["fortran_order"] and len(shape) > 1):
            raise RefusedError(f"{member[:80]} has the dtype {str(header['descr'])[:80]}")
        entry = TensorEntry(member.removesuffix(".npy"), dtype, shape, member, 10 + length)
        if entry.begin + entry.length != one.file_size:
            raise RefusedError(f"{member[:80]} does not have the size that its header states")
        if entry.name.startswith("special:"):
            settings[entry.name] = archive.read(member)[entry.begin :].rstrip(b"\0").decode()
        else:
            entries.append(entry)
    return settings, entries


@dataclass(frozen=True)
class MarianItem:
    """One item of a Marian binary."""

    name: str
    kind: int
    shape: tuple[int, ...]
    begin: int  # of its content in the file
    length: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def floats(self, content: bytes) -> bytes:
        """fp32 numbers, in the order of the shape."""
        if self.kind == MARIAN_FLOAT32:
            return content[: 4 * self.count]
        import numpy as np

        multiplier = struct.unpack_from("<f", content, self.count)[0]
        if not 0 < multiplier < math.inf:
            raise RefusedError(f"{self.name} has the multiplier {multiplier}")
        numbers = np.frombuffer(content, np.int8, self.count)
        if "Wemb" not in self.name:
            numbers = numbers.reshape(self.shape[::-1]).T
        return (numbers.astype(np.float32) * np.float32(1 / multiplier)).tobytes()


def marian_items(file: BinaryIO, size: int) -> list[MarianItem]:
    """The items of a Marian binary, each inside the file."""

    def words(number: int, letter: str = "Q") -> tuple[int, ...]:
        length = struct.calcsize(letter) * number
        content = file.read(length) if length <= size else b""
        return struct.unpack(f"<{number}{letter}", content)

    number = words(2)[1]
    headers = [words(4) for _ in range(min(number, size))]
    names = [file.read(min(header[0], size)).rstrip(b"\0").decode() for header in headers]
    shapes = [tuple(map(checked_size, words(header[2], "i"))) for header in headers]
    begin = words(1)[0] + file.tell()
    items = []
    for name, header, shape in zip(names, headers, shapes, strict=True):
        items.append(MarianItem(name, header[1], shape, begin, header[3]))
        begin += header[3]
    if begin > size:
        raise RefusedError("its items reach beyond the file")
    return items


def unpack_marian(file: BinaryIO, size: int, folder: Path) -> dict[str, Any]:
    """A Marian binary, its matrices as fp32."""
    settings, found = {}, {}

    def content(item: MarianItem) -> bytes:
        file.seek(item.begin)
        return file.read(item.length)

    for item in marian_items(file, size):
        if item.name.startswith("special:"):
            settings[item.name] = content(item).rstrip(b"\0").decode()
        elif ACTIVATION_SCALE not in item.name:
            if item.kind not in (MARIAN_FLOAT32, *MARIAN_INT8):
                raise RefusedError(f"{item.name[:80]} has the type {item.kind:#x}, which is packed for one processor")
            needed = 4 * item.count if item.kind == MARIAN_FLOAT32 else item.count + 4
            if needed > item.length or item.name in found:
                raise RefusedError(f"{item.name[:80]} is larger than its content, or there twice")
            found[item.name] = item
    entries = [TensorEntry(name, "F32", item.shape, name, 0) for name, item in found.items()]
    write(folder, entries, size, lambda name: found[name].floats(content(found[name])))
    return settings


def write(folder: Path, entries: list[TensorEntry], size: int, read: Callable[[str], bytes]) -> None:
    if sum(entry.length for entry in entries) > MAX_EXPANSION * size:
        raise RefusedError("its weights would be larger than the file")
    with open(folder / "model.safetensors", "wb") as file:
        write_safetensors(read, entries, file)


def write_safetensors(read_member: Callable[[str], bytes], entries: list[TensorEntry], file: BinaryIO) -> None:
    """Writes a safetensors file; each storage is read once."""
    header, begin = {}, 0
    entries = sorted(entries, key=lambda entry: entry.member)
    for entry in entries:
        offsets = [begin, begin + entry.length]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        begin = offsets[1]
    text = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(text)) + text)
    read, content = "", b""
    for entry in entries:
        if entry.member != read:
            read, content = entry.member, read_member(entry.member)
        file.write(entry.extract(content))


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(len(MARIAN_BINARY))
        file.seek(0)
        if start == MARIAN_BINARY:
            return unpack_marian(file, size, folder)
        if start[:4] != b"PK\x03\x04":
            return unpack_legacy(file, size, folder)
    with zipfile.ZipFile(path) as archive:
        found = members(archive, size)
        reader = read_arrays if all(name.endswith(".npy") for name in found) else read_checkpoint
        settings, entries = reader(archive, found)
        write(folder, entries, size, archive.read)
    return settings


def limit_resources(size: int) -> None:
    """Limits memory and time, where the operating system supports it."""
    try:
        import resource
    except ImportError:
        return
    for kind, bound in ((resource.RLIMIT_AS, 2**31 + 4 * size), (resource.RLIMIT_CPU, MAX_SECONDS)):
        hard = resource.getrlimit(kind)[1]
        soft = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (soft, hard))


def main(path: Path, folder: Path) -> None:
    limit_resources(path.stat().st_size)
    try:
        _write_content(path, folder)
    except OSError as error:
        sys.exit(error.errno)  # where nothing can be written, the exit code says so


def _write_content(path: Path, folder: Path) -> None:
    try:
        result: dict[str, Any] = {"settings": unpack(path, folder)}
        text = json.dumps(result)
    except RefusedError as error:
        text = json.dumps({"refused": str(error)})
    except Exception as error:  # whatever a damaged file leads to is a fault of the file
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        text = json.dumps({"refused": f"damaged: {type(error).__name__}: {str(error)[:200]}"})
    (folder / "content.json").write_text(text)
