"""Tokenizers, networks and schedules of a size that suits the data."""

from __future__ import annotations

from typing import Any

from transduce.autoconfig.statistics import Look, Side


def tokens_for(seen: Look) -> dict[str, Any]:
    sides = {name: tokens_of(side, seen.pairs) for name, side in (("source", seen.source), ("target", seen.target))}
    shared = seen.shared and sides["source"] == sides["target"] and sides["source"]["kind"] == "bpe"
    return {**sides, "shared": shared}


def tokens_of(side: Side, pairs: int) -> dict[str, Any]:
    if side.symbols:
        return {"kind": "words", "size": 2000}
    if side.spelt:
        return {"kind": "chars", "size": 8000}
    return pieces_for(pairs)


def pieces_for(pairs: int) -> dict[str, Any]:
    """Few pairs cannot teach many pieces: about one piece for every ten pairs, within reason."""
    return {"kind": "bpe", "size": max(1000, min(16000, pairs // 10 // 1000 * 1000))}


def recurrent(seen: Look) -> dict[str, Any]:
    """Two recurrent networks with attention: hard to beat on short strings and few pairs."""
    width = 128 if seen.pairs < 5_000 else 256
    dropout = 0.3 if seen.pairs < 20_000 else 0.2
    part = {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout}
    return {"encoder": {**part, "layers": 1}, "decoder": {**part, "layers": 1, "context": "bahdanau"}}


def transformer(seen: Look, tokens: dict[str, Any]) -> dict[str, Any]:
    """Sentences: a Transformer whose size follows the data; small corpora want small models and much dropout."""
    sizes = {50_000: (128, 4, 0.3), 500_000: (256, 4, 0.2), 5_000_000: (512, 6, 0.1)}
    width, layers, dropout = next((size for most, size in sizes.items() if seen.pairs < most), (512, 6, 0.1))
    heads = max(4, width // 64)
    part = {"kind": "transformer", "width": width, "layers": layers, "heads": heads, "ff_width": 4 * width}
    return {
        "encoder": {**part, "dropout": dropout},
        "decoder": {**part, "dropout": dropout},
        "tie": "all" if tokens["shared"] else "target",
    }


def cosine(steps: int, check: int, rate: float) -> dict[str, Any]:
    """So many updates along a cosine, after a twentieth of them to warm up; looked at every `check` updates."""
    return {
        "steps": steps,
        "optimiser": {"learning_rate": rate},
        "schedule": {"kind": "cosine", "warmup": steps // 20},
        "validate_every": check,
        "checkpoint_every": check,
    }


def training_for(seen: Look, sentences: bool) -> dict[str, Any]:
    tokens_a_pair = (
        (seen.source.words + seen.target.words) * 1.3
        if sentences
        else (seen.source.characters + (seen.target.words if seen.target.symbols else seen.target.characters))
    )
    batch = 8192 if sentences else 4096
    an_epoch = max(1, int(seen.pairs * tokens_a_pair / batch))
    steps = int(min(100_000, max(1_000, 30 * an_epoch)))
    check = max(50, min(1000, an_epoch, steps // 10))
    rate = 2e-3 if sentences else 3e-3
    return {
        "steps": steps,
        "batch_tokens": batch,
        "optimiser": {"learning_rate": rate},
        "schedule": {"kind": "inverse_sqrt" if sentences else "cosine", "warmup": max(20, min(2000, steps // 20))},
        "validate_every": check,
        "checkpoint_every": check,
        # Not the exact matches: while a hard task has none yet, they show no progress and patience runs out.
        "monitor": metrics_for(seen, sentences)[0 if sentences else 1],
        "patience": 10,
        "average_checkpoints": 5 if sentences else 1,
    }


def metrics_for(seen: Look, sentences: bool) -> list[str]:
    if sentences:
        return ["bleu", "chrf"]
    return ["exact", "wer"] if seen.target.symbols else ["exact", "cer"]
