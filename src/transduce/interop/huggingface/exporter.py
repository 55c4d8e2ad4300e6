"""Export to a Hugging Face folder that the transformers library and the importer read.

Each family writes config.json from a recipe. The importer's reading of it is compared with the recipe: the first family
without a difference is taken; if there is none, the differences of the closest family are reported.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transduce import contracts
from transduce.contracts import Family
from transduce.data.tokenizers.vocabulary import GIVEN
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS
from transduce.inference import Model
from transduce.interop.huggingface import FAMILIES
from transduce.interop.huggingface.bert import SUFFIXES
from transduce.interop.huggingface.family import (
    NORM_EPS,
    TARGET_TOKENIZER,
    Config,
    Content,
    WeightMap,
    Weights,
    max_positions,
)
from transduce.interop.huggingface.generation_config import write_generation
from transduce.interop.huggingface.heads import write_labels, write_sentence_transformer
from transduce.interop.huggingface.tokenizers import write_tokenizer
from transduce.interop.huggingface.weights import (
    ExportRows,
    deinterleave,
    export_rows,
    export_weights,
    fits_output_bias,
    scale_stream,
    sinusoids,
)
from transduce.interop.model_card import FILE, model_card
from transduce.recipe import ModelRecipe, Recipe
from transduce.recipe.registry import complete
from transduce.storage import staged_folder, write_file, write_tensors

TRAINING_OPTIONS = ("dropout", "attention_dropout", "activation_dropout")  # without effect on a trained model

TARGET_FOLDER = "target"  # of the tokenizer of outputs, where it is not that of sources

MODEL_DEFAULTS = {
    "tie": "none",
    "scale_embedding": True,
    "share": "none",
    "copy": None,
    "source_eos": True,
    "output": "plain",
    "logit_cap": None,
}


@dataclass(frozen=True)
class ChosenFamily:
    """The family chosen for a model, and the config.json that describes the model."""

    architecture: str
    family: Family
    weight_map: WeightMap
    config: Content


def write_folder(model: Model, out: Path, where: str) -> Path:
    """Writes a whole folder or nothing."""
    recipe = model.recipe
    if recipe.data.sources and recipe.model.head is not None:
        return _write(out, *_image_classifier(model, where), partial(_write_card, model))
    texts = recipe.model.encoder is not None and not recipe.data.sources  # whether sources have tokens
    tokenizer = model.source if texts else model.target
    weights = _native_weights(model)
    rows = export_rows(tokenizer, weights)
    recipe, export = _choose_equivalent(recipe, weights, where, rows.special_id(PAD))
    weights = weights if recipe is model.recipe else equivalent_weights(model.recipe, recipe, weights)
    weights = export.family.simplify(weights)
    rows, target_rows = _sides(model, rows, weights, where)
    if _interleaved(recipe.model.encoder) or _interleaved(recipe.model.decoder):
        weights = deinterleave(weights)
    outputs = {name: tensor for name, tensor in weights.items() if name.startswith("decoder.")}
    inputs = {name: tensor for name, tensor in weights.items() if name not in outputs}
    ordered = rows.reorder_all(inputs) | target_rows.reorder_all(outputs)
    exported = export_weights(export.family, export.weight_map, ordered, where)
    config = {**export.config, **special_ids(export.family, target_rows), "dtype": "float32"}
    if target_rows is not rows:
        config[TARGET_TOKENIZER] = TARGET_FOLDER
    if recipe.model.encoder is not None and not recipe.model.source_eos:
        config["source_eos"] = False  # read by the importer
    config = export.family.nest(config)
    files: dict[str, Mapping[str, Any] | list[Any]] = {"config.json": config, **export.family.extra_files(recipe)}
    if recipe.model.decoder is not None:
        decoder_only = recipe.model.encoder is None
        search = write_generation(recipe.generation, target_rows, decoder_only=decoder_only)
        search |= export.family.write_prompt(recipe.generation, target_rows, model.target)
        files["generation_config.json"] = {name: value for name, value in search.items() if value is not None}
    else:
        files |= _head_files(model, config)
    exported |= export.family.constant_weights(config) | export.family.copied_weights(exported)
    max_length = (
        config.get("max_position_embeddings") or config.get("n_positions") or recipe.generation.max_source_length
    )

    def write_tokenizer_files(folder: Path) -> None:
        eos, masked = export.family.source_eos and recipe.model.source_eos, export.family.masked_lm
        write_file(folder / FILE, model_card(model, "huggingface", export.architecture))
        write_tokenizer(folder, tokenizer, rows, source_eos=eos, max_length=max_length, masked_lm=masked)
        if target_rows is not rows:
            (folder / TARGET_FOLDER).mkdir()
            write_tokenizer(folder / TARGET_FOLDER, model.target, target_rows, source_eos=True, max_length=max_length)

    return _write(out, files, exported, write_tokenizer_files)


def _sides(model: Model, rows: ExportRows, weights: Weights, where: str) -> tuple[ExportRows, ExportRows]:
    """The order of the vocabulary of each side, in tables of one size; the same twice, where they share one."""
    recipe = model.recipe.model
    both = recipe.encoder is not None and recipe.decoder is not None and not model.recipe.data.sources
    if not both or model.target.fingerprint == model.source.fingerprint:
        return rows, rows
    if model.source.kind != GIVEN:
        raise InputError(
            "tokens.shared: false does not fit, one vocabulary for both sides would",
            where=where,
            remedy="train with tokens.shared=true and model.tie=all, or use --to onnx",
        )
    if recipe.tie == "all":
        warnings.warn("only the source tokenizer is written; the target tokenizer differs from it", stacklevel=4)
        return rows, rows
    target = export_rows(model.target, weights)
    size = max(rows.size, target.size)
    return replace(rows, size=size), replace(target, size=size)


def _write(
    out: Path,
    files: Mapping[str, Any],
    weights: Weights,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> Path:
    with staged_folder(out) as part:
        for name, content in files.items():
            (part / name).parent.mkdir(exist_ok=True)
            write_file(part / name, (json.dumps(content, indent=2) + "\n").encode())
        write_more(part)
        write_tensors(part / "model.safetensors", weights, {"format": "pt"})
    return out


def _write_card(model: Model, folder: Path) -> None:
    write_file(folder / FILE, model_card(model, "huggingface", "AutoModelForImageClassification"))


def _native_weights(model: Model) -> Weights:
    """All weights; label rows of special tokens, which are never output, are zero."""
    weights = {name: tensor.detach().cpu().float() for name, tensor in model.network.state_dict().items()}
    head = model.recipe.model.head
    if head is not None and head["kind"] in ("classifier", "tagger"):
        last = max(int(name.split(".")[2]) for name in weights if name.startswith("head.layers."))
        for leaf in ("weight", "bias"):
            name = f"head.layers.{last}.{leaf}"
            weights[name] = weights[name].clone()
            weights[name][: len(SPECIALS)] = 0.0
    return weights


def _image_classifier(model: Model, where: str) -> tuple[Content, Weights]:
    """Files and weights of a model whose only tokens are its labels."""
    export = choose_family(model.recipe, where)
    weights = export_weights(export.family, export.weight_map, _native_weights(model), where)
    config = {**export.config, **write_labels(model.target), "dtype": "float32"}
    return {"config.json": config, **export.family.extra_files(model.recipe)}, weights


def _head_files(model: Model, config: Content) -> Content:
    """Files that describe the pooling of an embedder; labels of a classifier go into its config."""
    head = model.recipe.model.head or {}
    if head["kind"] == "embedder":
        return write_sentence_transformer(head, config.get("hidden_size") or config["dim"])
    if head["kind"] != "mlm":
        config |= write_labels(model.target)
    return {}


def _interleaved(part: Mapping[str, Any] | None) -> bool:
    """Whether sines and cosines of its positions alternate."""
    return part is not None and part["position"]["kind"] == "sinusoidal" and not part["position"]["halves"]


def special_ids(family: Family, rows: ExportRows) -> dict[str, int | None]:
    ids = {"vocab_size": rows.size, "pad_token_id": rows.special_id(PAD), "eos_token_id": rows.special_id(EOS)}
    if family.start_token:
        # Some configs of the transformers library have a default for the forced last token.
        forced = {"forced_eos_token_id": None} if family.source_eos else {}
        return {**ids, "bos_token_id": rows.special_id(BOS), **forced, family.start_token: rows.special_id(BOS)}
    return {**ids, "cls_token_id": rows.special_id(BOS), "sep_token_id": rows.special_id(EOS)}


def _choose_equivalent(recipe: Recipe, weights: Weights, where: str, pad_id: int | None) -> tuple[Recipe, ChosenFamily]:
    """A family of the model, or of another model that computes the same."""
    other = equivalent_recipe(recipe)
    try:
        found = choose_family(recipe, where, pad_id)
    except InputError:
        if other is None:
            raise
        return other, choose_family(other, where, pad_id)
    if other is None or fits_output_bias(found.weight_map, weights):
        return recipe, found
    try:
        return other, choose_family(other, where, pad_id)
    except InputError:
        return recipe, found


def equivalent_recipe(recipe: Recipe) -> Recipe | None:
    """The recipe with the usual number beside the variance in norms, and position tables; None: of other models."""
    parts = {side: getattr(recipe.model, side) for side in ("encoder", "decoder")}
    for part in parts.values():
        if part is None or part["kind"] != "transformer" or part.get("front") or part["norm_kind"] != "layer":
            return None
        if part["norm"] not in ("pre", "post") or part["position"]["kind"] not in ("sinusoidal", "learned"):
            return None
    if len({(part["norm"], part["norm_eps"]) for part in parts.values()}) > 1:
        return None
    update = {}
    for side, part in parts.items():
        position = part["position"]
        if position["kind"] == "sinusoidal":
            position = {"kind": "learned", "max_positions": max_positions(recipe, part), "join": position["join"]}
        update[side] = {**part, "norm_eps": None, "position": position}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


def equivalent_weights(recipe: Recipe, other: Recipe, weights: Weights) -> Weights:
    """The weights of `other`, an equivalent recipe.

    A norm of x with e beside the variance is a norm of c x with c^2 e: all that is added to the residual stream is
    multiplied by c.
    """
    tables = {}
    for side in ("encoder", "decoder"):
        part, name = getattr(recipe.model, side), f"{side}.position.embed_positions.weight"
        if name not in weights:
            tables[name] = sinusoids(part, getattr(other.model, side)["position"]["max_positions"])
    decoder = recipe.model.decoder
    assert decoder is not None
    factor = (NORM_EPS["layer"] / (decoder["norm_eps"] or NORM_EPS["layer"])) ** 0.5
    tied = recipe.model.tie != "none"
    return scale_stream({**weights, **tables}, factor, post=decoder["norm"] == "post", tied=tied)


def choose_family(recipe: Recipe, where: str, pad_id: int | None = None) -> ChosenFamily:
    """The first family that describes the recipe exactly. `pad_id`: the exported id of <pad>."""
    for part in (recipe.model.encoder, recipe.model.decoder):
        if part is not None and part["kind"] != "transformer":
            raise _unsupported(where, [f"kind: {part['kind']}"], "the Transformer")
    if reasons := _unsupported_parts(recipe):
        raise _unsupported(where, reasons, "BertModel or ViTForImageClassification")
    differences: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        content = None if family.to_config is None else family.to_config(recipe, pad_id)
        if content is None:
            continue
        weight_map, differences[name] = _compare(family, content, recipe, where)
        if weight_map is not None and not differences[name]:
            return ChosenFamily(name, family, weight_map, {"architectures": [name], **content})
    closest = min(differences, key=lambda name: len(differences[name]))
    raise _unsupported(where, differences[closest], closest)


def _unsupported_parts(recipe: Recipe) -> list[str]:
    """Heads and sources that no family has."""
    head, sources = recipe.model.head, recipe.data.sources
    reasons = [] if head is None or head["kind"] in SUFFIXES else [f"model.head: {head['kind']}"]
    if not sources:
        return reasons
    source = next(iter(sources.values()))
    image: Mapping[str, Any] = source if isinstance(source, dict) else {"kind": source}
    front = (recipe.model.encoder or {}).get("front") or {}
    if len(sources) == 1 and image["kind"] == "audio" and head is None:
        return reasons
    single_image = len(sources) == 1 and image["kind"] == "image"
    if not single_image or front.get("kind") != "patches" or (head is not None and head["kind"] != "classifier"):
        return [
            *reasons,
            "data.sources: only image patches with one label or text per image, and frames of Whisper, are supported",
        ]
    required = {"resize_mode": "stretch", "width": None}
    return [*reasons, *(_difference(key, image[key], value) for key, value in required.items() if image[key] != value)]


def _unsupported(where: str, reasons: list[str], closest: str) -> InputError:
    return InputError(
        f"no Hugging Face architecture fits this model: {'; '.join(reasons)}",
        where=where,
        remedy=f"closest is {closest}; --to onnx exports most models, and --to bundle all of them",
    )


def _compare(family: Family, content: Content, recipe: Recipe, where: str) -> tuple[WeightMap | None, list[str]]:
    """Reads config.json as the importer does, and lists the differences from the recipe."""
    config, names = Config(content, where), family.required_names(content)
    try:
        weight_map = family.weight_map(config, names)
        return weight_map, _differences(recipe.model, family.to_recipe(config, names))
    except InputError as error:
        return None, [error.problem]


def _differences(model: ModelRecipe, imported: Mapping[str, Any]) -> list[str]:
    found = []
    for side, contract in (("encoder", contracts.Encoder), ("decoder", contracts.Decoder)):
        part = getattr(model, side)
        if part is not None:
            given = dict(imported[side])
            front, own_front = given.pop("front", None), part.get("front")
            if front is not None and own_front is not None:
                front = {**complete(contracts.FrontEnd, front, side), "shape": own_front["shape"]}
            other = {**_comparable(complete(contract, given, side)), **({} if front is None else {"front": front})}
            native = _comparable(part)
            found += _different_options(side, native, other)
    if model.head is not None and model.head["kind"] != "embedder":  # pooling is written to separate files
        other = complete(contracts.Head, imported["head"], "head")
        native = {key: value for key, value in model.head.items() if key not in TRAINING_OPTIONS}
        found += _different_options("head", native, other)
    for key, default in MODEL_DEFAULTS.items():
        value = imported.get(key, default)
        # A table for each side and the output can hold tied ones; a source without </s> is the tokenizer's business.
        holds = (key == "tie" and value == "none") or (key == "source_eos" and model.encoder is not None)
        if getattr(model, key) != value and not (holds and model.decoder is not None):
            found.append(_difference(key, getattr(model, key), value))
    return found


def _different_options(part: str, native: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [
        _difference(f"{part}.{key}", native[key], other.get(key)) for key in native if native[key] != other.get(key)
    ]


def _difference(key: str, native: Any, required: Any) -> str:
    return f"{key}: {native} does not fit, {required} would"


def _comparable(part: Mapping[str, Any]) -> Content:
    """The options that decide what a part computes, with defaults written out."""
    options = {key: value for key, value in part.items() if key not in TRAINING_OPTIONS}
    options["norm_eps"] = options["norm_eps"] or NORM_EPS.get(options["norm_kind"])
    options["head_width"] = options["head_width"] or options["width"] // options["heads"]
    options["kv_heads"] = options["kv_heads"] or options["heads"]
    position = dict(options["position"])
    if position["kind"] == "sinusoidal" and options["width"] % 2 == 0:
        position["halves"] = True  # a permutation of the width, which `deinterleave` applies to the weights
    options["position"] = position
    return options
