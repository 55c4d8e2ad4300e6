"""Native kernels of inference at every SIMD level: linear layers, top-k, decoding steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from transduce.contracts import Strategy
from transduce.decoders.transformer import TransformerDecoder
from transduce.decoding import search as decoding_search
from transduce.decoding import strategies
from transduce.decoding.logits_processors import RepetitionPenalty
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Hypothesis, Padded, Shortlists
from transduce.inference.lowering import NativeBackend, OperationsBackend, lower_network
from transduce.kernels.beam_update import TOP_K
from transduce.kernels.linear import PackedInt8, PackedLinear, quantise_rows
from transduce.kernels.native import library as libraries
from transduce.kernels.native.inference import NativeLinear, linear_top_k
from transduce.layers.embedding import Embedding, Output
from transduce.model import EncoderDecoder

LEVELS = ("native", "avx2", "portable")
# Compiled with fewer optimisations, which takes a third of the time: the code paths are what is tested.
OTHERS = {"avx2": ("-march=haswell", "-O1"), "portable": ("-DPORTABLE", "-O1")}
SIZES = {"rows": st.integers(0, 14), "width": st.integers(1, 70), "outputs": st.integers(1, 140)}

pytestmark = pytest.mark.skipif(libraries.library() is None, reason="there is no C compiler")


@pytest.fixture(params=LEVELS, scope="module")
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Every code path of simd.h that this processor can run."""
    if request.param == "native":
        yield "native"
        return
    known = Path("/proc/cpuinfo")
    if request.param == "avx2" and not (known.exists() and "avx2" in known.read_text(encoding="utf-8")):
        pytest.skip("not on this processor")
    compiler = next(name for name in libraries.COMPILERS if libraries.shutil.which(name))
    made = libraries.load(libraries.compiled(compiler, OTHERS[request.param], libraries.cache_directory("native")))
    before = libraries._found
    libraries._found = libraries.functools.cache(lambda: made)
    libraries._found()
    yield request.param
    libraries._found = before


def int8_product(values: np.ndarray, layer: nn.Linear) -> np.ndarray:
    """s_row s_output sum(q_x q_w) + b, the sum in integers."""
    whole, scales = quantise_rows(layer.weight)
    top = np.abs(values).max(-1, keepdims=True)
    up = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    sums = np.rint(values * up).astype(np.int64) @ whole.numpy().astype(np.int64).T
    made = sums.astype(np.float64) * (top / 127) * scales.numpy()
    return made if layer.bias is None else made + layer.bias.detach().numpy()


