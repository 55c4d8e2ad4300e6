"""Open searches of the native library: the hypotheses of `search`, whoever enters or leaves beside a source."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from transduce.attention.positions import Learned, NoPosition, Rotary
from transduce.contracts import LogitsProcessor, Strategy
from transduce.decoders.transformer import TransformerDecoder
from transduce.decoding.continuous_batching import SearchShape
from transduce.decoding.logits_processors import MinLength, RepetitionPenalty, SuppressTokens
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy, HuggingFaceBeam, Sample
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import EOS, Batch, Hypothesis, Padded
from transduce.inference import native_search
from transduce.inference.lowering import Precision, lower_network
from transduce.inference.native_search import NativeSearch, native_encoder_decoder
from transduce.kernels.native import library as libraries
from transduce.layers.embedding import Embedding, Output
from transduce.model import DecoderOnly, EncoderDecoder, Transducer

pytestmark = pytest.mark.skipif(libraries.library() is None, reason="there is no C compiler")

SIZE, COLUMNS, LONGEST = 23, 16, 24
SOURCES = [[random.Random(seed).randrange(4, SIZE) for _ in range(1 + seed % 9)] for seed in range(14)]
SIZES: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "ff_width": 40}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "post": {"norm": "post", "embedding_norm": True, "activation": "gelu"},
    "gated": {"gated": True, "activation": "silu", "position": Learned},
    "unordered": {"position": NoPosition, "bias": False},
}


def network(ending: float = 1.0, precision: Precision = "fp32", **options: Any) -> Transducer:
    """A lowered network; `ending` is added to the logit of </s>, so that hypotheses end at different lengths."""
    torch.manual_seed(5)
    sizes = {**SIZES, **options}
    output = Output(32, SIZE)
    with torch.no_grad():
        output.projection.bias[EOS] += ending
    encoder = TransformerEncoder(Embedding(SIZE, 32), **sizes)
    plain = EncoderDecoder(encoder, TransformerDecoder(Embedding(SIZE, 32), output, 32, **sizes)).eval()
    return lower_network(plain, precision)


def opened(
    model: Transducer, strategy: Strategy, slots: int = 3, nbest: int | None = None, **more: Any
) -> NativeSearch:
    found = _open(model, strategy, slots, nbest, **more)
    assert found is not None
    return found


def _open(
    model: Transducer,
    strategy: Strategy,
    slots: int = 3,
    nbest: int | None = None,
    processors: list[LogitsProcessor] | None = None,
    interrupt: np.ndarray | None = None,
    prefix_columns: int = 0,
) -> NativeSearch | None:
    interrupt = np.zeros(1, np.int64) if interrupt is None else interrupt
    shape = SearchShape(slots, COLUMNS, prefix_columns, LONGEST)
    options: dict[str, Any] = {"processors": processors or [], "nbest": nbest, "interrupt": interrupt}
    return NativeSearch.open(native_encoder_decoder(model), model, strategy, shape, **options)


def max_length(number: int) -> int:
    return LONGEST if number % 3 else 2 + number % 5


def expected(model: Transducer, strategy: Strategy, number: int, **options: Any) -> list[Hypothesis]:
    """The hypotheses of one source, searched alone."""
    batch = Batch(source=Padded.from_rows([[*SOURCES[number], EOS]]))
    return search(model, batch, strategy, max_lengths=torch.tensor([max_length(number)]), **options)[0]


def run(searching: NativeSearch, seed: int = 0) -> dict[int, list[Hypothesis]]:
    """All sources, which enter in groups of random sizes between the steps of others."""
    rng, left, found = random.Random(seed), list(range(len(SOURCES))), dict[int, list[Hypothesis]]()
    while left or searching.active:
        group = left[: rng.randint(0, searching.free)]
        left = left[len(group) :]
        if group:
            searching.add([SOURCES[one] for one in group], [max_length(one) for one in group], group)
        searching.advance(rng.randint(1, 4))
        found |= searching.take_results()
    return found


def assert_equal(found: list[Hypothesis], wanted: list[Hypothesis], tolerance: float = 1e-4) -> None:
    assert [one.ids for one in found] == [one.ids for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.token_scores == pytest.approx(other.token_scores, abs=tolerance)
        assert one.rank == pytest.approx(other.rank, abs=tolerance)
        assert one.complete == other.complete


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=4), Beam(width=5, length_penalty=0.0)], ids=["1", "4", "5"])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_hypotheses_are_those_of_a_search_alone(
    options: dict[str, Any], strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_search, "FIRST_SLOTS", 1)  # slots and caches grow in the middle of searches
    monkeypatch.setattr(native_search, "FIRST_CAPACITY", 4)
    model = network(**options)
    found = run(opened(model, strategy))
    for number in range(len(SOURCES)):
        assert_equal(found[number], expected(model, strategy, number))


def test_int8_hypotheses_are_those_of_a_search_alone() -> None:
    model = network(precision="int8")
    found = run(opened(model, Beam(width=3)))
    for number in range(len(SOURCES)):
        assert_equal(found[number], expected(model, Beam(width=3), number))


@pytest.mark.parametrize("nbest", [1, 2])
def test_fewer_hypotheses_are_the_best_ones(nbest: int) -> None:
    model = network(ending=2.0)
    found = run(opened(model, Beam(width=4), nbest=nbest), seed=3)
    for number in range(len(SOURCES)):
        wanted = expected(model, Beam(width=4), number, nbest=nbest)
        assert len(found[number]) <= nbest
        assert_equal(found[number], wanted[:nbest])


def test_results_are_the_same_bits_whatever_the_neighbours() -> None:
    model = network()
    alone, together = run(opened(model, Beam(width=4), slots=1)), run(opened(model, Beam(width=4), slots=12), seed=7)
    assert alone == together


def test_padding_of_the_memory_is_not_read() -> None:
    """The columns for longer sources, which may have held one."""
    model = network()
    searching = opened(model, Greedy(), slots=len(SOURCES))
    searching._make_room(len(SOURCES))
    for memory in searching._search._memories:
        memory.fill(np.nan)
    found = run(searching)
    for number in range(len(SOURCES)):
        assert_equal(found[number], expected(model, Greedy(), number))


def test_suppressed_tokens_are_never_generated() -> None:
    model, processors = network(), [SuppressTokens(tokens=[5, 6, 7])]
    found = run(opened(model, Beam(width=4), processors=processors))
    for number in range(len(SOURCES)):
        assert_equal(found[number], expected(model, Beam(width=4), number, processors=processors))


def test_cancelled_sources_leave_the_others_as_they_are() -> None:
    model = network(ending=-1.0)
    searching = opened(model, Beam(width=4), slots=4)
    searching.add(SOURCES[:4], [LONGEST] * 4, range(4))
    searching.advance(2)
    searching.cancel([1, 2, 99])
    assert searching.active == 2
    searching.add(SOURCES[4:6], [max_length(4), max_length(5)], [4, 5])  # in the slots that are free now
    while searching.active:
        searching.advance()
    found = searching.take_results()
    assert sorted(found) == [0, 3, 4, 5]
    assert_equal(found[4], expected(model, Beam(width=4), 4))
    assert_equal(found[5], expected(model, Beam(width=4), 5))


def test_a_search_without_sources_keeps_no_large_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    searching = opened(network(), Beam(width=4))
    before = run(searching)
    assert searching._search.slots
    monkeypatch.setattr(native_search, "KEPT_BYTES", 0)
    assert run(searching) == before
    assert searching._search.slots == 0
    assert run(searching) == before


def test_an_interrupted_search_takes_one_step() -> None:
    interrupt = np.ones(1, np.int64)
    searching = opened(network(ending=-30.0), Greedy(), interrupt=interrupt)
    searching.add(SOURCES[:1], [LONGEST], [0])
    for length in range(1, 4):
        assert not searching.advance()
        assert len(searching.certain(0)) == length
    interrupt[0] = 0
    assert not searching.advance(10)
    assert len(searching.certain(0)) == 13


def test_certain_tokens_begin_the_output() -> None:
    searching, before = opened(network(), Beam(width=4)), list[list[tuple[int, float]]]()
    searching.add(SOURCES[8:9], [LONGEST], [8])
    while not searching.advance(1):
        before.append(searching.certain(8))
    found = searching.take_results()
    tokens = list(zip(found[8][0].ids, found[8][0].token_scores, strict=True))
    assert before
    for one in before:
        assert tokens[: len(one)] == one
    assert searching.certain(8) == []


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": Sample(width=2)},
        {"strategy": HuggingFaceBeam(width=3)},
        {"processors": [RepetitionPenalty(penalty=1.3)]},
        {"processors": [MinLength(length=3)]},
        {"prefix_columns": 8},
    ],
    ids=["sample", "huggingface_beam", "repetition_penalty", "min_length", "prefix"],
)
def test_other_searches_are_left_to_the_modules(options: dict[str, Any]) -> None:
    assert _open(network(), **{"strategy": Beam(width=4), **options}) is None


def test_other_networks_are_left_to_the_modules() -> None:
    decoder = DecoderOnly(TransformerDecoder(Embedding(SIZE, 32), Output(32, SIZE), 0, **SIZES)).eval()
    for model in (lower_network(decoder, "fp32"), network(position=Rotary), network(window=2)):
        assert native_encoder_decoder(model) is None
