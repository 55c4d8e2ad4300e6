"""Legacy model: what the reader of a toolkit returns, and its assembly into a native model.

These toolkits read text that is already split into tokens: their vocabularies become tokenizers that split at white
space, except those of SentencePiece models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN, Vocabulary
from transduce.errors import InputError
from transduce.flow import SPECIALS, UNK
from transduce.interop.huggingface.family import Config, Content, ImportedModel, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.folder import MAX_JSON, StoredTensor, inside, read_tensor
from transduce.interop.huggingface.sentencepiece import (
    LANGUAGE_CODE,
    NORMAL,
    UNREACHABLE,
    USER,
    SentencePiece,
    to_tokenizer,
)
from transduce.interop.huggingface.tokenizers import SpecialIds
from transduce.interop.huggingface.weights import MISSING, ImportRows, Shapes
from transduce.recipe import Recipe, build, parse
from transduce.recipe.build import meta_device

MAX_LENGTH = 512  # tokens of a training text
SOURCE, TARGET, OUTPUT = (
    "encoder.embedding.weight",
    "decoder.embedding.weight",
    "decoder.output.projection.weight",
)
BIAS = "decoder.output.projection.bias"
TIED = {"none": (), "target": (TARGET, OUTPUT), "all": (SOURCE, TARGET, OUTPUT)}
MISMATCH = "the settings and the weights belong to different models, or to one with additions"
# `encoder.rnn.weight_ih_l1_reverse`, `decoder.rnn.layers.0.weight_ih`, `decoder.layers.0.weight_ih`
CELL = re.compile(
    r"(encoder|decoder)\.(?:rnn|lstm|layers|rnn\.layers)\.(?:(\d+)\.)?((?:weight|bias)_[ih]h)(?:_l(\d+))?(_reverse)?"
)
RECURRENT_MODULES = {f"{side}.cells.*": f"{side}.rnn.layers.*" for side in ("encoder", "decoder")}
SCORE, COMBINE = "decoder.context.attend.score", "decoder.context.combine"


@dataclass(frozen=True)
class LegacyVocabulary:
    """Source or target tokenizer, with the order of its vocabulary rows."""

    tokenizer: Tokenizer
    rows: ImportRows

    @property
    def size(self) -> int:
        return len(self.rows.rows)


@dataclass(frozen=True)
class LegacyModel:
    """A checkpoint of a legacy toolkit, its tensors under the names of the weight map."""

    to_recipe: Callable[[Config, Collection[str]], Content]  # model section of a recipe
    weight_map: WeightMap
    config: Config
    weights: Mapping[str, StoredTensor]
    source: LegacyVocabulary
    target: LegacyVocabulary
    zero_biases: tuple[str, ...] = ()  # endings of native biases that are zero where the checkpoint has none
    generation: Mapping[str, Any] = field(default_factory=dict)


def assemble(model: LegacyModel) -> ImportedModel:
    """A native model. All names and shapes are checked before any tensor is read."""
    recipe = _recipe(model)
    with meta_device():
        network = build.build_model(recipe.model, model.source.size, model.target.size)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    _check(_native_weights(model, recipe, shapes, _on_meta), shapes, model.config.where)
    weights = _native_weights(model, recipe, shapes, read_tensor)
    tied = TIED[recipe.model.tie]
    if any(not torch.equal(weights[name], weights[tied[0]]) for name in tied):
        raise InputError("weights that the settings tie differ", where=model.config.where, remedy=MISMATCH)
    return ImportedModel(recipe, (model.source.tokenizer, model.target.tokenizer), weights)


def _on_meta(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, device="meta")


def _recipe(model: LegacyModel) -> Recipe:
    where = model.config.where
    parts = model.to_recipe(model.config, model.weights)
    if max(parts[side]["layers"] for side in ("encoder", "decoder")) > len(model.weights):
        raise InputError("more layers than weights", where=where, remedy=MISMATCH)
    limits = [part["position"]["max_positions"] for part in parts.values() if _has_last_position(part)]
    content = {
        "data": {"format": "pairs", "max_length": min([MAX_LENGTH, *(limit - 1 for limit in limits)])},
        "tokens": {
            "source": {"kind": "given", "size": model.source.size},
            "target": {"kind": "given", "size": model.target.size},
            "shared": model.source.tokenizer.fingerprint == model.target.tokenizer.fingerprint,
        },
        "model": parts,
        "generation": dict(model.generation),
    }
    return build.complete_recipe(parse(content, where), where)


def _has_last_position(part: Any) -> bool:
    return isinstance(part, Mapping) and "max_positions" in (part.get("position") or {})


def _native_weights(
    model: LegacyModel, recipe: Recipe, shapes: Shapes, read: Callable[[StoredTensor], Tensor]
) -> Weights:
    """Native names, token rows in native order, tied tensors and zero biases filled in."""
    weights = _converted(model, read)
    for name, tensor in list(weights.items()):
        if name in (SOURCE, TARGET, OUTPUT, BIAS):
            weights[name] = _reorder(name, tensor, model)
    tied = TIED[recipe.model.tie]
    present = [name for name in tied if name in weights]
    weights |= {name: weights[present[0]] for name in tied if present and name not in weights}
    device = next(iter(weights.values())).device
    for name, shape in shapes.items():
        if name not in weights and name.endswith((*model.zero_biases, BIAS)):
            weights[name] = torch.zeros(shape, device=device)
    if BIAS in weights:
        weights[BIAS] = model.target.rows.suppress(weights[BIAS])
    return weights


def _converted(model: LegacyModel, read: Callable[[StoredTensor], Tensor]) -> Weights:
    where, weights = model.config.where, Weights()
    for name, stored in model.weights.items():
        found = model.weight_map.find(name)
        if found is None:
            if model.weight_map.ignores(name):
                continue
            problem = f"{name} would be dropped: this architecture has no such weight"
            raise InputError(problem, where=where, remedy=MISMATCH)
        converted = found.apply(read(stored))
        if twice := sorted(set(converted) & set(weights)):
            raise InputError(f"{name} is a second {twice[0]}", where=where, remedy=MISMATCH)
        weights |= converted
    return model.weight_map.combine(weights)


def _reorder(name: str, tensor: Tensor, model: LegacyModel) -> Tensor:
    rows = model.source.rows if name == SOURCE else model.target.rows
    if len(tensor) != rows.foreign_size:
        problem = f"{name} has {len(tensor)} rows, but the vocabulary {rows.foreign_size} tokens"
        raise InputError(problem, where=model.config.where, remedy="the vocabulary belongs to another model")
    return rows.reorder(tensor)


def _check(weights: Weights, shapes: Shapes, where: str) -> None:
    """Missing, unexpected and misshapen weights are errors."""
    for name, tensor in weights.items():
        if name not in shapes:
            raise InputError(f"{name} would be dropped: the settings have no such part", where=where, remedy=MISMATCH)
        if tuple(tensor.shape) != shapes[name]:
            problem = f"{name} would be {tuple(tensor.shape)}, but the settings ask for {shapes[name]}"
            raise InputError(problem, where=where, remedy=MISMATCH)
    if missing := sorted(set(shapes) - set(weights)):
        raise InputError(f"the weights of {missing[0]} are missing", where=where, remedy=MISMATCH)


def read_lines(folder: Path, name: str) -> list[str]:
    """The lines of a text file beside the checkpoint."""
    path = inside(folder, name)
    if not path.is_file():
        raise InputError(f"there is no {name}", where=str(folder), remedy="put it in the folder of the checkpoint")
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"larger than {MAX_JSON:,} bytes", where=str(path), remedy="this is no vocabulary or config")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error}", where=str(path), remedy="fetch it again") from None
    # Not str.splitlines: a vocabulary may hold other characters that Python counts as line ends.
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def word_vocabulary(
    words: Sequence[str], special: SpecialIds, where: str, *, needs_end: bool = True
) -> LegacyVocabulary:
    """Tokens separated by white space; `words` in the order of their ids. `needs_end`: </s> must be one of them."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    rows = _import_rows(len(words), special, where, needs_end=needs_end)
    ids: dict[str, int] = {}
    for number in rows.rows[len(SPECIALS) :]:
        ids.setdefault(words[number], number)
    ids.pop("", None)
    unknown = len(words) if special.unknown is None else special.unknown
    unknown_piece = SPECIALS[UNK] + UNREACHABLE
    backend = Backend(models.WordLevel({**ids, unknown_piece: unknown}, unk_token=unknown_piece))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _side(backend, {number: word for word, number in ids.items()}, rows, {n: n for n in range(len(words))})


