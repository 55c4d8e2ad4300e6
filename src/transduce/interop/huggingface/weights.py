"""Weight mapping: names, shapes and vocabulary rows, from foreign checkpoints and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transduce.attention.positions import Sinusoidal
from transduce.contracts import Family
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.interop.huggingface.family import WeightMap, Weights
from transduce.interop.huggingface.folder import StoredTensor, read_tensor
from transduce.model import NEVER

MISSING = -1  # the foreign id of a token that the foreign vocabulary does not have
DECODER_OUTPUT, CTC_OUTPUT = "decoder.output.projection", "head.layers.1"
OUTPUT_BIAS = f"{DECODER_OUTPUT}.bias"
EMBEDDINGS = ("encoder.embedding.weight", "decoder.embedding.weight")
TOKEN_ROWS = (*EMBEDDINGS, ".output.projection.weight", ".output.projection.bias")  # weights with a row per token
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ImportRows:
    """Vocabulary order of an import: the foreign row for each native id, MISSING where there is none."""

    rows: tuple[int, ...]
    foreign_size: int
    output: str = DECODER_OUTPUT  # the module that gives the logits of tokens
    source: ImportRows | None = None  # of sources, where they have a vocabulary of their own

    def of(self, name: str) -> ImportRows:
        """The order of the vocabulary that a native weight belongs to."""
        return self.source if self.source is not None and name == EMBEDDINGS[0] else self

    @property
    def output_bias(self) -> str:
        return f"{self.output}.bias"

    def is_table(self, name: str) -> bool:
        """Whether a native weight has a row per token."""
        return name.endswith(TOKEN_ROWS) or name in (f"{self.output}.weight", self.output_bias)

    @property
    def suppressed(self) -> list[int]:
        """Native special ids that have no foreign row, or share one with another special token."""
        seen: set[int] = {MISSING}
        result = []
        for native in (EOS, PAD, UNK, BOS):
            if self.rows[native] in seen:
                result.append(native)
            seen.add(self.rows[native])
        copied = self.rows[BOS] in self.rows[len(SPECIALS) :]  # the start token is a piece too
        return [*result, BOS] if copied and BOS not in result else result

    def native_id(self, foreign: int) -> int:
        for native in (EOS, PAD, UNK, BOS):
            if self.rows[native] == foreign:
                return native
        return self.rows.index(foreign)

    def reorder(self, weight: Tensor) -> Tensor:
        """V' ... -> V ...; missing rows are zero."""
        index = torch.tensor(self.rows, device=weight.device)
        shape = (-1,) + (1,) * (weight.dim() - 1)
        return weight[index.clamp(min=0)] * (index >= 0).view(shape)

    def suppress(self, bias: Tensor) -> Tensor:
        """An output bias that gives suppressed ids no probability."""
        bias = bias.clone()
        if bias.device.type != "meta":
            bias[self.suppressed] = NEVER
        return bias


@dataclass(frozen=True)
class ExportRows:
    """Vocabulary order of an export: the foreign id for each native id, MISSING where there is none."""

    ids: tuple[int, ...]
    size: int  # rows of the exported tables
    new_start: bool = False  # True: the start token, once a copy of another token, has a row of its own

    def foreign_id(self, native: int) -> int:
        return self.ids[native]

    def special_id(self, native: int) -> int | None:
        return None if self.ids[native] == MISSING else self.ids[native]

    def reorder(self, weight: Tensor, *, is_output: bool) -> Tensor:
        """V ... -> V' ...; a start token that shares its row with another token takes no part in the output bias."""
        result = weight.new_zeros(self.size, *weight.shape[1:])
        if is_output:
            result[max(self.ids) + 1 :] = NEVER  # rows that only the other vocabulary has
        shared = self.ids[BOS] in (self.ids[PAD], self.ids[EOS])
        # The last to write a shared row wins: the start token before <pad>, which is never read; </s> before both.
        for native in (UNK, PAD, BOS, EOS, *range(len(SPECIALS), len(self.ids))):
            if self.ids[native] != MISSING and not (is_output and native == BOS and shared):
                result[self.ids[native]] = weight[native]
        return result

    def reorder_all(self, weights: Mapping[str, Tensor]) -> Weights:
        return {
            name: self.reorder(tensor, is_output=name.endswith("bias")) if name.endswith(TOKEN_ROWS) else tensor
            for name, tensor in weights.items()
        }


