"""The labels that a model's settings name in; our tokenizer of labels out, and their rows after our special ones."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import Vocabulary
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.interop.huggingface.family import Settings

WHOLE = ("single_label_classification", None)  # kinds of problems with one label


def read_labels(settings: Settings, kind: str) -> Tokenizer:
    """`kind`: labels, one for a text, or words, one for each of its words."""
    problem, named = settings.content.get("problem_type"), settings.content.get("id2label")
    if problem not in WHOLE:
        raise InputError(
            f"problem_type: {problem!r} cannot be imported", where=settings.where, remedy="one label a text is known"
        )
    if not isinstance(named, dict) or not named:
        raise InputError("id2label names no labels", where=settings.where, remedy="fetch the folder again")
    try:
        names = tuple(str(named[str(number)]) for number in range(len(named)))
    except KeyError as missing:
        raise InputError(f"id2label has no {missing}", where=settings.where, remedy="fetch the folder again") from None
    if len(names) < 2:
        raise InputError(
            "a single label is a number, not a choice", where=settings.where, remedy="two or more are known"
        )
    if (
        len(set(names)) < len(names)
        or not all(names)
        or (kind == "words" and any(name.split() != [name] for name in names))
    ):
        raise InputError("labels are empty, alike, or several words", where=settings.where, remedy="rename them there")
    return Tokenizer(Vocabulary(kind, (*SPECIALS, *names)))


def without_specials(made: list[Tensor]) -> Tensor:
    """4 + L ... -> L ..."""
    return made[0][len(SPECIALS) :]


def after_specials(rows: Tensor) -> list[Tensor]:
    """L ... -> 4 + L ...: our special tokens have rows too, which are never said."""
    return [torch.cat((rows.new_zeros(len(SPECIALS), *rows.shape[1:]), rows))]
