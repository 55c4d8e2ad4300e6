"""Llama, Mistral, Qwen2 and T5Gemma: rotary positions, RMS norms and gated feed-forward layers.

Llama, Mistral and Qwen2 are decoders. T5Gemma has an encoder and a decoder of Gemma 2 layers: norms before and after
each sub-layer, capped attention scores and logits, and a window in some layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from transduce.contracts import Family
from transduce.interop.huggingface.family import (
    NORM_EPS,
    Config,
    Content,
    Names,
    TensorMap,
    WeightMap,
    Weights,
    hf_activation,
    max_positions,
)
from transduce.recipe import Recipe

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
EXPORTED = ("Llama", "Mistral")  # a model of Qwen2 is one of Llama with all biases
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


def _config(model_type: str) -> Callable[[Recipe, int | None], Content | None]:
    def write(recipe: Recipe, pad_id: int | None) -> Content | None:
        decoder = recipe.model.decoder
        if decoder is None or recipe.model.encoder is not None:
            return None
        content: Content = {
            "model_type": model_type,
            "hidden_size": decoder["width"],
            "num_hidden_layers": decoder["layers"],
            "num_attention_heads": decoder["heads"],
            "num_key_value_heads": decoder["kv_heads"] or decoder["heads"],
            "head_dim": decoder["head_width"] or decoder["width"] // decoder["heads"],
            "intermediate_size": decoder["ff_width"],
            "hidden_act": hf_activation(decoder),
            "rms_norm_eps": decoder["norm_eps"] or NORM_EPS["rms"],
            "max_position_embeddings": max_positions(recipe, decoder),
            "attention_dropout": decoder["attention_dropout"],
            "tie_word_embeddings": recipe.model.tie == "target",
            **hf_rotary(decoder["position"]),
        }
        if model_type == "mistral":
            return {**content, "sliding_window": None if decoder["window"] is None else decoder["window"] + 1}
        return {**content, "attention_bias": decoder["bias"], "mlp_bias": decoder["bias"]}

    return write


def hf_rotary(position: Mapping[str, Any]) -> Content:
    """The keys of version 4 and of version 5 of the library."""
    base = position.get("base", 10_000.0)
    return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


def untied_output(config: Mapping[str, Any]) -> Names:
    return () if config["tie_word_embeddings"] else (OUTPUT,)


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
    return WeightMap(MODULES, tensors, {}, ignored, combine=combine, prefix="model.", outside=(OUTPUT,))


GEMMA_SUBLAYERS = {
    "encoder": {"self_attn": "self_attention", "feedforward": "feed_forward"},
    "decoder": {"self_attn": "self_attention", "cross_attn": "cross_attention", "feedforward": "feed_forward"},
}
GEMMA_EMBEDDINGS = {side: f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")}
GEMMA_OUTPUT = "lm_head.out_proj.weight"
FULL, SLIDING = "full_attention", "sliding_attention"


def _gemma_windows(config: Config, layers: int) -> Content:
    """The window, and the layers without one, which must follow each other at one distance."""
    kinds = config.content.get("layer_types") or [SLIDING if number % 2 == 0 else FULL for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise config.wrong("layer_types", kinds, f"is not a list of {FULL} and {SLIDING}, one for each layer")
    if SLIDING not in kinds:
        return {}
    window: Content = {"window": config.count("sliding_window", 4096) - config.flag("is_decoder")}
    full = [number for number, kind in enumerate(kinds) if kind == FULL]
    if full:
        window |= {"global_first": full[0], "global_every": full[1] - full[0] if len(full) > 1 else layers}
        if full != list(range(full[0], layers, window["global_every"])):
            raise config.wrong("layer_types", kinds, "cannot be imported", f"every nth layer is {FULL}, or none")
    return window


def _gemma_biases(config: Config) -> bool:
    """Whether attention has biases on one side or both; then all linear layers get them."""
    return any(Config(config.section(side), config.where).flag("attention_bias") for side in GEMMA_SUBLAYERS)


def _gemma_stack(config: Config, model: Config) -> Content:
    """One side; `model`: the config of both."""
    layers, cap = config.count("num_hidden_layers"), config.number("attn_logit_softcapping", 1e-6)
    return {
        "kind": "transformer",
        "layers": layers,
        "width": config.count("hidden_size"),
        "heads": config.count("num_attention_heads"),
        "kv_heads": config.count("num_key_value_heads"),
        "head_width": config.count("head_dim", 256),
        "score": {"kind": "capped_dot", "cap": cap, "divisor": float(config.count("query_pre_attn_scalar", 256))},
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "gated": True,
        "norm": "sandwich",
        "norm_kind": "rms",
        "norm_eps": config.rate("rms_norm_eps", 1e-6),
        "bias": _gemma_biases(model),
        "position": rotary(config),
        "dropout": model.rate("dropout_rate"),
        "attention_dropout": model.rate("attention_dropout"),
        **_gemma_windows(config, layers),
    }


def _t5gemma(config: Config, names: Collection[str]) -> Content:
    encoder, decoder = (Config(config.section(side), f"{config.where}: {side}") for side in GEMMA_SUBLAYERS)
    return {
        "encoder": _gemma_stack(encoder, config),
        "decoder": _gemma_stack(Config({**decoder.content, "is_decoder": True}, decoder.where), config),
        "tie": "none" if GEMMA_OUTPUT in names else "target",
        "logit_cap": decoder.number("final_logit_softcapping", 1e-6),
    }


def _t5gemma_weights(config: Config, names: Collection[str]) -> WeightMap:
    modules: dict[str, str] = {}
    tied = GEMMA_OUTPUT not in names
    norms = {f"model.{side}.norm.weight": f"{side}.final_norm.weight" for side in GEMMA_SUBLAYERS}
    for side, sublayers in GEMMA_SUBLAYERS.items():
        foreign, native = f"model.{side}.layers.*", f"{side}.layers.*"
        for hf, name in sublayers.items():
            norms[f"{foreign}.pre_{hf}_layernorm.weight"] = f"{native}.{name}_norm.weight"
            norms[f"{foreign}.post_{hf}_layernorm.weight"] = f"{native}.{name}_output_norm.weight"
            if hf != "feedforward":
                modules |= {f"{foreign}.{hf}.{one}_proj": f"{native}.{name}.{one}_proj" for one in "qkv"}
                modules[f"{foreign}.{hf}.o_proj"] = f"{native}.{name}.out_proj"
        modules |= {
            f"{foreign}.mlp.{hf}_proj": f"{native}.feed_forward.{name}"
            for hf, name in (("gate", "fc1"), ("up", "fc_gate"), ("down", "fc2"))
        }
    # The weight of a norm is stored without its 1.
    tensors = {hf: TensorMap((native,), lambda weight: [weight.float() + 1]) for hf, native in norms.items()}
    tensors[GEMMA_EMBEDDINGS["encoder"]] = TensorMap(("encoder.embedding.weight",))
    tensors[GEMMA_EMBEDDINGS["decoder"]] = TensorMap(TABLES if tied else TABLES[:1])
    if not tied:
        tensors[GEMMA_OUTPUT] = TensorMap(TABLES[1:])
    return WeightMap(modules, tensors, combine=zero_biases if _gemma_biases(config) else dict)


def _gemma_tokens(config: Config) -> Config:
    """The special tokens and the vocabulary of the decoder, where the model names none; it starts with <bos>."""
    own = {name: value for name, value in config.content.items() if value is not None}
    decoder = dict(config.section("decoder"))
    start = own.get("bos_token_id", decoder.get("bos_token_id"))
    return Config({**decoder, "decoder_start_token_id": start, **own}, config.where)


FAMILIES = {
    "T5GemmaForConditionalGeneration": Family(_t5gemma, _t5gemma_weights, flatten=_gemma_tokens),
    **{
        f"{name}ForCausalLM": Family(
            _to_recipe,
            _weight_map,
            _config(name.lower()) if name in EXPORTED else None,
            data={"format": "text"},
            source_eos=False,
            start_token="bos_token_id",
            required_names=untied_output,
        )
        for name in ("Llama", "Mistral", "Qwen2")
    },
}
