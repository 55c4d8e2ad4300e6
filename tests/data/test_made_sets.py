"""Invented sets: the same for the same seed, nothing held out in training, and every answer right by its own rules."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.synthetic import SETS, generate
from transduce.synthetic.inflection import CASES, NUMBERS, POSSESSORS, VOWELS, inflect
from transduce.synthetic.records import VALUES, missing
from transduce.synthetic.transliteration import transliterate

EVERY = pytest.mark.parametrize("name", SETS)


@EVERY
def test_the_same_seed_gives_the_same_lines(name):
    assert list(generate(name, 50, 3)) == list(generate(name, 50, 3))
    assert list(generate(name, 50, 3)) != list(generate(name, 50, 4))


@EVERY
def test_lines_are_different_and_have_their_columns(name):
    lines = list(generate(name, 500))
    assert len({(one.source, one.target) for one in lines}) == 500
    for one in lines:
        assert one.source.count("\t") == SETS[name].inputs - 1
        assert one.source.split("\t")[-1].strip() == one.source.split("\t")[-1] != ""
        assert one.target
        assert "\t" not in one.target


def names(text: str) -> set[str]:
    return {word for word in text.split() if word[0].isupper()}


@EVERY
def test_nothing_held_out_is_trained_on(name):
    """Whatever the seeds: by the name where there is one, else by the first column."""
    trained, tested = ([*generate(name, 1000, seed, held_out=held)] for seed, held in ((1, False), (2, True)))
    if any(names(one.source) for one in trained):
        parts = [set().union(*(names(one.source) for one in lines)) for lines in (trained, tested)]
    else:
        parts = [{one.source.split("\t")[0] for one in lines} for lines in (trained, tested)]
    assert all(len(part) >= 100 for part in parts)
    assert not parts[0] & parts[1]


def test_an_unknown_set_is_named():
    with pytest.raises(InputError, match="did you mean 'dialogue'"):
        generate("dialog", 1)


@pytest.mark.parametrize(
    ("word", "latin"),
    [
        ("ельцин", "yeltsin"),
        ("достоевский", "dostoyevsky"),
        ("чайковский", "chaykovsky"),
        ("маяковский", "mayakovsky"),
        ("большой", "bolshoy"),
        ("объект", "obyekt"),
        ("бульон", "bulyon"),
        ("соловьёв", "solovyov"),
        ("щёлок", "shcholok"),
        ("синего", "sinevo"),
        ("горе", "gore"),
    ],
)
def test_known_words_are_transliterated(word, latin):
    assert transliterate(word) == latin


@pytest.mark.parametrize(
    ("lemma", "features", "form"),
    [
        ("ev", "pl abl", "evlerden"),
        ("ev", "sg p2 dat", "evine"),
        ("kitap", "sg nom", "kitap"),
        ("kitap", "sg acc", "kitabı"),
        ("kitap", "pl p1 abl", "kitaplarımdan"),
        ("kitap", "sg p3 loc", "kitabında"),
        ("kitap", "pl p3 gen", "kitaplarının"),
        ("ağaç", "sg dat", "ağaca"),
        ("göz", "pl loc", "gözlerde"),
        ("araba", "sg gen", "arabanın"),
        ("araba", "sg p3 acc", "arabasını"),
        ("çocuk", "sg p1 nom", "çocuğum"),
        ("sokak", "sg loc", "sokakta"),
        ("renk", "sg acc", "rengi"),
        ("top", "sg acc", "topu"),
    ],
)
def test_known_words_are_inflected(lemma, features, form):
    assert inflect(lemma, features) == form


@given(
    lemma=st.text("abdeglmnorsuzöüıi", min_size=1, max_size=8).filter(lambda word: any(one in VOWELS for one in word)),
    features=st.tuples(*map(st.sampled_from, ([*NUMBERS], [*POSSESSORS], [*CASES]))),
)
def test_suffixes_are_in_harmony_and_stems_stay(lemma, features):
    """No suffix has a back vowel after a front one, or two vowels in a row; a voiced stem is kept."""
    form = inflect(lemma, " ".join(part for part in features if part))
    assert form.startswith(lemma)
    last = [one for one in lemma if one in VOWELS][-1]
    added = form[len(lemma) :]
    back = [one in "aıou" for one in last + added if one in VOWELS]
    assert len(set(back)) == 1
    ends = lemma[-1] + added
    assert not any(a in VOWELS and b in VOWELS for a, b in pairwise(ends))


@pytest.mark.parametrize("name", ["summaries", "questions", "dialogue", "records"])
def test_names_of_an_answer_stand_in_its_source(name):
    for one in generate(name, 500):
        assert names(one.target) <= names(one.source)


def test_a_summary_needs_the_right_names_among_others():
    lines = list(generate("summaries", 500))
    assert all(len(names(one.target)) == 2 for one in lines)
    assert sum(len(names(one.source)) > 2 for one in lines) > 350
    assert all(3 <= one.source.count(" .") <= 6 for one in lines)
    first = sum(names(one.target) <= names(one.source.partition(" .")[0]) for one in lines)
    assert first < 50  # the first sentence is hardly ever enough


def answer(context: str, question: str) -> str:
    """The answer by reading the story from its end: no table of who is where."""
    sentences = [part.split() for part in context.split(" .") if part.split()]
    asked = next(word for word in reversed(question.split()[:-1]) if word not in ("have", "the"))
    if asked[0].islower():
        owner = next(name for line in sentences if asked in line for name in line if name[0].isupper())
        if question.startswith("who"):
            return owner
        asked = owner
    told = [line for line in sentences if asked in line]
    if question.startswith("what"):
        return next(line[1] for line in told if line[0] == "the")
    return next(line[-1] for line in reversed(told) if line[0] != "the")


def test_questions_have_the_answer_that_a_reader_finds():
    for one in generate("questions", 500):
        context, question = one.source.split("\t")
        assert answer(context, question) == one.target
        assert one.target in context.split()


def test_a_booking_says_what_was_said_turns_before():
    lines = list(generate("dialogue", 600))
    booked = [one for one in lines if one.target.startswith("a table")]
    assert len(booked) > 100
    for one in booked:
        assert set(one.target.split()[3:10:2]) - {"for"} <= set(one.source.split())
        assert one.source.split("\t")[2]  # at least three turns
        assert not set(one.target.split()[3:10:2]) - {"for"} <= set(one.source.split("\t")[-1].split())
    changed = [one for one in booked if "better" in one.source]
    assert changed
    assert all(one.source.split()[-2] == one.target.split()[5] for one in changed)


def test_every_way_of_a_held_out_record_says_all_of_it():
    lines = list(generate("records", 600, held_out=True))
    assert all(not missing(one.source, one.target) for one in lines)
    assert len({one.source for one in lines}) <= 201
    assert missing("name[ Bo ] food[ thai ]", "Bo is a french restaurant .") == ["thai"]


def test_food_and_area_that_are_tested_were_never_met_together():
    def met(held_out: bool) -> set[tuple[str, str]]:
        words = [set(one.source.split()) for one in generate("records", 2000, held_out=held_out)]
        return {(f, a) for line in words for f in VALUES["food"] for a in VALUES["area"] if {f, a} <= line}

    assert met(True)
    assert not met(True) & met(False)
    assert {food for food, _ in met(False)} == set(VALUES["food"])
