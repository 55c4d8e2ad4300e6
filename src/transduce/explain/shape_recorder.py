"""Tensors and known sizes in, rows out: each tensor by name, shape in letters, sizes, meaning."""

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

TORCH = {
    "Linear": "W x + b",
    "Embedding": "the row of a table for each id",
    "Conv1d": "a weighted sum over k neighbours",
    "Tanh": "tanh(x)",
    "RNN": "h_t = tanh(W x_t + U h_{t-1} + b); then the last h",
    "GRU": "gates decide what of h_{t-1} stays; then the last h",
    "LSTM": "gates decide what c_t keeps and shows; then the last h and c",
    "Sequential": "one after the other",
}


@dataclass(frozen=True)
class Entry:
    """What one module gave at its first call, or one place of a state: tensors by name."""

    path: str
    meaning: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Recorder:
    """Hooks on every module: which were called, in which order, and what they gave the first time."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: part for name, part in model.named_modules() if name}
        self.given: dict[str, Any] = {}
        self.calls: dict[str, int] = {}

    def __enter__(self) -> None:
        self.handles = []
        for name, part in self.modules.items():
            if not isinstance(part, (nn.Dropout, nn.Identity)):  # they change no shape
                self.handles.append(part.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
                self.handles.append(part.register_forward_hook(lambda *a, name=name: self._leave(name, a[-1])))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):  # a part may be entered by a method of its own, which no hook sees
            self.calls.setdefault(".".join(parts[:end]), 0)
        self.calls[name] += 1

    def _leave(self, name: str, output: Any) -> None:
        self.given.setdefault(name, output)

    def entries(self) -> list[Entry]:
        found = []
        for name, calls in self.calls.items():
            if not isinstance(self.modules[name], nn.ModuleList):
                often = f" ({calls} calls)" if calls > 1 else ""
                tensors = tuple((place, tuple(x.shape)) for place, x in leaves(self.given.get(name)))
                found.append(Entry(name, say(self.modules[name]) + often, tensors))
        return found


def leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, dicts and dataclasses, with the way to it."""
    if isinstance(tree, Tensor):
        yield place, tree
    elif isinstance(tree, PackedSequence):
        yield f"{place}.packed".strip("."), tree.data  # real tokens in a row, without padding
    else:
        branches: Mapping[Any, Any] = {}
        if isinstance(tree, (tuple, list)):
            branches = dict(enumerate(tree))
        elif isinstance(tree, Mapping):
            branches = tree
        elif is_dataclass(tree):
            branches = {field.name: getattr(tree, field.name) for field in fields(tree)}
        for name, branch in branches.items():
            yield from leaves(branch, f"{place}.{name}".strip("."))


def say(part: nn.Module) -> str:
    kind = type(part)
    if kind.__module__.startswith("torch."):
        return TORCH.get(kind.__name__, kind.__name__)
    return describe(kind) if "__doc__" in vars(kind) and kind.__doc__ else kind.__name__


def fold(entries: Sequence[Entry], nested: bool = True) -> list[Entry]:
    """Equal members of a list are told once, as x N: all lists, or only the outermost of each path."""
    kept = list(entries)
    lists: dict[str, dict[str, None]] = {}
    for entry in entries:
        parts = entry.path.split(".")
        numbered = [place for place, part in enumerate(parts) if part.isdigit()]
        for place in numbered if nested else numbered[:1]:
            lists.setdefault(".".join(parts[:place]), {})[".".join(parts[: place + 1])] = None
    for members in lists.values():
        alike: dict[tuple[Any, ...], list[str]] = {}
        for member in members:
            inside = _inside(member, kept)
            look = tuple((entry.path[len(member) :], entry.meaning, entry.tensors) for entry in inside)
            alike.setdefault(look, []).append(member)
        for look, (first, *others) in alike.items():
            kept = _told_once(first, others, kept) if look and others else kept
    return kept


def _inside(member: str, entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if f"{entry.path}.".startswith(f"{member}.")]


def _told_once(first: str, others: Sequence[str], entries: Sequence[Entry]) -> list[Entry]:
    """The first member says how many there are: in its own entry, or in all where it has none."""
    gone = {entry.path for member in others for entry in _inside(member, entries)}
    inside = {entry.path for entry in _inside(first, entries)}
    told = inside & {first} or inside
    return [
        replace(entry, meaning=f"x {1 + len(others)}: {entry.meaning}") if entry.path in told else entry
        for entry in entries
        if entry.path not in gone
    ]


