"""ModernBERT: a pre-norm encoder with rotary positions, gated layers, and a window in all but every n-th layer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from transduce.contracts import Family
from transduce.interop.huggingface.bert import MLM_BIAS, MLM_DENSE, MLM_NORM, SUFFIXES, label_rows
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.llama import zero_biases

ATTENTION, FEED_FORWARD = "encoder.layers.*.self_attention", "encoder.layers.*.feed_forward"
MODULES = {
    "embeddings.norm": "encoder.embedding_norm",
    "layers.*.attn_norm": "encoder.layers.*.self_attention_norm",
    "layers.*.attn.Wo": f"{ATTENTION}.out_proj",
    "layers.*.mlp_norm": "encoder.layers.*.feed_forward_norm",
    "layers.*.mlp.Wo": f"{FEED_FORWARD}.fc2",
    "final_norm": "encoder.final_norm",
}
HEAD = {"head.dense": MLM_DENSE, "head.norm": MLM_NORM}  # of all three heads
OUTPUT = "head.layers.4"  # of classifier and tagger
WORD_TABLE = "embeddings.tok_embeddings.weight"
GLOBAL, LOCAL = "full_attention", "sliding_attention"
BASES = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
POOLING = {"cls": "first", "mean": "mean"}


def _chunks(parts: int) -> Any:
    def convert(joint: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in joint.chunk(parts)]

    return convert


JOINT = {
    f"layers.*.{name}.{leaf}": TensorMap(tuple(f"{part}.{leaf}" for part in parts), _chunks(len(parts)))
    for name, parts in (
        ("attn.Wqkv", tuple(f"{ATTENTION}.{one}_proj" for one in ("q", "k", "v"))),
        ("mlp.Wi", (f"{FEED_FORWARD}.fc1", f"{FEED_FORWARD}.fc_gate")),
    )
    for leaf in ("weight", "bias")
}


def _rotary(config: Config, kind: str) -> Content:
    """Version 5 of the library has a section for each kind of layer, version 4 a key."""
    sections = Config(config.section("rope_parameters"), config.where)
    rope = Config(sections.section(kind), config.where)
    rope.require("rope_type", "default")
    key, default = BASES[kind]
    base = rope.number("rope_theta", 1) or config.number(key, 1) or default
    return {"kind": "rotary", "base": float(base)}


def _global_every(config: Config, layers: int) -> int | None:
    """Every n-th layer from the first attends to all rows; None: all do."""
    kinds = config.content.get("layer_types")
    every = config.count("global_attn_every_n_layers", 3)
    if isinstance(kinds, list):
        others = [number for number, kind in enumerate(kinds) if number and kind == GLOBAL]
        every = others[0] if others else layers
        if kinds != [GLOBAL if number % every == 0 else LOCAL for number in range(layers)]:
            raise config.wrong("layer_types", kinds, "is not every n-th layer from the first")
    return None if every == 1 else every


def _biases(config: Config) -> bool:
    return any(config.flag(name) for name in ("attention_bias", "mlp_bias", "norm_bias"))


def _encoder(config: Config) -> Content:
    layers = config.count("num_hidden_layers")
    every = _global_every(config, layers)
    encoder: Content = {
        "kind": "transformer",
        "layers": layers,
        "width": config.count("hidden_size"),
        "heads": config.count("num_attention_heads"),
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation("hidden_activation", "gelu"),
        "gated": True,
        "bias": _biases(config),
        "norm_eps": config.rate("norm_eps", 1e-5),
        "embedding_norm": True,
        "first_norm": False,
        "position": _rotary(config, GLOBAL),
        "dropout": config.rate("mlp_dropout"),
        "attention_dropout": config.rate("attention_dropout"),
    }
    if every is not None:
        local = {"local_position": _rotary(config, LOCAL), "window": config.count("local_attention", 128) // 2}
        encoder |= {"global_every": every, **local}
    return encoder


def _head(config: Config, kind: str, norm_eps: float) -> Content:
    if kind == "embedder":
        return {"kind": kind, "pooling": "mean", "normalise": False}
    head = {"kind": kind, "norm_eps": norm_eps, "activation": config.activation("classifier_activation", "gelu")}
    if kind == "classifier":
        pooling = config.content.get("classifier_pooling", "cls")
        if pooling not in POOLING:
            raise config.wrong("classifier_pooling", pooling, "is not supported", f"supported: {', '.join(POOLING)}")
        head["pooling"] = POOLING[pooling]
    return head


def _weights(kind: str) -> Any:
    def weight_map(config: Config, names: Collection[str]) -> WeightMap:
        modules, tensors, tied = dict(MODULES), {WORD_TABLE: TensorMap(("encoder.embedding.weight",)), **JOINT}, {}
        if kind != "embedder":
            modules |= HEAD
        if kind == "mlm":
            tensors[WORD_TABLE] = TensorMap(("encoder.embedding.weight", "head.output.projection.weight"))
            tensors["decoder.bias"], tied = TensorMap((MLM_BIAS,)), {"decoder.weight": WORD_TABLE}
        elif kind != "embedder":
            tensors |= label_rows("classifier", OUTPUT)
        ignored = () if kind != "embedder" else tuple(f"{name}.weight" for name in HEAD)
        return WeightMap(modules, tensors, tied, ignored, combine=_combine(kind, _biases(config)), prefix="model.")

    return weight_map


def _combine(kind: str, biases: bool) -> Any:
    """Biases that the file leaves out are zero."""

    def combine(weights: Weights) -> Weights:
        if biases:
            zero_biases(weights)
        for name in [name for name in weights if name.endswith(".weight")]:
            norm = name.endswith("norm.weight") and biases
            if norm or name.startswith((f"{MLM_DENSE}.", f"{MLM_NORM}.")):
                weights.setdefault(name.replace(".weight", ".bias"), weights[name].new_zeros(len(weights[name])))
        if kind == "mlm" and (table := weights.get("encoder.embedding.weight")) is not None:
            weights.setdefault(MLM_BIAS, table.new_zeros(len(table)))
        return weights

    return combine


def _family(kind: str, **options: Any) -> Family:
    def to_recipe(config: Config, names: Collection[str]) -> Content:
        encoder = _encoder(config)
        model = {"encoder": encoder, "head": _head(config, kind, encoder["norm_eps"]), "scale_embedding": False}
        if kind == "mlm":
            config.require("tie_word_embeddings", True)
            model["tie"] = "target"
        return model

    return Family(to_recipe, _weights(kind), start_token="", **options)


FAMILIES = {
    f"ModernBert{SUFFIXES[kind]}": _family(kind, **options)
    for kind, options in (
        ("embedder", {}),
        ("mlm", {"data": {"format": "text", "noise": {"kind": "mask_tokens"}}}),
        ("classifier", {"label_kind": "labels"}),
        ("tagger", {"label_kind": "words"}),
    )
}
