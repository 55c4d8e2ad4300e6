"""Long sources in parts: sentences, clauses, words. Nothing is dropped: the parts joined are the source."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from transduce.data.languages import split_language, tagged
from transduce.explain.attention import Link
from transduce.inference.terminology import UNSPACED, Constraints

# Far more than the tokens of a vocabulary have on average. Characters beyond it are not tokenised: a line of a million
# characters would take 100 MB.
CHARACTERS_PER_TOKEN = 64
Lengths = Callable[[Sequence[str]], Sequence[int]]  # tokens of each text

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
_OPENINGS, _WHITE_SPACE = re.compile(f"[{re.escape(_OPENING)}]+"), re.compile(r"\s+")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each with the white space after it: joined they are the text."""
    pieces, begin = [], 0
    for match in _END.finditer(text):
        end = _after(_WHITE_SPACE, text, match.end())
        if match.start() >= begin and end < len(text) and _ends_sentence(text, begin, match, end):
            pieces.append(text[begin:end])
            begin = end
    return [*pieces, text[begin:]] if text[begin:] or not pieces else pieces


def _after(pattern: re.Pattern[str], text: str, index: int) -> int:
    """The end of the match of the pattern at an index; the index itself where there is no match."""
    found = pattern.match(text, index)
    return index if found is None else found.end()


def _ends_sentence(text: str, begin: int, match: re.Match[str], following: int) -> bool:
    """Whether the punctuation of this match ends a sentence, given what stands before and after it."""
    mark = match.group()
    if mark[0] in "。！？｡" or mark.isspace():
        return True
    letter = _after(_OPENINGS, text, following)
    if text[letter : letter + 1].islower():
        return False
    if mark != ".":
        return True
    word = text[max(begin, match.start() - 40) : match.start()].split()[-1:] or [""]  # 40: more than those below have
    last = word[0].lstrip(_OPENING)
    # Initials (J. S. Bach), abbreviations, and ordinal numbers (3. März)
    return not (len(last) == 1 and last.isalpha()) and last.lower() not in ABBREVIATIONS and not _ordinal(last)


def _ordinal(word: str) -> bool:
    return word.isdigit() and len(word) <= 2


_CJK = re.compile(rf"{UNSPACED.pattern}|[\u3000-\u303f\uff00-\uffef]")  # with its punctuation
_CLAUSE = re.compile(r"""[,;:،؛–—]+["'»”’)\]]*\s+|[，、；：]+[」』）”’]*\s*""")


def _clauses(text: str) -> list[str]:
    """Parts that end with a comma, a semicolon, a colon or a dash."""
    ends = [0, *(match.end() for match in _CLAUSE.finditer(text)), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends) if begin < end]


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+\s*", text)


def _characters(text: str) -> list[str]:
    """The characters of scripts without spaces between words; a word of another script is one part."""
    return re.findall(rf"{UNSPACED.pattern}\s*|(?:(?!{UNSPACED.pattern}).)+", text, re.DOTALL)


def split_long(text: str, most: int, lengths: Lengths) -> list[str]:
    """A text in parts of at most `most` tokens; joined they are the text. One longer word is one part.

    A long text is split between sentences, a long sentence after clauses, a long clause between words, and words of a
    script without spaces between characters.
    """
    if _fits(text, most, lengths):
        return [text]
    if len(sentences := split_sentences(text)) > 1:
        parts = sentences
    else:
        units = next((units for way in (_clauses, _words, _characters) if len(units := way(text)) > 1), [text])
        if len(units) == 1:
            return [text]
        parts = _grouped(units, most, lengths)
    return [one for part in parts for one in split_long(part, most, lengths)]


def _fits(text: str, most: int, lengths: Lengths) -> bool:
    return len(text) <= most * CHARACTERS_PER_TOKEN and lengths([text.strip()])[0] <= most


