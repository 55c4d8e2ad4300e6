"""BERT, RoBERTa and DistilBERT compared with the transformers library, with and without heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from huggingface_fixtures import (
    ENCODERS,
    FRAMES,
    MASK,
    PIECES,
    TEXTS,
    WORDS,
    change_config,
    check_round_trip,
    encode_sources_for_both,
    hf_ids,
    hf_source_ids,
    hidden_states,
    make,
    make_encoder,
    record,
)
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import transduce
from transduce.errors import InputError
from transduce.flow import EOS, UNK, Batch, Padded

FAMILIES = list(ENCODERS)


def rename(folder, change) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_transformers(family, tmp_path):
    library = make_encoder(family, tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    source, numbers, mask = encode_sources_for_both(model)
    assert numbers[0, : int(mask[0].sum())].tolist() == hf_source_ids(tmp_path, TEXTS[0])
    with torch.no_grad():
        found = model.network.encoder(Batch(source)).values
    expected = hidden_states(library, numbers, mask)
    record(ENCODERS[family], f"{ENCODERS[family]}Model", logits=found[source.mask] - expected[source.mask])
    assert_close(found[source.mask], expected[source.mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("albert", {"num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 1, "hidden_act": "relu"}),
        ("albert", {"embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 3}),
        ("electra", {"embedding_size": 10, "hidden_act": "silu"}),
        ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
        ("mpnet", {"hidden_act": "relu"}),
        ("deberta", {"pos_att_type": "c2p", "position_biased_input": True, "type_vocab_size": 2}),
        ("deberta", {"pos_att_type": ["p2c"], "share_att_key": False, "norm_rel_ebd": "none"}),
        ("deberta", {"share_att_key": False, "position_buckets": -1, "max_relative_positions": 5}),
        ("modernbert", {"global_attn_every_n_layers": 2, "local_attention": 2, "mlp_bias": True, "norm_eps": 0.1}),
        ("modernbert", {"num_hidden_layers": 3, "global_attn_every_n_layers": 1, "classifier_activation": "relu"}),
        ("modernbert", {"norm_bias": True, "attention_bias": True, "classifier_bias": True, "decoder_bias": False}),
    ],
)
def test_unusual_settings_equal_transformers(family, changes, tmp_path):
    """Logits of every row of a masked language model, whose hidden layer may have an activation of its own."""
    library = make_encoder(family, tmp_path, "ForMaskedLM", **changes)
    model = transduce.load(tmp_path, device="cpu")
    source, found, expected = head_logits(library, model)
    rows = list(model.source.vocabulary.backend_ids)
    known = [number for number, row in enumerate(rows) if row >= 0]
    theirs = expected[source.mask][:, [rows[number] for number in known]]
    assert_close(found[source.mask][:, known], theirs, rtol=1e-4, atol=1e-4)


def test_mean_of_hidden_states_is_the_embedding_of_a_text(tmp_path):
    """Hidden states in a padded batch equal to 1e-5, and their mean as the embedding of a text."""
    library = make("bert", tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    source, numbers, mask = encode_sources_for_both(model)
    assert numbers[0].tolist() == hf_source_ids(tmp_path, TEXTS[0]) + [0] * (numbers.size(1) - 9)
    with torch.no_grad():
        expected = library(input_ids=numbers, attention_mask=mask).last_hidden_state
        found = model.network.encoder(Batch(source)).values
    real = source.mask
    assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
    means = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    np.testing.assert_allclose(model.embed(TEXTS), means.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("old", ["prefix", "norms"])
def test_weight_names_of_older_files_are_understood(old, tmp_path):
    """Files with or without the prefix, and with norms of gamma and beta, are the same model."""
    make_encoder("bert", tmp_path)
    before = transduce.load(tmp_path, device="cpu").network.state_dict()
    spell = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def change(name: str) -> str:
        if old == "prefix":
            return f"bert.{name}"
        return next((name.replace(new, older) for new, older in spell.items() if name.endswith(new)), name)

    rename(tmp_path, change)
    after = transduce.load(tmp_path, device="cpu").network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_lm_logits_and_best_token_equal_transformers(family, tmp_path):
    """The logits of every row, and the token that is likeliest where a mask stands."""
    library = make_encoder(family, tmp_path, "ForMaskedLM")
    model = transduce.load(tmp_path, device="cpu")
    text = "w1 w2 <mask> w4 nothing w5"
    rows = [[*ids, EOS] for ids in model.source.encode_sources([text, "w3"], masked=True)]
    source = Padded.from_rows(rows)
    numbers = torch.tensor([hf_ids(model, row) for row in source.values.tolist()])
    hidden_token = MASK.get(family, MASK["roberta"])
    assert numbers[0].tolist() == hf_source_ids(tmp_path, text.replace("<mask>", hidden_token))
    assert source.values[0].tolist().count(UNK) == 1  # a word without a piece is not taken for a mask
    with torch.no_grad():
        expected = library(input_ids=numbers, attention_mask=source.mask.long()).logits
        memory = model.network.encoder(Batch(source))
        found = model.network.head(memory.values, memory.mask)
    pairs = [(native, number) for native, number in enumerate(model.source.vocabulary.backend_ids) if number >= 0]
    known, their = (torch.tensor(side) for side in zip(*pairs, strict=True))
    keep_head(family, "ForMaskedLM", found[source.mask][:, known] - expected[source.mask][:, their])
    assert_close(found[source.mask][:, known], expected[source.mask][:, their], rtol=1e-4, atol=1e-4)
    place, words = rows[0].index(UNK), known[known > UNK]
    best = int(words[found[0, place, words].argmax()])
    assert model.generate([text], max_length=20)[0].decoded.hypothesis.ids[place] == best


LABELS = {"id2label": {0: "good", 1: "bad", 2: "neither way"}, "label2id": {"good": 0, "bad": 1, "neither way": 2}}


TAGS = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "label2id": {"O": 0, "B-PER": 1, "I-PER": 2}}


def keep_head(family: str, head: str, difference: torch.Tensor) -> None:
    name = f"{ENCODERS[family]}{head}"
    record(name.replace("For", ", for ", 1), name, logits=difference)


def head_logits(library, model):
    """The source, and the logits of the head of both implementations."""
    source, numbers, mask = encode_sources_for_both(model)
    with torch.no_grad():
        expected = library(input_ids=numbers, attention_mask=mask).logits
        memory = model.network.encoder(Batch(source))
        found = model.network.head(memory.values, memory.mask)
    return source, found, expected


@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_classifier_equals_transformers(family, tmp_path):
    library = make_encoder(family, tmp_path, "ForSequenceClassification", **LABELS)
    model = transduce.load(tmp_path, device="cpu")
    _, found, expected = head_logits(library, model)
    keep_head(family, "ForSequenceClassification", found[:, 4:] - expected)
    assert_close(found[:, 4:], expected, rtol=1e-4, atol=1e-4)
    names = [LABELS["id2label"][int(number)] for number in expected.argmax(-1)]
    assert [one.text for one in model.generate(TEXTS)] == names


@pytest.mark.parametrize("family", FAMILIES)
def test_token_classifier_equals_transformers(family, tmp_path):
    library = make_encoder(family, tmp_path, "ForTokenClassification", **TAGS)
    model = transduce.load(tmp_path, device="cpu")
    source, found, expected = head_logits(library, model)
    keep_head(family, "ForTokenClassification", found[source.mask][:, 4:] - expected[source.mask])
    assert_close(found[source.mask][:, 4:], expected[source.mask], rtol=1e-4, atol=1e-4)
    labels = [TAGS["id2label"][int(number)] for number in expected[0, 1:-1].argmax(-1)][: len(TEXTS[0].split())]
    assert model.generate(TEXTS[:1])[0].text.split() == labels


def subword_model(kind, pieces):
    """Byte-level BPE without a space before the text, WordPiece with [UNK] words, or SentencePiece."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    if kind == "bytes":
        numbers = {piece: number for number, piece in enumerate((*pieces, "a", "b", "c", "z", "Ġ", "Ġa", "Ġb"))}
        backend = Tokenizer(models.BPE(numbers, [("Ġ", "a"), ("Ġ", "b")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "wordpiece":
        numbers = {piece: number for number, piece in enumerate((*pieces, "a", "b", "c", "##a", "##b", "##c"))}
        unknown = next(piece for piece in pieces if "unk" in piece.lower())
        backend = Tokenizer(models.WordPiece(numbers, unk_token=unknown))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    else:
        scores = [(piece, -1.0) for piece in (*pieces, "▁", "▁a", "a", "b", "c")]
        unknown = next(number for number, piece in enumerate(pieces) if "unk" in piece.lower())
        backend = Tokenizer(models.Unigram(scores, unknown, False))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return backend


LINES = ["a", "b ca", "cab  a b", " a b ", "aa bb cc ab ba", "a\u3000b c", "zz a zz", "z", "a'b c", "b .a.a. ' c"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_word_gets_the_label_of_its_first_piece(family, tmp_path):
    """Known or not, and whatever spaces are around it."""
    from tokenizers import processors

    library = make_encoder(family, tmp_path, "ForTokenClassification", **TAGS)
    frame = family if family in MASK else "roberta"
    special, (start, _, end) = PIECES[frame][:4], FRAMES[frame].split()
    for kind in ("bytes", "wordpiece", "sentencepiece"):
        backend = subword_model(kind, special)
        backend.add_special_tokens(special)
        ends = [(one, special.index(one)) for one in (start, end)]
        backend.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=ends)
        backend.save(str(tmp_path / "tokenizer.json"))
        model = transduce.load(tmp_path, device="cpu")
        for line, found in zip(LINES, model.generate(LINES), strict=True):
            words = [hf_ids(model, model.source.encode(word).ids) for word in line.split()]
            ids = torch.tensor(
                [[special.index(start), *(number for word in words for number in word), special.index(end)]]
            )
            places = [1 + sum(map(len, words[:number])) for number in range(len(words))]
            with torch.no_grad():
                best = library(input_ids=ids).logits[0, places].argmax(-1)
            assert found.text.split() == [TAGS["id2label"][int(number)] for number in best], (kind, line)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_and_unexpected_weights_are_refused(family, tmp_path):
    make_encoder(family, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    layer = next(name for name in weights if ".1." in name and name.endswith("weight"))
    save_file({name: tensor for name, tensor in weights.items() if name != layer}, path)
    with pytest.raises(InputError, match="are missing"):
        transduce.load(tmp_path)
    save_file({**weights, layer.replace(".1.", ".7."): weights[layer].clone()}, path)
    with pytest.raises(InputError, match="would be dropped"):
        transduce.load(tmp_path)


def test_masked_lm_restores_text_without_masks(tmp_path):
    make_encoder("roberta", tmp_path, "ForMaskedLM")
    model = transduce.load(tmp_path, device="cpu")
    line = " ".join(WORDS[:5])
    assert model.generate([line])[0].text == line


def test_space_after_a_mask_belongs_to_the_next_word(tmp_path):
    """Pieces of bytes, as RoBERTa has them: a word in the middle of a text begins with its space."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    make_encoder("roberta", tmp_path, "ForMaskedLM")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "\u0120", "\u0120a", "\u0120b"]
    merges = [("\u0120", "a"), ("\u0120", "b")]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    model = transduce.load(tmp_path, device="cpu")
    for text in ("a <mask> b", "<mask> a", "b a <mask>", "a<mask>b a"):
        (ids,) = model.source.encode_sources([text], masked=True)
        assert hf_ids(model, [*ids, EOS]) == backend.encode(text).ids


def test_import_export_import_gives_the_same_bits(tmp_path):
    check_round_trip("bert", tmp_path)


def test_config_without_architectures_is_the_encoder_of_its_model_type(tmp_path):
    make_encoder("deberta", tmp_path)
    before = transduce.load(tmp_path, device="cpu").network.state_dict()
    change_config(tmp_path, architectures=None)
    after = transduce.load(tmp_path, device="cpu").network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
