"""Stacks of recurrent cells against torch.nn's, with copied weights, to 1e-6: whole and step by step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from transduce.layers.recurrent import CELLS, RecurrentStack

IN, WIDTH, ROWS, STEPS = 5, 6, 3, 7
EXACT = {"rtol": 0, "atol": 1e-6}
SINGLE = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}
PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


def test_every_cell_has_an_oracle():
    assert sorted(SINGLE) == sorted(CELLS)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_stack_against_torch(cell, bidirectional, layers):
    """Padded rows together against each row alone, from a state that is not zero; the end of every layer too."""
    stack = RecurrentStack(IN, WIDTH, cell, layers, bidirectional=bidirectional).eval()
    ways = 1 + bidirectional
    theirs = CELLS[cell](IN, WIDTH // ways, num_layers=layers, batch_first=True, bidirectional=bidirectional)
    for number, layer in enumerate(stack.layers):
        for name, value in layer.named_parameters():
            getattr(theirs, name.replace("_l0", f"_l{number}")).data.copy_(value)
    lengths = [STEPS, 1, 4]
    values, mask = torch.randn(ROWS, STEPS, IN), torch.arange(STEPS) < torch.tensor(lengths)[:, None]
    begin = tuple(tuple(torch.randn(ROWS, WIDTH) for _ in range(stack.tensors)) for _ in range(layers))
    got, ends = stack(values, begin, mask)
    for row, length in enumerate(lengths):
        first = tuple(
            torch.cat([layer[part][row].view(ways, 1, -1) for layer in begin]) for part in range(stack.tensors)
        )
        expected, last = theirs(values[row : row + 1, :length], first if cell == "lstm" else first[0])
        assert_close(got[row, :length], expected[0], **EXACT)
        for part, end in enumerate(last if cell == "lstm" else (last,)):
            own = torch.cat([layer[part][row].view(ways, 1, -1) for layer in ends])
            assert_close(own, end, **EXACT)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_stack_against_single_cells(cell, residual):
    """Cells of one step, one above the other, in a loop; our stack reads all at once, and one by one."""
    stack = RecurrentStack(WIDTH, WIDTH, cell, 3, residual=residual).eval()
    cells = [SINGLE[cell](WIDTH, WIDTH) for _ in stack.layers]
    for layer, single in zip(stack.layers, cells, strict=True):
        for name in PARTS:
            getattr(single, name).data.copy_(getattr(layer, f"{name}_l0"))
    values = torch.randn(ROWS, STEPS, WIDTH)
    begin = tuple(tuple(torch.randn(ROWS, WIDTH) for _ in range(stack.tensors)) for _ in cells)
    whole, ends = stack(values, begin)
    states, state = [part if cell == "lstm" else part[0] for part in begin], begin
    for step in range(STEPS):
        rows = values[:, step]
        for number, single in enumerate(cells):
            states[number] = single(rows, states[number])
            hidden = states[number][0] if cell == "lstm" else states[number]
            rows = hidden + rows if residual else hidden
        one, state = stack(values[:, step : step + 1], state)
        assert_close(whole[:, step], rows, **EXACT)
        assert_close(one[:, 0], rows, **EXACT)
    for number, end in enumerate(ends):
        assert_close(end, states[number] if cell == "lstm" else (states[number],), **EXACT)
        assert_close(state[number], end, **EXACT)
