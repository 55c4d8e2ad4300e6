"""GPT-2: a decoder alone, norm before, learned positions, matrices stored as inputs x outputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from transduce.interop.family import Family, Place, Settings

TABLE = {
    "transformer.wpe": "decoder.position.table",
    "transformer.ln_f": "decoder.norm",
    "transformer.h.*.ln_1": "decoder.blocks.*.residuals.0.norm",
    "transformer.h.*.ln_2": "decoder.blocks.*.residuals.1.norm",
}
ATTENTION, FEED = "decoder.blocks.*.own.attention", "decoder.blocks.*.feed_forward"


def _turned(weight: Tensor) -> list[Tensor]:
    return [weight.T.contiguous() if weight.dim() == 2 else weight]


def _three(joint: Tensor) -> list[Tensor]:
    """One matrix for queries, keys and values, side by side."""
    parts = (joint.T if joint.dim() == 2 else joint).chunk(3, 0)
    return [part.contiguous() for part in parts]


SPECIAL = {
    "transformer.wte.weight": Place(("decoder.embedding.table.weight", "decoder.output.layer.weight")),
    **{
        f"transformer.h.*.attn.c_attn.{leaf}": Place(
            tuple(f"{ATTENTION}.{name}.{leaf}" for name in ("query", "key", "value")), _three
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"transformer.h.*.{theirs}.{leaf}": Place((f"{ours}.{leaf}",), _turned)
        for theirs, ours in (
            ("attn.c_proj", f"{ATTENTION}.output"),
            ("mlp.c_fc", f"{FEED}.grow"),
            ("mlp.c_proj", f"{FEED}.shrink"),
        )
        for leaf in ("weight", "bias")
    },
}


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    for name, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
        ("tie_word_embeddings", True),
    ):
        settings.only(name, wanted)
    width = settings.count("n_embd")
    decoder = {
        "kind": "transformer",
        "layers": settings.count("n_layer"),
        "width": width,
        "heads": settings.count("n_head"),
        "hidden": settings.count("n_inner", 4 * width),
        "activation": settings.activation("activation_function", "gelu_new"),
        "epsilon": settings.rate("layer_norm_epsilon", 1e-5),
        "position": {"kind": "learned", "longest": settings.count("n_positions", 1024)},
        "dropout": settings.rate("resid_pdrop"),
        "attention_dropout": settings.rate("attn_pdrop"),
    }
    return {"decoder": decoder, "tie": "target", "scaled": False}


FAMILIES = {
    "GPT2LMHeadModel": Family(
        _model,
        TABLE,
        SPECIAL,
        copies={"lm_head.weight": "transformer.wte.weight"},
        aside=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),  # the triangle, kept as numbers
        form="text",
        starts="bos_token_id",
    )
}
