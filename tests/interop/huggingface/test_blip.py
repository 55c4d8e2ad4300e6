"""BLIP captioner compared with the transformers library."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from huggingface_fixtures import change_config, record, shake, write_tokenizer
from PIL import Image as Pillow

import transduce
from transduce import interop
from transduce.errors import InputError
from transduce.flow import BOS, Batch, Padded

library = pytest.importorskip("transformers")
PAD, SEP, DEC = 0, 3, 24  # a caption starts with [DEC], which is no [CLS]
NAME, ARCHITECTURE = "BLIP captioner", "BlipForConditionalGeneration"
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
TEXT = {
    "vocab_size": 25, "hidden_size": 16, "encoder_hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 40, "bos_token_id": DEC, "sep_token_id": SEP,
    "pad_token_id": PAD, "eos_token_id": 2,
}  # fmt: skip
SETTINGS = [{}, {"layer_norm_eps": 0.1, "num_hidden_layers": 3}]


def make_blip(folder, **changes):
    torch.manual_seed(3)
    config = library.BlipConfig(text_config={**TEXT, **changes}, vision_config=VISION)
    model = shake(library.BlipForConditionalGeneration(config), size=0.2)
    with torch.no_grad():
        model.text_decoder.cls.predictions.bias[SEP] += 1.5  # some outputs end by themselves
    model.save_pretrained(folder)
    content = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    write_tokenizer(folder, "bert", ("[DEC]",))
    return model


@pytest.fixture
def images(tmp_path):
    chance, names = np.random.default_rng(2), []
    for number in range(4):
        names.append(str(tmp_path / f"{number}.png"))
        Pillow.fromarray(chance.integers(0, 256, (16, 16, 3), np.uint8)).save(names[-1])
    return names


def pixels(model, images):
    """B C Y X, as the model reads them; the preprocessing is that of ViT."""
    return model.source_encoding.batch(model.source_encoding.encode(images)).source.values.permute(0, 3, 1, 2)


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_logits_equal_transformers(tmp_path, images, number):
    reference = make_blip(tmp_path / "given", **SETTINGS[number])
    model = transduce.load(tmp_path / "given", device="cpu")
    native = {foreign: place for place, foreign in enumerate(model.target.vocabulary.backend_ids)}
    rows, given = torch.randint(4, 23, (4, 6)), pixels(model, images)
    tokens = torch.tensor([[BOS, *(native[token] for token in row)] for row in rows.tolist()])
    with torch.no_grad():
        read = torch.cat((torch.full((4, 1), DEC), rows), 1)
        expected = reference(given, read).logits
        source = Padded(given.permute(0, 2, 3, 1), torch.ones(4, 16, dtype=torch.bool))
        found = model.network.advance(tokens, model.network.start(Batch(source))).logits
    kept = [token for token in range(24) if token != PAD]
    difference = (found[..., [native[token] for token in kept]] - expected[..., kept]).abs().max()
    record(NAME, ARCHITECTURE, logits=float(difference))
    assert difference < 1e-4


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_outputs_equal_transformers(tmp_path, images, search):
    reference = make_blip(tmp_path / "given")
    model = transduce.load(tmp_path / "given", device="cpu")
    settings = {} if search == "greedy" else {"strategy": "huggingface_beam", "beam": 4, "stop": "length"}
    with torch.no_grad():
        beams = {"num_beams": 1 if search == "greedy" else 4, "do_sample": False}
        rows = reference.generate(pixels(model, images), **beams, max_length=13, suppress_tokens=[PAD, DEC])
    expected = [[token for token in row[1:] if token not in (PAD, SEP)] for row in rows.tolist()]
    found = model.generate(images, max_length=12, **settings)
    pieces = [[model.target.vocabulary.backend_ids[number] for number in _ids(model, one)] for one in found]
    record(NAME, ARCHITECTURE, searches={search: (pieces, expected)})
    assert pieces == expected
    assert len(set(map(tuple, expected))) > 1


def _ids(model, prediction):
    pieces = {model.target.piece(number): number for number in range(model.target.size)}
    return [pieces[piece] for piece in prediction.tokens if piece != "</s>"]


def test_targets_begin_with_the_start_token_alone(tmp_path):
    make_blip(tmp_path / "given")
    model = transduce.load(tmp_path / "given", device="cpu")
    assert model.target.prefix == ()  # [DEC] takes the place of [CLS]


def test_a_folder_without_its_sections_is_refused(tmp_path):
    make_blip(tmp_path / "given")
    change_config(tmp_path / "given", text_config=None)
    with pytest.raises(InputError, match="no vision_config and text_config"):
        interop.read(tmp_path / "given")
