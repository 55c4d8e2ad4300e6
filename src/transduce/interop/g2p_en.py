"""The arrays of g2p_en (checkpoint20.npz) in; a recipe, tokenizers and weights of one of our models out.

It spells English words in the phones of CMUdict: a GRU reads the letters and </s>, and its last state is the first of
a GRU that says phones. https://github.com/Kyubyong/g2p
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce import build
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import Vocabulary
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.interop.huggingface.family import ImportedModel
from transduce.interop.huggingface.folder import inside
from transduce.interop.huggingface.weights import MISSING, ImportRows
from transduce.recipe import parse

FILE = "checkpoint20.npz"
MOST = 2**28  # bytes of all arrays
LONGEST = 20  # phones, </s> counted in
VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = (
    "B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH", "V", "W",
    "Y", "Z", "ZH",
)  # fmt: skip
# By the alphabet: vowels with each of their stresses; UW has a row without one, too.
PHONES = tuple(sorted((*(f"{vowel}{stress}" for vowel in VOWELS for stress in "012"), *CONSONANTS, "UW")))
LETTERS = tuple(ascii_lowercase)
# Their numbers of our <pad>, <s>, </s> and <unk>, then the rest in their order.
SOURCE = ImportRows((0, MISSING, 2, 1, *range(3, 3 + len(LETTERS))), 3 + len(LETTERS))
TARGET = ImportRows((0, 2, 3, 1, *range(4, 4 + len(PHONES))), 4 + len(PHONES))

TABLE = {
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
    """The file of arrays that this is, or that lies in this folder; None: there is none of this kind."""
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
        "generation": {"strategy": "greedy", "beam": 1, "max_length": LONGEST},
        "evaluation": {"metrics": ("exact", "per"), "references": "by_source"},
    }
    recipe = build.complete_recipe(parse(content, str(file)), str(file))
    weights = {TABLE[name]: _weight(name, array) for name, array in arrays.items()}
    return ImportedModel(recipe, (Tokenizer(source), Tokenizer(target)), weights)


def _weight(name: str, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    return ROWS[name].reorder(tensor) if name in ROWS else tensor


def _arrays(file: Path) -> dict[str, np.ndarray]:
    """All names, shapes and sizes are found to fit before any number is read; nothing in it can be code."""
    try:
        with zipfile.ZipFile(file) as content:
            _check(content, file)
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in TABLE}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise InputError(f"cannot be read: {error}", where=str(file), remedy="fetch it again") from None
    for name, array in found.items():
        if not np.isfinite(array).all():
            raise InputError(f"{name} has numbers that are not finite", where=str(file), remedy="fetch it again")
    return found


def _check(content: zipfile.ZipFile, file: Path) -> None:
    members = {info.filename.removesuffix(".npy"): info for info in content.infolist()}
    for kind, names in (("are missing", set(TABLE) - set(members)), ("would be dropped", set(members) - set(TABLE))):
        if names:
            raise InputError(f"arrays {kind}: {min(names)}", where=str(file), remedy="this is another model")
    if sum(info.file_size for info in members.values()) > MOST:
        raise InputError(f"more than {MOST:,} bytes", where=str(file), remedy="this is no such file")
    headers = {name: _shape(content, info, file) for name, info in members.items()}
    width = headers["enc_w_hh"][-1] if headers["enc_w_hh"] else 0
    letters, phones = SOURCE.foreign_size, TARGET.foreign_size
    wanted: dict[str, tuple[int, ...]] = {"fc_w": (phones, width), "fc_b": (phones,)}
    for side, tokens in (("enc", letters), ("dec", phones)):
        wanted |= {f"{side}_emb": (tokens, width), f"{side}_b_ih": (3 * width,), f"{side}_b_hh": (3 * width,)}
        wanted |= {f"{side}_w_ih": (3 * width, width), f"{side}_w_hh": (3 * width, width)}
    for name, shape in wanted.items():
        if headers[name] != shape or 0 in shape:
            raise InputError(f"{name} is {headers[name]}, not {shape}", where=str(file), remedy="this is another model")


def _shape(content: zipfile.ZipFile, info: zipfile.ZipInfo, file: Path) -> tuple[int, ...]:
    """What the header of an array announces, once it was found to be as many bytes as are there."""
    with content.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"{info.filename} has the format {version}")
        shape, turned, kind = np.lib.format.read_array_header_1_0(stream)
        rest = info.file_size - stream.tell()
    count = 1
    for side in shape:
        count *= side
    if kind != np.dtype("<f4") or turned or count * kind.itemsize != rest:
        raise InputError(f"{info.filename} does not hold what it announces", where=str(file), remedy="fetch it again")
    return tuple(shape)
