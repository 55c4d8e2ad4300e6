"""OpenNMT-py: Transformers and recurrent models; vocabulary and options in the checkpoint, no </s> after a source."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.tokenizers import SpecialIds
from transduce.interop.legacy.checkpoint_process import LegacyCheckpoint
from transduce.interop.legacy.model import (
    BILINEAR,
    COMBINE,
    RECURRENT_MODULES,
    SCORE,
    LegacyModel,
    LegacyVocabulary,
    recurrent_sections,
    rename_cell,
    widen_embeddings,
    word_vocabulary,
)

ATTENTION = {"linear_query": "q_proj", "linear_keys": "k_proj", "linear_values": "v_proj", "final_linear": "out_proj"}
FEED_FORWARD = {
    "feed_forward.w_1": "feed_forward.fc1",
    "feed_forward.w_2": "feed_forward.fc2",
    "feed_forward.w_3": "feed_forward.fc_gate",
}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "gated-gelu": "gelu"}
GATED = ("silu", "gated-gelu")
SCORES = {"general": "bilinear", "dot": "dot", "mlp": "mlp"}
UNBOUNDED = {"bias": True, "activation": "none"}  # W [c; s] + b after an MLP score
BRIDGE = "states_bridge"
NORMS = {"standard": "layer", "rms": "rms"}
ROTARY = -1  # as max_relative_positions
POSITIONS: dict[str, Any] = {
    "SinusoidalInterleaved": "sinusoidal",
    "SinusoidalConcat": {"kind": "sinusoidal", "halves": True, "inclusive": True},
}


def _layer(parts: Mapping[str, str], norms: Mapping[str, str]) -> dict[str, str]:
    table = {f"{foreign}.{a}": f"{native}.{b}" for foreign, native in parts.items() for a, b in ATTENTION.items()}
    return table | FEED_FORWARD | dict(norms)


ENCODER = _layer(
    {"self_attn": "self_attention"},
    {"layer_norm": "self_attention_norm", "feed_forward.layer_norm": "feed_forward_norm"},
)
DECODER = _layer(
    {"self_attn": "self_attention", "context_attn": "cross_attention"},
    {
        "layer_norm_1": "self_attention_norm",
        "layer_norm_2": "cross_attention_norm",
        "feed_forward.layer_norm": "feed_forward_norm",
    },
)
MODULES = {
    **{f"encoder.transformer.*.{foreign}": f"encoder.layers.*.{native}" for foreign, native in ENCODER.items()},
    **{f"decoder.transformer_layers.*.{foreign}": f"decoder.layers.*.{native}" for foreign, native in DECODER.items()},
    **{f"{side}.layer_norm": f"{side}.final_norm" for side in ("encoder", "decoder")},
    **{f"{side}.embeddings.words": f"{side}.embedding" for side in ("encoder", "decoder")},
    "generator": "decoder.output.projection",
}
EMBEDDINGS = "embeddings.make_embedding."  # prefix of the embedding table and the positional encodings
SINUSOIDS = ("encoder.embeddings.pe.pe", "decoder.embeddings.pe.pe")
# Biases that later versions omit by default.
ZERO_BIASES = (*(f".{name}.bias" for name in ATTENTION.values()), ".fc1.bias", ".fc2.bias", ".fc_gate.bias")


def _stack(config: Config, side: str) -> Content:
    activation = _choose(config, "pos_ffn_activation_fn", "relu", ACTIVATIONS)
    kv_heads = config.integer("num_kv", 0) or None
    return {
        "kind": "transformer",
        "layers": config.count(f"{side[:3]}_layers"),
        "width": _width(config, side),
        "heads": config.count("heads", 8),
        "kv_heads": kv_heads,
        "ff_width": config.count("transformer_ff", 2048),
        "activation": ACTIVATIONS[activation],
        "gated": activation in GATED,
        "norm_kind": NORMS[_choose(config, "layer_norm", "standard", NORMS)],
        "norm_eps": config.rate("norm_eps", 1e-6),
        "position": _position(config),
        "dropout": _first_rate(config, "dropout"),
        "attention_dropout": _first_rate(config, "attention_dropout"),
        "activation_dropout": _first_rate(config, "dropout"),
    }


def _choose(config: Config, name: str, default: str, supported: Collection[str]) -> str:
    value = config.content.get(name) or default
    if value not in supported:
        raise config.wrong(name, value, "is not supported", f"supported: {', '.join(supported)}")
    return str(value)


def _position(config: Config) -> Any:
    if config.content.get("max_relative_positions") != ROTARY:
        config.require("max_relative_positions", 0)
        config.require("position_encoding", True)
        return POSITIONS[_choose(config, "position_encoding_type", "SinusoidalInterleaved", POSITIONS)]
    for name, value in (("position_encoding", False), ("rotary_dim", 0), ("rotary_theta", 10000)):
        config.require(name, value)
    return "rotary"


def _width(config: Config, side: str) -> int:
    """The option has several names across versions; those of one side come first."""
    names = (f"{side[:3]}_hid_size", f"{side[:3]}_rnn_size", "hidden_size", "rnn_size")
    return config.count(next((name for name in names if config.content.get(name)), "hidden_size"))


def _first_rate(config: Config, name: str) -> float:
    """A rate that changes during training is a list."""
    value = config.content.get(name)
    return Config({name: value[0] if isinstance(value, list) and value else value or 0.0}, config.where).rate(name)


def _transformer(config: Config, names: Collection[str]) -> Content:
    for name, value in (
        ("encoder_type", "transformer"),
        ("decoder_type", "transformer"),
        ("parallel_residual", False),
        ("multiquery", False),
        ("copy_attn", False),
        ("generator_function", "softmax"),
        ("sliding_window", 0),
        ("num_experts", 0),
    ):
        config.require(name, value)
    _choose(config, "self_attn_type", "scaled-dot", ("scaled-dot", "scaled-dot-flash"))
    scaled = config.content.get("max_relative_positions") != ROTARY  # the encoding of positions multiplies, if any
    every = config.flag("share_embeddings")
    tied = config.flag("share_decoder_embeddings")
    return {
        "encoder": _stack(config, "encoder"),
        "decoder": _stack(config, "decoder"),
        "tie": ("all" if every else "target") if tied else "none",
        "scale_embedding": scaled,
        "source_eos": False,
    }


def _recurrent(config: Config, names: Collection[str]) -> Content:
    for name, value in (
        ("copy_attn", False),
        ("coverage_attn", False),
        ("input_feed", 1),
        ("global_attention_function", "softmax"),
        ("generator_function", "softmax"),
    ):
        config.require(name, value)
    cell, score = config.content.get("rnn_type", "LSTM"), config.content.get("global_attention", "general")
    if cell not in ("LSTM", "GRU") or score not in SCORES:
        remedy = f"supported: LSTM and GRU; {', '.join(SCORES)}"
        raise InputError(f"{cell} with attention {score!r} cannot be imported", where=config.where, remedy=remedy)
    encoder = {
        "layers": config.count("enc_layers"),
        "width": _width(config, "encoder"),
        "bidirectional": config.content.get("encoder_type") == "brnn",
        "summary": "states",
    }
    decoder = {
        "layers": config.count("dec_layers"),
        "width": _width(config, "decoder"),
        "bridge": "relu" if config.flag("bridge") else "states",
        "context": {"kind": "luong", "score": SCORES[score], **(UNBOUNDED if score == "mlp" else {})},
    }
    shared = {"cell": cell.lower(), "dropout": _first_rate(config, "dropout")}
    model = recurrent_sections(shared, encoder, decoder)
    return model | {"tie": "target" if config.flag("share_decoder_embeddings") else "none", "source_eos": False}


def _bridge_weights(weights: Weights) -> Weights:
    """One matrix for the states of all layers (h and c by turns), of one for all h and one for all c.

    Theirs reads the states of both directions in two halves of the layers: l0 forward, l0 backward, l1 forward ...
    """
    parts = [
        (weights.pop(f"{BRIDGE}.{part}.weight"), weights.pop(f"{BRIDGE}.{part}.bias"))
        for part in range(2)
        if f"{BRIDGE}.{part}.weight" in weights and f"{BRIDGE}.{part}.bias" in weights
    ]
    hidden = weights.get("decoder.rnn.layers.0.weight_hh_l0")
    if not parts or hidden is None:
        return weights
    width, layers = hidden.size(1), sum(name.startswith("decoder.rnn.layers") and "hh" in name for name in weights) // 2
    directions = layers * width // max(len(parts[0][1]), 1)
    matrices = [torch.block_diag(*[matrix] * directions) for matrix, _ in parts]
    order = torch.arange(len(parts) * layers * width).view(layers, len(parts), width).transpose(0, 1).flatten()
    inverse = order.argsort()
    weights["decoder.bridge.weight"] = torch.block_diag(*matrices)[inverse][:, inverse]
    weights["decoder.bridge.bias"] = torch.cat([bias.repeat(directions) for _, bias in parts])[inverse]
    return weights


def _combine(weights: Weights) -> Weights:
    return widen_embeddings(_bridge_weights(dict(weights)))


def _halves(heads: int, weight: Tensor) -> list[Tensor]:
    """Rows of each head so that pairs that rotate together, neighbours there, lie in two halves."""
    rows = weight.unflatten(0, (heads, -1, 2))
    return [rows.transpose(1, 2).flatten(0, 2).contiguous()]


def _weight_map(content: Mapping[str, Any], config: Config) -> WeightMap:
    """Queries and keys with neighbours that rotate together are rearranged."""
    if content.get("max_relative_positions") != ROTARY or not content.get("rotary_interleave", True):
        return TRANSFORMER
    heads = config.count("heads", 8)
    tensors = {}
    for module, native in MODULES.items():
        kind = module.rpartition("self_attn.")[2]
        if kind in ("linear_query", "linear_keys"):
            count = heads if kind == "linear_query" else config.integer("num_kv", 0) or heads
            for leaf in ("weight", "bias"):
                tensors[f"{module}.{leaf}"] = TensorMap((f"{native}.{leaf}",), partial(_halves, count))
    return WeightMap(MODULES, tensors, ignored=SINUSOIDS)


TRANSFORMER = WeightMap(MODULES, ignored=SINUSOIDS)
RECURRENT = WeightMap(
    {
        **RECURRENT_MODULES,
        **{name: MODULES[name] for name in ("encoder.embeddings.words", "decoder.embeddings.words", "generator")},
        "decoder.attn.linear_out": COMBINE,
        "decoder.attn.v": f"{SCORE}.energy_proj",
        "encoder.bridge.*": f"{BRIDGE}.*",
    },
    {
        "decoder.attn.linear_in.weight": BILINEAR,
        "decoder.attn.linear_context.weight": TensorMap((f"{SCORE}.k_proj.weight",)),
        "decoder.attn.linear_query.weight": TensorMap((f"{SCORE}.q_proj.weight",)),
        # One bias inside the tanh: there it is that of the query.
        "decoder.attn.linear_query.bias": TensorMap((f"{SCORE}.k_proj.bias",)),
    },
    combine=_combine,
)


def _table_name(name: str) -> str:
    part, _, name = name.partition("/")
    if part == "generator":  # a layer, or the first layer of a sequence
        return f"generator.{name.removeprefix('0.')}"
    return name.replace(f"{EMBEDDINGS}emb_luts.0.", "embeddings.words.").replace(EMBEDDINGS, "embeddings.")


def read(checkpoint: LegacyCheckpoint) -> LegacyModel:
    content = checkpoint.settings.get("opt")
    if not isinstance(content, dict):
        raise InputError("the checkpoint has no opt", where=str(checkpoint.file), remedy="fetch it again")
    weights = {_table_name(name): tensor for name, tensor in checkpoint.weights.items()}
    source, target = (_side(checkpoint, side) for side in ("src", "tgt"))
    config = Config(content, str(checkpoint.file))
    to_recipe, weight_map = _transformer, _weight_map(content, config)
    if content.get("encoder_type") in ("rnn", "brnn"):
        to_recipe, weight_map = _recurrent, RECURRENT
        weights = {rename_cell(name): tensor for name, tensor in weights.items()}
        _warn_of_mixed_batches(checkpoint, config)
    return LegacyModel(to_recipe, weight_map, config, weights, source, target, ZERO_BIASES, {"beam": 5})


def _warn_of_mixed_batches(checkpoint: LegacyCheckpoint, config: Config) -> None:
    """Before version 3, whose vocabularies are lists, the bridge reads the layers of other sentences of the batch."""
    stored = checkpoint.settings.get("vocab")
    older = isinstance(stored, dict) and not isinstance(stored.get("src"), list)
    if older and config.flag("bridge") and config.count("enc_layers") > 1:
        warnings.warn(
            f"{checkpoint.file}: before version 3, OpenNMT-py mixes the states of all sentences of a batch in a bridge "
            "over several layers; outputs here are those that it gives with a batch size of 1",
            stacklevel=2,
        )


def _words(stored: Any) -> list[str] | None:
    """The words of a vocabulary: a list (version 3), or objects of torchtext as their attributes (1 and 2)."""
    if isinstance(stored, dict) and isinstance(fields := stored.get("fields"), list) and len(fields) == 1:
        stored = fields[0][1] if isinstance(fields[0], list) and len(fields[0]) == 2 else None
    if isinstance(stored, dict) and isinstance(stored.get("vocab"), dict):
        stored = stored["vocab"].get("itos")
    if isinstance(stored, list) and stored and all(isinstance(word, str) for word in stored):
        return stored
    return None


def _side(checkpoint: LegacyCheckpoint, side: str) -> LegacyVocabulary:
    stored = checkpoint.settings.get("vocab")
    vocabulary: dict[str, Any] = stored if isinstance(stored, dict) else {}
    words = _words(vocabulary.get(side))
    if words is None:
        problem = f"the vocabulary has no list of words for {side}"
        raise InputError(problem, where=str(checkpoint.file), remedy="word features cannot be imported")
    start = vocabulary.get("decoder_start_token") or "<s>"
    number = {word: index for index, word in reversed(list(enumerate(words)))}
    # No token ends a source; versions 1 and 2 have none in its vocabulary either.
    special = SpecialIds(number.get("<blank>"), number.get(start), number.get("</s>"), number.get("<unk>"))
    return word_vocabulary(words, special, str(checkpoint.file), needs_end=side != "src")
