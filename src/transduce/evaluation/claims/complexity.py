"""Claim about complexity: parameters, operations, sequential steps, path length, time and memory of layers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from transduce.attention.positions import NoPosition
from transduce.attention.self_attention import SelfAttention
from transduce.contracts import SequenceContext
from transduce.evaluation.claims.claim import (
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    fitted_exponent,
)
from transduce.layers.feed_forward import GatedConvolution
from transduce.layers.option_groups import AttentionOptions, SublayerOptions
from transduce.layers.recurrent import RecurrentStack

KERNEL = 3
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn", "linear", "matmul")
TOLERANCE = 0.2  # of an exponent


class RecurrentLayer(nn.Module):
    """One layer of plain recurrent cells; `cut`: the state is detached after this many steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stack = RecurrentStack(width, width, "rnn", 1)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.stack(values, self.stack.zeros(len(values), values))[0]
        return outputs

    def reach(self, values: Tensor, steps: int) -> Tensor:
        """The last output, when the gradient passes through this many steps."""
        begin = values.size(1) - steps
        state = self.stack.zeros(len(values), values)
        if begin > 0:
            state = self.stack(values[:, :begin], state)[1]
            state = tuple(tuple(part.detach() for part in layer) for layer in state)
        outputs: Tensor = self.stack(values[:, begin:], state)[0]
        return outputs[:, -1]


class ConvolutionLayers(nn.Module):
    """A stack of gated convolutions over the present and earlier rows; `growth`: of the dilation in each layer."""

    def __init__(self, width: int, layers: int = 1, growth: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedConvolution(width, KERNEL, 0.0) for _ in range(layers))
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, GatedConvolution)
            layer.conv.dilation = (growth**number,)

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, GatedConvolution)
            values = layer(F.pad(values, (0, 0, (KERNEL - 1) * layer.conv.dilation[0], 0)))
        return values


