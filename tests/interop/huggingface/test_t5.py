"""T5 compared with the transformers library."""

from __future__ import annotations

import shutil

import pytest
import torch
from family_cases import built
from huggingface_fixtures import (
    SEARCHES,
    TEXTS,
    change_config,
    check_decoding_restores_text,
    check_generation,
    check_logits_and_cross_attention,
    check_outputs_vary,
    check_round_trip,
    encode_sources_for_both,
    hf_ids,
    make,
)
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import transduce
from transduce.flow import Batch
from transduce.interop.huggingface import t5


@pytest.mark.parametrize("scaled", [False, True])
def test_separate_output_matrix_equals_transformers(scaled, tmp_path):
    """As T5 1.1 and FLAN-T5 are stored: embedding and output are two matrices."""
    library = make("t5", tmp_path, tie_word_embeddings=scaled, feed_forward_proj="gated-gelu")
    library.lm_head.weight = torch.nn.Parameter(torch.randn_like(library.lm_head.weight))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "lm_head.weight": library.lm_head.weight.detach()}, tmp_path / "model.safetensors")
    model = transduce.load(tmp_path, device="cpu")
    source, numbers, mask = encode_sources_for_both(model)
    decoder_ids = torch.tensor([[1, 5, 9, 7]] * len(TEXTS))
    read = torch.tensor([hf_ids(model, row) for row in decoder_ids.tolist()])
    rows = model.source.vocabulary.backend_ids
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n != 1])
    with torch.no_grad():
        answer = library(input_ids=numbers, attention_mask=mask, decoder_input_ids=read).logits
        found = model.network.advance(decoder_ids, model.network.start(Batch(source))).logits
    assert_close(found[..., known], answer[..., torch.tensor(rows)[known]], rtol=1e-4, atol=1e-4)


def test_mt5_of_version_4_divides_by_the_root_of_the_width_where_it_is_tied(tmp_path):
    """Version 5 of the library never divides; a file says which version wrote it."""
    case = built("mT5")
    shutil.copytree(case.folder, tmp_path / "old")
    change_config(tmp_path / "old", transformers_version="4.40.0")
    old = transduce.load(tmp_path / "old", device="cpu")
    source, _, _ = encode_sources_for_both(old)
    tokens = torch.tensor([[1, 5, 9, 7]] * len(TEXTS))
    with torch.no_grad():
        new, divided = (
            one.network.advance(tokens, one.network.start(Batch(source))).logits for one in (case.model, old)
        )
    plain = torch.arange(5, 20)
    assert_close(divided[..., plain], new[..., plain] / 16**0.5, rtol=1e-4, atol=1e-4)


def test_division_by_the_root_of_the_width_is_inverted_exactly():
    """The root of 24 is not exact in floating point."""
    change, back = t5.divide_by(24**0.5)
    divided = change(torch.randn(1000))[0]
    assert torch.equal(change(back([divided]))[0], divided)


VARIANTS = {
    "t5": {},
    "t5 unscaled": {"tie_word_embeddings": False},
    "flan": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5 gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_cross_attention_equal_transformers(name, tmp_path):
    check_logits_and_cross_attention("t5", tmp_path, **VARIANTS[name])


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["t5", "flan"])
def test_generation_equals_transformers_token_for_token(name, search, tmp_path):
    check_generation("t5", tmp_path, search, **VARIANTS[name])


def test_compared_outputs_have_different_lengths(tmp_path):
    check_outputs_vary("t5", tmp_path)


def test_import_export_import_gives_the_same_bits(tmp_path):
    check_round_trip("t5", tmp_path)


def test_decoding_restores_text(tmp_path):
    check_decoding_restores_text("t5", tmp_path)
