"""Tasks and their recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transduce.autoconfig.audio import heard, transcribe
from transduce.autoconfig.image import ASKED, LONGEST, PICTURED, PICTURES, ask, draw
from transduce.autoconfig.sizes import cosine, metrics_for, recurrent, tokens_for, tokens_of, training_for, transformer
from transduce.autoconfig.statistics import Look
from transduce.autoconfig.text import TEXTS
from transduce.autoconfig.video import SHOWN, caption_films, classify_films


def _generate(seen: Look) -> dict[str, Any]:
    """Pairs of texts: a decoder writes the target."""
    sentences = not (seen.source.spelt or seen.target.spelt) and not seen.target.symbols
    tokens = tokens_for(seen)
    return {
        "tokens": tokens,
        "model": transformer(seen, tokens) if sentences else recurrent(seen),
        "training": training_for(seen, sentences),
        "generation": {"beam": 5},
        "evaluation": {"metrics": metrics_for(seen, sentences)},
    }


def _label(seen: Look, target: str, head: dict[str, Any]) -> dict[str, Any]:
    """Labels: an encoder alone, with one head. Words seen once are learnt as <unk>."""
    an_epoch = max(1, int(seen.pairs * (seen.source.words + 1) / 4096))
    steps = max(300, 15 * an_epoch)
    check = max(25, min(500, steps // 15))
    return {
        "tokens": {"source": {"kind": "words", "size": 30_000, "min_count": 2}, "target": {"kind": target}},
        "model": {"encoder": {"kind": "recurrent", "width": 256, "dropout": 0.4}, "head": head},
        "training": {
            **cosine(steps, check, 2e-3),
            "batch_tokens": 4096,
            "objective": {"label_smoothing": 0.0},
            "monitor": "accuracy",
            "patience": 5,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", *_label_metrics(seen, target)]},
    }


def _label_metrics(seen: Look, target: str) -> list[str]:
    """Beside the accuracy: every label alike where there is one a line, whole spans where labels mark them."""
    if target == "labels":
        return ["macro_f1"]
    return ["span_f1"] if seen.target.marks else []


def _embed(seen: Look) -> dict[str, Any]:
    """Pairs that mean the same: one encoder for both sides, which learns to bring them together."""
    kind = tokens_of(seen.source, seen.pairs)
    an_epoch = max(1, int(seen.pairs * (seen.source.words + seen.target.words + 3) * 1.3 / 8192))
    steps = max(300, 20 * an_epoch)
    check = max(25, min(500, steps // 12))
    return {
        "tokens": {"source": kind, "target": kind, "shared": True},
        "model": {
            "encoder": {"kind": "recurrent", "width": 256, "dropout": 0.2},
            "head": {"kind": "embedder", "pooling": "mean"},
        },
        "training": {
            **cosine(steps, check, 2e-3),
            "batch_tokens": 8192,  # a large batch has many negatives
            "objective": {"kind": "contrastive"},
            "validate_examples": 2000,
            "monitor": "mrr",
            "patience": 6,
        },
        "evaluation": {"metrics": ["recall@1", "recall@10", "mrr"]},
    }


def _mask(seen: Look) -> dict[str, Any]:
    """Lines of text: an encoder learns to say which words are masked. The tokens are those of the tasks with labels,
    so that they may begin from it."""
    words = {"kind": "words", "size": 30_000, "min_count": 2}
    an_epoch = max(1, int(2 * seen.pairs * (seen.target.words + 1) / 8192))
    steps = int(min(100_000, max(1_000, 40 * an_epoch)))  # a token is asked for every seventh time: many epochs
    check = max(50, min(1000, steps // 15))
    return {
        "tokens": {"source": words, "target": words},
        "model": {
            "encoder": {**transformer(seen, {"shared": True})["encoder"], "dropout": 0.1},
            "head": {"kind": "mlm"},
            "tie": "target",
        },
        "training": {
            **cosine(steps, check, 2e-3),
            "batch_tokens": 8192,
            "objective": {"label_smoothing": 0.0},
            "patience": 10,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "perplexity"]},
    }


def _language(seen: Look) -> dict[str, Any]:
    """Text without a source: characters and a recurrent network for a book, pieces and a Transformer for a library."""
    characters = seen.pairs * seen.target.characters
    library = characters > 5_000_000
    tokens = {"kind": "bpe", "size": 8000} if library else {"kind": "chars", "size": 1000}
    batch = 16_384 if library else 8192
    steps = int(min(50_000, max(500, 20 * characters / (4 if library else 1) / batch)))
    check = max(25, min(1000, steps // 20))
    if library:
        width, layers, dropout = (512, 6, 0.1) if characters > 100_000_000 else (256, 4, 0.1)
        part = {"kind": "transformer", "heads": width // 64, "ff_width": 4 * width}
    else:
        width, layers, dropout = 256 if characters < 500_000 else 512, 2, 0.2
        part = {"kind": "recurrent", "cell": "lstm"}
    return {
        "tokens": {"target": tokens},
        "model": {"decoder": {**part, "width": width, "layers": layers, "dropout": dropout}, "tie": "target"},
        "training": {
            **cosine(steps, check, 1e-3 if library else 2e-3),
            "batch_tokens": batch,
            "objective": {"kind": "cross_entropy", "label_smoothing": 0.0},
            "patience": 5,
        },
        "generation": {"strategy": "sample", "beam": 1, "temperature": 0.8},
        "evaluation": {"metrics": ["perplexity", "word_perplexity", "bits_per_character"]},
    }


TASKS: dict[str, Callable[[Look], dict[str, Any]]] = {
    "generate": _generate,
    **TEXTS,
    "classify": lambda seen: _label(seen, "labels", {"kind": "classifier", "pooling": "max", "dropout": 0.4}),
    "tag": lambda seen: _label(seen, "words", {"kind": "tagger", "dropout": 0.4}),
    "embed": _embed,
    "entail": lambda seen: _label(seen, "labels", {"kind": "classifier", "pooling": "max", "dropout": 0.2}),
    "mask": _mask,
    "lm": _language,
    **PICTURES,
    "vqa": ask,
    "caption-videos": caption_films,
    "classify-videos": classify_films,
    "draw": draw,
    "transcribe": transcribe,
}
# What a task says of its files; `transcribe` looks at the first of them.
FORMS: dict[str, dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mask": {"format": "text", "noise": {"kind": "mask_tokens"}},
    "lm": {"format": "text", "block_size": 128},
    "summarise": {"max_length": 1000},
    **PICTURED,
    "vqa": ASKED,
    "caption-videos": SHOWN,
    "classify-videos": SHOWN,
    "draw": {"max_length": LONGEST - 100},
    "transcribe": heard,
}
# Leading columns of a TSV that make the source; None: all but the last.
INPUTS: dict[str, int | None] = {"entail": 2, "inflect": 2, "answer": 2, "converse": None}
