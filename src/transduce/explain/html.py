"""Self-contained HTML page of explanations; it loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from transduce.contracts import VisualSource
from transduce.explain.attention import Explanation
from transduce.storage import replace_file


def write_page(explanations: Sequence[Explanation], path: str | Path, title: str = "Attention") -> None:
    """Writes the page to a file."""
    replace_file(path, render_page(explanations, title))


def render_page(explanations: Sequence[Explanation], title: str = "Attention") -> str:
    """The page as text. Its security policy allows only its own script and style, and no requests."""
    folder = files("transduce.explain")
    style = (folder / "page_style.css").read_text(encoding="utf-8")
    script = (folder / "page_script.js").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; base-uri 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(title),
        "STYLE": style,
        "DATA": json_for_script({"title": title, "items": [_item(one) for one in explanations]}),
        "SCRIPT": script,
    }
    # The template is split once, so that inserted text is never taken for a placeholder.
    pieces = (folder / "page_template.html").read_text(encoding="utf-8").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def notebook_frame(explanation: Explanation, height: int = 640) -> str:
    """The page in a frame of its own, so that its script and style do not meet those of the notebook."""
    page = html.escape(render_page([explanation], explanation.source))
    return f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0"></iframe>'


def json_for_script(content: Any) -> str:
    """JSON that is safe inside a script element: no text in it can end the element or start another.

    U+2028 and U+2029 end a line in older JavaScript; escaped, they are harmless everywhere.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate, from damaged text, cannot be encoded as UTF-8 but can be escaped.
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)


def _item(item: Explanation) -> dict[str, Any]:
    rows = item.rows
    return {
        "source": item.source,
        "output": item.output,
        "source_tokens": list(item.source_tokens),
        "target_tokens": list(item.target_tokens),
        "source_words": [int(word) for word in item.source_words],
        "target_words": [int(word) for word in item.target_words],
        "source_labels": list(item.source_labels),
        "target_labels": list(item.target_labels),
        "token_scores": [_finite(score) for score in item.token_scores],
        "score": _finite(item.score),
        "attention": None if rows is None or not rows.weights.size else _short_floats(rows.weights),
        "row_tokens": [] if rows is None else list(rows.tokens),
        "row_words": [] if rows is None else [int(word) for word in rows.words],
        "row_labels": [] if rows is None else list(rows.labels),
        # Rows of attribution, which come first; the others are of attention.
        "attributed": len(item.outputs) if item.attention is None and item.attributions else 0,
        "encoder_only": "head" in item.model_info,
        "nbest": [{"text": text, "score": _finite(score)} for text, score in item.nbest],
        "model_info": {str(name): str(value) for name, value in item.model_info.items()},
        "visual_sources": [_visual_source(one) for one in item.visual_sources],
    }


def _visual_source(source: VisualSource) -> dict[str, Any]:
    """Raw pixels, which the page draws itself."""
    height, width = source.pixels.shape[:2]
    return {
        "pixels": base64.b64encode(np.ascontiguousarray(source.pixels, np.uint8).tobytes()).decode(),
        "size": [height, width],
        "grid": list(source.grid),
        "begin": source.begin,
        "across": source.across,
        "extent": source.extent,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON has no infinity; the page shows null as such


def _short_floats(array: np.ndarray) -> list[Any]:
    """Nested lists of numbers with the fewest digits that round to the same float32."""
    shortest: list[Any] = np.asarray(array, dtype=np.float32).astype(str).astype(np.float64).tolist()
    return shortest


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
