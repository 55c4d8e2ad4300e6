"""GPT-2: a decoder alone, norm before, learned positions, matrices stored as inputs x outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from transduce.interop.huggingface.family import Family, Place, Settings

TABLE = {
    "wpe": "decoder.position.table",
    "ln_f": "decoder.norm",
    "h.*.ln_1": "decoder.blocks.*.residuals.0.norm",
    "h.*.ln_2": "decoder.blocks.*.residuals.1.norm",
}
ATTENTION, FEED = "decoder.blocks.*.own.attention", "decoder.blocks.*.feed_forward"


def _turned(weight: Tensor) -> list[Tensor]:
    return [weight.T.contiguous() if weight.dim() == 2 else weight]


def parted(number: int) -> Callable[[Tensor], list[Tensor]]:
    """One matrix for so many, such as queries, keys and values, side by side."""

    def change(joint: Tensor) -> list[Tensor]:
        parts = (joint.T if joint.dim() == 2 else joint).chunk(number, 0)
        return [part.contiguous() for part in parts]

    return change


def _turned_back(made: list[Tensor]) -> Tensor:
    return _turned(made[0])[0]


def _joint(made: list[Tensor]) -> Tensor:
    joint = torch.cat(made, 0)
    return joint.T.contiguous() if joint.dim() == 2 else joint


SPECIAL = {
    "wte.weight": Place(("decoder.embedding.table.weight", "decoder.output.layer.weight")),
    **{
        f"h.*.attn.c_attn.{leaf}": Place(
            tuple(f"{ATTENTION}.{name}.{leaf}" for name in ("query", "key", "value")), parted(3), _joint
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"h.*.{theirs}.{leaf}": Place((f"{ours}.{leaf}",), _turned, _turned_back)
        for theirs, ours in (
            ("attn.c_proj", f"{ATTENTION}.output"),
            ("mlp.c_fc", f"{FEED}.grow"),
            ("mlp.c_proj", f"{FEED}.shrink"),
        )
        for leaf in ("weight", "bias")
    },
}


def model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
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
        "ff_width": settings.count("n_inner", 4 * width),
        "activation": settings.activation("activation_function", "gelu_new"),
        "norm_eps": settings.rate("layer_norm_epsilon", 1e-5),
        "position": {"kind": "learned", "longest": settings.count("n_positions", 1024)},
        "dropout": settings.rate("resid_pdrop"),
        "attention_dropout": settings.rate("attn_pdrop"),
    }
    return {"decoder": decoder, "tie": "target", "scale_embedding": False}


FAMILIES = {
    "GPT2LMHeadModel": Family(
        model,
        TABLE,
        SPECIAL,
        copies={"lm_head.weight": "wte.weight"},
        aside=("h.*.attn.bias", "h.*.attn.masked_bias"),  # the triangle, kept as numbers
        data={"format": "text"},
        closes=False,
        starts="bos_token_id",
        prefix="transformer.",  # the first files were written without it
    )
}
