"""Long sources in parts: joined they are the source; short lines are unchanged; outputs keep the white space."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fixtures import Command

import transduce
from transduce.errors import InputError
from transduce.inference.long_sources import (
    AlignedPart,
    SourcePart,
    join_links,
    join_texts,
    split_long,
    split_sentences,
    split_source,
)
from transduce.inference.reranking import rerank_noisy_channel
from transduce.inference.terminology import Constraints

PIECES = [
    "red",
    "Dr.",
    "Blue.",
    "green!",
    "one,",
    "two;",
    " ",
    "  ",
    "\u3000",
    "你好。",
    "好，",
    "x" * 9,
    "\u00a0",
    "— ",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


def words(texts):
    return [len(text.split()) for text in texts]


def characters(texts):
    return [len(text) for text in texts]


@settings(deadline=None, database=None, max_examples=200)
@given(TEXTS, st.integers(1, 12), st.sampled_from([words, characters]))
def test_parts_joined_are_the_text_and_fit(text, most, lengths):
    parts = split_long(text, most, lengths)
    assert "".join(parts) == text
    for part in parts:  # only one word of a script with spaces is longer
        assert lengths([part.strip()])[0] <= most or len(split_long(part, 1, words)) == 1


def test_sentences_end_at_punctuation_but_not_at_abbreviations():
    text = 'Dr. Smith came on 3. May. He said "No!" J. S. Bach did not, e.g. today.  Fine?\n\nA title\n\n你好。再见。'
    assert [one.strip() for one in split_sentences(text)] == [
        *("Dr. Smith came on 3. May.", 'He said "No!"', "J. S. Bach did not, e.g. today.", "Fine?", "A title"),
        *("你好。", "再见。"),
    ]  # fmt: skip


def test_a_long_line_is_split_at_sentences_then_clauses_then_words():
    text = "One two. Three four, five six; seven eight nine ten eleven twelve."
    assert split_long(text, 100, words) == [text]
    assert split_long(text, 10, words) == ["One two. ", text[9:]]
    assert split_long(text, 6, words) == ["One two. ", "Three four, five six; ", "seven eight nine ten eleven twelve."]
    assert split_long(text, 3, words)[-2:] == ["seven eight nine ", "ten eleven twelve."]
    assert split_long("今天天气很好", 3, characters) == ["今天天", "气很好"]
    assert split_long("antidisestablishment", 3, characters) == ["antidisestablishment"]


def test_every_part_has_the_language_tag_and_its_constraints():
    whole = SourcePart(3, "<2de> one two. Three four.", "")
    parts = split_source(whole, 3, words, languages=True)
    assert [part.text for part in parts] == ["<2de> one two.", "<2de> Three four."]
    assert "".join(part.source for part in parts) == whole.source
    assert [part.line for part in parts] == [3, 3]
    assert len({part.number for part in parts}) == 2
    terms = Constraints(("a", ("b", "c")), ("d",))
    assert [part.constraints(terms) for part in parts] == [
        Constraints(("a",), ("d",)),
        Constraints((("b", "c"),), ("d",)),
    ]
    assert split_source(replace(whole, source="one two\tthree four five"), 3, words) == [
        replace(whole, source="one two\tthree four five")
    ]  # fmt: skip


def test_outputs_are_joined_with_the_white_space_of_their_sources():
    assert join_texts(["a.  ", "b.\u3000", "c."], ["A.", "B.", "C."]) == "A.  B.\u3000C."
    assert join_texts(["你好。", "再见。"], ["Hello.", "Bye."]) == "Hello. Bye."
    assert join_texts(["你好。", "再见。"], ["ハロー。", "バイ。"]) == "ハロー。バイ。"
    parts = [AlignedPart("a b ", "<2x> a b", "A B", [(1, 0), (2, 1)]), AlignedPart("c", "<2x> c", "C", [(1, 0)])]
    assert join_links(parts) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("run", ["attention_run", "transformer_run"])
def test_long_lines_are_generated_in_parts_and_short_ones_as_before(request, run):
    model = transduce.load(request.getfixturevalue(run))
    long, short = "Red blue green. " * 4 + "White, black, " * 8 + "red  ", "red green"
    with pytest.warns(UserWarning, match="were split into parts"):
        found, other = model.generate([long, short], max_source_length=10, nbest=2)
    alone = model.generate([short], max_source_length=10, nbest=2)[0]
    assert [one.text for one in other.nbest] == [one.text for one in alone.nbest]
    assert other.token_scores == pytest.approx(alone.token_scores, abs=1e-5)
    assert not other.parts
    assert "".join(part.source for part in found.parts) == found.source == long
    assert len(found.parts) >= 4 + 2
    assert not found.source_cut
    expected = model.generate([part.source.strip() for part in found.parts], max_source_length=10, nbest=2)
    assert found.text == " ".join(one.text.strip() for one in expected)
    assert found.nbest[1].text == " ".join(one.nbest[1].text.strip() for one in expected)
    assert found.score == pytest.approx(sum(one.score for one in expected), abs=1e-4)
    assert found.alignment
    assert found.alignment[0] == expected[0].alignment[0]
    assert max(source for source, _ in found.alignment) > 12
    cut = model.generate([long], max_source_length=10, long_sources="truncate")[0]
    assert cut.source_cut
    assert not cut.parts


@pytest.mark.filterwarnings("ignore:texts of more than")
def test_prefixes_constraints_and_reranking_of_long_lines(attention_run, model):
    long = "red blue green white " * 3
    options = {"max_source_length": 5, "nbest": 2}
    prefixed = model.generate([long], prefixes=["BLUE"], **options)[0]
    assert prefixed.text.startswith("BLUE")
    terms = [Constraints(("BLACK", "WHITE WHITE"), ("RED",))]
    text = model.generate([long], constraints=terms, **options)[0].text
    assert "BLACK" in text
    assert "WHITE WHITE" in text
    assert "RED" not in text
    (one,) = rerank_noisy_channel(model.generate([long], **options), reverse=model)
    assert "".join(part.source for part in one.parts) == long
    sampled = model.generate([long, long], strategy="sample", **options)
    assert sampled[1].text == model.generate([long], strategy="sample", first_number=1, **options)[0].text


def test_generate_prints_the_parts_of_long_lines(command, attention_run):
    stdin = b"red green\n" + b"white " * 100 + b"\n"
    called = command("generate", attention_run, "--set", "max_source_length=40", "--json", stdin=stdin)
    short, long = map(json.loads, called.out.splitlines())
    assert (short["parts"], short["source_cut"], long["source_cut"]) == ([], False, False)
    assert "".join(part["source"] for part in long["parts"]) == "white " * 100
    assert long["text"] == " ".join(part["text"] for part in long["parts"])
    assert "sources split at `max_source_length`: 1" in called.err


@pytest.mark.parametrize("search", [{"strategy": "greedy"}, {"beam": 3}, {"strategy": "sample", "seed": 4}])
def test_streamed_texts_joined_are_the_output(attention_run: Path, search: dict) -> None:
    model = transduce.load(attention_run)
    for text in ("red blue green", "", "red blue. green, red blue! " * 3):
        whole = model.generate([text], max_source_length=5, **search)[0]
        streamed = list(model.stream_tokens(text, max_source_length=5, **search))
        assert "".join(map(str, streamed)) == whole.text
        assert [one.score for one in streamed] == pytest.approx(whole.token_scores, abs=1e-4)
    with pytest.raises(InputError, match="takes one text"):
        list(model.stream_tokens(["red"]))  # type: ignore[arg-type]


def test_the_command_streams_lines(attention_run: Path, command: Command) -> None:
    lines = b"red blue\n\ngreen\n"
    streamed = command("generate", attention_run, "--stream", stdin=lines)
    assert streamed.out == command("generate", attention_run, stdin=lines).out
    assert "plain output of a search" in command("generate", attention_run, "--stream", "--json", stdin=b"red\n").err
