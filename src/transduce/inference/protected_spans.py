"""Protected spans: addresses, numbers, placeholders, emoji and inline tags of a source that its output must contain.

Tags are removed before generation and put around the words that are aligned with those that they enclosed. All other
spans stay in the source, so that the model may copy them. Where it does not, the output is corrected: a missing span
takes the place of the word that is aligned with it, and copies beyond those of the source are removed.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property, lru_cache

from transduce.explain.attention import Link
from transduce.inference.terminology import UNSPACED

_LETTER = rf"[^\W{UNSPACED.pattern[1:-1]}]"  # of a script with spaces between words, or a digit
_IN_ADDRESS = rf"[^\s<>\"“”「」。，、；！？（）{UNSPACED.pattern[1:-1]}]"
_PICTOGRAM = r"[\u2600-\u27bf\u2b50\u2b55\U0001f000-\U0001f1e5\U0001f200-\U0001faff]"
_MODIFIED = rf"{_PICTOGRAM}[\ufe0f\U0001f3fb-\U0001f3ff]*"
# No span but a tag contains white space. The first kind that matches wins.
PATTERNS = {
    "markup": r"<(?!unk>)/?[A-Za-z][\w:.-]*(?:\s[^<>]*)?/?>",
    "url": rf"(?<!{_LETTER})(?:[A-Za-z][A-Za-z0-9+.-]*://|www\.){_IN_ADDRESS}*(?<![.,;:!?'’)\]}}…])",
    "email": rf"(?:(?!{UNSPACED.pattern})[\w.+-])+@(?:(?!{UNSPACED.pattern})[\w-])+(?:\.[A-Za-z0-9-]+)+",
    "placeholder": r"\$?\{\{?[\w.]*\}?\}|%\(\w+\)[a-z]|%(?:\d\$)?[sdifuxg](?!\w)",
    "number": rf"(?<!{_LETTER})\d+(?:[.,:/'’-]\d+)*%?(?!{_LETTER})",
    "emoji": rf"[\U0001f1e6-\U0001f1ff]{{2}}|{_MODIFIED}(?:\u200d{_MODIFIED})*",
}
KINDS = tuple(PATTERNS)


@lru_cache(maxsize=32)
def _pattern(kinds: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{PATTERNS[kind]})" for kind in KINDS if kind in kinds) or r"(?!)")


def find_spans(text: str, kinds: Sequence[str] = KINDS) -> list[re.Match[str]]:
    """The protected spans of a text, in order."""
    return list(_pattern(tuple(kinds)).finditer(text))


def has_words(text: str) -> bool:
    """Whether there is something to translate: a letter outside of protected spans."""
    return any(character.isalpha() for character in _pattern(KINDS).sub("", text))


@dataclass(frozen=True)
class ProtectedLine:
    """A source with its protected spans."""

    source: str
    kinds: tuple[str, ...] = KINDS

    @cached_property
    def _separated(self) -> tuple[str, list[InlineTag]]:
        return separate_tags(self.source, TAG, str) if "markup" in self.kinds else (self.source, [])

    @property
    def text(self) -> str:
        """What the model reads: the source without tags."""
        return self._separated[0]

    @cached_property
    def _inner(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.kinds if kind != "markup")

    @cached_property
    def _wanted(self) -> Counter[str]:
        return _counts(self.text, self._inner)

    def complete(self, output: str) -> bool:
        """Whether an output contains all spans as often as the source, and needs no tags."""
        stray = "markup" in self.kinds and TAG.search(output)
        return not self._separated[1] and not stray and self._equal(output) and (has_words(self.text) or not self.text)

    def _equal(self, output: str) -> bool:
        found = _counts(output, self._inner)
        return all(found[span] == count for span, count in self._wanted.items())

    def restore(self, output: str, links: Sequence[Link] = ()) -> tuple[str, list[Link]]:
        """The output with every span as often as in the source, and its word alignment."""
        if not has_words(self.text):
            words = range(len(self.source.split()))
            return self.source, list(zip(words, words, strict=True))
        while "markup" in self.kinds and TAG.search(output):  # the source had none
            output = TAG.sub("", output)
        links = [(word, target) for word, target in links if target < len(output.split())]
        text, links = self._restore_inner(output, links)
        if not self._separated[1]:
            return text, links
        return insert_tags(text, self._separated[1], links, len(self.text.split()), str), links

    def _restore_inner(self, output: str, links: Sequence[Link]) -> tuple[str, list[Link]]:
        if self._equal(output):
            return output, list(links)
        words = _OutputWords(output, links)
        found = _counts(output, self._inner)
        words.remove({span: found[span] - count for span, count in self._wanted.items()}, self._inner)
        missing = Counter({span: count - found[span] for span, count in self._wanted.items()})
        for match in find_spans(self.text, self._inner):
            if missing[match.group()] > 0:
                missing[match.group()] -= 1
                words.add(match, self._wanted, self._inner)
        text, links = words.result()
        if self._equal(text):
            return text, links
        # Characters next to a span made another span of it: letters alone cannot.
        letters = re.sub(r"[^\w\s]|[\d_]", " ", output).split()
        return " ".join([*letters, *(match.group() for match in find_spans(self.text, self._inner))]), []


def _counts(text: str, kinds: Sequence[str]) -> Counter[str]:
    return Counter(match.group() for match in find_spans(text, kinds))


class _OutputWords:
    """The words of an output while spans are removed and added."""

    def __init__(self, output: str, links: Sequence[Link]) -> None:
        self.words = re.findall(r"\S+", output)
        self.spaces = re.findall(r"\s+", output.strip())
        self.links = links
        self.added: dict[int, list[tuple[str, int]]] = {}  # after a word, -1: before the first; with a source word

    def remove(self, surplus: dict[str, int], kinds: Sequence[str]) -> None:
        """Removes the last of these spans."""
        for index in reversed(range(len(self.words))):
            for match in reversed(find_spans(self.words[index], kinds)):
                if surplus.get(match.group(), 0) > 0:
                    surplus[match.group()] -= 1
                    word = self.words[index]
                    self.words[index] = word[: match.start()] + word[match.end() :]

    def add(self, match: re.Match[str], wanted: Counter[str], kinds: Sequence[str]) -> None:
        """Adds a span of the source: in place of an aligned word that resembles it, else after it."""
        span, source = match.group(), match.string
        number = len(source[: match.start()].split()) - (source[: match.start()][-1:].strip() != "")
        aligned = sorted(target for word, target in self.links if word == number and target < len(self.words))
        if not aligned or UNSPACED.search(source):
            index = round(len(self.words) * match.start() / len(source)) - 1
        else:
            index = aligned[0]
            for target in aligned:
                if _resembles(self.words[target], span) and not wanted.keys() & _counts(self.words[target], kinds):
                    self.words[target] = ""
                    index = target
                    break
        self.added.setdefault(index, []).append((span, number))

    def result(self) -> tuple[str, list[Link]]:
        """The text, and its word alignment."""
        text, links, count = "", list[Link](), 0
        for index in range(-1, len(self.words)):
            own = [(self.words[index], [word for word, target in self.links if target == index])] if index >= 0 else []
            for written, sources in [*own, *((span, [word]) for span, word in self.added.get(index, ()))]:
                if not written:
                    continue
                text += (" " if text and not text[-1].isspace() else "") + written
                links += [(word, count) for word in sources]
                count += 1
            if 0 <= index < len(self.spaces) and text and not text[-1].isspace():
                text += self.spaces[index]
        return text.rstrip(), sorted(links)


def _resembles(word: str, span: str) -> bool:
    """Whether a word may be an attempt to write a span: an unknown token, symbols or digits, or similar letters."""
    if word == "<unk>" or not any(character.isalpha() for character in word):
        return True
    return SequenceMatcher(None, word, span, autojunk=False).ratio() > 0.6


_INLINE = "a|abbr|b|bdi|bdo|cite|code|del|dfn|em|font|i|ins|kbd|mark|q|s|small|span|strong|sub|sup|u|wbr|img"
INLINE_TAG = re.compile(rf"</?(?:{_INLINE})(?:\s[^<>]*)?/?>", re.IGNORECASE)
TAG = re.compile(PATTERNS["markup"])


@dataclass(frozen=True)
class InlineTag:
    """A tag inside a sentence, around the words from `begin` to `end`, or before the word `begin`."""

    opening: str
    closing: str  # empty: the tag encloses nothing
    begin: int
    end: int
    indices: tuple[int, int]  # of the opening and the closing tag among all tags of the segment


def split_markup(content: str, markup: re.Pattern[str]) -> list[str]:
    """Markup and the text between, joined the content."""
    tokens, index = [], 0
    for match in markup.finditer(content):
        tokens += [content[index : match.start()], match.group()]
        index = match.end()
    return [token for token in [*tokens, content[index:]] if token]


def separate_tags(
    markup: str, tag: re.Pattern[str] = INLINE_TAG, unescape: Callable[[str], str] = html.unescape
) -> tuple[str, list[InlineTag]]:
    """The plain text of a segment, and its inline tags with the words that they enclose, outer tags first."""
    text, tags, open_tags, index = "", list[InlineTag](), list[tuple[str, int, int]](), -1
    for token in split_markup(markup, tag):
        if not tag.fullmatch(token):
            text += unescape(token)
            continue
        index += 1
        word = len(text.split())
        inside = bool(text) and not text[-1].isspace()  # the tag stands inside a word, or behind it
        if not token.startswith("</"):
            open_tags.append((token, len(tags), word))
            tags.append(InlineTag(token, "", word, word, (index, index)))
        elif (number := _matching(open_tags, token)) is not None:
            opening, row, begin = open_tags.pop(number)
            tags[row] = InlineTag(opening, token, begin, max(word, begin), (tags[row].indices[0], index))
        else:
            tags.append(InlineTag(token, "", word - inside, word - inside, (index, index)))
    return text, tags


def _matching(open_tags: list[tuple[str, int, int]], closing: str) -> int | None:
    name = re.sub(r"[</>\s]", "", closing).lower()
    indices = [number for number, (tag, _, _) in enumerate(open_tags) if re.match(rf"<{name}\b", tag, re.IGNORECASE)]
    return indices[-1] if indices else None


def escape_text(text: str) -> str:
    return html.escape(text, quote=False)


def insert_tags(
    text: str,
    tags: Sequence[InlineTag],
    links: Sequence[Link],
    source_words: int,
    escape: Callable[[str], str] = escape_text,
) -> str:
    """The text, escaped, with every tag once, around the words that are aligned with those that it enclosed.

    The tags come in the order that they had, so that they are nested as they were.
    """
    words = [escape(word) for word in text.split()]
    indices: dict[int, tuple[str, int]] = {}  # of each tag, in order: itself, and the words before it
    for tag, (begin, end) in zip(tags, _spans(tags, links, source_words, len(words)), strict=True):
        indices[tag.indices[0]] = tag.opening, begin
        if tag.closing:
            indices[tag.indices[1]] = tag.closing, end
    gaps: list[list[str]] = [[] for _ in range(len(words) + 1)]
    latest = 0
    for index in sorted(indices):
        token, before = indices[index]
        latest = max(latest, before)
        gaps[latest].append(token)
    return "".join(_gap(gap, number, words) for number, gap in enumerate(gaps))


def _gap(tags: Sequence[str], number: int, words: Sequence[str]) -> str:
    """The tags between two words, and the word after them: closing tags belong to the word before."""
    closing = next((index for index, tag in enumerate(tags) if not tag.startswith("</")), len(tags))
    if number in (0, len(words)):
        closing = 0
    space = " " if 0 < number < len(words) else ""
    return "".join([*tags[:closing], space, *tags[closing:], *words[number : number + 1]])


def _spans(
    tags: Sequence[InlineTag], links: Sequence[Link], source_words: int, target_words: int
) -> list[tuple[int, int]]:
    """The target words of each tag: those that are aligned with its source words, else a proportional share."""
    spans: list[tuple[int, int]] = []
    for number, tag in enumerate(tags):
        low, high = 0, target_words
        for other, (begin, end) in zip(tags[:number], spans, strict=True):
            if other.closing and other.begin <= tag.begin and tag.end <= other.end and other.end > other.begin:
                low, high = max(low, begin), min(high, end)  # inside
            elif other.end <= tag.begin:
                low = max(low, end)  # behind
        aligned = [target for source, target in links if tag.begin <= source < max(tag.end, tag.begin + 1)]
        scale = target_words / max(source_words, 1)
        begin, end = round(tag.begin * scale), round(tag.end * scale)
        if aligned:
            begin, end = min(aligned), max(aligned) + 1
        begin = min(max(begin, low), max(high, low))
        spans.append((begin, min(max(end, begin), max(high, low)) if tag.end > tag.begin else begin))
    return spans
