"""Sentence splitting by rules: punctuation, abbreviations, scripts without spaces. Nothing is lost."""

from __future__ import annotations

import re

# A full stop after these does not end a sentence. Short lists of frequent ones: an unnecessary split costs more than a
# missing one.
_ABBREVIATIONS = """
    mr mrs ms dr prof sr jr st vs etc inc ltd co corp no vol pp p fig al gen col sgt capt lt rev hon jan feb mar apr
    jun jul aug sep sept oct nov dec approx dept est e.g i.e
    bzw ca d.h evtl ggf hr fr nr str usw u.a z.b vgl bspw inkl abs art bd jh sog zzgl
    m mme mlle av env p.ex c.-à-d sra dra srta ud uds ee.uu pág
"""  # English, German, French, Spanish
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())
_END = re.compile(
    r"""[.!?…؟।]+["'»”’)\]]*(?=\s)   # an end before white space
    |[。！？｡]+[」』）”’]*            # an end of Chinese or Japanese
    |\n\s*\n                         # an empty line
    """,
    re.VERBOSE,
)
_OPENING = "\"'«»„“‚‘([¿¡-–—"


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each with the white space after it: joined they are the text."""
    pieces, begin = [], 0
    for match in _END.finditer(text):
        end = match.end() + _white_space(text, match.end())
        if match.start() >= begin and end < len(text) and _ends_sentence(text, begin, match, end):
            pieces.append(text[begin:end])
            begin = end
    return [*pieces, text[begin:]] if text[begin:] or not pieces else pieces


def _white_space(text: str, start: int) -> int:
    return len(text[start:]) - len(text[start:].lstrip())


def _ends_sentence(text: str, begin: int, match: re.Match[str], following: int) -> bool:
    """Whether the punctuation of this match ends a sentence, given what stands before and after it."""
    mark = match.group()
    if mark[0] in "。！？｡" or mark.isspace():
        return True
    next_letter = text[following:].lstrip(_OPENING)[:1]
    if next_letter.islower():
        return False
    if mark != ".":
        return True
    word = text[begin : match.start()].split()[-1:] or [""]
    last = word[0].lstrip(_OPENING)
    # Initials (J. S. Bach), abbreviations, and ordinal numbers (3. März)
    return not (len(last) == 1 and last.isalpha()) and last.lower() not in ABBREVIATIONS and not _ordinal(last)


def _ordinal(word: str) -> bool:
    return word.isdigit() and len(word) <= 2


def split_long(text: str, most: int, length: int) -> list[str]:
    """A text of `length` tokens in equal parts of about `most` at most, with the white space after each word."""
    parts = -(-length // max(most, 1))
    words = re.findall(r"\s*\S+\s*", text)
    if parts <= 1 or len(words) < 2:
        return [text]
    size = -(-len(words) // parts)
    return ["".join(words[start : start + size]) for start in range(0, len(words), size)]