def _grouped(units: list[str], most: int, lengths: Lengths) -> list[str]:
    """The units in parts of similar lengths, as few as may suffice; at least two."""
    sizes = [max(size, 1) for size in lengths([unit[: most * CHARACTERS_PER_TOKEN].strip() for unit in units])]
    goal = sum(sizes) / max(-(-sum(sizes) // most), 2)
    ends = list(accumulate(sizes))
    numbers = [int((end - size / 2) / goal) for end, size in zip(ends, sizes, strict=True)]
    groups = groupby(zip(numbers, units, strict=True), key=lambda pair: pair[0])
    parts = ["".join(unit for _, unit in group) for _, group in groups]
    return parts if len(parts) > 1 else units


@dataclass(frozen=True)
class SourcePart:
    """A part of a line, or a whole one."""

    line: int
    source: str  # joined over all parts: the line
    text: str  # what the model reads: without white space around it, and after the language tag of the line
    index: int = 0  # among the parts of the line
    count: int = 1

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def number(self) -> int:
        """A number of its own, by which samples are drawn: that of a whole line is the number of the line."""
        return self.line + (self.index << 40)

    def constraints(self, given: Constraints | None) -> Constraints | None:
        """Its share of the constraints of the line: required phrases in order, and all banned phrases."""
        if given is None or self.count == 1:
            return given
        begin, end = (len(given.required) * index // self.count for index in (self.index, self.index + 1))
        return Constraints(given.required[begin:end], given.banned)


def split_source(whole: SourcePart, most: int, lengths: Lengths, *, languages: bool = False) -> list[SourcePart]:
    """A long line in parts of at most `most` tokens. Tabs separate columns, and a line with one stays whole.

    `languages`: the line may begin with a language tag, which every part begins with then.
    """
    language, text = split_language(whole.source) if languages else (None, whole.source)
    if "\t" in text:
        return [whole]

    def read(part: str) -> str:
        return part.strip() if language is None else tagged(part.strip(), language)

    pieces = _with_text(split_long(text, most, lambda texts: lengths([read(one) for one in texts])))
    sources = [whole.source[: len(whole.source) - len(text)] + pieces[0], *pieces[1:]]
    rows = zip(sources, pieces, strict=True)
    parts = [SourcePart(whole.line, one, read(piece), at, len(pieces)) for at, (one, piece) in enumerate(rows)]
    return [whole] if len(parts) == 1 else parts


def _with_text(pieces: Sequence[str]) -> list[str]:
    """The pieces, where white space alone belongs to the piece before."""
    found: list[str] = []
    for piece in pieces:
        if found and not (piece.strip() and found[-1].strip()):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def join_texts(sources: Sequence[str], outputs: Sequence[str]) -> str:
    """The outputs of all parts, with the white space between their sources.

    Where there is none, as between Chinese sentences, a space separates words of a script that has spaces.
    """
    text = before = ""
    for source, output in zip(sources, map(str.strip, outputs), strict=True):
        text += separator(text, before, output) + output
        before = source
    return text.rstrip()


def separator(text: str, source: str, output: str) -> str:
    """What stands between a text, which ends with the output of the part `source`, and the output of the next part."""
    white_space = source[len(source.rstrip()) :]
    return white_space + _gap(text + white_space, output)


def _gap(text: str, output: str) -> str:
    return " " if _inside_word(text, output) and not (_CJK.match(text[-1]) or _CJK.match(output)) else ""


def _inside_word(before: str, after: str) -> bool:
    """Whether no white space separates two texts."""
    return bool(before[-1:].strip() and after[:1].strip())


class AlignedPart(NamedTuple):
    """A part of a source, what the model read (there may be tags before the part), its output and their alignment."""

    source: str
    read: str
    output: str
    links: Sequence[Link]


def join_links(parts: Sequence[AlignedPart]) -> list[Link]:
    """The word alignment of a whole, as `join_texts` makes it, from those of its parts."""
    found, before, read, written = list[Link](), AlignedPart("", "", "", ()), 0, 0
    for part in parts:
        tags = len(part.read.split()) - len(part.source.split())
        output = before.output.strip() + before.source[len(before.source.rstrip()) :]
        read -= _inside_word(before.source, part.source)
        written -= _inside_word(output, part.output.strip()) and not _gap(output, part.output.strip())
        found += [(read + word - tags, written + other) for word, other in part.links if word >= tags]
        read, written = read + len(part.source.split()), written + len(part.output.split())
        before = part
    return found
