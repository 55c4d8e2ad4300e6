"""Synthetic text data sets: determinism, held-out part, correctness of every target."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.autoconfig.tasks import TASK_RECIPES
from transduce.errors import InputError
from transduce.synthetic import SYNTHETIC, algorithmic, generate, write_splits
from transduce.synthetic.grammars import AMBIGUOUS, GOOD, VERBS, german_phrase
from transduce.synthetic.sentences import VALUES, missing_values
from transduce.synthetic.words import CASES, NUMBERS, POSSESSORS, TURKISH_VOWELS, inflect, transliterate

TEXTS = [name for name, dataset in SYNTHETIC.items() if not dataset.writes_files]
every_text_dataset = pytest.mark.parametrize("name", TEXTS)


@every_text_dataset
def test_equal_seeds_give_equal_lines(name):
    first, same, other = (list(generate(name, 50, seed)) for seed in (3, 3, 4))
    assert first == same
    assert first != other


@every_text_dataset
def test_lines_are_distinct_and_have_the_stated_columns(name):
    lines = list(generate(name, 500))
    assert len({(one.source, one.target) for one in lines}) == 500
    for one in lines:
        assert len(one.source.split("\t") if one.source else ()) == SYNTHETIC[name].columns
        assert all(part == part.strip() for part in one.source.split("\t"))
        assert SYNTHETIC[name].columns == 0 or one.source.split("\t")[-1]
        assert one.target
        assert "\t" not in one.target


def names(text: str) -> set[str]:
    return {word for word in text.split() if word[0].isupper()}


@every_text_dataset
def test_training_and_held_out_parts_are_disjoint_for_all_seeds(name):
    """By day for dates, by the invented names where there are some, else by the first column."""
    trained, tested = ([*generate(name, 900, seed, held_out=held)] for seed, held in ((1, False), (2, True)))
    if name == "dates" or SYNTHETIC[name].columns == 0:
        parts = [{one.target for one in lines} for lines in (trained, tested)]
    elif any(names(one.source) for one in trained):
        parts = [set().union(*(names(one.source) for one in lines)) for lines in (trained, tested)]
    else:
        parts = [{one.source.split("\t")[0] for one in lines} for lines in (trained, tested)]
    assert all(len(part) >= 100 for part in parts)
    assert not parts[0] & parts[1]


def test_requesting_more_examples_than_exist_is_an_error():
    with pytest.raises(InputError, match="has only"):
        list(generate("paraphrases", 10**6))


def test_unknown_dataset_suggests_the_nearest_name():
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
def test_transliteration_of_known_words(word, latin):
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
def test_inflection_of_known_words(lemma, features, form):
    assert inflect(lemma, features) == form


@given(
    lemma=st.text("abdeglmnorsuzöüıi", min_size=1, max_size=8).filter(
        lambda word: any(one in TURKISH_VOWELS for one in word)
    ),
    features=st.tuples(*map(st.sampled_from, ([*NUMBERS], [*POSSESSORS], [*CASES]))),
)
def test_inflection_keeps_vowel_harmony_and_the_stem(lemma, features):
    """No suffix has a back vowel after a front one, or two adjacent vowels; a voiced stem is unchanged."""
    form = inflect(lemma, " ".join(part for part in features if part))
    assert form.startswith(lemma)
    last = [one for one in lemma if one in TURKISH_VOWELS][-1]
    added = form[len(lemma) :]
    back = [one in "aıou" for one in last + added if one in TURKISH_VOWELS]
    assert len(set(back)) == 1
    ends = lemma[-1] + added
    assert not any(a in TURKISH_VOWELS and b in TURKISH_VOWELS for a, b in pairwise(ends))


@pytest.mark.parametrize("name", ["summaries", "questions", "dialogue", "records"])
def test_names_in_the_target_occur_in_the_source(name):
    for one in generate(name, 500):
        assert names(one.target) <= names(one.source)


def test_summary_requires_selecting_names_from_the_source():
    lines = list(generate("summaries", 500))
    assert all(len(names(one.target)) == 2 for one in lines)
    assert sum(len(names(one.source)) > 2 for one in lines) > 350
    assert all(3 <= one.source.count(" .") <= 6 for one in lines)
    first = sum(names(one.target) <= names(one.source.partition(" .")[0]) for one in lines)
    assert first < 50  # the first sentence is rarely sufficient


def answer(context: str, question: str) -> str:
    """The answer found by reading the story backwards, independently of the generator."""
    sentences = [part.split() for part in context.split(" .") if part.split()]
    asked = next(word for word in reversed(question.split()[:-1]) if word not in ("have", "the"))
    if asked[0].islower():
        owner = next(name for line in sentences if asked in line for name in line if name[0].isupper())
        if question.startswith("who"):
            return owner
        asked = owner
    mentions = [line for line in sentences if asked in line]
    if question.startswith("what"):
        return next(line[1] for line in mentions if line[0] == "the")
    return next(line[-1] for line in reversed(mentions) if line[0] != "the")


def test_answers_agree_with_an_independent_reader():
    for one in generate("questions", 500):
        context, question = one.source.split("\t")
        assert answer(context, question) == one.target
        assert one.target in context.split()


def test_confirmation_repeats_values_of_earlier_turns():
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


def test_every_reference_of_a_held_out_record_mentions_all_values():
    lines = list(generate("records", 600, held_out=True))
    assert all(not missing_values(one.source, one.target) for one in lines)
    assert len({one.source for one in lines}) <= 201
    assert missing_values("name[ Bo ] food[ thai ]", "Bo is a french restaurant .") == ["thai"]


def test_held_out_combinations_of_food_and_area_are_not_in_training():
    def combinations(held_out: bool) -> set[tuple[str, str]]:
        words = [set(one.source.split()) for one in generate("records", 2000, held_out=held_out)]
        return {(f, a) for line in words for f in VALUES["food"] for a in VALUES["area"] if {f, a} <= line}

    assert combinations(True)
    assert not combinations(True) & combinations(False)
    assert {food for food, _ in combinations(False)} == set(VALUES["food"])


def test_every_task_has_a_data_set():
    assert {dataset.task for dataset in SYNTHETIC.values()} == set(TASK_RECIPES)


def test_german_articles_and_adjectives_agree():
    assert german_phrase(("the", "old", "man"), "object") == "den alten Mann"
    assert german_phrase(("a", "small", "house"), "subject") == "ein kleines Haus"
    assert german_phrase(("a", "", "cat"), "object") == "eine Katze"
    words = {one.target.split()[-2] for one in generate("translations", 300) if " dass " in one.target}
    assert words == set(VERBS.values())  # the verb is the last word of a subordinate clause


def test_negation_turns_a_judgement_round():
    for one in generate("reviews", 200):
        negated = " not " in one.source or " anything but " in one.source
        good = any(word in one.source.split() for word in GOOD)
        assert one.target == ("positive" if good != negated else "negative")


def test_tags_are_one_a_word_and_ambiguous_words_have_two():
    found: dict[str, set[str]] = {}
    for one in generate("tags", 500):
        for word, tag in zip(one.source.split(), one.target.split(), strict=True):
            found.setdefault(word, set()).add(tag)
    assert all(found[word] == {"NOUN", "VERB"} for word in AMBIGUOUS)


def test_entailment_needs_both_texts():
    for one in generate("entailment", 300):
        premise, hypothesis = one.source.split("\t")
        who, room = hypothesis.split()[0], hypothesis.split()[-1]
        stated = premise.replace(",", "and").split(" and ")
        label = "neutral" if f"{who} is away" in premise else "contradiction"
        assert one.target == ("entailment" if f"{who} is in the {room}" in [part.strip() for part in stated] else label)


@pytest.mark.parametrize("name", ["reverse", "tags", "stories"])
def test_splits_are_written_to_three_files_without_a_common_line(name, tmp_path):
    paths = write_splits(name, tmp_path, (60, 12, 10), 3)
    lines = [path.read_text(encoding="utf-8").splitlines() for path in paths]
    assert [(path.name, len(one)) for path, one in zip(paths, lines, strict=True)] == [
        ("train.tsv", 60), ("dev.tsv", 12), ("test.tsv", 10),
    ]  # fmt: skip
    assert len({line for one in lines for line in one}) == 82
    assert {line.count("\t") for one in lines for line in one} == {min(1, SYNTHETIC[name].columns)}
    assert [path.name for path in write_splits(name, tmp_path / "more", (5, 0, 2))] == ["train.tsv", "test.tsv"]


def test_splits_of_letters_are_those_of_the_python_function(tmp_path):
    paths = write_splits("sort", tmp_path, (200, 30, 40), length=(3, 10))
    for path, examples in zip(paths, algorithmic.split("sort", 200, 30, 40, length=(3, 10)), strict=True):
        assert path.read_text() == "".join(f"{one.source}\t{one.target}\n" for one in examples)


def test_the_number_of_letters_can_be_chosen_and_that_of_other_sets_cannot():
    for held_out in (False, True):
        sources = [one.source.split() for one in generate("copy", 100, held_out=held_out, length=(2, 4))]
        assert {len(source) for source in sources} == {2, 3, 4}
    with pytest.raises(InputError, match="the length of tags cannot be chosen"):
        generate("tags", 5, length=(3, 10))
    with pytest.raises(InputError, match="30 distinct sources requested"):
        generate("copy", 30, length=(1, 1))
    with pytest.raises(InputError, match="are files"):
        write_splits("shapes", Path("nowhere"), (5, 1, 1))