class AttentionLayer(nn.Module):
    """One layer of self-attention with a single head; `stored`: the T x T weights are stored, not fused."""

    def __init__(self, width: int, projections: str = "none", *, stored: bool = True) -> None:
        super().__init__()
        options = AttentionOptions(heads=1, projections=projections)  # type: ignore[arg-type]
        self.layer, self.position = SelfAttention(width, SublayerOptions(options)), NoPosition(width, 1, False)
        self.layer.attend.fused = self.layer.attend.fused and not stored

    def forward(self, values: Tensor) -> Tensor:
        positions = torch.arange(values.size(1), device=values.device)[None]
        past = self.layer.start(len(values), values)
        context: Tensor = self.layer(values, past, SequenceContext(self.position, positions, positions))[0]
        return context


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer, with what the literature states about it for T rows of width d."""

    make: Callable[[int], nn.Module]
    parameters: Callable[[int], int]
    operations: Callable[[int, int], int]  # multiplications and additions
    exponents: tuple[float | None, float | None]  # of the operations in T and d; None: a sum of two powers
    memory: float  # exponent in T of what the backward pass needs
    path: Callable[[int], float]  # between the first and the last row
    steps: Callable[[int], float]  # matrix products that must run one after another


KINDS = {
    "recurrent": LayerKind(
        RecurrentLayer,
        lambda d: 2 * d * d + 2 * d,
        lambda t, d: 4 * t * d * d,
        (1, 2),
        1,
        lambda t: t,
        lambda t: t,
    ),
    "convolutional, k = 3": LayerKind(
        ConvolutionLayers,
        lambda d: 2 * KERNEL * d * d + 2 * d,
        lambda t, d: 4 * KERNEL * t * d * d,
        (1, 2),
        1,
        lambda t: math.ceil((t - 1) / (KERNEL - 1)),
        lambda t: 1,
    ),
    "self-attention, no projections": LayerKind(
        AttentionLayer, lambda d: 0, lambda t, d: 4 * t * t * d, (2, 1), 2, lambda t: 1, lambda t: 2
    ),
    "self-attention": LayerKind(
        lambda d: AttentionLayer(d, "all"),
        lambda d: 4 * d * d + 4 * d,
        lambda t, d: 8 * t * d * d + 4 * t * t * d,
        (None, None),
        2,
        lambda t: 1,
        lambda t: 4,
    ),
}
DILATED = "dilated convolutions, k = 3"


class DependencyTrace(TorchDispatchMode):
    """The longest chain of matrix products in which each needs the result of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.depths, self.longest = WeakTensorKeyDictionary(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        depth = max((self.depths.get(leaf, 0) for leaf in inputs), default=0)
        depth += any(name in func.overloadpacket.__name__ for name in MATRIX_PRODUCTS)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.depths[leaf] = depth
        self.longest = max(self.longest, depth)
        return result


def sequential_steps(layer: nn.Module, length: int, width: int) -> int:
    """Counted while the layer runs."""
    with torch.no_grad(), DependencyTrace() as trace:
        layer(torch.randn(1, length, width))
    return trace.longest


def operations(layer: nn.Module, length: int, width: int) -> int:
    """Counted by torch while the layer runs: a multiplication and an addition count as two."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, length, width))
    return counter.get_total_flops()


def reaches(last: Tensor, values: Tensor) -> bool:
    """Whether a gradient of the last row reaches the first."""
    (gradient,) = torch.autograd.grad(last.sum(), values)
    return bool(gradient[:, 0].abs().max() > 0)


def path_length(kind: str, length: int, width: int = 8) -> int:
    """The smallest number of steps or layers through which the gradient of the last row reaches the first."""
    torch.manual_seed(0)
    values = torch.randn(1, length, width, dtype=torch.float64, requires_grad=True)
    recurrent = RecurrentLayer(width).double()
    for steps in range(1, length + 1):
        if kind == "recurrent":
            last = recurrent.reach(values, steps)
        else:
            growth = KERNEL if kind == DILATED else 1
            layers = ConvolutionLayers(width, steps, growth) if "convolution" in kind else AttentionLayer(width)
            last = layers.double()(values)[:, -1]
        if reaches(last, values):
            return steps
    raise AssertionError(f"{kind} does not connect {length} rows")


def saved_bytes(layer: nn.Module, length: int, width: int) -> int:
    """Bytes of the activations that autograd stores for the backward pass."""
    parameters = {parameter.data_ptr() for parameter in layer.parameters()}
    stored: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    values = torch.randn(1, length, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(values)
    assert output.requires_grad
    return sum(stored.values())


def seconds(layer: nn.Module, length: int, width: int, device: str, repeats: int) -> float:
    """The shortest of several forward passes."""
    layer, values, best = layer.to(device), torch.randn(1, length, width, device=device), math.inf
    with torch.inference_mode():
        for _ in range(repeats):
            synchronise(device)
            began = time.perf_counter()
            layer(values)
            synchronise(device)
            best = min(best, time.perf_counter() - began)
    return best


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure_complexity(budget: Budget) -> Measurement:
    device = "cuda" if budget.device == "auto" and torch.cuda.is_available() else budget.device.replace("auto", "cpu")
    lengths, widths = budget.pick([256, 512, 1024], [256, 512, 1024, 2048]), [32, 64, 128]
    counts, memory, times = _by_length(lengths, 64, device, budget.pick(10, 30))
    wide: Curves = {name: [operations(kind.make(d), 64, d) for d in widths] for name, kind in KINDS.items()}
    paths: Curves = {name: [path_length(name, t) for t in (8, 16, 32)] for name in [*KINDS, DILATED]}
    steps: Curves = {name: [sequential_steps(kind.make(8), t, 8) for t in (8, 16, 32)] for name, kind in KINDS.items()}
    tables = [
        _formula_table(lengths[-1], 64),
        _exponent_table(lengths, widths, counts, wide, memory, times),
        _dependency_table(steps, paths),
    ]
    checks = [*_count_checks(lengths, widths, counts, wide, memory), *_dependency_checks(steps, paths)]
    checks.append(_crossover(lengths, 64, counts))
    return Measurement(tables, _panels(lengths, counts, memory, times, paths), checks)


Curves = dict[str, list[float]]


def _by_length(lengths: Sequence[int], width: int, device: str, repeats: int) -> tuple[Curves, Curves, Curves]:
    """Operations, stored bytes and seconds of every kind."""
    counts: Curves = {}
    memory: Curves = {}
    times: Curves = {}
    for name, kind in KINDS.items():
        layer = kind.make(width)
        counts[name] = [operations(layer, t, width) for t in lengths]
        memory[name] = [saved_bytes(layer, t, width) for t in lengths]
        times[name] = [seconds(layer, t, width, device, repeats) for t in lengths]
    fused = AttentionLayer(width, "all", stored=False)
    times["self-attention, fused"] = [seconds(fused, t, width, device, repeats) for t in lengths]
    memory["self-attention, fused"] = [saved_bytes(fused.cpu(), t, width) for t in lengths]
    return counts, memory, times


def _formula_table(length: int, width: int) -> ClaimTable:
    rows = []
    for name, kind in KINDS.items():
        layer = kind.make(width)
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        rows.append(
            (
                name,
                kind.parameters(width),
                parameters,
                kind.operations(length, width),
                operations(layer, length, width),
            )
        )
    columns = ["layer", "parameters, formula", "parameters, counted", "operations, formula", "operations, counted"]
    return ClaimTable(f"One layer, T = {length}, d = {width}", columns, rows)


def _exponent_table(
    lengths: Sequence[int], widths: Sequence[int], counts: Curves, wide: Curves, memory: Curves, times: Curves
) -> ClaimTable:
    rows = []
    for name, kind in KINDS.items():
        rows.append(
            (
                name,
                kind.exponents[0],
                fitted_exponent(lengths, counts[name]),
                kind.exponents[1],
                fitted_exponent(widths, wide[name]),
                fitted_exponent(lengths, memory[name]),
                fitted_exponent(lengths, times[name]),
            )
        )
    columns = ["layer", "T, formula", "T, counted", "d, formula", "d, counted", "T, memory", "T, time"]
    return ClaimTable("Exponents: operations grow as T^a d^b, memory and time as T^a", columns, rows)


def _dependency_table(steps: Curves, paths: Curves) -> ClaimTable:
    rows = [(name, *steps.get(name, ["", "", ""]), *paths[name]) for name in paths]
    columns = ["layer", *(f"steps, T = {t}" for t in (8, 16, 32)), *(f"path, T = {t}" for t in (8, 16, 32))]
    return ClaimTable("Sequential steps and path length, traced", columns, rows)


def _count_checks(
    lengths: Sequence[int], widths: Sequence[int], counts: Curves, wide: Curves, memory: Curves
) -> list[Check]:
    equal = {name: counts[name][-1] / kind.operations(lengths[-1], 64) for name, kind in KINDS.items()}
    pairs = {
        f"{name}, {symbol}": (formula, fitted_exponent(sizes, curves[name]))
        for name, kind in KINDS.items()
        for symbol, formula, sizes, curves in (
            ("T", kind.exponents[0], lengths, counts),
            ("d", kind.exponents[1], widths, wide),
            ("memory", kind.memory if kind.exponents[0] is not None else None, lengths, memory),
        )
        if formula is not None
    }
    worst = max(abs(formula - fitted) for formula, fitted in pairs.values())
    return [
        Check(
            "the operations that torch counts are those of the formula",
            all(abs(ratio - 1) < 0.01 for ratio in equal.values()),
            {f"counted / formula, {name}": ratio for name, ratio in equal.items()},
        ),
        Check(
            "the fitted exponents of operations and memory are those of the formula",
            worst <= TOLERANCE,
            {"largest difference": worst, "limit": TOLERANCE, **{name: fitted for name, (_, fitted) in pairs.items()}},
        ),
    ]


def _dependency_checks(steps: Curves, paths: Curves) -> list[Check]:
    lengths = (8, 16, 32)
    formulas = {name: [kind.path(t) for t in lengths] for name, kind in KINDS.items()}
    formulas[DILATED] = [math.ceil(math.log(t, KERNEL) - 1e-9) for t in lengths]
    return [
        Check(
            "a recurrent layer needs a step for each row, the others a constant number",
            all(steps[name] == [kind.steps(t) for t in lengths] for name, kind in KINDS.items()),
            {name: values[-1] for name, values in steps.items()},
        ),
        Check(
            "the path between the first and the last row has the length of the formula",
            paths == formulas,
            {name: values[-1] for name, values in paths.items()},
        ),
    ]


def _crossover(lengths: Sequence[int], width: int, counts: Curves) -> Check:
    """Where self-attention without projections needs as many operations as a recurrent layer: on the fitted lines."""
    one, other = counts["self-attention, no projections"], counts["recurrent"]
    slopes = [fitted_exponent(lengths, curve) for curve in (one, other)]
    gap = math.log(other[0] / one[0]) / (slopes[0] - slopes[1])
    length = lengths[0] * math.exp(gap)
    numbers = {"crossover T": length, "d": float(width)}
    return Check("self-attention is cheaper than recurrence while T < d", abs(length / width - 1) < 0.1, numbers)


def _panels(lengths: Sequence[int], counts: Curves, memory: Curves, times: Curves, paths: Curves) -> list[Panel]:
    def panel(title: str, unit: str, curves: Curves, x: Sequence[int] = lengths) -> Panel:
        series = [Series(name, list(x), values) for name, values in curves.items()]
        return Panel(title, "T", unit, series, log_x=True, log_y=True)

    return [
        panel("Operations, d = 64", "operations", counts),
        panel("Memory for the backward pass", "bytes", memory),
        panel("Time of a forward pass", "seconds", times),
        panel("Path from the first to the last row", "steps or layers", paths, (8, 16, 32)),
    ]


COMPLEXITY = Claim(
    "complexity",
    "A recurrent layer costs T d^2 operations in T sequential steps, a convolution k T d^2 in one, self-attention "
    "T^2 d in one, with a path of length 1 between any two rows.",
    "Vaswani et al. 2017, Attention Is All You Need, table 1",
    "Layers of this package run on random rows. torch counts their operations; a dependency trace finds the longest "
    "chain of matrix products in which each needs the result of the one before; the path length is the smallest number "
    "of steps or layers through which the gradient of the last row reaches the first; memory is what autograd stores "
    "for the backward pass. Exponents are fitted by least squares of the logarithms. Times are the shortest of several "
    "passes; they depend on the machine and are shown, not checked. Fused attention does not store its T x T weights.",
    measure_complexity,
)
