"""Vision Transformer (ViT) and DeiT: an image classifier over patches, pre-norm, with one or two learned tokens.

The positions of learned tokens and patches are one table in the file; here the positions of the learned tokens are
added to the tokens. preprocessor_config.json describes the preprocessing of images.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from transduce.contracts import Family
from transduce.interop.huggingface.bert import encoder_sizes
from transduce.interop.huggingface.family import Config, Content, Names, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.folder import read_json
from transduce.interop.huggingface.heads import after_specials, without_specials
from transduce.recipe import Recipe

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
LAYER = {
    "layernorm_before": "self_attention_norm",
    "attention.attention.query": "self_attention.q_proj",
    "attention.attention.key": "self_attention.k_proj",
    "attention.attention.value": "self_attention.v_proj",
    "attention.output.dense": "self_attention.out_proj",
    "layernorm_after": "feed_forward_norm",
    "intermediate.dense": "feed_forward.fc1",
    "output.dense": "feed_forward.fc2",
}
MODULES = {
    "embeddings.patch_embeddings.projection": "encoder.embedding.projection",
    **{f"encoder.layer.*.{hf}": f"encoder.layers.*.{native}" for hf, native in LAYER.items()},
    "layernorm": "encoder.final_norm",
}
DISTILLATION_TOKEN = "embeddings.distillation_token"
CLS, DISTILLATION, POSITION_TABLE = "cls", "distillation", "encoder.embedding.position_embedding.weight"
TENSORS = {
    "embeddings.cls_token": TensorMap((CLS,)),
    DISTILLATION_TOKEN: TensorMap((DISTILLATION,)),
    "embeddings.position_embeddings": TensorMap((POSITION_TABLE,)),
    "classifier.weight": TensorMap(("head.layers.1.weight",), after_specials, without_specials),
    "classifier.bias": TensorMap(("head.layers.1.bias",), after_specials, without_specials),
}
# Defaults of preprocessor_config.json.
PREPROCESSING = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
INTERPOLATION = {2: "bilinear", 3: "bicubic"}
RESAMPLE = {name: number for number, name in INTERPOLATION.items()}


VIT_PROJECTION = re.compile(r"^encoder\.layers\.\d+\.self_attention\.[qkv]_proj\.weight$")


def combine_tokens(weights: Weights) -> Weights:
    """1 1 D each and 1 L+S D -> L D with their positions, and S D. Without `qkv_bias` the biases are zero."""
    for name in [name for name in weights if VIT_PROJECTION.search(name)]:
        weights.setdefault(name.replace(".weight", ".bias"), weights[name].new_zeros(len(weights[name])))
    leading = [weights.pop(name)[0] for name in (CLS, DISTILLATION) if name in weights]
    if leading and POSITION_TABLE in weights:
        table = weights[POSITION_TABLE][0]
        weights[POSITION_TABLE] = table[len(leading) :]
        weights["encoder.embedding.leading_tokens"] = torch.cat(leading) + table[: len(leading)]
    return weights


def separate_tokens(weights: Weights) -> Weights:
    """The learned tokens keep their positions, so the table has zeros for them."""
    leading = weights.pop("encoder.embedding.leading_tokens", None)
    if leading is not None:
        weights |= {name: row[None, None] for name, row in zip((CLS, DISTILLATION), leading, strict=False)}
        weights[POSITION_TABLE] = torch.cat((torch.zeros_like(leading), weights[POSITION_TABLE]))[None]
    return weights


def to_recipe(config: Config, names: Collection[str]) -> Content:
    encoder = {
        "kind": "transformer",
        "layers": config.count("num_hidden_layers"),
        "width": config.count("hidden_size"),
        "heads": config.count("num_attention_heads"),
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation("hidden_act", "gelu"),
        "norm": "pre",
        "norm_eps": config.rate("layer_norm_eps", 1e-12),
        "position": "none",
        "dropout": config.rate("hidden_dropout_prob"),
        "attention_dropout": config.rate("attention_probs_dropout_prob"),
        "front": {
            "kind": "patches",
            "patch_size": config.count("patch_size", 16),
            "leading": 2 if DISTILLATION_TOKEN in names else 1,
        },
    }
    return {"encoder": encoder, "head": {"kind": "classifier", "pooling": "first", "activation": "none", "dropout": 0}}


def _config(model_type: str) -> Callable[[Recipe, int | None], Content | None]:
    def write(recipe: Recipe, pad_id: int | None) -> Content | None:
        encoder = recipe.model.encoder
        if encoder is None or recipe.model.head is None or not recipe.data.sources:
            return None
        return encoder_config(encoder, model_type)

    return write


def encoder_config(encoder: Mapping[str, Any], model_type: str) -> Content:
    height, _, channels = encoder["front"]["shape"]
    return {
        "model_type": model_type,
        "image_size": height,
        "patch_size": encoder["front"]["patch_size"],
        "num_channels": channels,
        **encoder_sizes(encoder),
        "qkv_bias": True,
    }


def read_image_options(folder: Path) -> tuple[Config, Content]:
    """preprocessor_config.json, and from it the normalisation and interpolation of images."""
    processor = Config(read_json(folder, PROCESSOR), str(folder / PROCESSOR))
    given = read_json(folder, PREPROCESSOR) or processor.section("image_processor")
    where = str(folder / PREPROCESSOR)
    images = Config({**PREPROCESSING, **{name: value for name, value in given.items() if value is not None}}, where)
    mean, std = images.numbers("image_mean"), images.numbers("image_std")
    if images.content.get("do_normalize") is False:
        mean, std = (0.0,), (1.0,)
    resample = images.integer("resample", 0)
    if resample not in INTERPOLATION:
        raise images.wrong("resample", resample, "is not supported", "2 (bilinear) or 3 (bicubic)")
    return images, {"kind": "image", "interpolation": INTERPOLATION[resample], "mean": mean, "std": std}


def read_preprocessing(folder: Path, config: Config) -> Content:
    """data.sources: size, cropping and normalisation of images."""
    images, options = read_image_options(folder)
    size, crop = config.count("image_size", 224), images.flag("do_center_crop")
    mode = "crop" if crop else "stretch"
    if crop and _crops_after_resizing(images, size):
        mode = "shortest_edge"
    elif crop:
        warnings.warn(f"{images.where}: images are centre-cropped without being enlarged first", stacklevel=2)
    image = {
        **options,
        "size": size,
        "channels": config.count("num_channels", 3),
        "resize_mode": mode,
    }
    return {"picture": image}


def _crops_after_resizing(images: Config, side: int) -> bool:
    """Whether the shorter side of an image is resized to `side`, and then the centre cut out, as CLIP does."""
    size, crop = (images.content.get(name) for name in ("size", "crop_size"))
    edge = size.get("shortest_edge") if isinstance(size, dict) else size
    square = {"height": side, "width": side}
    return edge == side and crop in (side, square)


def write_preprocessing(recipe: Recipe) -> Content:
    """preprocessor_config.json"""
    image = next(iter(recipe.data.sources.values()))
    assert isinstance(image, Mapping)
    per_channel = {
        name: list(image[name]) * (image["channels"] if len(image[name]) == 1 else 1) for name in ("mean", "std")
    }
    content = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": image["size"], "width": image["width"] or image["size"]},
        "resample": RESAMPLE[image["interpolation"]],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": per_channel["mean"],
        "image_std": per_channel["std"],
    }
    return {PREPROCESSOR: content}


def _required_names(config: Mapping[str, Any]) -> Names:
    return (DISTILLATION_TOKEN,) if config["model_type"] == "deit" else ()


FAMILIES = {
    f"{name}ForImageClassification": Family(
        to_recipe,
        WeightMap(MODULES, TENSORS, combine=combine_tokens, separate=separate_tokens, prefix=f"{name.lower()}."),
        _config(name.lower()),
        read_sources=read_preprocessing,
        modality="image",
        start_token="",
        label_kind="labels",
        required_names=_required_names,
        extra_files=write_preprocessing,
    )
    for name in ("ViT", "DeiT")
}
