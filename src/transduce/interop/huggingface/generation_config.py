"""generation_config.json: search options in both directions."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from transduce.flow import BOS, EOS, PAD
from transduce.interop.huggingface.family import Config
from transduce.interop.huggingface.weights import ExportRows, ImportRows
from transduce.recipe import GenerationRecipe

STOPS: dict[Any, str] = {False: "length", True: "full", "never": "bound"}  # early_stopping -> stop
EARLY_STOPPING = {native: hf for hf, native in STOPS.items()}
# Options without a counterpart here, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "penalty_alpha": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None,),
    "typical_p": (None, 1.0),
    "min_p": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}
MIN_TEMPERATURE = MIN_PROBABILITY = 1e-6
MAX_RATIO = 1000.0  # no limit by the length of the source


def read_generation(search: Config, rows: ImportRows, *, decoder_only: bool) -> dict[str, Any]:
    """The generation section of a recipe. `decoder_only`: the given text begins the output, so no token is forced."""
    content = search.content
    ignored = [name for name, no_effect in UNSUPPORTED.items() if content.get(name) not in no_effect]
    if ignored:
        warnings.warn(f"{search.where}: ignored, because not supported: {', '.join(ignored)}", stacklevel=2)
    settings: dict[str, Any] = {"max_ratio": MAX_RATIO}
    beams = search.integer("num_beams", 1) or 1
    if search.flag("do_sample"):
        settings |= {
            "strategy": "sample",
            "beam": 1,
            "temperature": search.number("temperature", MIN_TEMPERATURE),
            "top_k": search.integer("top_k", 0),
            "top_p": search.number("top_p", MIN_PROBABILITY, 1),
        }
    elif beams > 1:
        settings |= {"strategy": "huggingface_beam", "beam": beams, "stop": _read_stop(search)}
    else:
        settings |= {"strategy": "greedy", "beam": 1}
    settings |= {
        "length_penalty": search.number("length_penalty", 0),
        "no_repeat_ngram": search.integer("no_repeat_ngram_size", 0),
        "repetition_penalty": search.number("repetition_penalty", 1),
    }
    settings |= _read_lengths(search) | _read_tokens(search, rows, decoder_only)
    return {name: value for name, value in settings.items() if value is not None}


def _read_stop(search: Config) -> str:
    stop = search.content.get("early_stopping") or False
    if not isinstance(stop, (bool, str)) or stop not in STOPS:
        raise search.wrong("early_stopping", stop, "is not supported", "true, false or never")
    return STOPS[stop]


def _read_lengths(search: Config) -> dict[str, Any]:
    """max_length counts the start token, max_new_tokens does not."""
    found: dict[str, Any] = {}
    for name, least in (("max", 1), ("min", 0)):
        new, total = search.integer(f"{name}_new_tokens", least), search.integer(f"{name}_length", 0)
        if new is not None:
            found[f"{name}_length"] = new
        elif total:
            found[f"{name}_length"] = max(total - 1, least)
    return found


def _read_tokens(search: Config, rows: ImportRows, decoder_only: bool) -> dict[str, Any]:
    """Ids of tokens that are forced or never generated."""
    found: dict[str, Any] = {}
    size = rows.foreign_size
    start, end = (search.token(f"forced_{name}_token_id", size) for name in ("bos", "eos"))
    if start is not None and not decoder_only:
        found["forced_bos"] = rows.native_id(start)
    if end is not None and not decoder_only:
        found["forced_eos"] = True
    never = [*search.tokens("suppress_tokens", size), *_read_bad_words(search, size)]
    if never:
        found["suppress"] = tuple(sorted(set(map(rows.native_id, never))))
    if first := search.tokens("begin_suppress_tokens", size):
        found["suppress_first"] = tuple(sorted(set(map(rows.native_id, first))))
    return found


def _read_bad_words(search: Config, size: int) -> list[int]:
    name = "bad_words_ids"
    words = search.content.get(name) or []
    if not isinstance(words, list):
        raise search.wrong(name, words, "is not a list of words")
    ids = [replace(search, content={name: word}).tokens(name, size) for word in words]
    if any(len(word) != 1 for word in ids):
        warnings.warn(f"{name}: only single tokens are supported", stacklevel=2)
    return [word[0] for word in ids if len(word) == 1]


def write_generation(settings: GenerationRecipe, rows: ExportRows, *, decoder_only: bool) -> dict[str, Any]:
    """generation_config.json with exported ids. `decoder_only`: lengths count new tokens."""
    start, end, pad = rows.special_id(BOS), rows.special_id(EOS), rows.special_id(PAD)
    content: dict[str, Any] = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    if decoder_only:
        content["max_new_tokens"] = settings.max_length
    else:
        content |= {"decoder_start_token_id": start, "max_length": settings.max_length + 1}
    if settings.strategy_kind == "sample":
        content |= {"do_sample": True, "temperature": settings.temperature, "top_k": settings.top_k}
        content["top_p"] = settings.top_p
    elif settings.strategy_kind != "greedy" and settings.beam > 1:
        stop = EARLY_STOPPING[settings.stop if settings.strategy_kind == "huggingface_beam" else "bound"]
        content |= {"num_beams": settings.beam, "early_stopping": stop, "length_penalty": settings.length_penalty}
    never_output = {number for number in (start, pad) if number is not None and number != end}
    content["suppress_tokens"] = sorted(never_output | {rows.foreign_id(native) for native in settings.suppress})
    optional = {
        "min_length": settings.min_length + 1 if settings.min_length else None,
        "no_repeat_ngram_size": settings.no_repeat_ngram or None,
        "repetition_penalty": settings.repetition_penalty if settings.repetition_penalty > 1 else None,
        "begin_suppress_tokens": sorted(map(rows.foreign_id, settings.suppress_first)) or None,
        "forced_bos_token_id": None if settings.forced_bos is None else rows.foreign_id(settings.forced_bos),
        "forced_eos_token_id": end if settings.forced_eos else None,
        "forced_decoder_ids": [[n, rows.foreign_id(one)] for n, one in enumerate(settings.forced_prefix, 1)] or None,
    }
    return {**content, **{name: value for name, value in optional.items() if value is not None}}
