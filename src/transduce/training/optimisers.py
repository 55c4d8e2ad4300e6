"""Settings and a model enter; an optimiser and the share of the learning rate at each update leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from transduce.contracts import PositionEncoding
from transduce.errors import InputError
from transduce.layers.embedding import Embedding
from transduce.recipe import OptimiserRecipe, ScheduleRecipe

TOP, DECODER, ENCODER, BOTTOM = range(4)
Level = tuple[int, int]  # which of these, and the layers of the same part above it


def depths(model: nn.Module) -> dict[str, int]:
    """Parameter -> its layer, counted from the top over the layers that hold something to train.

    On top is what stands outside the stacks of an encoder and a decoder: the head; the output layer, reader and last
    norm of a decoder. Then come the decoder's layers from last to first, those of the encoder (what it has outside
    them goes with its last one), and at the bottom embeddings and positions. A weight that two places share lies
    where the lower one does.
    """
    parts = dict(model.named_modules(remove_duplicate=False))
    first: dict[str, str] = {}  # a shared parameter goes by its first name, as named_parameters gives it
    found: dict[str, Level] = {}
    by_identity: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            first[name] = by_identity.setdefault(id(parameter), name)
            found[first[name]] = max(found.get(first[name], (TOP, 0)), _level(name, parts))
    order = {level: number for number, level in enumerate(sorted(set(found.values())))}
    return {name: order[level] for name, level in found.items()}


def _level(name: str, parts: dict[str, nn.Module]) -> Level:
    words = name.split(".")
    above = [".".join(words[:count]) for count in range(1, len(words))]
    if any(isinstance(parts[path], (Embedding, nn.Embedding, PositionEncoding)) for path in above):
        return (BOTTOM, 0)
    if words[0] not in ("encoder", "decoder"):
        return (TOP, 0)
    for path, number in zip(above, words[1:], strict=False):
        stack = parts[path]
        if isinstance(stack, nn.ModuleList):
            return (DECODER if words[0] == "decoder" else ENCODER, len(stack) - 1 - int(number))
    return (TOP, 0) if words[0] == "decoder" else (ENCODER, 0)


FUSED = ("cpu", "cuda", "mps")  # where torch has one kernel for a whole update


def build_optimiser(
    settings: OptimiserRecipe, model: nn.Module, *, layer_decay: float = 1.0, unfreeze: int | None = None
) -> torch.optim.Optimizer:
    """One group for the weights of a layer that are treated alike.

    Weight decay is for matrices: biases, norms and other vectors are left out of it. A layer n below the top has
    `layer_decay ** n` of the rate, and begins after n * `unfreeze` updates (Howard & Ruder 2018).
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = list(named.values())
    below = depths(model) if layer_decay != 1 or unfreeze is not None else dict.fromkeys(named, 0)
    groups = []
    for depth in sorted(set(below.values())):
        layer = [parameter for name, parameter in named.items() if below[name] == depth]
        part = {"scale": layer_decay**depth, "after": depth * (unfreeze or 0)}
        matrices, vectors = [p for p in layer if p.ndim >= 2], [p for p in layer if p.ndim < 2]
        groups += [{"params": matrices, "weight_decay": settings.weight_decay, **part}] if matrices else []
        groups += [{"params": vectors, "weight_decay": 0.0, **part}] if vectors else []
    fused = all(p.device.type in FUSED and p.is_floating_point() for p in parameters)
    rate = settings.learning_rate
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum, fused=fused)
    kind = torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam
    return kind(groups, lr=rate, betas=settings.betas, eps=settings.eps, fused=fused)


def flatten(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's memory as named tensors: `encoder.weight.exp_avg`, `encoder.weight.step` ..."""
    result = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                result[f"{name}.{key}"] = value
    return result


def restore(optimiser: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of `flatten`, bit for bit."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if name not in numbers:
            raise InputError(f"the checkpoint's optimiser knows a parameter {name!r} that the model has not")
        state.setdefault(numbers[name], {})[kind] = tensor
    # torch's own loading puts the step counts where the kernel wants them (fused: on the device).
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate * group["scale"]


def hold_still(optimiser: torch.optim.Optimizer, step: int) -> None:
    """Takes the gradient of layers that wait for their turn: without one, no optimiser moves, decays or remembers."""
    for group in optimiser.param_groups:
        if step <= group["after"]:
            for parameter in group["params"]:
                parameter.grad = None


@dataclass(frozen=True)
class Plateau:
    """What the plateau schedule remembers between validations: a value, so a checkpoint holds it as JSON."""

    factor: float = 1.0
    best: float | None = None
    stale: int = 0

    def after(self, value: float, settings: ScheduleRecipe, lower: bool = True) -> Self:
        """The state after one more validation; more than `patience` of them without progress lower the factor."""
        if math.isfinite(value) and (self.best is None or (value < self.best if lower else value > self.best)):
            return replace(self, best=value, stale=0)
        if self.stale < settings.patience:
            return replace(self, stale=self.stale + 1)
        return replace(self, factor=max(self.factor * settings.factor, settings.floor), stale=0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(**content)


# A schedule maps (update from 1, updates in all) to a share of the learning rate: a pure function, so a resumed
# run needs nothing but its step. All of them grow linearly for `warmup` updates first.
Schedule = Callable[[int, int, ScheduleRecipe], float]


def _warmup(step: int, settings: ScheduleRecipe) -> float:
    return min(1.0, step / max(settings.warmup, 1))


def _progress(step: int, steps: int, settings: ScheduleRecipe) -> float:
    """0 at the end of the warm-up, 1 at the last update."""
    return min(1.0, max(0, step - settings.warmup) / max(1, steps - settings.warmup))


def constant(step: int, steps: int, settings: ScheduleRecipe) -> float:
    return _warmup(step, settings)


def inverse_sqrt(step: int, steps: int, settings: ScheduleRecipe) -> float:
    """Vaswani et al. 2017, equation 3, scaled so that the peak is the learning rate itself."""
    warmup = max(settings.warmup, 1)
    return min(step / warmup, math.sqrt(warmup / max(step, 1)))


def cosine(step: int, steps: int, settings: ScheduleRecipe) -> float:
    share = (1 + math.cos(math.pi * _progress(step, steps, settings))) / 2
    return _warmup(step, settings) * (settings.floor + (1 - settings.floor) * share)


def linear(step: int, steps: int, settings: ScheduleRecipe) -> float:
    share = 1 - _progress(step, steps, settings)
    return _warmup(step, settings) * (settings.floor + (1 - settings.floor) * share)


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "linear": linear,
    "plateau": constant,  # times Plateau.factor, which validation results drive
}


def rate_at(step: int, steps: int, settings: ScheduleRecipe, plateau: Plateau) -> float:
    """The share of the learning rate that update `step` of `steps` is made with."""
    share = SCHEDULES[settings.kind](step, steps, settings)
    return share * plateau.factor if settings.kind == "plateau" else share


class MovingAverage:
    """average = decay * average + (1 - decay) * weights, kept in single precision whatever the weights are in."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        # What is not trained is its own average.
        self.values = {name: p.detach().float().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        # While few updates have been made the average would still be mostly the random beginning.
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [p.detach().float() for name, p in model.named_parameters() if name in self.values]
        torch._foreach_lerp_(list(self.values.values()), weights, 1 - decay)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(tensors[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights; after it, its own again, bit for bit."""
        own = {name: p.detach().clone() for name, p in model.named_parameters() if name in self.values}
        fill(model, self.values)
        try:
            yield
        finally:
            fill(model, own)


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Parameters by name; tied ones have one name, and what has no value stays as it is."""
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.copy_(values[name])
