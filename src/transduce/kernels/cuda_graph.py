"""CUDA graphs: capture and replay, the captured steps of a search, the captured passes of training.

On a GPU a step of a search is some two hundred small kernels, and a training pass a thousand. They take longer to
launch from Python than to run. Captured once for a set of shapes, they are launched as one graph. The same function
runs everywhere; only how it is launched differs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from transduce.flow import Batch, Padded
from transduce.kernels.dispatch import captured_pass

G = TypeVar("G")  # the input of a search
T = TypeVar("T")  # the state of a search between two steps, or the result of any captured function
MAX_SEARCHES = 16  # captured searches of a model, the most recent ones
COLUMN_MULTIPLE = 4  # the lengths of sources and targets are multiples of it
ROW_FRACTION = 8  # the number of rows is a multiple of this fraction of those that fit into a batch
MIN_OCCURRENCES = 3  # a shape is captured at its third occurrence: rare ones are not worth it
MAX_GRAPHS = 96
NO_CAPTURE = Lock()  # held while a graph is captured, and by other threads while they call the device
Shapes = tuple[Any, ...]
Pass = Callable[[Batch, Tensor], Tensor]  # adds the gradient of a batch, its loss times the factor; returns sums


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
    """Kernels launched inside are added to the graph. The thread that copies batches waits until capture has ended:
    its allocations and events could invalidate the capture.

    After a capture that failed, the random number generator behaves as if capture continued; it gets a new state.
    """
    try:
        with NO_CAPTURE, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
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

    def capture_steps(self, step: Callable[[T, int | None], T], length: int | None, count: int, kind: Hashable) -> None:
        """Captures a new kind of steps, so many of them as one graph. This changes nothing in a search: values that the
        warm-up run writes into a cache, the step itself writes there again."""

        def run() -> None:
            for _ in range(count):
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
        self,
        graph: SearchGraph[Any, T],
        step: Callable[[T, int | None], T],
        length: int | None,
        kind: Hashable,
        count: int = 1,
    ) -> bool:
        """Steps after `length` tokens, several only where `length` does not matter; False: no step was made.

        As many steps of one kind are the same graph.
        """
        if (kind, count) not in graph.steps:
            try:
                graph.capture_steps(step, length, count, (kind, count))
            except RuntimeError as error:
                self._fail(error)
                return False
        graph.steps[kind, count].replay()
        self.replayed += count
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


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the storages of these tensors: tensors that share memory have the same one."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


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


class TrainingGraphs:
    """Runs training passes over batches, as CUDA graphs where that pays. Gradients then have fixed addresses.

    The first pass of an update overwrites the gradients, the others add to them: two graphs of a shape, where updates
    have several passes. All graphs write their gradients to the addresses of the first one.

    `local`: what a tensor has in this process. `discard`: forgets what a pass has left unfinished whose capture failed.
    """

    def __init__(
        self,
        run: Pass,
        parameters: Sequence[nn.Parameter],
        local: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        discard: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.parameters, self.local, self.discard = run, parameters, local, discard
        self.occurrences: Counter[Shapes] = Counter()
        self.captured: dict[Shapes, PassGraph] = {}
        self.failed = False  # True: a pass could not be captured
        self.stale = True  # the gradients are those of an earlier update
        self.with_gradient: set[nn.Parameter] = set()  # parameters that ever received one

    def clear_stale(self) -> None:
        """Gradients to which no pass of this update has written are 0."""
        gradients = [self.local(p.grad) for p in self.parameters if p.grad is not None] if self.stale else []
        if gradients:
            torch._foreach_zero_(gradients)
        self.stale = False

    def __call__(self, batch: Batch, factor: Tensor) -> Tensor:
        key = (self.stale, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch)))
        self.occurrences[key] += 1
        eager = self.failed or self.occurrences[key] < MIN_OCCURRENCES or len(self.captured) >= MAX_GRAPHS
        if key not in self.captured and (eager or not self._capture(key, batch, factor)):
            self.clear_stale()
            return self.run(batch, factor)
        self.stale = False
        return self.captured[key].replay(batch, factor)

    def _capture(self, key: Shapes, batch: Batch, factor: Tensor) -> bool:
        """Whether the pass was captured; the gradients are as before, unless they are stale."""
        self.with_gradient |= {p for p in self.parameters if p.grad is not None}
        run, saved, buffers = self._keep_gradients, [], []
        if self.captured or not self.stale:
            buffers = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            saved = [] if self.stale else [buffer.clone() for buffer in buffers]
            run = partial(self._write_gradients, buffers, self.stale)
        try:
            self.captured[key] = PassGraph(run, batch, factor, next(iter(self.captured.values()), None))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # A user's own module may wait for the device, which cannot be captured.
            warnings.warn(f"passes of this model cannot be captured, so training is slower: {error}", stacklevel=2)
            self.discard()
            self.failed = True
            self.captured.clear()
            if not buffers:
                self._drop_gradients()
        if saved:
            torch._foreach_copy_([*map(self.local, buffers)], [*map(self.local, saved)])
        return not self.failed

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _keep_gradients(self, batch: Batch, factor: Tensor) -> Tensor:
        """A pass whose gradients stay where autograd put them."""
        self._drop_gradients()
        sums = self.run(batch, factor)
        self.with_gradient |= {p for p in self.parameters if p.grad is not None}
        for parameter in self.with_gradient:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return sums

    def _write_gradients(self, buffers: list[Tensor], overwrite: bool, batch: Batch, factor: Tensor) -> Tensor:
        """A pass whose gradients overwrite these buffers, or are added to them, all at the end."""
        self._drop_gradients()
        try:
            sums = self.run(batch, factor)
            found = {buffer: p.grad for p, buffer in zip(self.parameters, buffers, strict=True) if p.grad is not None}
            self.with_gradient |= {p for p in self.parameters if p.grad is not None}
            if found:
                write = torch._foreach_copy_ if overwrite else torch._foreach_add_
                write([*map(self.local, found)], [*map(self.local, found.values())])
            missing = [self.local(buffer) for buffer in buffers if buffer not in found]
            if missing and overwrite:
                torch._foreach_zero_(missing)
        finally:
            for parameter, buffer in zip(self.parameters, buffers, strict=True):
                parameter.grad = buffer if parameter in self.with_gradient else None
        return sums


class PassGraph:
    """One captured pass over a batch of fixed shapes, in the memory of another one: only one runs at a time."""

    def __init__(self, run: Pass, batch: Batch, factor: Tensor, other: PassGraph | None) -> None:
        self.batch, self.factor = clone_tensors(batch), factor.clone()
        with captured_pass():
            self.graph: CapturedGraph[Tensor] = CapturedGraph(
                lambda: run(self.batch, self.factor), memory_of=None if other is None else other.graph
            )

    def replay(self, batch: Batch, factor: Tensor) -> Tensor:
        copy_tensors_together([*tensors_of(self.batch), self.factor], [*tensors_of(batch), factor])
        return self.graph.replay().clone()


def pad_to_bucket(batch: Batch, budget: int, max_length: int | None = None) -> Batch:
    """The same examples, padded to one of few shapes. Added rows count nowhere.

    `budget`: padded tokens of a full batch. `max_length`: of the positions of the model. Of 723 batches of 32,768
    tokens with the lengths of text 6 % were padding before and 17 % after, in 96 shapes; with multiples of 8 columns
    and a quarter of the rows it was 26 %, in 49.
    """
    made = _pad_columns(batch, max_length)
    columns = sum(part.values.size(1) for part in (made.source, made.target) if part is not None)
    extra = -batch.size % max(1, budget // columns // ROW_FRACTION)
    if not extra:
        return made
    made = batch.select(torch.cat((torch.arange(batch.size), torch.zeros(extra, dtype=torch.long))))
    made = _pad_columns(made, max_length)
    if made.target is not None:
        mask = made.target.mask.clone()
        mask[batch.size :] = False
        made = replace(made, target=Padded(made.target.values, mask))
    return made


def _pad_columns(batch: Batch, max_length: int | None) -> Batch:
    """A decoder reads a target without its last column, which is not counted."""
    made = batch.map(lambda part: part.pad_to_multiple(COLUMN_MULTIPLE, max_length))
    sides = {
        name: part.pad_to_multiple(COLUMN_MULTIPLE, max_length, 1)
        for name in ("target", "loss_mask")
        if (part := getattr(batch, name))
    }
    return replace(made, **sides)
