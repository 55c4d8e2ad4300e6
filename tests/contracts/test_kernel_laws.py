"""Law 8 for operations: every backend equals the torch reference, forward and backward.

Triton kernels run on a GPU, or anywhere in Triton's interpreter where Triton is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from transduce.kernels import OPERATIONS, dispatch
from transduce.kernels.attention import AttentionInput
from transduce.kernels.cross_entropy import IGNORED
from transduce.kernels.dispatch import Backend, captured_pass, has_triton
from transduce.kernels.native.library import library
from transduce.kernels.weight_cast import cast_weights

if has_triton() and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
FORWARD_ONLY = {"triton_decode"}

Numbers = Callable[..., Tensor]


class Case(NamedTuple):
    """The arguments of an operation, and the tensors whose gradients are compared."""

    args: tuple[Any, ...]
    inputs: Sequence[Tensor]


def numbers_of(dtype: torch.dtype, device: str) -> Numbers:
    """Random tensors: the same numbers in every precision, because all of them are representable in bf16."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int, parameter: bool = False) -> Tensor:
        kind = torch.float32 if parameter and dtype != torch.float64 else dtype  # parameters are stored in fp32
        values = torch.randn(*shape, generator=generator).bfloat16()
        return values.to(device, kind).requires_grad_()

    return numbers


def with_parameters(module: nn.Module, numbers: Numbers) -> nn.Module:
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(numbers(*parameter.shape, parameter=True).detach()))
    return module


def linear_cases(numbers: Numbers) -> Iterator[Case]:
    for activation in ("", "relu", "gelu", "gelu_tanh", "silu"):
        for sizes in ((16,), (16, 8)):
            for biased in (True, False):
                x, weights = numbers(2, 5, 24), [numbers(size, 24, parameter=True) for size in sizes]
                biases = [numbers(size, parameter=True) for size in sizes] if biased else []
                yield Case((x, weights, biases, activation), [x, *weights, *biases])


def split_cases(numbers: Numbers) -> Iterator[Case]:
    for sizes in ((4, 4, 4), (6, 6), (2, 10)):
        x = numbers(2, 5, 12)
        yield Case((x, sizes), [x])


def output_projection_cases(numbers: Numbers) -> Iterator[Case]:
    for size in (41, 7):
        x, weight, bias = numbers(2, 5, 8), numbers(size, 8, parameter=True), numbers(size, parameter=True)
        yield Case((x, weight, bias), [x, weight, bias])
        yield Case((x, weight, None), [x, weight])


def norms(width: int, numbers: Numbers) -> Iterator[nn.Module]:
    for norm in (nn.LayerNorm(width), nn.LayerNorm(width, bias=False), nn.RMSNorm(width, eps=1e-5)):
        yield with_parameters(norm, numbers)


def norm_cases(numbers: Numbers) -> Iterator[Case]:
    for norm in norms(48, numbers):
        x = numbers(2, 5, 48)
        yield Case((norm, x), [x, *norm.parameters()])


def add_norm_cases(numbers: Numbers) -> Iterator[Case]:
    """Without dropout, whose masks differ between backends."""
    for shape in ((2, 5, 48), (70, 16)):
        for norm in norms(shape[-1], numbers):
            residual, x = numbers(*shape), numbers(*shape)
            yield Case((norm, residual, x, 0.0), [residual, x, *norm.parameters()])


