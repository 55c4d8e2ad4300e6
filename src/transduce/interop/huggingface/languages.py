"""Language codes of multilingual models.

A multilingual model reads the code of the source language before or after the source, and its output begins with the
code of the target language. The folder mostly does not name the two languages: an imported run has one pair of them.
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
    """Codes of the source and target language."""

    source: str | None = None  # None: the one that the tokenizer of the folder adds
    target: str | None = None  # None: forced_bos_token_id
    forced: int | None = None  # forced_bos_token_id

    def prefixes(self, special: Mapping[str, int], template: Sequence[int], where: str) -> tuple[list[int], list[int]]:
        """Ids before source and target. `special`: special tokens. `template`: ids that the tokenizer adds."""
        if self.source is not None:
            source = _code(self.source, special, where)
        elif len(template) == 2 and template[0] in special.values():
            source = template[0]
        else:
            raise _unknown_language("source", where)
        if self.target is None and self.forced is None:
            raise _unknown_language("target", where)
        target = self.forced if self.target is None else _code(self.target, special, where)
        assert target is not None
        return [source], [target]

    def suffix(self, special: Mapping[str, int], code: int, start: int | None, where: str) -> tuple[int, int]:
        """Where the code follows </s> (mBART-25): the code of the source, and the start token of outputs."""
        if self.source is None and code not in special.values():
            raise _unknown_language("source", where)
        source = code if self.source is None else _code(self.source, special, where)
        if self.target is not None:
            return source, _code(self.target, special, where)
        if start is None or start not in special.values():
            raise _unknown_language("target", where)
        return source, start


def _code(name: str, special: Mapping[str, int], where: str) -> int:
    for spelt in (name, f"__{name}__"):  # M2M100 writes __de__
        if spelt in special:
            return special[spelt]
    raise InputError(f"no token is the language {name!r}", where=where, remedy=nearest(name, special))


def _unknown_language(side: str, where: str) -> InputError:
    return InputError(
        f"this model is multilingual, and the language of the {side} is not given",
        where=where,
        remedy="convert it for a pair of languages: "
        "transduce convert FOLDER RUN --source-language eng_Latn --target-language deu_Latn",
    )


def read_codes(folder: Path, after: int) -> dict[str, int]:
    """Language codes outside the vocabulary file, with their ids: they follow its `after` pieces in the order in which
    they are listed, unless ids are given."""
    content = {**read_json(folder, "special_tokens_map.json"), **read_json(folder, CONFIG)}
    numbered = content.get("added_tokens_decoder")
    try:
        if isinstance(numbered, dict):
            found = {str(one["content"]): int(number) for number, one in numbered.items()}
            return {name: number for name, number in found.items() if number >= after}
        named: list[Any] = next((content[key] for key in LISTS if content.get(key)), [])
        names = [str(one["content"] if isinstance(one, dict) else one) for one in named]
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "the language codes are not listed in a readable form",
            where=str(folder / CONFIG),
            remedy="fetch it again",
        ) from None
    return {name: after + offset for offset, name in enumerate(names)}
