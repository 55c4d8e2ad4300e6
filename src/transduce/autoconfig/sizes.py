"""Tokenizers, networks and schedules of a size that suits the data."""

from __future__ import annotations

from typing import Any

from transduce.autoconfig.statistics import CorpusStatistics, SideStatistics


def tokens_for(statistics: CorpusStatistics) -> dict[str, Any]:
    sides = {
        name: tokens_of(side, statistics.pairs)
        for name, side in (("source", statistics.source), ("target", statistics.target))
    }
    shared = statistics.shared and sides["source"] == sides["target"] and sides["source"]["kind"] == "bpe"
    return {**sides, "shared": shared}


def tokens_of(side: SideStatistics, pairs: int) -> dict[str, Any]:
    if side.closed_vocabulary:
        return {"kind": "words", "size": 2000}
    if side.character_level:
        return {"kind": "chars", "size": 8000}
    return pieces_for(pairs)


def pieces_for(pairs: int) -> dict[str, Any]:
    """About one piece for every ten pairs, from 1,000 to 16,000."""
    return {"kind": "bpe", "size": max(1000, min(16000, pairs // 10 // 1000 * 1000))}


def recurrent(statistics: CorpusStatistics) -> dict[str, Any]:
    """Recurrent encoder-decoder with attention, for short strings and few pairs."""
    width = 128 if statistics.pairs < 5_000 else 256
    dropout = 0.3 if statistics.pairs < 20_000 else 0.2
    part = {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout}
    return {"encoder": {**part, "layers": 1}, "decoder": {**part, "layers": 1, "context": "bahdanau"}}


def transformer(statistics: CorpusStatistics, tokens: dict[str, Any]) -> dict[str, Any]:
    """Transformer for sentences. Smaller corpora get smaller models and more dropout."""
    sizes = {50_000: (128, 4, 0.3), 500_000: (256, 4, 0.2), 5_000_000: (512, 6, 0.1)}
    width, layers, dropout = next((size for most, size in sizes.items() if statistics.pairs < most), (512, 6, 0.1))
    heads = max(4, width // 64)
    part = {"kind": "transformer", "width": width, "layers": layers, "heads": heads, "ff_width": 4 * width}
    return {
        "encoder": {**part, "dropout": dropout},
        "decoder": {**part, "dropout": dropout},
        "tie": "all" if tokens["shared"] else "target",
    }


def cosine(steps: int, check: int, rate: float) -> dict[str, Any]:
    """A cosine schedule whose warm-up is a twentieth of the updates; validation every `check` updates."""
    return {
        "steps": steps,
        "optimiser": {"learning_rate": rate},
        "schedule": {"kind": "cosine", "warmup": steps // 20},
        "validate_every": check,
        "checkpoint_every": check,
    }


def training_for(statistics: CorpusStatistics, sentences: bool) -> dict[str, Any]:
    tokens_a_pair = (
        (statistics.source.words + statistics.target.words) * 1.3
        if sentences
        else (
            statistics.source.characters
            + (statistics.target.words if statistics.target.closed_vocabulary else statistics.target.characters)
        )
    )
    batch = 8192 if sentences else 4096
    an_epoch = max(1, int(statistics.pairs * tokens_a_pair / batch))
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
        # Not exact match: while a hard task has none yet, it shows no progress and patience runs out.
        "monitor": metrics_for(statistics, sentences)[0 if sentences else 1],
        "patience": 10,
        "average_checkpoints": 5 if sentences else 1,
    }


def metrics_for(statistics: CorpusStatistics, sentences: bool) -> list[str]:
    if sentences:
        return ["bleu", "chrf"]
    return ["exact", "wer"] if statistics.target.closed_vocabulary else ["exact", "cer"]
