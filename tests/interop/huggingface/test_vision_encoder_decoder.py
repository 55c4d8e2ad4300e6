"""VisionEncoderDecoderModel compared with the transformers library."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from export_fixtures import make_run, pair
from huggingface_fixtures import change_config, record, search_name
from PIL import Image as Pillow
from vision_decoder_fixtures import SPECIAL, make_vision_decoder

import transduce
from transduce import interop
from transduce.errors import InputError
from transduce.flow import BOS, Batch, Padded
from transduce.inference.lowering import lower_network
from transduce.interop import onnx
from transduce.interop.ctranslate2.exporter import check as check_ctranslate2
from transduce.interop.export import export

library = pytest.importorskip("transformers")


@pytest.fixture
def images(tmp_path):
    chance, names = np.random.default_rng(2), []
    for number in range(4):
        names.append(str(tmp_path / f"{number}.png"))
        Pillow.fromarray(chance.integers(0, 256, (16, 16, 3), np.uint8)).save(names[-1])
    return names


def pixels(names):
    raw = np.stack([np.asarray(Pillow.open(name), np.float32) / 255 for name in names])
    return torch.from_numpy((raw - [0.4, 0.5, 0.6]) / [0.2, 0.25, 0.3]).float().permute(0, 3, 1, 2)


KINDS = [
    {},
    {"encoder_type": "deit"},
    {"qkv_bias": False},  # as TrOCR base and large have it
    {"width": 16},  # no matrix between the two
    {"cross_attention_hidden_size": 32},
    {"use_learned_position_embeddings": False, "scale_embedding": True, "activation_function": "relu"},
    {"layernorm_embedding": False},
    {"tie_word_embeddings": False},
    {"decoder_type": "gpt2"},
    {"decoder_type": "gpt2", "width": 16},
    {"decoder_type": "bert"},
    {"encoder_type": "deit", "decoder_type": "bert", "width": 16, "layer_norm_eps": 0.1},
    {"decoder_type": "roberta"},
    {"decoder_type": "xlm-roberta"},
    {"decoder_type": "camembert"},
]


NAMES = {
    kind: (f"ViT or DeiT with {name}", "VisionEncoderDecoderModel")
    for kind, name in {
        "trocr": "TrOCR", "gpt2": "GPT-2", "bert": "BERT", "roberta": "RoBERTa", "xlm-roberta": "XLM-RoBERTa",
        "camembert": "CamemBERT",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_logits_and_cross_attention_equal_transformers(tmp_path, images, number):
    hf_model = make_vision_decoder(tmp_path / "given", **KINDS[number])
    model, given = transduce.load(tmp_path / "given", device="cpu"), pixels(images)
    start, pad, end = SPECIAL[KINDS[number].get("decoder_type", "trocr")]
    native = {number: place for place, number in enumerate(model.target.vocabulary.backend_ids)}
    rows = torch.randint(4, 22, (4, 6))
    tokens = torch.tensor([[BOS, *(native[token] for token in row)] for row in rows.tolist()])
    with torch.no_grad():
        read = torch.cat((torch.full((4, 1), start), rows), 1)
        expected = hf_model(given, decoder_input_ids=read, output_attentions=True)
        mask = torch.ones(4, 16, dtype=torch.bool)
        state = model.network.start(Batch(Padded(given.permute(0, 2, 3, 1), mask)))
        step = model.network.advance(tokens, state, with_attention=True)
    kept = [token for token in range(24) if token not in (start, pad, end)]
    decoder = NAMES[KINDS[number].get("decoder_type", "trocr")]
    record(*decoder, logits=step.logits[..., [native[token] for token in kept]] - expected.logits[..., kept])
    assert torch.allclose(step.logits[..., [native[token] for token in kept]], expected.logits[..., kept], atol=1e-4)
    assert torch.allclose(step.attention.cross, torch.stack(expected.cross_attentions, 1), atol=1e-5)


SEARCHES = [{}, {"num_beams": 3}, {"num_beams": 4, "early_stopping": True, "no_repeat_ngram_size": 2}]


@pytest.mark.parametrize("decoder_type", ["trocr", "gpt2", "bert", "roberta"])
@pytest.mark.parametrize("number", range(len(SEARCHES)))
def test_generation_equals_transformers_token_for_token(tmp_path, images, number, decoder_type):
    hf_model = make_vision_decoder(
        tmp_path / "given", decoder_type=decoder_type, generation={**SEARCHES[number], "max_length": 20}
    )
    model = transduce.load(tmp_path / "given", device="cpu")
    _, pad, end = SPECIAL[decoder_type]
    silent = [token for token in (pad,) if token != end]
    with torch.no_grad():
        expected = hf_model.generate(pixels(images), suppress_tokens=silent or None).tolist()
    for one, row in zip(model.generate(images), expected, strict=True):
        decoder_ids = [model.target.piece(model.target.vocabulary.backend_ids.index(token)) for token in row[1:]
                if token not in (pad, end)]  # fmt: skip
        pieces = [piece for piece in one.tokens if piece != "</s>"]
        record(*NAMES[decoder_type], searches={search_name(SEARCHES[number]): ([pieces], [decoder_ids])})
        assert pieces == decoder_ids


EXPORTED = [KINDS[number] for number in (0, 1, 3, 6, 7)]


@pytest.mark.parametrize("number", range(len(EXPORTED)))
def test_import_export_import_gives_the_same_bits(tmp_path, images, number):
    """And the transformers library computes the same: the matrix between both sides is part of cross-attention."""
    before = make_vision_decoder(tmp_path / "given", **EXPORTED[number])
    export(tmp_path / "given", tmp_path / "back", "huggingface")
    first, second = interop.read(tmp_path / "given"), interop.read(tmp_path / "back")
    assert first.recipe.model == second.recipe.model
    assert first.recipe.data.sources == second.recipe.data.sources
    assert first.tokenizers[1].encode_batch(["w3 w4"]) == second.tokenizers[1].encode_batch(["w3 w4"])
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(tensor, second.weights[key]) for key, tensor in first.weights.items())
    after, report = library.VisionEncoderDecoderModel.from_pretrained(
        tmp_path / "back", local_files_only=True, output_loading_info=True
    )
    assert not any(report.values())
    inputs = {"pixel_values": pixels(images), "decoder_input_ids": torch.tensor([[2, 9, 10, 11]] * len(images))}
    with torch.no_grad():
        assert torch.allclose(after.eval()(**inputs).logits[..., 4:], before(**inputs).logits[..., 4:], atol=1e-4)
    record(*NAMES["trocr"], export=True)


@pytest.mark.parametrize("decoder_type", ["gpt2", "bert", "roberta", "xlm-roberta", "camembert"])
def test_decoders_that_equal_no_trocr_are_refused_by_exports(tmp_path, decoder_type):
    make_vision_decoder(tmp_path / "given", decoder_type=decoder_type)
    with pytest.raises(InputError, match="no Hugging Face architecture fits this model: decoder"):
        export(tmp_path / "given", tmp_path / "back", "huggingface")
    record(*NAMES[decoder_type], export=False)


def test_deep_output_is_stored_lowered_and_refused_by_exports(tmp_path, images):
    """The layer before the output is stored with a run, packed for generation, and carried or refused in an export."""
    make_vision_decoder(tmp_path / "given", decoder_type="bert")
    opened = transduce.load(interop.convert(tmp_path / "given", tmp_path / "run").folder, device="cpu")
    assert opened.recipe.model.output == "deep"
    exact = lower_network(opened.network, "fp32")
    rough = lower_network(opened.network, "int8")
    batch, tokens = (
        Batch(Padded(pixels(images).permute(0, 2, 3, 1), torch.ones(4, 16, dtype=torch.bool))),
        [[1, 9, 7]],
    )
    with torch.inference_mode():
        expected, same, close = (
            one.advance(torch.tensor(tokens * 4), one.start(batch)).logits.log_softmax(-1)
            for one in (opened.network, exact, rough)
        )
    assert torch.allclose(same, expected, atol=1e-4)
    assert (close.exp() - expected.exp()).abs().max() < 0.05
    with pytest.raises(InputError, match="output: deep does not fit"):
        check_ctranslate2(opened.recipe.model, "here")
    run = make_run(tmp_path / "texts", {**pair(), "output": "deep"})
    with pytest.raises(InputError, match="output: deep does not fit, plain would"):
        export(run.folder, tmp_path / "exported", "huggingface")


def test_other_encoders_and_decoders_are_refused(tmp_path):
    make_vision_decoder(tmp_path / "given")
    config = json.loads((tmp_path / "given" / "config.json").read_text())
    change_config(tmp_path / "given", decoder={**config["decoder"], "model_type": "xlnet"})
    with pytest.raises(InputError, match="vit with xlnet"):
        interop.read(tmp_path / "given")
    change_config(tmp_path / "given", decoder=None)
    with pytest.raises(InputError, match="no encoder and decoder section"):
        interop.read(tmp_path / "given")


def test_onnx_graphs_of_images_equal_the_native_model(tmp_path):
    """Ids and pixels as the transformers library gives them: <s> is a copy of </s>, which outputs start with."""
    reference = make_vision_decoder(tmp_path / "given")
    model = transduce.load(tmp_path / "given", device="cpu")
    graphs, example = onnx.make_graphs(model, onnx.Vocabularies.of(model), "here")
    encoder, first = graphs[0], graphs[1]
    assert (list(encoder.inputs), encoder.outputs) == (["pixel_values"], ["last_hidden_state"])
    assert first.inputs == ["input_ids", "encoder_hidden_states"]
    order = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
    assert first.outputs[1:5] == [f"present.0.{one}" for one in order]
    pixels, tokens = example.inputs["pixel_values"], example.tokens
    assert tokens[:, 0].tolist() == [reference.config.decoder_start_token_id] * len(tokens)
    with torch.no_grad():
        expected = reference(pixel_values=pixels, decoder_input_ids=tokens).logits
        logits = first.module(tokens, encoder.module((pixels,)))[0]
    real = [number for number in range(24) if number not in (0, 1)]  # <s> and <pad> are never output
    torch.testing.assert_close(logits[..., real], expected[..., real], rtol=1e-4, atol=1e-4)
