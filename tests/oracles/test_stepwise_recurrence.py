"""Stepwise recurrence with projections computed for all steps at once, against torch's cells: values and gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from transduce.kernels.recurrent import StepLinear
from transduce.layers.recurrent import CELLS, STEPS, RecurrentStack, StepwiseRecurrence

ROWS, STEPS_TAKEN, WIDTH, FED = 3, 5, 6, 4
EXACT = {"rtol": 0, "atol": 1e-12}


def test_every_cell_has_a_stepwise_form():
    assert set(CELLS.values()) == set(STEPS)


def run_both(cell, layers, residual):
    torch.manual_seed(3)
    stack = RecurrentStack(WIDTH + FED, WIDTH, cell, layers, residual=residual).double()
    values = torch.randn(ROWS, STEPS_TAKEN, WIDTH, dtype=torch.double, requires_grad=True)
    fed = torch.randn(ROWS, 1, FED, dtype=torch.double, requires_grad=True)
    first = tuple(
        tuple(torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True) for _ in range(stack.tensors))
        for _ in range(layers)
    )
    known = [values, fed, *(part for layer in first for part in layer), *stack.parameters()]
    results = []
    for hoisted in (False, True):
        state, feed, outputs = first, fed, []
        assert StepwiseRecurrence.applies(stack, values)
        stepper = StepwiseRecurrence(stack, values)
        for step in range(STEPS_TAKEN):
            if hoisted:
                hidden, state = stepper(step, feed, state)
            else:
                hidden, state = stack(torch.cat((values[:, step : step + 1], feed), -1), state)
            outputs.append(hidden)
            feed = torch.sin(hidden[..., :FED])  # what is fed depends on the step before
        made = torch.cat(outputs, 1)
        loss = made.square().sum() + sum(part.sum() for layer in state for part in layer)
        results.append((made, *torch.autograd.grad(loss, known)))
    return results


@pytest.mark.parametrize(("cell", "layers", "residual"), list(product(CELLS, (1, 2), (False, True))))
def test_stepwise_values_and_gradients_equal_torch(cell, layers, residual):
    for one, other in zip(*run_both(cell, layers, residual), strict=True):
        assert_close(one, other, **EXACT)


def test_repeated_backward_counts_gradients_once():
    """Also where the matrix itself is not asked for the first time: nothing of that pass is left behind."""
    weight, bias = torch.randn(2, 3, requires_grad=True), torch.zeros(2, requires_grad=True)
    values = torch.randn(4, 3, requires_grad=True)
    matrix = StepLinear(weight, bias, torch.float)
    loss = (matrix(values) + matrix(2 * values)).sum()
    torch.autograd.grad(loss, [values], retain_graph=True)
    first = torch.autograd.grad(loss, [weight, bias], retain_graph=True)
    again = torch.autograd.grad(loss, [weight, bias])
    assert_close(first, again)
    assert_close(first[0], 3 * values.detach().sum(0).expand(2, 3))
    assert_close(first[1], torch.full((2,), 8.0))


def test_stepwise_recurrence_is_used_in_training_only():
    stack, values = RecurrentStack(4, 4, "gru", 1), torch.zeros(1, 3, 4)
    assert StepwiseRecurrence.applies(stack, values)
    assert not StepwiseRecurrence.applies(stack, values[:, :1])
    with torch.no_grad():
        assert not StepwiseRecurrence.applies(stack, values)
