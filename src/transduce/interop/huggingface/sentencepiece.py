"""SentencePiece models: a reader of the protocol buffer, and conversion to the tokenizers library.

Marian folders have one model per language (source.spm, target.spm) and one vocabulary for both (vocab.json); M2M100
folders have one model for all languages (sentencepiece.bpe.model).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transduce.data.tokenizers.vocabulary import check_charsmap
from transduce.errors import InputError
from transduce.interop.huggingface.folder import MAX_JSON, inside

NORMAL, UNKNOWN, USER = 1, 2, 4  # types of pieces; a text is made of normal and user-defined ones
UNIGRAM, BPE = 1, 2  # types of models
UNREACHABLE = "\0"  # appended to a piece that no text must match
LANGUAGE_CODE = re.compile(r">>.+<<")  # of the target language


@dataclass
class SentencePiece:
    """The fields of a model file that matter here."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    kind: int = UNIGRAM
    charsmap: bytes = b""  # precompiled character normalisation
    byte_fallback: bool = False


def read_model(folder: Path, name: str) -> SentencePiece:
    path = inside(folder, name)
    if not path.is_file():
        raise InputError(f"there is no {name}", where=str(folder), remedy="nor tokenizer.json: fetch one of them")
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"larger than {MAX_JSON:,} bytes", where=str(path), remedy="this is no SentencePiece model")
    model = SentencePiece()
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                trainer = dict(_fields(value))
                model.kind, model.byte_fallback = trainer.get(3, UNIGRAM), bool(trainer.get(35, 0))
            elif number == 3:
                model.charsmap = dict(_fields(value)).get(2, b"")
        if model.charsmap:
            check_charsmap(model.charsmap)
    except (ValueError, TypeError, AttributeError, LookupError, struct.error) as error:
        raise InputError(f"not a SentencePiece model: {error}", where=str(path), remedy="fetch it again") from None
    merged = model.kind == BPE and all(kind != USER for _, _, kind in model.pieces)
    if not (model.kind == UNIGRAM or merged) or model.byte_fallback or not model.pieces:
        raise InputError(
            "only SentencePiece models of the types unigram and bpe, without byte fallback, can be imported",
            where=str(path),
            remedy="save tokenizer.json of a fast tokenizer in the same folder",
        )
    return model


def _piece(content: bytes) -> tuple[str, float, int]:
    found = dict(_fields(content))
    score = struct.unpack("<f", found[2])[0] if 2 in found else 0.0
    text = found[1].decode()
    if UNREACHABLE in text:
        raise ValueError("a piece contains a NUL character")
    return text, score, found.get(3, NORMAL)


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of a protocol buffer message: integers or bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(content, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + length > len(content):
            raise ValueError("it was truncated")
        yield key >> 3, content[at : at + length]
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        byte = content[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise ValueError("an integer without an end")


def to_tokenizer(
    model: SentencePiece, vocabulary: dict[str, int], codes: Collection[str]
) -> tuple[Any, dict[int, int]]:
    """A tokenizer of the tokenizers library, and its id for each id of `vocabulary`.

    Pieces of the vocabulary that the model lacks belong to the other language: they are added so that they can be
    decoded, but no text matches them, except language `codes`.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    pieces = [(p if kind in (NORMAL, USER) else p + UNREACHABLE, score) for p, score, kind in model.pieces]
    others = [piece for piece in vocabulary if piece not in {text for text, _, _ in model.pieces}]
    pieces += [(piece if piece in codes else piece + UNREACHABLE, 0.0) for piece in others]
    backend = Tokenizer(_tokenizer_model(model, pieces))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    split = model.kind == BPE  # no merge crosses a space
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=split)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=split)
    backend.add_special_tokens([piece for piece in others if piece in codes])
    ids = {piece.removesuffix(UNREACHABLE): number for number, (piece, _) in enumerate(pieces)}
    return backend, {number: ids[piece] for piece, number in vocabulary.items()}


def _tokenizer_model(model: SentencePiece, pieces: list[tuple[str, float]]) -> Any:
    """A unigram model, or BPE merges in the order of the scores of the pieces they make."""
    from tokenizers import models

    unknown = next((number for number, piece in enumerate(model.pieces) if piece[2] == UNKNOWN), None)
    if model.kind == UNIGRAM:
        return models.Unigram(pieces, unknown, False)
    scores = {piece: score for piece, score, kind in model.pieces if kind == NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    numbers = {piece: number for number, (piece, _) in enumerate(pieces)}
    named = None if unknown is None else pieces[unknown][0]
    return models.BPE(numbers, merges, unk_token=named, fuse_unk=True)