def sentencepiece_vocabulary(
    model: SentencePiece, vocabulary: Mapping[str, int], special: SpecialIds, where: str
) -> LegacyVocabulary:
    """Pieces of a SentencePiece model, with the ids of a vocabulary."""
    rows = _import_rows(max(vocabulary.values()) + 1, special, where)
    spelt = {piece for piece, _, kind in model.pieces if kind in (NORMAL, USER)}
    codes = [piece for piece in vocabulary if LANGUAGE_CODE.fullmatch(piece) and piece not in spelt]
    backend, ids = to_tokenizer(model, dict(vocabulary), codes)
    return _side(backend, {number: piece for piece, number in vocabulary.items()}, rows, ids)


def _import_rows(size: int, special: SpecialIds, where: str, *, needs_end: bool = True) -> ImportRows:
    found = [MISSING if one is None else one for one in (special.pad, special.start, special.end, special.unknown)]
    endless = needs_end and special.end is None
    if endless or max(found) >= size:
        raise InputError(
            "no token ends a text" if endless else f"token {max(found)} is not among {size} tokens",
            where=where,
            remedy="the vocabulary belongs to another model: fetch it again",
        )
    return ImportRows((*found, *(number for number in range(size) if number not in found)), size)


def _side(backend: Any, pieces: Mapping[int, str], rows: ImportRows, ids: Mapping[int, int]) -> LegacyVocabulary:
    named = [pieces.get(number, f"<unused {number}>") for number in rows.rows[len(SPECIALS) :]]
    known = tuple(ids.get(number, MISSING) for number in rows.rows)
    return LegacyVocabulary(
        Tokenizer(Vocabulary(GIVEN, (*SPECIALS, *named), backend_json=backend.to_str(), backend_ids=known)), rows
    )


