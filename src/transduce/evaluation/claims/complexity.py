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
    power_law,
)
from transduce.layers.convolution import GatedConvolution
from transduce.layers.option_groups import AttentionOptions, SublayerOptions
from transduce.layers.recurrent import RecurrentStack

KERNEL = 3
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn", "linear", "matmul")
TOLERANCE = 0.2  # of an exponent
WIDTH, WIDTHS, LONG = 64, (32, 64, 128), 1024  # d for several T, and several d for one T
FUSED = "self-attention, fused"


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
    memory: tuple[float, float]  # exponents in T and d of what the backward pass needs, for T > d
    path: Callable[[int], float]  # between the first and the last row
    steps: Callable[[int], float]  # matrix products that must run one after another


KINDS = {
    "recurrent": LayerKind(
        RecurrentLayer,
        lambda d: 2 * d * d + 2 * d,
        lambda t, d: 4 * t * d * d,
        (1, 2),
        (1, 1),
        lambda t: t,
        lambda t: t,
    ),
    "convolutional, k = 3": LayerKind(
        ConvolutionLayers,
        lambda d: 2 * KERNEL * d * d + 2 * d,
        lambda t, d: 4 * KERNEL * t * d * d,
        (1, 2),
        (1, 1),
        lambda t: math.ceil((t - 1) / (KERNEL - 1)),
        lambda t: 1,
    ),
    "self-attention, no projections": LayerKind(
        AttentionLayer, lambda d: 0, lambda t, d: 4 * t * t * d, (2, 1), (2, 0), lambda t: 1, lambda t: 2
    ),
    "self-attention": LayerKind(
        lambda d: AttentionLayer(d, "all"),
        lambda d: 4 * d * d + 4 * d,
        lambda t, d: 8 * t * d * d + 4 * t * t * d,
        (None, None),
        (2, 0),
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
    """The shortest of several forward passes: processor time, which other programs disturb less, or time on a GPU."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    layer, values, best = layer.to(device), torch.randn(1, length, width, device=device), math.inf
    with torch.inference_mode():
        for _ in range(repeats):
            synchronise(device)
            began = clock()
            layer(values)
            synchronise(device)
            best = min(best, clock() - began)
    return max(best, 1e-9)


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


Curves = dict[str, list[float]]
Sizes = Sequence[tuple[int, int]]  # T and d


@dataclass(frozen=True)
class Costs:
    """Operations, stored bytes and seconds of every kind of layer, at several sizes."""

    operations: Curves
    memory: Curves
    seconds: Curves


def costs(sizes: Sizes, device: str, repeats: int) -> Costs:
    found = Costs({}, {}, {})
    for name, kind in KINDS.items():
        layers = [(kind.make(d), t, d) for t, d in sizes]
        found.operations[name] = [operations(*one) for one in layers]
        found.memory[name] = [saved_bytes(*one) for one in layers]
        found.seconds[name] = [seconds(*one, device, repeats) for one in layers]
    fused = [(AttentionLayer(d, "all", stored=False), t, d) for t, d in sizes]
    found.memory[FUSED] = [saved_bytes(*one) for one in fused]
    found.seconds[FUSED] = [seconds(*one, device, repeats) for one in fused]
    return found


def measure_complexity(budget: Budget) -> Measurement:
    device = "cuda" if budget.device == "auto" and torch.cuda.is_available() else budget.device.replace("auto", "cpu")
    lengths, repeats = budget.pick([256, 512, 1024], [256, 512, 1024, 2048]), budget.pick(10, 30)
    long = costs([(t, WIDTH) for t in lengths], device, repeats)
    wide = costs([(LONG, d) for d in WIDTHS], device, repeats)
    paths: Curves = {name: [path_length(name, t) for t in (8, 16, 32)] for name in [*KINDS, DILATED]}
    steps: Curves = {name: [sequential_steps(kind.make(8), t, 8) for t in (8, 16, 32)] for name, kind in KINDS.items()}
    crossovers = {"operations": crossover(lengths, long.operations), "time": crossover(lengths, long.seconds)}
    rows = list(crossovers.items())
    tables = [
        _formula_table(lengths[-1], WIDTH),
        _exponent_table(lengths, long, wide),
        _dependency_table(steps, paths),
        ClaimTable(f"T at which self-attention costs as much as recurrence, d = {WIDTH}", ["cost", "T"], rows),
    ]
    cheaper = Check(
        "self-attention needs fewer operations than recurrence while T < d",
        abs(crossovers["operations"] / WIDTH - 1) < 0.1,
        {"crossover T": crossovers["operations"], "d": float(WIDTH)},
    )
    checks = [*_count_checks(lengths, long, wide), *_dependency_checks(steps, paths), cheaper]
    return Measurement(tables, _panels(lengths, long, wide, paths), checks)


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


def _exponent_table(lengths: Sequence[int], long: Costs, wide: Costs) -> ClaimTable:
    rows: list[list[str | float | None]] = []
    for name, kind in KINDS.items():
        row: list[str | float | None] = [name]
        for number, (sizes, found) in enumerate(((lengths, long), (WIDTHS, wide))):
            curves = (found.operations, found.memory, found.seconds)
            row += [kind.exponents[number], *(fitted_exponent(sizes, curve[name]) for curve in curves)]
        rows.append(row)
    columns = [f"{symbol}, {what}" for symbol in "Td" for what in ("formula", "operations", "memory", "time")]
    title = f"Exponents a and b: costs grow as T^a at d = {WIDTH}, and as d^b at T = {LONG}"
    return ClaimTable(title, ["layer", *columns], rows)


def _dependency_table(steps: Curves, paths: Curves) -> ClaimTable:
    rows = [(name, *steps.get(name, ["", "", ""]), *paths[name]) for name in paths]
    columns = ["layer", *(f"steps, T = {t}" for t in (8, 16, 32)), *(f"path, T = {t}" for t in (8, 16, 32))]
    return ClaimTable("Sequential steps and path length, traced", columns, rows)


def _count_checks(lengths: Sequence[int], long: Costs, wide: Costs) -> list[Check]:
    counts = long.operations
    equal = {name: counts[name][-1] / kind.operations(lengths[-1], WIDTH) for name, kind in KINDS.items()}
    pairs = {
        f"{name}, {what} in {symbol}": (formula, fitted_exponent(sizes, curves[name]))
        for name, kind in KINDS.items()
        for number, (symbol, sizes, found) in enumerate((("T", lengths, long), ("d", WIDTHS, wide)))
        for what, formula, curves in (
            ("operations", kind.exponents[number], found.operations),
            ("memory", kind.memory[number] if kind.exponents[number] is not None else None, found.memory),
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


def crossover(lengths: Sequence[int], curves: Curves) -> float:
    """The T at which self-attention without projections costs as much as a recurrent layer: on the fitted lines."""
    (factor, slope), (other_factor, other_slope) = (
        power_law(lengths, curves[name]) for name in ("self-attention, no projections", "recurrent")
    )
    return float((other_factor / factor) ** (1 / (slope - other_slope)))


def _panels(lengths: Sequence[int], long: Costs, wide: Costs, paths: Curves) -> list[Panel]:
    def panel(title: str, unit: str, curves: Curves, x: Sequence[int] = lengths, symbol: str = "T") -> Panel:
        series = [Series(name, list(x), values) for name, values in curves.items()]
        return Panel(title, symbol, unit, series, log_x=True, log_y=True)

    return [
        panel(f"Operations, d = {WIDTH}", "operations", long.operations),
        panel(f"Memory for the backward pass, d = {WIDTH}", "bytes", long.memory),
        panel(f"Time of a forward pass, d = {WIDTH}", "seconds", long.seconds),
        panel(f"Memory for the backward pass, T = {LONG}", "bytes", wide.memory, WIDTHS, "d"),
        panel(f"Time of a forward pass, T = {LONG}", "seconds", wide.seconds, WIDTHS, "d"),
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
    "passes, in processor time on a CPU; they depend on the machine and are shown, not checked. "
    "Fused attention does not store its T x T weights.",
    measure_complexity,
)
