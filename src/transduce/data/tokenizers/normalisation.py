"""Normalisation of text before tokenisation: Unicode forms, punctuation, white space, case.

Reversible steps, undone in the output:

    nfd         text in NFC is read decomposed: Hangul syllables as jamo, accented letters as letter and mark
    nfc         text in NFD is read composed
    case        a capital letter is read as a mark and its small letter
    case_words  a word with a capital, or in capitals, is read as a mark, a space and the word in small letters, which
                has the same pieces then; words in mixed case stay

A word that a reversible step could not restore (one in another form, or with one of the marks below) keeps its own
form, after a mark of its own.

One-way steps, which stand first; outputs have the normalised form:

    canonical   letters and marks composed (NFC)
    nfkc        compatibility characters too: full-width letters, ligatures, superscripts, `…` (NFKC)
    quotes      typographic quotes as " and '
    dashes      dashes, hyphens and minus signs as -
    spaces      white space as one space; zero-width spaces and soft hyphens removed; tabs and line feeds stay
    lower       small letters

`undo(apply(text))` is the text after the one-way steps alone: without any, the text itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# For private use: hardly any text contains them, and where one does, its word keeps its form.
KEPT, CAPITAL, TITLE, UPPER = "\ue0c0", "\ue0c1", "\ue0c2", "\ue0c3"
ONE_WAY = ("canonical", "nfkc", "quotes", "dashes", "spaces", "lower")
STEPS = (*ONE_WAY, "nfd", "nfc", "case", "case_words")
_REPLACED = {
    "quotes": str.maketrans({**dict.fromkeys("“”„‟«»〝〞″", '"'), **dict.fromkeys("‘’‚‛‹›′´`", "'")}),
    "dashes": dict.fromkeys(map(ord, "‐‑‒–—―−﹘﹣－"), "-"),
}
_FORMS = {"canonical": "NFC", "nfkc": "NFKC"}
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]+")
_WHITE_SPACE = re.compile(r"[^\S\t\n]+")
_OTHER_THAN_ONE_SPACE = re.compile(r"[^\S\t\n]{2,}|[^\S\t\n ]")  # white space without the single spaces, which stay
_SPACES = re.compile(r"(\s+)")
_CAPITALS = re.compile(f"{CAPITAL}(.)", re.DOTALL)
_MARKED_WORD = re.compile(rf"(?<!\S)(?:([{TITLE}{UPPER}]) )?(\S+)")

Part = tuple[str, int, int]  # a piece of normalised text, and its span in the text it was made from


@dataclass(frozen=True)
class NormalisedText:
    """A normalised text, and for each of its characters the span in the raw text; that of a mark is empty."""

    text: str
    begins: Sequence[int]
    ends: Sequence[int]

    def raw_span(self, begin: int, end: int) -> tuple[int, int]:
        """The raw span of a span of the normalised text."""
        if begin >= end:
            place = self.begins[begin] if begin < len(self.begins) else (self.ends[-1] if self.ends else 0)
            return place, place
        return self.begins[begin], self.ends[end - 1]


def apply(text: str, steps: Sequence[str]) -> str:
    for step in steps:
        if step in ONE_WAY:
            text = _reduced(text, step)
            continue
        text = "".join(part if not part or part.isspace() else _changed(part, step) for part in _SPACES.split(text))
    return text


def undo(text: str, steps: Sequence[str]) -> str:
    for step in reversed(steps):
        if step in ONE_WAY:
            continue
        if step == "case_words":
            text = _with_case(text)
            continue
        text = "".join(part if not part or part.isspace() else _restored(part, step) for part in _SPACES.split(text))
    return text


def aligned(text: str, steps: Sequence[str]) -> NormalisedText:
    """`apply`, with the raw span of every character."""
    result = NormalisedText(text, range(len(text)), range(1, len(text) + 1))
    for step in steps:
        parts: list[Part] = []
        place = 0
        if step in ONE_WAY:
            parts = _reduced_parts(result.text, step)
        for word in _SPACES.split(result.text) if step not in ONE_WAY else ():
            own = [(c, i, i + 1) for i, c in enumerate(word)] if not word or word.isspace() else _parts(word, step)
            parts += [(part, place + begin, place + end) for part, begin, end in own]
            place += len(word)
        spans = [(result.raw_span(begin, end), part) for part, begin, end in parts]
        begins = [span[0] for span, part in spans for _ in part]
        ends = [span[1] for span, part in spans for _ in part]
        result = NormalisedText("".join(part for part, _, _ in parts), begins, ends)
    return result


def _reduced(text: str, step: str) -> str:
    """A text after a one-way step."""
    if step in _FORMS:
        return unicodedata.normalize(_FORMS[step], text)  # type: ignore[arg-type]
    if step in _REPLACED:
        if text.isascii():  # much faster than `translate`
            return text.replace("`", "'") if step == "quotes" else text
        return text.translate(_REPLACED[step])
    if step == "spaces":
        if not text.isascii():
            text = _INVISIBLE.sub("", text)
        return _OTHER_THAN_ONE_SPACE.sub(" ", text)
    return "".join(map(str.lower, text))  # one by one: the capital of a final sigma has another small letter


def _reduced_parts(text: str, step: str) -> list[Part]:
    """A text after a one-way step, in parts: the fewest characters that change by themselves."""
    if step == "spaces":
        return _space_parts(text)
    if step not in _FORMS:
        return [(_reduced(one, step), place, place + 1) for place, one in enumerate(text)]
    parts, begin = list[Part](), 0
    for end in range(1, len(text) + 1):
        if end == len(text) or _boundary(text[begin:end], text[end], step):
            parts.append((_reduced(text[begin:end], step), begin, end))
            begin = end
    if "".join(part for part, _, _ in parts) == _reduced(text, step):
        return parts
    return [(_reduced(text, step), 0, len(text))]


def _boundary(before: str, after: str, step: str) -> bool:
    """Whether a character is normalised independently of those before it."""
    if before.isascii() and after.isascii():
        return True
    first = unicodedata.normalize("NFKD", after)[:1]
    joined = _reduced(before + after, step) != _reduced(before, step) + _reduced(after, step)
    return not joined and not unicodedata.combining(first)


def _space_parts(text: str) -> list[Part]:
    """Runs of white space, with the invisible characters in them, as one space each."""
    parts: list[Part] = []
    for place, character in enumerate(text):
        if _INVISIBLE.match(character):
            continue
        space = bool(_WHITE_SPACE.match(character))
        if space and parts and parts[-1][0] == " ":
            parts[-1] = (" ", parts[-1][1], place + 1)
        else:
            parts.append((" " if space else character, place, place + 1))
    return parts


def _changed(word: str, step: str) -> str:
    if word.isascii() and step in ("nfd", "nfc"):
        return word
    return "".join(part for part, _, _ in _parts(word, step))


def _parts(word: str, step: str) -> list[Part]:
    """A word after one step, in parts; unchanged after a mark where the step could not be undone."""
    parts = _WAYS[step](word)
    found = "".join(part for part, _, _ in parts)
    mark = step == "case_words" and word in (TITLE, UPPER)
    if mark or word.startswith(KEPT) or _restored(found, step) != word:
        return [(KEPT, 0, 0), *((character, place, place + 1) for place, character in enumerate(word))]
    return parts


def _restored(word: str, step: str) -> str:
    if step == "case_words":
        return _with_case(word)
    if word.startswith(KEPT):
        return word[len(KEPT) :]
    if step == "case":
        return _CAPITALS.sub(lambda match: match[1].upper(), word)
    return word if word.isascii() else unicodedata.normalize("NFC" if step == "nfd" else "NFD", word)


def _decomposed(word: str) -> list[Part]:
    return [(unicodedata.normalize("NFD", character), i, i + 1) for i, character in enumerate(word)]


def _composed(word: str) -> list[Part]:
    parts: list[Part] = []
    place = 0
    for character in unicodedata.normalize("NFC", word):
        size = len(unicodedata.normalize("NFD", character))
        parts.append((character, min(place, len(word)), min(place + size, len(word))))
        place += size
    return parts


def _marked(word: str) -> list[Part]:
    parts: list[Part] = []
    for place, character in enumerate(word):
        small = character.lower()
        if small != character and len(small) == 1 and small.upper() == character:
            parts += [(CAPITAL, place, place), (small, place, place + 1)]
        else:
            parts.append((character, place, place + 1))
    return parts


def _case_marked(word: str) -> list[Part]:
    """The word in small letters after a mark and a space; unchanged in mixed case and in small letters."""
    small = "".join(one.lower() if len(one.lower()) == 1 else one for one in word)
    for mark in (TITLE, UPPER):
        if small != word and _cased(small, mark) == word:
            return [(f"{mark} ", 0, 0), *((one, place, place + 1) for place, one in enumerate(small))]
    return [(one, place, place + 1) for place, one in enumerate(word)]


def _cased(small: str, mark: str) -> str:
    """A word in small letters with its first letter, or all of them, as capitals; letters without one capital stay."""
    capitals = [one.upper() if len(one.upper()) == 1 else one for one in small]
    if mark == UPPER:
        return "".join(capitals)
    first = next((place for place, one in enumerate(small) if capitals[place] != one), None)
    return small if first is None else small[:first] + capitals[first] + small[first + 1 :]


def _with_case(text: str) -> str:
    """Undoes `case_words`: the word after a mark gets its capitals."""
    return _MARKED_WORD.sub(lambda found: _cased(found[2], found[1]) if found[1] else found[2].removeprefix(KEPT), text)


_WAYS: dict[str, Callable[[str], list[Part]]] = {
    "nfd": _decomposed,
    "nfc": _composed,
    "case": _marked,
    "case_words": _case_marked,
}
