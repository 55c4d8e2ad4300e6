"""Decoder programs on the operations backend equal the modules; no supported decoder falls back silently."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from transduce.attention.positions import Learned, NoPosition, Rotary, Sinusoidal
from transduce.attention.self_attention import SSRU
from transduce.decoders.transformer import TransformerDecoder
from transduce.decoding.continuous_batching import SearchRequest, continuous_search
from transduce.decoding.logits_processors import MinLength
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.encoders.transformer import TransformerEncoder
from transduce.errors import InputError
from transduce.flow import EOS, Batch, Padded
from transduce.inference.lowering import backends, lower
from transduce.inference.lowering.lower import lower_for_gpu, lower_for_operations, lower_network
from transduce.inference.lowering.program import LoweredDecoder, TopKLoweredDecoder
from transduce.kernels.cuda_graph import SearchGraphs, copy_tensors, copy_tensors_together, tensors_of
from transduce.kernels.decode_step import TorchOperations
from transduce.layers.embedding import Embedding, Output
from transduce.model import DecoderOnly, EncoderDecoder, Transducer

VOCABULARY, WIDTH = 40, 64
COMMON: dict[str, Any] = {"layers": 2, "width": WIDTH, "heads": 2, "ff_width": 96, "dropout": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "before": {},
    "after": {"norm": "post"},
    "gelu": {"norm": "post", "activation": "gelu", "position": partial(Learned, max_positions=24)},
    "gated": {"activation": "silu", "gated": True, "bias": False},
    "gated after": {"norm": "post", "activation": "gelu_tanh", "gated": True},
    "few keys": {"kv_heads": 1, "position": NoPosition},
    "window": {"window": 2, "norm": "post"},
    "entry before": {"embedding_norm": True},
    "entry after": {"embedding_norm": True, "norm": "post", "norm_eps": 1e-3},
    "narrow heads": {"head_width": 32, "heads": 4},
}


def build(options: dict[str, Any], *, alone: bool = False) -> Transducer:
    """Random numbers everywhere, norms and biases too: a part that is left out must show."""
    options = {**COMMON, **options}
    table = Embedding(VOCABULARY, WIDTH)
    decoder = TransformerDecoder(table, Output(WIDTH, VOCABULARY, table), 0 if alone else WIDTH, **options)
    made: Transducer = DecoderOnly(decoder)
    if not alone:
        plain = {name: value for name, value in options.items() if name not in ("window", "kv_heads", "head_width")}
        made = EncoderDecoder(TransformerEncoder(table, **{**plain, "heads": 2}), decoder)
    for name, parameter in made.named_parameters():
        if not name.endswith(("embedding.weight", "embed_positions.weight")):
            nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
    return made.eval()


class CountingOperations(TorchOperations):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def qkv(self, *given: Any) -> Any:
        self.calls["qkv"] += 1
        return super().qkv(*given)

    def top_k(self, *given: Any) -> Any:
        self.calls["top_k"] += 1
        return super().top_k(*given)


def pair(model: Transducer) -> tuple[Transducer, Transducer, CountingOperations]:
    """The modules, the lowered network, and its counting operations."""
    lower._replace(model, lower._join_projections)
    lowered, counting = copy.deepcopy(model), CountingOperations()
    lower_for_operations(lowered, counting)
    assert isinstance(lowered.decoder, TopKLoweredDecoder)
    return model, lowered, counting


def sources(alone: bool = False) -> Batch:
    ids = torch.randint(4, VOCABULARY, (3, 7))
    mask = torch.arange(7) < torch.tensor([[7], [5], [2]])
    return Batch(Padded(ids * mask, mask))


@pytest.mark.parametrize("alone", [False, True], ids=["with memory", "alone"])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_the_modules_and_beams_share_caches(shape: str, alone: bool) -> None:
    plain, quick, counting = pair(build(SHAPES[shape], alone=alone))
    beams, batch = 3, sources()
    with torch.inference_mode():
        states = []
        for model in (plain, quick):
            first = model.advance(torch.ones(3, 1, dtype=torch.long), model.start(batch))
            states.append(model.reserve(first.state, 8, beams).repeat(beams))
        for number in range(6):
            tokens = torch.randint(4, VOCABULARY, (9, 1))
            one, two = (model.advance(tokens, state) for model, state in zip((plain, quick), states, strict=True))
            torch.testing.assert_close(two.logits, one.logits, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(two.hidden, one.hidden, atol=2e-4, rtol=1e-4)
            for name, value in one.state.past.items():
                assert torch.equal(two.state.past[name], value)
            order = (torch.randint(0, beams, (3, beams)) + torch.arange(3)[:, None] * beams).flatten()
            states = [one.state.reorder(order), two.state.reorder(order)]
            assert counting.calls["qkv"] == COMMON["layers"] * (number + 1)
        for before, after in zip(states[0].fixed["kv_cache"], states[1].fixed["kv_cache"], strict=True):
            torch.testing.assert_close(after, before, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
@pytest.mark.parametrize("shape", ["before", "after"])
def test_search_equals_the_modules(shape: str, strategy: Any) -> None:
    plain, quick, counting = pair(build(SHAPES[shape]))
    batch, longest = sources(), torch.tensor([9, 12, 40])
    found = [search(model, batch, strategy, max_lengths=longest) for model in (plain, quick)]
    assert [[one.ids for one in row] for row in found[0]] == [[one.ids for one in row] for row in found[1]]
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-3)
    assert counting.calls["qkv"] > 0


class Written:
    """A recording without a GPU: each kind of step is kept as it was first met, and writes into the same buffers."""

    def __init__(self, begin: Any, given: Any, *, capturable: bool) -> None:
        self.values = begin(given)
        self.buffers, self.steps = tensors_of(self.values), {}

    def capture_step(self, step: Any, length: int, kind: Any) -> None:
        run = partial(step, self.values, length)
        self.steps[kind] = SimpleNamespace(replay=lambda: copy_tensors_together(self.buffers, tensors_of(run())))

    def reset(self, begin: Any, given: Any) -> None:
        copy_tensors(self.buffers, tensors_of(begin(given)))


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
def test_captured_steps_are_keyed_by_suppressed_tokens(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", Written)
    plain, quick, counting = pair(build(SHAPES["after"]))
    plain.decoder.output.projection.bias.data[EOS] = quick.decoder.output.projection.bias.data[EOS] = 9.0  # type: ignore[union-attr]
    asked: dict[str, Any] = {"max_lengths": torch.tensor([9, 12, 20]), "processors": (MinLength(length=4),)}
    graphs, wanted = SearchGraphs(), search(plain, batch := sources(), strategy, **asked)
    for _ in range(2):
        found = search(quick, batch, strategy, **asked, graphs=graphs)
        assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in wanted]
    (recording,) = graphs.captured.values()
    assert list(recording.steps) == [(0, 1, EOS), (0, 1)]  # before the least length, and after
    assert all(len(row[0].ids) >= 5 for row in found)
    assert counting.calls["top_k"] > graphs.replayed > 0


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4)], ids=["greedy", "beam"])
def test_continuous_batching_equals_the_modules(strategy: Any, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.kernels.cuda_graph.SearchGraph", Written)
    plain, quick, counting = pair(build(SHAPES["after"]))
    longest = torch.tensor([9, 12, 40, 3, 20, 6, 14, 2, 5])
    asked = [SearchRequest(sources(), longest[first : first + 3]) for first in (0, 3, 6)]
    found = continuous_search(quick, asked, strategy, slots=4, graphs=SearchGraphs() if recorded else None)
    wanted = [row for one in asked for row in search(plain, one.batch, strategy, max_lengths=one.max_lengths)]
    assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in wanted]
    assert counting.calls["top_k"] > 0


def test_other_calls_run_the_modules() -> None:
    plain, quick, counting = pair(build(SHAPES["after"]))
    batch, tokens = sources(), torch.randint(4, VOCABULARY, (3, 5))
    with torch.inference_mode():
        states = [model.reserve(model.start(batch), 8, 1) for model in (plain, quick)]
        whole = [model.advance(tokens, model.start(batch), with_attention=True) for model in (plain, quick)]
        looked = quick.advance(tokens[:, :1], states[1])
        torch.testing.assert_close(looked.logits, plain.advance(tokens[:, :1], states[0]).logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(whole[1].logits, whole[0].logits)
    assert whole[1].attention is not None
    assert counting.calls["qkv"] == COMMON["layers"]


def test_many_rows_run_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    _, quick, counting = pair(build(SHAPES["before"]))
    monkeypatch.setattr(backends, "MAX_ROWS", 2)
    search(quick, sources(), Greedy(), max_lengths=torch.tensor([3, 3, 3]))
    assert not counting.calls["qkv"]


@pytest.mark.parametrize(
    "options",
    [{"position": Rotary}, {"norm_kind": "rms"}, {"token_mixer": SSRU}, {"heads": 4}, {"projections": "none"}],
)
def test_unsupported_decoders_are_not_lowered(options: dict[str, Any]) -> None:
    model = build({**options, "position": options.get("position", Sinusoidal)})
    lower._replace(model, lower._join_projections)
    lower_for_operations(model, TorchOperations())
    assert type(model.decoder) is TransformerDecoder  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", ["before", "after"])
def test_gpu_lowering_in_bf16_keeps_exact_positions(shape: str) -> None:
    model = build(SHAPES[shape])
    made = lower_for_gpu(model, "bf16")
    assert isinstance(made.decoder, LoweredDecoder)
    backend: Any = made.decoder.backend
    assert len(backend.blocks) == COMMON["layers"]
    assert {one.dtype for one in made.parameters()} == {torch.bfloat16}
    place: Any = made.decoder.position  # type: ignore[union-attr]
    assert place.frequencies.dtype == torch.float32  # in bf16 the places from 256 on would fall together
    asked = torch.arange(200, 203)[None]
    exact = model.decoder.position.add(torch.zeros(1, 3, WIDTH), asked)  # type: ignore[union-attr]
    torch.testing.assert_close(backend.tables.positions[200:203].float(), exact[0], atol=5e-3, rtol=0)  # type: ignore[union-attr]
    found = search(made, sources(), Greedy(), max_lengths=torch.tensor([6, 6, 6]))
    assert all(len(row[0].ids) == 6 or row[0].ids[-1] == EOS for row in found)
    assert type(lower_for_gpu(model, "fp32").decoder) is TransformerDecoder  # type: ignore[union-attr]


def test_auto_precision_reaches_the_fused_decoder_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is stood in for: the choice depends on the device alone, the weights stay on the CPU."""
    gpu = torch.device("cuda")
    for fast, dtype, kind in ((True, torch.bfloat16, TopKLoweredDecoder), (False, torch.float32, TransformerDecoder)):
        monkeypatch.setattr(lower, "has_fast_bf16", lambda device, fast=fast: fast)
        lowered: Any = lower_network(build(SHAPES["after"]), "auto", device=gpu)
        assert type(lowered.decoder) is kind
        assert {one.dtype for one in lowered.parameters()} == {dtype}
    monkeypatch.setattr(lower, "has_fast_bf16", lambda device: True)
    rotary: Any = lower_network(build({"position": Rotary}), "auto", device=gpu)  # the kernels do not support it
    assert type(rotary.decoder) is TransformerDecoder
    assert {one.dtype for one in rotary.parameters()} == {torch.float32}


def test_choice_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(lower, "has_fast_bf16", lambda device: True)
    assert lower.choose_precision("auto", cpu) == "fp32"
    assert lower.choose_precision("auto", cpu, "int8") == "int8"
    assert lower.choose_precision("auto", gpu, "int8") == "bf16"
    assert lower.choose_precision("fp32", gpu) == "fp32"
    with pytest.raises(InputError, match="int8"):
        lower.choose_precision("int8", gpu)
    with pytest.raises(InputError, match="unknown precision"):
        lower.choose_precision("int9", cpu)  # type: ignore[arg-type]
