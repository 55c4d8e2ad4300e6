"""Llama, Mistral and Qwen2: decoder-only models with rotary positions, RMS pre-norm and gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from transduce.contracts import Family
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap, Weights

LAYER = "decoder.layers.*"
MODULES = {
    "norm": "decoder.final_norm",
    "layers.*.input_layernorm": f"{LAYER}.self_attention_norm",
    "layers.*.post_attention_layernorm": f"{LAYER}.feed_forward_norm",
    **{f"layers.*.self_attn.{name}": f"{LAYER}.self_attention.{name}" for name in ("q_proj", "k_proj", "v_proj")},
    "layers.*.self_attn.o_proj": f"{LAYER}.self_attention.out_proj",
    # The activation is that of the gate.
    "layers.*.mlp.gate_proj": f"{LAYER}.feed_forward.fc1",
    "layers.*.mlp.up_proj": f"{LAYER}.feed_forward.fc_gate",
    "layers.*.mlp.down_proj": f"{LAYER}.feed_forward.fc2",
}
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
TABLES = ("decoder.embedding.weight", "decoder.output.projection.weight")
LINEAR = tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc_gate", "fc2"))


def rotary(config: Config, share: float = 1.0) -> Content:
    """Rotary positions. Version 5 of the library has a section for them, version 4 a key."""
    rope = Config(config.section("rope_parameters") or config.section("rope_scaling"), config.where)
    for name in ("rope_type", "type"):
        rope.require(name, "default")
    base = Config({**config.content, **rope.content}, config.where).number("rope_theta", 1)
    return {"kind": "rotary", "base": float(base or 10_000.0), "share": share}


def _biases(config: Config) -> bool:
    return config.content.get("model_type") == "qwen2" or config.flag("attention_bias") or config.flag("mlp_bias")


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.require("head_dim", width // heads)
    config.require("use_sliding_window", False)
    window = config.integer("sliding_window", 2) if config.content.get("model_type") == "mistral" else None
    decoder = {
        "kind": "transformer",
        "layers": config.count("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads),
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation("hidden_act", "silu"),
        "gated": True,
        "norm_kind": "rms",
        "norm_eps": config.rate("rms_norm_eps", 1e-6),
        "bias": _biases(config),
        "position": rotary(config),
        "window": None if window is None else window - 1,  # the token itself counts there
        "attention_dropout": config.rate("attention_dropout"),
        "dropout": 0.0,
    }
    return {"decoder": decoder, "tie": "none" if OUTPUT in names else "target", "scale_embedding": False}


def zero_biases(weights: Weights) -> Weights:
    """Layers without a bias get zeros where others have one."""
    for name in [name for name in weights if name.endswith(LINEAR)]:
        bias = name.replace(".weight", ".bias")
        weights.setdefault(bias, torch.zeros_like(weights[name][:, 0]))
    return weights


def _weight_map(config: Config, names: Collection[str]) -> WeightMap:
    tied = OUTPUT not in {name.removeprefix("model.") for name in names}
    tensors: Mapping[str, TensorMap] = {EMBEDDING: TensorMap(TABLES)}
    if not tied:
        tensors = {EMBEDDING: TensorMap(TABLES[:1]), OUTPUT: TensorMap(TABLES[1:])}
    ignored = ("layers.*.self_attn.rotary_emb.inv_freq",)
    combine = zero_biases if _biases(config) else dict
    return WeightMap(MODULES, tensors, {}, ignored, combine=combine, prefix="model.")


FAMILIES = {
    f"{name}ForCausalLM": Family(
        _to_recipe, _weight_map, data={"format": "text"}, source_eos=False, start_token="bos_token_id"
    )
    for name in ("Llama", "Mistral", "Qwen2")
}
