"""Recording of tensor shapes, and their notation in shape letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from transduce.flow import Step
from transduce.recipe import ModelRecipe
from transduce.recipe.registry import describe

TORCH_MODULES = {
    "Linear": "W x + b",
    "Embedding": "the row of the table for each id",
    "Conv1d": "a weighted sum over k neighbouring positions",
    "Tanh": "tanh(x)",
    "RNN": "h_t = tanh(W x_t + U h_{t-1} + b); then the last h",
    "GRU": "gates decide how much of h_{t-1} is kept; then the last h",
    "LSTM": "gates decide what the cell c_t stores and outputs; then the last h and c",
    "Sequential": "one after the other",
}


@dataclass(frozen=True)
class ShapeEntry:
    """The output shapes of one module at its first call, or the shape of one tensor of a state."""

    path: str
    meaning: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()


class ShapeRecorder:
    """Forward hooks on every module: the order of calls, their number, and the first outputs."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: part for name, part in model.named_modules() if name}
        self.outputs: dict[str, Any] = {}
        self.calls: dict[str, int] = {}

    def __enter__(self) -> None:
        self.handles = []
        for name, part in self.modules.items():
            if not isinstance(part, (nn.Dropout, nn.Identity)):  # they change no shape
                self.handles.append(part.register_forward_pre_hook(lambda *_, name=name: self._before_call(name)))
                self.handles.append(part.register_forward_hook(lambda *a, name=name: self._after_call(name, a[-1])))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _before_call(self, name: str) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):  # a parent may be called by another method than forward, which has no hook
            self.calls.setdefault(".".join(parts[:end]), 0)
        self.calls[name] += 1

    def _after_call(self, name: str, output: Any) -> None:
        self.outputs.setdefault(name, output)

    def entries(self) -> list[ShapeEntry]:
        entries = []
        for name, calls in self.calls.items():
            if not isinstance(self.modules[name], nn.ModuleList):
                repeated = f" ({calls} calls)" if calls > 1 else ""
                shapes = tuple((path, tuple(x.shape)) for path, x in named_tensors(self.outputs.get(name)))
                entries.append(ShapeEntry(name, describe_module(self.modules[name]) + repeated, shapes))
        return entries


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested tuples, dicts and dataclasses, with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, PackedSequence):
        yield f"{path}.packed".strip("."), tree.data  # the tokens without padding
    else:
        branches: Mapping[Any, Any] = {}
        if isinstance(tree, (tuple, list)):
            branches = dict(enumerate(tree))
        elif isinstance(tree, Mapping):
            branches = tree
        elif is_dataclass(tree):
            branches = {field.name: getattr(tree, field.name) for field in fields(tree)}
        for name, branch in branches.items():
            yield from named_tensors(branch, f"{path}.{name}".strip("."))


def describe_module(part: nn.Module) -> str:
    """The first line of the docstring, or the formula of a torch module."""
    kind = type(part)
    if kind.__module__.startswith("torch."):
        return TORCH_MODULES.get(kind.__name__, kind.__name__)
    return describe(kind) if "__doc__" in vars(kind) and kind.__doc__ else kind.__name__


def merge_repeated(entries: Sequence[ShapeEntry], nested: bool = True) -> list[ShapeEntry]:
    """Merges equal members of a module list into one entry, marked x N; without `nested`, only of outermost lists."""
    result = list(entries)
    lists: dict[str, dict[str, None]] = {}
    for entry in entries:
        parts = entry.path.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdigit()]
        for index in numbers if nested else numbers[:1]:
            lists.setdefault(".".join(parts[:index]), {})[".".join(parts[: index + 1])] = None
    for members in lists.values():
        equal: dict[tuple[Any, ...], list[str]] = {}
        for member in members:
            below = _entries_below(member, result)
            content = tuple((entry.path[len(member) :], entry.meaning, entry.tensors) for entry in below)
            equal.setdefault(content, []).append(member)
        for content, (first, *others) in equal.items():
            result = _keep_first(first, others, result) if content and others else result
    return result


def _entries_below(member: str, entries: Sequence[ShapeEntry]) -> list[ShapeEntry]:
    return [entry for entry in entries if f"{entry.path}.".startswith(f"{member}.")]


def _keep_first(first: str, others: Sequence[str], entries: Sequence[ShapeEntry]) -> list[ShapeEntry]:
    """Removes the other members; the entry of the first, or all entries below it, get the number of members."""
    removed = {entry.path for member in others for entry in _entries_below(member, entries)}
    below = {entry.path for entry in _entries_below(first, entries)}
    marked = below & {first} or below
    return [
        replace(entry, meaning=f"x {1 + len(others)}: {entry.meaning}") if entry.path in marked else entry
        for entry in entries
        if entry.path not in removed
    ]


