"""Vision Transformers and DeiT: an encoder of patches with a learned row before them, norm before, and one matrix.

The learned rows and the places of the patches stand in one table there; here the places of the former are added to
them. How a picture is brought to numbers stands in preprocessor_config.json.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce import build
from transduce.errors import InputError
from transduce.interop.huggingface.family import Family, Imported, Place, Settings
from transduce.interop.huggingface.folder import Stored, read_json
from transduce.interop.huggingface.labels import after_specials, read_labels, without_specials
from transduce.interop.huggingface.tokenizers import Rows
from transduce.interop.huggingface.weights import check, fill
from transduce.layers.meta_init import outlined
from transduce.recipe import parse

LAYER = {
    "layernorm_before": "residuals.0.norm",
    "attention.attention.query": "own.attention.query",
    "attention.attention.key": "own.attention.key",
    "attention.attention.value": "own.attention.value",
    "attention.output.dense": "own.attention.output",
    "layernorm_after": "residuals.1.norm",
    "intermediate.dense": "feed_forward.grow",
    "output.dense": "feed_forward.shrink",
}
TABLE = {
    "embeddings.patch_embeddings.projection": "encoder.embedding.patch",
    **{f"encoder.layer.*.{theirs}": f"encoder.blocks.*.{ours}" for theirs, ours in LAYER.items()},
    "layernorm": "encoder.norm",
}
SECOND_ROW = "embeddings.distillation_token"
FIRST, SECOND, PLACES = "cls", "distillation", "encoder.embedding.places.table"
SPECIAL = {
    "embeddings.cls_token": Place((FIRST,)),
    SECOND_ROW: Place((SECOND,)),
    "embeddings.position_embeddings": Place((PLACES,)),
    "classifier.weight": Place(("head.layers.1.weight",), after_specials, without_specials),
    "classifier.bias": Place(("head.layers.1.bias",), after_specials, without_specials),
}
# preprocessor_config.json where there is none, or no word on it
USUAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
SMOOTH = {2: "bilinear", 3: "bicubic"}


def joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """1 1 D each and 1 L+S D -> L D with its places, and S D."""
    leading = [weights.pop(name)[0] for name in (FIRST, SECOND) if name in weights]
    if leading and PLACES in weights:
        table = weights[PLACES][0]
        weights[PLACES] = table[len(leading) :]
        weights["encoder.embedding.first"] = torch.cat(leading) + table[: len(leading)]
    return weights


def parted(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The way back: the leading rows have their places in them, so there they stand at places that are zero."""
    leading = weights.pop("encoder.embedding.first", None)
    if leading is not None:
        weights |= {name: row[None, None] for name, row in zip((FIRST, SECOND), leading, strict=False)}
        weights[PLACES] = torch.cat((torch.zeros_like(leading), weights[PLACES]))[None]
    return weights


def model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("qkv_bias", True)
    encoder = {
        "kind": "transformer",
        "layers": settings.count("num_hidden_layers"),
        "width": settings.count("hidden_size"),
        "heads": settings.count("num_attention_heads"),
        "ff_width": settings.count("intermediate_size"),
        "activation": settings.activation("hidden_act", "gelu"),
        "norm": "pre",
        "norm_eps": settings.rate("layer_norm_eps", 1e-12),
        "position": "none",
        "dropout": settings.rate("hidden_dropout_prob"),
        "attention_dropout": settings.rate("attention_probs_dropout_prob"),
        "front": {
            "kind": "patches",
            "patch": settings.count("patch_size", 16),
            "leading": 2 if SECOND_ROW in names else 1,
        },
    }
    return {"encoder": encoder, "head": {"kind": "classifier", "pooling": "first", "activation": "none", "dropout": 0}}


FAMILIES = {
    f"{name}ForImageClassification": Family(
        model, TABLE, SPECIAL, joined=joined, parted=parted, prefix=f"{name.lower()}.", labels="labels"
    )
    for name in ("ViT", "DeiT")
}


def read(folder: Path, settings: Settings, family: Family, stored: Mapping[str, Stored]) -> Imported:
    """Everything is checked by name and shape before any number is read."""
    labels = read_labels(settings, family.labels)
    content = {
        "data": {"sources": {"picture": picture(folder, settings)}},
        "tokens": {"source": {"kind": "labels"}, "target": {"kind": "labels", "size": labels.size}},
        "model": family.model(settings, stored),
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ("accuracy",)},
    }
    recipe = build.complete_recipe(parse(content, settings.where), settings.where)
    with outlined():
        network = build.build_model(recipe.model, labels.size, labels.size)
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    nothing = Rows((), 0)  # there are no tokens but the labels
    check(family, stored, wanted, nothing, str(folder))
    return Imported(recipe, (labels, labels), fill(family, stored, nothing, wanted))


def picture(folder: Path, settings: Settings) -> dict[str, Any]:
    """How a picture is read, in our options."""
    given = read_json(folder, "preprocessor_config.json")
    told = {**USUAL, **(given or read_json(folder, "processor_config.json").get("image_processor") or {})}
    where = str(folder / "preprocessor_config.json")
    size = settings.count("image_size", 224)
    mean, spread = (
        tuple(told[name]) if isinstance(told[name], list) else (0.0,) for name in ("image_mean", "image_std")
    )
    if told.get("do_normalize") is False:
        mean, spread = (0.0,), (1.0,)
    if told["resample"] not in SMOOTH:
        raise InputError(f"resample: {told['resample']!r} is not known", where=where, remedy="2 and 3 are")
    if told.get("do_center_crop"):
        warnings.warn(f"{where}: pictures are cut to their middle without being enlarged first", stacklevel=2)
    return {
        "kind": "image",
        "size": size,
        "channels": settings.count("num_channels", 3),
        "fitted": "crop" if told.get("do_center_crop") else "stretch",
        "smooth": SMOOTH[told["resample"]],
        "mean": mean,
        "spread": spread,
    }
