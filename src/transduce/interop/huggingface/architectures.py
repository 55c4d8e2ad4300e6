"""A model recipe in; the Hugging Face architecture that can carry it out, with its settings, or why none can.

Each architecture writes its settings from the options of a recipe. Whether they say the same is found by reading them
as the importer does: whatever comes out different does not fit, and is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transduce import contracts
from transduce.errors import InputError
from transduce.interop.huggingface import encoder_carriers as encoders
from transduce.interop.huggingface import t5, vit
from transduce.interop.huggingface.family import ACTIVATIONS, Family, Settings
from transduce.interop.huggingface.importing import FAMILIES
from transduce.recipe import ModelRecipe, Recipe
from transduce.recipe.registry import complete

Content = dict[str, Any]
SPOKEN = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
EPSILON = {"layer": 1e-5, "rms": 1e-6}  # where a recipe says none
LEARNING = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
)  # options that change nothing once a model has learned
WAVES = 512  # places for which sine waves are made there, at least


@dataclass(frozen=True)
class Carrier:
    """An architecture and what its config.json says of this model."""

    architecture: str
    family: Family
    settings: Content


def _places(recipe: Recipe, part: Mapping[str, Any]) -> int:
    longest = part["position"].get("longest")
    return longest or max(WAVES, recipe.data.max_length + 1, recipe.generation.max_length + 1)


def _bart(recipe: Recipe, kind: str) -> Content:
    encoder, decoder = recipe.model.encoder, recipe.model.decoder
    assert encoder is not None
    assert decoder is not None
    content: Content = {
        "model_type": kind,
        "d_model": encoder["width"],
        "activation_function": SPOKEN.get(encoder["activation"], encoder["activation"]),
        "max_position_embeddings": _places(recipe, encoder),
        "scale_embedding": recipe.model.scale_embedding,
        "dropout": encoder["dropout"],
        "attention_dropout": encoder["attention_dropout"],
        "activation_dropout": encoder["activation_dropout"],
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
    }
    for side, part in (("encoder", encoder), ("decoder", decoder)):
        content[f"{side}_layers"] = part["layers"]
        content[f"{side}_attention_heads"] = part["heads"]
        content[f"{side}_ffn_dim"] = part["ff_width"]
    return content


def _t5(recipe: Recipe, kind: str) -> Content:
    encoder, decoder = recipe.model.encoder, recipe.model.decoder
    assert encoder is not None
    assert decoder is not None
    tied = recipe.model.tie != "none"
    activation = SPOKEN.get(encoder["activation"], encoder["activation"])
    if encoder["gated"]:  # what T5 calls gelu there is its approximation
        activation = "gated-gelu" if encoder["activation"] == "gelu_tanh" else f"gated-{activation}"
    return {
        "model_type": kind,
        "d_model": encoder["width"],
        "d_kv": encoder["head_width"] or encoder["width"] // encoder["heads"],
        "d_ff": encoder["ff_width"],
        "num_heads": encoder["heads"],
        "num_layers": encoder["layers"],
        "num_decoder_layers": decoder["layers"],
        "feed_forward_proj": activation,
        "layer_norm_epsilon": encoder["norm_eps"] or EPSILON["rms"],
        "relative_attention_num_buckets": encoder["position"].get("buckets", 32),
        "relative_attention_max_distance": encoder["position"].get("distance", 128),
        "dropout_rate": encoder["dropout"],
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied and recipe.model.scale_embedding,
        "is_encoder_decoder": True,
    }


def _gpt2(recipe: Recipe, kind: str) -> Content:
    decoder = recipe.model.decoder
    assert decoder is not None
    return {
        "model_type": kind,
        "n_embd": decoder["width"],
        "n_layer": decoder["layers"],
        "n_head": decoder["heads"],
        "n_inner": decoder["ff_width"],
        "n_positions": _places(recipe, decoder),
        "activation_function": SPOKEN.get(decoder["activation"], decoder["activation"]),
        "layer_norm_epsilon": decoder["norm_eps"] or EPSILON["layer"],
        "resid_pdrop": decoder["dropout"],
        "embd_pdrop": decoder["dropout"],
        "attn_pdrop": decoder["attention_dropout"],
        "tie_word_embeddings": True,
    }


Written = Callable[[Recipe, str], Content]
PAIRS: dict[str, tuple[Written, str]] = {
    "MarianMTModel": (_bart, "marian"),
    "BartForConditionalGeneration": (_bart, "bart"),
    "MBartForConditionalGeneration": (_bart, "mbart"),
    "PegasusForConditionalGeneration": (_bart, "pegasus"),
    "T5ForConditionalGeneration": (_t5, "t5"),
}
ALONE: dict[str, tuple[Written, str]] = {"GPT2LMHeadModel": (_gpt2, "gpt2")}


def choose(recipe: Recipe, where: str, pad: int | None = None) -> Carrier:
    """The first that says all that the recipe does; else the nearest is named, with what it cannot say.

    `pad`: their number of <pad>.
    """
    model = recipe.model
    for part in (model.encoder, model.decoder):
        if part is not None and part["kind"] != "transformer":
            raise _unfit(where, [f"kind: {part['kind']}"], "the Transformer")
    if strange := _strange(recipe):
        raise _unfit(where, strange, "BertModel or ViTForImageClassification")
    reasons: dict[str, list[str]] = {}
    for name, settings in _settings(recipe, pad).items():
        family, differing = _read(name, settings, recipe, where)
        if family is not None and not differing:
            return Carrier(name, family, {"architectures": [name], **settings})
        reasons[name] = differing
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    raise _unfit(where, reasons[nearest], nearest)


def _settings(recipe: Recipe, pad: int | None) -> dict[str, Content]:
    """What each that may carry it would say of it."""
    if recipe.model.head is None:
        shelf = ALONE if recipe.model.encoder is None else PAIRS
        return {name: write(recipe, kind) for name, (write, kind) in shelf.items()}
    places = _places(recipe, recipe.model.encoder or {})
    return {name: write(recipe, places) for name, write in encoders.carriers(recipe, pad).items()}


def _strange(recipe: Recipe) -> list[str]:
    """Heads and sources that no architecture knows."""
    head, sources = recipe.model.head, recipe.data.sources
    found = [] if head is None or head["kind"] in encoders.SHAPES else [f"model.head: {head['kind']}"]
    if not sources:
        return found
    first = next(iter(sources.values()))
    picture: Mapping[str, Any] = first if isinstance(first, dict) else {"kind": first}
    front = (recipe.model.encoder or {}).get("front") or {}
    seen = len(sources) == 1 and picture["kind"] == "image"
    if not seen or front.get("kind") != "patches" or head is None or head["kind"] != "classifier":
        return [*found, "data.sources: only pictures in patches, for one label each, are known there"]
    wanted = {"fitted": "stretch", "width": None}
    return [*found, *(_told(key, picture[key], one) for key, one in wanted.items() if picture[key] != one)]


def _unfit(where: str, reasons: list[str], carrier: str) -> InputError:
    return InputError(
        f"no Hugging Face architecture can carry this model: {'; '.join(reasons)}",
        where=where,
        remedy=f"nearest is {carrier}; --to onnx carries most models, and --to bundle moves any",
    )


def _read(name: str, content: Content, recipe: Recipe, where: str) -> tuple[Family | None, list[str]]:
    """As the importer reads these settings, and what comes out different."""
    settings, names = Settings(content, where), () if content.get("tie_word_embeddings", True) else (t5.OUTPUT,)
    names = (vit.SECOND_ROW,) if content["model_type"] == "deit" else names
    try:
        family = {**FAMILIES, **vit.FAMILIES}.get(name) or t5.family(settings, names)
        made = family.model(settings, names)
    except InputError as error:
        return None, [error.problem]
    return family, _differences(recipe.model, made)


def _differences(ours: ModelRecipe, made: Mapping[str, Any]) -> list[str]:
    found = []
    for side, contract in (("encoder", contracts.Encoder), ("decoder", contracts.Decoder)):
        mine = getattr(ours, side)
        if mine is not None:
            given = dict(made[side])
            front, own_front = given.pop("front", None), mine.get("front")
            if front is not None and own_front is not None:
                front = {**complete(contracts.FrontEnd, front, side), "shape": own_front["shape"]}
            theirs = {**_plain(complete(contract, given, side)), **({} if front is None else {"front": front})}
            own = _plain(mine)
            found += [_told(f"{side}.{key}", own[key], theirs.get(key)) for key in own if own[key] != theirs.get(key)]
    if ours.head is not None and ours.head["kind"] != "embedder":  # how vectors are made of rows is told beside
        theirs = complete(contracts.Head, made["head"], "head")
        own = {key: value for key, value in ours.head.items() if key not in LEARNING}
        found += [_told(f"head.{key}", own[key], theirs.get(key)) for key in own if own[key] != theirs.get(key)]
    usuals = {
        "tie": "none",
        "scale_embedding": True,
        "share": "none",
        "copy": None,
        "source_eos": True,
        "output": "plain",
    }
    for key, usual in usuals.items():
        wanted = made.get(key, usual)
        if getattr(ours, key) != wanted:
            found.append(_told(key, getattr(ours, key), wanted))
    return found


def _told(key: str, ours: Any, theirs: Any) -> str:
    return f"{key}: {ours} does not fit, {theirs} would"


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a part computes: defaults that mean the same written out, what only training knows left out."""
    spec = {key: value for key, value in part.items() if key not in LEARNING}
    spec["norm_eps"] = spec["norm_eps"] or EPSILON.get(spec["norm_kind"])
    spec["head_width"] = spec["head_width"] or spec["width"] // spec["heads"]
    spec["kv_heads"] = spec["kv_heads"] or spec["heads"]
    position = dict(spec["position"])
    if position["kind"] == "sinusoidal" and spec["width"] % 2 == 0:
        position["halves"] = True  # the same waves in another order, and so is every weight: see tensors.py
    spec["position"] = position
    return spec