def export_rows(tokenizer: Tokenizer, weights: Mapping[str, Tensor]) -> ExportRows:
    """Imported tokens get their foreign ids back; tokens of a vocabulary trained here keep the ids they have."""
    vocabulary = tokenizer.vocabulary
    if vocabulary.kind != GIVEN:
        return ExportRows(tuple(range(tokenizer.size)), tokenizer.size)
    ids = list(vocabulary.backend_ids)
    has_decoder = any(name.startswith("decoder.") for name in weights)
    new_start = has_decoder and (ids[BOS] == MISSING or (ids[BOS] == ids[EOS] and _start_differs(weights)))
    if new_start:
        ids[BOS] = max(ids) + 1
        ids[PAD] = ids[BOS] if ids[PAD] == MISSING else ids[PAD]
    taken = set(ids)
    free = (number for number in range(2 * len(ids)) if number not in taken)
    for native in range(len(SPECIALS), len(ids)):
        if ids[native] == MISSING:  # a row without a piece
            ids[native] = next(free)
    return ExportRows(tuple(ids), max(ids) + 1, new_start=new_start)


def _start_differs(weights: Mapping[str, Tensor]) -> bool:
    """Whether training changed the start token, once a copy of </s>."""
    tables = [tensor for name, tensor in weights.items() if name in EMBEDDINGS]
    return any(not torch.equal(table[BOS], table[EOS]) for table in tables)


def check_weights(
    weight_map: WeightMap, stored: Mapping[str, StoredTensor], shapes: Shapes, rows: ImportRows, where: str
) -> None:
    """Compares names and shapes, before any tensor is read: missing, unexpected and misshapen weights are errors."""
    weights: Weights = {}
    origins: dict[str, str] = {}
    for name, tensor in stored.items():
        found = weight_map.find(name)
        if found is None:
            if name in weight_map.tied or weight_map.ignores(name):
                continue
            raise InputError(
                f"{name} would be dropped: this architecture has no such weight",
                where=where,
                remedy="the folder holds another model than its config.json says, or one with additions",
            )
        for native, converted in found.apply(torch.empty(tensor.shape, device="meta")).items():
            if native in weights:
                raise InputError(f"{name} and {origins[native]} both map to {native}", where=where)
            if rows.is_table(native) and len(converted) != (size := rows.of(native).foreign_size):
                raise InputError(
                    f"{name} has {len(converted)} rows, but config.json says vocab_size: {size}",
                    where=where,
                    remedy="config.json and the weights belong to different models",
                )
            weights[native], origins[native] = converted, name
    for native, tensor_ in _reorder(weight_map.combine(weights), rows, shapes).items():
        _check_shape(origins.get(native, native), native, tensor_, shapes, where)
    if missing := sorted(set(shapes) - set(weights) - {rows.output_bias}):
        raise InputError(f"the weights of {missing[0]} are missing", where=where, remedy="fetch the folder again")


def _check_shape(name: str, native: str, tensor: Tensor, shapes: Shapes, where: str) -> None:
    if native not in shapes:
        raise InputError(
            f"{name} would be dropped: config.json has no such part", where=where, remedy="fetch the folder again"
        )
    if tuple(tensor.shape) != shapes[native]:
        raise InputError(
            f"{name} becomes {native} {tuple(tensor.shape)}, but config.json asks for {shapes[native]}",
            where=where,
            remedy="config.json and the weights belong to different models",
        )


