"""EncoderDecoderModel and VisionEncoderDecoderModel: two pretrained models, joined by cross-attention.

A BERT or RoBERTa encoder of texts, or a ViT, DeiT or DonutSwin encoder of images, with a GPT-2, TrOCR, mBART, BERT or
RoBERTa decoder; Donut and Nougat are DonutSwin with mBART. config.json nests a config for each side. The projection
between encoder and decoder (enc_to_dec_proj) is multiplied into the keys and values of cross-attention, which alone
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transduce.contracts import Family
from transduce.errors import InputError
from transduce.interop.huggingface import bart, bert, donut, gpt2, vit
from transduce.interop.huggingface.family import (
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

PROJECTION, ENCODER_SEGMENTS = "enc_to_dec_proj", "encoder_segments"
VIT_WEIGHTS = WeightMap(
    vit.MODULES,
    {hf: tensor for hf, tensor in vit.TENSORS.items() if hf.startswith("embeddings.")},
    combine=vit.combine_tokens,
    separate=vit.separate_tokens,
)


@dataclass(frozen=True)
class ImageEncoder:
    """The encoder of a VisionEncoderDecoderModel, from its own section of config.json."""

    to_encoder: Callable[[Config, Collection[str]], Content]
    weight_map: Callable[[Config], WeightMap]
    read_sources: Callable[[Path, Config], Content]


VIT = ImageEncoder(
    lambda config, names: vit.to_recipe(config, names)["encoder"], lambda config: VIT_WEIGHTS, vit.read_preprocessing
)
IMAGE_ENCODERS = {
    "vit": VIT,
    "deit": VIT,
    "donut-swin": ImageEncoder(donut.to_encoder, donut.weight_map, donut.read_preprocessing),
}
PROJECTION_TENSORS = {f"{PROJECTION}.{leaf}": TensorMap((f"{PROJECTION}.{leaf}",)) for leaf in ("weight", "bias")}
POOLER = ("encoder.pooler.dense.weight", "encoder.pooler.dense.bias")

# GPT-2 with cross-attention between self-attention and feed-forward.
CROSS = "decoder.layers.*.cross_attention"
GPT2 = {
    **{f"decoder.transformer.{hf}": native for hf, native in gpt2.MODULES.items()},
    "decoder.transformer.h.*.ln_cross_attn": "decoder.layers.*.cross_attention_norm",
    "decoder.transformer.h.*.ln_2": "decoder.layers.*.feed_forward_norm",
}
GPT2_TENSORS = {
    **{f"decoder.transformer.{hf}": tensor for hf, tensor in gpt2.TENSORS.items()},
    **{
        f"decoder.transformer.h.*.crossattention.{hf}.{leaf}": TensorMap(
            tuple(f"{CROSS}.{name}.{leaf}" for name in names), gpt2.split_transposed(len(names))
        )
        for hf, names in (("q_attn", ("q_proj",)), ("c_attn", ("k_proj", "v_proj")), ("c_proj", ("out_proj",)))
        for leaf in ("weight", "bias")
    },
}
GPT2_IGNORED = tuple(
    f"decoder.transformer.h.*.{part}.{leaf}" for part in ("attn", "crossattention") for leaf in ("bias", "masked_bias")
)
# The decoders of BART, which TrOCR has, and of mBART.
BART_DECODER = "decoder.model.decoder"
BART = {
    **{f"{BART_DECODER}.layers.*.{hf}": f"decoder.layers.*.{native}" for hf, native in bart.DECODER.items()},
    f"{BART_DECODER}.layernorm_embedding": "decoder.embedding_norm",
}
MBART = {**BART, f"{BART_DECODER}.layer_norm": "decoder.final_norm"}
WORD_TABLE = f"{BART_DECODER}.embed_tokens.weight"
TROCR_OUTPUT, MBART_OUTPUT = "decoder.output_projection.weight", "decoder.lm_head.weight"
POSITIONS = {
    f"{BART_DECODER}.embed_positions.weight": bart.POSITIONS["model.decoder.embed_positions.weight"],
}
# BERT as a decoder: cross-attention, and a hidden layer before the output.
BERT_DECODER = {
    **{f"encoder.layer.*.{hf}": f"decoder.layers.*.{native}" for hf, native in bert.LAYER.items()},
    **{
        f"encoder.layer.*.crossattention.{hf}": f"{CROSS}.{native}"
        for hf, native in (
            ("self.query", "q_proj"), ("self.key", "k_proj"), ("self.value", "v_proj"), ("output.dense", "out_proj"),
        )
    },
    "encoder.layer.*.crossattention.output.LayerNorm": "decoder.layers.*.cross_attention_norm",
    "encoder.layer.*.output.LayerNorm": "decoder.layers.*.feed_forward_norm",
    "embeddings.LayerNorm": "decoder.embedding_norm",
}  # fmt: skip
DEEP_OUTPUT = {bert.MLM_DENSE: "decoder.output.transform.0", bert.MLM_NORM: "decoder.output.transform.2"}
TOKENS = ("decoder.embedding.weight", "decoder.output.projection.weight")
BERT_KINDS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "Roberta", "camembert": "Roberta"}


def _combine(weights: Weights) -> Weights:
    """Folds the projection P m + p into keys and values: W (P m + p) + b = (W P) m + (W p + b)"""
    weights = bert.fold_segments(weights, "decoder")
    matrix, offset = (weights.pop(f"{PROJECTION}.{leaf}", None) for leaf in ("weight", "bias"))
    if matrix is None or offset is None:
        return weights
    for name in [
        name for name in weights if name.endswith((".cross_attention.k_proj.weight", ".cross_attention.v_proj.weight"))
    ]:
        bias = name.replace(".weight", ".bias")
        weights[bias] = weights[bias] + weights[name] @ offset
        weights[name] = weights[name] @ matrix
    return weights


def _flatten(config: Config) -> Config:
    """The values of the decoder, overridden by those at the top level: tokens belong to the decoder."""
    sides = [config.content.get(side) for side in ("encoder", "decoder")]
    if not all(isinstance(side, dict) for side in sides):
        raise InputError(
            "config.json has no encoder and decoder section", where=config.where, remedy="fetch the folder again"
        )
    own = {name: value for name, value in config.content.items() if value is not None}
    return Config({**(sides[1] or {}), **own}, config.where)


def _side(config: Config, name: str) -> Config:
    return Config(config.content[name], f"{config.where}: {name}")


def _types(config: Config) -> tuple[str, str]:
    """Model types of encoder and decoder."""
    encoder, decoder = (str(_side(config, side).content.get("model_type")) for side in ("encoder", "decoder"))
    of_texts = config.content.get("model_type") == "encoder-decoder"
    encoders = tuple(BERT_KINDS if of_texts else IMAGE_ENCODERS)
    if encoder not in encoders or decoder not in ("gpt2", "trocr", "mbart", *BERT_KINDS):
        raise InputError(
            f"{encoder} with {decoder} cannot be imported",
            where=config.where,
            remedy=f"supported: {', '.join(encoders)}, with gpt2, trocr, mbart, {', '.join(BERT_KINDS)}",
        )
    return encoder, decoder


def _gpt2(config: Config, names: Collection[str]) -> Content:
    # Cross-attention is expected here, though GPT-2 on its own must not have it.
    return gpt2.to_recipe(Config({**config.content, "add_cross_attention": False}, config.where), names)


def _trocr(config: Config, names: Collection[str]) -> Content:
    config.require("is_decoder", True)
    width = "d_model" if "d_model" in config.content else "hidden_size"
    position: Content = {"kind": "learned", "max_positions": config.count("max_position_embeddings", 512)}
    if not config.flag("use_learned_position_embeddings", True):
        position = {**bart.SINUSOIDAL, "inclusive": True, "offset": config.count("pad_token_id", 1) + 1}
    decoder = {
        "kind": "transformer",
        "layers": config.count("decoder_layers"),
        "width": config.count(width),
        "heads": config.count("decoder_attention_heads"),
        "ff_width": config.count("decoder_ffn_dim"),
        "activation": config.activation("activation_function", "gelu"),
        "norm": "post",
        "embedding_norm": config.flag("layernorm_embedding", True),
        "position": position,
        "dropout": config.rate("dropout"),
        "attention_dropout": config.rate("attention_dropout"),
        "activation_dropout": config.rate("activation_dropout"),
    }
    tied = config.flag("tie_word_embeddings", True)
    return {"decoder": decoder, "tie": "target" if tied else "none", "scale_embedding": config.flag("scale_embedding")}


def _mbart(config: Config, names: Collection[str]) -> Content:
    config.require("is_decoder", True)
    tied = config.flag("tie_word_embeddings", True)
    return {
        "decoder": bart.pre_norm_stack(config, "decoder"),
        "tie": "target" if tied else "none",
        "scale_embedding": config.flag("scale_embedding"),
    }


def _bert(config: Config, names: Collection[str]) -> Content:
    config.require("hidden_act", "gelu")
    config.require("tie_word_embeddings", True)
    config.require("is_decoder", True)
    as_encoder = {**config.content, "is_decoder": False}  # required by BERT on its own
    decoder = bert.ENCODERS[BERT_KINDS[as_encoder["model_type"]]](Config(as_encoder, config.where))
    return {"decoder": decoder, "tie": "target", "scale_embedding": False, "output": "deep"}


def _bert_weights(kind: str) -> WeightMap:
    inside, (modules, bias, tied) = f"decoder.{kind.lower()}", bert.MLM_HEADS[kind]
    offset = bert.POSITION_OFFSET if kind == "Roberta" else 0
    return WeightMap(
        {
            **{f"{inside}.{hf}": native for hf, native in BERT_DECODER.items()},
            **{f"decoder.{hf}": DEEP_OUTPUT[native] for hf, native in modules.items()},
        },
        {
            f"{inside}.{bert.WORD_TABLE}": TensorMap(TOKENS),
            f"{inside}.{bert.POSITION_TABLE}": TensorMap(
                ("decoder.position.embed_positions.weight",), lambda table: [table[offset:]]
            ),
            f"{inside}.embeddings.token_type_embeddings.weight": TensorMap((bert.SEGMENTS,)),
            f"decoder.{bias}": TensorMap((TOKENS[1].replace("weight", "bias"),)),
        },
        {
            f"decoder.{copy}": f"{inside}.{original}" if original == bert.WORD_TABLE else f"decoder.{original}"
            for copy, original in tied.items()
        },
        (f"{inside}.embeddings.position_ids",),
    )


def _bart_weights(config: Config, modules: Mapping[str, str], output: str) -> WeightMap:
    tied, learned = (config.flag(one, True) for one in ("tie_word_embeddings", "use_learned_position_embeddings"))
    tensors = {WORD_TABLE: TensorMap(TOKENS)}
    if not tied:
        tensors = {WORD_TABLE: TensorMap(TOKENS[:1]), output: TensorMap(TOKENS[1:])}
    return WeightMap(modules, {**tensors, **(POSITIONS if learned else {})}, {output: WORD_TABLE} if tied else {})


def _decoder_weights(config: Config) -> WeightMap:
    decoder, own = _types(config)[1], _side(config, "decoder")
    if decoder == "gpt2":
        return WeightMap(GPT2, GPT2_TENSORS, {"decoder.lm_head.weight": "decoder.transformer.wte.weight"}, GPT2_IGNORED)
    if decoder == "trocr":
        return _bart_weights(own, BART, TROCR_OUTPUT)
    return _bart_weights(own, MBART, MBART_OUTPUT) if decoder == "mbart" else _bert_weights(BERT_KINDS[decoder])


def _image_encoder(config: Config) -> tuple[ImageEncoder, Config]:
    """The encoder, and its section of config.json."""
    return IMAGE_ENCODERS[_types(config)[0]], _side(config, "encoder")


def _weight_map(config: Config, names: Collection[str]) -> WeightMap:
    side, own = _image_encoder(config)
    encoder, decoder = side.weight_map(own), _decoder_weights(config)
    return WeightMap(
        {**{f"encoder.{hf}": native for hf, native in encoder.modules.items()}, **decoder.modules},
        {
            **{f"encoder.{hf}": tensor for hf, tensor in encoder.tensors.items()},
            **PROJECTION_TENSORS,
            **decoder.tensors,
        },
        decoder.tied,
        (*POOLER, *(f"encoder.{hf}" for hf in encoder.ignored), *decoder.ignored),
        combine=lambda weights: _combine(encoder.combine(weights)),
        separate=encoder.separate,
    )


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    inner = {name.removeprefix("encoder.") for name in names if name.startswith("encoder.")}
    side, own = _image_encoder(config)
    return {"encoder": side.to_encoder(own, inner), **_decoder(config, names)}


def _decoder(config: Config, names: Collection[str]) -> Content:
    make = {"gpt2": _gpt2, "trocr": _trocr, "mbart": _mbart}.get(_types(config)[1], _bert)
    return make(_side(config, "decoder"), names)


def _text_to_recipe(config: Config, names: Collection[str]) -> Content:
    encoder = _side(config, "encoder")
    encoder.require("vocab_size", config.content.get("vocab_size"))
    config.require("tie_encoder_decoder", False)
    return {"encoder": bert.ENCODERS[BERT_KINDS[_types(config)[0]]](encoder), **_decoder(config, names)}


def _text_weight_map(config: Config, names: Collection[str]) -> WeightMap:
    decoder, kind = _decoder_weights(config), BERT_KINDS[_types(config)[0]]
    tensors = {f"encoder.{hf}": tensor for hf, tensor in bert.TENSORS[kind].items()}
    tensors["encoder.embeddings.token_type_embeddings.weight"] = TensorMap((ENCODER_SEGMENTS,))

    def combine(weights: Weights) -> Weights:
        return _combine(bert.fold_segments(weights, "encoder", ENCODER_SEGMENTS))

    return WeightMap(
        {**{f"encoder.{hf}": native for hf, native in bert.MODULES[kind].items()}, **decoder.modules},
        {**tensors, **PROJECTION_TENSORS, **decoder.tensors},
        decoder.tied,
        (*POOLER, "encoder.embeddings.position_ids", *decoder.ignored),
        combine=combine,
    )


def _read_sources(folder: Path, config: Config) -> Content:
    side, own = _image_encoder(config)
    return side.read_sources(folder, own)


def _to_config(recipe: Recipe, pad_id: int | None) -> Content | None:
    """ViT or DeiT with TrOCR, whose sinusoidal positions version 5 of the library cannot load."""
    encoder, decoder = recipe.model.encoder, recipe.model.decoder
    front = (encoder or {}).get("front")
    if encoder is None or decoder is None or not front or front["kind"] != "patches":
        return None
    if decoder["position"]["kind"] != "learned":
        return None
    tied = recipe.model.tie != "none"
    texts = {
        "model_type": "trocr",
        "d_model": decoder["width"],
        "decoder_layers": decoder["layers"],
        "decoder_attention_heads": decoder["heads"],
        "decoder_ffn_dim": decoder["ff_width"],
        "activation_function": hf_activation(decoder),
        "max_position_embeddings": max_positions(recipe, decoder),
        "layernorm_embedding": decoder["embedding_norm"],
        "scale_embedding": recipe.model.scale_embedding,
        "tie_word_embeddings": tied,
        "cross_attention_hidden_size": encoder["width"],
        "dropout": decoder["dropout"],
        "attention_dropout": decoder["attention_dropout"],
        "activation_dropout": decoder["activation_dropout"],
        "is_decoder": True,
        "add_cross_attention": True,
        "pad_token_id": pad_id,
    }
    images = vit.encoder_config(encoder, "deit" if front["leading"] == 2 else "vit")
    sides = {"encoder": images, "decoder": texts}
    return {"model_type": "vision-encoder-decoder", "is_encoder_decoder": True, "tie_word_embeddings": tied, **sides}


def _nest(config: Content) -> Content:
    """With the tokens in the section of the decoder too."""
    names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    return {**config, "decoder": {**config["decoder"], **{name: config[name] for name in names}}}


def _required_names(config: Mapping[str, Any]) -> Names:
    names = (f"encoder.{vit.DISTILLATION_TOKEN}",) if config["encoder"]["model_type"] == "deit" else ()
    return names if config["tie_word_embeddings"] else (*names, TROCR_OUTPUT)


def _pooler(config: Mapping[str, Any]) -> Weights:
    """Of the encoder, which has one, though nothing reads it."""
    width = config["encoder"]["hidden_size"]
    return {POOLER[0]: torch.eye(width), POOLER[1]: torch.zeros(width)}


FAMILIES = {
    "VisionEncoderDecoderModel": Family(
        _to_recipe,
        _weight_map,
        _to_config,
        flatten=_flatten,
        nest=_nest,
        read_sources=_read_sources,
        modality="image",
        required_names=_required_names,
        constant_weights=_pooler,
        extra_files=vit.write_preprocessing,
    ),
    "EncoderDecoderModel": Family(_text_to_recipe, _text_weight_map, flatten=_flatten, start_is_output=True),
}
