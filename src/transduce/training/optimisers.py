"""Optimisers, learning-rate schedules, layer-wise decay, gradual unfreezing, exponential moving average."""

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
from transduce.training.distributed import local_part, sharded_like

OUTPUT, DECODER, ENCODER, INPUT = range(4)
Depth = tuple[int, int]  # one of these groups, and the number of layers above within the group


def layer_depths(model: nn.Module) -> dict[str, int]:
    """The depth of each trainable parameter, counted from the output over the layers that have trainable parameters.

    Depth 0 is everything outside the layer stacks of the encoder and the decoder: the head; the output layer, context
    mechanism and final norm of a decoder. Then follow the decoder layers from last to first, the encoder layers (with
    other parts of the encoder at the depth of its last layer), and finally embeddings and position encodings. A tied
    weight has the larger depth of its two places.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    depths: dict[str, Depth] = {}
    first_names: dict[int, str] = {}  # a tied parameter goes by its first name, as in named_parameters
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            first = first_names.setdefault(id(parameter), name)
            depths[first] = max(depths.get(first, (OUTPUT, 0)), _depth(name, modules))
    order = {depth: number for number, depth in enumerate(sorted(set(depths.values())))}
    return {name: order[depth] for name, depth in depths.items()}


def _depth(name: str, modules: dict[str, nn.Module]) -> Depth:
    words = name.split(".")
    parents = [".".join(words[:count]) for count in range(1, len(words))]
    if any(isinstance(modules[path], (Embedding, nn.Embedding, PositionEncoding)) for path in parents):
        return (INPUT, 0)
    if words[0] not in ("encoder", "decoder"):
        return (OUTPUT, 0)
    for path, number in zip(parents, words[1:], strict=False):
        stack = modules[path]
        if isinstance(stack, nn.ModuleList):
            return (DECODER if words[0] == "decoder" else ENCODER, len(stack) - 1 - int(number))
    return (OUTPUT, 0) if words[0] == "decoder" else (ENCODER, 0)


FUSED = ("cpu", "cuda", "mps")  # devices with a fused optimiser kernel in torch


class FusedAdam(torch.optim.Adam):
    """Adam and AdamW of parameters of one type, by torch's fused kernel.

    The step of torch's class does the same, after sorting all tensors by device and type, and after importing torch's
    compiler, which takes seconds.
    """

    found_inf: Tensor | None = None  # of the device: 1 if the step is to be skipped
    grad_scale: Tensor | None = None  # by which the gradients are divided

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] or self._begin(parameter) for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            (torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_)(
                [local_part(parameter) for parameter in parameters],
                [local_part(parameter.grad) for parameter in parameters],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _without_compiler() -> None:
    """Lets the optimisers of torch work without importing its compiler, which they only ask not to compile them."""
    for method in vars(torch.optim.Optimizer).values():
        original = getattr(method, "__wrapped__", None)
        if original is not None:
            original.__dict__.setdefault("__dynamo_disable", original)


def build_optimiser(
    settings: OptimiserRecipe, model: nn.Module, *, layer_decay: float = 1.0, unfreeze: int | None = None
) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD with one parameter group for each layer depth and weight decay.

    Weight decay applies to matrices only, not to biases, norms and other vectors. A layer at depth n has
    `layer_decay ** n` times the learning rate and is trained after n * `unfreeze` updates (Howard & Ruder 2018).
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = list(named.values())
    layered = layer_decay != 1 or unfreeze is not None
    depths = layer_depths(model) if layered else dict.fromkeys(named, 0)
    groups = []
    for depth in sorted(set(depths.values())):
        layer = [parameter for name, parameter in named.items() if depths[name] == depth]
        options = {"lr_scale": layer_decay**depth, "frozen_until": depth * (unfreeze or 0)}
        matrices, vectors = [p for p in layer if p.ndim >= 2], [p for p in layer if p.ndim < 2]
        groups += [{"params": matrices, "weight_decay": settings.weight_decay, **options}] if matrices else []
        groups += [{"params": vectors, "weight_decay": 0.0, **options}] if vectors else []
    fused = all(p.device.type in FUSED and p.is_floating_point() for p in parameters)
    rate = settings.learning_rate
    _without_compiler()
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum, fused=fused)
    uniform = fused and len({(p.device, p.dtype) for p in parameters}) == 1
    return (FusedAdam if uniform else torch.optim.Adam)(
        groups,
        lr=rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=fused,
        decoupled_weight_decay=settings.kind == "adamw",
    )


def optimiser_state(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state of the optimiser as named tensors: `encoder.weight.exp_avg`, `encoder.weight.step` ..."""
    result = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                result[f"{name}.{key}"] = value
    return result


