"""Normalisation: reversible steps lose nothing, spans point into the raw text, tokenizers apply and undo it."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.prepare import train_tokenizers
from transduce.data.tokenizers.normalisation import CAPITAL, KEPT, ONE_WAY, TITLE, UPPER, aligned, apply, undo
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import from_json, to_json
from transduce.errors import InputError
from transduce.recipe import parse

KOREAN = ["한국어 말", "각 가 힣", "바다"]
WAYS = [("nfd",), ("nfc",), ("case",), ("case", "nfd"), ("nfd", "case"), ("case", "nfc")]
WAYS += [("case_words",), ("case_words", "nfd"), ("nfd", "case_words")]
# Letters that decompose, compose, change their case oddly, reorder, are excluded from composition, and the marks.
HARD = (
    "aZéÉñẹ́ǭ각한ᄀ\u1161\u11a8İıßẞǅςΣ\u0301\u0323\u0344\u0958\u212b\u2126\u2000 \t\n" + KEPT + CAPITAL + TITLE + UPPER
)
TEXTS = st.text() | st.text(alphabet=HARD)


@pytest.mark.parametrize("steps", WAYS, ids="+".join)
@given(text=TEXTS)
def test_undo_restores_every_text(steps, text):
    assert undo(apply(text, steps), steps) == text


@pytest.mark.parametrize("steps", WAYS, ids="+".join)
@given(text=TEXTS)
def test_spans_cover_the_raw_text_in_order(steps, text):
    found = aligned(text, steps)
    assert found.text == apply(text, steps)
    assert len(found.begins) == len(found.ends) == len(found.text)
    assert found.raw_span(0, len(found.text)) == (0, len(text))
    assert [*found.begins] == sorted(found.begins)
    assert all(begin <= end for begin, end in zip(found.begins, found.ends, strict=True))


@given(text=st.text().map(lambda text: unicodedata.normalize("NFC", text)))
def test_text_in_its_declared_form_is_decomposed_whole(text):
    if KEPT not in text and "\u2000" not in text and "\u2001" not in text:
        words = apply(text, ["nfd"])
        assert unicodedata.normalize("NFD", words) == unicodedata.normalize("NFD", text)


# Composition over several characters, compatibility forms with spaces, ligatures, invisible characters, punctuation.
LOSSY = "aÅ\u030aﬁ²½ｗ１…´¨ΣσςİßA\u0327\u0301\u1100\u1161\u11a8\u09c7\u09be“„»’–—−\u00a0\u3000\u200b\ufeff\u00ad \t\n"


@pytest.mark.parametrize("step", ONE_WAY)
@given(text=st.text() | st.text(alphabet=LOSSY))
def test_one_way_steps_are_idempotent_and_have_spans(step, text):
    found = aligned(text, [step])
    assert found.text == apply(text, [step])
    assert apply(found.text, [step]) == found.text
    assert undo(found.text, [step]) == found.text
    assert [*found.begins] == sorted(found.begins)
    spans = zip(found.text, found.begins, found.ends, strict=True)
    for character, begin, end in spans:  # a character comes from its span alone
        assert character in apply(text[begin:end], [step])


@given(text=st.text(alphabet=LOSSY + HARD))
def test_reversible_steps_after_one_way_steps_are_undone(text):
    for after in WAYS:
        assert undo(apply(text, [*ONE_WAY, *after]), [*ONE_WAY, *after]) == apply(text, ONE_WAY)


def test_what_the_one_way_steps_do():
    text = "„Das\u00a0ist – so\u200b  gut‟, e\u0301 ﬁ ２…"
    assert apply(text, ["quotes", "dashes"]) == '"Das\u00a0ist - so\u200b  gut", e\u0301 ﬁ ２…'
    assert apply(text, ["spaces", "lower"]) == "„das ist – so gut‟, e\u0301 ﬁ ２…"
    assert apply(text, ["canonical"]) == text.replace("e\u0301", "é")
    assert apply(text, ["nfkc"]) == "„Das ist – so\u200b  gut‟, é fi 2..."


@pytest.mark.parametrize("kind", ["chars", "words", "bpe"])
def test_tokenizers_read_input_as_they_read_training_text(kind):
    steps = ("nfkc", "quotes", "spaces", "lower")
    tokenizer = Tokenizer.train(["“A” ﬁne house", "a house"], kind, 300, normalisation=steps)
    plain = tokenizer.encode('"a" fine house').ids
    assert 3 not in plain
    assert tokenizer.encode("„A‟ \u00a0FINE ｈouse").ids == plain
    assert tokenizer.encode_batch(["„A‟ \u00a0FINE ｈouse"]) == [plain]
    assert tokenizer.decode(plain) == '"a" fine house'


def test_what_the_steps_do():
    assert apply("각 é", ["nfd"]) == "\u1100\u1161\u11a8 e\u0301"
    assert apply("e\u0301 각", ["nfd"]) == f"{KEPT}e\u0301 \u1100\u1161\u11a8"  # the first word keeps its form
    assert apply("e\u0301", ["nfc"]) == "é"
    assert apply("Paris UN", ["case"]) == f"{CAPITAL}paris {CAPITAL}u{CAPITAL}n"
    words = "Paris UN I (Élan) iPhone straße 3D ÑÑa"
    marked = f"{TITLE} paris {UPPER} un {TITLE} i {TITLE} (élan) iPhone straße {TITLE} 3d ÑÑa"
    assert apply(words, ["case_words"]) == marked
    assert apply(f"{TITLE} Paris", ["case_words"]) == f"{KEPT}{TITLE} {TITLE} paris"
    assert apply("\u1e9e", ["case"]) == "\u1e9e"  # its small letter has another capital


@pytest.mark.parametrize("kind", ["chars", "words", "bytes", "bpe", "unigram"])
def test_tokenizers_apply_and_undo_it(kind, tmp_path):
    tokenizer = Tokenizer.train(KOREAN, kind, 300, normalisation=("nfd",))
    for text in KOREAN:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert tokenizer.encode_batch([text]) == [tokenizer.encode(text).ids]
    encoding = tokenizer.encode("각 가")
    spans = dict.fromkeys("각 가"[begin:end].strip() for begin, end in encoding.offsets)
    assert [span for span in spans if span] == ["각", "가"]
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.fingerprint, loaded.normalisation) == (tokenizer.fingerprint, ("nfd",))


@pytest.mark.parametrize("kind", ["words", "bpe", "unigram"])
def test_words_share_their_pieces_in_both_cases(kind):
    texts = ["the city of paris is large", "the city is old", "paris is old"] * 9
    tokenizer = Tokenizer.train([*texts, "Paris PARIS The"], kind, 400, normalisation=("case_words",))
    for small, text in (("paris is", "Paris is"), ("the city", "THE city"), ("old city", "Old City")):
        wanted, found = tokenizer.encode(small).ids, tokenizer.encode(text)
        assert set(wanted) <= set(found.ids)
        assert tokenizer.decode(found.ids) == text
        assert text[found.offsets[0][0] : found.offsets[-1][1]] == text


def test_unseen_syllables_have_known_jamo():
    syllables = Tokenizer.train(["각 나"], "chars", 100)
    jamo = Tokenizer.train(["각 나"], "chars", 100, normalisation=("nfd",))
    assert 3 in syllables.encode("낙").ids
    assert 3 not in jamo.encode("낙").ids
    assert jamo.decode(jamo.encode("낙").ids) == "낙"


def test_fingerprints_of_other_tokenizers_stay():
    assert '"normalisation"' not in _saved(Tokenizer.train(["a"], "chars", 10))
    damaged = _saved(Tokenizer.train(["a"], "chars", 10, normalisation=("nfd",))).replace("nfd", "rot13")
    with pytest.raises(ValueError, match="unknown normalisation 'rot13'"):
        from_json(damaged)


def _saved(tokenizer: Tokenizer) -> str:
    return to_json(tokenizer.vocabulary)


@pytest.mark.parametrize(
    "side",
    [
        {"kind": "labels", "normalisation": ["nfd"]},
        {"kind": "chars", "normalisation": ["nfd", "nfc"]},
        {"kind": "chars", "normalisation": ["case", "case"]},
        {"kind": "chars", "normalisation": ["rot13"]},
        {"kind": "chars", "normalisation": ["nfd", "lower"]},
    ],
)
def test_recipes_that_make_no_sense_are_refused(side):
    with pytest.raises(InputError, match="normalisation"):
        parse({"tokens": {"source": side}})


def test_a_language_model_reads_text_as_it_is(tmp_path: Path):
    (tmp_path / "text.txt").write_text("가\n", encoding="utf-8")
    side = {"kind": "chars", "normalisation": ["nfd"]}
    recipe = {
        "data": {"train": str(tmp_path / "text.txt"), "format": "text"},
        "tokens": {"source": side, "target": side},
    }
    with pytest.raises(InputError, match="language model reads text as it is"):
        train_tokenizers(parse(recipe))
