"""What generation_config.json says of the search in, our generation settings out, ids in our order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from transduce.errors import InputError

STOPS: dict[Any, str] = {False: "length", True: "full", "never": "bound"}
# What changes an output and has no counterpart here; each with the value that changes nothing.
UNKNOWN: dict[str, tuple[Any, ...]] = {
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
MOST_RATIO = 1000.0  # no limit by the length of the source


def read_generation(content: Mapping[str, Any], ours: Callable[[int], int], alone: bool, where: str) -> dict[str, Any]:
    """`alone`: a decoder alone, whose given text begins the output, so nothing stands before it but our <s>."""
    strange = [name for name, plain in UNKNOWN.items() if content.get(name) not in plain]
    if strange:
        warnings.warn(f"{where}: not followed here: {', '.join(strange)}", stacklevel=2)
    settings: dict[str, Any] = {"max_ratio": MOST_RATIO}
    beams = content.get("num_beams") or 1
    if content.get("do_sample"):
        given = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}
        settings |= {"strategy": "sample", "beam": 1}
        settings |= {mine: content[theirs] for theirs, mine in given.items() if content.get(theirs) is not None}
    elif beams > 1:
        stop = content.get("early_stopping") or False
        if stop not in STOPS:
            raise InputError(f"early_stopping: {stop!r}?", where=where, remedy="true, false or never")
        settings |= {"strategy": "huggingface_beam", "beam": beams, "stop": STOPS[stop]}
    else:
        settings |= {"strategy": "greedy", "beam": 1}
    for theirs, mine in (
        ("length_penalty", "length_penalty"),
        ("no_repeat_ngram_size", "no_repeat_ngram"),
        ("repetition_penalty", "repetition_penalty"),
    ):
        if content.get(theirs) is not None:
            settings[mine] = content[theirs]
    return settings | _lengths(content) | _forced(content, ours, alone)


def _lengths(content: Mapping[str, Any]) -> dict[str, Any]:
    """Their lengths count the first token, which is our <s> and no part of an output; `new` ones do not."""
    found: dict[str, Any] = {}
    for name in ("max", "min"):
        new, whole = content.get(f"{name}_new_tokens"), content.get(f"{name}_length")
        if new is not None:
            found[f"{name}_length"] = new
        elif whole:
            found[f"{name}_length"] = max(whole - 1, 0 if name == "min" else 1)
    return found


def _forced(content: Mapping[str, Any], ours: Callable[[int], int], alone: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if content.get("forced_bos_token_id") is not None and not alone:
        found["forced_bos"] = ours(content["forced_bos_token_id"])
    if content.get("forced_eos_token_id") is not None and not alone:
        found["forced_eos"] = True
    words = content.get("bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        warnings.warn("bad_words_ids: only single tokens are followed here", stacklevel=2)
    never = [*(content.get("suppress_tokens") or []), *(word[0] for word in words if len(word) == 1)]
    if never:
        found["suppress"] = tuple(sorted({ours(number) for number in never}))
    if content.get("begin_suppress_tokens"):
        found["suppress_first"] = tuple(sorted({ours(number) for number in content["begin_suppress_tokens"]}))
    return found
