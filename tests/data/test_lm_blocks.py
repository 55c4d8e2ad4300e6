"""Running text and language-model blocks: nothing is lost or repeated, and positions can be sought."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.data.batching import DataPosition, gather
from transduce.data.filters import Filters
from transduce.data.lm_blocks import BlockBatches, TokenStream, consecutive_blocks, hold_out_end, token_streams
from transduce.data.readers.corpus import read_corpus, text_chunks
from transduce.data.row_selection import split
from transduce.data.store import Store, build_store
from transduce.data.tokenizers.tokenizer import Tokenizer, count_text, encode_running_text
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Example
from transduce.recipe import Corpus, parse

KINDS = ["chars", "words", "bytes", "bpe", "unigram"]
TEXT = "To be, or not to be:\n\n  that is the question.  \nWhether 'tis nobler\tin the mind to suffer ΩÜ😀\n"
LINES = st.lists(st.text(st.sampled_from("ab c.\tü😀"), max_size=12), min_size=1, max_size=30)


def put_together(lines: list[str], characters: int = 8) -> list[str]:
    return [one.target or "" for one in text_chunks((Example("", line) for line in lines), characters)]


def everything(batches: list[Batch]) -> list[int]:
    """All foretold tokens."""
    return [token for batch in batches for token in batch.labels.values[batch.labels.mask].tolist()]


@given(LINES, st.integers(1, 40))
def test_chunks_concatenate_to_the_text(lines: list[str], characters: int) -> None:
    parts = put_together(lines, characters)
    assert "".join(parts) == "\n".join(lines)
    assert all(part.startswith("\n") for part in parts[1:])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(lines=LINES)
def test_ids_of_chunks_decode_to_the_exact_text(kind: str, lines: list[str]) -> None:
    tokenizer = tokenizers()[kind]
    ids = [one for block in encode_running_text(tokenizer, put_together(lines)) for one in block]
    text = "\n".join(lines)
    if kind == "words":
        known = set(tokenizer.vocabulary.pieces)
        text = re.sub(r"\S+", lambda word: word[0] if word[0] in known else "<unk>", text)
    assert tokenizer.decode(ids) == text


_TOKENIZERS: dict[str, Tokenizer] = {}


def tokenizers() -> dict[str, Tokenizer]:
    if not _TOKENIZERS:
        texts = [TEXT, "a b c. \n\tü😀 ab\n bc  . \n"] * 5
        _TOKENIZERS.update({kind: Tokenizer.train(texts, kind, 320) for kind in KINDS})
    return _TOKENIZERS


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(lines=LINES)
def test_every_word_and_character_is_counted_once(kind: str, lines: list[str]) -> None:
    text = "\n".join(lines)
    measured = count_text(tokenizers()[kind], put_together(lines))
    assert (measured.ids[0], measured.ids[-1]) == (BOS, EOS)
    assert len(measured.words) == len(measured.characters) == len(measured.ids) - 1
    assert (measured.characters >= 0).all()
    if kind != "words" or text.strip(" "):
        assert measured.characters.sum() == len(text) + 1  # </s> is one
        assert measured.words.sum() == len(text.split()) + 1


def stream(length: int, closed: bool = True, corpus: int = 0) -> TokenStream:
    return TokenStream(np.arange(4, 4 + length), corpus, closed)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 100), st.integers(0, 3))
def test_each_token_is_predicted_once_per_epoch(lengths: list[int], size: int, tokens: int, epoch: int) -> None:
    texts = [stream(length, closed=number % 2 == 0, corpus=number) for number, length in enumerate(lengths)]
    expected = sorted(token for text in texts for token in text.ids(1, len(text)).tolist())
    passages = BlockBatches(texts, size, batch_tokens=tokens, seed=3)
    found = [passages.at(DataPosition(epoch, index)) for index in range(passages.batches_in(epoch))]
    assert sorted(everything(found)) == expected
    assert sorted(everything(list(consecutive_blocks(texts, size, tokens)))) == expected
    for batch in found:
        assert batch.source is None
        assert batch.target is not None
        assert batch.size * size <= max(tokens, size)
        for row, mask in zip(batch.target.values, batch.target.mask, strict=True):
            ids = row[mask].tolist()
            assert 2 <= len(ids) <= size + 1
            inner = [one for one in ids if one not in (BOS, EOS)]
            assert inner == list(range(inner[0], inner[0] + len(inner))) if inner else True  # it is a stretch of text
    slots = sum(batch.slots for batch in found)
    assert passages.padding(epoch) == pytest.approx(1 - sum(batch.tokens for batch in found) / slots)


def test_block_boundaries_vary_and_positions_can_be_sought() -> None:
    texts = [stream(1000)]
    make = BlockBatches(texts, 16, batch_tokens=64, seed=1)
    again = BlockBatches(texts, 16, batch_tokens=64, seed=1)
    other = BlockBatches(texts, 16, batch_tokens=64, seed=2)
    rows = {}
    position = DataPosition()
    for _ in range(3 * make.batches_in(0)):
        batch = make.at(position)
        assert batch.target is not None
        assert batch.target.values.equal(again.at(position).target.values)  # type: ignore[union-attr]
        rows[position] = batch.target.values[:, 0].tolist()
        position = make.after(position)
    assert position.epoch >= 2
    firsts = [sorted(one for place, row in rows.items() if place.epoch == epoch for one in row) for epoch in (0, 1)]
    assert firsts[0] != firsts[1]  # the cuts are elsewhere
    assert rows[DataPosition(1, 2)] != other.at(DataPosition(1, 2)).target.values[:, 0].tolist()  # type: ignore[union-attr]
    with pytest.raises(IndexError):
        make.at(DataPosition(0, make.batches_in(0)))


def test_weights_set_how_often_a_file_occurs() -> None:
    texts = [stream(320, corpus=0), stream(320, corpus=1)]
    passages = BlockBatches(texts, 8, batch_tokens=64, seed=1, weights=[2.0, 1.0])
    count = len(everything([passages.at(DataPosition(0, index)) for index in range(passages.batches_in(0))]))
    assert count == 3 * 321


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number} of a book, not the last one\n" for number in range(400)))
    return path


def stored(path: Path, form: str, filters: Filters | None = None) -> tuple[Store, Tokenizer]:
    corpus = Corpus(path=str(path), format=form)  # type: ignore[arg-type]
    tokenizer = Tokenizer.train((example.target or "" for example in read_corpus(corpus)), "chars", 100)
    keep = filters or Filters(0, 2**31 - 1)
    return build_store([corpus], tokenizer, tokenizer, keep, "error", path.parent / "cache"), tokenizer


def test_file_is_one_stream_and_its_end_is_held_out(book: Path) -> None:
    store, tokenizer = stored(book, "running")
    assert store.sourceless
    (whole,) = token_streams(store, np.arange(len(store)))
    ids = whole.ids(0, len(whole))
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert tokenizer.decode(ids[1:-1].tolist()) + "\n" == book.read_text()
    rows, held = hold_out_end(store, None)
    assert rows.tolist() == list(range(len(rows)))
    assert held.tolist() == list(range(len(rows), len(store)))
    share = store.lengths[held, 1].sum() / store.lengths[:, 1].sum()
    assert 0.02 < share <= 0.1
    (first,), (second,) = token_streams(store, rows), token_streams(store, held)
    assert not first.has_eos
    assert second.has_eos
    assert len(first.content) + len(second.content) == len(whole.content)
    with pytest.raises(InputError, match="hold out"):
        hold_out_end(store, int(store.lengths.sum()))


def test_text_lines_have_no_source_and_blank_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("anna\n\nbert\n  \nanna\ncarla\n")
    store, _ = stored(path, "lines", Filters(1, 5))
    assert len(store) == 4
    assert store.describe()[0] == "4 of 6 lines kept"
    assert store.report.dropped == {"empty": 2}
    batch = gather(store, [0, 1])
    assert batch.source is None
    assert batch.size == 2
    train, dev = split(len(store), 1, 1, store.groups())
    texts = [{store.text("target", int(row)) for row in rows} for rows in (train, dev)]
    assert not texts[0] & texts[1]  # an equal line is never on both sides


def test_last_column_is_the_text(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"target": "one", "source": "x"}\n{"target": "two\\nthree"}\n')
    assert [one.target for one in read_corpus(Corpus(path=str(path), format="lines"))] == ["one", "two\nthree"]
    (block,) = read_corpus(Corpus(path=str(path), format="running"))
    assert (block.source, block.target) == ("", "one\ntwo\nthree")


def test_every_corpus_inherits_the_format() -> None:
    data = parse({"data": {"train": ["a.txt", {"path": "b.txt", "weight": 2}], "format": "text", "block_size": 9}}).data
    assert [corpus.format for corpus in data.train] == ["running", "running"]
    assert data.held_out("c.txt")[0].format == "running"
    assert parse({"data": {"train": "a.txt", "format": "text"}}).data.train[0].format == "lines"
    with pytest.raises(InputError, match=r"data\.format: text"):
        parse({"data": {"block_size": 9}})
    with pytest.raises(InputError, match="no source"):
        parse({"data": {"format": "text", "train": "a.en,a.de"}})