def load_optimiser_state(optimiser: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimiser_state`, bit for bit."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    indices = {names[parameter]: index for index, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition(".")
        if name not in indices:
            raise InputError(f"the optimiser state of the checkpoint has a parameter {name!r} that the model lacks")
        state.setdefault(indices[name], {})[slot] = sharded_like(tensor, parameters[indices[name]])
    # torch's own loading puts the step counts where the kernel wants them (fused: on the device).
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def set_learning_rate(optimiser: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def clear_frozen_gradients(optimiser: torch.optim.Optimizer, step: int) -> None:
    """Gradual unfreezing: without a gradient, no optimiser updates or decays a parameter or its moments."""
    for group in optimiser.param_groups:
        if step <= group["frozen_until"]:
            for parameter in group["params"]:
                parameter.grad = None


@dataclass(frozen=True)
class Plateau:
    """State of the plateau schedule between validations, stored in checkpoints as JSON."""

    factor: float = 1.0
    best: float | None = None
    stale: int = 0  # validations since the last improvement or reduction

    def after(self, value: float, settings: ScheduleRecipe, lower_is_better: bool = True) -> Self:
        """The state after one more validation; more than `patience` without improvement reduce the factor."""
        improved = self.best is None or (value < self.best if lower_is_better else value > self.best)
        if math.isfinite(value) and improved:
            return replace(self, best=value, stale=0)
        if self.stale < settings.patience:
            return replace(self, stale=self.stale + 1)
        return replace(self, factor=max(self.factor * settings.factor, settings.floor), stale=0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(**content)


# A schedule maps (update, counted from 1; total number of updates) to a factor of the learning rate. It is a pure
# function, so a resumed run needs only its step. Every schedule begins with `warmup` updates of linear growth.
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
    decay = (1 + math.cos(math.pi * _progress(step, steps, settings))) / 2
    return _warmup(step, settings) * (settings.floor + (1 - settings.floor) * decay)


def linear(step: int, steps: int, settings: ScheduleRecipe) -> float:
    decay = 1 - _progress(step, steps, settings)
    return _warmup(step, settings) * (settings.floor + (1 - settings.floor) * decay)


def warmup_stable_decay(step: int, steps: int, settings: ScheduleRecipe) -> float:
    """Constant, then the decay 1 - sqrt(progress), the best of those that Hägele et al. 2024 compare."""
    start = max(settings.warmup, steps - max(1, round(settings.decay * steps)))
    decay = 1 - math.sqrt(min(1.0, max(0, step - start) / max(1, steps - start)))
    return _warmup(step, settings) * (settings.floor + (1 - settings.floor) * decay)


def decay_end(plateau_step: int, settings: ScheduleRecipe) -> int:
    """The last update of `warmup_stable_decay` whose decay begins after this update."""
    return plateau_step + max(1, round(plateau_step * settings.decay / (1 - settings.decay)))


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "linear": linear,
    "plateau": constant,  # times Plateau.factor
    "warmup_stable_decay": warmup_stable_decay,
}


def schedule_factor(step: int, steps: int, settings: ScheduleRecipe, plateau: Plateau) -> float:
    """The factor of the learning rate at update `step` of `steps`."""
    factor = SCHEDULES[settings.kind](step, steps, settings)
    return factor * plateau.factor if settings.kind == "plateau" else factor


class ExponentialMovingAverage:
    """average = decay * average + (1 - decay) * weights, in single precision for any dtype of the weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        # A frozen parameter equals its average.
        self.values = {name: p.detach().float().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        # Warm-up of the decay: otherwise the first averages are mostly the random initial weights.
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [p.detach().float() for name, p in model.named_parameters() if name in self.values]
        torch._foreach_lerp_(list(self.values.values()), weights, 1 - decay)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(tensors[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own, bit for bit."""
        weights = {name: p.detach().clone() for name, p in model.named_parameters() if name in self.values}
        copy_parameters(model, self.values)
        try:
            yield
        finally:
            copy_parameters(model, weights)


@torch.no_grad()
def copy_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies the values into the parameters of the same name; other parameters do not change."""
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.copy_(values[name])
