"""A checkpoint of PyTorch or an .npz file in; its numbers as safetensors and its settings as JSON out, never any code.

This runs in a process of its own, with the standard library alone (and numpy for numbers in an odd order), within
limits of memory and time. A checkpoint is a zip of `data.pkl` and raw numbers, an .npz file a zip of arrays.
"""

from __future__ import annotations

import ast
import json
import math
import struct
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from transduce.interop.legacy.safe_pickle import Machine, RefusedError, Tensor, plain, whole

PICKLE = 256 * 2**20  # bytes of data.pkl at most
COPIES = 8  # bytes written at most, for each byte of the file: tied weights are written more than once
SECONDS = 600
WEIGHTS = ("model", "model_state", "generator")  # parts of a checkpoint that are numbers
SETTINGS = ("args", "cfg", "opt", "vocab")  # and those that say what they mean
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ARRAYS = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "i1": "I8", "u1": "U8", "b1": "BOOL"}


@dataclass(frozen=True)
class Piece:
    """One weight: where its bytes are, and what they mean."""

    name: str
    kind: str
    shape: tuple[int, ...]
    member: str
    begin: int  # in numbers of a storage; in bytes of an .npy file
    strides: tuple[int, ...] | None = None  # None: one number after the other

    @property
    def length(self) -> int:
        return math.prod(self.shape) * SIZES[self.kind]

    def take(self, content: bytes) -> bytes:
        if self.strides is None:
            return content[self.begin : self.begin + self.length]
        import numpy as np

        kind = np.dtype(f"V{SIZES[self.kind]}")
        steps = tuple(stride * kind.itemsize for stride in self.strides)
        return np.ndarray(self.shape, kind, content, self.begin * kind.itemsize, steps).tobytes()


def placed(name: str, tensor: Tensor, room: int) -> Piece:
    """Every number that it names lies in its storage, and none is named twice."""
    size, following = SIZES[tensor.storage.kind], 1
    flat, last = True, tensor.offset
    for side, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        flat &= side <= 1 or stride == following
        following *= side
        last += (side - 1) * stride
        if side > 1 and stride == 0:
            raise RefusedError(f"{name} repeats its numbers")
    if following and (last + 1) * size > room:
        raise RefusedError(f"{name} reaches beyond the numbers that are there")
    if following * size > room:
        raise RefusedError(f"{name} would be larger than the numbers that are there")
    strides = None if flat else tensor.strides
    begin = tensor.offset * size if flat else tensor.offset
    return Piece(name, tensor.storage.kind, tensor.shape, tensor.storage.key, begin, strides)


def members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """What is in the zip: plain names, nothing compressed, nothing larger than the file."""
    found: dict[str, zipfile.ZipInfo] = {}
    for one in archive.infolist():
        parts = one.filename.split("/")
        if ".." in parts or "" in parts[:-1] or "\\" in one.filename or one.filename in found:
            raise RefusedError(f"it has a member called {one.filename[:80]!r}")
        if one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size:
            raise RefusedError(f"{one.filename[:80]} is compressed, which neither PyTorch nor Marian does")
        found[one.filename] = one
    if sum(one.file_size for one in found.values()) > size:
        raise RefusedError("its members would be larger than the file")
    return found


