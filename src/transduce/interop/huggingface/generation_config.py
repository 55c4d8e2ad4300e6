"""generation_config.json: search options in both directions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD
from transduce.interop.huggingface.weights import ExportRows
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
MAX_RATIO = 1000.0  # no limit by the length of the source


def read_generation(
    content: Mapping[str, Any], native_id: Callable[[int], int], decoder_only: bool, where: str
) -> dict[str, Any]:
    """The generation section of a recipe. `decoder_only`: the given text begins the output, so no token is forced."""
    ignored = [name for name, no_effect in UNSUPPORTED.items() if content.get(name) not in no_effect]
    if ignored:
        warnings.warn(f"{where}: ignored, because not supported: {', '.join(ignored)}", stacklevel=2)
    settings: dict[str, Any] = {"max_ratio": MAX_RATIO}
    beams = content.get("num_beams") or 1
    if content.get("do_sample"):
        given = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}
        settings |= {"strategy": "sample", "beam": 1}
        settings |= {native: content[hf] for hf, native in given.items() if content.get(hf) is not None}
    elif beams > 1:
        stop = content.get("early_stopping") or False
        if stop not in STOPS:
            raise InputError(f"early_stopping: {stop!r} is not supported", where=where, remedy="true, false or never")
        settings |= {"strategy": "huggingface_beam", "beam": beams, "stop": STOPS[stop]}
    else:
        settings |= {"strategy": "greedy", "beam": 1}
    for hf, native in (
        ("length_penalty", "length_penalty"),
        ("no_repeat_ngram_size", "no_repeat_ngram"),
        ("repetition_penalty", "repetition_penalty"),
    ):
        if content.get(hf) is not None:
            settings[native] = content[hf]
    return settings | _lengths(content) | _forced(content, native_id, decoder_only)


def _lengths(content: Mapping[str, Any]) -> dict[str, Any]:
    """max_length counts the start token, max_new_tokens does not."""
    found: dict[str, Any] = {}
    for name in ("max", "min"):
        new, total = content.get(f"{name}_new_tokens"), content.get(f"{name}_length")
        if new is not None:
            found[f"{name}_length"] = new
        elif total:
            found[f"{name}_length"] = max(total - 1, 0 if name == "min" else 1)
    return found


def _forced(content: Mapping[str, Any], native_id: Callable[[int], int], decoder_only: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if content.get("forced_bos_token_id") is not None and not decoder_only:
        found["forced_bos"] = native_id(content["forced_bos_token_id"])
    if content.get("forced_eos_token_id") is not None and not decoder_only:
        found["forced_eos"] = True
    words = content.get("bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        warnings.warn("bad_words_ids: only single tokens are supported", stacklevel=2)
    never = [*(content.get("suppress_tokens") or []), *(word[0] for word in words if len(word) == 1)]
    if never:
        found["suppress"] = tuple(sorted({native_id(number) for number in never}))
    if content.get("begin_suppress_tokens"):
        found["suppress_first"] = tuple(sorted({native_id(number) for number in content["begin_suppress_tokens"]}))
    return found


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
    }
    return {**content, **{name: value for name, value in optional.items() if value is not None}}
