"""Recurrent stacks: RNN, GRU and LSTM layers, over whole sequences or step by step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from transduce.errors import InputError
from transduce.kernels.dispatch import compiling, has_hooks
from transduce.layers.feed_forward import Dropout

Cell = Literal["rnn", "gru", "lstm"]
CELLS: dict[str, type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]] = {
    "rnn": nn.RNN,
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}

CALLS: dict[type, Callable[..., Any]] = {nn.RNN: torch.rnn_tanh, nn.GRU: torch.gru, nn.LSTM: torch.lstm}
WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
SATURATION = 1e4  # added to a gate, its sigmoid is exactly 1; subtracted, 0
PADDING_COLUMNS = 8  # of which the first marks padding: kernels need a multiple of 8

LayerState = tuple[Tensor, ...]  # (hidden,) or (hidden, cell): each R W, both directions side by side


class RecurrentStack(nn.Module):
    """A stack of layers of one cell kind; a call processes one step or many."""

    def __init__(
        self,
        input_width: int,
        width: int,
        cell: Cell,
        layers: int,
        *,
        bidirectional: bool = False,
        residual: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.residual = width, residual
        self.directions = 2 if bidirectional else 1
        if width % self.directions:
            raise InputError(
                f"two directions cannot share a width of {width}", remedy="an even width, or bidirectional: false"
            )
        self.tensors = 2 if cell == "lstm" else 1  # tensors in the state of a layer
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            CELLS[cell](
                input_width if layer == 0 else width,
                width // self.directions,
                batch_first=True,
                bidirectional=bidirectional,
            )
            for layer in range(layers)
        )

    def zeros(self, rows: int, like: Tensor) -> tuple[LayerState, ...]:
        empty = like.new_zeros(rows, self.width)
        return tuple((empty,) * self.tensors for _ in self.layers)

    def forward(
        self, values: Tensor, state: tuple[LayerState, ...], mask: Tensor | None = None, *, cells: bool = True
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """values (R T D) with a right-padding mask (R T) -> values (R T W), the state after the last real step.

        `cells` False: the state without the cell states of an LSTM, which most encoders do not need.
        """
        ends: list[LayerState] = []
        for number, (layer, begin) in enumerate(zip(self.layers, state, strict=True)):
            inputs = values if number == 0 else self.dropout(values)
            outputs, end = self._layer(layer, inputs, begin, mask, cells)
            values = outputs + inputs if self.residual and outputs.shape == inputs.shape else outputs
            ends.append(end if cells else end[:1])
        return values, tuple(ends)

    def _layer(
        self, layer: nn.Module, inputs: Tensor, begin: LayerState, mask: Tensor | None, cells: bool
    ) -> tuple[Tensor, LayerState]:
        hidden = tuple(part.unflatten(1, (self.directions, -1)).transpose(0, 1).contiguous() for part in begin)
        if mask is None:
            outputs, parts = _run(layer, inputs, hidden)
        elif packs(layer, inputs):
            outputs, parts = _packed(layer, inputs, hidden, mask)
        else:
            outputs, parts = _padded(layer, inputs, hidden, mask, cells)
        return outputs, tuple(part.transpose(0, 1).flatten(1) for part in parts)


def packs(layer: nn.Module, values: Tensor) -> bool:
    """Whether the layer runs on a packed sequence, without padding.

    That takes fewer steps, but the host must know the lengths, which makes it wait for a GPU. Modules other than
    torch's cells, and cells with hooks, are always called on packed sequences.
    """
    if torch.compiler.is_exporting() and type(layer) in CALLS:  # an exported graph cannot depend on the lengths
        return False
    return not values.is_cuda or type(layer) not in CALLS or has_hooks(layer) or compiling()


def _run(layer: nn.Module, inputs: Any, hidden: LayerState) -> tuple[Any, LayerState]:
    outputs, last = layer(inputs, hidden if len(hidden) == 2 else hidden[0])
    return outputs, last if len(hidden) == 2 else (last,)


def _packed(layer: nn.Module, inputs: Tensor, hidden: LayerState, mask: Tensor) -> tuple[Tensor, LayerState]:
    rows = pack_padded_sequence(inputs, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
    outputs, last = _run(layer, rows, hidden)
    return pad_packed_sequence(outputs, batch_first=True, total_length=inputs.size(1))[0], last


def _padded(
    layer: nn.Module, inputs: Tensor, hidden: LayerState, mask: Tensor, cells: bool
) -> tuple[Tensor, LayerState]:
    """The same over all steps, padding included: hidden (directions R W), as torch stores it.

    Padding is on the right, so no real step depends on it: the last hidden vector is the output of the last real step.
    The backward direction reads the real steps in reverse, then the padding.
    """
    last = (mask.sum(1) - 1).clamp(min=0)[:, None, None]  # R 1 1
    outputs, ends = [], []
    for direction, suffix in enumerate(("", "_reverse")[: hidden[0].size(0)]):
        weights = [getattr(layer, name + suffix) for name in WEIGHTS]
        rows = reverse(inputs, mask) if suffix else inputs
        if cells and len(hidden) == 2:
            rows, weights[0] = _keep_cell_state(rows, weights[0], mask)
        first = tuple(part[direction : direction + 1] for part in hidden)
        with warnings.catch_warnings():
            # cuDNN warns at each call that it copies weights that are not contiguous, here as under autocast.
            warnings.filterwarnings("ignore", message="RNN module weights")
            output, *state = CALLS[type(layer)](
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


# One step of a cell, given W x + b and U h + c for all gates (R G) and the state (h,) or (h, c).
def rnn_step(inputs: Tensor, recurrent: Tensor, state: LayerState) -> LayerState:
    """h' = tanh(W x + U h)"""
    return (torch.tanh(inputs + recurrent),)


