"""Recipes for video: captions and labels."""

from __future__ import annotations

from typing import Any

from transduce.autoconfig.sizes import cosine
from transduce.autoconfig.statistics import CorpusStatistics

VIDEO_FRAMES, VIDEO_SIZE = 8, 32
VIDEO_SOURCE = {"sources": {"video": {"kind": "video", "frames": VIDEO_FRAMES, "size": VIDEO_SIZE}}}


def _video_encoder(statistics: CorpusStatistics) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A recurrent network over the frames; the training that goes with it; its width."""
    width = 128 if statistics.pairs < 20_000 else 256
    front = {"kind": "frames", "stages": 3, "channels": 16}
    steps = int(min(50_000, max(1_000, 40 * statistics.pairs // 64)))
    training = {
        **cosine(steps, max(50, min(1000, steps // 15)), 2e-3),
        "batch_tokens": 64 * (VIDEO_FRAMES + 8),
        "objective": {"label_smoothing": 0.0},
        "patience": 15,
    }
    return {"kind": "recurrent", "cell": "gru", "width": width, "dropout": 0.1, "front": front}, training, width


def caption_videos(statistics: CorpusStatistics) -> dict[str, Any]:
    """A recurrent encoder over the frames, and a decoder with attention that generates the caption."""
    encoder, training, width = _video_encoder(statistics)
    words = {"kind": "words", "size": 30_000, "min_count": 2 if statistics.pairs >= 2000 else 1}
    return {
        "tokens": {"target": words},
        "model": {
            "encoder": encoder,
            "decoder": {"kind": "recurrent", "cell": "gru", "width": width, "dropout": 0.1, "context": "bahdanau"},
        },
        "training": {**training, "monitor": "bleu"},
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["exact", "bleu"]},
    }


def classify_videos(statistics: CorpusStatistics) -> dict[str, Any]:
    """The same encoder with a classification head."""
    encoder, training, _ = _video_encoder(statistics)
    return {
        "tokens": {"target": {"kind": "labels"}},
        "model": {"encoder": encoder, "head": {"kind": "classifier", "pooling": "mean"}},
        "training": {**training, "monitor": "accuracy"},
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "macro_f1"]},
    }
