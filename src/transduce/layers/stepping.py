"""A recurrent stack and values known beforehand in, its steps out, with all that no step waits for done at once.

Where something of the step before is fed in beside the token, a stack must go step by step. But the first layer's gates
are W [x_t; c_t] = W_x x_t + W_c c_t, and W_x x_t is known for all t. And in the backward pass no step waits for the
gradient of a matrix: it is the sum over steps of g_t x_t', one product of everything at the end. So neither is in the
loop; the maths stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.layers.recurrent import LayerState, RecurrentStack
from transduce.layers.traits import attached


def plain(ahead: Tensor, back: Tensor, state: LayerState) -> LayerState:
    """h' = tanh(W x + U h)"""
    return (torch.tanh(ahead + back),)


def gru(ahead: Tensor, back: Tensor, state: LayerState) -> LayerState:
    """n = tanh(W x + r * U h), h' = n + z * (h - n) (Cho 2014)"""
    width = state[0].size(-1)
    reset, update = torch.sigmoid(ahead[:, : 2 * width] + back[:, : 2 * width]).chunk(2, -1)
    new = torch.addcmul(ahead[:, 2 * width :], reset, back[:, 2 * width :]).tanh()
    return (torch.lerp(new, state[0].to(new.dtype), update),)


def lstm(ahead: Tensor, back: Tensor, state: LayerState) -> LayerState:
    """c' = f * c + i * g, h' = o * tanh(c') (Hochreiter & Schmidhuber 1997)"""
    enter, forget, new, leave = (ahead + back).chunk(4, -1)
    cell = torch.addcmul(torch.sigmoid(forget) * state[1], torch.sigmoid(enter), torch.tanh(new))
    return torch.sigmoid(leave) * torch.tanh(cell), cell


STEPS: dict[type, Callable[[Tensor, Tensor, LayerState], LayerState]] = {nn.RNN: plain, nn.GRU: gru, nn.LSTM: lstm}


class Used:
    """What a matrix was applied to in each step of one backward pass, and the gradient of what it gave."""

    def __init__(self) -> None:
        self.run, self.steps = -1, list[tuple[Tensor, Tensor]]()

    def add(self, values: Tensor, slope: Tensor) -> None:
        # A pass that did not ask for the matrix leaves its steps behind: they are no part of the next one.
        if self.run != (now := torch._C._current_graph_task_id()):
            self.run, self.steps = now, []
        self.steps.append((values, slope))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        steps, self.steps = self.steps, []
        return steps


class _Gather(torch.autograd.Function):
    """A matrix and its bias, whose gradients are made here from what the steps left behind."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, used: Used) -> tuple[Tensor, Tensor | None]:
        ctx.used, ctx.biased = used, bias is not None
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if not (steps := ctx.used.take()):
            return None, None, None
        inputs, slopes = (torch.cat(parts) for parts in zip(*steps, strict=True))
        return slopes.t() @ inputs, slopes.sum(0) if ctx.biased else None, None


class _Apply(torch.autograd.Function):
    """W x + b in one step; the gradient of W and b waits for the other steps, unless b belongs to this step (R G)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, added: Tensor, used: Used) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.used, ctx.rows = used, added.dim() > 1
        return torch.addmm(added, values, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        values, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.used.add(values, grads[0])
        return grads[0] @ weight, None, grads[0] if ctx.rows else None, None


class Repeated:
    """A matrix that is applied once a step."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> None:
        self.used = Used()
        self.weight, self.bias = _Gather.apply(weight.to(kind), None if bias is None else bias.to(kind), self.used)

    def __call__(self, values: Tensor, added: Tensor | None = None) -> Tensor:
        """W x + b, or W x and what else is to be added (R G)."""
        added = self.bias if added is None else added
        made: Tensor = _Apply.apply(values.to(self.weight.dtype), self.weight, added, self.used)
        return made


class Stepper:
    """The steps of a stack over `values` (R T D), beside which something is fed in at each."""

    def __init__(self, stack: RecurrentStack, values: Tensor) -> None:
        self.stack, device = stack, values.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype
        layers: list[Any] = list(stack.layers)
        weight, bias, width = layers[0].weight_ih_l0, layers[0].bias_ih_l0, values.size(-1)
        self.known = F.linear(values, weight[:, :width], bias).unbind(1)  # T times R G
        self.ahead = [Repeated(weight[:, width:], None, kind)]
        self.ahead += [Repeated(layer.weight_ih_l0, layer.bias_ih_l0, kind) for layer in layers[1:]]
        self.back = [Repeated(layer.weight_hh_l0, layer.bias_hh_l0, kind) for layer in layers]

    @staticmethod
    def suits(stack: RecurrentStack, values: Tensor) -> bool:
        """Whether it pays: in training, over several steps. Cells must be torch's own, with nothing attached."""
        if not all(type(layer) in STEPS and not attached(layer) for layer in stack.layers):
            return False
        around = stack.residual and stack.layers[0].input_size == stack.width  # whole inputs are added to the output
        return torch.is_grad_enabled() and values.size(1) > 1 and not around and not torch.compiler.is_compiling()

    def __call__(
        self, step: int, fed: Tensor | None, state: tuple[LayerState, ...]
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """fed (R 1 F), the state before -> hidden (R 1 W), the state after."""
        stack, ends, values = self.stack, list[LayerState](), self.known[step]
        for number, (layer, begin) in enumerate(zip(stack.layers, state, strict=True)):
            inputs = values if number == 0 else stack.dropout(values)
            if number > 0:
                ahead = self.ahead[number](inputs)
            else:
                ahead = inputs if fed is None else self.ahead[0](fed[:, 0], inputs)
            end = STEPS[type(layer)](ahead, self.back[number](begin[0]), begin)
            values = end[0] + inputs if stack.residual and number > 0 else end[0]
            ends.append(end)
        return values[:, None], tuple(ends)
