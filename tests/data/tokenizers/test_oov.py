"""OOV placeholders: ids of a pair, decoding, storage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.filters import Filters
from transduce.data.store import build_store
from transduce.data.tokenizers.tokenizer import Tokenizer, encode_sources, encode_targets, oov_words
from transduce.errors import InputError
from transduce.flow import SPECIALS, UNK
from transduce.recipe import Corpus, parse

KNOWN = ("my", "name", "is", "hello")
NUMBERED = 3
TOKENIZER = Tokenizer.train([" ".join(KNOWN)], "words", 100, oov_placeholders=NUMBERED)
FIRST = len(SPECIALS)
WORDS = st.lists(st.sampled_from([*KNOWN, "zorblax", "quux", "fnord", "grault", "<unk1>"]), min_size=1, max_size=9)


def known(word: str) -> int:
    return TOKENIZER.encode(word).ids[0]


def direct(source: list[str], words: list[str]) -> list[int]:
    """The rule, word by word."""
    strange = [word for number, word in enumerate(source) if word not in KNOWN and word not in source[:number]]
    ids = []
    for word in words:
        place = strange.index(word) if word in strange else NUMBERED
        ids.append(known(word) if word in KNOWN else FIRST + place if place < NUMBERED else UNK)
    return ids


@given(WORDS, WORDS)
def test_placeholders_number_the_unknown_words_of_the_source(source, target):
    texts = " ".join(source), " ".join(target)
    assert encode_sources(TOKENIZER, [texts[0]]) == [direct(source, source)]
    assert encode_targets(TOKENIZER, [texts[1]], [texts[0]]) == [direct(source, target)]


@given(WORDS, WORDS)
def test_placeholders_decode_to_the_words_of_the_source(source, target):
    texts = " ".join(source), " ".join(target)
    (ids,) = encode_targets(TOKENIZER, [texts[1]], [texts[0]])
    words = [word if number != UNK else "<unk>" for word, number in zip(target, ids, strict=True)]
    assert TOKENIZER.decode(ids, oov_words(TOKENIZER, texts[0])) == " ".join(words)


def test_placeholder_without_a_word_is_displayed():
    assert TOKENIZER.decode([known("hello"), FIRST + 2], ["zorblax"]) == "hello <unk3>"
    assert TOKENIZER.piece(FIRST) == "<unk1>"


def test_text_that_looks_like_a_placeholder_is_text():
    """A word <unk1> of the text never becomes the number by itself, and may be a known word beside it."""
    tokenizer = Tokenizer.train(["<unk1> a"], "words", 100, oov_placeholders=2)
    assert tokenizer.encode("<unk1>").ids[0] >= FIRST + 2
    assert tokenizer.decode(encode_sources(tokenizer, ["<unk1> b"])[0], ["b"]) == "<unk1> b"


def test_white_space_has_no_placeholder():
    assert oov_words(TOKENIZER, "my\u2003name zorblax") == ["zorblax"]


def test_placeholders_are_saved_and_loaded(tmp_path):
    TOKENIZER.save(tmp_path / "t.json")
    again = Tokenizer.load(tmp_path / "t.json")
    assert (again.oov_placeholders, again.fingerprint) == (NUMBERED, TOKENIZER.fingerprint)
    assert again.size == FIRST + NUMBERED + 2 + len(KNOWN)


def test_without_placeholders_nothing_changes(tmp_path):
    plain = Tokenizer.train([" ".join(KNOWN)], "words", 100)
    assert encode_sources(plain, ["my zorblax"]) == [plain.encode("my zorblax").ids]
    plain.save(tmp_path / "t.json")
    assert "oov_placeholders" not in (tmp_path / "t.json").read_text()
    assert plain.fingerprint != TOKENIZER.fingerprint


def test_store_contains_placeholders(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("my name is zorblax\thello zorblax\nmy name is fnord\thello quux\n")
    store = build_store([Corpus(path=str(pairs))], TOKENIZER, TOKENIZER, Filters(), "error", tmp_path / "cache")
    assert store.ids(0) == ([known("my"), known("name"), known("is"), FIRST], [known("hello"), FIRST])
    assert store.ids(1) == ([known("my"), known("name"), known("is"), FIRST], [known("hello"), UNK])


@pytest.mark.parametrize(("shared", "kind"), [(False, "words"), (True, "bpe"), (True, "chars")])
def test_placeholders_need_a_shared_vocabulary_of_words(shared, kind):
    side = {"kind": kind}
    with pytest.raises(InputError, match="one vocabulary of words"):
        parse({"tokens": {"source": side, "target": side, "shared": shared, "oov_placeholders": 5}})


def test_only_words_have_placeholders():
    with pytest.raises(InputError, match="not chars"):
        Tokenizer.train(["abc"], "chars", 100, oov_placeholders=2)
