"""Lowering: searches equal those of the modules, no supported decoder falls back silently, choice of precision."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from contract_fixtures import CPUSearchGraph
from lowering_fixtures import COMMON, SHAPES, VOCABULARY, WIDTH, build, sources

from transduce.attention.positions import Rotary, Sinusoidal
from transduce.attention.self_attention import SSRU
from transduce.decoders.transformer import TransformerDecoder
from transduce.decoding.continuous_batching import SearchRequest, continuous_search
from transduce.decoding.logits_processors import MinLength
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.errors import InputError
from transduce.flow import EOS
from transduce.inference import lowering
from transduce.inference.decoder_program import LoweredDecoder, TopKLoweredDecoder
from transduce.inference.lowering import GPU_BACKENDS, lower_decoders, lower_for_gpu, lower_network
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.kernels.dispatch import Operation
from transduce.model import Transducer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a step was computed by operations, by the name of the operation."""
    counts: Counter[str] = Counter()

    def count(operation: Operation) -> Any:
        return lambda *given: counts.update([operation.name]) or operation(*given)

    for name in ("DECODE_QKV", "TOP_K_TOKENS"):
        monkeypatch.setattr(lowering, name, count(getattr(lowering, name)))
    return counts


def pair(model: Transducer) -> tuple[Transducer, Transducer]:
    """The modules, and the network lowered to operations."""
    lowering._replace(model, lowering._join_projections)
    lowered = copy.deepcopy(model)
    lower_decoders(lowered, GPU_BACKENDS.values())
    assert isinstance(lowered.decoder, TopKLoweredDecoder)
    return model, lowered


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
@pytest.mark.parametrize("shape", ["pre-norm", "post-norm"])
def test_search_equals_the_modules(shape: str, strategy: Any, calls: Counter[str]) -> None:
    plain, quick = pair(build(SHAPES[shape]))
    batch, longest = sources(), torch.tensor([9, 12, 40])
    found = [search(model, batch, strategy, max_lengths=longest) for model in (plain, quick)]
    assert [[one.ids for one in row] for row in found[0]] == [[one.ids for one in row] for row in found[1]]
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-3)
    assert calls["decode_qkv"] > 0


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
def test_captured_steps_are_keyed_by_suppressed_tokens(
    strategy: Any, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", CPUSearchGraph)
    plain, quick = pair(build(SHAPES["post-norm"]))
    plain.decoder.output.projection.bias.data[EOS] = quick.decoder.output.projection.bias.data[EOS] = 9.0  # type: ignore[union-attr]
    options: dict[str, Any] = {"max_lengths": torch.tensor([9, 12, 20]), "processors": (MinLength(length=4),)}
    graphs, wanted = SearchGraphs(), search(plain, batch := sources(), strategy, **options)
    for _ in range(2):
        found = search(quick, batch, strategy, **options, graphs=graphs)
        assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in wanted]
    (recording,) = graphs.captured.values()
    assert list(recording.steps) == [((0, 1, EOS), 1), ((0, 1), 1)]  # one step each, before the least length and after
    assert all(len(row[0].ids) >= 5 for row in found)
    assert calls["top_k_tokens"] > graphs.replayed > 0


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
def test_continuous_batching_equals_the_modules(
    strategy: Any, recorded: bool, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", CPUSearchGraph)
    plain, quick = pair(build(SHAPES["post-norm"]))
    longest = torch.tensor([9, 12, 40, 3, 20, 6, 14, 2, 5])
    requests = [SearchRequest(sources(), longest[first : first + 3]) for first in (0, 3, 6)]
    found = continuous_search(quick, requests, strategy, slots=4, graphs=SearchGraphs() if recorded else None)
    wanted = [row for one in requests for row in search(plain, one.batch, strategy, max_lengths=one.max_lengths)]
    assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in wanted]
    assert calls["top_k_tokens"] > 0