def checkpoint(archive: zipfile.ZipFile, found: dict[str, zipfile.ZipInfo]) -> tuple[dict[str, Any], list[Piece]]:
    pickled = [name for name in found if name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise RefusedError("it has no data.pkl, as a checkpoint of PyTorch has")
    root = pickled[0].removesuffix("data.pkl")
    if f"{root}byteorder" in found and archive.read(f"{root}byteorder").strip() != b"little":
        raise RefusedError("its numbers begin with their largest byte")
    if found[pickled[0]].file_size > PICKLE:
        raise RefusedError(f"its data.pkl is larger than {PICKLE:,} bytes")
    content = Machine().run(archive.read(pickled[0]))
    if not isinstance(content, dict):
        raise RefusedError("it holds no dictionary")
    pieces = []
    for part in WEIGHTS:
        weights = content.get(part)
        for name, tensor in (weights if isinstance(weights, dict) else {}).items():
            if isinstance(tensor, Tensor):
                member = f"{root}data/{tensor.storage.key}"
                if member not in found:
                    raise RefusedError(f"the numbers of {name} are missing")
                piece = placed(str(name), tensor, found[member].file_size)
                pieces.append(replace(piece, name=f"{part}/{name}", member=member))
    settings = {name: plain(content[name]) for name in SETTINGS if name in content}
    return {**settings, "parts": sorted(map(str, content))}, pieces


def arrays(archive: zipfile.ZipFile, found: dict[str, zipfile.ZipInfo]) -> tuple[dict[str, Any], list[Piece]]:
    """The arrays of an .npz file; Marian keeps its settings in one of them, as text."""
    pieces, settings = [], {}
    for member, one in found.items():
        with archive.open(one) as file:
            start = file.read(10)
            if start[:6] != b"\x93NUMPY" or start[6:8] != b"\x01\x00":
                raise RefusedError(f"{member[:80]} is no array")
            length = struct.unpack("<H", start[8:10])[0]
            header = ast.literal_eval(file.read(length).decode("latin-1"))
        kind = ARRAYS.get(str(header["descr"]).replace("|", "").replace("<i1", "i1"))
        shape = tuple(map(whole, header["shape"]))
        if kind is None or (header["fortran_order"] and len(shape) > 1):
            raise RefusedError(f"{member[:80]} has numbers of the kind {str(header['descr'])[:80]}")
        piece = Piece(member.removesuffix(".npy"), kind, shape, member, 10 + length)
        if piece.begin + piece.length != one.file_size:
            raise RefusedError(f"{member[:80]} is not as large as it says")
        if piece.name.startswith("special:"):
            settings[piece.name] = archive.read(member)[piece.begin :].rstrip(b"\0").decode()
        else:
            pieces.append(piece)
    return settings, pieces


def write(archive: zipfile.ZipFile, pieces: list[Piece], file: BinaryIO) -> None:
    """As safetensors, each storage read once."""
    header, place = {}, 0
    pieces = sorted(pieces, key=lambda piece: piece.member)
    for piece in pieces:
        offsets = [place, place + piece.length]
        header[piece.name] = {"dtype": piece.kind, "shape": list(piece.shape), "data_offsets": offsets}
        place = offsets[1]
    text = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(text)) + text)
    read, content = "", b""
    for piece in pieces:
        if piece.member != read:
            read, content = piece.member, archive.read(piece.member)
        file.write(piece.take(content))


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise RefusedError("not a zip, as PyTorch writes checkpoints since 1.6")
    with zipfile.ZipFile(path) as archive:
        found = members(archive, size)
        reader = arrays if all(name.endswith(".npy") for name in found) else checkpoint
        settings, pieces = reader(archive, found)
        if sum(piece.length for piece in pieces) > COPIES * size:
            raise RefusedError("its weights would be larger than the file")
        with open(folder / "model.safetensors", "wb") as file:
            write(archive, pieces, file)
    return settings


def limit(size: int) -> None:
    """Memory and time, where the system can hold a program to them."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in ((resource.RLIMIT_AS, 2**31 + 4 * size), (resource.RLIMIT_CPU, SECONDS)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, hard))


def main(path: Path, folder: Path) -> None:
    limit(path.stat().st_size)
    try:
        result: dict[str, Any] = {"settings": unpack(path, folder)}
        text = json.dumps(result)
    except RefusedError as error:
        text = json.dumps({"refused": str(error)})
    except Exception as error:  # whatever a damaged file leads to, it is the file's
        text = json.dumps({"refused": f"damaged: {type(error).__name__}: {str(error)[:200]}"})
    (folder / "content.json").write_text(text)
