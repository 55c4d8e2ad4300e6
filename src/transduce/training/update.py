"""One batch enters; the weights leave one update further, or untouched with the reason why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from transduce.errors import InputError
from transduce.flow import Batch
from transduce.kernels.native.library import library
from transduce.kernels.training_graph import Recorder
from transduce.kernels.weight_cast import ALIGNED, made_together
from transduce.layers.transformer import recompute
from transduce.objectives import Objective
from transduce.recipe import TrainingRecipe
from transduce.training.distributed import Processes, autocast, seed_everything
from transduce.training.micro_batch import Launched, Piece, Result, Work
from transduce.training.optimisers import hold_still, set_rate


def first_bad(model: nn.Module, run: Callable[[], Tensor]) -> str:
    """Modules report when they are done, so the innermost comes first. `run` gives the loss; "" when all is well.

    Minus infinity alone is what masked scores look like, so a module that gives it is named only if nothing worse
    is found.
    """
    bad: list[str] = []
    suspect: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not tensor.is_floating_point() or tensor.isfinite().all():
                    continue
                masked = not (tensor.isnan() | tensor.isposinf()).any()
                (suspect if masked else bad).append(name or type(module).__name__)

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            loss = run()
    finally:
        for hook in hooks:
            hook.remove()
    if bad:
        return bad[0]
    if loss.isfinite().all():
        return ""
    return suspect[0] if suspect else "the loss"


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


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
CLIP_EPSILON = 1e-6  # as torch's own clipping has it


@dataclass
class _Gradients:
    """What this process has added up so far."""

    sums: Tensor  # the loss and its parts
    splits: int = 0
    lost: list[int] = field(default_factory=list)
    lost_count: int = 0


def _compiled(model: nn.Module) -> Callable[..., Any]:
    """One program for all lengths. An analysis of torch 2.11's compiler fails on such programs, so it is left out."""
    import torch._inductor.config as compiler

    if hasattr(compiler.triton, "coalesce_tiling_analysis"):
        compiler.triton.coalesce_tiling_analysis = False
    return torch.compile(model, dynamic=True)


