"""BART and its relatives: one weight layout; norms and positions differ.

Marian, BART, mBART, PLBart, MVP, Pegasus, M2M100, NLLB, Blenderbot, BlenderbotSmall, FSMT and LED, whose encoder has a
window; NLLB-MoE, some of whose layers are mixtures of experts; OPT is the decoder alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, pad

from transduce.attention.positions import Sinusoidal
from transduce.contracts import Family
from transduce.interop.huggingface.family import (
    NORM_EPS,
    Config,
    Content,
    TensorMap,
    WeightMap,
    Weights,
    hf_activation,
    max_positions,
)
from transduce.interop.huggingface.llama import zero_biases
from transduce.interop.huggingface.t5 import expert_modules, zero_router_biases
from transduce.recipe import Recipe
from transduce.recipe.registry import LARGEST

POSITION_OFFSET = 2  # rows of a learned position table before that of the first token

LAYER = {
    "self_attn.q_proj": "self_attention.q_proj",
    "self_attn.k_proj": "self_attention.k_proj",
    "self_attn.v_proj": "self_attention.v_proj",
    "self_attn.out_proj": "self_attention.out_proj",
    "self_attn_layer_norm": "self_attention_norm",
    "fc1": "feed_forward.fc1",
    "fc2": "feed_forward.fc2",
}
ENCODER = {**LAYER, "final_layer_norm": "feed_forward_norm"}
DECODER = {
    **LAYER,
    "encoder_attn.q_proj": "cross_attention.q_proj",
    "encoder_attn.k_proj": "cross_attention.k_proj",
    "encoder_attn.v_proj": "cross_attention.v_proj",
    "encoder_attn.out_proj": "cross_attention.out_proj",
    "encoder_attn_layer_norm": "cross_attention_norm",
    "final_layer_norm": "feed_forward_norm",
}
LAYERS = {
    **{f"model.encoder.layers.*.{hf}": f"encoder.layers.*.{native}" for hf, native in ENCODER.items()},
    **{f"model.decoder.layers.*.{hf}": f"decoder.layers.*.{native}" for hf, native in DECODER.items()},
}
EMBEDDING_NORM = {f"model.{side}.layernorm_embedding": f"{side}.embedding_norm" for side in ("encoder", "decoder")}
FINAL_NORM = {f"model.{side}.layer_norm": f"{side}.final_norm" for side in ("encoder", "decoder")}

TOKENS = TensorMap(("encoder.embedding.weight", "decoder.embedding.weight", "decoder.output.projection.weight"))
OUTPUT = {
    "model.shared.weight": TOKENS,
    "final_logits_bias": TensorMap(
        ("decoder.output.projection.bias",), lambda bias: [bias.flatten()], lambda native: native[0][None]
    ),
}
TIED = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
# Sinusoidal encodings are computed, never read.
TIED_TABLES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
STORED_POSITIONS = "stored_positions"  # a key that exports write
SINUSOIDS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


def _drop_offset(table: Tensor) -> list[Tensor]:
    return [table[POSITION_OFFSET:]]


def _add_offset(native: list[Tensor]) -> Tensor:
    return pad(native[0], (0, 0, POSITION_OFFSET, 0))


POSITIONS = {
    f"model.{side}.embed_positions.weight": TensorMap(
        (f"{side}.position.embed_positions.weight",), _drop_offset, _add_offset
    )
    for side in ("encoder", "decoder")
}


PLAIN_POSITIONS = {
    f"model.{side}.embed_positions": f"{side}.position.embed_positions" for side in ("encoder", "decoder")
}
Norm = Literal["pre", "post"]
FamilyWeights = Callable[[Config, Collection[str]], WeightMap]
SINUSOIDAL = {"kind": "sinusoidal", "halves": True}


def _stack(config: Config, side: str, norm: Norm, sinusoidal: Content | None) -> Content:
    learned = {"kind": "learned", "max_positions": config.count("max_position_embeddings", 1024)}
    return {
        "kind": "transformer",
        "layers": config.count(f"{side}_layers"),
        "width": config.count("d_model"),
        "heads": config.count(f"{side}_attention_heads"),
        "ff_width": config.count(f"{side}_ffn_dim"),
        "activation": config.activation("activation_function", "gelu"),
        "norm": norm,
        "embedding_norm": sinusoidal is None,
        "position": sinusoidal or learned,
        "dropout": config.rate("dropout"),
        "attention_dropout": config.rate("attention_dropout"),
        "activation_dropout": config.rate("activation_dropout"),
    }


def pre_norm_stack(config: Config, side: str) -> Content:
    """One side of mBART: learned positions, and a norm of embeddings."""
    return _stack(config, side, "pre", None)


def _model(config: Config, norm: Norm, sinusoidal: Content | None = None, *, tied: bool = True) -> Content:
    """Positions are learned unless `sinusoidal` is given."""
    if tied:
        config.require("tie_word_embeddings", True)
        config.require("share_encoder_decoder_embeddings", True)
    return {
        "encoder": _stack(config, "encoder", norm, sinusoidal),
        "decoder": _stack(config, "decoder", norm, sinusoidal),
        "tie": "all" if tied else "none",
        "scale_embedding": config.flag("scale_embedding"),
    }


def _is_tied(config: Config) -> bool:
    """Whether one table is the embedding of both sides and the output."""
    return config.flag("tie_word_embeddings", True)


def _sinusoidal(config: Config) -> Content:
    """Sinusoids of the library, or the stored tables where an export says that they are others."""
    if config.flag(STORED_POSITIONS):
        return {"kind": "learned", "max_positions": config.count("max_position_embeddings", 1024)}
    return SINUSOIDAL


def _marian(config: Config, names: Collection[str]) -> Content:
    config.require("normalize_before", False)
    config.require("normalize_embedding", False)
    config.require("tie_word_embeddings", config.flag("share_encoder_decoder_embeddings", True))
    config.require("decoder_vocab_size", config.content.get("vocab_size"))
    return _model(config, "post", _sinusoidal(config), tied=_is_tied(config))


def _bart(config: Config, names: Collection[str]) -> Content:
    config.require("normalize_before", False)
    config.require("normalize_embedding", True)
    return _model(config, "post")


def _mbart(config: Config, names: Collection[str]) -> Content:
    return _model(config, "pre", tied=_is_tied(config))


def _pegasus(config: Config, names: Collection[str]) -> Content:
    return _model(config, "pre", _sinusoidal(config), tied=_is_tied(config))


def _m2m100(config: Config, names: Collection[str]) -> Content:
    """The first token is at position pad_token_id + 1, as in fairseq."""
    pad_id = config.integer("pad_token_id", 0)
    offset = 2 if pad_id is None else pad_id + 1
    return _model(config, "pre", {**SINUSOIDAL, "inclusive": True, "offset": offset})


def _nllb_moe(config: Config, names: Collection[str]) -> Content:
    """A row is the sum of two experts. The library limits their rows by a share of the batch; the whole is no limit."""
    if (config.number("moe_eval_capacity_token_fraction", -math.inf) or 1.0) < 1:
        share = config.content["moe_eval_capacity_token_fraction"]
        problem = "drops tokens by the size of the batch, so that an output would depend on the others"
        raise config.wrong("moe_eval_capacity_token_fraction", share, problem, "from 1 on no token is dropped")
    config.require("second_expert_policy", "all")
    model = _m2m100(config, names)
    for side in ("encoder", "decoder"):
        every = config.integer(f"{side}_sparse_step", 0, LARGEST)
        every = 4 if every is None else every
        if every:
            number = config.count("num_experts", 128)
            model[side] |= {"experts": number, "experts_per_token": 2, "experts_every": every}
            model[side]["experts_first"] = every - 1
    return model


def _nllb_moe_weights(config: Config, names: Collection[str]) -> WeightMap:
    renamed = (
        ("encoder_attn_layer_norm", "cross_attention_layer_norm"), ("encoder_attn", "cross_attention"),
        (".final_layer_norm", ".ff_layer_norm"), (".fc", ".ffn.fc"),
    )  # fmt: skip
    modules = dict(LAYERS)
    for old, new in renamed:
        modules = {hf.replace(old, new): native for hf, native in modules.items()}
    dense = {hf: native for hf, native in modules.items() if ".ffn." in hf}
    kept = 1 - config.rate("moe_token_dropout", 0.2)  # outputs of experts are multiplied by it outside of training

    def combine(weights: Weights) -> Weights:
        weights = zero_router_biases(weights)
        scaled = [name for name in weights if ".experts." in name and ".fc2." in name]
        return {**weights, **{name: weights[name] * kept for name in scaled}}

    return WeightMap(
        {**modules, **expert_modules(config, dense), **FINAL_NORM},
        {"model.shared.weight": TOKENS},
        TIED,
        SINUSOIDS,
        combine=combine,
    )


def _mvp(config: Config, names: Collection[str]) -> Content:
    config.require("use_prompt", False)
    return _model(config, "post")


def _blenderbot(config: Config, names: Collection[str]) -> Content:
    model = _model(config, "pre")
    for side in ("encoder", "decoder"):
        model[side]["embedding_norm"] = False
    return model


def _blenderbot_small(config: Config, names: Collection[str]) -> Content:
    """The norm of a decoder embedding comes before its position is added: it is computed once, on import."""
    model = _model(config, "post")
    model["decoder"]["embedding_norm"] = False
    return {**model, "tie": "none", "scale_embedding": False}


def _blenderbot_small_weights(config: Config, names: Collection[str]) -> WeightMap:
    scale = config.count("d_model") ** 0.5 if config.flag("scale_embedding") else 1.0

    def combine(weights: Weights) -> Weights:
        norm = [weights.pop(f"decoder.embedding_norm.{leaf}", None) for leaf in ("weight", "bias")]
        if TOKENS.names[0] in weights and norm[0] is not None:
            tokens = weights[TOKENS.names[0]] * scale
            weights |= {
                TOKENS.names[0]: tokens,
                TOKENS.names[1]: layer_norm(tokens, tokens.shape[1:], norm[0], norm[1]),
            }
        return weights

    return WeightMap({**LAYERS, **EMBEDDING_NORM, **PLAIN_POSITIONS}, OUTPUT, TIED, combine=combine)


def _fsmt(config: Config, names: Collection[str]) -> Content:
    """Files of version 5 of the library have the position tables, which training may have changed; others have none."""
    if config.count("d_model") % 2:
        raise config.wrong("d_model", config.count("d_model"), "is odd", "an even width is supported")
    position = {**SINUSOIDAL, "inclusive": True, "offset": config.count("pad_token_id") + 1}
    if set(SINUSOIDS) <= set(names):
        position = {"kind": "learned", "max_positions": config.count("max_position_embeddings", 1024)}
    tied = "all" if FSMT_SOURCE not in names else "target"
    return {
        **{side: _stack(config, side, "post", position) for side in ("encoder", "decoder")},
        "tie": "none" if FSMT_OUTPUT in names else tied,
        "scale_embedding": config.flag("scale_embedding", True),
    }


def _fsmt_vocabulary(config: Config) -> Config:
    """The size of the target vocabulary, under the key that other families have."""
    return Config({**config.content, "vocab_size": config.count("tgt_vocab_size")}, config.where)


def _fsmt_weights(config: Config, names: Collection[str]) -> WeightMap:
    stored = {FSMT_SOURCE: TOKENS.names[0], FSMT_OUTPUT: TOKENS.names[2]}
    tables = {hf: TensorMap((native,)) for hf, native in stored.items() if hf in names}
    tables["model.decoder.embed_tokens.weight"] = TensorMap(
        (TOKENS.names[1], *(native for hf, native in stored.items() if hf not in names))
    )
    offset = config.count("pad_token_id") + 1
    for side in ("encoder", "decoder"):
        native = f"{side}.position.embed_positions.weight"
        tables[f"model.{side}.embed_positions.weight"] = TensorMap((native,), lambda table: [table[offset:]])
    return WeightMap(LAYERS, tables)


def _led(config: Config, names: Collection[str]) -> Content:
    """Rows of the encoder see half a window on each side; no token has global attention, as the library has it."""
    windows = config.numbers("attention_window") or (512,)
    if len(set(windows)) > 1 or windows[0] < 2 or windows[0] % 2:
        raise config.wrong("attention_window", list(windows), "is not one even number for all layers")
    model = _model(config, "post")
    for side in ("encoder", "decoder"):
        positions = config.count(f"max_{side}_position_embeddings", 1024)
        model[side]["position"] = {"kind": "learned", "max_positions": positions}
    model["encoder"]["window"] = int(windows[0]) // 2
    return model


def _opt(config: Config, names: Collection[str]) -> Content:
    width = config.count("hidden_size")
    for name, value in (
        ("word_embed_proj_dim", width),
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
        ("tie_word_embeddings", True),
    ):
        config.require(name, value)
    decoder = {
        "kind": "transformer",
        "layers": config.count("num_hidden_layers"),
        "width": width,
        "heads": config.count("num_attention_heads"),
        "ff_width": config.count("ffn_dim"),
        "activation": config.activation("activation_function", "relu"),
        "norm_eps": NORM_EPS["layer"],
        "position": {"kind": "learned", "max_positions": config.count("max_position_embeddings", 2048)},
        "dropout": config.rate("dropout"),
        "attention_dropout": config.rate("attention_dropout"),
    }
    return {"decoder": decoder, "tie": "target", "scale_embedding": False}


OPT_WEIGHTS = WeightMap(
    {
        **{f"layers.*.{hf}": f"decoder.layers.*.{native}" for hf, native in ENCODER.items()},
        "final_layer_norm": "decoder.final_norm",
    },
    {
        "embed_tokens.weight": TensorMap(TOKENS.names[1:]),
        "embed_positions.weight": POSITIONS["model.decoder.embed_positions.weight"],
    },
    {"lm_head.weight": "embed_tokens.weight"},
    prefix="model.decoder.",
    combine=zero_biases,
)


def _config(model_type: str) -> Callable[[Recipe, int | None], Content | None]:
    def write(recipe: Recipe, pad_id: int | None) -> Content | None:
        encoder, decoder = recipe.model.encoder, recipe.model.decoder
        if encoder is None or decoder is None:
            return None
        tied = recipe.model.tie == "all" or model_type not in ("marian", "pegasus", "mbart")
        content: Content = {
            "model_type": model_type,
            "d_model": encoder["width"],
            "activation_function": hf_activation(encoder),
            "max_position_embeddings": max_positions(recipe, encoder),
            "scale_embedding": recipe.model.scale_embedding,
            "dropout": encoder["dropout"],
            "attention_dropout": encoder["attention_dropout"],
            "activation_dropout": encoder["activation_dropout"],
            "tie_word_embeddings": tied,
            "is_encoder_decoder": True,
        }
        if model_type == "marian":
            content["share_encoder_decoder_embeddings"] = tied
        if model_type in ("marian", "pegasus") and encoder["position"]["kind"] == "learned":
            content[STORED_POSITIONS] = True
        return content | side_sizes(encoder, decoder)

    return write


def side_sizes(encoder: Mapping[str, Any], decoder: Mapping[str, Any]) -> Content:
    content: Content = {}
    for side, part in (("encoder", encoder), ("decoder", decoder)):
        content[f"{side}_layers"] = part["layers"]
        content[f"{side}_attention_heads"] = part["heads"]
        content[f"{side}_ffn_dim"] = part["ff_width"]
    return content


def _m2m100_config(recipe: Recipe, pad_id: int | None) -> Content | None:
    """Positions depend on the id of <pad>."""
    content = _config("m2m_100")(recipe, pad_id)
    return None if content is None or pad_id is None else {**content, "pad_token_id": pad_id}


def _shared_table(weights: Weights) -> Weights:
    """The table of both sides, which the library has even where each side has its own, and then does not read."""
    source = weights.get(TIED_TABLES[0])
    return {} if source is None else {"model.shared.weight": source.clone()}


def _position_tables(config: Mapping[str, Any]) -> Weights:
    """Sinusoidal tables, which the library stores: left out, it would report them as missing."""
    if config.get(STORED_POSITIONS):
        return {}
    positions = Sinusoidal(config["d_model"], 1, causal=False, halves=True)
    rows = torch.arange(config["max_position_embeddings"])
    table = positions.add(torch.zeros(1, len(rows), config["d_model"]), rows[None])[0]
    return {name: table.clone() for name in SINUSOIDS}


def _own_tables(modules: Mapping[str, str], tensors: Mapping[str, TensorMap], *ignored: str) -> FamilyWeights:
    """The weights with one table for everything or, where the config says so, a table for each side and the output."""

    def weights(config: Config, names: Collection[str]) -> WeightMap:
        stored = PLAIN_POSITIONS if config.flag(STORED_POSITIONS) else {}
        all_modules, unread = {**modules, **stored}, () if stored else ignored
        if _is_tied(config):
            return WeightMap(all_modules, tensors, TIED, unread)
        unused = "model.shared.weight"  # version 5 of the library has it, but does not read it
        own = {name: TensorMap((native,)) for name, native in zip(TIED_TABLES, TOKENS.names, strict=True)}
        rest = {name: tensor for name, tensor in tensors.items() if name != unused}
        return WeightMap(all_modules, {**rest, **own}, {}, (*unread, unused))

    return weights


FSMT_SOURCE, FSMT_OUTPUT = "model.encoder.embed_tokens.weight", "model.decoder.output_projection.weight"
LED_ATTENTION = "led.encoder.layers.*.self_attn"
LED_MODULES = {
    **{hf.replace("model.", "led.", 1): native for hf, native in (LAYERS | EMBEDDING_NORM | PLAIN_POSITIONS).items()},
    f"{LED_ATTENTION}.output": "encoder.layers.*.self_attention.out_proj",
    **{
        f"{LED_ATTENTION}.longformer_self_attn.{hf}": f"encoder.layers.*.self_attention.{native}_proj"
        for hf, native in (("query", "q"), ("key", "k"), ("value", "v"))
    },
}
LED_GLOBAL = tuple(  # of tokens with global attention
    f"{LED_ATTENTION}.longformer_self_attn.{name}_global.{leaf}"
    for name in ("query", "key", "value")
    for leaf in ("weight", "bias")
)
LED_WEIGHTS = WeightMap(
    LED_MODULES,
    {"led.shared.weight": TOKENS, "final_logits_bias": OUTPUT["final_logits_bias"]},
    {hf.replace("model.", "led."): original.replace("model.", "led.") for hf, original in TIED.items()},
    LED_GLOBAL,
)
BART_WEIGHTS = WeightMap({**LAYERS, **EMBEDDING_NORM}, {**OUTPUT, **POSITIONS}, TIED)
FAMILIES = {
    "MarianMTModel": Family(
        _marian, _own_tables(LAYERS, OUTPUT, *SINUSOIDS), _config("marian"), constant_weights=_position_tables
    ),
    "BartForConditionalGeneration": Family(_bart, BART_WEIGHTS, _config("bart")),
    "PLBartForConditionalGeneration": Family(_bart, BART_WEIGHTS, languages="optional"),
    "MvpForConditionalGeneration": Family(_mvp, BART_WEIGHTS),
    "MBartForConditionalGeneration": Family(
        _mbart,
        _own_tables({**LAYERS, **EMBEDDING_NORM, **FINAL_NORM}, {**OUTPUT, **POSITIONS}),
        _config("mbart"),
        languages="optional",
        copied_weights=_shared_table,
    ),
    "M2M100ForConditionalGeneration": Family(
        _m2m100,
        WeightMap({**LAYERS, **FINAL_NORM}, {"model.shared.weight": TOKENS}, TIED, SINUSOIDS),
        _m2m100_config,
        languages="required",
    ),
    "NllbMoeForConditionalGeneration": Family(_nllb_moe, _nllb_moe_weights, languages="required"),
    "PegasusForConditionalGeneration": Family(
        _pegasus,
        _own_tables({**LAYERS, **FINAL_NORM}, OUTPUT, *SINUSOIDS),
        _config("pegasus"),
        constant_weights=_position_tables,
        copied_weights=_shared_table,
    ),
    "BlenderbotForConditionalGeneration": Family(
        _blenderbot, WeightMap({**LAYERS, **FINAL_NORM, **PLAIN_POSITIONS}, OUTPUT, TIED), _config("blenderbot")
    ),
    "BlenderbotSmallForConditionalGeneration": Family(_blenderbot_small, _blenderbot_small_weights),
    "FSMTForConditionalGeneration": Family(_fsmt, _fsmt_weights, flatten=_fsmt_vocabulary),
    "LEDForConditionalGeneration": Family(_led, LED_WEIGHTS),
    "OPTForCausalLM": Family(_opt, OPT_WEIGHTS, data={"format": "text"}, source_eos=False, start_token="bos_token_id"),
}
