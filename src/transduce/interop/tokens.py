"""A folder's tokenizer files and the special tokens of its model in, our tokenizers out, with the order of its rows.

Our code knows four ids: <pad>, <s>, </s> and <unk> are 0 to 3. So the rows of an imported vocabulary are put in that
order once, here, and nothing downstream hears of other numbers. The token an output starts with is our <s>. Where it
is one of the others too (Marian starts with <pad>, BART with </s>) our <s> is a copy of that row that is never said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.data.text import Tokenizer
from transduce.data.vocabulary import GIVEN, Vocabulary
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.interop.folder import inside, read_json
from transduce.interop.pieces import library, read_model
from transduce.model import NEVER

NAME, LIST, MODELS = "tokenizer.json", "vocab.json", ("source.spm", "target.spm")
NONE = -1  # the row of a special token that they do not have


@dataclass(frozen=True)
class Rows:
    """Their row for each of ours; NONE where they have none."""

    numbers: tuple[int, ...]
    theirs: int  # how many rows they have

    @property
    def silent(self) -> list[int]:
        """Rows of ours that stand for nothing of theirs, or a second time for the same."""
        special = {name: self.numbers[name] for name in (EOS, PAD, UNK, BOS)}
        seen: set[int] = {NONE}
        result = []
        for ours, theirs in special.items():
            if theirs in seen:
                result.append(ours)
            seen.add(theirs)
        return result

    def ours(self, theirs: int) -> int:
        for name in (EOS, PAD, UNK, BOS):
            if self.numbers[name] == theirs:
                return name
        return self.numbers.index(theirs)

    def pick(self, weight: Tensor) -> Tensor:
        """V' ... -> V ...; rows that they do not have are zero."""
        index = torch.tensor(self.numbers, device=weight.device)
        shape = (-1,) + (1,) * (weight.dim() - 1)
        return weight[index.clamp(min=0)] * (index >= 0).view(shape)

    def hush(self, bias: Tensor) -> Tensor:
        """No probability for rows that are silent: those of theirs keep theirs."""
        bias = bias.clone()
        if bias.device.type != "meta":
            bias[self.silent] = NEVER
        return bias


@dataclass(frozen=True)
class Specials:
    """Their numbers of the tokens that have a part of their own."""

    start: int | None  # None: nothing is written
    end: int | None  # None: whatever closes a text
    pad: int | None


@dataclass(frozen=True)
class Library:
    """A tokenizer of the library, and what their numbers are in it."""

    backend: Any
    names: Mapping[int, str]  # by their number
    numbers: Mapping[int, int]  # their number -> the library's
    frame: list[int]  # what stands around a text, in their numbers
    unknown: int | None  # theirs, of text that has no piece


def read_tokenizers(
    folder: Path, specials: Specials, size: int, *, closes: bool
) -> tuple[tuple[Tokenizer, Tokenizer], Rows]:
    """Source and target. `closes`: the model reads texts that end with </s>, as its tokenizer must write them."""
    libraries = _open(folder, specials)
    first = libraries[0]
    end = specials.end if specials.end is not None else (first.frame[-1] if first.frame else None)
    if end is None:
        raise InputError("no token ends a text", where=str(folder), remedy="eos_token_id in config.json names it")
    if closes and (not first.frame or first.frame[-1] != end):
        raise InputError(
            "its tokenizer does not close a text with </s>, as every source is closed here",
            where=str(folder / NAME),
            remedy="a post-processor that puts </s> last is needed; a language code after it cannot be imported yet",
        )
    lead = first.frame[:-1] if closes else []
    start = specials.start if specials.start is not None else (lead[0] if lead else end)
    # A vocabulary of bytes knows no unknown, and names any of the others.
    unknown = None if first.unknown in (start, end, specials.pad) else first.unknown
    special = [NONE if one is None else one for one in (specials.pad, start, end, unknown)]
    for number in (*special, *lead, *first.names):
        if not NONE <= number < size:
            raise InputError(
                f"token {number} has no row: the model knows {size}", where=str(folder), remedy="fetch it again"
            )
    rows = Rows((*special, *(number for number in range(size) if number not in special)), size)
    leading = tuple(rows.ours(number) for number in lead)
    made = [_tokenizer(library, rows, leading) for library in libraries]
    return (made[0], made[-1]), rows


def _tokenizer(library: Library, rows: Rows, lead: tuple[int, ...]) -> Tokenizer:
    named = [library.names.get(number, f"<unused {number}>") for number in rows.numbers[len(SPECIALS) :]]
    numbers = tuple(library.numbers.get(number, NONE) for number in rows.numbers)
    text = library.backend.to_str()
    return Tokenizer(Vocabulary(GIVEN, (*SPECIALS, *named), library=text, rows=numbers, lead=lead))


def _open(folder: Path, specials: Specials) -> list[Library]:
    """One tokenizer for both sides, or one for each."""
    if read_json(folder, NAME):
        return [_whole(folder)]
    listed = read_json(folder, LIST)
    if not (folder / MODELS[0]).exists() or not listed:
        raise InputError(
            f"there is no {NAME}",
            where=str(folder),
            remedy="save it from a fast tokenizer: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    if not all(isinstance(number, int) and number >= 0 for number in listed.values()):
        raise InputError("expected pieces with their numbers", where=str(folder / LIST), remedy="fetch it again")
    found = []
    for name in MODELS:
        backend, numbers = library(read_model(folder, name), listed)
        names = {number: piece for piece, number in listed.items()}
        frame = [] if specials.end is None else [specials.end]
        found.append(Library(backend, names, numbers, frame, listed.get("<unk>")))
    return found


def _whole(folder: Path) -> Library:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(inside(folder, NAME)))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"not a tokenizer: {error}", where=str(folder / NAME), remedy="fetch it again") from None
    backend.no_padding()
    backend.no_truncation()
    names = {number: piece for piece, number in backend.get_vocab(with_added_tokens=True).items()}
    return Library(
        backend, names, {number: number for number in names}, backend.encode("").ids, _unknown(folder, backend)
    )


def _unknown(folder: Path, backend: Any) -> int | None:
    """What stands for text that has no piece."""
    model = json.loads(backend.to_str())["model"]
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    named = read_json(folder, "tokenizer_config.json").get("unk_token") or model.get("unk_token")
    named = named.get("content") if isinstance(named, dict) else named
    number: int | None = backend.token_to_id(named) if isinstance(named, str) else None
    return number
