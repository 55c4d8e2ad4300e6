"""Marian, BART, mBART, Pegasus and FSMT compared with the transformers library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_cases import FSMT_SIZES, Built, logit_difference
from huggingface_fixtures import (
    SEARCHES,
    check_decoding_restores_text,
    check_generation,
    check_logits_and_cross_attention,
    check_outputs_vary,
    check_round_trip,
    shake,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file

import transduce

VARIANTS = {
    "marian": ("marian", {}),
    "marian relu": ("marian", {"activation_function": "relu", "scale_embedding": False, "encoder_layers": 3}),
    "bart": ("bart", {}),
    "bart scaled": ("bart", {"scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("mbart", {}),
    "pegasus": ("pegasus", {}),
}
FAMILIES = ["marian", "bart", "mbart", "pegasus"]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_cross_attention_equal_transformers(name, tmp_path):
    family, changes = VARIANTS[name]
    check_logits_and_cross_attention(family, tmp_path, **changes)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_transformers_token_for_token(family, search, tmp_path):
    check_generation(family, tmp_path, search)


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_compared_outputs_have_different_lengths(family, tmp_path):
    check_outputs_vary(family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_export_import_gives_the_same_bits(family, tmp_path):
    check_round_trip(family, tmp_path)


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_decoding_restores_text(family, tmp_path):
    check_decoding_restores_text(family, tmp_path)


def test_fsmt_file_without_position_tables_has_sinusoids(tmp_path):
    """As the published files; version 5 of the library writes the tables."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(3)
    made = shake(library.FSMTForConditionalGeneration(library.FSMTConfig(**FSMT_SIZES)))
    for side in (made.model.encoder, made.model.decoder):
        table = side.embed_positions
        table.make_weight(*table.weight.shape, table.padding_idx)
    made.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "fsmt")
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "embed_positions" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    model = transduce.load(tmp_path, device="cpu")
    assert model.recipe.model.encoder["position"]["kind"] == "sinusoidal"
    assert logit_difference(Built(tmp_path, made, model)) < 1e-4


def write_two_vocabularies(folder: Path, letters: tuple[str, str]) -> None:
    """Files of FSMTTokenizer: every word is one letter, and a side has its own letters in its own order."""
    for name, side in zip(("vocab-src.json", "vocab-tgt.json"), letters, strict=True):
        pieces = ["<s>", "<pad>", "</s>", "<unk>", *(f"{letter}</w>" for letter in side)]
        (folder / name).write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "FSMTTokenizer"}))


@pytest.mark.parametrize("letters", [("abcdefghijklmnop", "zyxwbca"), ("abcdefg", "gfedzyx")])
def test_fsmt_with_a_vocabulary_for_each_side_equals_transformers(letters, tmp_path):
    """As the Russian models of WMT19 have them: other sizes, or equal sizes and other pieces."""
    library = pytest.importorskip("transformers")
    sizes = {"src_vocab_size": len(letters[0]) + 4, "tgt_vocab_size": len(letters[1]) + 4}
    torch.manual_seed(5)
    made = shake(library.FSMTForConditionalGeneration(library.FSMTConfig(**{**FSMT_SIZES, **sizes})))
    made.set_attn_implementation("eager")
    made.save_pretrained(tmp_path)
    write_two_vocabularies(tmp_path, letters)
    model = transduce.load(tmp_path, device="cpu")
    assert not model.recipe.tokens.shared
    texts = ["a b c", "g", "d d q e f", "a g c b"]  # one word is in no vocabulary
    numbers = [[4 + letters[0].index(word) if word in letters[0] else 3 for word in text.split()] for text in texts]
    longest = max(map(len, numbers))
    given = torch.tensor([[*row, 2, *[1] * (longest - len(row))] for row in numbers])
    with torch.no_grad():
        rows = made.generate(
            input_ids=given, attention_mask=(given != 1).long(), max_new_tokens=9, num_beams=1, bad_words_ids=[[1]]
        )
    # An unknown piece has no text.
    expected = [[letters[1][number - 4] for number in row if number > 3] for row in rows[:, 1:].tolist()]
    found = model.generate(texts, strategy="greedy", beam=1, max_length=9)
    assert [one.text.split() for one in found] == expected
    assert len(set(map(tuple, expected))) > 1
    pairs = [(text, " ".join(letters[1][:3])) for text in texts]
    decoder_ids = torch.tensor([[2, 4, 5, 6]] * len(texts))
    with torch.no_grad():
        answer = made(
            input_ids=given, attention_mask=(given != 1).long(), decoder_input_ids=decoder_ids, use_cache=False
        ).logits.log_softmax(-1)
    wanted = answer.gather(-1, torch.tensor([[[4], [5], [6], [2]]] * len(texts))).sum((1, 2))
    scored = torch.tensor([one.score for one in model.score(pairs)])
    assert (scored - wanted).abs().max() < 1e-4
