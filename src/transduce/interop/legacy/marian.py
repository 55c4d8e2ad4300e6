"""Marian .npz and .bin files: flat names (encoder_l1_self_Wq), transposed matrices, options as text in one array."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from transduce.errors import InputError
from transduce.flow import UNK
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap
from transduce.interop.huggingface.folder import MAX_JSON, StoredTensor, inside
from transduce.interop.huggingface.sentencepiece import read_model
from transduce.interop.huggingface.tokenizers import SpecialIds
from transduce.interop.legacy.checkpoint_process import LegacyCheckpoint
from transduce.interop.legacy.model import (
    OUTPUT,
    SOURCE,
    TARGET,
    LegacyModel,
    LegacyVocabulary,
    read_lines,
    sentencepiece_vocabulary,
    word_vocabulary,
)
from transduce.parsing import parse_yaml

MAX_PIECES = 2**21  # of a vocabulary, with their ids
MODEL = "special:model.yml"
NORM_OPTIONS = ("preprocess", "postprocess", "postprocess-top")  # positions of the norms of a layer
ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "gelu"}
# Until 1.12.0 its gelu was x * sigmoid(1.702 x), which is silu(1.702 x) / 1.702: the factor goes into the matrices.
LAST_APPROXIMATE_GELU, GELU_SLOPE = (1, 12, 0), 1.702
AUTOREGRESSION = {"self-attention": "attention", "rnn": "ssru"}
# Earlier versions normalised queries, but neither keys nor values, of self-attention with a norm before it.
NORMALISED_KEYS = (1, 10, 28)
VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
LAYER = re.compile(r"^(encoder|decoder)_l(\d+)_")
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
SUBLAYERS = {  # of a layer, with the number of their norm
    "encoder": {"self": "self_attention", "ffn": "feed_forward"},
    "decoder": {"self": "self_attention", "context": "cross_attention", "ffn": "feed_forward"},
}


def _transpose(weight: Tensor) -> list[Tensor]:
    return [weight.T.contiguous()]


def _flatten(bias: Tensor) -> list[Tensor]:
    return [bias.flatten()]


def _norm(foreign: str, native: str) -> dict[str, TensorMap]:
    """A norm is named after the sublayer it follows, with `_pre` where it precedes it."""
    return {
        f"{foreign}_ln_{leaf}{end}": TensorMap((f"{native}.{name}",), _flatten)
        for leaf, name in (("scale", "weight"), ("bias", "bias"))
        for end in ("", "_pre")
    }


def _tensors() -> dict[str, TensorMap]:
    tensors: dict[str, TensorMap] = {}
    for side, parts in SUBLAYERS.items():
        for part, native in parts.items():
            names = {"1": "fc1", "2": "fc2"} if part == "ffn" else ATTENTION
            for foreign, name in names.items():
                layer = f"{side}.layers.*.{native}.{name}"
                tensors[f"{side}.*.{part}_W{foreign}"] = TensorMap((f"{layer}.weight",), _transpose)
                tensors[f"{side}.*.{part}_b{foreign}"] = TensorMap((f"{layer}.bias",), _flatten)
            last = "ffn" if part == "ffn" else "Wo"
            tensors |= _norm(f"{side}.*.{part}_{last}", f"{side}.layers.*.{native}_norm")
        tensors |= _norm(f"{side}_top", f"{side}.final_norm") | _norm(f"{side}_emb", f"{side}.embedding_norm")
    mixer = "decoder.layers.*.self_attention"
    return tensors | {
        "decoder.*.rnn_W": TensorMap((f"{mixer}.content.weight",), _transpose),
        "decoder.*.rnn_Wf": TensorMap((f"{mixer}.forget.weight",), _transpose),
        "decoder.*.rnn_bf": TensorMap((f"{mixer}.forget.bias",), _flatten),
        **_norm("decoder.*.rnn_ffn", f"{mixer}_norm"),
        "Wemb": TensorMap((SOURCE, TARGET)),
        "encoder_Wemb": TensorMap((SOURCE,)),
        "decoder_Wemb": TensorMap((TARGET,)),
        "decoder_ff_logit_out_W": TensorMap((OUTPUT,), _transpose),
        "decoder_ff_logit_out_Wt": TensorMap((OUTPUT,)),
        "decoder_ff_logit_out_b": TensorMap(("decoder.output.projection.bias",), _flatten),
    }


def _stack(config: Config, side: str) -> Content:
    content = config.content
    before, after, top = (str(content.get(f"transformer-{name}") or "") for name in NORM_OPTIONS)
    if (before, after, top) not in (("", "dan", ""), ("n", "da", "n")):
        problem = f"norms at ({before!r}, {after!r}, {top!r}) are not supported"
        raise InputError(problem, where=config.where, remedy="supported: ('', 'dan', '') and ('n', 'da', 'n')")
    activation = content.get("transformer-ffn-activation") or "swish"
    if activation not in ACTIVATIONS:
        problem = f"transformer-ffn-activation: {activation!r} is not supported"
        raise InputError(problem, where=config.where, remedy=f"supported: {', '.join(ACTIVATIONS)}")
    if before:
        _check_version(config)
    hidden = config.count("transformer-dim-ffn")
    decoder_hidden = config.content.get("transformer-decoder-dim-ffn") or 0
    mixer = {} if side == "encoder" else {"token_mixer": AUTOREGRESSION[_autoregression(config)]}
    return mixer | {
        "kind": "transformer",
        "layers": config.count("enc-depth" if side == "encoder" else "dec-depth"),
        "width": config.count("dim-emb"),
        "heads": config.count("transformer-heads"),
        "ff_width": decoder_hidden if side == "decoder" and decoder_hidden else hidden,
        "activation": "silu" if _approximates_gelu(content) else ACTIVATIONS[activation],
        "norm": "pre" if before else "post",
        "norm_eps": 1e-6,
        "embedding_norm": "n" in str(content.get("transformer-postprocess-emb") or ""),
        "position": {"kind": "sinusoidal", "halves": True, "inclusive": True},
        "dropout": config.rate("transformer-dropout"),
        "attention_dropout": config.rate("transformer-dropout-attention"),
        "activation_dropout": config.rate("transformer-dropout-ffn"),
    }


def _autoregression(config: Config) -> str:
    name = config.content.get("transformer-decoder-autoreg") or "self-attention"
    if name not in AUTOREGRESSION:
        remedy = f"supported: {', '.join(AUTOREGRESSION)}"
        raise InputError(f"transformer-decoder-autoreg: {name!r} is not supported", where=config.where, remedy=remedy)
    if name == "rnn":
        for option, value in (
            ("dec-cell", "ssru"),
            ("transformer-rnn-projection", False),
            ("layer-normalization", False),
        ):
            config.require(option, value)
    return str(name)


def _version(content: Mapping[str, Any]) -> tuple[int, ...]:
    """The version that trained the model; (0,) where it is not known."""
    found = VERSION.match(str(content.get("version") or ""))
    return (0,) if found is None else tuple(map(int, found.groups()))


def _approximates_gelu(content: Mapping[str, Any]) -> bool:
    return content.get("transformer-ffn-activation") == "gelu" and _version(content) <= LAST_APPROXIMATE_GELU


def _check_version(config: Config) -> None:
    """A norm before each layer means what the version that trained the model made of it."""
    if _version(config.content) < NORMALISED_KEYS:
        oldest = ".".join(map(str, NORMALISED_KEYS))
        trained = config.content.get("version") or "of an unknown version"
        raise InputError(
            f"transformer-preprocess: n, trained with Marian {trained}",
            where=config.where,
            remedy=f"before v{oldest} it left the keys and values of self-attention without a norm, which no native "
            "layer does: use that Marian, or train the model again",
        )
    warnings.warn(
        f"{config.where}: with transformer-preprocess: n, outputs are those of the trained model, as `marian score` "
        "computes it; `marian decode` (1.12) omits the norm of keys and values after the first token",
        stacklevel=2,
    )


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    for name, value in (
        ("type", "transformer"),
        ("right-left", False),
        ("transformer-disable-position-embeddings", False),
        ("transformer-attention-mask", "default"),
        ("ulr", False),
        ("lemma-dim-emb", 0),
        ("transformer-no-projection", False),
        ("transformer-train-position-embeddings", False),
        ("transformer-ffn-depth", 2),
        ("transformer-no-bias", False),
        ("transformer-no-affine", False),
    ):
        config.require(name, value)
    untied = any(name.startswith("decoder_ff_logit_out_W") for name in names)
    return {
        "encoder": _stack(config, "encoder"),
        "decoder": _stack(config, "decoder"),
        "tie": "none" if untied else ("all" if "Wemb" in names else "target"),
        "scale_embedding": True,
    }


WEIGHT_MAP = WeightMap({}, _tensors())


def _scaled(tensors: Mapping[str, TensorMap]) -> dict[str, TensorMap]:
    """The table of a model whose gelu is expressed by silu: the first matrix is multiplied, the second divided."""
    factors = {"ffn_W1": GELU_SLOPE, "ffn_b1": GELU_SLOPE, "ffn_W2": 1 / GELU_SLOPE}
    result = dict(tensors)
    for name, found in tensors.items():
        factor = factors.get(name.rpartition(".")[2])
        if factor is not None:
            result[name] = TensorMap(found.names, partial(_scale, found.convert, factor))
    return result


def _scale(convert: Callable[[Tensor], list[Tensor]], factor: float, tensor: Tensor) -> list[Tensor]:
    return [one * factor for one in convert(tensor)]


APPROXIMATE_GELU_MAP = WeightMap({}, _scaled(_tensors()))


def _table_name(name: str) -> str:
    """`encoder_l1_self_Wq` -> `encoder.0.self_Wq`"""
    found = LAYER.match(name)
    return name if found is None else f"{found[1]}.{int(found[2]) - 1}.{name[found.end() :]}"


def _untied(weights: Mapping[str, StoredTensor], layers: Any, where: str) -> dict[str, StoredTensor]:
    """Every decoder layer with weights of its own: layer i of the decoder has those of layer `layers[i]`, from 1."""
    result = {name: tensor for name, tensor in weights.items() if not name.startswith("decoder.")}
    for number, shared in enumerate(layers):
        if type(shared) is not int or not 0 < shared <= len(layers):
            raise InputError(f"transformer-tied-layers: {shared!r} is no layer", where=where, remedy="fetch it again")
        begin = f"decoder.{shared - 1}."
        result |= {
            f"decoder.{number}.{name.removeprefix(begin)}": tensor
            for name, tensor in weights.items()
            if name.startswith(begin)
        }
    return result


def read(checkpoint: LegacyCheckpoint) -> LegacyModel:
    where = str(checkpoint.file)
    text = checkpoint.settings.get(MODEL)
    content = parse_yaml(text, where) if isinstance(text, str) else None
    if not isinstance(content, dict):
        raise InputError(f"the file has no {MODEL}, as every model of Marian has", where=where, remedy="fetch it again")
    weights = {_table_name(name): tensor for name, tensor in checkpoint.weights.items()}
    if isinstance(tied := content.get("transformer-tied-layers"), list) and tied:
        weights = _untied(weights, tied, f"{where}: {MODEL}")
    source, target = _sides(checkpoint.file)
    weight_map = APPROXIMATE_GELU_MAP if _approximates_gelu(content) else WEIGHT_MAP
    config = Config(content, f"{where}: {MODEL}")
    return LegacyModel(_to_recipe, weight_map, config, weights, source, target, generation=_search(checkpoint.file))


def _search(file: Path) -> Content:
    """The search of its decoder: the settings saved with the model, and no <unk>."""
    saved = _decoder_settings(file)
    config = Config(saved, f"{file}.decoder.yml")
    found: Content = {"beam": config.integer("beam-size", 1, 1000), "length_penalty": config.number("normalize", 0)}
    unknown: Content = {} if saved.get("allow-unk") is True else {"suppress": [UNK]}
    return {name: value for name, value in found.items() if value is not None} | unknown


def _sides(file: Path) -> tuple[LegacyVocabulary, LegacyVocabulary]:
    folder = file.parent
    names = _vocabularies(file)
    if not names:
        remedy = "vocab.yml or vocab.spm, or the two that decoder.yml names under `vocabs`"
        raise InputError("the vocabulary is missing", where=str(folder), remedy=f"put it in the same folder: {remedy}")
    spm = [name for name in ("source.spm", "target.spm") if (folder / name).is_file()]
    sides = [_side(folder, name, spm[index] if len(spm) == 2 else "") for index, name in enumerate((names * 2)[:2])]
    return sides[0], sides[1]


def _vocabularies(file: Path) -> list[str]:
    """One for both sides or one for each: those that decoder.yml names, or else those found by their file names."""
    folder = file.parent
    listed = _decoder_settings(file).get("vocabs")
    if isinstance(listed, list) and 1 <= len(listed) <= 2:
        return [Path(str(one)).name for one in listed]
    found = sorted(path.name for path in folder.iterdir() if re.fullmatch(r".*vocab.*\.(yml|yaml|spm)", path.name))
    sides = [[name for name in found if re.search(pattern, name)] for pattern in (r"src|source", r"trg|tgt|target")]
    if len(found) == 2 and all(len(side) == 1 for side in sides):
        return [side[0] for side in sides]
    return found if len(found) == 1 else []


def _decoder_settings(file: Path) -> Content:
    folder = file.parent
    for name in (f"{file.name}.decoder.yml", "decoder.yml"):
        if (folder / name).is_file():
            content = parse_yaml("\n".join(read_lines(folder, name)), str(folder / name))
            if isinstance(content, dict):
                return content
    return {}


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and value.isdecimal() and len(value) < 10


def _side(folder: Path, name: str, spm: str) -> LegacyVocabulary:
    """Outputs have no start token: the first input vector of the decoder is zero."""
    path = inside(folder, name)
    if name.endswith(".spm"):
        model = read_model(folder, name)
        listed = {piece: number for number, (piece, _, _) in enumerate(model.pieces)}
    else:
        content = parse_yaml(
            "\n".join(read_lines(folder, name)), str(path), max_bytes=MAX_JSON, max_nodes=MAX_PIECES, as_text=True
        )
        if not isinstance(content, dict) or not all(map(_is_id, content.values())):
            raise InputError("expected words with their ids", where=str(path), remedy="fetch it again")
        listed = {str(word): int(number) for word, number in content.items()}
    if sorted(listed.values()) != list(range(len(listed))):
        raise InputError("the ids do not run from 0 to the last", where=str(path), remedy="fetch it again")
    special = SpecialIds(None, None, listed.get("</s>"), listed.get("<unk>"))
    if name.endswith(".spm") or spm:
        return sentencepiece_vocabulary(read_model(folder, spm or name), listed, special, str(path))
    return word_vocabulary(sorted(listed, key=listed.__getitem__), special, str(path))
