"""Recurrent models of frozen toolkits: the same logits and weights as from the published equations."""

from __future__ import annotations

import pytest
import torch
from legacy_fixtures import SAID, compare, numbers, read, shaken
from legacy_recurrent_fixtures import Translator, save_fairseq_cells, save_joeynmt_cells, save_opennmt_cells
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError
from transduce.recipe import parse


@pytest.mark.parametrize(("cell", "layers", "score"), [("gru", 1, "mlp"), ("lstm", 2, "mlp"), ("gru", 2, "bilinear")])
def test_joeynmt(cell, layers, score, tmp_path):
    reference = shaken(Translator(cell, layers, score, bridge=True))
    save_joeynmt_cells(tmp_path, reference)
    model = transduce.load(tmp_path, device="cpu")
    source, theirs = read(model)
    with torch.no_grad():
        compare(model, source, reference(theirs, source.mask, numbers(model.target, SAID)))


@pytest.mark.parametrize(
    ("cell", "layers", "score", "both"),
    [("lstm", 2, "bilinear", True), ("gru", 2, "dot", True), ("lstm", 1, "bilinear", False)],
)
def test_opennmt(cell, layers, score, both, tmp_path):
    reference = shaken(Translator(cell, layers, score, bridge=False, both=both))
    save_opennmt_cells(tmp_path, reference)
    model = transduce.load(tmp_path / "model.pt", device="cpu")
    source, theirs = read(model)
    mask = torch.arange(source.mask.size(1)) < source.mask.sum(1, keepdim=True) - 1
    with torch.no_grad():
        compare(model, source, reference(theirs[:, :-1], mask[:, :-1], numbers(model.target, SAID)))


@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_fairseq(layers, both, tmp_path):
    reference = shaken(Translator("lstm", layers, "bilinear", bridge=False, both=both))
    save_fairseq_cells(tmp_path, reference)
    model = transduce.load(tmp_path, device="cpu")
    source, theirs = read(model)
    with torch.no_grad():
        compare(model, source, reference(theirs, source.mask, numbers(model.target, SAID)))


def test_converted_as_loaded(tmp_path):
    """What was imported is a run like any other: written, searched, scored, explained."""
    save_opennmt_cells(tmp_path / "given", shaken(Translator("lstm", 2, "bilinear", bridge=False)))
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


def test_states_need_each_other():
    """A decoder that starts from all states needs an encoder that gives them, and the same layers."""
    for encoder, decoder in (
        ({"summary": "states"}, {}),
        ({}, {"bridge": "states"}),
        ({"summary": "states", "layers": 2}, {"bridge": "states"}),
        ({"summary": "states", "cell": "lstm"}, {"bridge": "states"}),
    ):
        model = {side: {"kind": "recurrent", **part} for side, part in (("encoder", encoder), ("decoder", decoder))}
        with pytest.raises(InputError, match="need each other"):
            transduce.build.complete_recipe(parse({"model": model}, "recipe"))
