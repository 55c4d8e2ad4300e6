"""A model in; a Hugging Face folder out, which the transformers library and our own importer read."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from transduce.data.tokenizers.vocabulary import GIVEN
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS
from transduce.inference import Model
from transduce.interop.huggingface import encoder_carriers as encoders
from transduce.interop.huggingface.architectures import Carrier, choose
from transduce.interop.huggingface.generation_config import STOPS
from transduce.interop.huggingface.row_order import Order, order_of, place_all
from transduce.interop.huggingface.tokenizer_files import write_tokenizer
from transduce.interop.huggingface.weights import halved, theirs
from transduce.recipe import GenerationRecipe
from transduce.storage import TEMPORARY, sync, write_file

STOPPING = {ours: theirs for theirs, ours in STOPS.items()}
POOLED = {"first": "cls", "mean": "mean", "max": "max", "last": "lasttoken"}


def write_folder(model: Model, out: Path, where: str) -> Path:
    """The folder is whole or absent."""
    recipe = model.recipe
    if recipe.data.sources and recipe.model.head is not None:
        return _write(out, *_seen(model, where))
    tokenizer = model.target if recipe.model.encoder is None else model.source
    weights = _weights(model)
    order = order_of(tokenizer, weights)
    carrier = choose(recipe, where, order.special(PAD))
    if recipe.model.decoder is not None and model.target.fingerprint != model.source.fingerprint:
        if tokenizer.kind != GIVEN:
            raise InputError(
                "tokens.shared: false does not fit, one vocabulary for both sides would",
                where=where,
                remedy="train with tokens.shared=true and model.tie=all, or use --to onnx",
            )
        warnings.warn("the tokenizer of the source is written; that of outputs, which differs, is not", stacklevel=3)
    if _turns(recipe.model.encoder) or _turns(recipe.model.decoder):
        weights = halved(weights)
    made = theirs(carrier.family, place_all(weights, order), where)
    config = {**carrier.settings, **_numbers(carrier, order), "dtype": "float32"}
    files: dict[str, Mapping[str, Any] | list[Any]] = {"config.json": config}
    if recipe.model.decoder is not None:
        files["generation_config.json"] = generation(recipe.generation, order, alone=recipe.model.encoder is None)
    else:
        made |= encoders.unread(carrier.architecture, config, carrier.family.prefix)
        files |= _around(model, config)
    longest = config.get("max_position_embeddings") or config.get("n_positions") or recipe.generation.max_source_length

    def write_texts(folder: Path) -> None:
        masked = recipe.model.head is not None and recipe.model.head["kind"] == "mlm"
        closes = carrier.family.closes
        write_tokenizer(folder, tokenizer, order, closes=closes, longest=longest, masked=masked)

    return _write(out, files, made, write_texts)


def _write(
    out: Path, files: Mapping[str, Any], made: dict[str, Tensor], more: Callable[[Path], None] = lambda folder: None
) -> Path:
    part = out.with_name(TEMPORARY + out.name)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for name, content in files.items():
            (part / name).parent.mkdir(exist_ok=True)
            write_file(part / name, (json.dumps(content, indent=2) + "\n").encode())
        more(part)
        save_file(made, part / "model.safetensors", {"format": "pt"})
        os.chmod(part / "model.safetensors", 0o644)
        sync(part / "model.safetensors")
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _weights(model: Model) -> dict[str, Tensor]:
    """All of them; the rows of special tokens among labels, which are never said, are zero."""
    weights = {name: tensor.detach().cpu().float() for name, tensor in model.network.state_dict().items()}
    head = model.recipe.model.head
    if head is not None and head["kind"] in ("classifier", "tagger"):
        last = max(int(name.split(".")[2]) for name in weights if name.startswith("head.layers."))
        for leaf in ("weight", "bias"):
            name = f"head.layers.{last}.{leaf}"
            weights[name] = weights[name].clone()
            weights[name][: len(SPECIALS)] = 0.0
    return weights


def _seen(model: Model, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The files and weights of a model of pictures, which has no tokens but its labels."""
    carrier = choose(model.recipe, where)
    made = theirs(carrier.family, _weights(model), where)
    config = {**carrier.settings, **encoders.name_labels(model.target), "dtype": "float32"}
    picture = next(iter(model.recipe.data.sources.values()))
    assert isinstance(picture, Mapping)
    return {"config.json": config, "preprocessor_config.json": encoders.look_at(picture)}, made


