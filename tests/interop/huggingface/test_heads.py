"""Labels and sentence-transformers folders: embeddings, pooling, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from huggingface_fixtures import (
    TEXTS,
    change_config,
    encode_sources_for_both,
    hidden_states,
    make_encoder,
    write_modules,
)

import transduce
from transduce.errors import InputError

POOLED = {
    "mean": lambda values, mask: (values * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
    "cls_token": lambda values, mask: values[:, 0],
    "max_tokens": lambda values, mask: values.masked_fill(mask[..., None] == 0, -torch.inf).amax(1),
}


CONFIGS = {
    "mean": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    "cls_token": {"pooling_mode_cls_token": True, "word_embedding_dimension": 16},
    "max_tokens": {"pooling_mode": "max"},
}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("way", POOLED)
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_pooled_embeddings_equal_hidden_states_pooled_by_hand(family, way, normalise, tmp_path):
    library = make_encoder(family, tmp_path)
    write_modules(tmp_path, CONFIGS[way], normalise=normalise)
    model = transduce.load(tmp_path, device="cpu")
    _, numbers, mask = encode_sources_for_both(model)
    expected = POOLED[way](hidden_states(library, numbers, mask), mask)
    expected = torch.nn.functional.normalize(expected, dim=-1) if normalise else expected
    np.testing.assert_allclose(model.embed(TEXTS), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_sentences_are_truncated_and_lowercased(tmp_path):
    """max_seq_length counts what stands around a text, which stays when the text is cut."""
    library = make_encoder("bert", tmp_path)
    write_modules(tmp_path, CONFIGS["mean"], normalise=False, max_seq_length=6, do_lower_case=True)
    model = transduce.load(tmp_path, device="cpu")
    numbers = torch.tensor([[2, *(4 + n for n in (1, 2, 3, 4)), 3]])
    expected = hidden_states(library, numbers, torch.ones_like(numbers)).mean(1)
    with pytest.warns(UserWarning, match="cut"):
        found = model.embed(["w1 w2 w3 w4 w5 w6 w7"])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(model.embed(["W1 w2"]), model.embed(["w1 w2"]))


def test_encoder_of_a_masked_lm_is_used_for_sentences(tmp_path):
    """The encoder is meant, though the settings name what it was trained with, and lies in a folder of its own."""
    library = make_encoder("bert", tmp_path / "0_Transformer", "ForMaskedLM")
    write_modules(tmp_path, CONFIGS["mean"])
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    model = transduce.load(tmp_path, device="cpu")
    _, numbers, mask = encode_sources_for_both(model)
    expected = torch.nn.functional.normalize(POOLED["mean"](hidden_states(library, numbers, mask), mask), dim=-1)
    np.testing.assert_allclose(model.embed(TEXTS), expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("modules.json", "[", "not a list of modules"),
        ("modules.json", '[{"path": "", "type": "a.Transformer"}]', "cannot be imported: Transformer"),
        (
            "modules.json",
            '[{"path": "", "type": "T.Transformer"}, {"path": "../1_Pooling", "type": "P.Pooling"}]',
            "is outside",
        ),
        ("1_Pooling/config.json", '{"pooling_mode_mean_sqrt_len_tokens": true}', "pooling mode"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}',
            "pooling mode",
        ),
        ("sentence_bert_config.json", '{"max_seq_length": "long"}', "no length"),
    ],
)
def test_unsupported_modules_and_pooling_are_refused(name, content, problem, tmp_path):
    make_encoder("bert", tmp_path)
    write_modules(tmp_path, CONFIGS["mean"])
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        transduce.load(tmp_path)
    assert problem in caught.value.problem


LABELS = {"id2label": {0: "good", 1: "bad", 2: "neither way"}, "label2id": {"good": 0, "bad": 1, "neither way": 2}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"problem_type": "multi_label_classification"}, "problem_type"),
        ({"id2label": {"0": "only"}}, "a single label"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label has no '1'"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "repeated"),
        ({"id2label": {"0": "a", "1": "b"}}, "config.json asks for"),
    ],
)
def test_unsupported_labels_are_refused(changes, problem, tmp_path):
    make_encoder("bert", tmp_path, "ForSequenceClassification", **LABELS)
    change_config(tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        transduce.load(tmp_path)
    assert problem in caught.value.problem


def test_labels_without_names_are_numbered(tmp_path):
    """The library writes no names where a classifier has the two that it would give itself."""
    make_encoder("bert", tmp_path, "ForSequenceClassification")
    assert "id2label" not in json.loads((tmp_path / "config.json").read_text())
    texts = [one.text for one in transduce.load(tmp_path, device="cpu").generate(["w1 w2", "w3"])]
    assert set(texts) <= {"LABEL_0", "LABEL_1"}
