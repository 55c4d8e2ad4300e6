"""Lowered models of the registries, in every precision: logits and outputs equal those of the modules."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contract_fixtures import shared, take_turns
from torch import nn

from transduce.decoders.transformer import TransformerDecoder
from transduce.decoding import search as decoding_search
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Padded
from transduce.inference.decoder_program import JointSelfAttention
from transduce.inference.lowering import NativeBackend, NativeEncoderBlock, OperationsBackend, Precision, lower_network
from transduce.kernels.linear import PackedLinear
from transduce.layers.embedding import Embedding, Output
from transduce.model import EncoderDecoder, Transducer

APART = {"fp32": 1e-5, "int8": 0.1}  # share of the size of all logits
CHOICES = ("hard", "gumbel", "sampled", "monotonic")


@dataclass(frozen=True)
class Lowered:
    """The lowered models of a case, and the logits of the model before it was lowered."""

    before: torch.Tensor
    fp32: Transducer
    int8: Transducer


@pytest.fixture(scope="module")
def lowered(case: str, batch: Batch) -> Lowered:
    """Once for all laws of a case, which only read them."""
    model = shared(case)
    with torch.inference_mode():
        before = model(batch).logits
    return Lowered(before, lower_network(model, "fp32"), lower_network(model, "int8"))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_logits_change_by_rounding_alone(case: str, lowered: Lowered, batch: Batch, precision: Precision) -> None:
    if precision == "int8" and any(name in case for name in CHOICES):
        pytest.skip("an attention that chooses one row may choose another after the least rounding")
    with torch.inference_mode():
        before, after = lowered.before.float(), getattr(lowered, precision)(batch).logits.float()
    seen = before > -1e3  # what may never be said has no size
    assert (after - before)[seen].norm() <= APART[precision] * before[seen].norm()


def test_no_matrix_is_left_out(lowered: Lowered) -> None:
    made = lowered.int8
    kinds = (nn.Linear, nn.RNNBase, nn.Dropout)
    left = [part for part in made.modules() if isinstance(part, kinds) and getattr(part, "out_features", 2) > 1]
    assert not left
    assert any(isinstance(part, PackedLinear) for part in made.modules())  # every model has an output layer


def test_projections_are_read_once(lowered: Lowered, batch: Batch) -> None:
    """A joint projection that were asked three times would give the same numbers, three times as slowly."""
    made = lowered.int8
    joint = [part for part in made.decoder.modules() if isinstance(part, JointSelfAttention)]  # type: ignore[union-attr]
    calls: list[int] = []
    with torch.inference_mode(), ExitStack() as hooks:
        state = made.start(batch)
        for part in joint:
            hooks.enter_context(part.qkv_proj.register_forward_hook(lambda *_: calls.append(1)))
        made.advance(batch.decoder_inputs.values[:, :1], state)
    assert len(calls) == len(joint)


def test_lowering_does_not_change_the_given_model(model: Transducer, lowered: Lowered, batch: Batch) -> None:
    with torch.inference_mode():
        assert torch.equal(model(batch).logits, lowered.before)


def test_a_packed_search_finds_the_same(
    case: str, model: Transducer, lowered: Lowered, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lean steps over caches with room, against the plain network; a single row has kernels of its own."""
    monkeypatch.setattr(decoding_search, "INITIAL_CAPACITY", 4)
    strategy = take_turns(case, (Greedy(), Beam(width=3)))
    longest = torch.full((batch.size,), 6)  # more than the first room: caches grow on the way
    before = search(model, batch, strategy, max_lengths=longest)
    for rows in ([0, 1, 2, 3], [0]):
        some = batch.select(torch.tensor(rows))
        after = search(lowered.fp32, some, strategy, max_lengths=longest[: len(rows)])
        for plain, packed in zip(before[: len(rows)], after, strict=True):
            twin = next(one for one in plain if one.ids == packed[0].ids)  # two paths may be as good as each other
            assert twin.rank == pytest.approx(plain[0].rank, abs=1e-5)
            assert packed[0].token_scores == pytest.approx(twin.token_scores, abs=1e-3)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("native", ["1", "0"])
def test_decoding_steps_run_on_the_backend(
    norm: str, precision: Precision, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that fell back to the modules would find the same, and take longer."""
    monkeypatch.setenv("TRANSDUCE_NATIVE", native)
    table = Embedding(20, 16)
    options: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "ff_width": 24, "norm": norm}
    decoder = TransformerDecoder(table, Output(16, 20), 16, **options)
    network = lower_network(EncoderDecoder(TransformerEncoder(table, **options), decoder), precision)
    source = Padded.from_rows([[5, 6, 7, 2]])
    lowered: Any = network.decoder
    assert isinstance(lowered.backend, NativeBackend if native == "1" else OperationsBackend)
    encoded = sum(isinstance(part, NativeEncoderBlock) for part in network.encoder.modules())
    assert encoded == (2 if native == "1" else 0)
    called: list[nn.Module] = []
    for block in lowered.layers:
        for part in (block.self_attention, block.cross_attention, block.feed_forward):
            assert part is not None
            part.register_forward_pre_hook(lambda module, _: called.append(module))
    search(network, Batch(source), Greedy(), max_lengths=torch.tensor([6]))
    # The native library reads <s> too; else the modules of each block read it, and no other token.
    assert len(called) == (0 if native == "1" else 6)