def _around(model: Model, config: dict[str, Any]) -> dict[str, Any]:
    """What is told of the top of an encoder of texts: how vectors are made, or labels, which go into its settings."""
    head = model.recipe.model.head or {}
    if head["kind"] == "embedder":
        return _sentences(head, config.get("hidden_size") or config["dim"])
    if head["kind"] != "mlm":
        config |= encoders.name_labels(model.target)
    return {}


def _turns(part: Mapping[str, Any] | None) -> bool:
    """Whether its waves stand turn by turn."""
    return part is not None and part["position"]["kind"] == "sinusoidal" and not part["position"]["halves"]


def _numbers(carrier: Carrier, order: Order) -> dict[str, int | None]:
    """Of special tokens, and how many there are of all."""
    found = {"vocab_size": order.size, "pad_token_id": order.special(PAD), "eos_token_id": order.special(EOS)}
    if carrier.family.starts:
        # Some settings of theirs name a forced last token where they are left out.
        forced = {"forced_eos_token_id": None} if carrier.family.closes else {}
        return {**found, "bos_token_id": order.special(BOS), **forced, carrier.family.starts: order.special(BOS)}
    return {**found, "cls_token_id": order.special(BOS), "sep_token_id": order.special(EOS)}


def generation(settings: GenerationRecipe, order: Order, *, alone: bool) -> dict[str, Any]:
    """How it searches. Their lengths count the first token; `alone`: what is given begins the output."""
    start, end, pad = order.special(BOS), order.special(EOS), order.special(PAD)
    content: dict[str, Any] = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    if alone:
        content["max_new_tokens"] = settings.max_length
    else:
        content |= {"decoder_start_token_id": start, "max_length": settings.max_length + 1}
    if settings.strategy == "sample":
        content |= {"do_sample": True, "temperature": settings.temperature, "top_k": settings.top_k}
        content["top_p"] = settings.top_p
    elif settings.strategy != "greedy" and settings.beam > 1:
        stop = STOPPING[settings.stop if settings.strategy == "huggingface_beam" else "bound"]
        content |= {"num_beams": settings.beam, "early_stopping": stop, "length_penalty": settings.length_penalty}
    silent = {number for number in (start, pad) if number is not None and number != end}  # we never say them
    content["suppress_tokens"] = sorted(silent | {order.theirs(ours) for ours in settings.suppress})
    optional = {
        "min_length": settings.min_length + 1 if settings.min_length else None,
        "no_repeat_ngram_size": settings.no_repeat_ngram or None,
        "repetition_penalty": settings.repetition_penalty if settings.repetition_penalty > 1 else None,
        "begin_suppress_tokens": sorted(map(order.theirs, settings.suppress_first)) or None,
        "forced_bos_token_id": None if settings.forced_bos is None else order.theirs(settings.forced_bos),
        "forced_eos_token_id": end if settings.forced_eos else None,
    }
    return {**content, **{name: value for name, value in optional.items() if value is not None}}


def _sentences(head: Mapping[str, Any], width: int) -> dict[str, Any]:
    """How rows become the vector of a text, as the sentence-transformers library writes it."""
    kinds = ["Transformer", "Pooling"] + (["Normalize"] if head["normalise"] else [])
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "",
         "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    pooling = {"word_embedding_dimension": width, "pooling_mode": POOLED[head["pooling"]]}
    return {"modules.json": modules, "1_Pooling/config.json": pooling}