@settings(max_examples=25)  # NumPy multiplies integers slowly
@given(**SIZES, bias=st.booleans(), rectified=st.booleans(), seed=st.integers(0, 99))
def test_int8_linear_equals_integer_arithmetic(
    level: str, rows: int, width: int, outputs: int, bias: bool, rectified: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, values = nn.Linear(width, outputs, bias=bias), 3 * torch.randn(rows, width)
    values[: rows // 3] = 0.0
    wanted = int8_product(values.numpy(), layer) if rows else np.zeros((0, outputs))
    found = NativeLinear(*quantise_rows(layer.weight), layer.bias).function(rectified)(values)
    np.testing.assert_allclose(found.numpy(), np.maximum(wanted, 0) if rectified else wanted, rtol=1e-5, atol=1e-5)


@given(**SIZES, bias=st.booleans(), rectified=st.booleans(), seed=st.integers(0, 99))
def test_fp32_linear_equals_torch(
    level: str, rows: int, width: int, outputs: int, bias: bool, rectified: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, values = nn.Linear(width, outputs, bias=bias), torch.randn(rows, width)
    with torch.inference_mode():
        wanted = layer(values).relu() if rectified else layer(values)
    found = NativeLinear(layer.weight, None, layer.bias).function(rectified)(values)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_results_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    layer, values = nn.Linear(256, 1500), torch.randn(5, 256)
    read = NativeLinear(*quantise_rows(layer.weight), layer.bias).function()
    before, alone = torch.get_num_threads(), read(values)
    try:
        torch.set_num_threads(2)
        assert torch.equal(read(values), alone)
    finally:
        torch.set_num_threads(before)


@given(st.integers(1, 9), st.integers(0, 99))
def test_int8_rows_do_not_depend_on_their_batch(rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    read, values = PackedInt8(nn.Linear(37, 21)), torch.randn(rows, 37) * torch.logspace(-3, 3, rows)[:, None]
    together = read(values)
    assert all(torch.equal(read(values[row]), together[row]) for row in range(rows))


@given(st.integers(1, 700), st.integers(1, 12), st.integers(0, 99), st.booleans())
def test_top_k_equals_a_stable_sort(level: str, size: int, count: int, seed: int, coarse: bool) -> None:
    torch.manual_seed(seed)
    scores = torch.randint(-5, 5, (2, 3, size)).float() if coarse else torch.randn(2, 3, size)
    scores[..., ::5] = -torch.inf
    native = TOP_K.backends[0]
    assert native.name == "native"
    assert native.accepts(scores, count) == (count <= size)
    if count > size:
        return
    found = native.run(scores, count)
    order = scores.sort(dim=-1, descending=True, stable=True)  # the earlier of two equal ones first
    assert torch.equal(found[0], order.values[..., :count])
    assert torch.equal(found[1], order.indices[..., :count])


@given(**SIZES, whole=st.booleans(), count=st.integers(1, 9), seed=st.integers(0, 99), threads=st.integers(1, 3))
def test_linear_top_k_equals_the_best_log_probabilities(
    level: str, rows: int, width: int, outputs: int, whole: bool, count: int, seed: int, threads: int
) -> None:
    """Against the logits of all tokens: the best that are not suppressed, the earlier of two equal ones."""
    torch.manual_seed(seed)
    layer, values = nn.Linear(width, 9 * outputs), torch.randn(rows, width)
    with torch.no_grad():
        layer.weight[::3], layer.bias[::3] = layer.weight[0], layer.bias[0]  # equals
    product = NativeLinear(*(quantise_rows(layer.weight) if whole else (layer.weight, None)), layer.bias)
    suppressed = torch.randint(0, 9 * outputs, (3,)).tolist()
    logs = product.function()(values).log_softmax(-1)
    logs[:, suppressed] = -torch.inf
    order = logs.sort(dim=-1, descending=True, stable=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = linear_top_k(product, values, count, suppressed)
    torch.set_num_threads(before)
    assert torch.equal(found.tokens, order.indices[:, :count]) or torch.allclose(
        logs.gather(1, found.tokens), order.values[:, :count], atol=1e-5
    )
    torch.testing.assert_close(found.log_probs, order.values[:, :count], rtol=1e-4, atol=1e-4)
    for row in range(rows):  # its neighbours change nothing, to the bit
        alone = linear_top_k(product, values[row : row + 1], count, suppressed)
        assert torch.equal(alone.log_probs[0], linear_top_k(product, values, count, suppressed).log_probs[row])
        assert torch.equal(alone.tokens[0], found.tokens[row])


@given(st.integers(1, 70), st.sampled_from([0.01, 3.0, 100.0]), st.integers(0, 99))
def test_log_probabilities_are_exact_up_to_rounding(level: str, size: int, spread: float, seed: int) -> None:
    """Scores that a matrix hands on as they are, against arithmetic in double precision."""
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * spread
    product = NativeLinear(torch.eye(size), None, None)
    wanted = values.double().log_softmax(-1).sort(dim=-1, descending=True).values[:, :5]
    every = Shortlists(torch.arange(size, dtype=torch.int32), torch.tensor([0, size]), torch.zeros(3, dtype=torch.long))
    for lists in (None, every):
        logs = linear_top_k(product, values, min(size, 5), lists=lists).log_probs
        torch.testing.assert_close(logs.double(), wanted, rtol=3e-7, atol=3e-7)


def test_top_k_of_fewer_outputs_than_k(level: str) -> None:
    layer = nn.Linear(4, 3)
    found = linear_top_k(NativeLinear(layer.weight, None, layer.bias), torch.randn(2, 4), 5, [1])
    assert (found.log_probs[:, 2:] == -torch.inf).all()
    assert found.log_probs[:, :2].isfinite().all()
    assert ((found.tokens >= 0) & (found.tokens < 3)).all()


@given(
    **SIZES,
    whole=st.booleans(),
    bias=st.booleans(),
    count=st.integers(1, 9),
    share=st.sampled_from([0.02, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_top_k_within_a_shortlist(
    level: str, rows: int, width: int, outputs: int, whole: bool, bias: bool, count: int, share: float, seed: int
) -> None:
    """Against all scores written down and cut to each row's own list; in int8 the scores are the same ones."""
    torch.manual_seed(seed)
    layer, values = nn.Linear(width, 9 * outputs, bias=bias), torch.randn(rows, width)
    product = NativeLinear(*(quantise_rows(layer.weight) if whole else (layer.weight, None)), layer.bias)
    allowed = torch.rand(5, 9 * outputs) < share
    allowed[torch.arange(5), torch.randint(0, 9 * outputs, (5,))] = True  # a list has one token at least
    lines, tokens = allowed.nonzero(as_tuple=True)
    begins, which = torch.searchsorted(lines, torch.arange(6)), torch.randint(0, 5, (rows,))
    suppressed = torch.randint(0, 9 * outputs, (3,)).tolist()
    logs = product.function()(values).masked_fill(~allowed[which], -torch.inf).log_softmax(-1)
    logs[:, suppressed] = -torch.inf
    before = torch.get_num_threads()
    torch.set_num_threads(1 + seed % 3)
    found = linear_top_k(product, values, count, suppressed, Shortlists(tokens.int(), begins, which))
    torch.set_num_threads(before)
    wanted = logs.sort(dim=-1, descending=True, stable=True).values[:, :count]
    wanted = torch.nn.functional.pad(wanted, (0, count - wanted.size(1)), value=-torch.inf)
    torch.testing.assert_close(found.log_probs, wanted, rtol=1e-4, atol=1e-4)
    real = found.log_probs > -torch.inf
    assert torch.allclose(logs.gather(1, found.tokens)[real], found.log_probs[real], atol=1e-4)
    for row in range(rows):  # its neighbours change nothing, to the bit
        alone = linear_top_k(
            product, values[row : row + 1], count, suppressed, Shortlists(tokens.int(), begins, which[row : row + 1])
        )
        assert torch.equal(alone.log_probs[0], found.log_probs[row])
        assert torch.equal(alone.tokens[0], found.tokens[row])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm": "post"},
    {"activation": "gelu", "gated": True},
    {"activation": "silu", "bias": False},
    {"activation": "gelu_tanh", "window": 2},
    {"width": 18, "heads": 3, "ff_width": 7},  # no multiple of a SIMD width
    {"head_width": 20},
    {"width": 64, "heads": 2},  # heads of whole vectors
]


@pytest.fixture(autouse=True)
def _caches_grow_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_search, "INITIAL_CAPACITY", 8)


def transformer(options: dict[str, Any], vocabulary: int = 23) -> EncoderDecoder:
    torch.manual_seed(1)
    options = {"layers": 2, "width": 16, "heads": 2, "ff_width": 24, **options}
    table = Embedding(vocabulary, options["width"])
    reading = {name: value for name, value in options.items() if name != "window"}
    encoder = TransformerEncoder(table, **reading)
    decoder = TransformerDecoder(table, Output(options["width"], vocabulary), options["width"], **options)
    return EncoderDecoder(encoder, decoder).eval()


def hypotheses(network: EncoderDecoder, strategy: Strategy, prefix: Padded | None = None) -> list[list[Hypothesis]]:
    source = Padded.from_rows([[5, 6, 4, 6, 2], [4, 2], [6, 6, 2]])
    return search(network, Batch(source), strategy, max_lengths=torch.full((3,), 14), prefix=prefix)


PREFIXES = (None, Padded.from_rows([[5], [6, 4, 5], [4, 4]]))


@cache
def found_by_modules(options: int, strategy: Strategy, prefix: int) -> list[list[Hypothesis]]:
    """What every SIMD level is compared with: options and prefix by their place in OPTIONS and PREFIXES."""
    return hypotheses(transformer(OPTIONS[options]), strategy, PREFIXES[prefix])


@pytest.mark.parametrize("options", range(len(OPTIONS)), ids=lambda place: str(OPTIONS[place]))
@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
def test_a_native_search_equals_a_search_by_modules(level: str, options: int, strategy: Strategy) -> None:
    """Sources and prefixes of different lengths, beams that change places, caches that grow during the search."""
    made = lower_network(transformer(OPTIONS[options]), "fp32")
    assert isinstance(made.decoder.backend, NativeBackend)  # type: ignore[union-attr]
    for number, prefix in enumerate(PREFIXES):
        expected = found_by_modules(options, strategy, number)
        for before, after in zip(expected, hypotheses(made, strategy, prefix), strict=True):
            assert [one.ids for one in after] == [one.ids for one in before]
            for one, other in zip(after, before, strict=True):
                assert one.token_scores == pytest.approx(other.token_scores, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("options", range(len(OPTIONS)), ids=lambda place: str(OPTIONS[place]))
@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
def test_a_search_without_native_kernels_equals_a_search_by_modules(
    options: int, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = found_by_modules(options, strategy, 0)
    monkeypatch.setenv(libraries.SWITCH, "0")
    made = lower_network(transformer(OPTIONS[options]), "fp32")
    assert isinstance(made.decoder.backend, OperationsBackend)  # type: ignore[union-attr]
    for before, after in zip(expected, hypotheses(made, strategy), strict=True):
        assert after[0].ids == before[0].ids
        assert after[0].token_scores == pytest.approx(before[0].token_scores, rel=1e-4, abs=1e-4)


def test_a_vocabulary_smaller_than_the_beam_candidates() -> None:
    network = transformer({}, vocabulary=7)
    for before, after in zip(
        hypotheses(network, Beam(width=5)), hypotheses(lower_network(network), Beam(width=5)), strict=True
    ):
        assert before[0].ids == after[0].ids


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
def test_int8_outputs_do_not_depend_on_the_batch(strategy: Strategy) -> None:
    network = lower_network(transformer({"width": 32, "ff_width": 64}), "int8")
    rows = [[5, 6, 4, 6, 2], [4, 2], [6, 6, 2]]
    together = search(network, Batch(Padded.from_rows(rows)), strategy, max_lengths=torch.full((3,), 12))
    for row, beside in zip(rows, together, strict=True):
        alone = search(network, Batch(Padded.from_rows([row])), strategy, max_lengths=torch.tensor([12]))[0]
        assert [one.ids for one in alone] == [one.ids for one in beside]
        assert alone[0].token_scores == pytest.approx(beside[0].token_scores, abs=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_lowered_search_calls_the_native_kernels(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search without them would find the same, and take longer."""
    network = lower_network(transformer({}), precision)
    assert all(part.native is not None for part in network.modules() if isinstance(part, PackedLinear))
    steps: list[Tensor] = []
    backend: Any = network.decoder.backend  # type: ignore[union-attr]
    assert isinstance(backend, NativeBackend)
    counted = [lambda values, *rest, run=run: steps.append(values) or run(values, *rest) for run in backend.blocks]
    monkeypatch.setattr(backend, "blocks", counted)
    native, *others = TOP_K.backends
    calls: list[int] = []
    counting = replace(native, run=lambda scores, count: calls.append(count) or native.run(scores, count))
    monkeypatch.setattr(strategies, "TOP_K", replace(TOP_K, backends=(counting, *others)))
    processors = [RepetitionPenalty(penalty=1.1)]  # which needs the logits of all tokens
    found = search(
        network, Batch(Padded.from_rows([[5, 6, 2]])), Greedy(), max_lengths=torch.tensor([9]), processors=processors
    )
    assert len(steps) == 2 * (len(found[0][0].ids) - 1)  # <s> is read by the modules
    assert len(calls) == len(found[0][0].ids)