def gru_step(inputs: Tensor, recurrent: Tensor, state: LayerState) -> LayerState:
    """n = tanh(W x + r * U h), h' = n + z * (h - n) (Cho 2014)"""
    width = state[0].size(-1)
    reset, update = torch.sigmoid(inputs[:, : 2 * width] + recurrent[:, : 2 * width]).chunk(2, -1)
    new = torch.addcmul(inputs[:, 2 * width :], reset, recurrent[:, 2 * width :]).tanh()
    return (torch.lerp(new, state[0].to(new.dtype), update),)


def lstm_step(inputs: Tensor, recurrent: Tensor, state: LayerState) -> LayerState:
    """c' = f * c + i * g, h' = o * tanh(c') (Hochreiter & Schmidhuber 1997)"""
    input_gate, forget_gate, new, output_gate = (inputs + recurrent).chunk(4, -1)
    cell = torch.addcmul(torch.sigmoid(forget_gate) * state[1], torch.sigmoid(input_gate), torch.tanh(new))
    return torch.sigmoid(output_gate) * torch.tanh(cell), cell


STEPS: dict[type, Callable[[Tensor, Tensor, LayerState], LayerState]] = {
    nn.RNN: rnn_step,
    nn.GRU: gru_step,
    nn.LSTM: lstm_step,
}


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

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> None:
        self.used = StepGradients()
        self.weight, self.bias = _Gather.apply(weight.to(kind), None if bias is None else bias.to(kind), self.used)

    def __call__(self, values: Tensor, added: Tensor | None = None) -> Tensor:
        """W x + b, or W x plus a tensor of this step (R G)."""
        added = self.bias if added is None else added
        result: Tensor = _Apply.apply(values.to(self.weight.dtype), self.weight, added, self.used)
        return result


class StepwiseRecurrence:
    """Stepwise run of a stack over `values` (R T D), with a further input at each step, such as a context vector.

    The products of `values` with the input weights are computed for all steps at once.
    """

    def __init__(self, stack: RecurrentStack, values: Tensor) -> None:
        self.stack, device = stack, values.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype
        layers: list[Any] = list(stack.layers)
        weight, bias, width = layers[0].weight_ih_l0, layers[0].bias_ih_l0, values.size(-1)
        self.projected = F.linear(values, weight[:, :width], bias).unbind(1)  # T times R G
        self.input_proj = [StepLinear(weight[:, width:], None, kind)]
        self.input_proj += [StepLinear(layer.weight_ih_l0, layer.bias_ih_l0, kind) for layer in layers[1:]]
        self.hidden_proj = [StepLinear(layer.weight_hh_l0, layer.bias_hh_l0, kind) for layer in layers]

    @staticmethod
    def applies(stack: RecurrentStack, values: Tensor) -> bool:
        """Whether it can be used and is faster: in training, over several steps, with torch's cells without hooks."""
        if not all(type(layer) in STEPS and not has_hooks(layer) for layer in stack.layers):
            return False
        # A residual connection around the first layer needs its whole input.
        residual = stack.residual and stack.layers[0].input_size == stack.width
        return torch.is_grad_enabled() and values.size(1) > 1 and not residual and not compiling()

    def __call__(
        self, step: int, fed: Tensor | None, state: tuple[LayerState, ...]
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """fed (R 1 F), the state -> hidden (R 1 W), the next state."""
        stack, ends, values = self.stack, list[LayerState](), self.projected[step]
        for number, (layer, begin) in enumerate(zip(stack.layers, state, strict=True)):
            inputs = values if number == 0 else stack.dropout(values)
            if number > 0:
                gates = self.input_proj[number](inputs)
            else:
                gates = inputs if fed is None else self.input_proj[0](fed[:, 0], inputs)
            end = STEPS[type(layer)](gates, self.hidden_proj[number](begin[0]), begin)
            values = end[0] + inputs if stack.residual and number > 0 else end[0]
            ends.append(end)
        return values[:, None], tuple(ends)
