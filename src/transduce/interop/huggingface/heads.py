"""Heads of encoder-only checkpoints: labels and sentence-transformers pooling, in both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import Vocabulary
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.interop.huggingface.family import Config, Content
from transduce.interop.huggingface.folder import inside, read_json, read_text

SINGLE_LABEL = ("single_label_classification", None)  # values of problem_type
WHITE_SPACE = {" ": "<space>", "\t": "<tab>"}  # pieces of a word vocabulary that are no valid label names

MODULES, SETTINGS, POOLING = "modules.json", "sentence_bert_config.json", "pooling_mode"
MODULE_LISTS = (("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize"))
POOLING_NAMES = {"cls": "first", "mean": "mean", "max": "max", "lasttoken": "last"}
POOLING_FLAGS = {  # older files have a flag for each
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
HF_POOLING = {native: hf for hf, native in POOLING_NAMES.items()}


def read_labels(config: Config, kind: str) -> Tokenizer:
    """The tokenizer of the labels in `id2label`. `kind`: labels, one per text, or words, one per word of a text."""
    problem, named = config.content.get("problem_type"), config.content.get("id2label")
    if problem not in SINGLE_LABEL:
        raise InputError(
            f"problem_type: {problem!r} cannot be imported",
            where=config.where,
            remedy="only one label per text is supported",
        )
    if named is None:  # the library writes no names that it would give itself
        named = {str(number): f"LABEL_{number}" for number in range(config.count("num_labels", 2))}
    if not isinstance(named, dict) or not named:
        raise InputError("id2label names no labels", where=config.where, remedy="fetch the folder again")
    try:
        names = tuple(str(named[str(number)]) for number in range(len(named)))
    except KeyError as missing:
        raise InputError(f"id2label has no {missing}", where=config.where, remedy="fetch the folder again") from None
    if len(names) < 2:
        raise InputError(
            "a model with a single label is a regression model",
            where=config.where,
            remedy="classifiers with two or more labels are supported",
        )
    spaced = kind == "words" and any(name.split() != [name] for name in names)
    if len(set(names)) < len(names) or not all(names) or spaced:
        raise InputError(
            "labels are empty, repeated, or contain spaces", where=config.where, remedy="rename them in id2label"
        )
    return Tokenizer(Vocabulary(kind, (*SPECIALS, *names)))


def write_labels(target: Tokenizer) -> Content:
    names = [WHITE_SPACE.get(name, name) for name in target.vocabulary.pieces[len(SPECIALS) :]]
    numbers = {name: number for number, name in enumerate(names)}
    return {"id2label": dict(enumerate(names)), "label2id": numbers, "num_labels": len(names)}


def after_specials(rows: Tensor) -> list[Tensor]:
    """L ... -> 4 + L ...: special tokens have rows too, which are never output."""
    return [torch.cat((rows.new_zeros(len(SPECIALS), *rows.shape[1:]), rows))]


def without_specials(native: list[Tensor]) -> Tensor:
    """4 + L ... -> L ..."""
    return native[0][len(SPECIALS) :]


@dataclass(frozen=True)
class SentenceTransformer:
    """Content of modules.json and of the files it names."""

    folder: Path  # of the encoder
    head: Content
    max_length: int | None  # in tokens, special tokens included
    lowercase: bool


def read_sentence_transformer(folder: Path) -> SentenceTransformer | None:
    """None where the folder has no modules.json."""
    if not inside(folder, MODULES).is_file():
        return None
    where = str(folder / MODULES)
    try:
        listed = json.loads(read_text(folder, MODULES))
        paths = [str(one["path"]) for one in listed]
        kinds = tuple(str(one["type"]).rpartition(".")[2] for one in listed)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"not a list of modules: {error}", where=where, remedy="fetch it again") from None
    if kinds not in MODULE_LISTS:
        raise InputError(
            f"modules that cannot be imported: {', '.join(kinds)}",
            where=where,
            remedy="supported: Transformer, Pooling and optionally Normalize",
        )
    encoder = inside(folder, paths[0]) if paths[0] else folder
    settings = read_json(encoder, SETTINGS)
    max_length = settings.get("max_seq_length")
    if max_length is not None and (not isinstance(max_length, int) or max_length < 3):
        raise InputError(f"max_seq_length: {max_length!r} is no length", where=str(encoder / SETTINGS))
    head = {"kind": "embedder", "pooling": _read_pooling(inside(folder, paths[1])), "normalise": "Normalize" in kinds}
    return SentenceTransformer(encoder, head, max_length, settings.get("do_lower_case") is True)


def _read_pooling(folder: Path) -> str:
    content = read_json(folder, "config.json", needed=True)
    if POOLING in content:
        name = content[POOLING] if isinstance(content[POOLING], str) else None
        found = [POOLING_NAMES[name]] if name in POOLING_NAMES else []
    else:
        flags = [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
        found = [POOLING_FLAGS[name] for name in flags] if set(flags) <= set(POOLING_FLAGS) else []
    if len(found) != 1:
        raise InputError(
            "this pooling mode cannot be imported",
            where=str(folder / "config.json"),
            remedy="supported: exactly one of cls, mean, max and lasttoken",
        )
    return found[0]


def write_sentence_transformer(head: Mapping[str, Any], width: int) -> Content:
    """Files of the sentence-transformers library that describe the pooling."""
    kinds = ["Transformer", "Pooling"] + (["Normalize"] if head["normalise"] else [])
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "",
         "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    pooling = {"word_embedding_dimension": width, "pooling_mode": HF_POOLING[head["pooling"]]}
    return {"modules.json": modules, "1_Pooling/config.json": pooling}
