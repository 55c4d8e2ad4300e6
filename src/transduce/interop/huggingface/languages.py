"""The names of two languages and a vocabulary in; what stands around every source and before every target out.

A model of many languages reads the code of the source's language first or last, and its output begins with the code
of the language asked for. Which two is mostly no part of the folder: a run of ours is for one pair of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.errors import InputError, nearest
from transduce.interop.huggingface.folder import read_json

CONFIG, LISTS = "tokenizer_config.json", ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class Languages:
    """From which language into which, by their codes."""

    source: str | None = None  # None: the one that the folder's tokenizer puts first
    target: str | None = None  # None: the one that the folder's search is told to begin with
    forced: int | None = None  # the number of that one

    def leads(self, special: Mapping[str, int], frame: Sequence[int], where: str) -> tuple[list[int], list[int]]:
        """`special`: tokens that are no text. `frame`: what the tokenizer puts around one."""
        if self.source is not None:
            source = _code(self.source, special, where)
        elif len(frame) == 2 and frame[0] in special.values():
            source = frame[0]
        else:
            raise _unnamed("source", where)
        if self.target is None and self.forced is None:
            raise _unnamed("target", where)
        target = self.forced if self.target is None else _code(self.target, special, where)
        assert target is not None
        return [source], [target]

    def trail(self, special: Mapping[str, int], code: int, start: int | None, where: str) -> tuple[int, int]:
        """Where the code follows </s> (mBART-25): that of the source, and that which outputs start with."""
        if self.source is None and code not in special.values():
            raise _unnamed("source", where)
        source = code if self.source is None else _code(self.source, special, where)
        if self.target is not None:
            return source, _code(self.target, special, where)
        if start is None or start not in special.values():
            raise _unnamed("target", where)
        return source, start


def _code(name: str, special: Mapping[str, int], where: str) -> int:
    for spelt in (name, f"__{name}__"):  # M2M100 writes __de__
        if spelt in special:
            return special[spelt]
    raise InputError(f"no token is the language {name!r}", where=where, remedy=nearest(name, special))


def _unnamed(side: str, where: str) -> InputError:
    return InputError(
        f"this model knows many languages, and nothing says which one the {side} is in",
        where=where,
        remedy="write a run for a pair of them: "
        "transduce convert FOLDER RUN --source-language eng_Latn --target-language deu_Latn",
    )


def read_codes(folder: Path, after: int) -> dict[str, int]:
    """Codes that are no part of a list of pieces, with their numbers: they follow it, in the order in which they are
    named, where nothing says otherwise."""
    content = {**read_json(folder, "special_tokens_map.json"), **read_json(folder, CONFIG)}
    oov_placeholders = content.get("added_tokens_decoder")
    try:
        if isinstance(oov_placeholders, dict):
            found = {str(one["content"]): int(number) for number, one in oov_placeholders.items()}
            return {name: number for name, number in found.items() if number >= after}
        named: list[Any] = next((content[key] for key in LISTS if content.get(key)), [])
        names = [str(one["content"] if isinstance(one, dict) else one) for one in named]
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "the codes of languages are not named as they should be",
            where=str(folder / CONFIG),
            remedy="fetch it again",
        ) from None
    return {name: after + place for place, name in enumerate(names)}
