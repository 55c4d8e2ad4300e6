"""Laws of markup: whatever the model writes, tags and times come out as they went in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from transduce.inference.documents import Document, parse_document, parse_xml
from transduce.inference.protected_spans import INLINE_TAG, TAG
from transduce.serving.protocols.translation import ServedLanguages, TranslationRequest, in_requests, translate_document
from transduce.serving.service import (
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    Limits,
    ModelInfo,
    Service,
    TokenEvent,
)

WORDS = st.lists(st.sampled_from(["one", "two.", "&amp;", "drei,", "好。", "https://a.b"]), min_size=1, max_size=5)
TEXTS = WORDS.map(" ".join)
LINKS = st.lists(st.integers(0, 5), max_size=5)
OUTPUTS = st.lists(st.tuples(st.sampled_from(["", "A", "B c", "<d", "& e f g"]), LINKS), min_size=1)
LIMITS = Limits(items=3, characters=200)
REQUEST = TranslationRequest("de", "en")


class Arbitrary(Service):
    """Outputs and alignments that have nothing to do with the sources."""

    def __init__(self, outputs: Sequence[tuple[str, list[int]]]) -> None:
        self.outputs, self.count = outputs, 0

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("any", "translation", ("en",), ("de",))]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        assert len(request.sources) <= LIMITS.items
        return GenerationResult("any", tuple((self._output(),) for _ in request.sources))

    def _output(self) -> GeneratedText:
        text, numbers = self.outputs[self.count % len(self.outputs)]
        self.count += 1
        words = len(text.split())
        links = tuple((number, number * 7 % words) for number in numbers) if words else ()
        return GeneratedText(text, alignment=links)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        yield TokenEvent("")

    async def embed(self, texts: Sequence[str], model: str | None = None) -> list[list[float]]:
        return []


def translated(document: Document, outputs: Sequence[tuple[str, list[int]]]) -> str:
    return str(asyncio.run(translate_document(Arbitrary(outputs), document, REQUEST, LIMITS)))


def elements(names: Sequence[str]) -> st.SearchStrategy[str]:
    """Nested elements with attributes, void ones, and some tags that nothing closes."""
    opening = st.sampled_from([f'<{name} class="a b">' for name in names] + [f"<{name}>" for name in names])
    return st.recursive(
        TEXTS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(" ".join),
            st.tuples(opening, inner).map(lambda pair: f"{pair[0]}{pair[1]}</{pair[0].strip('<>').split()[0]}>"),
            inner.map(lambda text: f'{text}<img src="a.png">'),
            inner.map(lambda text: f"<i>{text}"),
            inner.map(lambda text: f"{text}</b>"),
        ),
        max_leaves=6,
    )


ANY_TAG = re.compile(r"</?[a-z][^<>]*>")


@given(elements(["p", "div", "b", "a", "span", "li"]), OUTPUTS)
def test_html_tags_keep_their_order(content: str, outputs: list[tuple[str, list[int]]]) -> None:
    found = translated(parse_document(content, ".html"), outputs)
    assert ANY_TAG.findall(found) == ANY_TAG.findall(content)


@given(elements(["doc", "x-1", "ns:k"]), OUTPUTS, st.lists(st.sampled_from(["doc", "x-1", "i"]), max_size=2))
def test_xml_tags_keep_their_order_and_ignored_elements_stay(
    content: str, outputs: list[tuple[str, list[int]]], names: list[str]
) -> None:
    document = Document(tuple(parse_xml(content, splitting=names[:1], ignored=names[1:])), "xml")
    assert str(document) == content
    found = translated(document, outputs)
    assert TAG.findall(found) == TAG.findall(content)
    for name in names[1:]:
        pattern = rf"<{name}>[^<>]*</{name}>"
        assert re.findall(pattern, found) == re.findall(pattern, content)


CUES = st.lists(st.tuples(st.integers(0, 3599), TEXTS, TEXTS | st.none()), min_size=1, max_size=5)


@given(CUES, st.sampled_from([".srt", ".vtt"]), st.sampled_from(["\n", "\r\n"]), OUTPUTS)
def test_subtitles_keep_numbers_and_times(
    cues: list[tuple[int, str, str | None]], extension: str, end: str, outputs: list[tuple[str, list[int]]]
) -> None:
    times = [f"00:{second // 60:02}:{second % 60:02},000 --> 01:00:00,000" for second, _, _ in cues]
    blocks = [
        end.join(part for part in (str(number), time, first, second) if part is not None)
        for number, (time, (_, first, second)) in enumerate(zip(times, cues, strict=True), 1)
    ]
    content = ("WEBVTT" + 2 * end if extension == ".vtt" else "") + (2 * end).join(blocks) + end
    found = translated(parse_document(content, extension), [(text or "A", links) for text, links in outputs])
    assert re.findall(r"\d\d:.* --> .*", found) == re.findall(r"\d\d:.* --> .*", content)
    assert re.findall(r"^\d+\r?$", found, re.MULTILINE) == re.findall(r"^\d+\r?$", content, re.MULTILINE)


@given(st.lists(st.integers(0, 150).map("x".__mul__), max_size=12))
def test_requests_have_all_texts_within_the_limits(texts: list[str]) -> None:
    groups = in_requests(texts, LIMITS)
    assert [text for group in groups for text in group] == texts
    assert all(len(group) <= LIMITS.items and sum(map(len, group)) <= LIMITS.characters for group in groups)


def test_inline_tags_are_those_of_html() -> None:
    document = parse_document("one <b>two</b> <k>three</k>", ".html")
    assert [segment.text for segment in document.segments if INLINE_TAG.search(segment.text)] == ["one <b>two</b>"]


def test_pairs_of_languages_belong_to_the_first_model() -> None:
    class Several(Arbitrary):
        def models(self) -> list[ModelInfo]:
            return [
                ModelInfo("vectors", "embedding"),
                ModelInfo("first", "translation", ("en",), ("de",)),
                ModelInfo("second", "translation", ("en", "fr"), ("de",)),
                ModelInfo("tags", "translation", (), ("pt-BR", "es")),
            ]

    languages = ServedLanguages(Several([]))
    assert languages.targets == {"en": ["de"], "fr": ["de"], "pt-BR": ["es"], "es": ["pt-BR"]}
    assert languages.models["en", "de"] == "first"
    assert (languages.target("PT"), languages.target("pt_br"), languages.source("en-GB")) == ("pt-BR", "pt-BR", "en")
    assert languages.source("zz") is None
