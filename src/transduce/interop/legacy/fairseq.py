"""fairseq: Transformers in the weight layout of BART, and LSTMs; options in the checkpoint, dictionaries beside it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transduce.errors import InputError
from transduce.interop.huggingface import bart
from transduce.interop.huggingface.family import Config, Content, WeightMap
from transduce.interop.huggingface.tokenizers import SpecialIds
from transduce.interop.legacy.checkpoint_process import LegacyCheckpoint
from transduce.interop.legacy.model import (
    BILINEAR,
    COMBINE,
    RECURRENT_MODULES,
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
IGNORED = tuple(f"{side}.{name}" for side in SIDES for name in ("version", "embed_positions._float_tensor"))
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
    return recurrent_sections(shared, encoder, decoder) | {"tie": ("all" if every else "target") if tied else "none"}


TRANSFORMER = WeightMap(MODULES, POSITIONS, ignored=IGNORED)
LSTM = WeightMap(
    {
        **RECURRENT_MODULES,
        **{f"{side}.embed_tokens": f"{side}.embedding" for side in SIDES},
        "decoder.attention.output_proj": COMBINE,
        "decoder.fc_out": "decoder.output.projection",
    },
    {"decoder.attention.input_proj.weight": BILINEAR},
    ignored=IGNORED,
    combine=widen_embeddings,
)


def read(checkpoint: LegacyCheckpoint) -> LegacyModel:
    config = Config(_options(checkpoint), str(checkpoint.file))
    weights = {name.removeprefix("model/"): tensor for name, tensor in checkpoint.weights.items()}
    source, target = (_side(checkpoint.file.parent, _language(config, side)) for side in ("source", "target"))
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


def _language(config: Config, side: str) -> str:
    name = config.content.get(f"{side}_lang")
    if not isinstance(name, str) or not name:
        problem = f"the checkpoint has no {side}_lang"
        raise InputError(problem, where=config.where, remedy="only translation models are supported")
    return name


def _side(folder: Path, language: str) -> LegacyVocabulary:
    """Outputs start with </s>, and end with it too."""
    name = f"dict.{language}.txt"
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
