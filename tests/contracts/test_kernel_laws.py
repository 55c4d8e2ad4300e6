"""Law 8: every backend of every operation equals the torch reference, forward and backward, and every lowered decoder
equals its modules.

Native kernels run on the CPU. Triton kernels run on a GPU, or in Triton's interpreter where Triton is installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernel_cases import CASES, Case, numbers_of
from lowering_fixtures import SHAPES, VOCABULARY, build, sources
from torch import Tensor, nn
from torch.testing import assert_close
from triton_support import DEVICE, DTYPES, INSTALLED, INTERPRETED, NOT_INSTALLED, allow_any_device

from transduce.flow import Batch
from transduce.inference import lowering
from transduce.inference.decoder_program import LoweredDecoder
from transduce.inference.lowering import CPU_BACKENDS, GPU_BACKENDS, lower_decoders
from transduce.kernels import OPERATIONS, dispatch
from transduce.kernels.cuda_graph import tensors_of
from transduce.kernels.dispatch import Backend, captured_pass
from transduce.kernels.linear import PackedFloat32, cast_weights
from transduce.kernels.native.library import library
from transduce.model import Transducer

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
FORWARD_ONLY = {"triton_decode"}
RANDOM = ("dropout", "dropout_add")  # tested below
PAIRS = [(name, backend) for name in CASES for backend in OPERATIONS[name].backends]
RANDOM_PAIRS = [(name, backend) for name in RANDOM for backend in OPERATIONS[name].backends]


def device_of(backend: Backend) -> str:
    """Where a backend runs on this machine; skips where it does not run."""
    if backend.name.startswith("triton"):
        if not INSTALLED:
            pytest.skip(NOT_INSTALLED)
        return DEVICE
    if backend.name == "native" and library() is None:
        pytest.skip("there is no C compiler: the native kernels are not tested")
    return "cpu"


def precisions(backend: Backend) -> list[torch.dtype]:
    return DTYPES if backend.name.startswith("triton") else [torch.float32, torch.bfloat16]


def evaluate(run: Callable[..., Any], case: Case, backward: bool) -> list[Tensor | None]:
    """All results, and the gradients of the inputs for random gradients of the results."""
    with torch.set_grad_enabled(backward):
        results = case.results(run(*case.args))
    found: list[Tensor | None] = [one.detach().cpu() for one in results]
    if backward:
        generator = torch.Generator().manual_seed(9)
        with_gradient = [one for one in results if one.requires_grad]
        grads = [torch.randn(one.shape, generator=generator).bfloat16().to(one) for one in with_gradient]
        gradients = torch.autograd.grad(with_gradient, case.inputs, grads, allow_unused=True)
        found += [None if one is None else one.cpu() for one in gradients]
    return found


def compare(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], tolerance: float) -> None:
    """Floating-point numbers up to rounding, relative to the largest; everything else exactly."""
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
        elif not other.is_floating_point():
            assert torch.equal(one, other)
        else:
            finite = other[other.isfinite()].double().abs()
            scale = 1 + float(finite.max()) if finite.numel() else 1.0
            assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * scale)


def test_every_operation_is_tested() -> None:
    assert {*CASES, *RANDOM, "weight_cast"} == set(OPERATIONS)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # the interpreter stores -1e30 in fp16 as -inf
@pytest.mark.parametrize(("name", "backend"), PAIRS, ids=[f"{name}-{backend.name}" for name, backend in PAIRS])
def test_backend_equals_reference(name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each precision of the backend, against the reference in fp64; a backend is given what it accepts."""
    device, tested = device_of(backend), 0
    allow_any_device(monkeypatch)
    for dtype in precisions(backend):
        cases = CASES[name](numbers_of(dtype, device)), CASES[name](numbers_of(torch.float64, device))
        for case, exact in zip(*cases, strict=True):
            backward = bool(case.inputs) and backend.name not in FORWARD_ONLY
            with captured_pass(), torch.set_grad_enabled(backward):
                if not backend.accepts(*case.args):
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


BACKENDS = {**CPU_BACKENDS, **GPU_BACKENDS}
PROGRAMS = [*BACKENDS, "fused-triton"]  # the last one: with the Triton kernels of the operations
UNSUPPORTED = {("native", "grouped queries")}


def lowered(model: Transducer, name: str) -> Transducer:
    """The network with its decoder on this backend; linear layers are packed for the backends of a CPU."""
    lowering._replace(model, lowering._join_projections)
    if name in CPU_BACKENDS:
        lowering._replace(model, lambda part: lowering._pack(part, PackedFloat32))
    lower_decoders(model, [BACKENDS[name]])
    return model


@pytest.mark.parametrize("alone", [False, True], ids=["memory", "no memory"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_lowered_decoder_equals_its_modules(
    name: str, shape: str, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of three beams, which change places: logits, hidden states, positions and the KV caches."""
    if name == "native" and library() is None:
        pytest.skip("there is no C compiler: the native kernels are not tested")
    on_triton = name == "fused-triton"
    if on_triton and not INSTALLED:
        pytest.skip(NOT_INSTALLED)
    device, dtype = (DEVICE, DTYPES[0 if INTERPRETED else 1]) if on_triton else ("cpu", torch.float32)
    plain = build(SHAPES[shape], alone=alone).to(device)
    quick = lowered(copy.deepcopy(plain).to(dtype), name.removesuffix("-triton"))
    assert isinstance(quick.decoder, LoweredDecoder) == ((name, shape) not in UNSUPPORTED)
    if on_triton:
        allow_any_device(monkeypatch)
    compare_steps(plain.double(), quick, sources().to(torch.device(device)), 2 if INTERPRETED else 6, TOLERANCE[dtype])


@torch.inference_mode()
def compare_steps(plain: Transducer, quick: Transducer, batch: Batch, steps: int, tolerance: float) -> None:
    beams, device, models = 3, batch.device, (plain, quick)
    bos = torch.ones(3, 1, dtype=torch.long, device=device)
    states = [model.advance(bos, model.start(batch)).state for model in models]
    states = [model.reserve(state, 8, beams).repeat(beams) for model, state in zip(models, states, strict=True)]
    for _ in range(steps):
        tokens = torch.randint(4, VOCABULARY, (9, 1)).to(device)
        if isinstance(quick.decoder, LoweredDecoder):
            assert quick.decoder.backend.supports(tokens, states[1])  # else the modules would run
        one, two = (model.advance(tokens, state) for model, state in zip(models, states, strict=True))
        wanted, found = ([step.logits, step.hidden, *step.state.past.values()] for step in (one, two))
        compare(found, wanted, tolerance)
        order = (torch.randint(beams, (3, beams)) + torch.arange(3)[:, None] * beams).flatten().to(device)
        states = [one.state.reorder(order), two.state.reorder(order)]
    compare(tensors_of(states[1].fixed["kv_cache"]), tensors_of(states[0].fixed["kv_cache"]), tolerance)
