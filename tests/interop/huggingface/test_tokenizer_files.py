"""Tokenizer files other than tokenizer.json, compared with the tokenizers of the transformers library."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
from huggingface_fixtures import write_sentencepiece

from transduce.data.tokenizers.vocabulary import byte_letters
from transduce.errors import InputError
from transduce.interop.huggingface.tokenizer_files import read_characters, read_tokenizer_files

TEXTS = ["a ab", "Abc  ba", " the café 1,2 ", "", "zz 日本 ab,ab", "a<extra_id_1> b", "ÀB\u0301 don't"]
PIECES = {"▁": -3.0, "▁a": -1.0, "a": -2.0, "b": -2.0, "▁b": -2.5, "ab": -1.5, "c": -4.0, ",": -3.0}


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("transformers")


def model_ids(found, text):
    """Ids of the model, with the tokens around the text."""
    back = {theirs: ours for ours, theirs in found.ids.items()}
    ids = [back[number] for number in found.backend.encode(text, add_special_tokens=False).ids]
    begin, end = found.template[:-1], found.template[-1:]
    return [*begin, *ids, *end]


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False}])
def test_wordpiece_equals_transformers(library, tmp_path, settings):
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "a",
        "##b",
        "b",
        "A",
        "##a",
        "cafe",
        ",",
        "1",
        "日",
        "don",
        "'",
        "t",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    theirs = library.BertTokenizer.from_pretrained(tmp_path)
    (found,) = read_tokenizer_files(tmp_path, "bert")
    assert [model_ids(found, text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    assert found.unknown == 1


@pytest.mark.parametrize("kind", ["GPT2", "Roberta", "Bart", "Blenderbot"])
def test_byte_level_pieces_equal_transformers(library, tmp_path, kind):
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>", *byte_letters(), "Ġa", "ab", "Ġab", "<mask>"]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    (tmp_path / "vocab.json").write_text(json.dumps(numbers))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\na b\nĠa b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{kind}Tokenizer"}))
    theirs = getattr(library, f"{'Roberta' if kind == 'Bart' else kind}Tokenizer").from_pretrained(tmp_path)
    (found,) = read_tokenizer_files(tmp_path, kind.lower())
    end = [2] if kind == "Blenderbot" else []  # which version 5 of the library leaves out
    assert [model_ids(found, text) for text in TEXTS] == [[*theirs(text).input_ids, *end] for text in TEXTS]


def test_bytes_equal_transformers(library, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    theirs, (found,) = library.ByT5Tokenizer(), read_tokenizer_files(tmp_path, "t5")
    assert [model_ids(found, text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]


CONVERTERS = {"XLMRoberta": "XLMRobertaConverter", "Camembert": "CamembertConverter", "Pegasus": "PegasusConverter"}
CONVERTERS |= {"MBart": "MBartConverter", "MBart50": "MBart50Converter", "T5": "T5Converter"}


@pytest.mark.parametrize("kind", CONVERTERS)
def test_ids_of_sentencepiece_files_equal_transformers(library, tmp_path, kind):
    """The library itself needs the sentencepiece package to read the file, but not to number its pieces."""
    module = import_module("transformers.convert_slow_tokenizer")  # the package has a function of this name too
    own = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] if kind in ("T5", "Pegasus") else None
    write_sentencepiece(tmp_path / "spiece.model", PIECES, special=own)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{kind}Tokenizer"}))
    pieces = [*(own or [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]), *PIECES.items()]
    converter = getattr(module, CONVERTERS[kind])
    expected = [piece for piece, _ in converter.convert_from_spm(vocab=pieces)["vocab"]]
    if kind == "T5":
        expected += [
            f"<extra_id_{number}>" for number in reversed(range(100)) if f"<extra_id_{number}>" not in expected
        ]
    (found,) = read_tokenizer_files(tmp_path, "")
    assert [found.pieces[number] for number in range(len(found.pieces))] == expected
    around = {"XLMRoberta": 2, "Camembert": 2, "MBart": 2, "MBart50": 2}.get(kind, 1)
    assert len(found.template) == around
    assert model_ids(found, "a ab")[len(found.template) - 1 : -1] == [
        expected.index("▁a"),
        expected.index("▁a"),
        expected.index("b"),
    ]


@pytest.mark.parametrize(
    ("kind", "special", "template"),
    [("Albert", "<pad> <unk> [CLS] [SEP]", [2, 3]), ("DebertaV2", "[PAD] [CLS] [SEP] [UNK]", [1, 2])],
)
def test_pieces_that_keep_their_ids(tmp_path, kind, special, template):
    write_sentencepiece(tmp_path / "spm.model", PIECES, special=[(piece, 0.0) for piece in special.split()])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{kind}TokenizerFast"}))
    (found,) = read_tokenizer_files(tmp_path, "")
    assert found.template == template
    assert model_ids(found, "a ab")[1:-1] == [5, 5, 7]
    lower = kind == "Albert"
    assert (model_ids(found, "A") == model_ids(found, "a")) == lower


def test_missing_special_piece_is_refused(tmp_path):
    write_sentencepiece(tmp_path / "spm.model", PIECES)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "AlbertTokenizer"}')
    with pytest.raises(InputError, match="it has no"):
        read_tokenizer_files(tmp_path, "")


def test_unknown_layout_of_a_sentencepiece_file_is_refused(tmp_path):
    write_sentencepiece(tmp_path / "spiece.model", PIECES)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLNetTokenizer"}')
    with pytest.raises(InputError, match="class XLNet"):
        read_tokenizer_files(tmp_path, "")


def write_fsmt(folder, target=None):
    merges = ["t h 12", "th e</w> 9", "c a 5", "ca t</w> 3", "a n", "an d</w>"]
    pieces = ["t", "h", "e</w>", "th", "the</w>", "c", "a", "ca", "t</w>", "b", "d</w>", "n", "and</w>", "a</w>"]
    vocabulary = {piece: number for number, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (folder / "vocab-src.json").write_text(json.dumps(vocabulary))
    (folder / "vocab-tgt.json").write_text(json.dumps(target or vocabulary))
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    return vocabulary, [tuple(line.split()[:2]) for line in merges]


def test_fsmt_equals_transformers(library, tmp_path):
    """Merges as the library applies them, whether or not the vocabulary has their results (`an`, `cat`)."""
    vocabulary, merges = write_fsmt(tmp_path)
    theirs = object.__new__(library.FSMTTokenizer)
    theirs.bpe_ranks, theirs.cache = {pair: rank for rank, pair in enumerate(merges)}, {}
    (found,) = read_tokenizer_files(tmp_path, "fsmt")
    back = {theirs_: ours for ours, theirs_ in found.ids.items()}
    for text in ("the cat and a", "cat  ant thec", "zebra than", "b an and"):
        pieces = [piece for word in text.split() for piece in theirs.bpe(word).split(" ")]
        ids = [back.get(number, found.unknown) for number in found.backend.encode(text).ids]
        assert ids == [vocabulary.get(piece, 3) for piece in pieces], text
    assert found.backend.decode([vocabulary[piece] for piece in ("the</w>", "ca", "t</w>")]) == "the cat"


def test_fsmt_has_a_tokenizer_for_each_vocabulary(tmp_path):
    write_fsmt(tmp_path, target={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "ca": 4, "the</w>": 5})
    source, target = read_tokenizer_files(tmp_path, "fsmt")
    assert target.backend.encode("the").ids == [5]
    assert [target.pieces[5], source.pieces[5]] == ["the</w>", "h"]
    assert len(source.pieces) == 18
    assert len(target.pieces) == 6


@pytest.mark.parametrize("target", [{"<s>": 0}, {"<unk>": "3"}, {"<unk>": -1}])
def test_fsmt_with_a_damaged_vocabulary_is_refused(target, tmp_path):
    write_fsmt(tmp_path, target=target)
    with pytest.raises(InputError, match=r"<unk>|pieces with their ids"):
        read_tokenizer_files(tmp_path, "fsmt")


def write_characters(folder, **settings):
    pieces = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABDEN'", "SCH"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Wav2Vec2CTCTokenizer", **settings}))


def test_characters_equal_transformers(library, tmp_path):
    write_characters(tmp_path)
    theirs, found = library.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")), read_characters(tmp_path)
    for text in ("A BAND", "ABEND  'N", "", "SCHADE", "a?B"):
        ids = theirs(text).input_ids
        assert found.backend.encode(text).ids == ids, text
        assert found.backend.decode(ids) == theirs.decode(ids, group_tokens=False), text
    assert found.backend.decode([4, 5, 4, 4, 6, 4]) == theirs.decode([4, 5, 4, 0, 4, 6, 4]) == "A  B"


@pytest.mark.parametrize("settings", [{"do_lower_case": True}, {"tokenizer_class": "Wav2Vec2PhonemeCTCTokenizer"}])
def test_other_tokenizers_of_speech_are_refused(tmp_path, settings):
    write_characters(tmp_path, **settings)
    with pytest.raises(InputError, match="not supported"):
        read_characters(tmp_path)
    (tmp_path / "vocab.json").write_text('{"eng": {"a": 1}}')
    with pytest.raises(InputError, match="characters with their ids"):
        read_characters(tmp_path)
