"""A model at work in, what its modules gave out: in the order of their calls, layers that are alike told once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from transduce.shelves import describe

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
