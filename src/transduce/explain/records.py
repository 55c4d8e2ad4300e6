"""JSON records of explanations, which the components of the studio draw.

The studio answers requests with them, and a page without a server contains them: see explain/html.py.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from transduce.contracts import VisualSource
from transduce.explain.attention import READ_AT, Explanation
from transduce.explain.failures import OutputWarning, explanation_warnings
from transduce.explain.faithfulness import FRACTIONS, SIGNED


def page_record(explanations: Sequence[Explanation], name: str) -> dict[str, Any]:
    """The explanations of one model: what is known of the model, and a record of each."""
    return {
        "run": _run_record(explanations, name),
        "readings": dict(READ_AT),
        "explanations": [
            {
                "explanation": explanation_record(one, explanation_warnings(one)),
                "attention": {kind: short_floats(weights) for kind, weights in _attention(one).items()},
                "attributions": {method: attribution_record(one, method) for method in one.attributions},
                "verdict": one.verdict,
                "read_at": one.read_at,
                "pictures": [{**picture_record(each), "begin": each.begin} for each in one.visual_sources],
            }
            for one in explanations
        ],
    }


def _run_record(explanations: Sequence[Explanation], name: str) -> dict[str, Any]:
    """A row of the run selector; `model_info` of the explanations names the parts of the model."""
    info: Mapping[str, Any] = explanations[0].model_info if explanations else {}
    shape = "encoder-head" if "head" in info else "encoder-decoder" if "encoder" in info else "decoder-only"
    methods = dict.fromkeys(method for one in explanations for method in one.attributions)
    if any(_attention(one) for one in explanations) and "attention" not in methods:
        methods = {"attention": None, **methods}
    return {
        "name": name,
        "shape": shape,
        "parts": {str(part): str(kind) for part, kind in info.items() if part != "parameters"},
        "parameters": info.get("parameters"),
        "generates": shape != "encoder-head",
        "classifies": shape == "encoder-head",
        "beam": None,
        "methods": list(methods),
        "attributions": list(dict.fromkeys(method for one in explanations for method in one.attributions)),
        "trained": False,
        "examples": [{"source": one.source, "target": one.output} for one in explanations],
    }


def _attention(explained: Explanation) -> dict[str, np.ndarray]:
    """The attention weights of an explanation, L H R C, by their kind."""
    kinds = {"cross": explained.attention, "encoder": explained.self_attention}
    return {kind: weights for kind, weights in kinds.items() if weights is not None and weights.size}


def explanation_record(
    explained: Explanation,
    warnings: Sequence[OutputWarning] = (),
    kinds: Mapping[str, np.ndarray] | None = None,
    *,
    forced: bool = False,
) -> dict[str, Any]:
    """Tokens, scores, alternatives, warnings, and the sizes of the attention that can be shown."""
    kinds = _attention(explained) if kinds is None else kinds
    return {
        "source": explained.source,
        "output": explained.output,
        "forced": forced,
        "source_tokens": list(explained.source_tokens),
        "target_tokens": list(explained.target_tokens),
        "source_words": [int(word) for word in explained.source_words],
        "target_words": [int(word) for word in explained.target_words],
        "source_labels": list(explained.source_labels),
        "target_labels": list(explained.target_labels),
        "token_scores": [finite(one) for one in explained.token_scores],
        "score": finite(explained.score),
        "nbest": [{"text": text, "score": finite(score)} for text, score in explained.nbest],
        "warnings": [one.to_json() for one in warnings],
        "kinds": {kind: list(one.shape) for kind, one in kinds.items()},
    }


def attribution_record(explained: Explanation, method: str) -> dict[str, Any]:
    """An attribution with the measures of its faithfulness and one sentence that sums them up."""
    measured, swap = explained.faithfulness.get(method), explained.uniform_swap
    numbers = {} if measured is None else asdict(measured)
    return {
        "method": method,
        "rows": list(explained.target_tokens),
        "columns": list(explained.source_tokens),
        "weights": short_floats(explained.attributions[method]),
        "signed": method in SIGNED,
        "fractions": list(FRACTIONS),
        "measures": {name: finite(value) for name, value in numbers.items() if isinstance(value, float)},
        "deletion_curve": [] if measured is None else [finite(one) for one in measured.deletion_curve],
        "verdict": explained.verdict if measured is None else measured.verdict,
        "uniform_swap": None if swap is None else swap.to_json(),
    }


def picture_record(source: VisualSource) -> dict[str, Any]:
    """Raw pixels, which the page draws itself, and the grid of cells over them."""
    height, width = source.pixels.shape[:2]
    return {
        "pixels": base64.b64encode(np.ascontiguousarray(source.pixels, np.uint8).tobytes()).decode(),
        "size": [height, width],
        "grid": list(source.grid),
        "across": source.across,
        "extent": source.extent,
    }


def finite(value: float | None) -> float | None:
    """JSON has no infinity: null."""
    return float(value) if value is not None and math.isfinite(value) else None


def short_floats(array: np.ndarray) -> list[Any]:
    """Nested lists of numbers with the fewest digits that round to the same float32."""
    known = np.nan_to_num(np.asarray(array, np.float32))
    shortest: list[Any] = known.astype(str).astype(np.float64).tolist()
    return shortest
