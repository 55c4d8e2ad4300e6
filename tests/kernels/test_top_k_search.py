"""Search over the top-k tokens of a lowered decoder: the same hypotheses as over the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.contracts import LogitsProcessor, Strategy
from transduce.decoders.transformer import TransformerDecoder
from transduce.decoding import search as decoding_search
from transduce.decoding.continuous_batching import SearchRequest, continuous_search
from transduce.decoding.logits_processors import (
    ForcedBOS,
    ForcedEOS,
    MinLength,
    NoRepeatNgram,
    RepetitionPenalty,
    SuppressTokens,
)
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy, HuggingFaceBeam, Sample
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import BOS, EOS, PAD, Batch, Hypothesis, Padded, State, TopK, TopKRequest
from transduce.inference.decoder_program import TopKLoweredDecoder
from transduce.inference.lowering import lower_network
from transduce.kernels.native import library as libraries
from transduce.layers.embedding import Embedding, Output
from transduce.model import DecoderOnly, EncoderDecoder, Transducer

SIZE, LONGEST = 23, 14  # more than the first capacity: caches grow during the search
SOURCES = [[5, 6, 4, 6, 2], [4, 2], [6, 6, 2], [7, 8, 9, 4, 4, 4, 2]]
PREFIX = [[5], [6, 4, 5], [4, 4], []]
STRATEGIES: list[Strategy] = [
    Greedy(),
    Beam(width=4, length_penalty=1.0),
    HuggingFaceBeam(width=3, stop="bound"),
    HuggingFaceBeam(width=3, stop="full"),
]
PROCESSORS: list[list[LogitsProcessor]] = [
    [],
    [MinLength(length=3), SuppressTokens(tokens=[7, 8])],
    [SuppressTokens(tokens=[6], at=1), ForcedBOS(token=9)],
    [ForcedEOS(max_length=LONGEST)],
    [NoRepeatNgram(size=2), MinLength(length=2)],
    [RepetitionPenalty(penalty=1.3)],
]

SUPPRESSING = [*PROCESSORS[:2], [SuppressTokens(tokens=[7, 8])]]


@pytest.fixture(autouse=True)
def _caches_grow_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_search, "INITIAL_CAPACITY", 8)


def processor_names(processors: list[LogitsProcessor]) -> str:
    return "+".join(type(one).__name__ for one in processors) or "none"


native = pytest.mark.skipif(libraries.library() is None, reason="there is no C compiler")


def network(kind: str = "both", ending: float = 1.5) -> Transducer:
    """`ending` is added to the logit of </s>, so that hypotheses end at different lengths."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "ff_width": 24}
    table, output = Embedding(SIZE, 16), Output(16, SIZE)
    with torch.no_grad():
        output.projection.bias[EOS] += ending
    if kind == "alone":
        return DecoderOnly(TransformerDecoder(table, output, 0, **sizes)).eval()
    return EncoderDecoder(TransformerEncoder(table, **sizes), TransformerDecoder(table, output, 16, **sizes)).eval()


def hypotheses(
    model: Transducer,
    strategy: Strategy,
    processors: Sequence[LogitsProcessor],
    prefix: Padded | None = None,
    best: int | None = None,
) -> list[list[Hypothesis]]:
    batch = Batch(Padded.from_rows(SOURCES))
    longest = torch.full((len(SOURCES),), LONGEST)
    return search(model, batch, strategy, max_lengths=longest, processors=processors, prefix=prefix, nbest=best)


@native
@pytest.mark.parametrize("kind", ["both", "alone"])
@pytest.mark.parametrize("processors", PROCESSORS, ids=processor_names)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: f"{type(one).__name__}-{getattr(one, 'stop', '')}")
def test_a_top_k_search_equals_a_search_over_all_logits(
    kind: str, processors: list[LogitsProcessor], strategy: Strategy
) -> None:
    plain = network(kind)
    made = lower_network(plain, "fp32")
    assert made.top_k is not None
    for prefix in (None, Padded.from_rows(PREFIX)):
        for before, after in zip(
            hypotheses(plain, strategy, processors, prefix), hypotheses(made, strategy, processors, prefix), strict=True
        ):
            assert [one.ids for one in after] == [one.ids for one in before]
            assert [one.complete for one in after] == [one.complete for one in before]
            for one, other in zip(after, before, strict=True):
                assert one.token_scores == pytest.approx(other.token_scores, rel=1e-4, abs=1e-4)


