"""GPT-2 compared with the transformers library."""

from __future__ import annotations

import warnings

import pytest
import torch
from huggingface_fixtures import (
    ARCHITECTURES,
    check_decoding_restores_text,
    check_round_trip,
    hf_ids,
    make,
    record,
    search_name,
)
from torch.testing import assert_close

import transduce


def test_logits_and_continuation_equal_transformers(tmp_path):
    """A decoder-only model: the same logits after the start token, the same continuation of a prompt."""
    library = make("gpt2", tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    decoder_ids = torch.tensor([[1, 5, 9, 7], [1, 20, 11, 4]])
    rows = model.target.vocabulary.backend_ids
    read = torch.tensor([hf_ids(model, row) for row in decoder_ids.tolist()])
    with torch.no_grad():
        expected = library(input_ids=read).logits
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n != 1])
    found = model.logits(target=decoder_ids).log_softmax(-1)[..., known]
    record(*ARCHITECTURES["gpt2"], logits=found - expected.log_softmax(-1)[..., torch.tensor(rows)[known]])
    assert_close(found, expected.log_softmax(-1)[..., torch.tensor(rows)[known]], rtol=1e-4, atol=1e-4)
    prompt = [23, 4, 7]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = library.generate(input_ids=torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, 1:].tolist()
    out = out[: out.index(23) + 1] if 23 in out else out
    one = model.generate(["w4 w7"], max_length=10)[0]
    assert hf_ids(model, list(one.decoded.hypothesis.ids)) == out


@pytest.mark.parametrize("search", [{}, {"num_beams": 4}, {"num_beams": 3, "early_stopping": True}])
def test_continuations_of_several_lengths_equal_transformers(search, tmp_path):
    """One prompt at a time, because the library pads a batch on the left."""
    library = make("gpt2", tmp_path, generation=search)
    with torch.no_grad():
        library.transformer.wte.weight[23] *= 2  # some end by themselves
    library.save_pretrained(tmp_path)
    model = transduce.load(tmp_path, device="cpu")
    for text in ("w4 w7", "w1", "w9 w9 w2 w5 w11", "w19 w3"):
        prompt = [23, *(int(word[1:]) for word in text.split())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = library.generate(input_ids=torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, 1:].tolist()
        out = out[: out.index(23) + 1] if 23 in out else out
        found = model.generate([text], max_length=10)[0]
        ids = hf_ids(model, list(found.decoded.hypothesis.ids))
        record(*ARCHITECTURES["gpt2"], searches={search_name(search): ([ids], [out])})
        assert ids == out, text


def test_import_export_import_gives_the_same_bits(tmp_path):
    check_round_trip("gpt2", tmp_path)


def test_decoding_restores_text(tmp_path):
    check_decoding_restores_text("gpt2", tmp_path)