Sizes = Mapping[str, int]  # by letter; with a prime: the encoder's, where the decoder's is another


def choose_sizes(model: ModelRecipe, vocabularies: tuple[int, int] | None) -> dict[str, int]:
    """Sizes of our own choice that meet neither each other nor any number of the recipe, so that a size tells."""
    specs = [spec for spec in (model.decoder, model.encoder) if spec is not None]
    sizes = _given_sizes(specs)
    around = {0, *(spec["kernel"] - 1 for spec in specs if isinstance(spec.get("kernel"), int))}
    taken = around | _taken(specs)

    def pick(name: str, first: int, *companions: int) -> None:
        for size in count(first):
            met = {size + more for more in (*around, *companions)}
            if not met & taken:
                sizes[name] = size
                taken.update(met)
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
    taken.add(sizes["B"] * (sizes["S"] - 1) + 1)  # real tokens: what a packed sequence holds
    pick("U", 4, sizes["S"])
    if vocabularies is None:
        pick("V", 29)
    return sizes


def _given_sizes(specs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What the recipe says of width, layers and heads: of the decoder, and of the encoder where it differs."""
    sizes: dict[str, int] = {}
    for prime, spec in zip(("", "'"), specs, strict=False):
        heads = spec.get("heads")
        own = {"D": spec["width"], "L": spec.get("layers"), "H": heads}
        if heads:
            own["K"] = spec.get("head_width") or spec["width"] // heads
            own["G"] = spec.get("kv_heads") if spec.get("kv_heads") != heads else None
        sizes |= {name + prime: size for name, size in own.items() if size is not None and sizes.get(name) != size}
    return sizes


def _taken(specs: Sequence[Mapping[str, Any]]) -> set[int]:
    """Sizes that the model itself may give to an axis."""
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


def with_attention(sizes: Sizes, step: Step) -> dict[str, int]:
    """L and H as the decoder's attention has them: a recurrent decoder has one of each, whatever its layers."""
    seen = step.attention and (step.attention.cross if step.attention.cross is not None else step.attention.past)
    result = dict(sizes)
    for axis, name in enumerate("LH", 1) if seen is not None else ():
        if name in sizes and sizes[name] != seen.size(axis):  # type: ignore[union-attr]
            result.setdefault(name + "'", sizes[name])
        result[name] = seen.size(axis)  # type: ignore[union-attr]
    return result


LETTERS = {
    "B": "sources in a batch",
    "N": "beams per source",
    "R": "rows: hypotheses in flight, B * N",
    "S": "source or memory length",
    "T": "target length of this call",
    "U": "target length so far; a prompt counts",
    "D": "width",
    "H": "heads",
    "G": "heads of keys and values",
    "K": "width of one head",
    "L": "layers",
    "V": "vocabulary",
}
# Shapes that need more than sizes to be told: an axis of 1, heads, the width of a head (x: B or R, *: any size).
INSIDE = (
    *("x T V", "x T D", "x T S", "x T *", "x T"),
    *("x H T K", "x H S K", "x H U K", "x G T K", "x G S K", "x G U K", "x H N K"),
    *("x H T S", "x H T U", "x H S S", "x H N S"),
)
KEPT = ("x H S K", "x H U K", "x G S K", "x G U K")
BY_SIZE = ("B", "R", "N", "S", "T", "U", "D", "D'", "V")  # letters that a size alone may tell

FIELDS = {
    "memory": "keys and values of the memory, projected once",
    "keys": "the memory as the score compares it",
    "values": "the memory as it is read",
    "mask": "True: a real row of the memory",
    "summary": "the one vector of the bottleneck",
    "layers": "what each layer keeps of the rows so far",
    "cells": "the recurrent state of each layer",
    "context": "what the reader fed or saw last",
    "next": "the place of the next token",
    "real": "True: a real token of the past",
    "places": "where each token of the past stands",
    "logits": "scores of every label, all said at once",
    "count": "how many labels there are to say",
    "place": "how many were said",
}


@dataclass(frozen=True)
class Row:
    """One tensor. A size without a letter stands as a number among the letters."""

    section: str
    name: str
    letters: str
    sizes: tuple[int, ...]
    meaning: str


class Scribe:
    """Puts tensors into rows and finds their letters, for one stage: training or generation."""

    def __init__(self, stage: str, sizes: Sizes) -> None:
        self.stage, self.sizes, self.rows = stage, sizes, list[Row]()
        # The vocabulary of a run may happen to be as large as a width: then neither is guessed from a size.
        met = sizes["V"] in (sizes["D"], sizes.get("D'"))
        self.telling = {name: size for name, size in sizes.items() if not (met and name in ("V", "D", "D'"))}

    def add(self, part: str, name: str, letters: str, tensor: Tensor | None, meaning: str) -> None:
        """A tensor whose letters the contracts tell."""
        if tensor is not None:
            shape = tuple(tensor.shape)
            self._write(part, name, self._fit(letters, shape, self.sizes) or self._match(shape, ()), shape, meaning)

    def tell_modules(self, recorder: Recorder) -> None:
        """What every module gave."""
        for entry in fold(recorder.entries()):
            if not entry.tensors:
                self._write("modules", entry.path, "", (), entry.meaning)
            for number, (place, shape) in enumerate(entry.tensors):
                name = entry.path + (f":{place}" if place else "")
                meaning = entry.meaning if number == 0 else ""
                self._write("modules", name, self._match(shape, INSIDE), shape, meaning)

    def tell(self, recorder: Recorder, step: Step) -> None:
        """What training and generation have in common: the insides, the state that follows, the step."""
        self.tell_modules(recorder)
        kept = [
            Entry(path, FIELDS.get(path.split(".")[1], "kept by the decoder"), (("", tuple(x.shape)),))
            for path, x in leaves({"fixed": step.state.fixed, "past": step.state.past})
        ]
        for entry in fold(kept, nested=False):
            shape = entry.tensors[0][1]
            self._write("state", entry.path, self._match(shape, KEPT, kept=True), shape, entry.meaning)
        rows = "R" if "R" in self.sizes else "B"
        self.add("step", "logits", f"{rows} T V", step.logits, "scores of every next token")
        if step.attention is not None:
            self.add("step", "attention.cross", f"{rows} L H T S", step.attention.cross, "weights over the memory")
            self.add("step", "attention.past", f"{rows} L H T U", step.attention.past, "weights over the past")

    def finish(self) -> list[Row]:
        """The rows, after a key to the letters that they use."""
        used = {letter for row in self.rows for letter in row.letters.split()}
        used |= {"B", "N"} if "R" in used else set()  # by which R is told
        key = []
        for name, meaning in LETTERS.items():
            for letter, whose in ((name, ""), (name + "'", ", of the encoder")):
                if letter in used:
                    key.append(Row(f"{self.stage}: letters", letter, letter, (self.sizes[letter],), meaning + whose))
        return key + self.rows

    def _write(self, part: str, name: str, letters: str, shape: tuple[int, ...], meaning: str) -> None:
        self.rows.append(Row(f"{self.stage}: {part}", name, letters, shape, meaning))

    def _fit(self, letters: str, shape: tuple[int, ...], sizes: Sizes) -> str:
        """The letters, with the encoder's where only those fit; nothing where they do not."""
        names = letters.split()
        found = []
        for name, size in zip(names, shape, strict=False):
            fitting = [letter for letter in (name, name + "'") if sizes.get(letter) == size]
            found += [str(size)] if name == "*" else fitting[:1]
        return " ".join(found) if len(found) == len(names) == len(shape) else ""

    def _match(self, shape: tuple[int, ...], templates: Sequence[str], kept: bool = False) -> str:
        for template in templates:
            for rows in ("B", "R"):
                if found := self._fit(template.replace("x", rows), shape, self.telling):
                    return found
        # A state knows no T: what it keeps is the past. Elsewhere U is meant only where it is not T.
        unsaid = {"T"} if kept else {"U"} if self.sizes["U"] == self.sizes["T"] else set()
        letters = [name for name in BY_SIZE if name in self.telling and name not in unsaid]
        axes = []
        for size in shape:
            fitting = [name for name in letters if self.sizes[name] == size and size > 1]
            axes.append(fitting[0] if len(fitting) == 1 else str(size))
        return " ".join(axes)
