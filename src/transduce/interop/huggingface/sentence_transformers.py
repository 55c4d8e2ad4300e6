"""A sentence-transformers folder in; where its encoder lies, and how rows become one vector, out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.errors import InputError
from transduce.interop.huggingface.folder import inside, read_json, read_text

MODULES, SETTINGS, POOLING = "modules.json", "sentence_bert_config.json", "pooling_mode"
WAYS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
NAMES = {"cls": "first", "mean": "mean", "max": "max", "lasttoken": "last"}  # the newer way of saying it
ORDERS = (("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize"))


@dataclass(frozen=True)
class Sentences:
    """What modules.json and the files it names say."""

    folder: Path  # of the encoder
    head: dict[str, Any]
    longest: int | None  # tokens of a text, those around it counted in
    lowered: bool


def read_sentences(folder: Path) -> Sentences | None:
    """None where the folder is not of this kind."""
    if not inside(folder, MODULES).is_file():
        return None
    where = str(folder / MODULES)
    try:
        listed = json.loads(read_text(folder, MODULES))
        paths = [str(one["path"]) for one in listed]
        kinds = tuple(str(one["type"]).rpartition(".")[2] for one in listed)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"not a list of modules: {error}", where=where, remedy="fetch it again") from None
    if kinds not in ORDERS:
        raise InputError(
            f"modules that cannot be imported: {', '.join(kinds)}",
            where=where,
            remedy="known: a Transformer, its Pooling, and Normalize or not",
        )
    encoder = inside(folder, paths[0]) if paths[0] else folder
    settings = read_json(encoder, SETTINGS)
    longest = settings.get("max_seq_length")
    if longest is not None and (not isinstance(longest, int) or longest < 3):
        raise InputError(f"max_seq_length: {longest!r} is no length", where=str(encoder / SETTINGS))
    head = {"kind": "embedder", "pooling": _pooling(inside(folder, paths[1])), "normalise": "Normalize" in kinds}
    return Sentences(encoder, head, longest, settings.get("do_lower_case") is True)


def _pooling(folder: Path) -> str:
    content = read_json(folder, "config.json", needed=True)
    where = str(folder / "config.json")
    if POOLING in content:
        way = content[POOLING] if isinstance(content[POOLING], str) else None
        found = [NAMES[way]] if way in NAMES else []
    else:
        asked = [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
        found = [WAYS[name] for name in asked if name in WAYS] if set(asked) <= set(WAYS) else []
    if len(found) != 1:
        raise InputError(
            "this way of pooling cannot be imported", where=where, remedy="known: one of cls, mean, max and lasttoken"
        )
    return found[0]