Sizes = Mapping[str, int]  # letter -> size; a primed letter is the size of the encoder where it differs


def choose_sizes(model: ModelRecipe, vocabularies: tuple[int, int] | None) -> dict[str, int]:
    """Sizes of a test batch: distinct from each other and from all numbers of the recipe, hence unambiguous."""
    specs = [spec for spec in (model.decoder, model.encoder) if spec is not None]
    sizes = _recipe_sizes(specs)
    offsets = {0, *(spec["kernel"] - 1 for spec in specs if isinstance(spec.get("kernel"), int))}
    taken = offsets | _model_sizes(specs)

    def pick(name: str, first: int, *companions: int) -> None:
        for size in count(first):
            needed = {size + offset for offset in (*offsets, *companions)}
            if not needed & taken:
                sizes[name] = size
                taken.update(needed)
                return

    if vocabularies is not None:
        sizes["V"] = vocabularies[1]
        taken.add(sizes["V"])
    pick("B", 3 if model.head is not None else 2)
    pick("N", 3)
    while sizes["B"] * sizes["N"] in taken:
        pick("N", sizes["N"] + 1)
    sizes["R"] = sizes["B"] * sizes["N"]
    taken.add(sizes["R"])
    if model.head is not None:
        sizes["T"] = 2  # a label and </s>
    else:
        pick("T", 5)
    pick("S", 7, sizes["T"])
    taken.add(sizes["B"] * (sizes["S"] - 1) + 1)  # number of tokens in a PackedSequence
    pick("U", 4, sizes["S"])
    if vocabularies is None:
        pick("V", 29)
    return sizes


