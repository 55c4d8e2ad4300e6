"""Pix2Struct: T5 layers over variable-resolution patches of an image, and a T5 decoder.

Encoder positions are learned vectors of rows and columns. Models for questions are refused: the question is drawn onto
the image with a font that is not part of the folder.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transduce.contracts import Family
from transduce.interop.huggingface import t5
from transduce.interop.huggingface.blip import VISION, flatten_text
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap
from transduce.interop.huggingface.vit import read_image_options

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
FEED_FORWARD = t5.FEED_FORWARD[True]
ENCODER, DECODER = "encoder.encoder.layer.*", "decoder.layer.*"
SUBLAYERS = {"self_attention": "self_attention", "encoder_decoder_attention": "cross_attention"}
MODULES = {
    "encoder.embeddings.patch_projection": "encoder.embedding.projection",
    "encoder.embeddings.row_embedder": "encoder.embedding.embed_rows",
    "encoder.embeddings.column_embedder": "encoder.embedding.embed_columns",
    **{f"{ENCODER}.attention.{hf}": f"encoder.layers.*.self_attention.{name}" for hf, name in PROJECTIONS.items()},
    **{f"{ENCODER}.mlp.{hf}": f"encoder.layers.*.feed_forward.{name}" for hf, name in FEED_FORWARD.items()},
    f"{ENCODER}.pre_attention_layer_norm": "encoder.layers.*.self_attention_norm",
    f"{ENCODER}.pre_mlp_layer_norm": "encoder.layers.*.feed_forward_norm",
    "encoder.layernorm": "encoder.final_norm",
    **{
        f"{DECODER}.{part}.attention.{hf}": f"decoder.layers.*.{native}.{name}"
        for part, native in SUBLAYERS.items()
        for hf, name in PROJECTIONS.items()
    },
    **{f"{DECODER}.{part}.layer_norm": f"decoder.layers.*.{native}_norm" for part, native in SUBLAYERS.items()},
    f"{DECODER}.self_attention.attention.relative_attention_bias": f"decoder.{t5.POSITION}",
    **{
        f"{DECODER}.mlp.DenseReluDense.{hf}": f"decoder.layers.*.feed_forward.{name}"
        for hf, name in FEED_FORWARD.items()
    },
    f"{DECODER}.mlp.layer_norm": "decoder.layers.*.feed_forward_norm",
    "decoder.final_layer_norm": "decoder.final_norm",
}
EMBEDDING, OUTPUT = "decoder.embed_tokens.weight", "decoder.lm_head.weight"
DEFAULTS = {
    "hidden_size": 768, "d_kv": 64, "d_ff": 2048, "dense_act_fn": "gelu_new", "vocab_size": 50244, "num_layers": 12,
    "num_heads": 12, "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1, "decoder_start_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


def _flatten(config: Config) -> Config:
    flat = flatten_text(config).content
    return Config({**DEFAULTS, **{name: value for name, value in flat.items() if value is not None}}, config.where)


def _stack(config: Config, layers: int, heads: int) -> Content:
    """One side, with the names that T5 has for the same values."""
    names = {"d_model": config.count("hidden_size"), "num_heads": heads, "feed_forward_proj": "gated-relu"}
    options = t5.stack(Config({**config.content, **names}, config.where), layers)
    return {**options, "activation": config.activation("dense_act_fn", "gelu_new")}


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    if config.flag("is_vqa"):
        problem = "draws a question onto the image, with a font that the folder does not have"
        raise config.wrong("is_vqa", True, problem, "models without is_vqa are supported")
    vision = dict(config.section(VISION))
    own = Config({**DEFAULTS, "dropout_rate": 0.0, **vision}, f"{config.where}: {VISION}")
    own = Config({**own.content, "layer_norm_epsilon": own.rate("layer_norm_eps", 1e-6)}, own.where)
    encoder = _stack(own, own.count("num_hidden_layers", 12), own.count("num_attention_heads", 12))
    front = {"kind": "flattened_patches", "max_positions": own.count("seq_len", 4096)}
    return {
        "encoder": {**encoder, "position": "none", "front": front},
        "decoder": _stack(config, config.count("num_layers"), config.count("num_heads")),
        "tie": "none" if OUTPUT in names else "target",
        "scale_embedding": False,
    }


def _weight_map(config: Config, names: Collection[str]) -> WeightMap:
    tensors = {EMBEDDING: TensorMap(t5.ALL_TABLES[1:])}
    if OUTPUT in names:
        tensors = {EMBEDDING: TensorMap(t5.ALL_TABLES[1:2]), OUTPUT: TensorMap(t5.ALL_TABLES[2:])}
    return WeightMap(MODULES, tensors)


def _read_sources(folder: Path, config: Config) -> Content:
    """data.sources: patches as Pix2StructImageProcessor computes them."""
    images, _ = read_image_options(folder)
    images.require("is_vqa", False)
    size = Config({"height": 16, "width": 16, **images.section("patch_size")}, f"{images.where}: patch_size")
    size.require("width", size.count("height"))
    patches = {
        "kind": "image_patches",
        "max_patches": images.count("max_patches", 2048),
        "patch_size": size.count("height"),
        "normalise": images.flag("do_normalize", True),
    }
    return {"picture": patches}


FAMILIES = {
    "Pix2StructForConditionalGeneration": Family(
        _to_recipe, _weight_map, flatten=_flatten, read_sources=_read_sources, modality="image"
    )
}
