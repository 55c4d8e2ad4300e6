"""A folder's tokenizer files and the special tokens of its model in, our tokenizers out, with the order of its rows.

Our code knows four ids: <pad>, <s>, </s> and <unk> are 0 to 3. So the rows of an imported vocabulary are put in that
order once, here, and nothing downstream hears of other numbers. The token an output starts with is our <s>. Where it
is one of the others too (Marian starts with <pad>, BART with </s>) our <s> is a copy of that row that is never said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN, Vocabulary
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.interop.huggingface.folder import inside, read_json
from transduce.interop.huggingface.languages import Languages, read_codes
from transduce.interop.huggingface.sentencepiece import CODE, NORMAL, USER, library, read_model
from transduce.model import NEVER

NAME, LIST, MODELS = "tokenizer.json", "vocab.json", ("source.spm", "target.spm")
JOINT = "sentencepiece.bpe.model"  # one for all languages
MASKS = ("[MASK]", "<mask>")
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
class Reading:
    """How the model reads texts, beyond what its tokenizer says of itself."""

    closes: bool = True  # they end with </s>, as its tokenizer must write them
    masked: bool = False  # it fills masks: our <unk>, which stands for a hidden token, is its own
    lowered: bool = False  # in small letters
    languages: Languages | None = None  # each side begins with the code of its language
    coded: bool = False  # always so: what its tokenizer says of itself may be an older habit
    trails: bool = False  # the code may follow the </s> of a source, and start a target
    writes: bool = False  # it only writes texts: what its sources are has no tokens
    prompt: Sequence[int] | None = None  # what every output is begun with, in their numbers
    hidden: re.Pattern[str] | None = None  # tokens that are no text, though its tokenizer does not say so


@dataclass(frozen=True)
class Library:
    """A tokenizer of the library, and what their numbers are in it."""

    backend: Any
    names: Mapping[int, str]  # by their number
    numbers: Mapping[int, int]  # their number -> the library's
    frame: list[int]  # what stands around a text, in their numbers
    unknown: int | None  # theirs, of text that has no piece
    special: Mapping[str, int]  # names that are no text, with their numbers: codes of languages among them


def read_tokenizers(
    folder: Path, specials: Specials, size: int, reading: Reading
) -> tuple[tuple[Tokenizer, Tokenizer], Rows]:
    """Source and target."""
    libraries = _open(folder, specials, reading.hidden)
    first = libraries[0]
    end = specials.end if specials.end is not None else (first.frame[-1] if first.frame else None)
    if end is None:
        raise InputError("no token ends a text", where=str(folder), remedy="eos_token_id in config.json names it")
    leads, tail = (list[int](), list[int]()), list[int]()
    if reading.trails and first.frame[:-1] == [end]:
        own = None if specials.start in (end, specials.pad) else specials.start
        code, start = (reading.languages or Languages()).trail(first.special, first.frame[-1], own, str(folder))
        specials, tail = replace(specials, start=start), [end, code]
    else:
        leads = _leads(folder, first, end, reading)
    if reading.writes and leads[1][:1] == [specials.start]:
        leads = [], leads[1][1:]
    start = specials.start if specials.start is not None else (leads[0][0] if leads[0] else end)
    # A vocabulary of bytes knows no unknown, and names any of the others.
    unknown = None if first.unknown in (start, end, specials.pad) else first.unknown
    if reading.masked:  # every token that stands there is said again: what begins a text, and what has no piece
        start, unknown = NONE, _mask(folder, first)
    special = [NONE if one is None else one for one in (specials.pad, start, end, unknown)]
    for number in (*special, *leads[0], *leads[1], *tail, *first.names):
        if not NONE <= number < size:
            raise InputError(
                f"token {number} has no row: the model knows {size}", where=str(folder), remedy="fetch it again"
            )
    rows = Rows((*special, *(number for number in range(size) if number not in special)), size)
    sides = (libraries[0], libraries[-1])
    made = [
        _tokenizer(library, rows, around, reading.lowered)
        for library, around in zip(sides, ((leads[0], tail), (leads[1], [])), strict=True)
    ]
    return (made[0], made[1]), rows


def _leads(folder: Path, library: Library, end: int, reading: Reading) -> tuple[list[int], list[int]]:
    """What stands before every text, on either side."""
    if reading.prompt is not None:
        return [], list(reading.prompt)
    if reading.writes:
        return [], library.frame[:-1] if library.frame[-1:] == [end] else []
    if reading.languages is not None and reading.coded:
        return reading.languages.leads(library.special, library.frame, str(folder))
    if reading.closes and (not library.frame or library.frame[-1] != end):
        raise InputError(
            "its tokenizer does not close a text with </s>, as every source is closed here",
            where=str(folder / NAME),
            remedy="a post-processor that puts </s> last is needed",
        )
    if reading.languages is not None:
        return reading.languages.leads(library.special, library.frame, str(folder))
    lead = library.frame[:-1] if reading.closes else []
    return lead, lead


def _mask(folder: Path, library: Library) -> int:
    named = _text(read_json(folder, "tokenizer_config.json").get("mask_token"))
    for number, piece in library.names.items():
        if piece == named or (named is None and piece in MASKS):
            return number
    raise InputError("no token stands for a hidden one", where=str(folder), remedy="mask_token names it")


def _text(named: Any) -> Any:
    """The name of a token, which may be written with its habits."""
    return named.get("content") if isinstance(named, dict) else named


def _tokenizer(library: Library, rows: Rows, around: tuple[list[int], list[int]], lowered: bool) -> Tokenizer:
    lead, tail = (tuple(map(rows.ours, part)) for part in around)
    named = [library.names.get(number, f"<unused {number}>") for number in rows.numbers[len(SPECIALS) :]]
    numbers = tuple(library.numbers.get(number, NONE) for number in rows.numbers)
    text = _lowered(library.backend) if lowered else library.backend.to_str()
    return Tokenizer(Vocabulary(GIVEN, (*SPECIALS, *named), library=text, rows=numbers, lead=lead, tail=tail))


def _lowered(backend: Any) -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import normalizers

    copy = Backend.from_str(backend.to_str())
    small = normalizers.Lowercase()
    copy.normalizer = small if copy.normalizer is None else normalizers.Sequence([small, copy.normalizer])
    text: str = copy.to_str()
    return text


def _open(folder: Path, specials: Specials, hidden: re.Pattern[str] | None) -> list[Library]:
    """One tokenizer for both sides, or one for each."""
    if read_json(folder, NAME):
        return [_whole(folder, hidden)]
    listed = read_json(folder, LIST)
    files = [name for name in (*MODELS, JOINT) if inside(folder, name).is_file()]
    if not files or not listed:
        raise InputError(
            f"there is no {NAME}",
            where=str(folder),
            remedy="save it from a fast tokenizer: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    if not all(isinstance(number, int) and number >= 0 for number in listed.values()):
        raise InputError("expected pieces with their numbers", where=str(folder / LIST), remedy="fetch it again")
    found = []
    unknown, frame = listed.get("<unk>"), [] if specials.end is None else [specials.end]
    for name in [JOINT] if files == [JOINT] else MODELS:
        model = read_model(folder, name)
        spelt = {piece for piece, _, kind in model.pieces if kind in (NORMAL, USER)}
        codes = {piece: number for piece, number in listed.items() if CODE.fullmatch(piece) and piece not in spelt}
        codes |= read_codes(folder, len(listed)) if name == JOINT else {}
        every = {**listed, **codes}
        backend, numbers = library(model, every, codes)
        names = {number: piece for piece, number in every.items()}
        found.append(Library(backend, names, numbers, frame, unknown, codes))
    return found


def _whole(folder: Path, hidden: re.Pattern[str] | None) -> Library:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(inside(folder, NAME)))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"not a tokenizer: {error}", where=str(folder / NAME), remedy="fetch it again") from None
    if hidden is not None:
        named = [one.content for one in backend.get_added_tokens_decoder().values()]
        backend.add_special_tokens([name for name in named if hidden.fullmatch(name)])
    backend.no_padding()
    backend.no_truncation()
    names = {number: piece for piece, number in backend.get_vocab(with_added_tokens=True).items()}
    special = {one.content: number for number, one in backend.get_added_tokens_decoder().items() if one.special}
    same = {number: number for number in names}
    return Library(backend, names, same, backend.encode("").ids, _unknown(folder, backend), special)


def _unknown(folder: Path, backend: Any) -> int | None:
    """What stands for text that has no piece."""
    model = json.loads(backend.to_str())["model"]
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    named = _text(read_json(folder, "tokenizer_config.json").get("unk_token") or model.get("unk_token"))
    number: int | None = backend.token_to_id(named) if isinstance(named, str) else None
    return number
