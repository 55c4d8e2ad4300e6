"""Hallucinated inflections: shared stems, letters that change, determinism, and training data alone."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.data.augmentation import (
    ARTIFICIAL,
    Alphabet,
    Beginnings,
    Hallucination,
    alternating_letters,
    augmented,
    citation_features,
    common_stems,
    vowels_of,
)
from transduce.data.batching import DataPosition
from transduce.data.prepare import PreparedData, prepare_data, train_tokenizers
from transduce.errors import InputError
from transduce.flow import Example
from transduce.recipe import Recipe, parse
from transduce.recipe.build import complete_recipe

LINES = [("gelernt", "N;SG", "gelernte"), ("hören", "V;PST", "gehört")]
LINES += [("Ab-Haus", "N;PL", "Ab-Häuser"), ("a", "N", "b")]
EXAMPLES = [Example(f"{lemma}\t{tags}", form) for lemma, tags, form in LINES]
WORDS = st.text("abcÄé-' ", max_size=12)


def recipe_for(tmp_path: Path, lines: list[tuple[str, ...]] = LINES, **data: Any) -> Recipe:
    path = tmp_path / "table.tsv"
    path.write_text("".join("\t".join(line) + "\n" for line in lines * 5), encoding="utf-8")
    part = {"width": 8}
    parts = {"lemma": {"kind": "recurrent", **part}, "features": {"kind": "identity", **part}}
    section = {
        "train": {"path": str(path), "source_columns": 2},
        "sources": {"lemma": "text", "features": "tags"},
        "augmentation": {"kind": "hallucination", "examples": 30},
        "cache": str(tmp_path / "cache"),
        **data,
    }
    tokens = {"source": {"kind": "chars"}, "target": {"kind": "chars"}, "shared": True}
    model = {
        "encoder": {"kind": "multi_source", **part, "parts": parts},
        "decoder": {"kind": "edit_transducer", **part},
    }
    return complete_recipe(parse({"data": section, "tokens": tokens, "model": model}))


def prepared(recipe: Recipe) -> PreparedData:
    return prepare_data(recipe, train_tokenizers(recipe))


@given(WORDS, WORDS)
@settings(deadline=None)
def test_stems_are_common_substrings_in_the_same_order(lemma: str, form: str) -> None:
    stems = common_stems(lemma, form, 3)
    for source, target, length in stems:
        assert length >= 3
        assert lemma[source : source + length] == form[target : target + length]
    for (one, other, length), (later, last, _) in pairwise(stems):
        assert later >= one + length
        assert last >= other + length
    substrings = {lemma[i:j] for i in range(len(lemma)) for j in range(i + 3, len(lemma) + 1)}
    longest = max((len(one) for one in substrings if one in form), default=0)
    assert max((length for *_, length in stems), default=0) == longest


def test_only_letters_inside_a_stem_change_and_equally_on_both_sides() -> None:
    letters = {one for lemma, _, form in LINES for one in lemma + form if one.isalpha()}
    made = list(Hallucination(examples=200)(EXAMPLES, Random(1)))
    assert len(made) == 200
    assert len({one.source for one in made}) > 70
    for one, (lemma, tags, form) in zip(made, LINES * 50, strict=True):
        new, features = one.source.split("\t")
        assert features == tags
        if not common_stems(lemma, form, 3):
            assert (new, one.target) == (lemma, form)
            continue
        assert len(new) == len(lemma)
        assert len(one.target or "") == len(form)
        assert new != lemma
        assert set(new) - {"-"} <= letters
        changed = {position for position in range(len(lemma)) if new[position] != lemma[position]}
        (source, target, length), *_ = common_stems(lemma, form, 3)
        assert changed <= set(range(source + 1, source + length - 1))
        assert new[source : source + length] == (one.target or "")[target : target + length]
        assert all(new[position].isupper() == lemma[position].isupper() for position in changed)


def test_rate_one_replaces_every_letter_inside() -> None:
    (made,) = Hallucination(examples=1, rate=1.0)(EXAMPLES[:1], Random(0))
    assert [one == other for one, other in zip(made.source, "gelernt", strict=False)] == [True, *[False] * 5, True]


def test_vowels_are_known_or_the_letters_that_alternate_with_others() -> None:
    words = ["banana", "tomate", "kilometer", "sabotage", "lokal", "petunie", "rot", "minute"]
    assert alternating_letters(words) == vowels_of(words) == set("aeiou")
    assert alternating_letters(["", "a", "bb", "1-2"]) == vowels_of(["", "bb", "1-2"]) == frozenset()
    georgian = [word.translate({ord(one): 0x10D0 + ord(one) - ord("a") for one in word}) for word in words]
    assert vowels_of(georgian) == {chr(0x10D0 + ord(one) - ord("a")) for one in "aeiou"}
    assert vowels_of(["Szőcs", "чай", "\u0443\u043c"]) == {"ő", "\u0430", "\u0443"}


def test_exchanged_beginnings_leave_the_last_vowel_of_the_stem_and_what_follows() -> None:
    donors = [Example(f"{word}\tN", word) for word in ("tomate", "kilometer")]
    example = Example("banant\tN;PL", "gebananten")
    made = {
        (one.source, one.target)
        for seed in range(200)
        if (one := Beginnings(donors, frozenset("aeiou")).exchanged(example, Random(seed))) != example
    }
    assert len(made) > 10
    beginnings = {word[:cut] for word in ("tomate", "kilometer") for cut in range(1, len(word))}
    for source, target in made:
        lemma = source.removesuffix("\tN;PL")
        assert target == f"ge{lemma}en"
        assert any(lemma == one + rest for one in beginnings for rest in ("anant", "nant", "ant"))
    assert Beginnings(donors, frozenset("aeiou")).exchanged(Example("st\tN", "st"), Random(0)).source == "st\tN"


def test_edges_are_replaced_unless_the_form_repeats_the_last_letter() -> None:
    lines = [Example("kal\tN;DAT", "kalnak"), Example("dob\tN;INS", "dobbal")]
    made = list(Hallucination(examples=200, rate=1.0, keep_vowels=True, replace_edges=True)(lines, Random(1)))
    for one, (lemma, suffix) in zip(made, [("kal", "nak"), ("dob", "bal")] * 100, strict=True):
        new = one.source.partition("\t")[0]
        assert one.target == new + suffix
        assert new[0] != lemma[0]
        assert (new[2] == lemma[2]) == (lemma == "dob")


def test_a_share_of_the_lemmas_are_their_own_citation_forms() -> None:
    lines = [Example("banana\tN;GEN;PL", "bananas"), Example("tomaten\tV.PTCP;PST", "tomatent")]
    made = list(Hallucination(examples=1000, citations=0.2)(lines, Random(1)))
    cited = [one for one in made if one.source.split("\t")[1] not in ("N;GEN;PL", "V.PTCP;PST")]
    assert 150 < len(cited) < 250
    assert {one.source.split("\t")[1] for one in cited} == {"N;NOM;SG", "V"}
    assert all(one.source.split("\t")[0] == one.target for one in cited)
    assert citation_features(Example("bleu\tADJ;FEM;PL")) == "ADJ;NOM;MASC;SG"
    contradicted = [*lines, Example("sabot\tN;NOM;SG", "sabota")]
    made = list(Hallucination(examples=300, citations=1.0)(contradicted, Random(1)))
    assert {one.source.split("\t")[1] for one in made} == {"N;GEN;PL", "N;NOM;SG", "V"}
    assert all((one.target or "").endswith("ta") for one in made if one.source.endswith("\tN;NOM;SG"))
    (without_features,) = Hallucination(examples=1, citations=1.0)([Example("banana", "bananas")], Random(1))
    assert without_features.target == f"{without_features.source}s"


def test_kept_vowels_stay_and_replace_nothing() -> None:
    lines = [Example(f"{word}\tN", f"{word}s") for word in ("banana", "tomate", "kilometer", "sabotage", "lokal")]
    for one in Hallucination(examples=100, rate=1.0, keep_vowels=True)(lines, Random(3)):
        lemma = one.source.partition("\t")[0]
        (before,) = (word for line in lines if len(word := line.source[:-2]) == len(lemma) and word[0] == lemma[0])
        changed = [(old, new) for old, new in zip(before, lemma, strict=True) if old != new]
        assert changed
        assert not set("aeiou") & {letter for pair in changed for letter in pair}


def test_the_seed_alone_decides() -> None:
    one, same, other = (augmented(Hallucination(examples=20), EXAMPLES, seed, 2)[0] for seed in (1, 1, 2))
    assert one == same
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_marks_and_punctuation_stay() -> None:
    assert Alphabet([Example("d\u0301-3")]).others("d") == []
    assert Alphabet([Example("de\u0301-3")]).others("d") == ["e"]
    assert not any(Alphabet([Example("de\u0301-3")]).others(one) for one in "\u0301-3")


@pytest.mark.parametrize("own_dev", [False, True])
def test_held_out_pairs_are_neither_artificial_nor_augmented(own_dev: bool, tmp_path: Path) -> None:
    path = tmp_path / "dev.tsv"
    path.write_text("lerntest\tN;SG\tlerntesta\n", encoding="utf-8")
    lines = [(f"{letter}inner{letter}", "N", f"{letter}inner{letter}s") for letter in "abcdefgh"]
    recipe = recipe_for(tmp_path, lines, **({"dev": str(path)} if own_dev else {"dev_size": 10}))
    data = prepared(recipe)
    held_out = data.dev_examples()
    assert len(held_out) == (1 if own_dev else 10)
    assert ARTIFICIAL not in {one.file for one in held_out}
    rows = [data.train.example(int(row)) for row in np.asarray(data.rows)]
    artificial = [one for one in rows if one.file == ARTIFICIAL]
    assert data.train.describe()[-1] == "30 of them artificial"
    assert len(artificial) == 30
    assert len(rows) == 30 + 40 - (0 if own_dev else 10)
    ends = {one.source[0] for one in held_out}
    assert not ends & {one.source[0] for one in rows}
    plain = recipe.model_copy(update={"data": recipe.data.model_copy(update={"augmentation": None})})
    assert [one.fingerprint for one in train_tokenizers(recipe)] == [one.fingerprint for one in train_tokenizers(plain)]
    assert prepared(plain).dev_examples() == held_out


def test_an_epoch_holds_all_pairs_and_its_order_is_a_function_of_the_position(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, dev_size=5)
    tokenizers = train_tokenizers(recipe)
    first, again = (prepare_data(recipe, tokenizers).batches(recipe, tokenizers) for _ in range(2))
    seen: list[int] = []
    for index in range(first.batches_in(0)):
        one, same = (batches.at(DataPosition(0, index)) for batches in (first, again))
        assert one.rows == same.rows
        assert one.source.values.equal(same.source.values)
        seen += one.rows
    assert len(seen) == len(set(seen)) == 30 + 20 - 5


def test_corpus_weights_repeat_the_given_pairs(tmp_path: Path) -> None:
    corpus = {"path": str(tmp_path / "table.tsv"), "source_columns": 2, "weight": 3.0}
    recipe = recipe_for(tmp_path, train=corpus, dev=str(tmp_path / "table.tsv"))
    tokenizers = train_tokenizers(recipe)
    batches = prepare_data(recipe, tokenizers).batches(recipe, tokenizers)
    assert sum(len(batches.at(DataPosition(0, index)).rows) for index in range(batches.batches_in(0))) == 3 * 20 + 30


def test_pairs_without_a_stem_give_a_warning(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, [("abc", "N", "xyz"), ("de", "N", "de")], dev_size=5)
    with pytest.warns(UserWarning, match="no artificial pair"):
        assert len(prepared(recipe).rows) == 5


def test_augmentation_needs_texts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="first source is a text"):
        recipe_for(tmp_path, sources={"lemma": "tags", "features": "tags"})
    with pytest.raises(InputError, match="hallucination"):
        recipe_for(tmp_path, augmentation={"kind": "halucination"})
    assert not list(islice(Hallucination()([], Random(0)), 1))


def test_letters_of_each_language_are_its_own() -> None:
    examples = [
        Example("<2de> abcde\tN", "abcdes"),
        Example("<2ru> \u0430\u0431\u0432\u0433\tN", "\u0430\u0431\u0432\u0433"),
    ]
    german, russian = augmented(Hallucination(examples=9), examples, 1, 2)
    assert (german.language, russian.language) == ("de", "ru")
    assert all(one.source.startswith("<2de> a") and one.source.isascii() for one in german.examples)
    assert all(one.source.startswith("<2ru> \u0430") and not (one.target or "").isascii() for one in russian.examples)
