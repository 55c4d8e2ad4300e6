"""CUDA graphs: capture and replay, and the captured steps of a search.

On a GPU a step of a search is some two hundred small kernels, and a training pass a thousand. They take longer to
launch from Python than to run. Captured once for a set of shapes, they are launched as one graph. The same function
runs everywhere; only how it is launched differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

G = TypeVar("G")  # the input of a search
T = TypeVar("T")  # the state of a search between two steps, or the result of any captured function
MAX_SEARCHES = 16  # captured searches of a model, the most recent ones


class CapturedGraph(Generic[T]):
    """A function of fixed buffers as a CUDA graph. `result` has the same addresses in every replay."""

    def __init__(
        self,
        run: Callable[[], T],
        *,
        first_run: Callable[[], object] | None = None,  # instead of `run`, where running it twice would matter
        memory_of: CapturedGraph[T] | None = None,  # a graph that never runs at the same time
    ) -> None:
        warm_up(first_run or run)
        self.graph = torch.cuda.CUDAGraph()
        with capture(self.graph, None if memory_of is None else memory_of.graph.pool()):
            self.result = run()

    def replay(self) -> T:
        self.graph.replay()
        return self.result


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Kernels launched inside are added to the graph. Other threads may launch kernels: one of them copies batches.

    After a capture that failed, the random number generator behaves as if capture continued; it gets a new state.
    """
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        device = torch.device("cuda", torch.cuda.current_device())
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
        raise


def warm_up(run: Callable[[], T]) -> T:
    """A first run, in which libraries initialise themselves: that must not be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = run()
    torch.cuda.current_stream().wait_stream(side)
    return result


class SearchGraph(Generic[G, T]):
    """The captured initial state of a search and each kind of its steps, with the buffers they read and write."""

    def __init__(self, begin: Callable[[G], T], given: G, *, capturable: bool) -> None:
        self.given = tensors_of(given)
        self.begin: CapturedGraph[T] | None = None
        if capturable:
            self.begin = CapturedGraph(lambda: begin(given))
        self.values = warm_up(lambda: begin(given)) if self.begin is None else self.begin.result
        self.buffers = tensors_of(self.values)
        self.steps: dict[Hashable, CapturedGraph[None]] = {}

    def capture_step(self, step: Callable[[T, int | None], T], length: int | None, kind: Hashable) -> None:
        """Captures a new kind of step. This changes nothing in a search: values that the warm-up run writes into a
        cache, the step itself writes there again."""

        def run() -> None:
            copy_tensors_together(self.buffers, tensors_of(step(self.values, length)))

        self.steps[kind] = CapturedGraph(run, first_run=lambda: step(self.values, length))

    def reset(self, begin: Callable[[G], T], given: G) -> None:
        """Sets the buffers to the state before the first step."""
        if self.begin is None:
            copy_tensors(self.buffers, tensors_of(begin(given)))
        else:
            copy_tensors(self.given, tensors_of(given))
            self.begin.replay()


class SearchGraphs:
    """The captured searches of one model, by their settings and shapes."""

    def __init__(self) -> None:
        self.captured: dict[Hashable, SearchGraph[Any, Any]] = {}
        self.failed = False  # True: a step of this model could not be captured
        self.replayed = 0  # number of replayed steps

    def graph_for(
        self, begin: Callable[[G], T], given: G, *, key: Hashable, capturable: bool
    ) -> SearchGraph[G, T] | None:
        """The graph of a search with these settings and shapes; None: this model cannot be captured.

        `capturable`: the computation of the initial state can be captured too.
        """
        if self.failed:
            return None
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(given))
        found = self.captured.pop((key, shapes), None)
        if found is None:
            try:
                found = SearchGraph(begin, clone_tensors(given), capturable=capturable)
            except RuntimeError as error:
                self._fail(error)
                return None
        self.captured[key, shapes] = found  # the most recent one is the last
        while len(self.captured) > MAX_SEARCHES:
            self.captured.pop(next(iter(self.captured)))
        return found

    def replay(
        self, graph: SearchGraph[Any, T], step: Callable[[T, int | None], T], length: int | None, kind: Hashable
    ) -> bool:
        """One step, after `length` tokens; steps of one kind are the same graph. False: no step was made."""
        if kind not in graph.steps:
            try:
                graph.capture_step(step, length, kind)
            except RuntimeError as error:
                self._fail(error)
                return False
        graph.steps[kind].replay()
        self.replayed += 1
        return True

    def _fail(self, error: RuntimeError) -> None:
        """A user's own module may wait for the device in a step, which cannot be captured."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        warnings.warn(f"steps of this model cannot be captured, so generation is slower: {error}", stacklevel=2)
        self.failed = True


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in dataclasses, dicts and tuples, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        parts = [getattr(value, one.name) for one in fields(value)]
    else:
        parts = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


def clone_tensors(value: Any) -> Any:
    """A copy that shares no storage with the value."""
    if isinstance(value, Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: clone_tensors(getattr(value, one.name)) for one in fields(value)})
    if isinstance(value, dict):
        return {name: clone_tensors(part) for name, part in value.items()}
    return tuple(map(clone_tensors, value)) if isinstance(value, tuple) else value


def copy_tensors(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        if buffer is not value:
            buffer.copy_(value)


def copy_tensors_together(buffers: list[Tensor], values: list[Tensor]) -> None:
    """As `copy_tensors`, by one kernel for all tensors of a dtype where torch has one."""
    pairs = [(buffer, value) for buffer, value in zip(buffers, values, strict=True) if buffer is not value]
    for dtype in {buffer.dtype for buffer, _ in pairs}:
        alike = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_copy_([buffer for buffer, _ in alike], [value for _, value in alike])