def attention_cases(numbers: Numbers) -> Iterator[Case]:
    for queries, length, causal, masked in (
        (5, 7, False, ""),
        (5, 7, False, "keys"),
        (1, 20, False, "keys"),
        (9, 9, True, ""),
        (17, 33, False, "queries"),
        (1, 40, False, "keys"),
        (5, 32, False, "queries"),
    ):
        query, keys, values = (numbers(2, 2, size, 32) for size in (queries, length, length))
        mask = None
        if masked:
            lengths = torch.tensor([[length], [(length + 1) // 2]], device=query.device)
            mask = (torch.arange(length, device=query.device) < lengths)[:, None, None]
        if masked == "queries":
            pattern = torch.rand(2, 1, queries, length, generator=torch.Generator().manual_seed(1)).to(query.device)
            mask = pattern < 0.6
            mask[..., 0] = True  # a query without any key has no softmax
        yield Case((AttentionInput(query, keys, values, mask, None, 0.3, causal, 0.0),), [query, keys, values])


def additive_scores_cases(numbers: Numbers) -> Iterator[Case]:
    for sources, queries, length, width in ((1, 1, 1, 1), (3, 2, 7, 16), (2, 1, 5, 33)):
        layer = with_parameters(nn.Linear(width, 1, bias=False), numbers)
        query, keys = numbers(sources, queries, width), numbers(sources, length, width)
        yield Case((query, keys, layer), [query, keys, *layer.parameters()])


def additive_context_cases(numbers: Numbers) -> Iterator[Case]:
    for sources, queries, length, width in ((1, 1, 1, 1), (3, 2, 7, 16), (2, 1, 5, 33)):
        for masked in (False, True):
            layer = with_parameters(nn.Linear(width, 1, bias=False), numbers)
            query, keys = numbers(sources, queries, width), numbers(sources, length, width)
            values = numbers(sources, length, width + 1)
            mask = torch.arange(length)[None, None] < torch.arange(1, sources + 1)[:, None, None] if masked else None
            yield Case((query, keys, values, layer, mask), [query, keys, values, *layer.parameters()])


def cross_entropy_cases(numbers: Numbers) -> Iterator[Case]:
    for size in (40, 77, 1):
        for smoothing in (0.0, 0.1):
            logits = numbers(6, size)
            labels = torch.tensor([0, size - 1, IGNORED, size // 2, IGNORED, 0], device=logits.device)
            yield Case((logits, labels, smoothing), [logits])


CASES: dict[str, Callable[[Numbers], Iterator[Case]]] = {
    "linear": linear_cases,
    "split": split_cases,
    "output_projection": output_projection_cases,
    "norm": norm_cases,
    "pre_norm": add_norm_cases,
    "post_norm": add_norm_cases,
    "attention": attention_cases,
    "additive_scores": additive_scores_cases,
    "additive_context": additive_context_cases,
    "cross_entropy": cross_entropy_cases,
}
RANDOM = ("dropout", "dropout_add")  # tested below
PAIRS = [(name, backend) for name in CASES for backend in OPERATIONS[name].backends]
RANDOM_PAIRS = [(name, backend) for name in RANDOM for backend in OPERATIONS[name].backends]


def device_of(backend: Backend) -> str:
    """Where a backend runs on this machine; skips where it does not run."""
    if backend.name.startswith("triton"):
        if not has_triton():
            pytest.skip("Triton is not installed: its kernels are tested neither on a GPU nor by its interpreter")
        return "cpu" if INTERPRETED else "cuda"
    if backend.name == "native" and library() is None:
        pytest.skip("there is no C compiler: the native kernels are not tested")
    return "cpu"


def precisions(backend: Backend) -> list[torch.dtype]:
    """In fp32, and in the low precision of the backend; the interpreter has no bf16, and tensor cores no fp32 tiles."""
    if backend.name.startswith("triton"):
        return [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
    return [torch.float32, torch.bfloat16]


def evaluate(run: Callable[..., Any], case: Case, backward: bool) -> list[Tensor | None]:
    """All results, and the gradients of the inputs for random gradients of the results."""
    with torch.set_grad_enabled(backward):
        made = run(*case.args)
    results = [made] if isinstance(made, Tensor) else list(made)
    found: list[Tensor | None] = [one.detach().double().cpu() for one in results]
    if backward:
        generator = torch.Generator().manual_seed(9)
        with_gradient = [one for one in results if one.requires_grad]
        grads = [torch.randn(one.shape, generator=generator).bfloat16().to(one) for one in with_gradient]
        made_grads = torch.autograd.grad(with_gradient, case.inputs, grads, allow_unused=True)
        found += [None if one is None else one.double().cpu() for one in made_grads]
    return found


def compare(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        scale = 1 + float(other.abs().max()) if other.numel() else 1.0
        assert_close(one, other, rtol=tolerance, atol=tolerance * scale)


def fits_decode_tiles(given: AttentionInput) -> bool:
    """The decode kernel takes a mask, at most 16 queries, and at least one tile of 16 slots."""
    return given.mask is not None and not given.causal and given.query.size(2) <= 16 <= given.keys.size(2)


def test_every_operation_is_tested() -> None:
    assert {*CASES, *RANDOM, "weight_cast"} == set(OPERATIONS)


@pytest.mark.parametrize(("name", "backend"), PAIRS, ids=[f"{name}-{backend.name}" for name, backend in PAIRS])
def test_backend_equals_reference(name: str, backend: Backend) -> None:
    device, tested = device_of(backend), 0
    for dtype in precisions(backend):
        cases = CASES[name](numbers_of(dtype, device)), CASES[name](numbers_of(torch.float64, device))
        for case, exact in zip(*cases, strict=True):
            if not backend.name.startswith("triton") and name != "split" and not backend.accepts(*case.args):
                continue
            backward = backend.name not in FORWARD_ONLY
            if not backward and not fits_decode_tiles(case.args[0]):
                continue
            wanted = evaluate(OPERATIONS[name].reference, exact, backward)
            compare(evaluate(backend.run, case, backward), wanted, TOLERANCE[dtype])
            tested += 1
    assert tested > 1


def test_the_reference_runs_where_no_backend_applies() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    norm = nn.LayerNorm(4).double()
    assert torch.equal(OPERATIONS["norm"](norm, x), norm(x))


@pytest.mark.parametrize(
    ("name", "backend"), RANDOM_PAIRS, ids=[f"{name}-{backend.name}" for name, backend in RANDOM_PAIRS]
)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_equals_the_reference_under_its_mask(name: str, backend: Backend, rate: float) -> None:
    device, adds = device_of(backend), name == "dropout_add"

    def run(residual: Tensor, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        made: Tensor = backend.run(*((residual, x, rate) if adds else (x, rate)))
        return made

    for dtype in precisions(backend):
        residual = torch.randn(40, 50, device=device).requires_grad_()
        x = torch.randn(40, 50, device=device).to(dtype).requires_grad_()
        kept = run(torch.zeros_like(residual), torch.ones_like(x)).detach() != 0
        made, inputs = run(residual, x), [residual, x] if adds else [x]
        wanted = torch.where(kept, x.float() / (1 - rate), 0.0) + (residual if adds else 0.0)
        grad = torch.randn(40, 50, device=device)
        found = [made, *torch.autograd.grad(made, inputs, grad.to(made))]
        exact = [wanted, *torch.autograd.grad(wanted, inputs, grad)]
        compare([one.detach().double() for one in found], [one.detach().double() for one in exact], TOLERANCE[dtype])
        assert kept.float().mean().item() == pytest.approx(1 - rate, abs=0.05)


def test_weights_cast_together_equal_weights_cast_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (backend,), reference = OPERATIONS["weight_cast"].backends, OPERATIONS["weight_cast"].reference
    layers = [nn.Linear(7, size) for size in (8, 16, 8)]
    monkeypatch.setattr(dispatch, "fused_training", lambda x: True)
    with captured_pass(), torch.autocast("cpu", torch.bfloat16), cast_weights(layers):
        for some in (layers, layers[:1], layers[1:]):
            for parameters in ([layer.weight for layer in some], [layer.bias for layer in some]):
                assert backend.accepts(parameters, torch.bfloat16) or parameters[0].dim() == 2
                if backend.accepts(parameters, torch.bfloat16):
                    found, wanted = (run(parameters, torch.bfloat16) for run in (backend.run, reference))
                    assert torch.equal(found, wanted)
        assert not backend.accepts([layers[0].weight, layers[2].weight], torch.bfloat16)  # not adjacent
        assert not backend.accepts([nn.Parameter(torch.ones(2, 2))], torch.bfloat16)
    assert not backend.accepts([layers[0].weight], torch.bfloat16)
