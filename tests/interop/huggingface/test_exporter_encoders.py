"""Exported encoders with heads in the transformers library: equal outputs, and the same bits after a round trip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from export_fixtures import TEXTS, transformer
from huggingface_fixtures import ENCODERS, make_encoder, make_vit, record
from PIL import Image as Pillow
from torch.testing import assert_close

import transduce
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import EOS, SPECIALS, Batch, Padded
from transduce.interop import read
from transduce.interop.export import export
from transduce.recipe import build, parse
from transduce.run import Run

library = pytest.importorskip("transformers")


SHAPES = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]


# DistilBERT is BERT without segments; only the layer before its labels tells them apart.
ARCHITECTURES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm": "Roberta",
    "camembert": "Roberta",
    "distilbert": "Bert",
    "electra": "Bert",
}
ROUND_TRIPS = [(family, shape) for family in ARCHITECTURES for shape in SHAPES]
ROUND_TRIPS.remove(("electra", "ForSequenceClassification"))  # gelu before its labels, where BERT has tanh


def check_same_bits(given, back) -> None:
    first, second = read(given), read(back)
    assert first.recipe.model == second.recipe.model
    assert first.tokenizers[1].vocabulary.pieces == second.tokenizers[1].vocabulary.pieces
    assert first.weights.keys() == second.weights.keys()
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name]), name


@pytest.mark.parametrize(("family", "shape"), ROUND_TRIPS)
def test_text_encoders_have_the_same_bits_after_export_and_import(family, shape, tmp_path):
    named = {"id2label": {0: "good", 1: "bad", 2: "odd"}} if "Classification" in shape else {}
    hf_model = make_encoder(family, tmp_path / "given", shape, **named)
    export(tmp_path / "given", tmp_path / "back", "huggingface")
    check_same_bits(tmp_path / "given", tmp_path / "back")
    architecture = f"{ARCHITECTURES[family]}{shape}"
    if family == "distilbert" and shape == "ForSequenceClassification":
        architecture = f"DistilBert{shape}"
    again, report = getattr(library, architecture).from_pretrained(
        tmp_path / "back", local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = [
        library.PreTrainedTokenizerFast.from_pretrained(tmp_path / place, local_files_only=True)
        for place in ("given", "back")
    ]
    assert tokens[0](TEXTS)["input_ids"] == tokens[1](TEXTS)["input_ids"]
    asked = {"input_ids": torch.tensor([tokens[1](TEXTS[0])["input_ids"]])}
    with torch.no_grad():
        assert_close(again.eval()(**asked)[0], hf_model(**asked)[0], rtol=1e-4, atol=1e-4)
    if "Classification" in shape:
        assert again.config.id2label == hf_model.config.id2label
    own = f"{ENCODERS[family]}{shape}"
    name = own.removesuffix("Model").replace("For", ", for ", 1)
    record(name, own, export=True if own == architecture else architecture)


BERT = {"norm": "post", "embedding_norm": True, "position": {"kind": "learned", "max_positions": 40}}


def labelled_run(folder, head):
    """A native run with labels; the rows of special tokens are random too."""
    recipe = {"encoder": transformer(**BERT), "head": head, "scale_embedding": False}
    side, kind = {"kind": "words", "size": 300}, "words" if head["kind"] == "tagger" else "labels"
    target = Tokenizer.train(["good", "bad", "odd"], kind, 300)
    tokens = {"source": side, "target": {"kind": kind, "size": 300}}
    content = {"data": {"max_length": 20}, "tokens": tokens, "model": recipe, "evaluation": {"metrics": ["accuracy"]}}
    completed, source = build.complete_recipe(parse(content)), Tokenizer.train(TEXTS, "words", 300)
    torch.manual_seed(3)
    network = build.build_model(completed.model, source.size, target.size, source.word_starts)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if kind == "words":  # a space is no label
            network.state_dict()["head.layers.1.bias"][len(SPECIALS) : len(SPECIALS) + 2] -= 100
    run = Run(folder)
    run.save_model(completed, (source, target), network.state_dict())
    return run


@pytest.mark.parametrize("head", ["classifier", "tagger"])
def test_labels_trained_here_are_exported(head, tmp_path):
    """Labels that we taught: rows of special tokens, which are never decoder_ids, stay at home."""
    options = {"classifier": {"pooling": "first"}, "tagger": {}}[head]
    run = labelled_run(tmp_path / "run", {"kind": head, **options})
    export(run.folder, tmp_path / "there", "huggingface")
    kind = {"classifier": "BertForSequenceClassification", "tagger": "BertForTokenClassification"}[head]
    there = getattr(library, kind).from_pretrained(tmp_path / "there", local_files_only=True).eval()
    model = transduce.load(run.folder, device="cpu")
    padded = Padded.from_rows([[*ids, EOS] for ids in model.source.encode_sources(TEXTS)])
    with torch.no_grad():
        memory = model.network.encoder(Batch(padded))
        expected = model.network.head(memory.values, memory.mask)[..., len(SPECIALS) :]
        found = there(input_ids=padded.values, attention_mask=padded.mask.long()).logits
    real = padded.mask if head == "tagger" else slice(None)
    assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    again = transduce.load(tmp_path / "there", device="cpu")
    assert [one.text for one in again.generate(TEXTS)] == [one.text for one in model.generate(TEXTS)]


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_image_classifiers_survive_a_round_trip(kind, tmp_path):
    hf_model = make_vit(tmp_path / "given", kind)
    export(tmp_path / "given", tmp_path / "back", "huggingface")
    check_same_bits(tmp_path / "given", tmp_path / "back")
    again, report = type(hf_model).from_pretrained(tmp_path / "back", local_files_only=True, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert again.config.id2label == hf_model.config.id2label
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert_close(again.eval()(pixels).logits, hf_model(pixels).logits, rtol=1e-4, atol=1e-4)
    picture = Pillow.fromarray(np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8))
    picture.save(tmp_path / "one.png")
    processor = library.AutoImageProcessor.from_pretrained(tmp_path / "back", local_files_only=True)
    model = transduce.load(tmp_path / "back", device="cpu")
    native = model.source_encoding.batch(model.source_encoding.encode([str(tmp_path / "one.png")])).source.values
    assert_close(processor(picture, return_tensors="pt").pixel_values.permute(0, 2, 3, 1), native, rtol=1e-4, atol=1e-4)


def test_unsupported_head_option_is_named(tmp_path):
    run = labelled_run(tmp_path / "run", {"kind": "classifier", "pooling": "mean"})
    with pytest.raises(InputError, match=r"head\.pooling: mean does not fit, first would"):
        export(run.folder, tmp_path / "there", "huggingface")
