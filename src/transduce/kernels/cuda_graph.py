"""The beginning of a search and a step of it in, the same out as recorded graphs, which are replayed.

On a GPU a step is some two hundred small kernels, which take longer to launch from Python than to run. Recorded once
for a set of shapes, they are launched as one. The same step runs everywhere; only how it is launched differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

G = TypeVar("G")  # what a search begins with
T = TypeVar("T")  # a search between two steps
KEPT = 16  # recordings, the newest


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in dataclasses, dicts and tuples, in a steady order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        parts = [getattr(value, one.name) for one in fields(value)]
    else:
        parts = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


class Recording(Generic[G, T]):
    """The beginning of a search and each kind of its steps, with the buffers they read and write."""

    def __init__(self, begin: Callable[[G], T], given: G, *, steady: bool) -> None:
        self.given = tensors_of(given)
        self.begin: torch.cuda.CUDAGraph | None = None
        self.values = warmed(lambda: begin(given))
        if steady:
            self.begin = torch.cuda.CUDAGraph()
            with recorded(self.begin):
                self.values = begin(given)  # what it gives lies from now on at the same place
        self.buffers = tensors_of(self.values)
        self.steps: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def learn(self, step: Callable[[T, int | None], T], said: int | None, kind: Hashable) -> None:
        """A kind of step is met for the first time. Between two steps that changes nothing: what the first run of it
        writes into a cache, the step itself writes there again."""
        warmed(lambda: step(self.values, said))
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            copy_together(self.buffers, tensors_of(step(self.values, said)))
        self.steps[kind] = graph

    def start(self, begin: Callable[[G], T], given: G) -> None:
        """The buffers as they are before the first step."""
        if self.begin is None:
            copy_into(self.buffers, tensors_of(begin(given)))
        else:
            copy_into(self.given, tensors_of(given))
            self.begin.replay()


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched inside goes into the graph. Other threads may go on: one of them fetches batches.

    A recording that fails leaves the generator of random numbers as if it went on for ever; so it gets a new state.
    """
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        place = torch.device("cuda", torch.cuda.current_device())
        generator = torch.cuda.default_generators[place.index]
        generator.graphsafe_set_state(torch.Generator(place).graphsafe_get_state())
        raise


def warmed(run: Callable[[], T]) -> T:
    """Libraries set themselves up in a first run, which must not be recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = run()
    torch.cuda.current_stream().wait_stream(side)
    return result


def copy_together(buffers: list[Tensor], values: list[Tensor]) -> None:
    """As `copy_into`, by one kernel for all of a kind where the library has it."""
    pairs = [(buffer, value) for buffer, value in zip(buffers, values, strict=True) if buffer is not value]
    for kind in {buffer.dtype for buffer, _ in pairs}:
        alike = [pair for pair in pairs if pair[0].dtype == kind]
        torch._foreach_copy_([buffer for buffer, _ in alike], [value for _, value in alike])


def copy_into(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        if buffer is not value:
            buffer.copy_(value)


class Graphs:
    """The recordings of one model, by what was asked and the shapes it was asked for."""

    def __init__(self) -> None:
        self.recordings: dict[Hashable, Recording[Any, Any]] = {}
        self.refused = False  # True: this model could not be recorded
        self.replayed = 0  # steps, so that a test can tell whether anything was replayed

    def recording(self, begin: Callable[[G], T], given: G, *, key: Hashable, steady: bool) -> Recording[G, T] | None:
        """That of a search which begins so, with other numbers or these; None: this model cannot be recorded.

        `steady`: the beginning can be recorded too.
        """
        if self.refused:
            return None
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(given))
        found = self.recordings.pop((key, shapes), None)
        if found is None:
            try:
                found = Recording(begin, cloned(given), steady=steady)
            except RuntimeError as error:
                self._refuse(error)
                return None
        self.recordings[key, shapes] = found  # the newest is the last
        while len(self.recordings) > KEPT:
            self.recordings.pop(next(iter(self.recordings)))
        return found

    def replay(
        self, recording: Recording[Any, T], step: Callable[[T, int | None], T], said: int | None, kind: Hashable
    ) -> bool:
        """One step, after so many tokens; by its kind it is known which ones are the same. False: it was not made."""
        if kind not in recording.steps:
            try:
                recording.learn(step, said, kind)
            except RuntimeError as error:
                self._refuse(error)
                return False
        recording.steps[kind].replay()
        self.replayed += 1
        return True

    def _refuse(self, error: RuntimeError) -> None:
        """A part of the user's own may wait for the device in a step, which cannot be recorded."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        warnings.warn(f"steps of this model cannot be recorded, so generation is slower: {error}", stacklevel=2)
        self.refused = True


def cloned(value: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: cloned(getattr(value, one.name)) for one in fields(value)})
    if isinstance(value, dict):
        return {name: cloned(part) for name, part in value.items()}
    return tuple(map(cloned, value)) if isinstance(value, tuple) else value
