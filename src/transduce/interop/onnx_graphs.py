"""ONNX graphs of an encoder, a decoder and a head, with the names and axes of inputs and outputs that Optimum uses.

A state is a tree of tensors. Keys and values have the names of Optimum, `0.decoder.key`; any other tensor has its path
in the tree, `past.cells.0`. Ids are those of tokenizer.json.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from transduce.contracts import Decoder, Encoder, Head, Modality
from transduce.decoders.transformer import TransformerDecoder
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK, Batch, Memory, Padded, State, Tree
from transduce.interop.huggingface.weights import MISSING, ExportRows
from transduce.modalities.source_encoding import ModalitySourceEncoding, SourceEncoding
from transduce.model import NEVER

Precision = Literal["fp32", "int8"]
MASK = "fixed.mask"  # path of the mask of the memory in a state
MEMORY_NAMES = {
    "values": "encoder_hidden_states",
    "mask": "encoder_attention_mask",
    "summary": "encoder_summary",
    "tokens": "encoder_tokens",
    "source_ids": "encoder_source_ids",
}
MASK_NAMES = (MASK, MEMORY_NAMES["mask"])
# Number of axes of a row -> name of the input, and its axes in native order: frames B F S, images B C Y X, video
# B S C Y X.
LAYOUTS: dict[int, tuple[str, tuple[int, ...] | None]] = {
    0: ("input_ids", None),
    1: ("input_features", (0, 2, 1)),
    3: ("pixel_values", (0, 2, 3, 1)),
    4: ("pixel_values", (0, 1, 3, 4, 2)),
}


class TokenIds(nn.Module):
    """Ids of tokenizer.json: read as native ids, and the order of the logits."""

    def __init__(self, rows: ExportRows) -> None:
        super().__init__()
        by_priority = [*range(len(SPECIALS), len(rows.ids)), UNK, PAD, EOS]
        self.same = rows.ids == tuple(range(rows.size))
        self.register_buffer("exported", torch.tensor(rows.ids))
        self.register_buffer("source", _inverse(rows, [BOS, *by_priority], UNK))
        self.register_buffer("target", _inverse(rows, [*by_priority, BOS], UNK))  # the start token may be </s> or <pad>
        self.register_buffer("columns", _inverse(rows, [BOS, *by_priority], MISSING))

    def read(self, ids: Tensor, side: Literal["source", "target"]) -> Tensor:
        return ids if self.same else self.get_buffer(side)[ids]

    def foreign(self, ids: Tensor) -> Tensor:
        """Native ids -> ids of tokenizer.json."""
        known = self.get_buffer("exported")
        return torch.where(known[ids] == MISSING, known[UNK].clamp(min=0), known[ids])

    def order(self, logits: Tensor) -> Tensor:
        if self.same:
            return logits
        columns = self.get_buffer("columns")
        return logits[..., columns.clamp(min=0)].masked_fill(columns == MISSING, NEVER)


def _inverse(rows: ExportRows, order: Sequence[int], missing: int) -> Tensor:
    """The native id of each exported one; of two with the same, that which comes later."""
    result = torch.full((rows.size,), missing)
    for native in order:
        if rows.ids[native] != MISSING:
            result[rows.ids[native]] = native
    return result


@dataclass(frozen=True)
class GraphInput:
    """One source of a batch as inputs of a graph, in the names and axes of the transformers library."""

    name: str  # of the values
    mask_name: str | None  # None: every row is real
    axes: tuple[int, ...] | None  # from the axes of the graph to the native ones
    is_text: bool
    rows: int | None  # a fixed number; None: any
    shape: tuple[int, ...]  # of a row

    def padded(self, tensors: Iterator[Tensor], ids: TokenIds) -> Padded:
        values = next(tensors)
        values = ids.read(values, "source") if self.is_text else values
        values = values if self.axes is None else values.permute(self.axes)
        if self.mask_name is None:
            return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool, device=values.device))
        mask = next(tensors).bool()
        return Padded(values * mask if self.is_text else values, mask)

    def tensors(self, source: Padded, ids: TokenIds) -> dict[str, Tensor]:
        """The inverse of `padded`."""
        values = source.values
        if self.is_text:
            values = ids.foreign(values)
        if self.axes is not None:
            values = values.permute([self.axes.index(axis) for axis in range(values.dim())]).contiguous()
        return {self.name: values, **({} if self.mask_name is None else {self.mask_name: source.mask.long()})}

    def example(self, size: int, length: int, vocabulary: int, generator: torch.Generator) -> Padded:
        """Random rows of different lengths."""
        length = self.rows or length
        shortened = torch.zeros(size, dtype=torch.long) if self.mask_name is None else torch.arange(size)
        mask = torch.arange(length) < (length - shortened)[:, None]
        if not self.is_text:
            values = torch.randn(size, length, *self.shape, generator=generator)
            return Padded(values * mask.view(size, length, *(1 for _ in self.shape)), mask)
        ids = torch.randint(len(SPECIALS), vocabulary, (size, length), generator=generator)
        ids[torch.arange(size), mask.sum(1) - 1] = EOS
        return Padded(ids * mask, mask)


def graph_inputs(encoding: SourceEncoding) -> dict[str, GraphInput]:
    """The inputs of an encoder, by the names of its sources."""
    if not isinstance(encoding, ModalitySourceEncoding):
        return {"": GraphInput("input_ids", "attention_mask", None, True, None, ())}
    found: dict[str, GraphInput] = {}
    for source, modality in encoding.source.parts.items():
        shape = modality.shape
        taken = {name for one in found.values() for name in (one.name, one.mask_name) if name is not None}
        name, axes = LAYOUTS.get(len(shape), (source, None))
        rows = _fixed_rows(modality) if shape else None
        mask = None if rows else "attention_mask"
        name, mask = f"{source}_{name}" if name in taken else name, f"{source}_{mask}" if mask in taken else mask
        found[source] = GraphInput(name, mask, axes, not shape, rows, shape[1:] if len(shape) > 1 else shape)
    return found


def _fixed_rows(modality: Modality) -> int | None:
    """The number of rows, where every source has the same."""
    if len(modality.shape) > 1:
        return modality.shape[0]
    short, longer = (modality.length(np.zeros(length, np.float32)) for length in (2000, 4000))
    return short if short == longer else None


class EncoderGraph(nn.Module):
    """sources -> what the decoder reads of the memory"""

    def __init__(
        self, encoder: Encoder, ids: TokenIds, inputs: Mapping[str, GraphInput], fields: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.encoder, self.ids, self.inputs, self.fields = encoder, ids, inputs, fields

    def memory(self, tensors: Sequence[Tensor]) -> Memory:
        values = iter(tensors)
        (_, first), *others = [(name, one.padded(values, self.ids)) for name, one in self.inputs.items()]
        return cast(Memory, self.encoder(Batch(first, extra=dict(others))))

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        memory = self.memory(tensors)
        found = (getattr(memory, name) for name in self.fields)
        return tuple(one.long() if one.dtype == torch.bool else one.clone() for one in found)


class HeadGraph(nn.Module):
    """sources -> logits of labels or tokens, or one vector"""

    def __init__(self, encoder: EncoderGraph, head: Head, order: TokenIds | None, *, has_specials: bool) -> None:
        super().__init__()
        self.encoder, self.head, self.order, self.has_specials = encoder, head, order, has_specials

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor]:
        memory = self.encoder.memory(tensors)
        result: Tensor = self.head(memory.values, memory.mask)
        if self.order is not None:
            return (self.order.order(result),)
        return (result if self.has_specials else result[..., len(SPECIALS) :],)


class FirstGraph(nn.Module):
    """tokens (B T) and the memory -> logits (B T V) and the tensors of the state"""

    def __init__(self, decoder: Decoder, ids: TokenIds, fields: Sequence[str], names: Mapping[str, str]) -> None:
        super().__init__()
        self.decoder, self.ids, self.fields, self.names = decoder, ids, fields, names

    def forward(self, tokens: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        state = self.decoder.start(self._memory(tokens, dict(zip(self.fields, tensors, strict=True))))
        step = self.decoder.advance(self.ids.read(tokens, "target"), state)
        made = state_tensors(step.state)
        kept = (made[path].clone() for path, name in self.names.items() if name not in MASK_NAMES)
        return (self.ids.order(step.logits), *kept)

    def _memory(self, tokens: Tensor, given: dict[str, Any]) -> Memory:
        if not given:
            return Memory.empty(tokens.size(0), tokens.device)
        values, mask = given.pop("values"), given.pop("mask", None)
        mask = torch.ones(values.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        return Memory(values, mask, given.pop("summary", values[:, 0]), **given)


class NextGraph(nn.Module):
    """tokens (B T) and the tensors of a state -> logits and the next past"""

    def __init__(self, decoder: Decoder, ids: TokenIds, state: State, inputs: Sequence[str]) -> None:
        super().__init__()
        self.decoder, self.ids, self.structure, self.inputs = decoder, ids, state, inputs

    def forward(self, tokens: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, tensors, strict=True))
        if MASK in given:
            given[MASK] = given[MASK].bool()
        elif "mask" in self.structure.fixed:  # without padding
            rows = given["fixed.memory.0.0"] if "fixed.memory.0.0" in given else tokens[:, None, :0]
            given[MASK] = torch.ones(rows.shape[0:3:2], dtype=torch.bool)
        fixed, past = (_unflatten(getattr(self.structure, side), side, given) for side in ("fixed", "past"))
        step = self.decoder.advance(self.ids.read(tokens, "target"), State(fixed, past))
        return (self.ids.order(step.logits), *_flatten(step.state.past, "past").values())


def _flatten(tree: Tree, name: str) -> dict[str, Tensor]:
    """Every tensor of a tree by its path."""
    if isinstance(tree, Tensor):
        return {name: tree}
    branches = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {one: tensor for key, branch in branches for one, tensor in _flatten(branch, f"{name}.{key}").items()}


def state_tensors(state: State) -> dict[str, Tensor]:
    """Every tensor of a state by its path."""
    return {**_flatten(state.fixed, "fixed"), **_flatten(state.past, "past")}


def _unflatten(tree: Tree, name: str, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(tree, Tensor):
        return tensors[name]
    if isinstance(tree, Mapping):
        return {key: _unflatten(branch, f"{name}.{key}", tensors) for key, branch in tree.items()}
    return tuple(_unflatten(branch, f"{name}.{number}", tensors) for number, branch in enumerate(tree))


def has_kv_cache(decoder: Decoder) -> bool:
    """Whether its state is keys and values alone, so that Optimum can run it, and takes any number of tokens."""
    return isinstance(decoder, TransformerDecoder) and decoder.has_kv_cache


def state_names(decoder: Decoder, state: State, memory: Memory | None) -> dict[str, str]:
    """The name in a graph of each tensor of a state, by its path."""
    names = {}
    for path, tensor in state_tensors(state).items():
        side, *place = path.split(".")
        names[path] = path
        if path == MASK and (memory is None or torch.equal(tensor, memory.mask)):
            names[path] = MEMORY_NAMES["mask"]
        elif has_kv_cache(decoder) and place[0] in ("memory", "layers"):
            sides = {"fixed": "encoder.", "past": "decoder." if memory is not None else ""}
            names[path] = f"{place[1]}.{sides[side]}{('key', 'value')[int(place[2])]}"
    if not has_kv_cache(decoder):
        return names
    # Optimum reads outputs by their order: layer by layer, the decoder first.
    return dict(sorted(names.items(), key=lambda pair: (int(pair[1].split(".")[0]) if "." in pair[1] else 0, pair[1])))


def memory_fields(decoder: Decoder, memory: Memory) -> list[str]:
    """What a decoder reads of a memory."""
    read = {"values", "mask"}

    class Recorded(Memory):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    decoder.start(Recorded(memory.values, memory.mask, memory.summary, None, memory.tokens, None, memory.source_ids))
    return [name for name in MEMORY_NAMES if name in read and getattr(memory, name) is not None]


@dataclass(frozen=True)
class Graph:
    """A graph to write: the module, the arguments of two examples, and the names of inputs and outputs."""

    file: str
    module: nn.Module
    examples: tuple[tuple[Any, ...], tuple[Any, ...]]
    inputs: Sequence[str]
    outputs: Sequence[str]

    def write(self, folder: Path, precision: Precision) -> None:
        one, other = self.examples
        axes = tuple(_dynamic_axes(*pair) for pair in zip(one, other, strict=True))
        with warnings.catch_warnings(), torch.no_grad(), _whole_recurrent_layers():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                self.module,
                one,
                dynamo=True,
                dynamic_shapes=axes,
                input_names=list(self.inputs),
                output_names=list(self.outputs),
                verbose=False,
            )
        assert program is not None
        for value in (value for node in program.model.graph for value in node.outputs):
            value.shape = None  # for some layers it states lengths of the example, which are dynamic
        program.save(folder / self.file)
        if precision == "int8":
            quantise(folder / self.file)


@contextmanager
def _whole_recurrent_layers() -> Iterator[None]:
    """Recurrent layers are one operation, as ONNX has them.

    After its first export PyTorch would write them out step by step, for the length of the example alone.
    """
    import torch._decomp.decompositions

    layers = [getattr(torch.ops.aten, name).input for name in ("gru", "rnn_tanh")]
    saved = [dict(layer.py_kernels) for layer in layers]
    for layer in layers:
        layer.py_kernels.clear()
        layer._dispatch_cache.clear()
    try:
        yield
    finally:
        for layer, kernels in zip(layers, saved, strict=True):
            layer.py_kernels.update(kernels)
            layer._dispatch_cache.clear()


def _dynamic_axes(one: Any, other: Any) -> Any:
    if not isinstance(one, Tensor):
        return tuple(_dynamic_axes(*pair) for pair in zip(one, other, strict=True))
    return {axis: torch.export.Dim.DYNAMIC for axis in range(one.dim()) if one.shape[axis] != other.shape[axis]}


def quantise(file: Path) -> None:
    """Weight matrices in int8, one scale per column; activations are quantised at run time."""
    from onnx.shape_inference import InferenceError
    from onnxruntime.quantization import QuantType, quantize_dynamic

    try:
        quantize_dynamic(file, file, per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"])
    except InferenceError as error:
        problem = f"ONNX Runtime cannot quantise {file.name}: {str(error).strip()}"
        raise InputError(problem, where="--precision int8", remedy="use --precision fp32") from None
