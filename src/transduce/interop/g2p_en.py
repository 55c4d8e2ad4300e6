"""g2p_en (checkpoint20.npz): English grapheme-to-phoneme conversion with the phones of CMUdict.

A GRU encoder reads the letters and </s>; its last state is the first state of a GRU decoder that outputs phones.
https://github.com/Kyubyong/g2p
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import Vocabulary
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.interop.huggingface.family import ImportedModel
from transduce.interop.huggingface.folder import inside
from transduce.interop.huggingface.weights import MISSING, ImportRows
from transduce.recipe import build, parse

FILE = "checkpoint20.npz"
MAX_BYTES = 2**28  # of all arrays
MAX_LENGTH = 20  # phones, </s> included
VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = (
    "B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH", "V", "W",
    "Y", "Z", "ZH",
)  # fmt: skip
# In alphabetical order: vowels with each of their stresses; UW also without one.
PHONES = tuple(sorted((*(f"{vowel}{stress}" for vowel in VOWELS for stress in "012"), *CONSONANTS, "UW")))
LETTERS = tuple(ascii_lowercase)
# Rows of <pad>, <s>, </s> and <unk>, then the others in their order.
SOURCE = ImportRows((0, MISSING, 2, 1, *range(3, 3 + len(LETTERS))), 3 + len(LETTERS))
TARGET = ImportRows((0, 2, 3, 1, *range(4, 4 + len(PHONES))), 4 + len(PHONES))

WEIGHTS = {
    "enc_emb": "encoder.embedding.weight",
    "enc_w_ih": "encoder.rnn.layers.0.weight_ih_l0",
    "enc_w_hh": "encoder.rnn.layers.0.weight_hh_l0",
    "enc_b_ih": "encoder.rnn.layers.0.bias_ih_l0",
    "enc_b_hh": "encoder.rnn.layers.0.bias_hh_l0",
    "dec_emb": "decoder.embedding.weight",
    "dec_w_ih": "decoder.rnn.layers.0.weight_ih_l0",
    "dec_w_hh": "decoder.rnn.layers.0.weight_hh_l0",
    "dec_b_ih": "decoder.rnn.layers.0.bias_ih_l0",
    "dec_b_hh": "decoder.rnn.layers.0.bias_hh_l0",
    "fc_w": "decoder.output.projection.weight",
    "fc_b": "decoder.output.projection.bias",
}
ROWS = {"enc_emb": SOURCE, "dec_emb": TARGET, "fc_w": TARGET, "fc_b": TARGET}


def find_file(path: Path) -> Path | None:
    """This file, or the file in this folder, if it holds the arrays of g2p_en."""
    file = path / FILE if path.is_dir() else path
    if file.suffix != ".npz" or not zipfile.is_zipfile(file):
        return None
    try:
        with zipfile.ZipFile(file) as content:
            return file if {"enc_emb.npy", "fc_w.npy"} <= set(content.namelist()) else None
    except (zipfile.BadZipFile, OSError):
        return None


def read(file: Path) -> ImportedModel:
    arrays = _arrays(inside(file.parent, file.name))
    width = arrays["enc_w_hh"].shape[1]
    part = {"kind": "recurrent", "cell": "gru", "layers": 1, "width": width, "dropout": 0.0}
    source, target = Vocabulary("chars", (*SPECIALS, *LETTERS)), Vocabulary("words", (*SPECIALS, *PHONES))
    content: dict[str, Any] = {
        "tokens": {
            side: {"kind": one.kind, "size": len(one.pieces)} for side, one in (("source", source), ("target", target))
        },
        "model": {
            "encoder": {**part, "bidirectional": False},
            "decoder": {**part, "context": "initial", "bridge": "none"},
            "scale_embedding": False,
        },
        "generation": {"strategy": "greedy", "beam": 1, "max_length": MAX_LENGTH},
        "evaluation": {"metrics": ("exact", "per"), "references": "by_source"},
    }
    recipe = build.complete_recipe(parse(content, str(file)), str(file))
    weights = {WEIGHTS[name]: _weight(name, array) for name, array in arrays.items()}
    return ImportedModel(recipe, (Tokenizer(source), Tokenizer(target)), weights)


def _weight(name: str, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    return ROWS[name].reorder(tensor) if name in ROWS else tensor


def _arrays(file: Path) -> dict[str, np.ndarray]:
    """All arrays. Names, shapes and sizes are checked before any array is read, and nothing is unpickled."""
    try:
        with zipfile.ZipFile(file) as content:
            _check(content, file)
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in WEIGHTS}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise InputError(f"cannot be read: {error}", where=str(file), remedy="fetch it again") from None
    for name, array in found.items():
        if not np.isfinite(array).all():
            raise InputError(f"{name} has values that are not finite", where=str(file), remedy="fetch it again")
    return found


def _check(content: zipfile.ZipFile, file: Path) -> None:
    members = {info.filename.removesuffix(".npy"): info for info in content.infolist()}
    for kind, names in (
        ("are missing", set(WEIGHTS) - set(members)),
        ("would be dropped", set(members) - set(WEIGHTS)),
    ):
        if names:
            raise InputError(f"arrays {kind}: {min(names)}", where=str(file), remedy="this is another model")
    if sum(info.file_size for info in members.values()) > MAX_BYTES:
        raise InputError(f"more than {MAX_BYTES:,} bytes", where=str(file), remedy="this is not a file of g2p_en")
    headers = {name: _shape(content, info, file) for name, info in members.items()}
    width = headers["enc_w_hh"][-1] if headers["enc_w_hh"] else 0
    letters, phones = SOURCE.foreign_size, TARGET.foreign_size
    expected: dict[str, tuple[int, ...]] = {"fc_w": (phones, width), "fc_b": (phones,)}
    for side, tokens in (("enc", letters), ("dec", phones)):
        expected |= {f"{side}_emb": (tokens, width), f"{side}_b_ih": (3 * width,), f"{side}_b_hh": (3 * width,)}
        expected |= {f"{side}_w_ih": (3 * width, width), f"{side}_w_hh": (3 * width, width)}
    for name, shape in expected.items():
        if headers[name] != shape or 0 in shape:
            raise InputError(f"{name} is {headers[name]}, not {shape}", where=str(file), remedy="this is another model")


def _shape(content: zipfile.ZipFile, info: zipfile.ZipInfo, file: Path) -> tuple[int, ...]:
    """The shape in the header of an array, checked against the size of the array."""
    with content.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"{info.filename} has the format {version}")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
        rest = info.file_size - stream.tell()
    count = 1
    for side in shape:
        count *= side
    if dtype != np.dtype("<f4") or fortran_order or count * dtype.itemsize != rest:
        raise InputError(f"{info.filename} does not match its header", where=str(file), remedy="fetch it again")
    return tuple(shape)