def rename_cell(name: str) -> str:
    """Weights of a cell under the number of its layer; other names unchanged."""
    found = CELL.fullmatch(name)
    if found is None:
        return name
    side, layer, leaf, last, reverse = found.groups()
    return f"{side}.cells.{layer or last or 0}.{leaf}_l0{reverse or ''}"


def transpose(weight: Tensor) -> list[Tensor]:
    """Their score is (P s) . h, the native one s . (W h): W is P transposed."""
    return [weight.T.contiguous()]


BILINEAR = TensorMap((f"{SCORE}.k_proj.weight",), transpose)


def recurrent_sections(shared: Content, encoder: Content, decoder: Content) -> Content:
    """Model section of a recipe whose decoder attends with the state after each step (Luong et al., 2015)."""
    return {
        "encoder": {"kind": "recurrent", **shared, **encoder},
        "decoder": {"kind": "recurrent", **shared, **decoder},
        "scale_embedding": False,
    }


def widen_embeddings(weights: Weights) -> Weights:
    """Pads embeddings narrower than the network with zero columns, and the input weights of the first cells."""
    result = dict(weights)
    for side in ("encoder", "decoder"):
        table, first = f"{side}.embedding.weight", f"{side}.rnn.layers.0"
        inputs = [name for name in (f"{first}.weight_ih_l0", f"{first}.weight_ih_l0_reverse") if name in weights]
        if table not in weights or not inputs or f"{first}.weight_hh_l0" not in weights:
            continue  # missing weights are reported later
        narrow, wide = weights[table].size(-1), weights[f"{first}.weight_hh_l0"].size(-1) * len(inputs)
        if narrow > wide:
            raise InputError(f"{table} has width {narrow}, but the network only {wide}")
        for name in (table, *inputs):
            given = weights[name]
            padding = given.new_zeros(given.size(0), wide - narrow)
            result[name] = torch.cat((given[:, :narrow], padding, given[:, narrow:]), -1)
    return result