def _recipe_sizes(specs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Width, layers and heads of the decoder, and of the encoder where they differ."""
    sizes: dict[str, int] = {}
    for prime, spec in zip(("", "'"), specs, strict=False):
        heads = spec.get("heads")
        own = {"D": spec["width"], "L": spec.get("layers"), "H": heads}
        if heads:
            own["K"] = spec.get("head_width") or spec["width"] // heads
            own["G"] = spec.get("kv_heads") if spec.get("kv_heads") != heads else None
        sizes |= {name + prime: size for name, size in own.items() if size is not None and sizes.get(name) != size}
    return sizes


def _model_sizes(specs: Sequence[Mapping[str, Any]]) -> set[int]:
    """Sizes that axes inside the model may have."""
    taken = {1, *_numbers(specs), sum(spec["width"] for spec in specs)}
    for spec in specs:
        width = spec["width"]
        taken |= {width // 2, width // (spec.get("heads") or 1), *(width * times for times in range(1, 9))}
        taken |= {2} if spec.get("bidirectional") else set()
    return taken


def _numbers(tree: Any) -> Iterator[int]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _numbers(branch)
    elif isinstance(tree, int) and not isinstance(tree, bool):
        yield tree


def with_attention_sizes(sizes: Sizes, step: Step) -> dict[str, int]:
    """Sets L and H to the axes of the decoder's attention: a recurrent decoder has one of each."""
    attention = step.attention and (step.attention.cross if step.attention.cross is not None else step.attention.past)
    result = dict(sizes)
    for axis, name in enumerate("LH", 1) if attention is not None else ():
        if name in sizes and sizes[name] != attention.size(axis):  # type: ignore[union-attr]
            result.setdefault(name + "'", sizes[name])
        result[name] = attention.size(axis)  # type: ignore[union-attr]
    return result


LETTERS = {
    "B": "sources in a batch",
    "N": "beams per source",
    "R": "rows: active hypotheses, B * N",
    "S": "source or memory length",
    "T": "target length of this call",
    "U": "target length so far, including a prompt",
    "D": "width",
    "H": "heads",
    "G": "key-value heads",
    "K": "width of one head",
    "L": "layers",
    "V": "vocabulary",
}
# Shapes that sizes alone do not determine: axes of 1, heads, head width (x: B or R, *: any size).
MODULE_SHAPES = (
    *("x T V", "x T D", "x T S", "x T *", "x T"),
    *("x H T K", "x H S K", "x H U K", "x G T K", "x G S K", "x G U K", "x H N K"),
    *("x H T S", "x H T U", "x H S S", "x H N S"),
)
STATE_SHAPES = ("x H S K", "x H U K", "x G S K", "x G U K")
UNIQUE_LETTERS = ("B", "R", "N", "S", "T", "U", "D", "D'", "V")  # letters that a size alone determines

STATE_FIELDS = {
    "memory": "keys and values of the memory, projected once",
    "keys": "projected keys of the memory",
    "values": "values of the memory",
    "mask": "True: not padding",
    "summary": "fixed-length summary vector",
    "layers": "cache of each layer",
    "cells": "the recurrent state of each layer",
    "context": "last context vector or attention",
    "next_position": "position of the next token",
    "real": "True: not padding",
    "positions": "positions of the past tokens",
    "logits": "logits of every label",
    "count": "number of labels",
    "position": "number of labels generated so far",
}


@dataclass(frozen=True)
class ShapeRow:
    """One tensor. An axis without a letter is written as its size."""

    section: str
    name: str
    letters: str
    sizes: tuple[int, ...]
    meaning: str


class ShapeTable:
    """The rows of one stage, training or generation, with the letters of every shape."""

    def __init__(self, stage: str, sizes: Sizes) -> None:
        self.stage, self.sizes, self.rows = stage, sizes, list[ShapeRow]()
        # If the vocabulary size of a run equals a width, neither letter can be derived from a size.
        ambiguous = sizes["V"] in (sizes["D"], sizes.get("D'"))
        self.unique = {name: size for name, size in sizes.items() if not (ambiguous and name in ("V", "D", "D'"))}

    def add(self, part: str, name: str, letters: str, tensor: Tensor | None, meaning: str) -> None:
        """Adds a tensor whose letters are known from its contract."""
        if tensor is not None:
            shape = tuple(tensor.shape)
            self._write(part, name, self._fit(letters, shape, self.sizes) or self._match(shape, ()), shape, meaning)

    def add_modules(self, recorder: ShapeRecorder) -> None:
        """Adds the outputs of every module."""
        for entry in merge_repeated(recorder.entries()):
            if not entry.tensors:
                self._write("modules", entry.path, "", (), entry.meaning)
            for number, (path, shape) in enumerate(entry.tensors):
                name = entry.path + (f":{path}" if path else "")
                meaning = entry.meaning if number == 0 else ""
                self._write("modules", name, self._match(shape, MODULE_SHAPES), shape, meaning)

    def add_step(self, recorder: ShapeRecorder, step: Step) -> None:
        """Adds the modules, the decoder state and the outputs of one call of the decoder."""
        self.add_modules(recorder)
        state = [
            ShapeEntry(path, STATE_FIELDS.get(path.split(".")[1], "decoder state"), (("", tuple(x.shape)),))
            for path, x in named_tensors({"fixed": step.state.fixed, "past": step.state.past})
        ]
        for entry in merge_repeated(state, nested=False):
            shape = entry.tensors[0][1]
            self._write("state", entry.path, self._match(shape, STATE_SHAPES, in_state=True), shape, entry.meaning)
        rows = "R" if "R" in self.sizes else "B"
        self.add("step", "logits", f"{rows} T V", step.logits, "logits of the next token")
        if step.attention is not None:
            self.add("step", "attention.cross", f"{rows} L H T S", step.attention.cross, "cross-attention weights")
            self.add("step", "attention.past", f"{rows} L H T U", step.attention.past, "self-attention weights")

    def rows_with_key(self) -> list[ShapeRow]:
        """The rows, preceded by a key to the letters that they use."""
        used = {letter for row in self.rows for letter in row.letters.split()}
        used |= {"B", "N"} if "R" in used else set()  # R is defined by them
        key = []
        for name, meaning in LETTERS.items():
            for letter, whose in ((name, ""), (name + "'", ", of the encoder")):
                if letter in used:
                    key.append(
                        ShapeRow(f"{self.stage}: letters", letter, letter, (self.sizes[letter],), meaning + whose)
                    )
        return key + self.rows

    def _write(self, part: str, name: str, letters: str, shape: tuple[int, ...], meaning: str) -> None:
        self.rows.append(ShapeRow(f"{self.stage}: {part}", name, letters, shape, meaning))

    def _fit(self, letters: str, shape: tuple[int, ...], sizes: Sizes) -> str:
        """The letters, primed where only the encoder size fits; an empty string where none fits."""
        names = letters.split()
        axes = []
        for name, size in zip(names, shape, strict=False):
            fitting = [letter for letter in (name, name + "'") if sizes.get(letter) == size]
            axes += [str(size)] if name == "*" else fitting[:1]
        return " ".join(axes) if len(axes) == len(names) == len(shape) else ""

    def _match(self, shape: tuple[int, ...], templates: Sequence[str], in_state: bool = False) -> str:
        """The letters of a shape: by the first template that fits, else axis by axis."""
        for template in templates:
            for rows in ("B", "R"):
                if letters := self._fit(template.replace("x", rows), shape, self.unique):
                    return letters
        # A state has no axis T, only the past, U. Elsewhere T wins if both have the same size.
        excluded = {"T"} if in_state else {"U"} if self.sizes["U"] == self.sizes["T"] else set()
        candidates = [name for name in UNIQUE_LETTERS if name in self.unique and name not in excluded]
        axes = []
        for size in shape:
            fitting = [name for name in candidates if self.sizes[name] == size and size > 1]
            axes.append(fitting[0] if len(fitting) == 1 else str(size))
        return " ".join(axes)
