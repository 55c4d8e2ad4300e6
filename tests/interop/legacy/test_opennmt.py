"""OpenNMT-py checkpoints: logits equal to torch.nn layers or to the equations."""

from __future__ import annotations

import sys
import types
from collections import Counter

import pytest
import torch
from legacy_fixtures import (
    DECODER_IDS,
    WORDS,
    Reference,
    compare,
    numbers,
    randomised,
    read,
    save_opennmt,
)
from legacy_recurrent_fixtures import Translator, save_opennmt_cells
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError
from transduce.interop.export import export
from transduce.recipe import parse


@pytest.mark.parametrize("biased", [False, True])
def test_transformer_equals_torch_layers(biased, tmp_path):
    """OpenNMT-py puts no </s> after a source; the native model has one, but does not attend to it."""
    reference = randomised(Reference(len(WORDS) + 4, len(WORDS) + 1, before=True, bias=True))
    if not biased:
        with torch.no_grad():
            for layer in (*reference.encoder, *reference.decoder):
                layer.self_attn.in_proj_bias.zero_()
                layer.self_attn.out_proj.bias.zero_()
    save_opennmt(tmp_path, reference, biased=biased)
    model = transduce.load(tmp_path / "model.pt", device="cpu")
    source, foreign = read(model)
    lengths = source.mask.sum(1, keepdim=True) - 1
    mask = torch.arange(source.mask.size(1)) < lengths
    with torch.no_grad():
        compare(model, source, reference(foreign[:, :-1], mask[:, :-1], numbers(model.target, DECODER_IDS)))
    assert model.generate(["", "w1"], max_length=5)  # an empty source has something to see


def torchtext_vocabulary(words: list[str], side: str, monkeypatch) -> object:
    """A vocabulary as OpenNMT-py 1 and 2 pickle it: a field with a field of torchtext, whose vocabulary lists words."""

    def thing(module: str, name: str, **attributes):
        made = type(name, (), {"__module__": module})
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name_of_part = ".".join(parts[:end])
            known = sys.modules.get(name_of_part) or types.ModuleType(name_of_part)
            monkeypatch.setitem(sys.modules, name_of_part, known)
        setattr(known, name, getattr(known, name, made))
        found = getattr(known, name)()
        found.__dict__.update(attributes)
        return found

    stoi = {word: number for number, word in enumerate(words)}
    vocabulary = thing("torchtext.vocab", "Vocab", freqs=Counter(words), itos=words, stoi=stoi, vectors=None)
    field = thing("torchtext.data.field", "Field", vocab=vocabulary, dtype=torch.int64)
    return thing("onmt.inputters.text_dataset", "TextMultiField", fields=[(side, field)])


def test_vocabulary_of_version_2_equals_that_of_version_3(tmp_path, monkeypatch):
    save_opennmt(tmp_path, randomised(Reference(len(WORDS) + 4, len(WORDS) + 1, before=True, bias=True)))
    three = transduce.load(tmp_path / "model.pt", device="cpu")
    content = torch.load(tmp_path / "model.pt", weights_only=False)
    for side in ("src", "tgt"):
        content["vocab"][side] = torchtext_vocabulary(content["vocab"][side], side, monkeypatch)
    torch.save(content, tmp_path / "model.pt")
    two = transduce.load(tmp_path / "model.pt", device="cpu")
    assert two.source.vocabulary == three.source.vocabulary
    assert two.target.vocabulary == three.target.vocabulary
    assert two.recipe == three.recipe


def test_imported_model_is_exported_to_ctranslate2(tmp_path):
    """On to CTranslate2, which its models were served with: it reads no </s> after a source either."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    reference = randomised(Reference(len(WORDS) + 4, len(WORDS) + 1, before=True, bias=True))
    save_opennmt(tmp_path, reference)
    model = transduce.load(tmp_path / "model.pt", device="cpu")
    texts = ["w1 w2 w3 w4", "w9", "w3 w3 w12 w0 a@@ b"]
    folder = export(tmp_path / "model.pt", tmp_path / "served", "ctranslate2")
    served = ctranslate2.Translator(str(folder)).translate_batch(
        [text.split() for text in texts], beam_size=1, max_decoding_length=8
    )
    mine = model.generate(texts, strategy="greedy", beam=1, max_length=8)
    assert [" ".join(one.hypotheses[0]) for one in served] == [one.text for one in mine]


@pytest.mark.parametrize(
    ("cell", "layers", "score", "both", "bridge"),
    [
        ("lstm", 2, "bilinear", True, False),
        ("gru", 2, "dot", True, False),
        ("lstm", 1, "bilinear", False, False),
        ("gru", 1, "mlp", False, False),
        ("lstm", 2, "mlp", True, True),
        ("gru", 3, "bilinear", True, True),
        ("lstm", 2, "dot", False, True),
    ],
)
def test_recurrent_model_equals_the_equations(cell, layers, score, both, bridge, tmp_path):
    reference = randomised(Translator(cell, layers, score, bridge=False, both=both, states_bridge=bridge))
    save_opennmt_cells(tmp_path, reference)
    model = transduce.load(tmp_path / "model.pt", device="cpu")
    source, foreign = read(model)
    mask = torch.arange(source.mask.size(1)) < source.mask.sum(1, keepdim=True) - 1
    with torch.no_grad():
        compare(model, source, reference(foreign[:, :-1], mask[:, :-1], numbers(model.target, DECODER_IDS)))


def test_converted_run_equals_loaded_checkpoint(tmp_path):
    """What was imported is a run like any other: written, searched, scored, explained."""
    save_opennmt_cells(tmp_path / "given", randomised(Translator("lstm", 2, "bilinear", bridge=False)))
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "given" / "model.pt"), str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    texts = ["w1 w2 w3", "w9", ""]
    direct, run = transduce.load(tmp_path / "given", device="cpu"), transduce.load(tmp_path / "run", device="cpu")
    assert direct.recipe == run.recipe
    answers = [one.text for one in run.generate(texts, max_length=8)]
    assert answers == [one.text for one in direct.generate(texts, max_length=8)]
    packed = transduce.load(tmp_path / "run", device="cpu", precision="fp32")
    assert [one.text for one in packed.generate(texts, max_length=8)] == answers
    assert len(run.score([("w1 w2", "w4 w5")])[0].tokens) == 3


def test_state_bridge_needs_matching_encoder_states():
    """A decoder that starts from all states needs an encoder that gives them, and the same layers."""
    for encoder, decoder in (
        ({"summary": "states"}, {}),
        ({}, {"bridge": "states"}),
        ({}, {"bridge": "relu"}),
        ({"summary": "states", "layers": 2}, {"bridge": "states"}),
        ({"summary": "states", "cell": "lstm"}, {"bridge": "states"}),
    ):
        model = {side: {"kind": "recurrent", **part} for side, part in (("encoder", encoder), ("decoder", decoder))}
        with pytest.raises(InputError, match="need each other"):
            transduce.recipe.build.complete_recipe(parse({"model": model}, "recipe"))
