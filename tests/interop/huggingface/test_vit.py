"""Vision Transformer and DeiT compared with the transformers library."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from huggingface_fixtures import VIT_SIZES, make_vit, record
from PIL import Image as Pillow

import transduce
from transduce import interop
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.recipe import InitRecipe
from transduce.recipe.build import build_model, build_source_encoding
from transduce.transfer.init import load_pretrained, open_pretrained


def logits(recipe, tokenizers, network, names):
    source_encoding = build_source_encoding(recipe, tokenizers)
    batch = source_encoding.batch(source_encoding.encode(names))
    state = network.start(batch)
    return state.fixed["logits"][:, 0, len(SPECIALS) :], batch.source.values.permute(0, 3, 1, 2)


@pytest.fixture
def images(tmp_path):
    chance, names = np.random.default_rng(2), []
    for number in range(3):
        names.append(str(tmp_path / f"{number}.png"))
        Pillow.fromarray(chance.integers(0, 256, (16, 16, 3), np.uint8)).save(names[-1])
    return names


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_logits_equal_transformers(tmp_path, images, kind):
    hf_model = make_vit(tmp_path / "given", kind)
    imported = interop.read(tmp_path / "given")
    network = build_model(imported.recipe.model, imported.tokenizers[0].size, imported.tokenizers[1].size).eval()
    network.load_state_dict(imported.weights)
    with torch.no_grad():
        native, pixels = logits(imported.recipe, imported.tokenizers, network, images)
        expected = hf_model(pixels).logits
        architecture = f"{'ViT' if kind == 'vit' else 'DeiT'}ForImageClassification"
        record(architecture.replace("For", ", for ", 1), architecture, logits=native - expected)
        assert torch.allclose(native, expected, atol=1e-4)
    raw = np.asarray(Pillow.open(images[0]), np.float32) / 255
    expected = (raw - [0.4, 0.5, 0.6]) / [0.2, 0.25, 0.3]
    assert np.allclose(pixels[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_labels_equal_transformers(tmp_path, images):
    hf_model = make_vit(tmp_path / "given")
    model = transduce.load(tmp_path / "given")
    found = [one.text for one in model.generate(images)]
    raw = np.stack([np.asarray(Pillow.open(name), np.float32) / 255 for name in images])
    pixels = torch.from_numpy((raw - [0.4, 0.5, 0.6]) / [0.2, 0.25, 0.3]).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        best = hf_model(pixels).logits.argmax(-1).tolist()
    assert found == [VIT_SIZES["id2label"][number] for number in best]


def test_position_embeddings_are_interpolated_to_another_resolution(tmp_path):
    hf_model = make_vit(tmp_path / "given")
    interop.convert(tmp_path / "given", tmp_path / "run")
    origins = open_pretrained(InitRecipe(model=str(tmp_path / "run")))
    recipe = origins[0].recipe
    content = recipe.model_dump()
    content["data"]["sources"]["picture"]["size"] = 24
    content["model"]["encoder"]["front"]["shape"] = (24, 24, 3)
    larger = type(recipe).model_validate(content)
    tokenizers = origins[0].tokenizers
    network = build_model(larger.model, tokenizers[0].size, tokenizers[1].size).eval()
    transfer = load_pretrained(network, larger.model, tokenizers, origins)
    assert not transfer.new
    pixels = torch.randn(2, 3, 24, 24)
    from transduce.flow import Batch, Padded

    values = pixels.permute(0, 2, 3, 1)
    with torch.no_grad():
        state = network.start(Batch(Padded(values, torch.ones(2, 24, dtype=torch.bool))))
        native = state.fixed["logits"][:, 0, len(SPECIALS) :]
        assert torch.allclose(native, hf_model(pixels, interpolate_pos_encoding=True).logits, atol=1e-4)


@pytest.mark.parametrize("change", ["missing", "added", "labels"])
def test_unsupported_weights_are_refused(tmp_path, change):
    make_vit(tmp_path / "given")
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "given" / "model.safetensors")
    config = json.loads((tmp_path / "given" / "config.json").read_text())
    if change == "missing":
        del weights["vit.embeddings.cls_token"]
    elif change == "added":
        weights["vit.embeddings.more"] = torch.zeros(3)
    elif change == "labels":
        config["id2label"] = {"0": "cat", "1": "dog"}
    save_file(weights, tmp_path / "given" / "model.safetensors")
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        interop.read(tmp_path / "given")
