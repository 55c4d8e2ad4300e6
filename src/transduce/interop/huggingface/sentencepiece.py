"""A SentencePiece model and a list of pieces with their numbers in, the library's tokenizer out, with those numbers.

Marian's folders keep one such file a language (source.spm, target.spm) and one list for both (vocab.json); those of
M2M100 one file for all (sentencepiece.bpe.model). It is read here field by field: it is a protocol buffer, of which
only a few fields matter.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transduce.errors import InputError
from transduce.interop.huggingface.folder import LONGEST_JSON, inside

NORMAL, USER = 1, 4  # kinds of pieces that a text can be made of
UNKNOWN = 2
UNIGRAM, MERGES = 1, 2  # kinds of models
SILENT = "\0"  # at the end of a piece: no text can spell it
CODE = re.compile(r">>.+<<")  # of the language asked for


@dataclass
class SentencePiece:
    """What matters of a model file."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, log-probability, kind
    kind: int = UNIGRAM
    characters: bytes = b""  # how characters are normalised, in a form of its own
    bytes_for_unknown: bool = False


def read_model(folder: Path, name: str) -> SentencePiece:
    path = inside(folder, name)
    if not path.is_file():
        raise InputError(f"there is no {name}", where=str(folder), remedy="nor tokenizer.json: fetch one of them")
    if path.stat().st_size > LONGEST_JSON:
        raise InputError(f"larger than {LONGEST_JSON:,} bytes", where=str(path), remedy="this is no such file")
    model = SentencePiece()
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                trained = dict(_fields(value))
                model.kind, model.bytes_for_unknown = trained.get(3, UNIGRAM), bool(trained.get(35, 0))
            elif number == 3:
                model.characters = dict(_fields(value)).get(2, b"")
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise InputError(f"not a SentencePiece model: {error}", where=str(path), remedy="fetch it again") from None
    merged = model.kind == MERGES and all(kind != USER for _, _, kind in model.pieces)
    if not (model.kind == UNIGRAM or merged) or model.bytes_for_unknown or not model.pieces:
        raise InputError(
            "only SentencePiece models of the kinds unigram and bpe, without bytes, can be imported",
            where=str(path),
            remedy="save tokenizer.json from a fast tokenizer beside it",
        )
    return model


def _piece(content: bytes) -> tuple[str, float, int]:
    found = dict(_fields(content))
    score = struct.unpack("<f", found[2])[0] if 2 in found else 0.0
    return found[1].decode(), score, found.get(3, NORMAL)


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the fields of a message: whole numbers, or bytes."""
    at = 0
    while at < len(content):
        key, at = _whole(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _whole(content, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _whole(content, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of the kind {kind}")
        if at + length > len(content):
            raise ValueError("it was cut")
        yield key >> 3, content[at : at + length]
        at += length


def _whole(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = content[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number without an end")


def library(model: SentencePiece, listed: dict[str, int], codes: Collection[str]) -> tuple[Any, dict[int, int]]:
    """The tokenizer, and its number for each number in the list. Pieces of the list that the model lacks are there,
    but no text can spell them: they may be written, being the other language's. Only `codes` of languages can."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    vocabulary = [(p if kind in (NORMAL, USER) else p + SILENT, score) for p, score, kind in model.pieces]
    others = [piece for piece in listed if piece not in {text for text, _, _ in model.pieces}]
    vocabulary += [(piece if piece in codes else piece + SILENT, 0.0) for piece in others]
    backend = Tokenizer(_pieces(model, vocabulary))
    steps: list[Any] = [normalizers.Precompiled(model.characters)] if model.characters else []
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    split = model.kind == MERGES  # nothing is merged across a space
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=split)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=split)
    backend.add_special_tokens([piece for piece in others if piece in codes])
    places = {piece.removesuffix(SILENT): place for place, (piece, _) in enumerate(vocabulary)}
    return backend, {number: places[piece] for piece, number in listed.items()}


def _pieces(model: SentencePiece, vocabulary: list[tuple[str, float]]) -> Any:
    """What cuts a text: the likeliest pieces, or the two neighbours first that make the piece with the best score."""
    from tokenizers import models

    unknown = next((number for number, piece in enumerate(model.pieces) if piece[2] == UNKNOWN), None)
    if model.kind == UNIGRAM:
        return models.Unigram(vocabulary, unknown, False)
    scores = {piece: score for piece, score, kind in model.pieces if kind == NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    numbers = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    named = None if unknown is None else vocabulary[unknown][0]
    return models.BPE(numbers, merges, unk_token=named, fuse_unk=True)
