"""A Hugging Face folder in; a recipe, tokenizers and weights of one of our models out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce import build
from transduce.data.text import Tokenizer
from transduce.errors import InputError, nearest
from transduce.interop import bart, bert, gpt2, t5
from transduce.interop.family import Family, Settings
from transduce.interop.folder import Stored, list_weights, read_json, read_weight
from transduce.interop.settings import read_generation
from transduce.interop.tokens import Rows, Specials, read_tokenizers
from transduce.layers.outline import outlined
from transduce.recipe import Recipe, parse
from transduce.run import Run

FAMILIES: dict[str, Family] = {**bart.FAMILIES, **gpt2.FAMILIES, **bert.FAMILIES}
KNOWN = (*FAMILIES, *t5.ARCHITECTURES)
CONFIG = "config.json"
OUTPUT_BIAS = "decoder.output.layer.bias"
OF_TOKENS = (".embedding.table.weight", ".output.layer.weight", OUTPUT_BIAS)  # weights with a row for each token
LONGEST = 512  # tokens of a text in training, where positions go further


@dataclass(frozen=True)
class Imported:
    """All that a run needs."""

    recipe: Recipe
    tokenizers: tuple[Tokenizer, Tokenizer]  # source, target: the same pieces in the same order
    weights: dict[str, Tensor]


def recognises(folder: Path) -> bool:
    """Whether this looks like a folder from elsewhere rather than like a run."""
    return (folder / CONFIG).is_file() and not Run(folder).exists


def read(folder: str | Path) -> Imported:
    """Everything is checked by name and shape before any number is read."""
    folder = Path(folder)
    config = read_json(folder, CONFIG, needed=True)
    settings = Settings(config, str(folder / CONFIG))
    architecture = _architecture(settings)
    stored = list_weights(folder)
    if max(_layers(config)) > len(stored):
        raise InputError("more layers than weights", where=settings.where, remedy="fetch the folder again")
    family = FAMILIES.get(architecture) or t5.family(settings, stored)
    for copy, original in family.copies.items():  # which of the tied ones a folder keeps is its own affair
        if copy in stored and original not in stored:
            stored[original] = stored.pop(copy)
    size = settings.count("vocab_size")
    search = {**config, **read_json(folder, "generation_config.json")}
    specials = _specials(family, search, settings)
    tokenizers, rows = read_tokenizers(folder, specials, size, closes=family.form == "pairs")
    recipe = _recipe(family, settings, rows, stored, search)
    with outlined():
        network = build.build_model(recipe.model, len(rows.numbers), len(rows.numbers))
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    _check(family, stored, wanted, rows, str(folder))
    return Imported(recipe, tokenizers, _fill(family, stored, rows, wanted))


def convert(source: str | Path, new: str | Path) -> Run:
    """Writes what a folder holds as a run, like any that was trained here."""
    run = Run(Path(new))
    if run.exists or run.checkpoints.steps():
        raise InputError("there is a run here already", where=str(run.folder), remedy="give another folder")
    imported = read(source)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.save_tokenizers(*imported.tokenizers)
    run.checkpoints.save_final(0, imported.weights, {})
    run.save_recipe(imported.recipe)
    return run


def _architecture(settings: Settings) -> str:
    content = settings.content
    if content.get("auto_map") or content.get("trust_remote_code"):
        raise InputError(
            "this model asks for code of its own (auto_map), and none is ever run from a folder",
            where=settings.where,
            remedy=f"only known architectures are imported: {', '.join(KNOWN)}",
        )
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if name not in KNOWN:
        raise InputError(f"the architecture {name!r} is not known here", where=settings.where, remedy=_likely(name))
    return name


def _likely(name: str) -> str:
    close, every = nearest(name, KNOWN), f"known: {', '.join(KNOWN)}"
    return every if close.startswith("known") else f"{close} {every}"


def _layers(config: Mapping[str, Any]) -> list[int]:
    names = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "n_layer", "num_hidden_layers")
    return [config[name] for name in names if isinstance(config.get(name), int)] or [0]


def _specials(family: Family, search: Mapping[str, Any], settings: Settings) -> Specials:
    def number(name: str, fallback: str = "") -> int | None:
        value = search.get(name)
        value = search.get(fallback) if value is None else value
        if isinstance(value, list):
            if len(value) > 1:
                raise InputError(f"{name}: one token, not {value}", where=settings.where, remedy="keep the first")
            value = value[0] if value else None
        if value is not None and (not isinstance(value, int) or value < 0):
            raise InputError(f"{name}: {value!r} is no token", where=settings.where, remedy="fetch the folder again")
        return value

    if not family.starts:
        return Specials(None, number("sep_token_id"), number("pad_token_id"))
    start = number(family.starts, "pad_token_id" if family.starts.startswith("decoder") else "eos_token_id")
    return Specials(start, number("eos_token_id"), number("pad_token_id"))


def _recipe(
    family: Family,
    settings: Settings,
    rows: Rows,
    stored: Mapping[str, Stored],
    search: Mapping[str, Any],
) -> Recipe:
    model = family.model(settings, stored)
    ends = [part["position"]["longest"] for part in model.values() if _has_end(part)]
    side = {"kind": "given", "size": len(rows.numbers)}
    content: dict[str, Any] = {
        "data": {"form": family.form, "max_length": min([LONGEST, *(end - 1 for end in ends)])},
        "tokens": {"source": side, "target": side, "shared": True},
        "model": model,
    }
    if "decoder" in model:
        where = str(Path(settings.where).with_name("generation_config.json"))
        content["generation"] = read_generation(search, rows.ours, family.form == "text", where)
    else:
        content["training"] = {"objective": {"kind": "contrastive"}}
        content["evaluation"] = {"metrics": ("recall@1",)}
    return build.complete_recipe(parse(content, settings.where), settings.where)


def _has_end(part: Any) -> bool:
    return isinstance(part, Mapping) and "longest" in (part.get("position") or {})


def _check(
    family: Family, stored: Mapping[str, Stored], wanted: Mapping[str, tuple[int, ...]], rows: Rows, where: str
) -> None:
    """By names and shapes alone: what is missing, what would be dropped, what does not fit."""
    made: dict[str, Tensor] = {}
    whence: dict[str, str] = {}
    for name, one in stored.items():
        place = family.place(name)
        if place is None:
            if name in family.copies or family.ignores(name):
                continue
            raise InputError(
                f"{name} would be dropped: it has no place in this family",
                where=where,
                remedy="the folder holds another model than its config.json says, or one with additions",
            )
        for ours, tensor in place.fill(torch.empty(one.shape, device="meta")).items():
            if ours in made:
                raise InputError(f"{name} and {whence[ours]} are both {ours}", where=where)
            if ours.endswith(OF_TOKENS) and len(tensor) != rows.theirs:
                raise InputError(
                    f"{name} has {len(tensor)} rows, and config.json says vocab_size: {rows.theirs}",
                    where=where,
                    remedy="config.json and the weights belong to different models",
                )
            made[ours], whence[ours] = tensor, name
    for ours, tensor in _ordered(family.joined(made), rows, wanted).items():
        name = whence.get(ours, ours)
        if ours not in wanted:
            raise InputError(
                f"{name} would be dropped: config.json asks for no such part", where=where, remedy="fetch it again"
            )
        if tuple(tensor.shape) != wanted[ours]:
            raise InputError(
                f"{name} makes {ours} {tuple(tensor.shape)}, and config.json asks for {wanted[ours]}",
                where=where,
                remedy="config.json and the weights belong to different models",
            )
    if missing := sorted(set(wanted) - set(made) - {OUTPUT_BIAS}):
        raise InputError(f"the weights of {missing[0]} are missing", where=where, remedy="fetch the folder again")


def _ordered(weights: Mapping[str, Tensor], rows: Rows, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Rows of tokens in our order; an output bias where they have none, so that silent rows can be silent."""
    kept: dict[int, Tensor] = {}  # weights that are one stay one
    result = {}
    for name, tensor in weights.items():
        if name.endswith(OF_TOKENS):
            if id(tensor) not in kept:
                kept[id(tensor)] = rows.pick(tensor)
            tensor = kept[id(tensor)]
        result[name] = tensor
    if OUTPUT_BIAS in wanted:
        anywhere = next(iter(weights.values()))
        bias = result.get(OUTPUT_BIAS, torch.zeros(wanted[OUTPUT_BIAS], device=anywhere.device))
        result[OUTPUT_BIAS] = rows.hush(bias)
    return result


def _fill(
    family: Family, stored: Mapping[str, Stored], rows: Rows, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, one in stored.items():
        place = family.place(name)
        if place is not None:
            weights |= place.fill(read_weight(one))
        elif name in family.copies and not torch.equal(read_weight(one), read_weight(stored[family.copies[name]])):
            raise InputError(
                f"{name} differs from {family.copies[name]}, of which it should be a copy",
                where=str(one.file),
                remedy="config.json says that these weights are tied: fetch the folder again",
            )
    return _ordered(family.joined(weights), rows, wanted)
