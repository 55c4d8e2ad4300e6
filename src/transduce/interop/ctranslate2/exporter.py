"""Export of Transformers to CTranslate2, in fp32 or quantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from transduce.data.languages import tag_of
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.interop.huggingface.family import NORM_EPS
from transduce.model import NEVER
from transduce.recipe import ModelRecipe
from transduce.storage import staged_folder

Precision = Literal["fp32", "int8", "int16", "bf16", "fp16"]
QUANTISATION = {"fp32": None, "int8": "int8", "int16": "int16", "bf16": "bfloat16", "fp16": "float16"}
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
SUPPORTED: dict[str, tuple[Any, ...]] = {  # values of recipe options
    "kind": ("transformer",),
    "front": (None,),  # sources of text alone
    "causal": (None, False),
    "token_mixer": ("attention",),
    "window": (None,),
    "embedding_width": (None,),
    "first_norm": (True,),
    "projections": ("all",),
    "activation": tuple(ACTIVATIONS),
    "experts": (None,),
    "norm": ("pre", "post"),
    "norm_kind": ("layer", "rms"),
    "position": ("sinusoidal", "learned", "none", "relative", "rotary"),
    "position_per_layer": (False,),
    "score": ("scaled_dot", "dot"),
    "normaliser": ("softmax",),
}
POSITIONS = 2048  # written for sinusoidal encodings


def write_model(
    network: nn.Module,
    recipe: ModelRecipe,
    tokenizers: Sequence[Tokenizer],
    out: Path,
    precision: Precision = "fp32",
) -> Path:
    """Writes the model and its tokenizers (source, target), whose pieces are the tokens of the library."""
    if precision not in QUANTISATION:
        known = ", ".join(QUANTISATION)
        raise InputError(f"the precision {precision!r} does not exist", where=str(out), remedy=f"known: {known}")
    source, target = (piece_names(tokenizer) for tokenizer in tokenizers)
    spec = specification(network, recipe, source, target, str(out))
    spec.validate()
    spec.optimize(quantization=QUANTISATION[precision])
    with staged_folder(out) as part:
        spec.save(str(part))
        for side, tokenizer in zip(("source", "target"), tokenizers, strict=True):
            tokenizer.save(part / f"tokenizer.{side}.json")
    return out


def specification(network: nn.Module, recipe: ModelRecipe, source: list[str], target: list[str], where: str) -> Any:
    """The model specification of the library, filled with weights; `source` and `target` name every id."""
    specs = _library()
    check(recipe, where)
    weights = {name: tensor.detach().cpu().float().clone() for name, tensor in network.state_dict().items()}
    # Tokens that are never output: the library has no other way to exclude them.
    weights["decoder.output.projection.bias"][[PAD, BOS]] = NEVER
    if recipe.encoder is not None:
        spec = specs.TransformerSpec(
            _write_stack(specs, recipe, "encoder", weights, network),
            _write_stack(specs, recipe, "decoder", weights, network),
        )
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        spec.config.decoder_start_token = SPECIALS[BOS]
        spec.config.add_source_eos = recipe.source_eos
    else:
        spec = specs.TransformerDecoderModelSpec(_write_stack(specs, recipe, "decoder", weights, network))
        spec.register_vocabulary(target)
    assert recipe.decoder is not None
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (SPECIALS[one] for one in (BOS, EOS, UNK))
    spec.config.layer_norm_epsilon = recipe.decoder["norm_eps"] or NORM_EPS[recipe.decoder["norm_kind"]]
    return spec


def _library() -> Any:
    try:
        from ctranslate2 import specs
    except ImportError:
        raise InputError("CTranslate2 is not installed", remedy="pip install 'transduce[ctranslate2]'") from None
    return specs


def piece_names(tokenizer: Tokenizer) -> list[str]:
    """A distinct name per id: the piece, with its id appended where the piece occurs twice."""
    found: dict[str, None] = {}
    for number, piece in enumerate((*tokenizer.vocabulary.pieces, *map(tag_of, tokenizer.languages))):
        found[piece if piece not in found else f"{piece}#{number}"] = None
    return list(found)


def check(recipe: ModelRecipe, where: str) -> None:
    """Raises an error that names the first option that the library does not support."""
    if recipe.decoder is None:
        raise InputError("CTranslate2 supports models with a decoder", where=where, remedy="use --to bundle")
    if recipe.copy is not None:
        raise InputError("copy: CTranslate2 cannot copy words of the source", where=where, remedy="use --to onnx")
    for key, plain in (("output", "plain"), ("logit_cap", None), ("ctc", None)):
        if getattr(recipe, key) != plain:
            problem = f"{key}: {getattr(recipe, key)} does not fit CTranslate2"
            raise InputError(problem, where=where, remedy="use --to onnx")
    parts = {side: part for side in ("encoder", "decoder") if (part := getattr(recipe, side)) is not None}
    for side, part in parts.items():
        for key, known in SUPPORTED.items():
            value = part.get(key)
            value = value["kind"] if isinstance(value, Mapping) else value
            if value not in known or (key == "position" and part[key].get("join", "add") != "add"):
                raise InputError(
                    f"{side}.{key}: {part.get(key)} does not fit CTranslate2",
                    where=where,
                    remedy=f"supported: {', '.join(map(str, known))}; --to onnx exports most models",
                )
    if len({part["norm_eps"] or NORM_EPS[part["norm_kind"]] for part in parts.values()}) > 1:
        raise InputError("norm_eps: encoder and decoder must have the same value", where=where, remedy="use --to onnx")


def _write_stack(specs: Any, recipe: ModelRecipe, side: str, weights: Mapping[str, Tensor], network: nn.Module) -> Any:
    """The specification of encoder or decoder."""
    part = getattr(recipe, side)
    position, rms = part["position"]["kind"], part["norm_kind"] == "rms"
    options: dict[str, Any] = {
        "pre_norm": part["norm"] == "pre",
        "activation": specs.common_spec.Activation[ACTIVATIONS[part["activation"]]],
        "layernorm_embedding": part["embedding_norm"],
        "relative_attention_bias": position == "relative",
        "ffn_glu": part["gated"],
        "rms_norm": rms,
        "num_heads_kv": part["kv_heads"] if part["kv_heads"] != part["heads"] else None,
        "head_dim": part["head_width"],
    }
    if position == "rotary":
        base, share = part["position"]["base"], part["position"]["share"]
        head = part["head_width"] or part["width"] // part["heads"]
        rotated = 0 if share == 1 else int(head * share)  # 0: all of a head
        options |= {"rotary_dim": rotated, "rotary_interleave": False, "rotary_base": base}
    if side == "encoder":
        spec = specs.transformer_spec.TransformerEncoderSpec(part["layers"], part["heads"], **options)
        table = spec.embeddings[0]
    else:
        options["with_encoder_attention"] = recipe.encoder is not None
        spec = specs.transformer_spec.TransformerDecoderSpec(part["layers"], part["heads"], **options)
        table = spec.embeddings
        _linear(spec.projection, weights, "decoder.output.projection")
    table.weight = weights[f"{side}.embedding.weight"]
    spec.scale_embeddings = part["width"] ** 0.5 if recipe.scale_embedding else 1.0
    if hasattr(spec, "position_encodings"):
        spec.position_encodings.encodings = _position_table(getattr(network, side), part)
    for name, attribute in (("final_norm", "layer_norm"), ("embedding_norm", "layernorm_embedding")):
        if hasattr(spec, attribute):
            _norm(getattr(spec, attribute), weights, f"{side}.{name}")
    for number, layer in enumerate(spec.layer):
        _block(specs, layer, weights, f"{side}.layers.{number}", part)
        if position == "relative":
            layer.self_attention.relative_attention_bias = weights[f"{side}.position.relative_attention_bias.weight"]
            distance = torch.tensor(part["position"]["max_distance"], dtype=torch.int32)
            layer.self_attention.relative_attention_max_distance = distance.numpy()
    return spec


def _position_table(stack: Any, part: Mapping[str, Any]) -> Tensor:
    """One vector per position, learned or sinusoidal."""
    count = part["position"].get("max_positions") or POSITIONS
    with torch.no_grad():
        added: Tensor = stack.position.add(torch.zeros(1, count, part["width"]), torch.arange(count)[None])
    return added[0]


def _block(specs: Any, layer: Any, weights: Mapping[str, Tensor], name: str, part: Mapping[str, Any]) -> None:
    attentions = [(layer.self_attention, f"{name}.self_attention")]
    attentions += [(layer.attention, f"{name}.cross_attention")] if hasattr(layer, "attention") else []
    for number, (attention, module) in enumerate(attentions):
        parts = [specs.common_spec.LinearSpec() for _ in range(3)]
        for one, kind in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
            _linear(one, weights, f"{module}.{kind}")
        groups = [parts] if number == 0 else [parts[:1], parts[1:]]
        for linear, group in zip(attention.linear, groups, strict=False):
            linear.weight = torch.cat([one.weight for one in group])
            if group[0].has_bias():
                linear.bias = torch.cat([one.bias for one in group])
        _linear(attention.linear[-1], weights, f"{module}.out_proj")
        if part["score"]["kind"] == "dot":
            attention.queries_scale = 1.0
        _norm(attention.layer_norm, weights, f"{module}_norm")
    _linear(layer.ffn.linear_0, weights, f"{name}.feed_forward.fc1")
    _linear(layer.ffn.linear_1, weights, f"{name}.feed_forward.fc2")
    if part["gated"]:
        _linear(layer.ffn.linear_0_noact, weights, f"{name}.feed_forward.fc_gate")
    _norm(layer.ffn.layer_norm, weights, f"{name}.feed_forward_norm")


def _linear(spec: Any, weights: Mapping[str, Tensor], name: str) -> None:
    spec.weight = weights[f"{name}.weight"]
    if f"{name}.bias" in weights:
        spec.bias = weights[f"{name}.bias"]


def _norm(spec: Any, weights: Mapping[str, Tensor], name: str) -> None:
    spec.gamma = weights[f"{name}.weight"]
    if hasattr(spec, "beta"):
        spec.beta = weights.get(f"{name}.bias", torch.zeros_like(spec.gamma))