def _reorder(weights: Mapping[str, Tensor], rows: ImportRows, shapes: Shapes) -> Weights:
    """Token rows in native order; an output bias where there was none, so that ids can be suppressed."""
    reordered: dict[int, Tensor] = {}  # by the id of the tensor: tied weights stay tied
    result = {}
    for name, tensor in weights.items():
        if rows.is_table(name):
            if id(tensor) not in reordered:
                reordered[id(tensor)] = rows.of(name).reorder(tensor)
            tensor = reordered[id(tensor)]
        result[name] = tensor
    if rows.output_bias in shapes and rows.rows:
        device = next(iter(weights.values())).device
        bias = result.get(rows.output_bias, torch.zeros(shapes[rows.output_bias], device=device))
        result[rows.output_bias] = rows.suppress(bias)
    return result


def read_weights(
    weight_map: WeightMap, stored: Mapping[str, StoredTensor], rows: ImportRows, shapes: Shapes
) -> Weights:
    weights: Weights = {}
    for name, one in stored.items():
        found = weight_map.find(name)
        if found is not None:
            weights |= found.apply(read_tensor(one))
        elif name in weight_map.tied and not torch.equal(read_tensor(one), read_tensor(stored[weight_map.tied[name]])):
            raise InputError(
                f"{name} differs from {weight_map.tied[name]}, of which it should be a copy",
                where=str(one.file),
                remedy="config.json says that these weights are tied: fetch the folder again",
            )
    return _reorder(weight_map.combine(weights), rows, shapes)


ENCODER_NAMES = ("embeddings.", "encoder.", "transformer.", "pooler.", "layernorm.")  # below a head
TOLERANCE = 1e-6  # relative, for weights that are multiplied and divided on their way
# Weights whose columns, or whose rows or only axis, have the width of the model.
WIDTH_COLUMNS = (
    "embedding.weight", "output.projection.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight",
    "fc1.weight", "fc_gate.weight",
)  # fmt: skip
WIDTH_ROWS = (
    "out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias", "norm.weight", "norm.bias",
)  # fmt: skip


STREAM_INPUTS = (
    "embedding.weight", "embed_positions.weight", "embedding_norm.weight", "embedding_norm.bias",
    "out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias",
)  # fmt: skip
STREAM_READERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight", "fc_gate.weight")


def deinterleave(weights: Mapping[str, Tensor]) -> Weights:
    """The same model with its width permuted, for sinusoidal encodings that put all sines before all cosines."""
    result = {}
    for name, tensor in weights.items():
        if name.endswith(WIDTH_COLUMNS):
            tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
        elif name.endswith(WIDTH_ROWS):
            tensor = torch.cat((tensor[0::2], tensor[1::2]), 0)
        result[name] = tensor
    return result


def sinusoids(part: Mapping[str, Any], rows: int) -> Tensor:
    """The table of sinusoidal positions of an encoder or decoder."""
    options = {name: value for name, value in part["position"].items() if name not in ("kind", "join")}
    encoding = Sinusoidal(part["width"], part["heads"], causal=False, **options)
    return encoding.add(torch.zeros(1, rows, part["width"]), torch.arange(rows)[None])[0]


def scale_stream(weights: Mapping[str, Tensor], factor: float, *, post: bool, tied: bool) -> Weights:
    """The weights of a model whose residual stream is multiplied by `factor`, and whose outputs are the same.

    `post`: the stream is what the norms give. `tied`: the output reads the table of the embeddings.
    """
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers."))
    read_by_output = f"decoder.layers.{last}.feed_forward_norm." if post else "decoder.final_norm."
    result = {}
    for name, tensor in weights.items():
        if name.startswith(read_by_output):
            power = -1 if tied else 0
        else:
            power = _stream_power(".".join(name.split(".")[-2:]), post=post, tied=tied)
        result[name] = tensor * factor**power if power else tensor
    return result


