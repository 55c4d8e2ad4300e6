"""BERT: an encoder alone, norm after, and a norm over the sum of its embeddings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from transduce.interop.family import Family, Place, Settings

LAYER = {
    "attention.self.query": "own.attention.query",
    "attention.self.key": "own.attention.key",
    "attention.self.value": "own.attention.value",
    "attention.output.dense": "own.attention.output",
    "attention.output.LayerNorm": "residuals.0.norm",
    "intermediate.dense": "feed_forward.grow",
    "output.dense": "feed_forward.shrink",
    "output.LayerNorm": "residuals.1.norm",
}
TABLE = {
    **{f"encoder.layer.*.{theirs}": f"encoder.blocks.*.{ours}" for theirs, ours in LAYER.items()},
    "embeddings.LayerNorm": "encoder.entry",
    "embeddings.position_embeddings": "encoder.position.table",
}
SEGMENTS = "segments"
SPECIAL = {
    "embeddings.word_embeddings.weight": Place(("encoder.embedding.table.weight",)),
    "embeddings.token_type_embeddings.weight": Place((SEGMENTS,)),
}


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("position_embedding_type", "absolute")
    settings.only("is_decoder", False)
    encoder = {
        "kind": "transformer",
        "layers": settings.count("num_hidden_layers"),
        "width": settings.count("hidden_size"),
        "heads": settings.count("num_attention_heads"),
        "hidden": settings.count("intermediate_size"),
        "activation": settings.activation("hidden_act", "gelu"),
        "norm": "after",
        "epsilon": settings.rate("layer_norm_eps", 1e-12),
        "embedding_norm": True,
        "position": {"kind": "learned", "longest": settings.count("max_position_embeddings", 512)},
        "dropout": settings.rate("hidden_dropout_prob"),
        "attention_dropout": settings.rate("attention_probs_dropout_prob"),
    }
    head = {"kind": "embedder", "pooling": "mean", "normalise": False}
    return {"encoder": encoder, "head": head, "scaled": False}


def _one_segment(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A text is one segment, the first: its vector is the same at every place, so it goes with the places."""
    segments = weights.pop(SEGMENTS, None)
    if segments is not None and (name := "encoder.position.table.weight") in weights:
        weights[name] = weights[name] + segments[0]
    return weights


FAMILIES = {
    "BertModel": Family(
        _model,
        TABLE,
        SPECIAL,
        # The pooler reads [CLS] for next sentences; hidden states, of which sentence vectors are made, do not need it.
        aside=("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
        joined=_one_segment,
        starts="",
    )
}
