"""JoeyNMT: a folder with config.yaml, two vocabularies and the checkpoint of a Transformer or a recurrent model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.tokenizers import SpecialIds
from transduce.interop.legacy.checkpoint_process import LegacyCheckpoint
from transduce.interop.legacy.model import (
    COMBINE,
    RECURRENT_MODULES,
    SCORE,
    LegacyModel,
    LegacyVocabulary,
    read_lines,
    recurrent_sections,
    rename_cell,
    widen_embeddings,
    word_vocabulary,
)
from transduce.parsing import parse_yaml

CONFIG = "config.yaml"
ATTENTION = {"q_layer": "q_proj", "k_layer": "k_proj", "v_layer": "v_proj", "output_layer": "out_proj"}
FEED_FORWARD = {"feed_forward.pwff_layer.0": "feed_forward.fc1", "feed_forward.pwff_layer.3": "feed_forward.fc2"}
SIDES = {
    "encoder": (
        {"src_src_att": "self_attention"},
        {"layer_norm": "self_attention_norm", "feed_forward.layer_norm": "feed_forward_norm"},
    ),
    "decoder": (
        {"trg_trg_att": "self_attention", "src_trg_att": "cross_attention"},
        {
            "x_layer_norm": "self_attention_norm",
            "dec_layer_norm": "cross_attention_norm",
            "feed_forward.layer_norm": "feed_forward_norm",
        },
    ),
}


def _modules() -> dict[str, str]:
    table = {"src_embed.lut": "encoder.embedding", "trg_embed.lut": "decoder.embedding"}
    for side, (attentions, norms) in SIDES.items():
        layer = {
            f"{a}.{foreign}": f"{b}.{native}" for a, b in attentions.items() for foreign, native in ATTENTION.items()
        }
        layer |= FEED_FORWARD | norms
        table |= {f"{side}.layers.*.{foreign}": f"{side}.layers.*.{native}" for foreign, native in layer.items()}
        table[f"{side}.layer_norm"] = f"{side}.final_norm"
    return table


OUTPUT = {"decoder.output_layer.weight": TensorMap(("decoder.output.projection.weight",))}
SINUSOIDS = ("encoder.pe.pe", "decoder.pe.pe")


def _stack(config: Config, norm: str) -> Content:
    config.require("type", "transformer")
    config.require("activation", "relu")
    config.require("alpha", 1.0)
    if norm not in ("pre", "post"):
        raise InputError(f"layer_norm: {norm!r} is not supported", where=config.where, remedy="pre or post")
    return {
        "kind": "transformer",
        "layers": config.count("num_layers"),
        "width": config.count("hidden_size"),
        "heads": config.count("num_heads"),
        "ff_width": config.count("ff_size"),
        "norm": norm,
        "norm_eps": 1e-6,
        "position": "sinusoidal",
        "dropout": config.rate("dropout"),
        "attention_dropout": config.rate("dropout"),
        "activation_dropout": config.rate("dropout"),
    }


def _transformer(config: Config, names: Collection[str]) -> Content:
    parts = {side: section(config, side) for side in SIDES}
    # Older versions have no such option and use pre-norm; a final norm in the weights shows that.
    default = "pre" if "encoder.layer_norm.weight" in names else "post"
    model: dict[str, Any] = {
        side: _stack(part, str(part.content.get("layer_norm") or default)) for side, part in parts.items()
    }
    tied = config.flag("tied_softmax")
    every = config.flag("tied_embeddings")
    scaled = {section(part, "embeddings").flag("scale") for part in parts.values()}
    if len(scaled) > 1:
        problem = "embeddings are scaled on one side only"
        raise InputError(problem, where=config.where, remedy="scale both sides or none")
    return model | {"tie": ("all" if every else "target") if tied else "none", "scale_embedding": scaled.pop()}


TRANSFORMER = WeightMap(_modules(), OUTPUT, ignored=SINUSOIDS)


def _recurrent(config: Config, names: Collection[str]) -> Content:
    encoder, decoder = (section(config, side) for side in SIDES)
    for part in (encoder, decoder):
        part.require("type", "recurrent")
        section(part, "embeddings").require("scale", False)
    cells = {str(part.content.get("rnn_type") or "gru") for part in (encoder, decoder)}
    attention = decoder.content.get("attention") or "bahdanau"
    if attention not in SCORES or len(cells) > 1 or not cells <= {"gru", "lstm"}:
        remedy = "supported: bahdanau and luong, gru or lstm on both sides"
        raise InputError(f"attention {attention!r} with {cells} is not supported", where=decoder.where, remedy=remedy)
    initial = _initial(decoder)
    if (initial == "bridge") != ("decoder.bridge_layer.weight" in names):
        problem = f"init_hidden: {initial} does not fit the weights"
        raise InputError(problem, where=decoder.where, remedy="the settings and the weights belong to different models")
    both = encoder.flag("bidirectional", True)
    encoder_options = {
        "layers": encoder.count("num_layers", 1),
        "width": encoder.count("hidden_size") * (2 if both else 1),
        "bidirectional": both,
    }
    input_feeding = decoder.flag("input_feeding", True)
    decoder_options = {
        "layers": decoder.count("num_layers", 1),
        "width": decoder.count("hidden_size"),
        "bridge": BRIDGES[initial],
        "context": {"kind": "luong", "score": SCORES[attention], "input_feeding": input_feeding, "bias": True},
    }
    shared = {"cell": cells.pop(), "dropout": encoder.rate("dropout")}
    tie = "target" if config.flag("tied_softmax") else "none"
    return recurrent_sections(shared, encoder_options, decoder_options) | {"tie": tie}


SCORES = {"bahdanau": "mlp", "luong": "bilinear"}
BRIDGES = {"bridge": "tanh", "last": "linear", "zero": "linear"}  # init_hidden; the last two are constant matrices


def _initial(decoder: Config) -> str:
    value = str(decoder.content.get("init_hidden") or "bridge")
    if value not in BRIDGES:
        raise decoder.wrong("init_hidden", value, "is not supported", f"supported: {', '.join(BRIDGES)}")
    return value


def _context_first(weight: Tensor) -> list[Tensor]:
    """JoeyNMT concatenates [state; context], the native layer [context; state]."""
    width = weight.size(0)
    return [torch.cat((weight[:, width:], weight[:, :width]), -1)]


def _bridge(initial: str, weights: Weights) -> Weights:
    """A bridge that is no weight of the checkpoint: all zero, or the (forward) state of the encoder unchanged."""
    memory, hidden = (weights.get(f"{side}.rnn.layers.0.weight_hh_l0") for side in ("encoder", "decoder"))
    if initial == "bridge" or memory is None or hidden is None:
        return {}
    directions = 2 if "encoder.rnn.layers.0.weight_hh_l0_reverse" in weights else 1
    width, given = hidden.size(1), memory.size(1) * directions
    matrix = torch.eye(width, given) if initial == "last" else torch.zeros(width, given)
    return {
        "decoder.bridge.weight": matrix.to(hidden),
        "decoder.bridge.bias": torch.zeros(width).to(hidden),
    }


def _combine(initial: str, weights: Weights) -> Weights:
    """Repeats the bridge, which JoeyNMT shares between all layers and both parts of an LSTM state."""
    combined = widen_embeddings(weights) | _bridge(initial, weights)
    times = len({name for name in weights if re.fullmatch(r"decoder\.rnn\.layers\.\d+\.weight_hh_l0", name)})
    hidden = combined.get("decoder.rnn.layers.0.weight_hh_l0")
    times *= 2 if hidden is not None and hidden.size(0) == 4 * hidden.size(1) else 1
    for leaf in ("weight", "bias"):
        name = f"decoder.bridge.{leaf}"
        if name in combined:
            combined[name] = torch.cat([combined[name]] * max(times, 1))
    return combined


def _recurrent_weights(attention: Any, initial: str) -> WeightMap:
    """`key_layer` is the matrix of a bilinear score, or the half of an MLP score that reads the memory."""
    mlp = attention != "luong"
    scores = (
        {"key_layer": "k_proj", "query_layer": "q_proj", "energy_layer": "energy_proj"}
        if mlp
        else {"key_layer": "k_proj"}
    )
    modules = {f"decoder.attention.{foreign}": f"{SCORE}.{native}" for foreign, native in scores.items()}
    modules |= RECURRENT_MODULES | {
        "src_embed.lut": "encoder.embedding",
        "trg_embed.lut": "decoder.embedding",
    }
    modules |= {"decoder.bridge_layer": "decoder.bridge", "decoder.att_vector_layer": COMBINE}
    tensors = OUTPUT | {"decoder.att_vector_layer.weight": TensorMap((f"{COMBINE}.weight",), _context_first)}
    return WeightMap(modules, tensors, combine=partial(_combine, initial))


def section(config: Config, name: str) -> Config:
    content = config.content.get(name)
    if not isinstance(content, Mapping):
        raise InputError(f"the section {name} is missing", where=config.where, remedy="fetch it again")
    return Config(content, f"{config.where}: {name}")


def read(checkpoint: LegacyCheckpoint) -> LegacyModel:
    folder = checkpoint.file.parent
    where = str(folder / CONFIG)
    content = parse_yaml("\n".join(read_lines(folder, CONFIG)), where)
    config = Config(content if isinstance(content, dict) else {}, where)
    model = section(config, "model")
    weights = {name.removeprefix("model_state/"): tensor for name, tensor in checkpoint.weights.items()}
    source, target = (_side(folder, name) for name in ("src_vocab.txt", "trg_vocab.txt"))
    search = _search(config)
    to_recipe, weight_map = _transformer, TRANSFORMER
    if "encoder.rnn.weight_ih_l0" in weights:
        to_recipe = _recurrent
        decoder = section(model, "decoder")
        weight_map = _recurrent_weights(decoder.content.get("attention"), _initial(decoder))
        weights = {rename_cell(name): tensor for name, tensor in weights.items()}
    return LegacyModel(to_recipe, weight_map, model, weights, source, target, (".score.k_proj.bias",), search)


def _search(config: Config) -> Content:
    """The beam of the config, and since version 2 no empty output."""
    testing = Config(config.content.get("testing") or {}, f"{config.where}: testing")
    beam, shortest = testing.content.get("beam_size"), testing.content.get("min_output_length")
    if shortest is None and str(config.content.get("joeynmt_version") or "").startswith("2"):
        shortest = 1
    found: Content = {"beam": beam} if isinstance(beam, int) and 1 < beam <= 100 else {}
    return found | ({"min_length": shortest} if isinstance(shortest, int) and 0 < shortest <= 100 else {})


def _side(folder: Path, name: str) -> LegacyVocabulary:
    words = read_lines(folder, name)
    number = {word: index for index, word in reversed(list(enumerate(words)))}
    special = SpecialIds(number.get("<pad>"), number.get("<s>"), number.get("</s>"), number.get("<unk>"))
    return word_vocabulary(words, special, str(folder / name))
