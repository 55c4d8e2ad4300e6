"""Recurrent layers: over padded sequences, and matrices that are applied once per step.

`StepLinear` is not in the table of operations: its gradient is that of all steps of a pass at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, compiling, has_hooks

FUNCTIONS: dict[type, Callable[..., Any]] = {nn.RNN: torch.rnn_tanh, nn.GRU: torch.gru, nn.LSTM: torch.lstm}
WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
SATURATION = 1e4  # added to a gate, its sigmoid is exactly 1; subtracted, 0
PADDING_COLUMNS = 8  # of which the first marks padding: kernels need a multiple of 8

HiddenState = tuple[Tensor, ...]  # (hidden,) or (hidden, cell): each (directions R W), as torch stores it


def packed_recurrence(
    layer: nn.Module, inputs: Tensor, hidden: HiddenState, mask: Tensor | None, with_cells: bool
) -> tuple[Tensor, HiddenState]:
    """A layer over inputs (R T D) with a right-padding mask (R T) -> outputs (R T W), the state after the last real
    step. The steps of padding are left out, so the host must know the lengths."""
    if mask is None:
        return _call(layer, inputs, hidden)
    rows = pack_padded_sequence(inputs, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
    outputs, last = _call(layer, rows, hidden)
    return pad_packed_sequence(outputs, batch_first=True, total_length=inputs.size(1))[0], last


def _call(layer: nn.Module, inputs: Any, hidden: HiddenState) -> tuple[Any, HiddenState]:
    outputs, last = layer(inputs, hidden if len(hidden) == 2 else hidden[0])
    return outputs, last if len(hidden) == 2 else (last,)


def accepts_padding(
    layer: nn.Module, inputs: Tensor, hidden: HiddenState, mask: Tensor | None, with_cells: bool
) -> bool:
    """Packing takes fewer steps, but makes the host wait for a GPU, and an exported graph cannot depend on lengths."""
    if mask is None or type(layer) not in FUNCTIONS:
        return False
    if torch.compiler.is_exporting():
        return True
    return dispatch.runs_asynchronously(inputs) and not has_hooks(layer) and not compiling()


def padded_recurrence(
    layer: nn.Module, inputs: Tensor, hidden: HiddenState, mask: Tensor, with_cells: bool
) -> tuple[Tensor, HiddenState]:
    """The same over all steps, padding included. Without `with_cells`, the cell state of an LSTM is not that of the
    last real step.

    Padding is on the right, so no real step depends on it: the last hidden vector is the output of the last real step.
    The backward direction reads the real steps in reverse, then the padding.
    """
    last = (mask.sum(1) - 1).clamp(min=0)[:, None, None]  # R 1 1
    outputs, ends = [], []
    for direction, suffix in enumerate(("", "_reverse")[: hidden[0].size(0)]):
        weights = [getattr(layer, name + suffix) for name in WEIGHTS]
        rows = reverse(inputs, mask) if suffix else inputs
        if with_cells and len(hidden) == 2:
            rows, weights[0] = _keep_cell_state(rows, weights[0], mask)
        first = tuple(part[direction : direction + 1] for part in hidden)
        with warnings.catch_warnings():
            # cuDNN warns at each call that it copies weights that are not contiguous, here as under autocast.
            warnings.filterwarnings("ignore", message="RNN module weights")
            output, *state = FUNCTIONS[type(layer)](
                rows, first if len(first) == 2 else first[0], weights, True, 1, 0.0, layer.training, False, True
            )
        ends.append((output.gather(1, last.expand(-1, -1, output.size(2))).transpose(0, 1), *state[1:]))
        output = output.masked_fill(~mask[..., None], 0.0)
        outputs.append(reverse(output, mask) if suffix else output)
    return torch.cat(outputs, -1), tuple(torch.cat(parts) for parts in zip(*ends, strict=True))


def _keep_cell_state(rows: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (R T D) and weights of an LSTM whose cell state does not change at padding.

    torch returns the cell state after the last step alone, padded or not. An additional input that is 1 at padding
    closes the input gate and opens the forget gate: c' = 1 c + 0 g, exactly.
    """
    padding = F.pad((~mask)[..., None].to(rows), (0, PADDING_COLUMNS - 1))  # R T 8
    width = weight.size(0) // 4  # of each gate: input, forget, cell, output
    saturated, others = weight.new_full((width, 1), SATURATION), weight.new_zeros(2 * width, 1)
    columns = F.pad(torch.cat((-saturated, saturated, others)), (0, PADDING_COLUMNS - 1))
    return torch.cat((rows, padding), -1), torch.cat((weight, columns), 1)


def reverse(values: Tensor, mask: Tensor) -> Tensor:
    """Each row with its unpadded steps reversed and its padding in place (Sutskever 2014)."""
    steps = torch.arange(mask.size(1), device=mask.device)
    index = torch.where(mask, mask.sum(1, keepdim=True) - 1 - steps, steps)  # R T
    return values.gather(1, index[..., None].expand_as(values))


RECURRENT_LAYER = Operation(
    "recurrent_layer", packed_recurrence, (Backend("padded", accepts_padding, padded_recurrence),)
)


def recurrent_layer(
    layer: nn.Module, inputs: Tensor, hidden: HiddenState, mask: Tensor | None, with_cells: bool
) -> tuple[Tensor, HiddenState]:
    result: tuple[Tensor, HiddenState] = RECURRENT_LAYER(layer, inputs, hidden, mask, with_cells)
    return result


class StepGradients:
    """Inputs and output gradients of a matrix in the steps of one backward pass."""

    def __init__(self) -> None:
        self.run, self.steps = -1, list[tuple[Tensor, Tensor]]()

    def add(self, values: Tensor, output_grad: Tensor) -> None:
        # A pass that needed no gradient of the matrix leaves its steps behind; they do not belong to the next pass.
        if self.run != (now := torch._C._current_graph_task_id()):
            self.run, self.steps = now, []
        self.steps.append((values, output_grad))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        steps, self.steps = self.steps, []
        return steps


class _Gather(torch.autograd.Function):
    """A matrix and its bias, whose gradients are computed at once from all steps."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, used: StepGradients) -> tuple[Tensor, Tensor | None]:
        ctx.used, ctx.biased = used, bias is not None
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if not (steps := ctx.used.take()):
            return None, None, None
        inputs, output_grads = (torch.cat(parts) for parts in zip(*steps, strict=True))
        return output_grads.t() @ inputs, output_grads.sum(0) if ctx.biased else None, None


class _Apply(torch.autograd.Function):
    """W x + b in one step; the gradient of W and b waits for the other steps, unless b belongs to this step (R G)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, added: Tensor, used: StepGradients) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.used, ctx.rows = used, added.dim() > 1
        return torch.addmm(added, values, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        values, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.used.add(values, grads[0])
        return grads[0] @ weight, None, grads[0] if ctx.rows else None, None


class StepLinear:
    """A matrix that is applied once per step."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.used = StepGradients()
        self.weight, self.bias = _Gather.apply(weight.to(dtype), None if bias is None else bias.to(dtype), self.used)

    def __call__(self, values: Tensor, added: Tensor | None = None) -> Tensor:
        """W x + b, or W x plus a tensor of this step (R G)."""
        added = self.bias if added is None else added
        result: Tensor = _Apply.apply(values.to(self.weight.dtype), self.weight, added, self.used)
        return result