def test_other_calls_run_the_modules(calls: Counter[str]) -> None:
    plain, quick = pair(build(SHAPES["post-norm"]))
    batch, tokens = sources(), torch.randint(4, VOCABULARY, (3, 5))
    with torch.inference_mode():
        states = [model.reserve(model.start(batch), 8, 1) for model in (plain, quick)]
        whole = [model.advance(tokens, model.start(batch), with_attention=True) for model in (plain, quick)]
        looked = quick.advance(tokens[:, :1], states[1])
        torch.testing.assert_close(looked.logits, plain.advance(tokens[:, :1], states[0]).logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(whole[1].logits, whole[0].logits)
    assert whole[1].attention is not None
    assert calls["decode_qkv"] == COMMON["layers"]


def test_many_rows_run_the_modules(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, quick = pair(build(SHAPES["pre-norm"]))
    monkeypatch.setattr(lowering, "MAX_ROWS", 2)
    search(quick, sources(), Greedy(), max_lengths=torch.tensor([3, 3, 3]))
    assert not calls["decode_qkv"]


@pytest.mark.parametrize(
    "options",
    [{"position": Rotary}, {"norm_kind": "rms"}, {"token_mixer": SSRU}, {"heads": 4}, {"projections": "none"}],
)
def test_unsupported_decoders_are_not_lowered(options: dict[str, Any]) -> None:
    model = build({**options, "position": options.get("position", Sinusoidal)})
    lowering._replace(model, lowering._join_projections)
    lower_decoders(model, GPU_BACKENDS.values())
    assert type(model.decoder) is TransformerDecoder  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", ["pre-norm", "post-norm"])
def test_gpu_lowering_in_bf16_keeps_exact_positions(shape: str) -> None:
    model = build(SHAPES[shape])
    made = lower_for_gpu(model, "bf16")
    assert isinstance(made.decoder, LoweredDecoder)
    backend: Any = made.decoder.backend
    assert len(backend.blocks) == COMMON["layers"]
    assert {one.dtype for one in made.parameters()} == {torch.bfloat16}
    place: Any = made.decoder.position  # type: ignore[union-attr]
    assert place.frequencies.dtype == torch.float32  # in bf16 the places from 256 on would fall together
    positions = torch.arange(200, 203)[None]
    exact = model.decoder.position.add(torch.zeros(1, 3, WIDTH), positions)  # type: ignore[union-attr]
    torch.testing.assert_close(backend.tables.positions[200:203].float(), exact[0], atol=5e-3, rtol=0)  # type: ignore[union-attr]
    found = search(made, sources(), Greedy(), max_lengths=torch.tensor([6, 6, 6]))
    assert all(len(row[0].ids) == 6 or row[0].ids[-1] == EOS for row in found)
    assert type(lower_for_gpu(model, "fp32").decoder) is TransformerDecoder  # type: ignore[union-attr]


def test_auto_precision_reaches_the_fused_decoder_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is stood in for: the choice depends on the device alone, the weights stay on the CPU."""
    gpu = torch.device("cuda")
    for fast, dtype, kind in ((True, torch.bfloat16, TopKLoweredDecoder), (False, torch.float32, TransformerDecoder)):
        monkeypatch.setattr(lowering, "has_fast_bf16", lambda device, fast=fast: fast)
        lowered: Any = lower_network(build(SHAPES["post-norm"]), "auto", device=gpu)
        assert type(lowered.decoder) is kind
        assert {one.dtype for one in lowered.parameters()} == {dtype}
    monkeypatch.setattr(lowering, "has_fast_bf16", lambda device: True)
    rotary: Any = lower_network(build({"position": Rotary}), "auto", device=gpu)  # the kernels do not support it
    assert type(rotary.decoder) is TransformerDecoder
    assert {one.dtype for one in rotary.parameters()} == {torch.float32}


def test_choice_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(lowering, "has_fast_bf16", lambda device: True)
    assert lowering.choose_precision("auto", cpu) == "fp32"
    assert lowering.choose_precision("auto", cpu, "int8") == "int8"
    assert lowering.choose_precision("auto", gpu, "int8") == "bf16"
    assert lowering.choose_precision("fp32", gpu) == "fp32"
    with pytest.raises(InputError, match="int8"):
        lowering.choose_precision("int8", gpu)
    with pytest.raises(InputError, match="unknown precision"):
        lowering.choose_precision("int9", cpu)  # type: ignore[arg-type]
