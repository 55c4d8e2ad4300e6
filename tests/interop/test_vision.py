"""Vision Transformers from elsewhere: their logits are ours, whatever the resolution, and so is how they read."""

import json

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

import transduce
from transduce import interop
from transduce.build import build_model, build_source_encoding
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.recipe import InitRecipe
from transduce.transfer.init import load_pretrained, open_pretrained

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.3,
    "id2label": {0: "cat", 1: "dog", 2: "a bird"},
}


def made(folder, kind: str = "vit", **changes):
    torch.manual_seed(7)
    config, model = {
        "vit": (ViTConfig, ViTForImageClassification),
        "deit": (DeiTConfig, DeiTForImageClassification),
    }[kind]
    theirs = model(config(**{**SIZES, **changes})).eval()
    with torch.no_grad():  # so that nothing is left out unseen
        for name, weight in theirs.named_parameters():
            if "token" in name or "position" in name:
                weight.normal_()
    theirs.save_pretrained(folder)
    told = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "resample": 2, "size": {"height": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(told))
    return theirs


def logits(recipe, tokenizers, network, names):
    source_encoding = build_source_encoding(recipe, tokenizers)
    batch = source_encoding.batch(source_encoding.encode(names))
    state = network.start(batch)
    return state.fixed["logits"][:, 0, len(SPECIALS) :], batch.source.values.permute(0, 3, 1, 2)


@pytest.fixture
def pictures(tmp_path):
    chance, names = np.random.default_rng(2), []
    for number in range(3):
        names.append(str(tmp_path / f"{number}.png"))
        Pillow.fromarray(chance.integers(0, 256, (16, 16, 3), np.uint8)).save(names[-1])
    return names


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_logits_equal_theirs(tmp_path, pictures, kind):
    theirs = made(tmp_path / "theirs", kind)
    imported = interop.read(tmp_path / "theirs")
    network = build_model(imported.recipe.model, imported.tokenizers[0].size, imported.tokenizers[1].size).eval()
    network.load_state_dict(imported.weights)
    with torch.no_grad():
        ours, pixels = logits(imported.recipe, imported.tokenizers, network, pictures)
        assert torch.allclose(ours, theirs(pixels).logits, atol=1e-4)
    raw = np.asarray(Pillow.open(pictures[0]), np.float32) / 255
    wanted = (raw - [0.4, 0.5, 0.6]) / [0.2, 0.25, 0.3]
    assert np.allclose(pixels[0].permute(1, 2, 0).numpy(), wanted, atol=1e-5)


def test_a_folder_of_theirs_opens_like_a_run(tmp_path, pictures):
    theirs = made(tmp_path / "theirs")
    model = transduce.load(tmp_path / "theirs")
    found = [one.text for one in model.generate(pictures)]
    raw = np.stack([np.asarray(Pillow.open(name), np.float32) / 255 for name in pictures])
    pixels = torch.from_numpy((raw - [0.4, 0.5, 0.6]) / [0.2, 0.25, 0.3]).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        best = theirs(pixels).logits.argmax(-1).tolist()
    assert found == [SIZES["id2label"][number] for number in best]


def test_weights_of_one_resolution_serve_another(tmp_path):
    theirs = made(tmp_path / "theirs")
    interop.convert(tmp_path / "theirs", tmp_path / "run")
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
        ours = state.fixed["logits"][:, 0, len(SPECIALS) :]
        assert torch.allclose(ours, theirs(pixels, interpolate_pos_encoding=True).logits, atol=1e-4)


@pytest.mark.parametrize("change", ["bias", "missing", "added", "labels"])
def test_what_does_not_fit_is_refused_by_name(tmp_path, change):
    made(tmp_path / "theirs", **({"qkv_bias": False} if change == "bias" else {}))
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    if change == "missing":
        del weights["vit.embeddings.cls_token"]
    elif change == "added":
        weights["vit.embeddings.more"] = torch.zeros(3)
    elif change == "labels":
        config["id2label"] = {"0": "cat", "1": "dog"}
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        interop.read(tmp_path / "theirs")
