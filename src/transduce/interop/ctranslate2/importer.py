"""Import of CTranslate2 folders with an encoder and a decoder of text (`TransformerSpec`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from transduce.attention.positions import Sinusoidal
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.interop.ctranslate2.exporter import piece_names
from transduce.interop.ctranslate2.model_file import FILE, REMEDY, Variables
from transduce.interop.huggingface.family import NORM_EPS, Config, Content, ImportedModel, TensorMap, WeightMap
from transduce.interop.huggingface.folder import StoredTensor, inside, list_weights, read_json, read_text
from transduce.interop.huggingface.sentencepiece import read_model
from transduce.interop.huggingface.tokenizers import SpecialIds
from transduce.interop.huggingface.weights import ImportRows
from transduce.interop.legacy.model import (
    OUTPUT,
    SOURCE,
    TARGET,
    LegacyModel,
    LegacyVocabulary,
    assemble,
    read_lines,
    sentencepiece_vocabulary,
    word_vocabulary,
)
from transduce.parsing import parse_json
from transduce.storage import write_tensors

CONFIG = "config.json"
SEARCH = {"strategy": "huggingface_beam", "beam": 2, "stop": "full", "max_length": 256}  # of translate_batch
PADDING = ("<pad>", "<blank>", "[PAD]")
SIDES = ("encoder", "decoder")
# Where Argos Translate and converters put the SentencePiece models of source and target.
PIECE_MODELS = (("source.spm", "target.spm"), ("sentencepiece.model", "sentencepiece.model"))
LAYER = {
    "self_attention.linear_1": "self_attention.out_proj",
    "self_attention.layer_norm": "self_attention_norm",
    "attention.linear_0": "cross_attention.q_proj",
    "attention.linear_2": "cross_attention.out_proj",
    "attention.layer_norm": "cross_attention_norm",
    "ffn.linear_0": "feed_forward.fc1",
    "ffn.linear_0_noact": "feed_forward.fc_gate",
    "ffn.linear_1": "feed_forward.fc2",
    "ffn.layer_norm": "feed_forward_norm",
}
MODULES = {
    **{f"{side}.layer.*.{foreign}": f"{side}.layers.*.{name}" for side in SIDES for foreign, name in LAYER.items()},
    **{f"{side}.layer_norm": f"{side}.final_norm" for side in SIDES},
    **{f"{side}.layernorm_embedding": f"{side}.embedding_norm" for side in SIDES},
    "decoder.projection": "decoder.output.projection",
}
SINUSOIDS: tuple[Content, ...] = (
    {"halves": False},
    {"halves": True},
    {"halves": True, "inclusive": True, "offset": 1},
    {"halves": True, "inclusive": True, "offset": 2},
)
COMPUTED: Content = {"kind": "sinusoidal", **SINUSOIDS[2]}  # where the file has no table
REFUSED = ("alibi", "sliding_window", "scale_alibi", "project_in.weight", "final_logit_softcapping")
REFUSED_IN_LAYERS = (
    "relative_position_keys", "relative_asymmetric_position_keys", "rotary_scaling_type", "q_norm.gamma",
    "v_norm.gamma", "merged_encoder_attention",
)  # fmt: skip
ACTIVATION_NUMBERS = ("relu", "gelu_tanh", "silu", "gelu")


def read_transformer(folder: Path, variables: Variables) -> ImportedModel:
    where = str(folder / FILE)
    _refuse(variables, where)
    config = Config(read_json(folder, CONFIG), str(folder / CONFIG))
    source, target = _vocabularies(folder, config, variables)
    weights = _prepared(variables, where)
    with stored_weights(weights) as stored:

        def to_recipe(settings: Config, names: Collection[str]) -> Content:
            return _recipe(variables, weights, settings)

        weight_map = _weight_map(variables, weights)
        model = LegacyModel(to_recipe, weight_map, config, stored, source, target, (".bias",), SEARCH)
        return assemble(model)


@contextmanager
def stored_weights(weights: Mapping[str, Tensor]) -> Iterator[dict[str, StoredTensor]]:
    """The weights in a file, as importers read them."""
    with TemporaryDirectory(prefix="transduce-") as temporary:
        separate = {name: tensor.clone() for name, tensor in weights.items()}  # a file has no tensor twice
        write_tensors(Path(temporary) / "model.safetensors", separate, {"format": "pt"})
        yield list_weights(Path(temporary))


def _refuse(variables: Variables, where: str) -> None:
    """Raises an error that names the first part that has no native counterpart."""
    known = {**variables.numbers, **dict.fromkeys(variables.weights, 1.0)}
    for name, value in known.items():
        side, _, rest = name.partition(".")
        inner = rest.rpartition("attention.")[2]
        if value and ((side in SIDES and rest in REFUSED) or inner in REFUSED_IN_LAYERS):
            raise InputError(f"{name} is not supported", where=where, remedy="import the original model")
    if any(name.startswith("encoder.embeddings_1.") for name in variables.weights):
        raise InputError("features of the source are not supported", where=where, remedy="import the original model")


def _prepared(variables: Variables, where: str) -> dict[str, Tensor]:
    """The weights under their final names; position tables that can be computed are left out."""
    weights = dict(variables.weights)
    for old in ("encoder.embeddings.weight", "encoder.embeddings_0.weight"):
        if old in weights:
            weights[SOURCE] = weights.pop(old)
    for foreign, native in (("decoder.embeddings.weight", TARGET), ("decoder.projection.weight", OUTPUT)):
        if foreign not in weights:
            raise InputError(f"{foreign} is missing", where=where, remedy=REMEDY)
        weights[native] = weights.pop(foreign)
    if (factor := variables.number("decoder.scale_outputs", 0.0)) not in (0.0, 1.0):
        weights[OUTPUT] = weights[OUTPUT] * factor
    for side in SIDES:
        biases = sorted(name for name in weights if name.endswith(".self_attention.relative_attention_bias"))
        biases = [name for name in biases if name.startswith(side)]
        tables = [weights.pop(name) for name in biases]
        if any(not torch.equal(table, tables[0]) for table in tables):
            raise InputError(
                f"{biases[0]} differs from layer to layer", where=where, remedy="import the original model"
            )
        weights |= {f"{side}.position.relative_attention_bias.weight": tables[0]} if tables else {}
        table = f"{side}.position_encodings.encodings"
        if table in weights and _position(variables, weights, side)["kind"] == "sinusoidal":
            del weights[table]
    if not _has_bias(weights):
        weights = {name: tensor for name, tensor in weights.items() if not name.endswith(".beta")}
    return weights


def _has_bias(weights: Mapping[str, Tensor]) -> bool:
    """Whether layers have biases; norms always have one in the file, which is zero where the model has none."""
    return any(
        ".layer." in name and (name.endswith(".bias") or (name.endswith(".beta") and bool(tensor.any())))
        for name, tensor in weights.items()
    )


def _position(variables: Variables, weights: Mapping[str, Tensor], side: str) -> Content:
    """A table is compared with the sinusoids that can be computed, for which no position is the last."""
    attention = f"{side}.layer.0.self_attention"
    table = variables.weights.get(f"{side}.position_encodings.encodings")
    if f"{attention}.rotary_dim" in variables.numbers:
        head = _head_width(variables, weights, side)
        rotated = int(variables.number(f"{attention}.rotary_dim", 0)) or head
        base = variables.number(f"{attention}.rotary_base", 10_000.0)
        return {"kind": "rotary", "base": base, "share": rotated / head}
    if f"{side}.position.relative_attention_bias.weight" in weights:
        buckets = len(weights[f"{side}.position.relative_attention_bias.weight"])
        distance = int(variables.number(f"{attention}.relative_attention_max_distance", 128))
        return {"kind": "relative", "buckets": buckets, "max_distance": distance}
    if table is None:
        return COMPUTED
    if not table.any():
        return {"kind": "none"}
    for options in SINUSOIDS:
        encoding = Sinusoidal(table.size(1), 1, causal=False, **options)
        rows = encoding.add(torch.zeros(1, *table.shape), torch.arange(len(table))[None])[0]
        if torch.allclose(rows, table, rtol=0, atol=1e-3):
            return {"kind": "sinusoidal", **options}
    return {"kind": "learned", "max_positions": len(table)}


def _head_width(variables: Variables, weights: Mapping[str, Tensor], side: str) -> int:
    output = weights.get(f"{side}.layer.0.self_attention.linear_1.weight")
    heads = int(variables.number(f"{side}.num_heads", 8))
    return (0 if output is None else output.size(1)) // max(heads, 1)


def _weight_map(variables: Variables, weights: Mapping[str, Tensor]) -> WeightMap:
    tensors = {name: TensorMap((name,)) for name in (SOURCE, TARGET, OUTPUT)} | attention_tensors(variables)
    ignored = []
    for side in SIDES:
        relative = f"{side}.position.relative_attention_bias.weight"
        tensors[relative] = TensorMap((relative,))
        encodings = f"{side}.position_encodings.encodings"
        if _position(variables, weights, side)["kind"] == "learned":
            tensors[encodings] = TensorMap((f"{side}.position.embed_positions.weight",))
        ignored.append(encodings)
    return WeightMap(MODULES, tensors, ignored=tuple(ignored))


def attention_tensors(variables: Variables) -> dict[str, TensorMap]:
    """Queries, keys and values of self-attention are one matrix, keys and values of cross-attention another."""
    tensors = {}
    for side in SIDES:
        heads = int(variables.number(f"{side}.num_heads", 8))
        groups = int(variables.number(f"{side}.layer.0.self_attention.num_heads_kv", heads))
        own, cross = f"{side}.layers.*.self_attention", f"{side}.layers.*.cross_attention"
        for leaf in ("weight", "bias"):
            tensors[f"{side}.layer.*.self_attention.linear_0.{leaf}"] = TensorMap(
                tuple(f"{own}.{name}.{leaf}" for name in ("q_proj", "k_proj", "v_proj")), _split(heads, groups)
            )
            tensors[f"{side}.layer.*.attention.linear_1.{leaf}"] = TensorMap(
                tuple(f"{cross}.{name}.{leaf}" for name in ("k_proj", "v_proj")), lambda joint: list(joint.chunk(2))
            )
    return tensors


def count_layers(weights: Collection[str], side: str) -> int:
    numbers = [int(found[1]) for name in weights if (found := re.match(rf"{side}\.layer\.(\d+)\.", name))]
    return max(numbers, default=-1) + 1


def _split(heads: int, groups: int) -> Callable[[Tensor], list[Tensor]]:
    """Queries, keys and values of one matrix, with fewer heads of keys and values."""

    def convert(joint: Tensor) -> list[Tensor]:
        head = len(joint) // max(heads + 2 * groups, 1)
        return [
            part.contiguous() for part in joint.split((len(joint) - 2 * groups * head, groups * head, groups * head))
        ]

    return convert


def _recipe(variables: Variables, weights: Mapping[str, Tensor], config: Config) -> Content:
    tied = torch.equal(weights[TARGET], weights[OUTPUT])
    shared = tied and SOURCE in weights and torch.equal(weights[SOURCE], weights[TARGET])
    scales = {_scale(variables, weights, side, config) for side in SIDES}
    if len(scales) > 1:
        raise config.wrong("scale_embeddings", sorted(scales), "differs between encoder and decoder")
    return {
        **{side: _read_stack(variables, weights, side, config) for side in SIDES},
        "tie": "all" if shared else ("target" if tied else "none"),
        "scale_embedding": scales.pop(),
        "source_eos": _source_eos(config),
    }


def _source_eos(config: Config) -> bool:
    """OpenNMT reads sources without </s>, and starts with <s>; tokenizers of other toolkits write one."""
    start = config.content.get("decoder_start_token", "<s>")
    like_opennmt = start == (config.content.get("bos_token") or "<s>") and start not in PADDING
    return config.flag("add_source_eos") or not like_opennmt


def _scale(variables: Variables, weights: Mapping[str, Tensor], side: str, config: Config) -> bool:
    """Whether embeddings are multiplied by the root of the width; the file has the factor, or 1 for yes."""
    root = weights[TARGET].size(1) ** 0.5
    given = variables.number(f"{side}.scale_embeddings", 0.0)
    merged = variables.number(f"{side}.embeddings.multiply_by_sqrt_depth", 1.0)
    if f"{side}.scale_embeddings" not in variables.numbers:
        return bool(merged)
    if abs(given - root) < 1e-3 * root:
        return True
    if given in (0.0, 1.0):
        return False
    raise config.wrong("scale_embeddings", given, "is neither 1 nor the root of the width", "import the original model")


def _read_stack(variables: Variables, weights: Mapping[str, Tensor], side: str, config: Config) -> Content:
    attention = f"{side}.layer.0.self_attention"
    layers = count_layers(weights, side)
    heads, head = int(variables.number(f"{side}.num_heads", 8)), _head_width(variables, weights, side)
    activation = int(variables.number(f"{side}.activation", 0))
    if not layers or not head or activation >= len(ACTIVATION_NUMBERS):
        raise config.wrong("activation", activation, "or a missing layer has no native counterpart", REMEDY)
    rms = f"{attention}.layer_norm.beta" not in variables.weights
    width = weights[TARGET].size(1)
    gain = variables.number(f"{attention}.queries_scale", head**-0.5)
    if not any(abs(gain - known) < 1e-6 for known in (1.0, head**-0.5)):
        raise config.wrong("queries_scale", gain, "is not supported", "import the original model")
    if variables.number(f"{attention}.rotary_interleave", 0.0):
        raise config.wrong("rotary_interleave", True, "is not supported", "import the original model")
    return {
        "kind": "transformer",
        "layers": layers,
        "width": width,
        "heads": heads,
        "head_width": None if heads * head == width else head,
        "kv_heads": int(variables.number(f"{attention}.num_heads_kv", heads)),
        "ff_width": len(weights[f"{side}.layer.0.ffn.linear_0.weight"]),
        "activation": ACTIVATION_NUMBERS[activation],
        "gated": f"{side}.layer.0.ffn.linear_0_noact.weight" in weights,
        "norm": "pre" if variables.number(f"{side}.pre_norm", 1.0) else "post",
        "norm_kind": "rms" if rms else "layer",
        "norm_eps": config.number("layer_norm_epsilon", 0, 1) or NORM_EPS["rms" if rms else "layer"],
        "embedding_norm": f"{side}.layernorm_embedding.gamma" in weights,
        "bias": _has_bias(weights),
        "score": "dot" if abs(gain - 1.0) < 1e-6 and head != 1 else "scaled_dot",
        "position": _position(variables, weights, side),
    }


def _vocabularies(folder: Path, config: Config, variables: Variables) -> tuple[LegacyVocabulary, LegacyVocabulary]:
    """Source and target, from the tokenizers of an export, from SentencePiece models, or of tokens as they are."""
    source, target = (read_pieces(folder, (f"{side}_vocabulary", "shared_vocabulary")) for side in ("source", "target"))
    native = [inside(folder, f"tokenizer.{side}.json") for side in ("source", "target")]
    if all(path.is_file() for path in native):
        first, second = (_native(path, pieces) for path, pieces in zip(native, (source, target), strict=True))
        return first, second
    for places in (folder, folder.parent):
        for names in PIECE_MODELS:
            if all(inside(places, name).is_file() for name in names):
                models = [read_model(places, name) for name in names]
                made = [
                    sentencepiece_vocabulary(
                        model, _numbered(pieces, str(folder)), _specials(pieces, config, variables), str(folder)
                    )
                    for model, pieces in zip(models, (source, target), strict=True)
                ]
                return made[0], made[1]
    words = [word_vocabulary(one, _specials(one, config, variables), str(folder)) for one in (source, target)]
    return words[0], words[1]


def _numbered(pieces: list[str], where: str) -> dict[str, int]:
    numbers = {piece: number for number, piece in enumerate(pieces)}
    if len(numbers) < len(pieces):
        raise InputError("a piece occurs twice in a vocabulary", where=where, remedy=REMEDY)
    return numbers


def _native(path: Path, pieces: list[str]) -> LegacyVocabulary:
    tokenizer = Tokenizer.load(path)
    if piece_names(tokenizer) != pieces:
        raise InputError("its pieces are not those of the model", where=str(path), remedy="export the model again")
    return LegacyVocabulary(tokenizer, ImportRows(tuple(range(len(pieces))), len(pieces)))


def read_pieces(folder: Path, names: Sequence[str]) -> list[str]:
    """A vocabulary of one of these names, in JSON, or in older files one piece a line."""
    for name in names:
        if inside(folder, f"{name}.json").is_file():
            content = parse_json(read_text(folder, f"{name}.json"), str(folder / f"{name}.json"))
            if not isinstance(content, list) or not content or not all(isinstance(one, str) for one in content):
                raise InputError("expected a list of pieces", where=str(folder / f"{name}.json"), remedy=REMEDY)
            return content
        if inside(folder, f"{name}.txt").is_file():
            return read_lines(folder, f"{name}.txt")
    listed = " and no ".join(f"{name}.json" for name in names)
    raise InputError(f"there is no {listed}", where=str(folder), remedy=REMEDY)


def _specials(pieces: list[str], config: Config, variables: Variables) -> SpecialIds:
    known = {piece: number for number, piece in enumerate(pieces)}

    def number(key: str, default: str) -> int | None:
        named: Any = config.content.get(key) or default
        return known.get(named) if isinstance(named, str) else None

    start = number("decoder_start_token", "<s>")
    if variables.number("decoder.start_from_zero_embedding", 0.0):
        start = None  # a row of zeros
    pad = next((known[name] for name in PADDING if name in known), None)
    return SpecialIds(pad, start, number("eos_token", "</s>"), number("unk_token", "<unk>"))
