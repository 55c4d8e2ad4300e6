"""The recipe of an encoder alone in; the settings of the Hugging Face architectures that may carry it out.

What stands on top of it decides which: vectors, masks that are filled, labels of texts, of words or of pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.flow import SPECIALS
from transduce.interop.huggingface.bert import BEFORE_FIRST
from transduce.recipe import Recipe

Content = dict[str, Any]
SHAPES = {
    "embedder": "Model",
    "mlm": "ForMaskedLM",
    "classifier": "ForSequenceClassification",
    "tagger": "ForTokenClassification",
}
SEEN = "ForImageClassification"
USUAL = 1e-5  # of a norm, where a recipe says nothing
BLANKS = {" ": "<space>", "\t": "<tab>"}  # which are pieces where labels are words, and no labels
RESAMPLE = {"bilinear": 2, "bicubic": 3}


def _sizes(recipe: Recipe) -> Content:
    encoder = recipe.model.encoder
    assert encoder is not None
    return {
        "hidden_size": encoder["width"],
        "num_hidden_layers": encoder["layers"],
        "num_attention_heads": encoder["heads"],
        "intermediate_size": encoder["ff_width"],
        "hidden_act": encoder["activation"].replace("gelu_tanh", "gelu_new"),
        "layer_norm_eps": encoder["norm_eps"] or USUAL,
        "hidden_dropout_prob": encoder["dropout"],
        "attention_probs_dropout_prob": encoder["attention_dropout"],
    }


def _bert(recipe: Recipe, places: int) -> Content:
    return {"model_type": "bert", **_sizes(recipe), "max_position_embeddings": places, "type_vocab_size": 2}


def _roberta(recipe: Recipe, places: int) -> Content:
    found = {**_bert(recipe, places + BEFORE_FIRST), "model_type": "roberta", "type_vocab_size": 1}
    return {**found, "pad_token_id": BEFORE_FIRST - 1}


def _distilled(recipe: Recipe, places: int) -> Content:
    sizes = _sizes(recipe)
    return {
        "model_type": "distilbert",
        "dim": sizes["hidden_size"],
        "n_layers": sizes["num_hidden_layers"],
        "n_heads": sizes["num_attention_heads"],
        "hidden_dim": sizes["intermediate_size"],
        "activation": sizes["hidden_act"],
        "max_position_embeddings": places,
        "dropout": sizes["hidden_dropout_prob"],
        "attention_dropout": sizes["attention_probs_dropout_prob"],
    }


def _seen(kind: str) -> Callable[[Recipe, int], Content]:
    def write(recipe: Recipe, places: int) -> Content:
        encoder = recipe.model.encoder
        assert encoder is not None
        front = encoder["front"]
        height, _, channels = front["shape"]
        told = {"model_type": kind, "image_size": height, "patch_size": front["patch"], "num_channels": channels}
        return {**told, **_sizes(recipe), "qkv_bias": True}

    return write


Written = Callable[[Recipe, int], Content]
SEEING: dict[str, Written] = {f"ViT{SEEN}": _seen("vit"), f"DeiT{SEEN}": _seen("deit")}


def carriers(recipe: Recipe, pad: int | None) -> dict[str, Written]:
    """Those that may carry it, the likeliest first: RoBERTa counts places from the number of <pad>, which is 1."""
    encoder, head = recipe.model.encoder, recipe.model.head
    assert encoder is not None
    assert head is not None
    if recipe.data.sources:
        return SEEING if encoder["front"]["leading"] < 2 else dict(reversed(SEEING.items()))
    shape = SHAPES.get(head["kind"], "Model")
    plain: dict[str, Written] = {f"Bert{shape}": _bert, f"DistilBert{shape}": _distilled}
    return {f"Roberta{shape}": _roberta, **plain} if pad == BEFORE_FIRST - 1 else plain


def name_labels(target: Tokenizer) -> Content:
    names = [BLANKS.get(name, name) for name in target.vocabulary.pieces[len(SPECIALS) :]]
    numbers = {name: number for number, name in enumerate(names)}
    return {"id2label": dict(enumerate(names)), "label2id": numbers, "num_labels": len(names)}


def unread(architecture: str, settings: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Weights that ours do not need and theirs would draw at random: kinds of segments, and the pooler, are zero."""
    made: dict[str, Tensor] = {}
    if "type_vocab_size" not in settings:
        return made
    width, inside = settings["hidden_size"], "" if architecture.endswith("Model") else prefix
    made[f"{inside}embeddings.token_type_embeddings.weight"] = torch.zeros(settings["type_vocab_size"], width)
    if architecture.endswith("Model"):
        made |= {"pooler.dense.weight": torch.zeros(width, width), "pooler.dense.bias": torch.zeros(width)}
    return made


def look_at(picture: Mapping[str, Any]) -> Content:
    """preprocessor_config.json of how a picture is read."""
    three = {
        name: list(picture[name]) * (picture["channels"] if len(picture[name]) == 1 else 1)
        for name in ("mean", "spread")
    }
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": picture["size"], "width": picture["width"] or picture["size"]},
        "resample": RESAMPLE[picture["smooth"]],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": three["mean"],
        "image_std": three["spread"],
    }
