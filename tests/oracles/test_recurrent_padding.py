"""Recurrent stacks over padding, as on a GPU, against torch's packed sequences: outputs, states and gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from transduce.kernels import dispatch
from transduce.kernels.recurrent import accepts_padding
from transduce.layers.recurrent import CELLS, Cell, RecurrentStack

WIDTH, INPUT_WIDTH = 6, 5
EXACT = {"rtol": 0, "atol": 1e-12}


def run(stack: RecurrentStack, lengths: list[int], packed: bool, cells: bool = True) -> list[torch.Tensor]:
    """Outputs, states, and the gradients of inputs, initial states and weights."""
    torch.manual_seed(5)
    rows, longest = len(lengths), max(lengths) + 1  # the last column is padding in every row
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    values = torch.randn(rows, longest, INPUT_WIDTH, dtype=torch.double, requires_grad=True)
    first = tuple(
        tuple(torch.randn(rows, WIDTH, dtype=torch.double, requires_grad=True) for _ in range(stack.tensors))
        for _ in stack.layers
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "runs_asynchronously", lambda x: not packed)
        outputs, state = stack(values, first, mask, with_cells=cells)
    ends = [part for layer in state for part in layer]
    loss = (outputs.square() * torch.randn(outputs.shape)).sum()
    loss = loss + sum((part * torch.randn(part.shape)).sum() for part in (layer[0] for layer in state))
    if cells:
        loss = loss + sum(part.sin().sum() for part in ends)
    known = [values, *(part for layer in first for part in layer), *stack.parameters()]
    return [outputs, *ends, *torch.autograd.grad(loss, known)]


@pytest.mark.parametrize(
    ("cell", "layers", "both", "residual"), list(product(CELLS, (1, 2), (False, True), (False, True)))
)
def test_padding_does_not_change_recurrent_states(cell: Cell, layers: int, both: bool, residual: bool) -> None:
    torch.manual_seed(3)
    stack = RecurrentStack(INPUT_WIDTH, WIDTH, cell, layers, bidirectional=both, residual=residual).double()
    for one, other in zip(*(run(stack, [4, 1, 7, 7], packed) for packed in (True, False)), strict=True):
        assert_close(one, other, **EXACT)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(list(CELLS)))
def test_recurrent_states_for_any_lengths(lengths: list[int], cell: Cell) -> None:
    stack = RecurrentStack(INPUT_WIDTH, WIDTH, cell, 2, bidirectional=True).double()
    for one, other in zip(*(run(stack, lengths, packed, cells=False) for packed in (True, False)), strict=True):
        assert_close(one, other, **EXACT)


def test_recurrent_padding_in_single_precision() -> None:
    """Saturated gates are exactly 0 or 1, so padding changes the cell state of an LSTM by rounding alone."""
    stack = RecurrentStack(INPUT_WIDTH, WIDTH, "lstm", 1)
    values, first = torch.randn(2, 9, INPUT_WIDTH), stack.zeros(2, torch.zeros(1))
    found = []
    for columns in (9, 4):
        mask = torch.arange(columns).expand(2, -1) < 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "runs_asynchronously", lambda x: True)
            found.append(stack(values[:, :columns], first, mask)[1][0])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=0, atol=1e-6)


def test_choice_between_packed_and_padded_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, values, mask = RecurrentStack(4, 4, "gru", 1).layers[0], torch.zeros(1, 2, 4), torch.ones(1, 2).bool()
    hidden = (torch.zeros(1, 1, 4),)
    assert not accepts_padding(layer, values, hidden, mask, True)  # on a CPU packing takes fewer steps
    monkeypatch.setattr(dispatch, "runs_asynchronously", lambda x: True)
    assert accepts_padding(layer, values, hidden, mask, True)
    assert not accepts_padding(layer, values, hidden, None, True)
    assert not accepts_padding(torch.nn.Identity(), values, hidden, mask, True)  # not one of torch's cells
    layer.register_forward_hook(lambda *given: None)  # as an adapter does
    assert not accepts_padding(layer, values, hidden, mask, True)
