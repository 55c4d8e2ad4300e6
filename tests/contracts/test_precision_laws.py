"""Every model of the registries, made ready for generation, says what it said before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from transduce.contracts import Strategy
from transduce.decoders.transformer import TransformerDecoder
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import Batch, Padded
from transduce.inference.lowering import Precision, lower_network
from transduce.inference.lowering.backends import NativeBackend, NativeEncoderBlock, OperationsBackend
from transduce.inference.lowering.joint_projections import JointSelfAttention
from transduce.kernels.packed_linear import PackedLinear
from transduce.layers.embedding import Embedding, Output
from transduce.model import EncoderDecoder, Transducer

APART = {"fp32": 1e-5, "int8": 0.1}  # share of the size of all logits
CHOICES = ("hard", "gumbel", "sampled", "monotonic")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_logits_stay(case: str, model: nn.Module, batch: Batch, precision: str) -> None:
    if precision == "int8" and any(name in case for name in CHOICES):
        pytest.skip("an attention that chooses one row may choose another after the least rounding")
    model = model.eval()
    made = lower_network(model, precision)
    with torch.inference_mode():
        before, after = model(batch).logits.float(), made(batch).logits.float()
    seen = before > -1e3  # what may never be said has no size
    assert (after - before)[seen].norm() <= APART[precision] * before[seen].norm()


def test_no_matrix_is_left_out(model: nn.Module) -> None:
    made = lower_network(model, "int8")
    kinds = (nn.Linear, nn.RNNBase, nn.Dropout)
    left = [part for part in made.modules() if isinstance(part, kinds) and getattr(part, "out_features", 2) > 1]
    assert not left
    assert any(isinstance(part, PackedLinear) for part in made.modules())  # every model has an output layer


def test_projections_are_read_once(model: nn.Module, batch: Batch) -> None:
    """A joint projection that were asked three times would give the same numbers, three times as slowly."""
    made = lower_network(model.eval(), "int8")
    joint = [part for part in made.decoder.modules() if isinstance(part, JointSelfAttention)]  # type: ignore[union-attr]
    calls = []
    with torch.inference_mode():
        state = made.start(batch)  # type: ignore[operator]
        for part in joint:
            part.qkv_proj.register_forward_hook(lambda *_: calls.append(1))
        made.advance(batch.decoder_inputs.values[:, :1], state)  # type: ignore[operator]
    assert len(calls) == len(joint)


def test_the_model_given_stays_as_it_is(model: nn.Module, batch: Batch) -> None:
    model = model.eval()
    with torch.inference_mode():
        before = model(batch).logits
        lower_network(model, "int8")
        assert torch.equal(model(batch).logits, before)


@pytest.mark.parametrize("rows", ["all", "one"])
@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=3)], ids=["greedy", "beam"])
def test_a_packed_search_finds_the_same(model: Transducer, batch: Batch, strategy: Strategy, rows: str) -> None:
    """Lean steps over caches with room, against the plain network; a single row has kernels of its own."""
    batch = batch if rows == "all" else batch.select(torch.tensor([0]))
    longest = torch.full((batch.size,), 40)  # more than the first room: caches grow on the way
    before = search(model.eval(), batch, strategy, max_lengths=longest)
    after = search(lower_network(model, "fp32"), batch, strategy, max_lengths=longest)
    for plain, packed in zip(before, after, strict=True):
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