def counted(model: Transducer, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of `top_k` and `advance` of the decoder from now on, and active rows of `top_k`."""
    calls = {"top_k": 0, "advance": 0, "rows": 0}
    kind = type(model.decoder)  # type: ignore[arg-type]
    top_k: Callable[..., TopK] = kind.top_k
    advance = kind.advance

    def counted_top_k(self: Any, tokens: torch.Tensor, state: State, request: TopKRequest) -> TopK:
        calls["top_k"] += 1
        calls["rows"] += int(request.active.sum())
        return top_k(self, tokens, state, request)

    def advanced(self: Any, *given: Any, **named: Any) -> Any:
        calls["advance"] += 1
        return advance(self, *given, **named)

    monkeypatch.setattr(kind, "top_k", counted_top_k)
    monkeypatch.setattr(kind, "advance", advanced)
    return calls


@native
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_greedy_and_beam_search_need_no_logits(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lower_network(network(), precision)
    calls = counted(made, monkeypatch)
    found = hypotheses(made, Greedy(), [MinLength(length=2)])
    assert calls["advance"] == 0
    assert calls["top_k"] == max(len(line[0].ids) for line in found)
    assert calls["rows"] == sum(len(line[0].ids) for line in found)  # finished rows are skipped
    hypotheses(made, Beam(width=4), [], best=1)
    assert calls["advance"] == 0
    hypotheses(made, Sample(width=2), [])
    assert calls["advance"] > 0


@native
def test_unsupported_decoders_have_no_top_k_step() -> None:
    """The kernels have no RMS norm, and bf16 linear layers are those of torch."""
    assert lower_network(network(), "bf16").top_k is None or not torch.backends.mkldnn.is_available()
    table = Embedding(SIZE, 16)
    sizes: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "norm_kind": "rms"}
    other = EncoderDecoder(
        TransformerEncoder(table, **sizes), TransformerDecoder(table, Output(16, SIZE), 16, **sizes)
    ).eval()
    assert lower_network(other, "int8").top_k is None
    assert isinstance(lower_network(network(), "int8").decoder, TopKLoweredDecoder)


def test_without_native_kernels_there_is_no_top_k_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libraries.SWITCH, "0")
    plain = network()
    made = lower_network(plain, "fp32")
    assert made.top_k is None
    for before, after in zip(hypotheses(plain, Beam(width=3), []), hypotheses(made, Beam(width=3), []), strict=True):
        assert before[0].ids == after[0].ids


@native
def test_one_result_needs_fewer_rows_than_all_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cannot rank first are pruned: the same best hypothesis, from fewer rows."""
    made = lower_network(network(ending=2.5), "fp32")
    calls = counted(made, monkeypatch)
    several = hypotheses(made, Beam(width=4), [])
    every = calls["rows"]
    one = hypotheses(made, Beam(width=4), [], best=1)
    assert calls["rows"] - every < every
    assert [line[0] for line in one] == [line[0] for line in several]


KINDS: list[Callable[[int], LogitsProcessor]] = [
    lambda number: MinLength(length=number),
    lambda number: NoRepeatNgram(size=number),
    lambda number: RepetitionPenalty(penalty=1.0 + number),
    lambda number: ForcedBOS(token=4 + number),
    lambda number: ForcedEOS(max_length=number + 1),
    lambda number: SuppressTokens(tokens=[4, 5 + number]),
    lambda number: SuppressTokens(tokens=[4, 5 + number], at=number),
]


@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 5), st.integers(0, 99))
def test_suppressed_tokens_of_a_processor_are_those_that_it_masks(
    kind: Callable[[int], LogitsProcessor], number: int, length: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    rule, scores = kind(number), torch.randn(3, 12, generator=draw)
    generated = torch.randint(4, 12, (3, length), generator=draw)
    history = torch.cat((torch.full((3, 6 - length), PAD), generated), 1)
    suppressed = rule.suppressed(length)
    if suppressed is None:
        return
    wanted = scores.clone()
    wanted[:, list(suppressed)] = -torch.inf
    assert torch.equal(rule.apply(scores.clone(), history), wanted)


@pytest.mark.parametrize("made", [False, pytest.param(True, marks=native)], ids=["plain", "packed"])
def test_a_search_does_not_change_its_batch(made: bool) -> None:
    """Finished sources are overwritten in place, but never the input."""
    model = lower_network(network(), "fp32") if made else network()
    source = Padded.from_rows(SOURCES)
    kept = Padded(source.values.clone(), source.mask.clone())
    search(model, Batch(source), Beam(width=3), max_lengths=torch.tensor([2, 9, 3, 12]))
    assert torch.equal(source.values, kept.values)
    assert torch.equal(source.mask, kept.mask)
    assert BOS not in source.values


@native
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("processors", SUPPRESSING, ids=["free", "by length", "always"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
def test_top_k_steps_with_rows_at_different_positions(
    strategy: Strategy, processors: list[LogitsProcessor], precision: Any
) -> None:
    """New sources enter free slots: the kernels read the position of each row, and skip rows that are finished."""
    model = lower_network(network(), precision)
    assert model.top_k is not None
    rows = [*SOURCES, *SOURCES[::-1], *SOURCES[1:]]
    longest = torch.tensor([LONGEST, 3, 9, 5, LONGEST, 1, 7, LONGEST, 4, 12, 2])
    request = [
        SearchRequest(Batch(Padded.from_rows(rows[first : first + 2])), longest[first : first + 2])
        for first in range(0, len(rows), 2)
    ]
    found = continuous_search(model, request, strategy, slots=4, processors=processors)
    wanted = search(model, Batch(Padded.from_rows(rows)), strategy, max_lengths=longest, processors=processors)
    for one, other in zip(found, wanted, strict=True):
        assert [line.ids for line in one] == [line.ids for line in other]
        assert [line.score for line in one] == pytest.approx([line.score for line in other], abs=1e-3)
