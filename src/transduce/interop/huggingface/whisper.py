"""Whisper: two convolutions over frames of sound, then BART's layout of weights, norm before.

Every sound is heard as thirty seconds, silence added. What is asked for stands before the output as tokens: the
language that is spoken, whether it is written down or translated into English, and that no times are wanted.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.errors import InputError, nearest
from transduce.interop.huggingface import bart
from transduce.interop.huggingface.family import Family, Place, Settings
from transduce.interop.huggingface.folder import read_json
from transduce.interop.huggingface.languages import Languages

WAVES, STRIDE = "waves", 2
TIMES = re.compile(r"<\|\d+\.\d\d\|>")  # tokens that stand for times, and are no text
CLOSE = 1e-2  # to the waves: tables are also kept in 16 bits
FEATURES = "preprocessor_config.json"
TABLE = {
    **bart.TABLE,
    **bart.FINAL,
    "model.encoder.conv1": "encoder.embedding.layers.0",
    "model.encoder.conv2": "encoder.embedding.layers.1",
    "model.decoder.embed_positions": "decoder.position.table",
}
SPECIAL = {
    "model.decoder.embed_tokens.weight": Place(("decoder.embedding.table.weight", "decoder.output.layer.weight")),
    "model.encoder.embed_positions.weight": Place((WAVES,)),
}


def _joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A bias of the keys, which theirs have not, is zero: it would raise all scores of a query alike."""
    table = weights.pop(WAVES, None)
    if table is not None and table.device.type != "meta":
        _check_waves(table)
    for name in [name for name in weights if name.endswith(".query.bias")]:
        weights.setdefault(name.replace(".query.", ".key."), torch.zeros_like(weights[name]))
    return weights


def _check_waves(table: Tensor) -> None:
    """Their places of the source are kept as numbers, and are sine waves; a table that was changed is refused."""
    half = table.size(1) // 2
    angles = torch.arange(len(table))[:, None] * 10000 ** -(torch.arange(half) / max(half - 1, 1))
    if not torch.allclose(torch.cat((angles.sin(), angles.cos()), 1), table.float(), atol=CLOSE):
        raise InputError(
            "model.encoder.embed_positions.weight are no sine waves", remedy="only Whisper's own places are known here"
        )


def _part(settings: Settings, side: str) -> dict[str, Any]:
    return {
        "kind": "transformer",
        "layers": settings.count(f"{side}_layers"),
        "width": settings.count("d_model"),
        "heads": settings.count(f"{side}_attention_heads"),
        "ff_width": settings.count(f"{side}_ffn_dim"),
        "activation": settings.activation("activation_function", "gelu"),
        "norm": "pre",
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("attention_dropout"),
        "activation_dropout": settings.rate("activation_dropout"),
    }


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("scale_embedding", False)
    settings.only("tie_word_embeddings", True)
    front = {"kind": "conv_subsampling", "strides": (1, STRIDE), "activation": "gelu"}
    waves = {"kind": "sinusoidal", "halves": True, "inclusive": True}
    places = {"kind": "learned", "longest": settings.count("max_target_positions", 448)}
    return {
        "encoder": {**_part(settings, "encoder"), "position": waves, "front": front},
        "decoder": {**_part(settings, "decoder"), "position": places},
        "tie": "target",
        "scale_embedding": False,
    }


def _sources(folder: Path, settings: Settings) -> dict[str, Any]:
    """How sound is heard, in our options."""
    whole = read_json(folder, FEATURES) or read_json(folder, "processor_config.json").get("feature_extractor") or {}
    told = Settings(whole, str(folder / FEATURES))
    bands, rate, hop = (
        settings.count("num_mel_bins", 80),
        told.count("sampling_rate", 16_000),
        told.count("hop_length", 160),
    )
    told.only("feature_size", bands)
    told.only("dither", 0.0)
    seconds = told.count("chunk_length", 30)
    rows, frames = settings.count("max_source_positions", 1500), seconds * rate // hop
    if frames != STRIDE * rows:
        raise InputError(f"{frames} frames of sound do not make {rows} rows", where=told.where, remedy="fetch it again")
    sound = {"kind": "audio", "rate": rate, "mels": bands, "seconds": seconds, "scale": "whisper", "fill": True}
    window = 1000 * told.count("n_fft", 400) / rate
    return {"sound": {**sound, "window": window, "hop": 1000 * hop / rate, "normalise": False}}


def _prompt(search: Mapping[str, Any], languages: Languages | None, where: str) -> list[int]:
    """What stands after the first token of every output, in their numbers."""
    languages = languages or Languages()
    forced = {place: number for place, number in search.get("forced_decoder_ids") or [] if number is not None}
    silent = search.get("no_timestamps_token_id")
    end = [forced.get(3)] if silent is None else [silent]
    if search.get("return_timestamps"):
        warnings.warn(f"{where}: times are not written here", stacklevel=2)
    spoken, tasks = search.get("lang_to_id") or {}, search.get("task_to_id") or {}
    if search.get("is_multilingual") is False or not (spoken or forced):  # of English alone
        if languages != Languages():
            raise InputError(
                "this model knows one language", where=where, remedy="leave out --source-language and --target-language"
            )
        prompt = [forced.get(1)] if silent is None else end
        return [number for number in prompt if number is not None]
    first = forced.get(1) if languages == Languages() else None
    name = languages.source or languages.target or search.get("language")
    if first is None:
        if name is None:
            warnings.warn(
                f"{where}: which language is spoken is not told, and English is expected; "
                "transduce convert FOLDER RUN --source-language de tells another",
                stacklevel=2,
            )
        first = _spoken(str(name or "en"), spoken, where)
    translates = languages.target == "en" != languages.source and languages.source is not None
    if languages.target not in (None, "en", languages.source) and languages.source is not None:
        raise InputError(f"it translates into en, not {languages.target}", where=where, remedy="--to en, or none")
    task = "translate" if translates else search.get("task") or "transcribe"
    number = tasks.get(task, forced.get(2))
    return [one for one in (first, number, *end) if one is not None]


def _spoken(name: str, known: Mapping[str, int], where: str) -> int:
    found = known.get(name, known.get(f"<|{name}|>"))
    if found is None:
        names = [one.strip("<|>") for one in known]
        raise InputError(f"no token is the language {name!r}", where=where, remedy=nearest(name, names))
    return found


FAMILIES = {
    "WhisperForConditionalGeneration": Family(
        _model,
        TABLE,
        SPECIAL,
        copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
        joined=_joined,
        languages="may",
        sources=_sources,
        prompt=_prompt,
        hidden=TIMES,
    )
}
