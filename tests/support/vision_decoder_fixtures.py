"""Small random VisionEncoderDecoder models of the transformers library in folders."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_fixtures import shake, write_tokenizer

VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
TROCR = {
    "vocab_size": 24, "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24,
    "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "is_decoder": True, "add_cross_attention": True,
}  # fmt: skip
BERT = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 40, "is_decoder": True, "add_cross_attention": True,
}  # fmt: skip
ROBERTA = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
SPECIAL = {"gpt2": (23, 23, 23), "trocr": (2, 1, 2), "bert": (2, 0, 3)}  # start, pad, end
SPECIAL |= dict.fromkeys(ROBERTA, (0, 1, 2))


def make_vision_decoder(
    folder, encoder_type="vit", decoder_type="trocr", generation=None, width=None, qkv_bias=True, **changes
):
    library = pytest.importorskip("transformers")
    torch.manual_seed(3)
    kinds = {"vit": (library.ViTConfig, library.ViTModel), "deit": (library.DeiTConfig, library.DeiTModel)}
    config, kind = kinds[encoder_type]
    encoder_config = config(qkv_bias=qkv_bias, **{**VIT, **({} if width is None else {"hidden_size": width})})
    if decoder_type == "gpt2":
        sizes = {"vocab_size": 24, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 4}
        ids = {"bos_token_id": 23, "eos_token_id": 23, "add_cross_attention": True, "is_decoder": True}
        decoder = library.GPT2LMHeadModel(library.GPT2Config(**sizes, **ids, **changes))
    elif decoder_type == "bert":
        decoder = library.BertLMHeadModel(library.BertConfig(**BERT, pad_token_id=0, **changes))
    elif decoder_type in ROBERTA:
        name, sizes = ROBERTA[decoder_type], {**BERT, "pad_token_id": 1, **changes}
        decoder = getattr(library, f"{name}ForCausalLM")(getattr(library, f"{name}Config")(**sizes))
    else:
        decoder = library.TrOCRForCausalLM(library.TrOCRConfig(**{**TROCR, **changes}))
    model = shake(library.VisionEncoderDecoderModel(encoder=kind(encoder_config), decoder=decoder), size=0.2)
    model.set_attn_implementation("eager")
    start, pad, end = SPECIAL[decoder_type]
    with torch.no_grad():  # some outputs end by themselves
        model.decoder.get_input_embeddings().weight[end] *= 1.5
        if decoder_type == "bert":
            decoder.cls.predictions.bias[end] += 1.7
    for one in (model.config, model.generation_config):
        one.decoder_start_token_id, one.pad_token_id, one.eos_token_id = start, pad, end
    for name, value in (generation or {}).items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    content = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    write_tokenizer(folder, decoder_type if decoder_type in ("gpt2", "bert") else "roberta")
    return model