class Update:
    """Makes one update at a time. All processes decide alike, because they decide by numbers they summed."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        objective: Objective,
        settings: TrainingRecipe,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self.model, self.optimiser, self.objective = model, optimiser, objective
        self.settings, self.processes, self.device = settings, processes, device
        if settings.checkpoint_layers and not recompute(model):
            raise InputError(
                "training.checkpoint_layers: this model has no Transformer blocks",
                remedy="leave it out; training.accumulate also makes an update fit into less memory",
            )
        self.forward = _compiled(model) if settings.compile else model
        if device.type == "cpu":
            library()  # from now on they are there for whoever asks
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        linear = (layer for layer in model.modules() if type(layer) is nn.Linear)
        self.layers = [layer for layer in linear if layer.out_features % ALIGNED == 0]  # others: see layers/scoring.py
        self.recorder = Recorder(self._pass, self.parameters) if self.records else None
        self.limit = math.inf  # slots of the smallest piece that ever ran out of memory

    @property
    def records(self) -> bool:
        """Whether passes are recorded: on a GPU, where nothing in them depends on more than the shapes of a batch."""
        capturable = self.objective.capturable and bool(getattr(self.model, "capturable", False))
        wanted = self.settings.record and self.settings.unfreeze is None  # whose gradients come and go
        wanted = wanted and not self.settings.checkpoint_layers  # which asks for the state of the random numbers
        return wanted and capturable and self.device.type == "cuda"

    def __call__(self, work: Work, step: int, rate: float, flags: tuple[bool, ...] = ()) -> Result:
        return self.launch(work, step, rate, flags).result()

    def launch(self, work: Work, step: int, rate: float, flags: tuple[bool, ...] = ()) -> Launched:
        """Begins an update. Where it can go on without us (`ahead`), nothing is waited for before its result is."""
        gradients = self._gradients(work, step)
        if self.recorder is not None:
            self.recorder.settle()
        lost_count, splits, *raised = self.processes.sum([gradients.lost_count, gradients.splits, *flags])
        self.processes.sum_gradients(self.parameters)
        hold_still(self.optimiser, step)
        own = [p.grad for p in self.parameters if p.grad is not None]
        count = work.count - int(lost_count)
        if lost_count and count:
            torch._foreach_mul_(own, work.count / count)  # the pieces were divided by the count they should have had
        norm = get_total_norm(own)
        numbers = torch.cat([gradients.sums, norm.to(gradients.sums)[None]])
        ahead = self.ahead and count > 0
        if ahead:
            self._move(norm, rate, numbers)
            self._forget()
        lost = self._all_lost(gradients.lost) if lost_count else ()
        known = Result(math.nan, {}, count, math.nan, "", int(splits), lost)

        def finish(found: list[float]) -> Result:
            *sums, gradient_norm = found
            total, *parts = self.processes.sum(sums)
            bad = "" if count else "no token was left to learn from"
            if not bad and not (math.isfinite(total) and math.isfinite(gradient_norm)):
                bad = self._blame(work, step)
            if not bad and not ahead:
                self._move(norm, rate)
            if bad or not ahead:
                self._forget()
            named = dict(zip(self.objective.parts, parts, strict=True))
            return replace(known, loss=total, parts=named, gradient_norm=gradient_norm, bad=bad)

        return Launched(numbers, finish, tuple(number > 0 for number in raised), waits=not ahead)

    @property
    def ahead(self) -> bool:
        """Whether the device is told to move before it is known here that all is finite: it need not wait for us then.

        A fused optimiser looks for itself. With several processes the losses of the others would have to be known.
        """
        fused = all(group.get("fused") for group in self.optimiser.param_groups)
        return fused and self.device.type == "cuda" and self.processes.size == 1

    def _move(self, norm: Tensor, rate: float, unless: Tensor | None = None) -> None:
        """One step of the optimiser, clipped; none where a number in `unless` is not finite."""
        clip, bad, excess = self.settings.clip, None, None
        if unless is not None:  # a fused step looks, and divides as it goes: 4 bytes a number instead of 8
            bad = (~unless.isfinite().all()).float()
            excess = None if clip is None else ((norm + CLIP_EPSILON) / clip).clamp(min=1.0).float()
        elif clip is not None:
            clip_grads_with_norm_(self.parameters, clip, norm)
        set_rate(self.optimiser, rate)
        self.optimiser.found_inf, self.optimiser.grad_scale = bad, excess  # type: ignore[attr-defined]
        self.optimiser.step()

    def _gradients(self, work: Work, step: int) -> _Gradients:
        """The gradient of this process's pieces, each divided by the count of the whole update.

        Out of memory: a backward pass that failed half-way has added to some gradients and not to others. So all of
        them are discarded and the update is redone in smaller pieces; the sum is the same.
        """
        result = _Gradients(self._no_sums())
        waiting = [small for piece in work.pieces for small in self._fitting(piece)]
        done = 0
        while done < len(waiting):
            sums = self._backward(waiting[done], work.count, step)
            if sums is not None:
                result.sums += sums
                done += 1
                continue
            self._forget()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            failed = waiting.pop(done)
            self.limit = min(self.limit, failed.batch.slots)
            result.sums, done = self._no_sums(), 0
            if halves := failed.halves():
                result.splits += 1
                waiting = [small for piece in [*waiting, *halves] for small in self._fitting(piece)]
                waiting.sort(key=lambda piece: piece.first)
            else:
                result.lost += failed.batch.rows or (failed.first,)
                result.lost_count += self.objective.count(failed.batch)
        return result

    def _backward(self, piece: Piece, count: int, step: int) -> Tensor | None:
        """Adds one piece's gradient; None: out of memory."""
        try:
            seed_everything(self.settings.seed, step, piece.first)
            factor = torch.full((), 1 / max(count, 1), device=self.device)  # written there: nothing is waited for
            if self.recorder is not None:
                return self.recorder(piece.batch, factor)
            return self._pass(piece.batch, factor, self.objective.at(step, self.settings.steps))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not any(phrase in str(error) for phrase in OUT_OF_MEMORY):
                raise
        return None

    def _pass(self, batch: Batch, factor: Tensor, objective: Objective | None = None) -> Tensor:
        """Forward and backward: the gradient of the loss, times the factor, is added; the loss and its parts leave."""
        with autocast(self.device, self.settings.precision), made_together(self.layers):
            loss = (objective or self.objective)(self.forward, batch)
        (loss.total * factor).backward()
        return torch.stack([loss.total.detach(), *(loss.parts[name] for name in self.objective.parts)])

    def _fitting(self, piece: Piece) -> Iterator[Piece]:
        """The piece, cut until it is smaller than any that ran out of memory before."""
        if piece.batch.size == 1 or piece.batch.slots < self.limit:
            yield piece
        else:
            for half in piece.halves():
                yield from self._fitting(half)

    def _no_sums(self) -> Tensor:
        return torch.zeros(1 + len(self.objective.parts), device=self.device)

    def _forget(self) -> None:
        """No gradient is left. Recorded passes write theirs to a fixed place, which must stay."""
        if self.recorder is not None:
            self.recorder.fresh = True
        if self.recorder is None or not self.recorder.recordings:
            self.optimiser.zero_grad()

    def _all_lost(self, own: list[int]) -> tuple[int, ...]:
        lists = [self.processes.broadcast(own, rank) for rank in range(self.processes.size)]
        return tuple(row for rows in lists for row in rows)

    def _blame(self, work: Work, step: int) -> str:
        """The first bad module of the first process that finds one: all processes name the same."""

        def run(piece: Piece) -> Callable[[], Tensor]:
            def forward() -> Tensor:
                seed_everything(self.settings.seed, step, piece.first)
                with autocast(self.device, self.settings.precision):
                    return self.objective.at(step, self.settings.steps)(self.model, piece.batch).total

            return forward

        pieces = [small for piece in work.pieces for small in self._fitting(piece)]
        own = next((name for piece in pieces if (name := first_bad(self.model, run(piece)))), "")
        found = [self.processes.broadcast(own, rank) for rank in range(self.processes.size)]
        if self.ahead:
            self._gradients(work, step)  # which were forgotten already
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                found.append(f"the gradient of {name}")
                break
        return next((name for name in found if name), "the norm of the gradient")
