"""Explanations enter; one HTML page leaves that holds everything it shows and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transduce.contracts import VisualSource
from transduce.explain.alignment import AttentionMap, combine, join_tokens


@dataclass(frozen=True, eq=False)
class Explained:
    """One input, what the model made of it, and where it looked. Tokens include the closing </s>."""

    source: str
    output: str
    source_tokens: Sequence[str]
    target_tokens: Sequence[str]
    source_words: Sequence[int]  # token -> word, -1 for </s>
    target_words: Sequence[int]
    token_scores: Sequence[float]  # natural logarithms, one for each target token
    score: float  # their sum
    attention: np.ndarray | None  # L H T S; None where the decoder does not attend
    nbest: Sequence[tuple[str, float]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # what to say about the model
    source_labels: Sequence[str] = ()  # the words; by default their tokens joined
    target_labels: Sequence[str] = ()
    scenes: Sequence[VisualSource] = ()  # what a person sees of a source that is more than text

    def __post_init__(self) -> None:
        shape = (len(self.target_tokens), len(self.source_tokens))
        if self.attention is not None and (self.attention.ndim != 4 or self.attention.shape[2:] != shape):
            raise ValueError(f"attention of shape {self.attention.shape}, tokens ask for (layers, heads, {shape})")
        if len(self.token_scores) != shape[0]:
            raise ValueError(f"{len(self.token_scores)} token scores for {shape[0]} tokens")
        if not math.isclose(sum(self.token_scores), self.score, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(f"the token scores sum to {sum(self.token_scores)}, the score is {self.score}")
        if not self.source_labels:
            object.__setattr__(self, "source_labels", join_tokens(self.source_tokens, self.source_words))
        if not self.target_labels:
            object.__setattr__(self, "target_labels", join_tokens(self.target_tokens, self.target_words))

    def map(self, layer: int | Literal["mean", "last"] = "mean", head: int | Literal["mean"] = "mean") -> AttentionMap:
        """One layer and head, or a mean of them, as a map that can be drawn, aligned or taken to words."""
        weights = combine(np.zeros((0, 0, 0, 0)) if self.attention is None else self.attention, layer, head)
        return AttentionMap(
            weights,
            self.source_tokens,
            self.target_tokens,
            self.source_words,
            self.target_words,
            self.source_labels,
            self.target_labels,
        )


def write(explanations: Sequence[Explained], path: str | Path, title: str = "Attention") -> None:
    """The page, written in one piece."""
    Path(path).write_text(render(explanations, title), encoding="utf-8")


def render(explanations: Sequence[Explained], title: str = "Attention") -> str:
    """The page as text. The browser is told to run this script and no other, and to load nothing at all."""
    here = files("transduce.explain")
    style = (here / "page.css").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(title),
        "STYLE": style,
        "DATA": embed({"title": title, "items": [_content(item) for item in explanations]}),
        "SCRIPT": script,
    }
    # Split once at the marks of the template, so that nothing inserted is ever read as a mark.
    pieces = (here / "page.html").read_text(encoding="utf-8").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embed(content: Any) -> str:
    """JSON that may stand inside a script element: whatever a text says, it cannot end the element or begin another.

    U+2028 and U+2029 end a line in older JavaScript; escaped, they are harmless everywhere.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate, from a damaged text, cannot be written as UTF-8 but can be named.
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)


def _content(item: Explained) -> dict[str, Any]:
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
        "attention": None if item.attention is None or not item.attention.size else _numbers(item.attention),
        "nbest": [{"text": text, "score": _finite(score)} for text, score in item.nbest],
        "facts": {str(name): str(value) for name, value in item.facts.items()},
        "scenes": [_scene(scene) for scene in item.scenes],
    }


def _scene(scene: VisualSource) -> dict[str, Any]:
    """Pixels as they are, so that the page paints them itself and loads nothing."""
    height, width = scene.pixels.shape[:2]
    return {
        "pixels": base64.b64encode(np.ascontiguousarray(scene.pixels, np.uint8).tobytes()).decode(),
        "size": [height, width],
        "grid": list(scene.grid),
        "begin": scene.begin,
        "across": scene.across,
        "extent": scene.extent,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON has no infinity; the page writes it out


def _numbers(array: np.ndarray) -> list[Any]:
    """Nested lists with the fewest digits that give the same 32-bit number again."""
    shortest: list[Any] = np.asarray(array, dtype=np.float32).astype(str).astype(np.float64).tolist()
    return shortest


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
