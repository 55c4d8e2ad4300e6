"""DonutSwin, the Swin Transformer of Donut and Nougat: encoder, weights and preprocessing of pages.

A VisionEncoderDecoderModel joins it with an mBART decoder: encoder_decoder.py.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap
from transduce.interop.huggingface.llama import zero_biases
from transduce.interop.huggingface.vit import read_image_options

LAYER = {
    "layernorm_before": "self_attention_norm",
    "attention.self.query": "self_attention.attention.q_proj",
    "attention.self.key": "self_attention.attention.k_proj",
    "attention.self.value": "self_attention.attention.v_proj",
    "attention.output.dense": "self_attention.attention.out_proj",
    "layernorm_after": "feed_forward_norm",
    "intermediate.dense": "feed_forward.fc1",
    "output.dense": "feed_forward.fc2",
}
STAGE, NATIVE_STAGE = "encoder.layers.*", "encoder.embedding.stages.*"
MODULES = {
    "embeddings.patch_embeddings.projection": "encoder.embedding.projection",
    "embeddings.norm": "encoder.embedding.embedding_norm",
    f"{STAGE}.downsample.norm": f"{NATIVE_STAGE}.merging.norm",
    f"{STAGE}.downsample.reduction": f"{NATIVE_STAGE}.merging.projection",
}
BIAS_TABLE, BIAS_INDEX = "attention.self.relative_position_bias_table", "attention.self.relative_position_index"
DEPTHS, HEADS = (2, 2, 6, 2), (3, 6, 12, 24)  # defaults of the config
STEPS = ("do_resize", "do_thumbnail", "do_pad", "do_rescale")  # which all pages go through


def _side(config: Config, name: str, default: int) -> tuple[int, int]:
    """A size of one number, or of height and width."""
    listed = isinstance(config.content.get(name), list)
    both = config.counts(name, (default,)) if listed else (config.count(name, default),)
    return both[0], both[-1]


def to_encoder(config: Config, names: Collection[str]) -> Content:
    config.require("use_absolute_embeddings", False)
    patch = _side(config, "patch_size", 4)
    if patch[0] != patch[1]:
        raise config.wrong("patch_size", list(patch), "is not square", "square patches are supported")
    channels, depths = config.count("embed_dim", 96), config.counts("depths", DEPTHS)
    front = {
        "kind": "swin",
        "patch_size": patch[0],
        "channels": channels,
        "depths": depths,
        "heads": config.counts("num_heads", HEADS),
        "window": config.count("window_size", 7),
        "ff_ratio": float(config.number("mlp_ratio", 0) or 4.0),
        "activation": config.activation("hidden_act", "gelu"),
        "norm_eps": config.rate("layer_norm_eps", 1e-5),
        "final_norm": False,
        "dropout": config.rate("hidden_dropout_prob"),
        "attention_dropout": config.rate("attention_probs_dropout_prob"),
    }
    return {"kind": "identity", "width": channels << len(depths) - 1, "dropout": 0.0, "front": front}


def weight_map(config: Config) -> WeightMap:
    layers = range(max(config.counts("depths", DEPTHS)))
    return WeightMap(
        MODULES
        | {
            f"{STAGE}.blocks.{layer}.{hf}": f"{NATIVE_STAGE}.layers.{layer}.{native}"
            for layer in layers
            for hf, native in LAYER.items()
        },
        {
            f"{STAGE}.blocks.{layer}.{BIAS_TABLE}": TensorMap(
                (f"{NATIVE_STAGE}.layers.{layer}.self_attention.position.weight",)
            )
            for layer in layers
        },
        ignored=tuple(f"{STAGE}.blocks.{layer}.{BIAS_INDEX}" for layer in layers),
        combine=zero_biases,
    )


def read_preprocessing(folder: Path, config: Config) -> Content:
    """data.sources: pages are shrunk to fit the size, as DonutImageProcessor and NougatImageProcessor do."""
    images, options = read_image_options(folder)
    for name in STEPS:
        images.require(name, True)
    size = images.content.get("size")
    height, width = _side(config, "image_size", 224)
    if isinstance(size, dict):
        both = Config(size, f"{images.where}: size")
        height, width = both.count("height"), both.count("width")
    elif isinstance(size, list):  # width and height, in older files of Donut
        width, height = _side(images, "size", 224)
    nougat = "do_crop_margin" in images.content  # which Donut does not have
    page = {
        **options,
        "size": height,
        "width": width,
        "channels": config.count("num_channels", 3),
        "resize_mode": "thumbnail",
        "shrink_interpolation": "bicubic" if nougat else None,
        "align_long_axis": images.flag("do_align_long_axis"),
        "crop_margin": images.flag("do_crop_margin"),
    }
    return {"picture": page}
