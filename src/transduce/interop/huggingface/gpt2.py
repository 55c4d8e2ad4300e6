"""GPT-2 and GPT-NeoX: decoder-only language models with layer norms, and one matrix for queries, keys and values.

GPT-2 has learned positions, and its matrices are stored transposed. GPT-NeoX (Pythia) has rotary positions, mostly
parallel sub-layers, and one head after the other in its matrix of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from transduce.contracts import Family
from transduce.interop.huggingface.family import (
    NORM_EPS,
    Config,
    Content,
    Names,
    TensorMap,
    WeightMap,
    hf_activation,
    max_positions,
)
from transduce.interop.huggingface.llama import hf_rotary, rotary, zero_biases
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


NEOX_MODULES = {
    "final_layer_norm": "decoder.final_norm",
    "layers.*.input_layernorm": "decoder.layers.*.self_attention_norm",
    "layers.*.post_attention_layernorm": "decoder.layers.*.feed_forward_norm",
    "layers.*.attention.dense": f"{ATTENTION}.out_proj",
    "layers.*.mlp.dense_h_to_4h": f"{FEED_FORWARD}.fc1",
    "layers.*.mlp.dense_4h_to_h": f"{FEED_FORWARD}.fc2",
}
NEOX_OUTPUT = "embed_out.weight"
NEOX_CONSTANTS = ("bias", "masked_bias", "rotary_emb.inv_freq")  # of attention, in older files


def _neox_to_recipe(config: Config, names: Collection[str]) -> Content:
    rope = Config({**config.content, **config.section("rope_parameters")}, config.where)
    key = "partial_rotary_factor" if "partial_rotary_factor" in rope.content else "rotary_pct"
    share, base = rope.number(key, 0, 1), config.number("rotary_emb_base", 1)
    position = rotary(config, 0.25 if share is None else float(share))
    decoder = {
        "kind": "transformer",
        "layers": config.count("num_hidden_layers"),
        "width": config.count("hidden_size"),
        "heads": config.count("num_attention_heads"),
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation("hidden_act", "gelu"),
        "norm": "parallel" if config.flag("use_parallel_residual", True) else "pre",
        "norm_eps": config.rate("layer_norm_eps", 1e-5),
        "position": position if base is None else {**position, "base": float(base)},
        "dropout": config.rate("hidden_dropout"),
        "attention_dropout": config.rate("attention_dropout"),
    }
    return {"decoder": decoder, "tie": "none" if NEOX_OUTPUT in names else "target", "scale_embedding": False}


def _split_heads(heads: int) -> Callable[[Tensor], list[Tensor]]:
    """(H 3 K) ... -> three times (H K) ..."""

    def convert(joint: Tensor) -> list[Tensor]:
        parts = joint.unflatten(0, (heads, 3, -1)).unbind(1)
        return [part.flatten(0, 1).contiguous() for part in parts]

    return convert


def _join_heads(heads: int) -> Callable[[list[Tensor]], Tensor]:
    """The inverse of `_split_heads`."""

    def invert(parts: list[Tensor]) -> Tensor:
        return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)

    return invert


def _neox_config(recipe: Recipe, pad_id: int | None) -> Content | None:
    decoder = recipe.model.decoder
    if decoder is None or recipe.model.encoder is not None:
        return None
    rope, share = hf_rotary(decoder["position"]), decoder["position"].get("share", 1.0)
    return {
        "model_type": "gpt_neox",
        "hidden_size": decoder["width"],
        "num_hidden_layers": decoder["layers"],
        "num_attention_heads": decoder["heads"],
        "intermediate_size": decoder["ff_width"],
        "hidden_act": hf_activation(decoder),
        "use_parallel_residual": decoder["norm"] == "parallel",
        "layer_norm_eps": decoder["norm_eps"] or NORM_EPS["layer"],
        "max_position_embeddings": max_positions(recipe, decoder),
        "hidden_dropout": decoder["dropout"],
        "attention_dropout": decoder["attention_dropout"],
        "tie_word_embeddings": recipe.model.tie == "target",
        "rotary_pct": share,
        "rotary_emb_base": rope["rope_theta"],
        "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": share},
    }


def _neox_names(config: Mapping[str, Any]) -> Names:
    return () if config["tie_word_embeddings"] else (NEOX_OUTPUT,)


def _neox_weights(config: Config, names: Collection[str]) -> WeightMap:
    heads = config.count("num_attention_heads")
    tables = ("decoder.embedding.weight", "decoder.output.projection.weight")
    tensors: Mapping[str, TensorMap] = {"embed_in.weight": TensorMap(tables)}
    if NEOX_OUTPUT in names:
        tensors = {"embed_in.weight": TensorMap(tables[:1]), NEOX_OUTPUT: TensorMap(tables[1:])}
    joint = {
        f"layers.*.attention.query_key_value.{leaf}": TensorMap(
            tuple(f"{ATTENTION}.{name}.{leaf}" for name in ("q_proj", "k_proj", "v_proj")),
            _split_heads(heads),
            _join_heads(heads),
        )
        for leaf in ("weight", "bias")
    }
    ignored = tuple(f"layers.*.attention.{name}" for name in NEOX_CONSTANTS)
    return WeightMap(
        NEOX_MODULES,
        {**tensors, **joint},
        {},
        ignored,
        combine=zero_biases,
        prefix="gpt_neox.",
        outside=(NEOX_OUTPUT,),
    )


FAMILIES = {
    "GPTNeoXForCausalLM": Family(
        _neox_to_recipe,
        _neox_weights,
        _neox_config,
        data={"format": "text"},
        source_eos=False,
        start_token="bos_token_id",
        required_names=_neox_names,
    ),
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
    ),
}
