"""PackedLinear matrices against plain arithmetic, and a trained model in every precision through the whole line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import Command, colour_pairs
from torch import nn

import transduce
from transduce.errors import InputError
from transduce.inference.decoder_program import LoweredDecoder
from transduce.inference.lowering import PackedRecurrent, lower_network
from transduce.kernels.linear import PackedBFloat16, PackedFloat32, PackedInt8, has_vnni


@given(rows=st.integers(1, 9), width=st.integers(1, 70), outputs=st.integers(1, 40), seed=st.integers(0, 99))
def test_8_bit_products_differ_by_their_rounding_only(rows: int, width: int, outputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer, values = nn.Linear(width, outputs), 3 * torch.randn(rows, width)
    step = (values.max().clamp(min=0) - values.min().clamp(max=0)) / (255 if has_vnni() else 127)
    scales = layer.weight.abs().amax(1) / 127
    bound = values.abs().sum(1)[:, None] * scales / 2 + step * (layer.weight.abs() + scales[:, None]).sum(1)
    with torch.inference_mode():
        assert bool(((PackedInt8(layer)(values) - layer(values)).abs() <= bound + 1e-5).all())


@given(rows=st.integers(1, 9), width=st.integers(1, 70), outputs=st.integers(1, 40), bias=st.booleans())
def test_packed_matrices_equal_linear_layers(rows: int, width: int, outputs: int, bias: bool) -> None:
    layer, values = nn.Linear(width, outputs, bias=bias), torch.randn(rows, 2, width)
    with torch.inference_mode():
        wanted = layer(values)
        torch.testing.assert_close(PackedFloat32(layer)(values), wanted, rtol=1e-5, atol=1e-5)
        made = PackedBFloat16(layer)(values)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, wanted, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_packed_cells_are_torchs_own(kind: type[nn.RNNBase], both: bool, padded: bool) -> None:
    layer = kind(6, 5, batch_first=True, bidirectional=both)
    values, state = torch.randn(3, 4, 6), torch.randn(1 + both, 3, 5)
    first = (state, state + 1) if kind is nn.LSTM else state
    lengths = torch.tensor([2, 4, 1])
    read = nn.utils.rnn.pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
    with torch.inference_mode():
        wanted, wanted_last = layer(read if padded else values, first)
        made, last = PackedRecurrent(layer, PackedFloat32)(read if padded else values, first)
    if padded:
        wanted, made = wanted.data, made.data
    torch.testing.assert_close(made, wanted)
    for one, other in zip(last, wanted_last, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "int8"])
def test_a_trained_model_says_the_same(attention_run: Path, model: transduce.Model, precision: str) -> None:
    lines = [source for source, _ in colour_pairs(60, seed=5)]
    made = transduce.load(attention_run, precision=precision)
    assert made.parameters == model.parameters
    plain, found = model.generate(lines), made.generate(lines)
    same = sum(one.text == other.text for one, other in zip(plain, found, strict=True))
    assert same >= len(lines) * (0.95 if precision in ("bf16", "int8") else 1)
    apart = [abs(one.score - other.score) for one, other in zip(plain, found, strict=True) if one.text == other.text]
    assert max(apart) <= (0.5 if precision in ("bf16", "int8") else 1e-4)


def test_a_transformer_keeps_its_choices(transformer_run: Path) -> None:
    lines = [source for source, _ in colour_pairs(20, seed=6)]
    source, target = (torch.randint(4, 12, (20, length)) for length in (9, 7))
    plain, made = transduce.load(transformer_run), transduce.load(transformer_run, precision="int8")
    before, after = (one.logits(source=source, target=target) for one in (plain, made))
    assert float((before.argmax(-1) == after.argmax(-1)).float().mean()) >= 0.9
    assert len(made.generate(lines)) == len(lines)
    assert made.generate(lines[:1])[0].attention is not None


def test_workers_change_nothing(model: transduce.Model) -> None:
    lines = [source for source, _ in colour_pairs(40, seed=7)]
    threads = torch.get_num_threads()
    alone = model.generate(lines, batch_tokens=40)
    assert model.generate(lines, batch_tokens=40, workers=3) == alone
    assert torch.get_num_threads() == threads
    with pytest.raises(InputError, match="0 workers"):
        model.generate(lines, workers=0)


def test_on_the_command_line(command: Command, attention_run: Path) -> None:
    lines = b"red blue\n\ngreen white\n"
    plain = command("generate", attention_run, stdin=lines)
    assert command("generate", attention_run, "--precision", "int8", "--workers", "2", stdin=lines).out == plain.out
    wrong = command("generate", attention_run, "--precision", "int9", stdin=lines)
    assert wrong.code == 2
    assert "int9" in wrong.err
    assert "Traceback" not in wrong.err


def test_packed_weights_have_no_gradients(model: transduce.Model) -> None:
    assert not any(part.requires_grad for part in lower_network(model.network, "int8").parameters())


def test_a_loaded_model_generates_with_a_lowered_copy_that_follows_its_weights(transformer_run: Path) -> None:
    """The outputs are those of the modules, before and after a change of the weights."""
    texts = [source for source, _ in colour_pairs(6)]
    model = transduce.load(transformer_run, device="cpu")
    modules = transduce.Model(model.network, model.source, model.target, model.recipe)
    assert any(isinstance(part, LoweredDecoder) for part in model.lowered.modules())
    assert modules.lowered is model.network
    for _ in range(2):
        found, expected = (one.generate(texts, beam=3) for one in (model, modules))
        assert [one.text for one in found] == [one.text for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)
        with torch.no_grad():
            model.network.decoder.output.projection.weight.neg_()
    with torch.no_grad():  # and a hook on a module is not left out
        calls: list[int] = []
        model.network.decoder.register_forward_hook(lambda *_: calls.append(1))
    assert model.lowered is model.network
