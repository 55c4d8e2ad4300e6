"""One parameter update: micro-batches and their feeding, accumulation, out-of-memory splitting, non-finite tracing."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from transduce.attention.positions import max_positions
from transduce.data.batching import DataPosition
from transduce.errors import InputError
from transduce.flow import Batch
from transduce.kernels.cuda_graph import NO_CAPTURE, TrainingGraphs, pad_to_bucket
from transduce.kernels.linear import cast_weights, castable_layers
from transduce.kernels.native.library import library
from transduce.layers.transformer import enable_gradient_checkpointing
from transduce.objectives import Objective
from transduce.recipe import TrainingRecipe
from transduce.training.distributed import (
    GradientBuckets,
    Processes,
    autocast,
    fill_missing_gradients,
    is_sharded,
    local_part,
    seed_everything,
)
from transduce.training.optimisers import clear_frozen_gradients, set_learning_rate

if TYPE_CHECKING:
    from transduce.training.fsdp import ShardedModel

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
CLIP_EPSILON = 1e-6  # the epsilon of torch's gradient clipping


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch that go through the model in one forward and backward pass."""

    first_row: int  # index of the first row in the whole batch
    batch: Batch
    counts: bool = True  # False: with FSDP, a pass without effect, for as many passes as other processes have

    def halves(self) -> list[MicroBatch]:
        """Two smaller micro-batches; none for a single row."""
        if self.batch.size == 1:
            return []
        low, high = torch.arange(self.batch.size).tensor_split(2)
        return [
            MicroBatch(self.first_row, self.batch.select(low)),
            MicroBatch(self.first_row + len(low), self.batch.select(high)),
        ]


def split_batch(batch: Batch, processes: Processes, accumulate: int) -> list[MicroBatch]:
    """The rows of this process, a contiguous part of the batch, in `accumulate` micro-batches without empty ones."""
    if processes.size * accumulate == 1:
        return [MicroBatch(0, batch)]
    parts = torch.arange(batch.size).tensor_split(processes.size * accumulate)
    parts_of_rank = parts[processes.rank * accumulate : (processes.rank + 1) * accumulate]
    return [MicroBatch(int(rows[0]), batch.select(rows)) for rows in parts_of_rank if len(rows)]


def shortest_row(batch: Batch) -> MicroBatch:
    """The shortest row of a batch, whose loss does not count."""
    lengths = [part.mask.flatten(1).sum(1) for part in (batch.source, batch.target) if part is not None]
    row = int(torch.stack(lengths).sum(0).argmin())
    return MicroBatch(row, batch.select(torch.tensor([row])), counts=False)


@dataclass(frozen=True)
class UpdateBatch:
    """The input of one update in one process."""

    micro_batches: list[MicroBatch]
    count: int  # number of loss terms (tokens) of the whole update, over all processes
    spare: MicroBatch | None = None  # with FSDP: the shortest row of the whole batch, for passes without effect


@dataclass(frozen=True)
class UpdateResult:
    """Loss and gradient norm of one update."""

    loss: float  # sum over `count` loss terms, over all processes
    parts: dict[str, float]
    count: int
    gradient_norm: float  # before clipping
    nonfinite: str = ""  # where the first non-finite number occurred; the weights did not change then
    splits: int = 0  # micro-batches halved after running out of memory
    dropped: tuple[int, ...] = ()  # examples that do not fit into memory even alone


class UpdateFuture:
    """An update that was launched. Its loss and gradient norm are copied from the device asynchronously."""

    def __init__(
        self, numbers: Tensor, finish: Callable[[list[float]], UpdateResult], flags: tuple[bool, ...], *, wait: bool
    ) -> None:
        self.flags = flags  # raised by any process
        self._finish, self._result = finish, finish(numbers.tolist()) if wait else None
        if self._result is None:
            self._numbers = torch.empty(numbers.shape, pin_memory=numbers.is_cuda).copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event() if numbers.is_cuda else None
            if self._copied is not None:
                self._copied.record()

    def result(self) -> UpdateResult:
        if self._result is None:
            if self._copied is not None:
                self._copied.synchronize()  # the only device synchronisation of an update
            self._result = self._finish(self._numbers.tolist())
        return self._result


