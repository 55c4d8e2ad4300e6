"""fairseq: Transformers in the weight layout of BART, LSTMs, convolutional models (`fconv`).

Options are in the checkpoint, dictionaries beside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface import bart
from transduce.interop.huggingface.family import Config, Content, WeightMap, Weights
from transduce.interop.huggingface.folder import StoredTensor
from transduce.interop.huggingface.tokenizers import SpecialIds
from transduce.interop.legacy.checkpoint_process import LegacyCheckpoint
from transduce.interop.legacy.model import (
    BIAS,
    BILINEAR,
    COMBINE,
    OUTPUT,
    RECURRENT_MODULES,
    TARGET,
    LegacyModel,
    LegacyVocabulary,
    read_lines,
    recurrent_sections,
    rename_cell,
    widen_embeddings,
    word_vocabulary,
)

SIDES = ("encoder", "decoder")
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "swish": "silu",
}
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # the first ids; the dictionary file omits them
MODULES = {
    **{
        foreign.removeprefix("model."): native
        for foreign, native in (bart.LAYERS | bart.EMBEDDING_NORM | bart.FINAL_NORM).items()
    },
    **{f"{side}.embed_tokens": f"{side}.embedding" for side in SIDES},
    "decoder.output_projection": "decoder.output.projection",
}
POSITIONS = {name.removeprefix("model."): tensor for name, tensor in bart.POSITIONS.items()}
# Copies for the fast path of an encoder layer. fairseq 0.12 fills them from the other weights whenever it loads a file;
# in a file they are mostly zero.
FAST_PATH = tuple(f"{name}_{leaf}" for name in ("in_proj", "out_proj", "fc1", "fc2") for leaf in ("weight", "bias"))
IGNORED = (
    *(f"{side}.{name}" for side in SIDES for name in ("version", "embed_positions._float_tensor")),
    *(f"encoder.layers.*.{name}" for name in FAST_PATH),
)
UNSUPPORTED = (  # options that change the computation
    "no_token_positional_embeddings",
    "no_cross_attention",
    "cross_self_attention",
    "no_decoder_final_norm",
    "char_inputs",
    "tie_adaptive_weights",
    "scale_attn",
    "scale_fc",
    "scale_heads",
    "scale_resids",
)
NARROW, NARROW_OUTPUT = "decoder.narrow", "decoder.additional_fc.weight"  # a layer without a native counterpart
SPELT_RESIDUAL = re.compile(r"\(\s*\d+\s*,\s*\d+\s*,\s*(\d+)\s*,?\s*\)")  # (width, kernel, layers to skip)
OTHER_CONVOLUTIONS = "train a convolutional model of this library"
SEARCH = {"strategy": "huggingface_beam", "beam": 5, "stop": "full", "length_penalty": 1.0, "max_length": 200}


def _stack(config: Config, side: str) -> Content:
    activation = config.content.get("activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        remedy = f"supported: {', '.join(ACTIVATIONS)}"
        raise InputError(f"activation_fn: {activation!r} is not supported", where=config.where, remedy=remedy)
    positions = config.count("max_source_positions" if side == "encoder" else "max_target_positions", 1024)
    sinusoidal = {"kind": "sinusoidal", "halves": True, "inclusive": True, "offset": bart.POSITION_OFFSET}
    learned = {"kind": "learned", "max_positions": positions}
    return {
        "kind": "transformer",
        "layers": config.count(f"{side}_layers"),
        "width": config.count(f"{side}_embed_dim"),
        "heads": config.count(f"{side}_attention_heads"),
        "ff_width": config.count(f"{side}_ffn_embed_dim"),
        "activation": ACTIVATIONS[activation],
        "norm": "pre" if config.flag(f"{side}_normalize_before") else "post",
        "embedding_norm": config.flag("layernorm_embedding"),
        "position": learned if config.flag(f"{side}_learned_pos") else sinusoidal,
        "dropout": config.rate("dropout"),
        "attention_dropout": config.rate("attention_dropout"),
        "activation_dropout": config.rate("activation_dropout"),
    }


def _transformer(config: Config, names: Collection[str]) -> Content:
    for name in UNSUPPORTED:
        if config.content.get(name):
            config.require(name, False)
    tied = config.flag("share_all_embeddings") or config.flag("share_decoder_input_output_embed")
    return {
        "encoder": _stack(config, "encoder"),
        "decoder": _stack(config, "decoder"),
        "tie": "all" if config.flag("share_all_embeddings") else ("target" if tied else "none"),
        "scale_embedding": not config.flag("no_scale_embedding"),
    }


def _lstm(config: Config, names: Collection[str]) -> Content:
    if config.content.get("decoder_attention", "1") not in ("1", "True", 1, True):
        config.require("decoder_attention", "1")
    both = config.flag("encoder_bidirectional")
    encoder = {
        "layers": config.count("encoder_layers"),
        "width": config.count("encoder_hidden_size") * (2 if both else 1),
        "bidirectional": both,
        "summary": "states",
    }
    decoder = {
        "layers": config.count("decoder_layers"),
        "width": config.count("decoder_hidden_size"),
        "bridge": "states",
        "context": {"kind": "luong", "score": "bilinear"},
    }
    shared = {"cell": "lstm", "dropout": config.rate("dropout")}
    tied = config.flag("share_decoder_input_output_embed") or config.flag("share_all_embeddings")
    every = config.flag("share_all_embeddings")
    tie = "none" if not tied or NARROW_OUTPUT in names else ("all" if every else "target")
    return recurrent_sections(shared, encoder, decoder) | {"tie": tie}


def _convolutional(stored: Mapping[str, StoredTensor], config: Config, names: Collection[str]) -> Content:
    """Widths, kernels and number of layers are those of the weights: the options spell them as Python expressions."""
    parts: Content = {}
    for side in SIDES:
        # The option counts the rows of the table here, of which the first two stand for no position.
        rows = config.count("max_source_positions" if side == "encoder" else "max_target_positions", 1024)
        parts[side] = {
            "kind": "convolutional",
            **_convolutions(stored, config, side),
            "embedding_width": config.count(f"{side}_embed_dim"),
            "position": {"kind": "learned", "max_positions": rows - bart.POSITION_OFFSET},
            "dropout": config.rate("dropout"),
        }
    parts["encoder"]["separate_keys"] = True
    parts["decoder"] |= {"score": "dot", "scale_context": True}
    return parts | {"tie": "none", "scale_embedding": False}


def _convolutions(stored: Mapping[str, StoredTensor], config: Config, side: str) -> Content:
    """The options of the convolutions, each of which has a weight of kernel, input width, twice the output width."""
    found = re.compile(rf"{side}\.convolutions\.(\d+)\.weight_v").fullmatch
    shapes = {int(match[1]): tensor.shape for name, tensor in stored.items() if (match := found(name))}
    sizes = [shapes[number] for number in sorted(shapes) if len(shapes[number]) == 3]
    spelt = config.content.get(f"{side}_layers")
    skipped = SPELT_RESIDUAL.findall(spelt) if isinstance(spelt, str) else []
    if not sizes or len(sizes) < max(shapes) + 1:
        raise config.wrong(f"{side}_layers", spelt, "does not fit the weights", "fetch the checkpoint again")
    if any(int(one) != 1 for one in skipped):
        raise config.wrong(f"{side}_layers", spelt, "has residual connections over several layers", OTHER_CONVOLUTIONS)
    widths, kernels = tuple(shape[2] // 2 for shape in sizes), tuple(shape[0] for shape in sizes)
    if side == "encoder" and any(kernel % 2 == 0 for kernel in kernels):
        raise config.wrong(f"{side}_layers", spelt, "has kernels of an even size", OTHER_CONVOLUTIONS)
    if side == "decoder" and len(sizes) != sum(name.endswith("in_projection.weight_v") for name in stored):
        problem = "leaves out the attention of a layer"
        raise config.wrong("decoder_attention", config.content.get("decoder_attention"), problem, OTHER_CONVOLUTIONS)
    options: Content = {"layers": len(sizes), "width": widths[-1], "kernel": kernels[0]}
    options |= {"widths": widths} if len(set(widths)) > 1 else {}
    return options | ({"kernels": kernels} if len(set(kernels)) > 1 else {})


def _combine_convolutional(weights: Weights) -> Weights:
    """Multiplies out the weight normalisation, and adds the projections of attention, which compares rows as they are.

    A row of the memory is a key and a value, each as wide as an embedding: their projections choose one of them.
    """
    combined = {name: tensor for name, tensor in weights.items() if not name.endswith((".weight_v", ".weight_g"))}
    for name in (name for name in weights if name.endswith(".weight_v")):
        module = name.removesuffix(".weight_v")
        weight = _normalised(weights[name], weights.get(f"{module}.weight_g"))
        combined[f"{module}.weight"] = weight.permute(2, 1, 0).contiguous() if weight.dim() == 3 else weight
    for name in [name for name in combined if name.endswith(".query_proj.weight")]:
        attention, width = name.replace("query_proj.weight", "cross_attention"), len(combined[name])
        one, zero = (torch.eye(width, device=combined[name].device), combined[name].new_zeros(width, width))
        chosen = {
            "q_proj": one,
            "out_proj": one,
            "k_proj": torch.cat((one, zero), 1),
            "v_proj": torch.cat((zero, one), 1),
        }
        combined |= {f"{attention}.{module}.weight": weight.clone() for module, weight in chosen.items()}
        combined |= {f"{attention}.{module}.bias": one.new_zeros(width) for module in chosen}
    return _fold_output(combined)


def _normalised(direction: Tensor, length: Tensor | None) -> Tensor:
    """w = g v / |v| (Salimans & Kingma 2016); g has one number for each index of some dimensions."""
    if length is None or length.dim() != direction.dim():
        return direction
    others = [place for place, size in enumerate(length.shape) if size == 1]
    return direction * (length / direction.norm(dim=others, keepdim=True))


def _combine(weights: Weights) -> Weights:
    return widen_embeddings(_fold_output(weights))


def _fold_output(weights: Weights) -> Weights:
    """The narrower layer before the output, which has no activation, is multiplied into the output."""
    combined = dict(weights)
    narrow, bias = combined.pop(f"{NARROW}.weight", None), combined.pop(f"{NARROW}.bias", None)
    wide = combined.get(OUTPUT, combined.get(TARGET))  # a tied output has the table of the embeddings
    if narrow is not None and bias is not None and wide is not None:
        combined[OUTPUT] = wide @ narrow
        combined[BIAS] = wide @ bias + combined.get(BIAS, 0.0)
    return combined


TRANSFORMER = WeightMap(MODULES, POSITIONS, ignored=IGNORED)
LSTM = WeightMap(
    {
        **RECURRENT_MODULES,
        **{f"{side}.embed_tokens": f"{side}.embedding" for side in SIDES},
        "decoder.attention.output_proj": COMBINE,
        "decoder.fc_out": "decoder.output.projection",
        "decoder.additional_fc": NARROW,
    },
    {"decoder.attention.input_proj.weight": BILINEAR},
    ignored=IGNORED,
    combine=_combine,
)
CONVOLUTIONAL = WeightMap(
    {
        **{f"{side}.embed_tokens": f"{side}.embedding" for side in SIDES},
        **{f"{side}.fc1": f"{side}.embedding_proj" for side in SIDES},
        "encoder.convolutions.*": "encoder.layers.*.conv",
        "encoder.projections.*": "encoder.layers.*.residual_proj",
        "encoder.fc2": "encoder.memory_proj",
        "decoder.convolutions.*": "decoder.layers.*.convolution.conv",
        "decoder.projections.*": "decoder.layers.*.convolution.residual_proj",
        "decoder.attention.*.in_projection": "decoder.layers.*.query_proj",
        "decoder.attention.*.out_projection": "decoder.layers.*.context_proj",
        "decoder.fc2": NARROW,
        "decoder.fc3": "decoder.output.projection",
    },
    POSITIONS,
    ignored=IGNORED,
    combine=_combine_convolutional,
)


def read(checkpoint: LegacyCheckpoint) -> LegacyModel:
    config = Config(_options(checkpoint), str(checkpoint.file))
    weights = {name.removeprefix("model/"): tensor for name, tensor in checkpoint.weights.items()}
    source, target = (_side(checkpoint.file.parent, name) for name in _dictionaries(checkpoint.file.parent, config))
    if any(name.startswith("encoder.convolutions.") for name in weights):
        to_recipe = partial(_convolutional, weights)
        return LegacyModel(to_recipe, CONVOLUTIONAL, config, weights, source, target, generation=SEARCH)
    if "encoder.lstm.weight_ih_l0" in weights:
        weights = {rename_cell(name): tensor for name, tensor in weights.items()}
        return LegacyModel(_lstm, LSTM, config, weights, source, target, generation=SEARCH)
    return LegacyModel(_transformer, TRANSFORMER, config, weights, source, target, generation=SEARCH)


def _options(checkpoint: LegacyCheckpoint) -> Content:
    """Options of the model and its task: one namespace, or sections in newer checkpoints."""
    options, sections = checkpoint.settings.get("args"), checkpoint.settings.get("cfg")
    if isinstance(options, dict):
        return options
    named = [sections.get(name) for name in ("task", "model")] if isinstance(sections, dict) else []
    found = [one for one in named if isinstance(one, dict)]
    if len(found) != 2:
        raise InputError("the checkpoint has no args, and no cfg with model and task", where=str(checkpoint.file))
    return found[0] | found[1]


def _dictionaries(folder: Path, config: Config) -> tuple[str, str]:
    """The files of source and target, by the languages in the options; without them, two files that are equal."""
    languages = [config.content.get(f"{side}_lang") for side in ("source", "target")]
    if all(isinstance(language, str) and language for language in languages):
        return f"dict.{languages[0]}.txt", f"dict.{languages[1]}.txt"
    names = sorted(path.name for path in folder.glob("dict.*.txt") if path.is_file())
    if 1 <= len(names) <= 2 and read_lines(folder, names[0]) == read_lines(folder, names[-1]):
        return names[0], names[-1]
    raise InputError(
        "the checkpoint has no source_lang and target_lang, so it is not known which dictionary is which",
        where=config.where,
        remedy="only translation models are supported, trained with --source-lang and --target-lang",
    )


def _side(folder: Path, name: str) -> LegacyVocabulary:
    """Outputs start with </s>, and end with it too."""
    words = list(SPECIAL_TOKENS)
    for number, line in enumerate(read_lines(folder, name), 1):
        word, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not word or not count.isdecimal():
            raise InputError(
                "expected a word and its count", where=f"{folder / name}:{number}", remedy="fetch it again"
            )
        words.append(word)
    pad, end, unknown = (SPECIAL_TOKENS.index(name) for name in ("<pad>", "</s>", "<unk>"))
    return word_vocabulary(words, SpecialIds(pad, end, end, unknown), str(folder / name))
