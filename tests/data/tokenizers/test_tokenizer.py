"""Tokenizer: lossless round trips, special tokens, offsets, BPE dropout, files."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from transduce.data.tokenizers import vocabulary
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import EOS, SPECIALS, UNK

TEXTS = [
    "the old house by the river is the oldest house",
    "the river  runs\tby the house, older than old",
    "<s> das alte Haus </s> am Fluss, das älteste <unk> Haus <pad> von 1999",
    "река 川の家 हिन्दी नदी e\u0301 😀",
] * 3
TRAINED = {kind: Tokenizer.train(TEXTS, kind, 400) for kind in vocabulary.KINDS}
SPELLS_ALL = ("bytes", "bpe", "unigram")

ANY_TEXT = st.text().filter(lambda text: "\0" not in text)
AWKWARD = st.text(alphabet=" \t\u00a0\u2028\u2581Ġe\u0301\u093f<s>/the😀\u200d", max_size=30)


@pytest.mark.parametrize("kind", SPELLS_ALL)
@given(text=ANY_TEXT | AWKWARD)
def test_byte_level_kinds_round_trip_any_text(kind: str, text: str) -> None:
    tokenizer = TRAINED[kind]
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(number > UNK for number in ids)


@given(text=st.text(alphabet=sorted(set("".join(TEXTS)))))
def test_chars_round_trip_known_characters(text: str) -> None:
    assert TRAINED["chars"].decode(TRAINED["chars"].encode(text).ids) == text
    assert len(TRAINED["chars"].encode(text).ids) == len(text)


@given(
    parts=st.lists(st.sampled_from(sorted({*" ".join(TEXTS).split(), " ", "  ", "\t"}))), glue=st.sampled_from(" \t")
)
def test_words_round_trip_known_words_with_spaces(parts: list[str], glue: str) -> None:
    text = glue.join(parts)
    ids = TRAINED["words"].encode(text).ids
    assert TRAINED["words"].decode(ids) == text
    assert all(number > UNK for number in ids)


@given(text=AWKWARD | ANY_TEXT)
def test_words_keep_white_space_around_unknown_words(text: str) -> None:
    tokenizer = Tokenizer.train([text], "words", 100)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_single_spaces_between_words_need_no_token() -> None:
    assert TRAINED["words"].encode("the old house").pieces == ["the", "old", "house"]


def test_unknown_tokens_are_encoded_and_displayed() -> None:
    assert TRAINED["words"].encode("the zebra house").ids[1] == UNK
    assert TRAINED["words"].decode(TRAINED["words"].encode("the zebra house").ids) == "the <unk> house"
    assert TRAINED["chars"].encode("thQ").ids[-1] == UNK


@pytest.mark.parametrize("kind", vocabulary.KINDS)
@pytest.mark.parametrize("word", SPECIALS)
def test_special_tokens_in_text_are_ordinary_text(kind: str, word: str) -> None:
    tokenizer = TRAINED[kind]  # trained on texts that hold these words, again and again
    for text in (word, f"a {word} b", word * 3, f" {word}", f"{word} "):
        ids = Tokenizer.train([text] * 50, kind, 300).encode(text).ids
        assert all(number > UNK for number in ids), text
        assert not {0, 1, EOS} & set(tokenizer.encode(text).ids)


@pytest.mark.parametrize("kind", SPELLS_ALL)
def test_special_tokens_decode_to_nothing(kind: str) -> None:
    tokenizer = TRAINED[kind]
    assert tokenizer.decode([1, *tokenizer.encode("the old").ids, 2, 0, 0]) == "the old"


@pytest.mark.parametrize("kind", vocabulary.KINDS)
@given(text=AWKWARD | st.sampled_from(TEXTS))
def test_offsets_cover_the_text(kind: str, text: str) -> None:
    encoded = TRAINED[kind].encode(text)
    assert len(encoded.ids) == len(encoded.pieces) == len(encoded.offsets)
    assert [start for start, _ in encoded.offsets] == sorted(start for start, _ in encoded.offsets)
    covered = {place for start, end in encoded.offsets for place in range(start, end)}
    unsaid = {place for place, letter in enumerate(text) if letter == " "} if kind == "words" else set()
    assert covered | unsaid == set(range(len(text)))


@pytest.mark.parametrize("kind", [kind for kind in vocabulary.KINDS if kind != "labels"])  # a label is no text
def test_word_ids_map_tokens_to_words(kind: str) -> None:
    text = "  the house, älteste 川の家  "
    encoded = TRAINED[kind].encode(text)
    words = Tokenizer.word_spans(text)
    assert [text[start:end] for start, end in words] == text.split()
    numbers = Tokenizer.word_ids(encoded, text)
    assert set(numbers) == set(range(len(words)))
    for number, (start, end) in zip(numbers, encoded.offsets, strict=True):
        letters = {place for place in range(start, end) if not text[place].isspace()}
        assert letters <= set(range(*words[number]))
    assert Tokenizer.word_ids(TRAINED["chars"].encode(" a b "), " a b ") == [0, 0, 1, 1, 1]
    assert Tokenizer.word_ids([(0, 1)], " ") == [-1]


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_batch_encoding_equals_single_encoding(kind: str) -> None:
    texts = [*TEXTS, "", "  ", "nie gesehen 😀"]
    assert TRAINED[kind].encode_batch(texts) == [TRAINED[kind].encode(text).ids for text in texts]
    assert TRAINED[kind].encode_batch([]) == []


@pytest.mark.parametrize("kind", vocabulary.KINDS)
@pytest.mark.parametrize("texts", [[], [""], ["a"], ["ab", "ab c", "abc"], [" "], ["\t\t"]])
@pytest.mark.parametrize("size", [1, 8, 100_000])
def test_training_on_little_data_and_odd_sizes(kind: str, texts: list[str], size: int) -> None:
    tokenizer = Tokenizer.train(texts, kind, size)
    assert tokenizer.vocabulary.pieces[:4] == SPECIALS
    if size == 100_000:
        assert [tokenizer.decode(tokenizer.encode(text).ids) for text in texts] == texts
    if kind in ("chars", "words"):
        assert tokenizer.size <= max(size, 6)


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_training_is_deterministic(kind: str, tmp_path: Path) -> None:
    texts = [" ".join(random.Random(n).choices(["ka", "ko", "kato", "toka", "ma", "mako"], k=8)) for n in range(200)]
    files = [tmp_path / f"{number}.json" for number in range(4)]
    for file in files:
        Tokenizer.train(iter(texts), kind, 300).save(file)
    assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_save_and_load(kind: str, tmp_path: Path) -> None:
    TRAINED[kind].save(tmp_path / "tokens.json")
    loaded = Tokenizer.load(tmp_path / "tokens.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]
    assert (loaded.kind, loaded.size, loaded.fingerprint) == (kind, TRAINED[kind].size, TRAINED[kind].fingerprint)
    assert loaded.encode_batch(TEXTS) == TRAINED[kind].encode_batch(TEXTS)
    others = {other.fingerprint for name, other in TRAINED.items() if name != kind}
    assert loaded.fingerprint not in others


def _damages() -> list[str]:
    good = json.loads(vocabulary.to_json(TRAINED["bpe"].vocabulary))
    pieces = good["pieces"]
    return [
        "", "{", "[]", "{}", "null", json.dumps(good)[:-40],
        json.dumps({**good, "format": 99}),
        json.dumps({**good, "kind": "morse"}),
        json.dumps({**good, "pieces": pieces[1:]}),
        json.dumps({**good, "pieces": [*pieces[:-1], pieces[-2]]}),
        json.dumps({**good, "pieces": [*pieces[:20], *pieces[21:]]}),
        json.dumps({**good, "pieces": [*pieces, 7]}),
        json.dumps({**good, "merges": [["zz", "yy"]]}),
        json.dumps({**good, "scores": [1.0]}),
        json.dumps({**good, "kind": "unigram", "merges": []}),
    ]  # fmt: skip


@pytest.mark.parametrize("content", _damages())
def test_damaged_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(InputError, match="not a tokenizer"):
        Tokenizer.load(tmp_path / "t.json")


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone"):
        Tokenizer.load(tmp_path / "gone.json")
    with pytest.raises(InputError):
        Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="unigram"):
        Tokenizer.train([], "unigrams", 10)


@given(text=st.sampled_from(TEXTS) | ANY_TEXT | AWKWARD | st.text(alphabet="the hous", max_size=60))
def test_zero_dropout_equals_plain_bpe(text: str) -> None:
    assert TRAINED["bpe"].encode_with_dropout(text, 0.0, random.Random(1)) == TRAINED["bpe"].encode(text).ids


@given(text=st.sampled_from(TEXTS) | ANY_TEXT, rate=st.floats(0.01, 0.99), seed=st.integers())
def test_dropout_round_trips(text: str, rate: float, seed: int) -> None:
    tokenizer = TRAINED["bpe"]
    ids = tokenizer.encode_with_dropout(text, rate, random.Random(seed))
    assert tokenizer.decode(ids) == text
    assert len(ids) >= len(tokenizer.encode(text).ids)
    assert ids == tokenizer.encode_with_dropout(text, rate, random.Random(seed))


def test_dropout_gives_more_tokens_at_higher_rates() -> None:
    tokenizer = TRAINED["bpe"]
    lengths = [
        sum(len(tokenizer.encode_with_dropout(TEXTS[0], rate, random.Random(seed))) for seed in range(50))
        for rate in (0.0, 0.1, 0.5, 0.9)
    ]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] <= 50 * (len(TEXTS[0]) + 1)
    with pytest.raises(InputError, match="bpe"):
        TRAINED["words"].encode_with_dropout("a", 0.1, random.Random(1))


def test_white_space_agrees_with_python() -> None:
    import re

    ours = {chr(code) for code in range(sys.maxunicode + 1) if re.match(vocabulary.SPACE, chr(code))}
    assert ours == {chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()}


def test_bytes_kind_encodes_bytes() -> None:
    assert set(vocabulary.byte_letters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert TRAINED["bytes"].encode("aß😀").ids == [byte + 4 for byte in "aß😀".encode()]
    assert TRAINED["bytes"].piece(4 + 0xC3) == "\\xc3"


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_long_line_is_encoded(kind: str) -> None:
    """In the time of many short ones: quadratic work on a hundred thousand characters would take minutes."""
    for text in ("house " * 20_000, "x" * 100_000):
        ids = TRAINED[kind].encode_batch([text])[0]
        assert kind in ("words", "chars", "labels") or TRAINED[kind].decode(ids) == text