@dataclass
class _Accumulated:
    """Sums over the micro-batches of this process so far."""

    sums: Tensor  # the loss and its parts
    splits: int = 0
    dropped: list[int] = field(default_factory=list)
    dropped_count: int = 0


class Update:
    """Computes one update at a time.

    All processes take the same decisions, because they take them from all-reduced numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        objective: Objective,
        settings: TrainingRecipe,
        processes: Processes,
        device: torch.device,
        sharded: ShardedModel | None = None,
    ) -> None:
        self.model, self.optimiser, self.objective = model, optimiser, objective
        self.settings, self.processes, self.device = settings, processes, device
        self.sharded = sharded
        if settings.gradient_checkpointing and not enable_gradient_checkpointing(model):
            raise InputError(
                "training.gradient_checkpointing: this model has no Transformer blocks",
                remedy="leave it out; training.accumulate also reduces the memory of an update",
            )
        if settings.compile and sharded is not None:
            remedy = "leave out one of the two"
            raise InputError("training.compile does not work with training.parallel: fsdp", remedy=remedy)
        self.forward = _compiled(model) if settings.compile else model
        if device.type == "cpu":
            library()  # builds and loads the C kernels, which the layers use from now on
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.cast_layers = castable_layers(model)
        self.graphs = self._training_graphs() if self.uses_cuda_graphs else None
        # FSDP sums the gradients of sharded parameters in the backward pass.
        self.whole_parameters = [p for p in self.parameters if not is_sharded(p)]
        self.buckets = GradientBuckets(self.whole_parameters) if processes.size > 1 else None
        self.slot_limit = math.inf  # slots of the smallest micro-batch that ran out of memory

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether passes are replayed as CUDA graphs: on a GPU, if they depend on nothing but the batch shapes."""
        capturable = self.objective.capturable and bool(getattr(self.model, "capturable", False))
        enabled = self.settings.cuda_graphs and self.settings.unfreeze is None  # unfreezing removes and adds gradients
        enabled = enabled and not self.settings.gradient_checkpointing  # recomputation reads the generator state
        # A process that runs out of memory would leave the others waiting in a graph.
        enabled = enabled and (self.sharded is None or self.processes.size == 1)
        return enabled and capturable and self.device.type == "cuda"

    def _training_graphs(self) -> TrainingGraphs:
        if self.sharded is None:
            return TrainingGraphs(self._forward_backward, self.parameters)
        return TrainingGraphs(self._forward_backward, self.parameters, local_part, self.sharded.discard_pass)

    @property
    def asynchronous(self) -> bool:
        """Whether the optimiser step is queued before the host knows that all numbers are finite.

        A fused optimiser checks this on the device. With several processes the losses of the others would be needed.
        """
        fused = all(group.get("fused") for group in self.optimiser.param_groups)
        return fused and self.device.type == "cuda" and self.processes.size == 1

    def __call__(
        self, batch: UpdateBatch, step: int, learning_rate: float, flags: tuple[bool, ...] = ()
    ) -> UpdateResult:
        return self.launch(batch, step, learning_rate, flags).result()

    def launch(self, batch: UpdateBatch, step: int, learning_rate: float, flags: tuple[bool, ...] = ()) -> UpdateFuture:
        """Starts an update. If it is `asynchronous`, the host does not wait for the device before `result()`."""
        accumulated = self._accumulate(batch, step)
        if self.graphs is not None:
            self.graphs.clear_stale()
        dropped_count, splits, *raised = self.processes.all_reduce(
            [accumulated.dropped_count, accumulated.splits, *flags]
        )
        if self.buckets is None:
            fill_missing_gradients(self.whole_parameters)
        elif not self.overlaps:
            self.buckets.finish()
        clear_frozen_gradients(self.optimiser, step)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        count = batch.count - int(dropped_count)
        if dropped_count and count:
            # The micro-batches were divided by `batch.count`.
            torch._foreach_mul_([*map(local_part, gradients)], batch.count / count)
        norm = _total_norm(gradients, self.processes)
        numbers = torch.cat([accumulated.sums, norm.to(accumulated.sums)[None]])
        asynchronous = self.asynchronous and count > 0
        if asynchronous:
            self._optimiser_step(norm, learning_rate, must_be_finite=numbers)
            self._clear_gradients()
        dropped = self._gather_dropped(accumulated.dropped) if dropped_count else ()
        known = UpdateResult(math.nan, {}, count, math.nan, "", int(splits), dropped)
        optimiser_step = None if asynchronous else partial(self._optimiser_step, norm, learning_rate)
        finish = partial(self._finish, batch, step, optimiser_step, known)
        return UpdateFuture(numbers, finish, tuple(number > 0 for number in raised), wait=not asynchronous)

    def preflight(self, batch: Batch) -> UpdateResult:
        """A pass over a batch, such as the largest of the data, whose gradient is discarded.

        If it does not fit into memory, the size of micro-batches that do is known before the first update.
        """
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        on_device = batch.to(self.device)
        parts = split_batch(on_device, self.processes, self.settings.accumulate)
        parts = [replace(one, batch=_pad_for_cuda_graphs(one.batch, self)) for one in parts]
        content = UpdateBatch(parts, self.objective.count(batch), shortest_row(on_device))
        done = self._accumulate(content, 0)
        self._clear_gradients()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():  # running means of batch normalisation
                buffer.copy_(buffers[name])
        splits, dropped = self.processes.all_reduce([done.splits, len(done.dropped)])
        return UpdateResult(math.nan, {}, content.count, math.nan, "", int(splits), (0,) * int(dropped))

    def _finish(
        self,
        batch: UpdateBatch,
        step: int,
        optimiser_step: Callable[[], None] | None,
        known: UpdateResult,
        numbers: list[float],
    ) -> UpdateResult:
        """The result of an update from its loss sums and gradient norm; takes the optimiser step if it is not done."""
        *sums, gradient_norm = numbers
        total, *parts = self.processes.all_reduce(sums)
        nonfinite = "" if known.count else "no token is left to train on"
        if not nonfinite and not (math.isfinite(total) and math.isfinite(gradient_norm)):
            nonfinite = self._trace_nonfinite(batch, step)
        if not nonfinite and optimiser_step is not None:
            optimiser_step()
        if nonfinite or optimiser_step is not None:
            self._clear_gradients()
        named = dict(zip(self.objective.parts, parts, strict=True))
        return replace(known, loss=total, parts=named, gradient_norm=gradient_norm, nonfinite=nonfinite)

    def _optimiser_step(self, norm: Tensor, learning_rate: float, must_be_finite: Tensor | None = None) -> None:
        """One clipped step of the optimiser; with `must_be_finite`, a fused one skips the step on the device."""
        clip, found_inf, grad_scale = self.settings.clip, None, None
        if must_be_finite is not None:  # the fused step also divides by the scale: 4 bytes a number instead of 8
            found_inf = (~must_be_finite.isfinite().all()).float()
            grad_scale = None if clip is None else ((norm + CLIP_EPSILON) / clip).clamp(min=1.0).float()
        elif clip is not None:
            self._clip(clip, norm)
        set_learning_rate(self.optimiser, learning_rate)
        self.optimiser.found_inf, self.optimiser.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
        self.optimiser.step()

    def _clip(self, clip: float, norm: Tensor) -> None:
        if self.sharded is None:
            clip_grads_with_norm_(self.parameters, clip, norm)
            return
        factor = (clip / (norm + CLIP_EPSILON)).clamp(max=1.0)
        torch._foreach_mul_([local_part(p.grad) for p in self.parameters if p.grad is not None], factor)

    def _accumulate(self, batch: UpdateBatch, step: int) -> _Accumulated:
        """Accumulates the gradient of the micro-batches of this process, each divided by the count of the update.

        A backward pass that runs out of memory has added to some gradients and not to others. Therefore all of them
        are discarded and the update is recomputed in smaller micro-batches; the sum is the same.
        """
        if self.sharded is not None:
            return self._accumulate_sharded(self.sharded, batch, step)
        if self.overlaps:
            return self._accumulate_overlapping(batch, step)
        result = _Accumulated(self._zero_sums())
        queue = self._fit_to_memory(batch.micro_batches)
        done = 0
        while done < len(queue):
            sums = self._backward(queue[done], batch.count, step)
            if sums is not None:
                result.sums += sums
                done += 1
                continue
            queue = self._without_failed(queue, queue[done], result)
            done = 0
        return result

    @property
    def overlaps(self) -> bool:
        """Whether gradients are sent to the other processes within the last backward pass: not from a CUDA graph."""
        return self.buckets is not None and self.sharded is None and self.graphs is None

    def _accumulate_overlapping(self, batch: UpdateBatch, step: int) -> _Accumulated:
        """As `_accumulate`, and sums the gradients over all processes while the last micro-batch is computed.

        A process that runs out of memory sends what it has: then all processes discard the sums and repeat the update.
        """
        assert self.buckets is not None
        result = _Accumulated(self._zero_sums())
        queue = self._fit_to_memory(batch.micro_batches)
        while True:
            failed: MicroBatch | None = None
            for number, micro_batch in enumerate(queue):
                if number == len(queue) - 1:
                    self.buckets.begin()
                sums = self._backward(micro_batch, batch.count, step)
                if sums is None:
                    failed = micro_batch
                    break
                result.sums += sums
            self.buckets.finish()
            if not self.processes.maximum(failed is not None):
                return result
            queue = self._after_failure(queue, failed, result)

    def _after_failure(
        self, queue: list[MicroBatch], failed: MicroBatch | None, result: _Accumulated
    ) -> list[MicroBatch]:
        """The micro-batches of the next attempt, after this process or, `failed` is None, another ran out of memory."""
        if failed is not None:
            return self._without_failed(queue, failed, result)
        self._clear_gradients()
        result.sums = self._zero_sums()
        return queue

    def _without_failed(self, queue: list[MicroBatch], failed: MicroBatch, result: _Accumulated) -> list[MicroBatch]:
        """The micro-batches of the next attempt, after one ran out of memory: it is halved, or, a row, dropped."""
        self._clear_gradients()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        result.sums = self._zero_sums()
        queue = [one for one in queue if one is not failed]
        self.slot_limit = min(self.slot_limit, failed.batch.slots)
        if halves := failed.halves():
            result.splits += 1
            return sorted(self._fit_to_memory([*queue, *halves]), key=lambda one: one.first_row)
        result.dropped += failed.batch.rows or (failed.first_row,)
        result.dropped_count += self.objective.count(failed.batch)
        return queue

    def _accumulate_sharded(self, sharded: ShardedModel, batch: UpdateBatch, step: int) -> _Accumulated:
        """As `_accumulate`, with collectives in every pass: all processes do the same number of passes.

        A pass that runs out of memory in one process is void in all of them; then all repeat the update.
        """
        result = _Accumulated(self._zero_sums())
        queue = self._fit_to_memory(batch.micro_batches)
        while True:
            failed: MicroBatch | None = None
            for micro_batch in self._same_number(queue, batch):
                sharded.begin_pass()
                sums = self._backward(micro_batch, batch.count, step)
                if sums is not None:
                    result.sums += sums
                    continue
                failed = failed or micro_batch
                sharded.repeat_failed_pass(partial(self._backward_spare, batch, step))
            if not self.processes.maximum(failed is not None):
                return result
            queue = self._after_failure(queue, failed, result)

    def _same_number(self, queue: list[MicroBatch], batch: UpdateBatch) -> list[MicroBatch]:
        """With FSDP: the micro-batches, and passes without effect up to the number of the other processes."""
        missing = self.processes.maximum(len(queue)) - len(queue)
        assert batch.spare is not None or not missing, "batches for FSDP have a spare row"
        return [*queue, *[batch.spare for _ in range(missing) if batch.spare is not None]]

    def _backward_spare(self, batch: UpdateBatch, step: int) -> None:
        if batch.spare is None or self._backward(batch.spare, batch.count, step) is None:
            raise InputError(
                "out of memory: not even the shortest example of a batch fits",
                where=f"update {step}",
                remedy="set training.gradient_checkpointing, take a smaller model, or more processes",
            )

    def _backward(self, micro_batch: MicroBatch, count: int, step: int) -> Tensor | None:
        """Adds the gradient of one micro-batch; None: out of memory."""
        try:
            seed_everything(self.settings.seed, step, micro_batch.first_row)
            weight = 1 / max(count, 1) if micro_batch.counts else 0.0
            factor = torch.full((), weight, device=self.device)  # created on the device: no transfer
            if self.graphs is not None:
                sums = self.graphs(micro_batch.batch, factor)
            else:
                objective = self.objective.at_step(step, self.settings.steps)
                sums = self._forward_backward(micro_batch.batch, factor, objective)
            return sums if micro_batch.counts else torch.zeros_like(sums)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not any(phrase in str(error) for phrase in OUT_OF_MEMORY):
                raise
        return None

    def _forward_backward(self, batch: Batch, factor: Tensor, objective: Objective | None = None) -> Tensor:
        """Adds the gradient of the loss times the factor; returns the loss and its parts."""
        if self.sharded is not None:
            with autocast(self.device, self.settings.precision):
                scaled, sums = self.sharded.root(objective or self.objective, batch, factor)
            scaled.backward()
            return sums
        with autocast(self.device, self.settings.precision), cast_weights(self.cast_layers):
            loss = (objective or self.objective)(self.forward, batch)
        (loss.total * factor).backward()
        return torch.stack([loss.total.detach(), *(loss.parts[name] for name in self.objective.parts)])

    def _fit_to_memory(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, halved until each is smaller than any that ran out of memory before."""
        result: list[MicroBatch] = []
        for micro_batch in micro_batches:
            fits = micro_batch.batch.size == 1 or micro_batch.batch.slots < self.slot_limit
            result += [micro_batch] if fits else self._fit_to_memory(micro_batch.halves())
        return result

    def _zero_sums(self) -> Tensor:
        return torch.zeros(1 + len(self.objective.parts), device=self.device)

    def _clear_gradients(self) -> None:
        """Discards the gradients. CUDA graphs write theirs to fixed addresses, which must stay allocated."""
        if self.graphs is not None:
            self.graphs.stale = True
        if self.graphs is None or not self.graphs.captured:
            self.optimiser.zero_grad()

    def _gather_dropped(self, dropped: list[int]) -> tuple[int, ...]:
        return tuple(row for rows in self._of_all_processes(dropped) for row in rows)

    def _trace_nonfinite(self, batch: UpdateBatch, step: int) -> str:
        """The origin of the first non-finite number: a module, the loss, or the gradient of a parameter.

        All processes return the name that the first of them found.
        """

        def loss_of(micro_batch: MicroBatch) -> Tensor:
            seed_everything(self.settings.seed, step, micro_batch.first_row)
            objective = self.objective.at_step(step, self.settings.steps)
            with autocast(self.device, self.settings.precision):
                if self.sharded is None:
                    return objective(self.model, micro_batch.batch).total
                total: Tensor = self.sharded.root(objective, micro_batch.batch, self._zero_sums()[0])[1][0]
                return total

        queue = self._fit_to_memory(batch.micro_batches)
        if self.sharded is not None:
            queue = self._same_number(queue, batch)
        names = (first_nonfinite_module(self.model, partial(loss_of, one)) for one in queue)
        culprit = next(filter(None, names), "")
        if self.sharded is not None:
            deque(names, maxlen=0)  # every process takes part in every pass
            self.sharded.reset()
        found = self._of_all_processes(culprit)
        if self.asynchronous:
            self._accumulate(batch, step)  # the gradients were discarded already
        gradients = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        wrong = (f"the gradient of {name}" for name, grad in gradients if not local_part(grad).isfinite().all())
        found += self._of_all_processes(next(wrong, ""))
        return next(filter(None, found), "the norm of the gradient")

    def _of_all_processes(self, value: Any) -> list[Any]:
        return [self.processes.broadcast(value, rank) for rank in range(self.processes.size)]


def _total_norm(gradients: Sequence[Tensor], processes: Processes) -> Tensor:
    """The norm of all gradients, whole ones and sharded ones."""
    sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    if not sharded:
        return get_total_norm(gradients)
    whole = [gradient for gradient in gradients if not is_sharded(gradient)]
    norm = processes.norm_over_processes(get_total_norm([*map(local_part, sharded)]))
    return torch.hypot(norm, get_total_norm(whole).to(norm)) if whole else norm


def _compiled(model: nn.Module) -> Callable[..., Any]:
    """One program for all lengths. An analysis of torch 2.11's compiler fails on such programs, so it is disabled."""
    import torch._inductor.config as compiler

    if hasattr(compiler.triton, "coalesce_tiling_analysis"):
        compiler.triton.coalesce_tiling_analysis = False
    return torch.compile(model, dynamic=True)


def first_nonfinite_module(model: nn.Module, compute_loss: Callable[[], Tensor]) -> str:
    """The name of the first module whose output is not finite; "" if the loss is finite.

    Forward hooks run when a module is done, so the innermost module comes first. Masked scores are minus infinity, so
    a module whose only non-finite outputs are minus infinity is named only if there is no other.
    """
    nonfinite: list[str] = []
    negative_infinite: list[str] = []

    def check_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if not tensor.is_floating_point() or tensor.isfinite().all():
                continue
            masked = not (tensor.isnan() | tensor.isposinf()).any()
            (negative_infinite if masked else nonfinite).append(name or type(module).__name__)

    hooks = [module.register_forward_hook(partial(check_output, name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            loss = compute_loss()
    finally:
        for hook in hooks:
            hook.remove()
    if nonfinite:
        return nonfinite[0]
    if loss.isfinite().all():
        return ""
    return negative_infinite[0] if negative_infinite else "the loss"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


class BatchSource(Protocol):
    """Batches by position: a pure function of the position, so a resumed run continues at any position."""

    def at(self, position: DataPosition) -> Batch: ...

    def after(self, position: DataPosition) -> DataPosition: ...


def fingerprint(batch: Batch) -> str:
    """A hash of the content. That of the first batch of a run tells whether the data has changed."""
    digest = hashlib.sha256(repr(batch.rows).encode())
    for part in (batch.source, batch.target, *batch.extra.values()):
        if part is not None:
            digest.update(part.values.numpy().tobytes() + part.mask.numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class FetchedBatch:
    """The batch of one update on its device, with its position in the data."""

    update_batch: UpdateBatch
    epoch: int
    next_position: DataPosition
    tokens: int
    slots: int  # tokens and padding


class DeviceCopy:
    """Copies batches to a device.

    To a GPU it copies from page-locked memory on a stream of its own. A copy from other memory would wait until the
    GPU has computed all updates that are queued, and the next batch would not be ready in time. The trainer keeps a
    batch until its update is done, so its memory is not reused too early.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        with NO_CAPTURE:
            if self.stream is None:
                return batch.to(self.device)
            with torch.cuda.stream(self.stream):
                copied = batch.to(self.device, pinned=True)
            self.stream.synchronize()
            return copied


def fetch(batches: BatchSource, position: DataPosition, update: Update) -> Iterator[FetchedBatch]:
    """The batches of all updates from `position` on. Runs in the prefetching thread, in parallel with training."""
    copy = DeviceCopy(update.device)
    while True:
        batch = batches.at(position)
        micro_batches = [
            MicroBatch(one.first_row, copy(_pad_for_cuda_graphs(one.batch, update)))
            for one in split_batch(batch, update.processes, update.settings.accumulate)
        ]
        epoch, position = position.epoch, batches.after(position)
        spare = None
        if update.sharded is not None:
            row = shortest_row(batch)
            spare = replace(row, batch=copy(row.batch))
        content = UpdateBatch(micro_batches, update.objective.count(batch), spare)
        yield FetchedBatch(content, epoch, position, batch.tokens, batch.slots)


def _pad_for_cuda_graphs(batch: Batch, update: Update) -> Batch:
    """Pads a micro-batch to one of few shapes. A packed batch always has the same shape."""
    if not update.uses_cuda_graphs or batch.packed_labels is not None:
        return batch
    budget = update.settings.budget // (update.processes.size * update.settings.accumulate)
    return pad_to_bucket(batch, budget, max_positions(update.model))


Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates in a background thread, `ahead` items in advance.

    The iterator must not use the global random generators: the training thread seeds them, and the two would race.
    """

    def __init__(self, items: Iterator[Item], ahead: int = 2) -> None:
        self._items = items
        self._ready: Queue[Item | BaseException] = Queue(ahead)
        self._closed = Event()
        self._thread = Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except Full:
                continue
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        while True:  # empties the queue, so that a blocked put returns
            try:
                self._ready.get_nowait()
            except Empty:
                break
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
