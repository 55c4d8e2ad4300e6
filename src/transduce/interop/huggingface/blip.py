"""BLIP captioner: a Vision Transformer with joint query, key and value matrices, and a BERT decoder.

A caption starts with its own token, bos_token_id, in place of [CLS], and ends with sep_token_id.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from transduce.contracts import Family
from transduce.errors import InputError
from transduce.interop.huggingface import bert, vit
from transduce.interop.huggingface.encoder_decoder import BERT_DECODER, DEEP_OUTPUT, TOKENS
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap

VISION, TEXT = "vision_config", "text_config"
LAYER = {
    "layer_norm1": "self_attention_norm",
    "self_attn.projection": "self_attention.out_proj",
    "layer_norm2": "feed_forward_norm",
    "mlp.fc1": "feed_forward.fc1",
    "mlp.fc2": "feed_forward.fc2",
}
BERT, (HEAD, BIAS, TIED) = "text_decoder.bert", bert.MLM_HEADS["Bert"]
MODULES = {
    "vision_model.embeddings.patch_embedding": "encoder.embedding.projection",
    **{f"vision_model.encoder.layers.*.{hf}": f"encoder.layers.*.{native}" for hf, native in LAYER.items()},
    "vision_model.post_layernorm": "encoder.final_norm",
    **{f"{BERT}.{hf}": native for hf, native in BERT_DECODER.items()},
    f"{BERT}.embeddings.position_embeddings": "decoder.position.embed_positions",
    **{f"text_decoder.{hf}": DEEP_OUTPUT[native] for hf, native in HEAD.items()},
}


def _thirds(joint: Tensor) -> list[Tensor]:
    return list(joint.chunk(3))


TENSORS = {
    "vision_model.embeddings.class_embedding": TensorMap((vit.CLS,)),
    "vision_model.embeddings.position_embedding": TensorMap((vit.POSITION_TABLE,)),
    **{
        f"vision_model.encoder.layers.*.self_attn.qkv.{leaf}": TensorMap(
            tuple(f"encoder.layers.*.self_attention.{name}_proj.{leaf}" for name in "qkv"), _thirds
        )
        for leaf in ("weight", "bias")
    },
    f"{BERT}.{bert.WORD_TABLE}": TensorMap(TOKENS),
    f"text_decoder.{BIAS}": TensorMap((TOKENS[1].replace("weight", "bias"),)),
}
TIED_WEIGHTS = {
    f"text_decoder.{copy}": f"{BERT}.{original}" if original == bert.WORD_TABLE else f"text_decoder.{original}"
    for copy, original in TIED.items()
}


def flatten_text(config: Config) -> Config:
    """The values of the text decoder; those of the images stay in their section."""
    if not all(isinstance(config.content.get(side), dict) for side in (VISION, TEXT)):
        problem = f"config.json has no {VISION} and {TEXT}"
        raise InputError(problem, where=config.where, remedy="fetch the folder again")
    return Config({**config.content, **config.content[TEXT], VISION: config.content[VISION]}, config.where)


def _vision(config: Config) -> Config:
    """With the names that ViT has for the same values."""
    content = dict(config.section(VISION))
    content |= {"attention_probs_dropout_prob": content.get("attention_dropout", 0.0), "hidden_dropout_prob": 0.0}
    return Config({"layer_norm_eps": 1e-5, **content}, f"{config.where}: {VISION}")


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    config.require("hidden_act", "gelu")
    config.require("is_decoder", True)
    config.require("tie_word_embeddings", True)
    vision = _vision(config)
    config.require("encoder_hidden_size", vision.count("hidden_size"))
    as_encoder = Config({**config.content, "is_decoder": False}, config.where)  # required by BERT on its own
    return {
        "encoder": vit.to_recipe(vision, ())["encoder"],
        "decoder": bert.ENCODERS["Bert"](as_encoder),
        "tie": "target",
        "scale_embedding": False,
        "output": "deep",
    }


def _read_sources(folder: Path, config: Config) -> Content:
    return vit.read_preprocessing(folder, _vision(config))


FAMILIES = {
    "BlipForConditionalGeneration": Family(
        _to_recipe,
        WeightMap(MODULES, TENSORS, TIED_WEIGHTS, (f"{BERT}.embeddings.position_ids",), combine=vit.combine_tokens),
        flatten=flatten_text,
        read_sources=_read_sources,
        modality="image",
        start_token="bos_token_id",
        end_token="sep_token_id",
        start_replaces_first=True,
    )
}
