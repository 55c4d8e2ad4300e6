"""Documents: splitting and joining is the identity, markup and times are kept, tags follow the alignment."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser

import pytest

import transduce
from transduce.errors import InputError
from transduce.inference.documents import (
    FORMATS,
    parse_document,
    plain_text,
    read_document,
    translate_document,
    wrap_lines,
)
from transduce.inference.long_sources import split_long, split_sentences
from transduce.inference.protected_spans import InlineTag, insert_tags, separate_tags

PIECES = [
    *("Hello", "Dr.", "J.", "3.", "März", "e.g.", "…", "!?", '."', " ", "  ", "\n", "\n\n", "\t", "。", "你好", "🙂"),
    *("<b>", "</b>", "<p>", "</p>", "<br/>", "&amp;", "<!-- x -->", "http://a.b/c?d=1", "{name}"),
    "1\n00:01,0 --> 00:02,0\n",
]  # fmt: skip


@pytest.mark.parametrize("extension", list(FORMATS))
def test_segments_of_any_text_are_the_text(extension):
    draw = random.Random(extension)
    for _ in range(200):
        content = "".join(draw.choice(PIECES) for _ in range(draw.randint(0, 30)))
        assert str(parse_document(content, extension)) == content
        assert "".join(split_sentences(content)) == content


def test_segments_without_words_are_kept():
    document = parse_document("Hello there. 12:30! www.example.org 42 🙂 {name}\n", ".txt")
    assert [one.text for one in document.segments if one.translate] == ["Hello there."]


SUBTITLES = "1\n00:00:01,000 --> 00:00:02,500\nred blue\ngreen\n\n2\n00:00:03,000 --> 00:00:04,000\nred\n"


def test_cues_are_the_segments_of_subtitles():
    document = parse_document(SUBTITLES, ".srt")
    assert [(one.text, one.lines) for one in document.segments if one.translate] == [("red blue\ngreen", 2), ("red", 1)]
    notes = "WEBVTT\n\nNOTE red\n\n00:01.000 --> 00:02.000 align:start\n- red\n"
    assert [one.text for one in parse_document(notes, ".vtt").segments if one.translate] == ["- red"]


def test_lines_of_a_cue_have_similar_lengths():
    assert wrap_lines("one two three four five six", 2) == "one two three\nfour five six"
    assert wrap_lines("one", 3) == "one"


class Nesting(HTMLParser):
    """Fails where a closing tag does not close the last open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def random_markup(draw: random.Random, depth: int = 0) -> str:
    parts = []
    for _ in range(draw.randint(1, 4)):
        if depth < 3 and draw.random() < 0.5:
            tag = draw.choice(["b", "i", "em"])
            parts.append(f"<{tag}>{random_markup(draw, depth + 1)}</{tag}>")
        else:
            parts.append(draw.choice(["one", "two &amp; three", "four"]))
    return " ".join(parts)


def test_all_tags_are_kept_and_nested_under_any_alignment():
    draw = random.Random(8)
    for _ in range(200):
        markup = random_markup(draw)
        text, tags = separate_tags(markup)
        words = [draw.choice(["un", "deux", "<&"]) for _ in range(draw.randint(0, 8))]
        count = len(text.split())
        links = [(draw.randrange(count), draw.randrange(len(words))) for _ in range(draw.randint(0, 6)) if words]
        found = insert_tags(" ".join(words), tags, links, count)
        assert re.findall(r"</?\w+>", found) == re.findall(r"</?\w+>", markup)
        assert plain_text(found).split() == words
        parser = Nesting()
        parser.feed(found)
        assert not parser.open


def test_the_identity_keeps_markup_and_a_swap_moves_it():
    markup = "The <b>red <i>house</i></b> is <a href='x'>here</a>"
    text, tags = separate_tags(markup)
    assert insert_tags(text, tags, [(word, word) for word in range(5)], 5) == markup
    assert tags[0] == InlineTag("<b>", "</b>", 1, 3, (0, 3))
    assert (
        insert_tags("rot Haus das", [InlineTag("<b>", "</b>", 0, 1, (0, 1))], [(0, 2), (1, 0), (2, 1)], 3)
        == "rot Haus <b>das</b>"
    )


def test_documents_are_translated_in_place(attention_run, tmp_path, command):
    path, target = tmp_path / "film.srt", tmp_path / "film.de.srt"
    path.write_text(SUBTITLES)
    called = command("generate", attention_run, path, "--output", target)
    assert called.code == 0, called.err
    model = transduce.load(attention_run)
    first, second = (one.text for one in model.generate(["red blue green", "red"]))
    kept = target.read_text()
    assert re.sub(r"[A-Z]+", "", kept).split() == re.sub(r"[a-z]+", "", SUBTITLES).split()
    assert " ".join(kept.split("500\n")[1].split("\n\n")[0].split()) == first
    assert kept.endswith(f"{second}\n")
    page = tmp_path / "page.html"
    page.write_text(
        "<html><body class=x>\n<p>red <b>blue</b> green</p><!-- red --><script>red</script></body></html>\n"
    )
    called = command("generate", attention_run, page)
    assert called.code == 0, called.err
    assert re.sub(r"</?b>", "", called.out) == page.read_text().replace("red <b>blue</b> green", first)
    assert "<b>BLUE</b>" in called.out
    assert command("generate", attention_run, page, "--json").code == 2
    (tmp_path / "words.txt").write_text("BLUE\n")
    assert "BLUE" not in command("generate", attention_run, page, "--avoid", tmp_path / "words.txt").out
    with pytest.raises(InputError, match="no documents end with"):
        read_document(attention_run / "recipe.yaml")


def test_long_sentences_are_split_and_never_cut(model):
    text = " ".join(["red", "blue", "green"] * 5)
    document = parse_document(text, ".txt")
    found = translate_document(model, document, max_source_length=5)
    parts = split_long(text, 5, model.source_encoding.lengths)
    expected = model.generate([part.strip() for part in parts], max_source_length=5)
    assert not any(one.source_cut for one in expected)
    assert str(found) == " ".join(one.text for one in expected)
