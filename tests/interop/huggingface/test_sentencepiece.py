"""SentencePiece models of Marian and M2M100 folders, written here field by field."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from huggingface_fixtures import field, make, write_sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

import transduce
from transduce.errors import InputError
from transduce.flow import EOS, UNK
from transduce.interop import Languages, convert
from transduce.interop.huggingface.sentencepiece import read_model, to_tokenizer

SOURCE = {"▁": -3.0, "a": -2.0, "b": -2.5, "▁a": -2.2, "ab": -3.1, "▁ab": -3.6, "ba": -4.0, "aa": -3.9}


TARGET = {"▁": -2.0, "c": -1.0, "▁c": -1.5, "a": -4.0}


def best(text: str) -> set[tuple[str, ...]]:
    """The likeliest ways to cut a text into pieces, by trying all of them."""
    text = "▁" + "▁".join(text.split())
    cuts = []
    for places in itertools.product([False, True], repeat=len(text) - 1):
        parts, begin = [], 0
        for place, cut in enumerate((*places, True), 1):
            if cut:
                parts.append(text[begin:place])
                begin = place
        if all(part in SOURCE for part in parts):
            cuts.append((round(sum(SOURCE[part] for part in parts), 6), tuple(parts)))
    most = max(score for score, _ in cuts)
    return {parts for score, parts in cuts if score == most}


@given(st.text("ab ", min_size=1, max_size=9).filter(str.strip))
@settings(max_examples=60, deadline=None)
def test_unigram_pieces_are_the_most_likely_of_all_segmentations(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("pieces")
    write_sentencepiece(folder / "source.spm", SOURCE)
    backend, _ = to_tokenizer(read_model(folder, "source.spm"), {}, ())
    assert tuple(backend.encode(text).tokens) in best(text)


def merge(text: str) -> list[str]:
    """Two neighbours are made one as long as that gives a piece, the best piece first, of equals the leftmost."""
    parts = list("▁" + "▁".join(text.split()))
    while True:
        made = [(SOURCE[a + b], -place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in SOURCE]
        if not made:
            return parts
        place = -max(made)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@given(st.text("ab ", min_size=1, max_size=12).filter(str.strip))
@settings(max_examples=60, deadline=None)
def test_bpe_pieces_are_those_of_merging_by_score(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("pieces")
    write_sentencepiece(folder / "sentencepiece.bpe.model", SOURCE, kind=2)
    backend, _ = to_tokenizer(read_model(folder, "sentencepiece.bpe.model"), {}, ())
    assert backend.encode(text).tokens == merge(text)


@pytest.mark.parametrize("given_as", ["listed", "numbered"])
def test_language_codes_outside_the_vocabulary_get_their_ids(given_as, tmp_path):
    """A folder as M2M100's: one model, one list, and language codes that are in neither."""
    make("m2m", tmp_path / "given")
    (tmp_path / "given" / "tokenizer.json").unlink()
    write_sentencepiece(tmp_path / "given" / "sentencepiece.bpe.model", SOURCE, kind=2)
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *SOURCE]
    (tmp_path / "given" / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    codes = ["__en__", "__de__"]
    content = {"additional_special_tokens": codes}
    if given_as == "numbered":
        content = {"added_tokens_decoder": {str(12 + number): {"content": code} for number, code in enumerate(codes)}}
    (tmp_path / "given" / "tokenizer_config.json").write_text(json.dumps(content))
    model = transduce.load(convert(tmp_path / "given", tmp_path / "run", Languages("de", "en")).folder, device="cpu")
    (ids,) = model.source.encode_sources(["ab ba!"])
    assert [model.source.piece(number) for number in ids] == ["__de__", "▁ab", "▁", "ba", "<unk>"]
    assert [model.target.piece(number) for number in model.target.prefix] == ["__en__"]
    assert model.target.vocabulary.pieces.index("__de__") == 4 + 13 - 3  # their row 13; three of native stand before
    assert "__" not in model.generate(["ab ba"], max_length=6)[0].text
    (tmp_path / "given" / "tokenizer_config.json").write_text('{"additional_special_tokens": [{"name": 1}]}')
    with pytest.raises(InputError, match="language codes"):
        convert(tmp_path / "given", tmp_path / "other", Languages("de", "en"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as Marian's: one list of pieces, two models, </s> and <unk> first, <pad> last."""
    make("marian", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    write_sentencepiece(tmp_path / "source.spm", SOURCE)
    write_sentencepiece(tmp_path / "target.spm", TARGET)
    pieces = ["</s>", "<unk>", *dict.fromkeys([*SOURCE, *TARGET]), ">>de<<"]
    listed = {piece: number for number, piece in enumerate(pieces)} | {"<pad>": 23}
    (tmp_path / "vocab.json").write_text(json.dumps(listed))
    return tmp_path


def test_source_and_target_have_their_own_models(folder):
    model = transduce.load(folder, device="cpu")
    source = model.source.encode_source(">>de<< ab  a")
    assert source.pieces == [">>de<<", "▁ab", "▁a"]
    assert model.source.encode_batch(["cx a"])[0][:2] == [model.source.vocabulary.pieces.index("▁"), UNK]
    written = model.target.encode_batch(["c ca"])[0]
    assert model.target.decode([*written, EOS]) == "c ca"
    # A piece that only the other language can spell can still be written, and is read as what it says.
    foreign = model.target.vocabulary.pieces.index("▁ab")
    assert model.target.decode([foreign, *written]) == "ab c ca"
    assert "</s>" not in model.source.encode("</s>").pieces


def test_damaged_and_unsupported_models_are_refused(folder):
    content = (folder / "source.spm").read_bytes()
    for damaged in (content[:-3], b"\xff" * 40, b"", field(1, b"\x0b")):
        (folder / "source.spm").write_bytes(damaged)
        with pytest.raises(InputError):
            transduce.load(folder)
    write_sentencepiece(folder / "source.spm", SOURCE, kind=3)
    with pytest.raises(InputError, match="unigram"):
        transduce.load(folder)
    (folder / "source.spm").write_bytes(content)
    (folder / "target.spm").unlink()
    with pytest.raises(InputError, match=r"target\.spm"):
        transduce.load(folder)
