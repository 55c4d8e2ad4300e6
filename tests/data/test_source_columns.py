"""Sources of several columns: files, tokens and batches; loss masks."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers as library
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.readers.corpus import fingerprint, read_corpus
from transduce.data.store import Filters, build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN, Vocabulary
from transduce.errors import InputError
from transduce.flow import BOS, EOS, SPECIALS, UNK, Batch, Padded
from transduce.objectives import CrossEntropy
from transduce.recipe import Corpus, parse
from transduce.recipe.build import build_source_encoding

TEXTS = ["a man sleeps", "he is awake", "the dog barks at a man"] * 10
TOKENIZERS = {kind: Tokenizer.train(TEXTS, kind, 300) for kind in ("chars", "words", "bytes", "bpe", "unigram")}
PART = st.text(st.characters(exclude_characters="\t\n\r\0", exclude_categories=["Cs"]), max_size=12)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(parts=st.lists(PART | st.sampled_from(TEXTS), min_size=1, max_size=4))
def test_tab_becomes_eos(kind: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[kind], "\t".join(parts)
    found = tokenizer.encode_source(text)
    apart = [tokenizer.encode(part).ids for part in parts]
    assert found.ids == [token for ids in apart for token in (EOS, *ids)][1:]
    assert tokenizer.encode_sources([text, "x"])[0] == found.ids
    assert len(found.ids) == len(found.pieces) == len(found.offsets)
    for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
        assert (token == EOS) == (text[begin:end] == "\t")
    if len(parts) == 1:
        assert found == tokenizer.encode(text)


def given_tokenizer(pre_tokenizer) -> Tokenizer:
    """An imported vocabulary: a, b and a tab, split by this rule of the library."""
    pieces = ["[UNK]", "[SEP]", "a", "b", "\t", "\u0109"]  # the last is a tab among byte-level pieces
    backend = library.Tokenizer(library.models.BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizer
    ids = (-1, -1, 1, 0, *range(2, len(pieces)))
    return Tokenizer(Vocabulary(GIVEN, (*SPECIALS, *pieces[2:]), backend_json=backend.to_str(), backend_ids=ids))


@pytest.mark.parametrize("pre_tokenizer", ["WhitespaceSplit", "BertPreTokenizer", "ByteLevel", "Metaspace"])
def test_tab_is_text_for_imported_models_of_one_column(pre_tokenizer: str) -> None:
    """Their tokenizer alone decides what a tab is; only a source of several columns is separated at tabs."""
    tokenizer = given_tokenizer(getattr(library.pre_tokenizers, pre_tokenizer)())
    texts = ["a\tb", "\ta b", "b\t"]
    one = parse({"data": {"train": [{"path": "x.tsv"}]}}, "recipe")
    two = parse({"data": {"train": [{"path": "x.tsv", "source_columns": 2}]}}, "recipe")
    for recipe in (parse({}, "recipe"), one):
        encoding = build_source_encoding(recipe, (tokenizer, tokenizer))
        assert encoding.encode(texts) == [tokenizer.encode(text).ids for text in texts]
        assert EOS not in [token for row in encoding.encode(texts) for token in row]
        for text, row in zip(texts, encoding.encode(texts), strict=True):
            assert len(encoding.describe(text, row, None).tokens) == len(row) + 1
    assert [row.count(EOS) for row in build_source_encoding(two, (tokenizer, tokenizer)).encode(texts)] == [1] * 3


def test_store_reads_tabs_as_the_model_does(tmp_path) -> None:
    tokenizer, file = given_tokenizer(library.pre_tokenizers.WhitespaceSplit()), tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"source": "a\tb", "target": "b"}) + "\n")
    corpus = Corpus(path=str(file), columns=("source", "target"))
    store = build_store([corpus], tokenizer, tokenizer, Filters(), "error", tmp_path / "cache")
    assert store.ids(0)[0] == tokenizer.encode("a b").ids


def test_offsets_refer_to_the_complete_text() -> None:
    text = "a man sleeps\the is awake"
    found = TOKENIZERS["words"].encode_source(text)
    assert [text[begin:end] for begin, end in found.offsets] == ["a", "man", "sleeps", "\t", "he", "is", "awake"]
    assert found.pieces[3] == SPECIALS[EOS]


def test_bpe_dropout_keeps_parts_separate() -> None:
    tokenizer, text = TOKENIZERS["bpe"], "a man sleeps\the is awake"
    assert tokenizer.encode_with_dropout(text, 0.0, random.Random(1), parts=True) == tokenizer.encode_source(text).ids
    assert tokenizer.encode_with_dropout(text, 0.5, random.Random(1), parts=True).count(EOS) == 1


@pytest.mark.parametrize(
    ("kind", "text", "count"), [("words", "the <mask> barks", 3), ("chars", "do<mask> barks", 9), ("bpe", "<mask>", 1)]
)
def test_mask_is_one_token(kind: str, text: str, count: int) -> None:
    tokenizer = TOKENIZERS[kind]
    found = tokenizer.encode_source(text, masked=True)
    assert len(found.ids) == count
    assert found.ids.count(UNK) == 1
    assert tokenizer.encode_sources([text], masked=True) == [found.ids]
    place = found.ids.index(UNK)
    assert "<mask>" in text[slice(*found.offsets[place])]


def test_adjacent_masks() -> None:
    tokenizer = TOKENIZERS["words"]
    found = tokenizer.encode_sources(["the <mask> <mask> at a man"], masked=True)[0]
    assert found == [*tokenizer.encode("the").ids, UNK, UNK, *tokenizer.encode("at a man").ids]


def test_tsv_columns_and_json_fields(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("p\th\tyes\tmore\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"p": "p", "h": "h", "label": "yes", "x": "more"}) + "\n")
    (one,) = read_corpus(Corpus(path=str(tmp_path / "a.tsv"), source_columns=2))
    assert (one.source, one.target, one.extra) == ("p\th", "yes", {"column4": "more"})
    corpus = Corpus(path=str(tmp_path / "a.jsonl"), columns=("p", "h", "label"))
    (other,) = read_corpus(corpus)
    assert corpus.source_columns == 2
    assert (other.source, other.target, other.extra) == ("p\th", "yes", {"x": "more"})
    plain = Corpus(path=str(tmp_path / "a.tsv"))
    assert next(read_corpus(plain)).target == "h"
    assert fingerprint(plain) != fingerprint(Corpus(path=str(tmp_path / "a.tsv"), source_columns=2))


def test_parquet_fields(tmp_path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"p": ["p"], "h": ["h"], "label": ["yes"]}), tmp_path / "a.parquet")
    (one,) = read_corpus(Corpus(path=str(tmp_path / "a.parquet"), columns=("p", "h", "label")))
    assert (one.source, one.target) == ("p\th", "yes")


def test_missing_columns_are_reported(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("p\th\tyes\np\tno\n")
    with pytest.raises(InputError, match="expected three columns separated by a tab, found 2") as told:
        list(read_corpus(Corpus(path=str(tmp_path / "a.tsv"), source_columns=2)))
    assert "a.tsv:2" in str(told.value)
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="which fields are the 2 sources"):
        list(read_corpus(Corpus(path=str(tmp_path / "a.jsonl"), source_columns=2)))
    with pytest.raises(InputError, match="1 source columns and a target, but 3 columns"):
        parse({"data": {"train": {"path": "a.jsonl", "source_columns": 1, "columns": ["a", "b", "c"]}}})


def test_held_out_files_inherit_columns_of_the_training_data() -> None:
    data = parse(
        {"data": {"train": {"path": "a.tsv", "source_columns": 2}, "dev": "b.tsv", "test": {"path": "c.tsv"}}}
    ).data
    assert data.dev[0].source_columns == data.test[0].source_columns == data.held_out("d.tsv")[0].source_columns == 2
    own = parse(
        {"data": {"train": {"path": "a.tsv", "source_columns": 2}, "dev": {"path": "b.tsv", "source_columns": 3}}}
    ).data
    assert own.dev[0].source_columns == 3


def test_store_keeps_parts_separate(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("a man sleeps\the is awake\tno\n\the is\tno\n\t\tno\n")
    tokenizer = TOKENIZERS["words"]
    corpus = Corpus(path=str(tmp_path / "a.tsv"), source_columns=2)
    store = build_store([corpus], tokenizer, tokenizer, Filters(), "error", tmp_path / "cache")
    assert len(store) == 2  # a source of nothing but a tab is empty
    assert store.ids(0)[0].count(EOS) == 1
    assert store.ids(1)[0] == [EOS, *tokenizer.encode("he is").ids]


def asking() -> Batch:
    target = Padded.from_rows([[BOS, 5, 6, 7, EOS], [BOS, 8, EOS]])
    asked = Padded.from_rows([[0, 1, 0, 1, 0], [0, 1, 0]])
    return Batch(
        Padded.from_rows([[4, EOS]] * 2), target, rows=(0, 1), loss_mask=Padded(asked.values.bool(), asked.mask)
    )


def test_loss_mask_selects_the_labels() -> None:
    batch = asking()
    assert batch.labels.mask.tolist() == [[True, False, True, False], [True, False, False, False]]
    assert batch.decoder_inputs.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert (batch.tokens, batch.slots) == (12, 14)
    second = batch.select(torch.tensor([1]))
    assert second.loss_mask.values.tolist() == [[False, True, False]]
    assert second.labels.mask.tolist() == [[True, False]]
    assert CrossEntropy().count(batch) == 3
    assert batch.to("cpu").loss_mask is not None
