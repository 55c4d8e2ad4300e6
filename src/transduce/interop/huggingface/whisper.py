"""Whisper: two convolutions over log-mel frames, then the weight layout of BART with pre-norm.

Every recording is padded to thirty seconds, and a longer one is read in windows (modalities/transcription.py). A
prompt of tokens precedes the output: the spoken language, the task (transcribe, or translate into English), and the
request for no timestamps, where none are wanted.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.contracts import Family
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, nearest
from transduce.interop.huggingface import bart
from transduce.interop.huggingface.family import (
    Config,
    Content,
    TensorMap,
    WeightMap,
    Weights,
    hf_activation,
    max_positions,
)
from transduce.interop.huggingface.folder import read_json
from transduce.interop.huggingface.languages import Languages
from transduce.interop.huggingface.weights import ExportRows
from transduce.recipe import GenerationRecipe, Recipe

SINUSOIDS, STRIDE = "sinusoids", 2
ENCODER_POSITIONS, KEY_BIAS = "model.encoder.embed_positions.weight", ".k_proj.bias"
PROMPT_PARTS = ("language", "task", "timestamps")
TIMESTAMPS = re.compile(r"<\|\d+\.\d\d\|>")
TOLERANCE = 1e-2  # of the sinusoids: some tables are stored in 16 bits
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
MODULES = {
    **bart.LAYERS,
    **bart.FINAL_NORM,
    "model.encoder.conv1": "encoder.embedding.layers.0",
    "model.encoder.conv2": "encoder.embedding.layers.1",
    "model.decoder.embed_positions": "decoder.position.embed_positions",
}
TENSORS = {
    "model.decoder.embed_tokens.weight": TensorMap(("decoder.embedding.weight", "decoder.output.projection.weight")),
    ENCODER_POSITIONS: TensorMap((SINUSOIDS,)),
}


def _combine(weights: Weights) -> Weights:
    """Whisper has no key bias; it is zero here, and any value would leave the softmax over the keys unchanged."""
    table = weights.pop(SINUSOIDS, None)
    if table is not None and table.device.type != "meta":
        _check_sinusoids(table)
    for name in [name for name in weights if name.endswith(".q_proj.bias")]:
        weights.setdefault(name.replace(".q_proj.", ".k_proj."), torch.zeros_like(weights[name]))
    return weights


def _check_sinusoids(table: Tensor) -> None:
    """Encoder positions are stored in the file but computed here: a table that was changed is refused."""
    if not torch.allclose(_sinusoids(*table.shape), table.float(), atol=TOLERANCE):
        raise InputError(
            "model.encoder.embed_positions.weight holds no sinusoidal encoding",
            remedy="only Whisper's own encoder positions are supported",
        )


def _sinusoids(rows: int, width: int) -> Tensor:
    half = width // 2
    angles = torch.arange(rows)[:, None] * 10000 ** -(torch.arange(half) / max(half - 1, 1))
    return torch.cat((angles.sin(), angles.cos()), 1)


def stack_options(config: Config, side: str, activation: str = "gelu") -> Content:
    """The options of an encoder or decoder with pre-norm. `activation`: the default of the config."""
    return {
        "kind": "transformer",
        "layers": config.count(f"{side}_layers"),
        "width": config.count("d_model"),
        "heads": config.count(f"{side}_attention_heads"),
        "ff_width": config.count(f"{side}_ffn_dim"),
        "activation": config.activation("activation_function", activation),
        "norm": "pre",
        "dropout": config.rate("dropout"),
        "attention_dropout": config.rate("attention_dropout"),
        "activation_dropout": config.rate("activation_dropout"),
    }


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    config.require("scale_embedding", False)
    config.require("tie_word_embeddings", True)
    front = {"kind": "conv_subsampling", "strides": (1, STRIDE), "activation": "gelu"}
    sinusoidal = {"kind": "sinusoidal", "halves": True, "inclusive": True}
    learned = {"kind": "learned", "max_positions": config.count("max_target_positions", 448)}
    return {
        "encoder": {**stack_options(config, "encoder"), "position": sinusoidal, "front": front},
        "decoder": {**stack_options(config, "decoder"), "position": learned},
        "tie": "target",
        "scale_embedding": False,
    }


def _sound(recipe: Recipe) -> Mapping[str, Any] | None:
    """The source, if its frames are computed as those of Whisper; else None."""
    source = next(iter(recipe.data.sources.values())) if len(recipe.data.sources) == 1 else None
    if not isinstance(source, Mapping) or source["kind"] != "audio" or source["scale"] != "whisper":
        return None
    return source if source["pad_to_max"] and not source["normalise"] else None


def _frames(sound: Mapping[str, Any]) -> tuple[int, int]:
    """Samples from one frame to the next, and frames of a recording."""
    hop = round(sound["hop"] * sound["rate"] / 1000)
    return hop, int(sound["seconds"] * sound["rate"]) // hop


def _to_config(recipe: Recipe, pad_id: int | None) -> Content | None:
    encoder, decoder, sound = recipe.model.encoder, recipe.model.decoder, _sound(recipe)
    if encoder is None or decoder is None or sound is None:
        return None
    content: Content = {
        "model_type": "whisper",
        "d_model": encoder["width"],
        "num_mel_bins": sound["mels"],
        "activation_function": hf_activation(encoder),
        "max_source_positions": _frames(sound)[1] // STRIDE,
        "max_target_positions": max_positions(recipe, decoder),
        "scale_embedding": recipe.model.scale_embedding,
        "tie_word_embeddings": recipe.model.tie == "target",
        "dropout": encoder["dropout"],
        "attention_dropout": encoder["attention_dropout"],
        "activation_dropout": encoder["activation_dropout"],
        "is_encoder_decoder": True,
    }
    return content | bart.side_sizes(encoder, decoder)


def _write_preprocessing(recipe: Recipe) -> Content:
    """preprocessor_config.json"""
    sound = _sound(recipe)
    assert sound is not None
    hop, frames = _frames(sound)
    content = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": sound["mels"],
        "sampling_rate": sound["rate"],
        "hop_length": hop,
        "chunk_length": int(sound["seconds"]),
        "n_fft": round(sound["window"] * sound["rate"] / 1000),
        "n_samples": frames * hop,
        "nb_max_frames": frames,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
    return {PREPROCESSOR: content}


def _write_prompt(settings: GenerationRecipe, rows: ExportRows, tokenizer: Tokenizer) -> Content:
    """Without a language to be heard the prompt is a list of forced tokens; max_length does not count them."""
    prefix = list(settings.forced_prefix)
    times = settings.timestamps
    content: Content = {"max_length": max(settings.max_length - len(prefix), 1)}
    if times is not None:
        content["no_timestamps_token_id"] = rows.foreign_id(times["none"])
        content["max_initial_timestamp_index"] = times.get("max_initial")
    if len(prefix) < len(PROMPT_PARTS) - 1:  # English only
        return {**content, "is_multilingual": False, "forced_decoder_ids": None}
    if not settings.detected_first:
        return content
    tasks = {tokenizer.piece(prefix[1]).strip("<|>"): rows.foreign_id(prefix[1])}
    known = {tokenizer.piece(native): rows.foreign_id(native) for native in settings.detected_first}
    found = {"is_multilingual": True, "lang_to_id": known, "task_to_id": tasks, "task": next(iter(tasks))}
    return {**content, **found, "forced_decoder_ids": None}


def _position_table(config: Mapping[str, Any]) -> Weights:
    return {ENCODER_POSITIONS: _sinusoids(config["max_source_positions"], config["d_model"])}


def _zero_key_biases(weights: Weights) -> Weights:
    """A key bias adds the same to the scores of all keys, and the softmax does not change."""
    return {name: torch.zeros_like(tensor) if name.endswith(KEY_BIAS) else tensor for name, tensor in weights.items()}


def _drop_key_biases(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if not name.endswith(KEY_BIAS)}


def _read_sources(folder: Path, config: Config) -> Content:
    """data.sources: log-mel features as WhisperFeatureExtractor computes them."""
    processor = Config(read_json(folder, PROCESSOR), str(folder / PROCESSOR))
    content = read_json(folder, PREPROCESSOR) or processor.section("feature_extractor")
    extractor = Config(content, str(folder / PREPROCESSOR))
    bands, rate, hop = (
        config.count("num_mel_bins", 80),
        extractor.count("sampling_rate", 16_000),
        extractor.count("hop_length", 160),
    )
    extractor.require("feature_size", bands)
    extractor.require("dither", 0.0)
    seconds = extractor.count("chunk_length", 30)
    rows, frames = config.count("max_source_positions", 1500), seconds * rate // hop
    if frames != STRIDE * rows:
        raise InputError(
            f"{frames} frames do not make {rows} encoder positions", where=extractor.where, remedy="fetch it again"
        )
    sound = {"kind": "audio", "rate": rate, "mels": bands, "seconds": seconds, "scale": "whisper", "pad_to_max": True}
    window = 1000 * extractor.count("n_fft", 400) / rate
    return {"sound": {**sound, "window": window, "hop": 1000 * hop / rate, "normalise": False}}


def _prompt(search: Config, languages: Languages | None) -> list[int]:
    """Ids that follow the start token of every output."""
    languages = languages or Languages()
    size = search.count("vocab_size")
    forced, no_timestamps = _forced_ids(search, size), search.token("no_timestamps_token_id", size)
    end = forced.get(3) if no_timestamps is None else no_timestamps
    if search.content.get("return_timestamps"):
        warnings.warn(
            f"{search.where}: return_timestamps is ignored; `generate --timestamps` asks for them", stacklevel=2
        )
    known = search.section("lang_to_id")
    if search.content.get("is_multilingual") is False or not (known or forced):  # English only
        if languages != Languages():
            raise InputError(
                "this model has a single language",
                where=search.where,
                remedy="leave out --source-language and --target-language",
            )
        prompt = [forced.get(1) if no_timestamps is None else end]
        return [number for number in prompt if number is not None]
    first = forced.get(1) if languages == Languages() else None
    if first is None:
        first = _language_id(search, languages, size)
    return [one for one in (first, _task_id(search, languages, forced, size), end) if one is not None]


def _forced_ids(search: Config, size: int) -> dict[int, int]:
    """forced_decoder_ids: pairs of a position and a token, which may be null."""
    name = "forced_decoder_ids"
    pairs = search.content.get(name) or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise search.wrong(name, pairs, "is not a list of positions and tokens")
    given = [pair for pair in pairs if pair[1] is not None]
    listed = Config({name: [number for pair in given for number in pair]}, search.where, search.places)
    numbers = listed.tokens(name, size)
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


def _language_id(search: Config, languages: Languages, size: int) -> int:
    """The token of the spoken language."""
    given = languages.source or languages.target or search.content.get("language")
    name, known = str(given or "en"), search.section("lang_to_id")
    spelt = name if name in known else f"<|{name}|>"
    if spelt not in known:
        names = [one.strip("<|>") for one in known]
        raise InputError(f"no token is the language {name[:80]!r}", where=search.where, remedy=nearest(name, names))
    return _listed_id(search, "lang_to_id", spelt, size)


def _detected(search: Config, languages: Languages | None) -> list[int]:
    """The languages of which one is heard in each recording, where none is given."""
    size = search.count("vocab_size")
    if languages is not None or search.content.get("language") is not None or 1 in _forced_ids(search, size):
        return []
    if search.content.get("is_multilingual") is False:
        return []
    return [_listed_id(search, "lang_to_id", name, size) for name in search.section("lang_to_id")]


def _task_id(search: Config, languages: Languages, forced: Mapping[int, int], size: int) -> int | None:
    """The token of the task: transcription, or translation into English."""
    translates = languages.target == "en" != languages.source and languages.source is not None
    if languages.target not in (None, "en", languages.source) and languages.source is not None:
        problem = f"this model translates into en, not {languages.target}"
        raise InputError(problem, where=search.where, remedy="--target-language en, or none")
    task = "translate" if translates else str(search.content.get("task") or "transcribe")
    known = task in search.section("task_to_id")
    return _listed_id(search, "task_to_id", task, size) if known else forced.get(2)


def _listed_id(search: Config, table: str, name: str, size: int) -> int:
    number = Config(search.section(table), f"{search.places.get(table, search.where)}: {table}").token(name, size)
    if number is None:
        raise search.wrong(table, {name: None}, "names no token")
    return number


FAMILIES = {
    "WhisperForConditionalGeneration": Family(
        _to_recipe,
        WeightMap(
            MODULES,
            TENSORS,
            tied={"proj_out.weight": "model.decoder.embed_tokens.weight"},
            combine=_combine,
            separate=_drop_key_biases,
        ),
        _to_config,
        languages="optional",
        read_sources=_read_sources,
        modality="audio",
        prompt=_prompt,
        detected=_detected,
        hidden_tokens=TIMESTAMPS,
        constant_weights=_position_table,
        extra_files=_write_preprocessing,
        simplify=_zero_key_biases,
        write_prompt=_write_prompt,
    )
}
