"""Protected spans: every one of the source is in the output as often, whatever the model writes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transduce
from transduce.errors import InputError
from transduce.inference.long_sources import split_sentences
from transduce.inference.protected_spans import KINDS, TAG, ProtectedLine, find_spans, separate_tags

SPANS = [
    *("https://a.b/c?d=1&e=2", "www.example.org", "me.you@b.example.org", "{name}", "{{count}}", "${x}", "%s", "%(n)d"),
    *("42", "3.14", "12:30", "1,000.5", "99%", "2026-11-16", "🙂", "👩‍💻", "🇩🇪", "☀️", "<b>", "</b>", "</a>", "<br/>"),
    '<a href="x y">',
]  # fmt: skip
GLUE = [" ", "  ", "", ",", ".", "。", "a", "-", "<", ">", "@", "好", "www.", "3", "%", "{", "}", "(", "/", "\u00a0"]
LINES = st.lists(st.sampled_from([*SPANS, *GLUE, "red", "Blue", "x1"]), max_size=14).map("".join)
OUTPUTS = st.lists(st.sampled_from([*SPANS, *GLUE, "<unk>", "RED", "GREEN", " "]), max_size=14).map("".join)
LINKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6)


def tags_and_spans(text):
    """The tags of a text, and the other spans of what is left without them."""
    tags = [match.group() for match in find_spans(text, ("markup",))]
    plain, _ = separate_tags(text, TAG, str)
    return Counter(tags), Counter(match.group() for match in find_spans(plain, KINDS[1:]))


def assert_kept(source, output):
    (tags, spans), (found_tags, found) = tags_and_spans(source), tags_and_spans(output)
    assert found_tags == tags
    assert {span: found[span] for span in spans} == spans


@settings(deadline=None, database=None, max_examples=400)
@given(LINES, OUTPUTS, LINKS)
def test_every_span_is_in_any_output_as_often_as_in_the_source(source, output, links):
    line = ProtectedLine(source)
    written = len(output.split())
    text, alignment = line.restore(output, [(word, target) for word, target in links if target < written])
    assert_kept(source, text)
    assert all(0 <= target < max(len(text.split()), 1) for _, target in alignment)


def test_each_kind_is_found_whole():
    text = "See https://a.b/c?d=(1). Or <me@b.org>, {name} and %s: 3,5 % at 12:30, x1 🙂👩‍💻!"
    found = [match.group() for match in find_spans(text)]
    assert found == ["https://a.b/c?d=(1", "me@b.org", "{name}", "%s", "3,5", "12:30", "🙂", "👩‍💻"]
    assert [match.group() for match in find_spans("我有3个，见http://a.b/c。")] == ["3", "http://a.b/c"]
    assert [match.group() for match in find_spans(text, ("number",))] == ["1", "3,5", "12:30"]


@pytest.mark.parametrize(
    ("source", "output", "links", "expected"),
    [
        ("see http://a.b now", "NOW htp:/a.b LOOK", [(0, 2), (1, 1), (2, 0)], "NOW http://a.b LOOK"),  # replaced
        ("see 42 now", "SEE NOW", [(0, 0), (2, 1)], "SEE 42 NOW"),  # without alignment: in proportion
        ("see 42 now", "SEE NOW", [(0, 0), (1, 1)], "SEE NOW 42"),  # a word of letters stays
        ("🙂 a 🙂", "A 🙂 🙂 🙂", [], "A 🙂 🙂"),  # one too many
        ("a <b>big</b> house", "EIN HAUS GROSS", [(0, 0), (2, 1), (1, 2)], "EIN HAUS <b>GROSS</b>"),
        ("42 {x}!", "RED", [], "42 {x}!"),  # nothing to translate
        ("red 7", "RED  7", [], "RED  7"),  # complete: unchanged
    ],
)  # fmt: skip
def test_spans_are_restored_in_place(source, output, links, expected):
    assert ProtectedLine(source).restore(output, links)[0] == expected


@pytest.mark.parametrize("run", ["attention_run", "transformer_run"])
def test_generated_lines_contain_all_spans(request, run):
    model = transduce.load(request.getfixturevalue(run))
    lines = [
        "red blue 42 green https://a.b/c",
        "red <b>blue</b> {name} 🙂 green <br/>",
        "mail me@b.org, red 3.5 blue 3.5!",
        "red blue green",
        "",
    ]
    found = model.generate(lines, protect=KINDS, nbest=2)
    for line, one in zip(lines, found, strict=True):
        assert one.source == line
        for rival in one.nbest:
            assert_kept(line, rival.text)
    assert [one.text for one in found[3:]] == [one.text for one in model.generate(lines[3:])]
    long = "Red blue 7 green. " * 5 + "red 8 <i>blue</i> 9. " * 4
    with pytest.warns(UserWarning, match="split into parts"):
        one = model.generate([long], protect=KINDS, max_source_length=8)[0]
    assert len(one.parts) >= len(split_sentences(long))
    assert_kept(long, one.text)


def test_protect_on_the_command_line(command, attention_run, tmp_path):
    (tmp_path / "in.txt").write_text("red 1234 blue {name}\n")
    plain = command("generate", attention_run, tmp_path / "in.txt")
    assert "1234" not in plain.out
    called = command("generate", attention_run, tmp_path / "in.txt", "--protect")
    assert_kept("red 1234 blue {name}", called.out)
    numbers = command("generate", attention_run, tmp_path / "in.txt", "--set", "protect=[number]")
    assert "1234" in numbers.out
    assert "{name}" not in numbers.out
    document = command("generate", attention_run, tmp_path / "in.txt", "--document")
    assert document.out.strip() == called.out.strip()
    assert command("generate", attention_run, tmp_path / "in.txt", "--document", "--no-protect").out == plain.out
    assert command("generate", attention_run, tmp_path / "in.txt", "--set", "protect=[words]").code == 2


def test_labels_have_no_protected_spans(model, monkeypatch):
    parts = model.recipe.model.model_copy(update={"decoder": None})
    monkeypatch.setattr(model, "recipe", model.recipe.model_copy(update={"model": parts}))
    with pytest.raises(InputError, match="reads and generates text"):
        model.generate(["red"], protect=KINDS)