def _stream_power(leaf: str, *, post: bool, tied: bool) -> int:
    """1: of what is added to the stream; -1: of what reads it; 0: of neither."""
    if leaf in STREAM_INPUTS or (tied and leaf == "projection.weight"):
        return 1
    if post and leaf.split(".")[0].endswith("_norm"):
        return 1
    return -1 if post and leaf in STREAM_READERS else 0


def export_weights(family: Family, weight_map: WeightMap, weights: Mapping[str, Tensor], where: str) -> Weights:
    """Every weight under its Hugging Face name, tied ones once, as the transformers library stores them."""
    result: Weights = {}
    separated = weight_map.separate(dict(weights))
    for module, native in weight_map.modules.items():
        for layer in _layer_numbers(native, separated):
            for leaf in ("weight", "bias"):
                tensor = separated.get(f"{native.replace('*', layer)}.{leaf}")
                if tensor is not None:
                    result[f"{module.replace('*', layer)}.{leaf}"] = tensor
    for name, tensor_map in weight_map.tensors.items():
        for layer in _layer_numbers(tensor_map.names[0], separated):
            tensors = [separated.get(one.replace("*", layer)) for one in tensor_map.names]
            present = [tensor for tensor in tensors if tensor is not None]
            if present:
                result[name.replace("*", layer)] = tensor_map.invert(present).contiguous()
    _check_round_trip(weight_map, weights, result, where)
    return {_full_name(family, weight_map, name): tensor.contiguous() for name, tensor in result.items()}


def _layer_numbers(native: str, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Numbers of the layers that have such a part; 0 for a part that belongs to no layer."""
    if "*" not in native:
        yield "0"
        return
    pattern = re.compile(re.escape(native).replace(r"\*", r"(\d+)") + r"(\.|$)")
    found = {match[1] for name in weights if (match := pattern.match(name))}
    yield from sorted(found, key=int)


def _full_name(family: Family, weight_map: WeightMap, name: str) -> str:
    """With the prefix of the base model, unless the base model is all there is."""
    inside = bool(family.start_token) or (family.has_head and name.startswith(ENCODER_NAMES))
    return weight_map.prefix + name if inside and name not in weight_map.outside else name


def has_weight(weight_map: WeightMap, native: str) -> bool:
    """Whether an architecture has a weight for a native one that belongs to no layer."""
    module, _, _ = native.rpartition(".")
    return module in weight_map.modules.values() or any(native in one.names for one in weight_map.tensors.values())


def fits_output_bias(weight_map: WeightMap, weights: Mapping[str, Tensor]) -> bool:
    """Whether the output bias, if there is one, can be exported: it has a weight, or no more to say than it must."""
    bias = weights.get(OUTPUT_BIAS)
    return bias is None or _only_suppresses(bias) or has_weight(weight_map, OUTPUT_BIAS)


def _check_round_trip(
    weight_map: WeightMap, weights: Mapping[str, Tensor], exported: Mapping[str, Tensor], where: str
) -> None:
    """Reads the exported weights as the importer does and compares them with the originals."""
    again: Weights = {}
    for name, tensor in exported.items():
        found = weight_map.find(name)
        assert found is not None, name
        again |= found.apply(tensor)
    again = weight_map.combine(again)
    for name, tensor in weights.items():
        if name not in again:
            if name == OUTPUT_BIAS and _only_suppresses(tensor):
                continue
            is_bias = name == OUTPUT_BIAS
            remedy = "train it with training.freeze=[decoder.output.projection.bias]" if is_bias else "use --to onnx"
            raise InputError(f"this architecture has no weight for {name}", where=where, remedy=remedy)
        if not torch.allclose(again[name], tensor, rtol=TOLERANCE, atol=0):
            raise InputError(
                f"{name} is tied to another weight in this architecture, but differs from it here",
                where=where,
                remedy="tie them in training (tie: all), or use --to onnx",
            )


def _only_suppresses(bias: Tensor) -> bool:
    """Whether an output bias does no more than to exclude tokens that are never output."""
    return bool((bias <= 0).all()) and not bool(((bias < 0) & (bias > -1e3)).any())
