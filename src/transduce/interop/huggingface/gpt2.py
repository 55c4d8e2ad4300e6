"""GPT-2: a decoder-only language model with pre-norm and learned positions; matrices are stored transposed."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from transduce.contracts import Family
from transduce.interop.huggingface.family import (
    NORM_EPS,
    Config,
    Content,
    TensorMap,
    WeightMap,
    hf_activation,
    max_positions,
)
from transduce.recipe import Recipe

MODULES = {
    "wpe": "decoder.position.embed_positions",
    "ln_f": "decoder.final_norm",
    "h.*.ln_1": "decoder.layers.*.self_attention_norm",
    "h.*.ln_2": "decoder.layers.*.feed_forward_norm",
}
ATTENTION, FEED_FORWARD = "decoder.layers.*.self_attention", "decoder.layers.*.feed_forward"


def _transpose(weight: Tensor) -> list[Tensor]:
    return [weight.T.contiguous() if weight.dim() == 2 else weight]


def split_transposed(parts: int) -> Callable[[Tensor], list[Tensor]]:
    """One matrix that holds several side by side, such as queries, keys and values."""

    def convert(joint: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in (joint.T if joint.dim() == 2 else joint).chunk(parts, 0)]

    return convert


def _transpose_back(native: list[Tensor]) -> Tensor:
    return _transpose(native[0])[0]


def _concat_transposed(native: list[Tensor]) -> Tensor:
    joint = torch.cat(native, 0)
    return joint.T.contiguous() if joint.dim() == 2 else joint


TENSORS = {
    "wte.weight": TensorMap(("decoder.embedding.weight", "decoder.output.projection.weight")),
    **{
        f"h.*.attn.c_attn.{leaf}": TensorMap(
            tuple(f"{ATTENTION}.{name}.{leaf}" for name in ("q_proj", "k_proj", "v_proj")),
            split_transposed(3),
            _concat_transposed,
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"h.*.{hf}.{leaf}": TensorMap((f"{native}.{leaf}",), _transpose, _transpose_back)
        for hf, native in (
            ("attn.c_proj", f"{ATTENTION}.out_proj"),
            ("mlp.c_fc", f"{FEED_FORWARD}.fc1"),
            ("mlp.c_proj", f"{FEED_FORWARD}.fc2"),
        )
        for leaf in ("weight", "bias")
    },
}


def to_recipe(config: Config, names: Collection[str]) -> Content:
    for name, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
        ("tie_word_embeddings", True),
    ):
        config.require(name, value)
    width = config.count("n_embd")
    decoder = {
        "kind": "transformer",
        "layers": config.count("n_layer"),
        "width": width,
        "heads": config.count("n_head"),
        "ff_width": config.count("n_inner", 4 * width),
        "activation": config.activation("activation_function", "gelu_new"),
        "norm_eps": config.rate("layer_norm_epsilon", 1e-5),
        "position": {"kind": "learned", "max_positions": config.count("n_positions", 1024)},
        "dropout": config.rate("resid_pdrop"),
        "attention_dropout": config.rate("attn_pdrop"),
    }
    return {"decoder": decoder, "tie": "target", "scale_embedding": False}


def _to_config(recipe: Recipe, pad_id: int | None) -> Content | None:
    decoder = recipe.model.decoder
    if decoder is None or recipe.model.encoder is not None:
        return None
    return {
        "model_type": "gpt2",
        "n_embd": decoder["width"],
        "n_layer": decoder["layers"],
        "n_head": decoder["heads"],
        "n_inner": decoder["ff_width"],
        "n_positions": max_positions(recipe, decoder),
        "activation_function": hf_activation(decoder),
        "layer_norm_epsilon": decoder["norm_eps"] or NORM_EPS["layer"],
        "resid_pdrop": decoder["dropout"],
        "embd_pdrop": decoder["dropout"],
        "attn_pdrop": decoder["attention_dropout"],
        "tie_word_embeddings": True,
    }


FAMILIES = {
    "GPT2LMHeadModel": Family(
        to_recipe,
        WeightMap(
            MODULES,
            TENSORS,
            tied={"lm_head.weight": "wte.weight"},
            ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),  # the causal mask, stored as a buffer
            prefix="transformer.",  # the first files were written without it
        ),
        _to_config,
        data={"format": "text"},
        source_eos=False,
        start_token="bos_token_id",
    )
}
