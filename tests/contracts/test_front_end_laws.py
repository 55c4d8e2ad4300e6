"""Laws of front ends: independence of padding and batch, as many rows as the grid has cells, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from transduce.contracts import FrontEnd
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.modalities import FRONT_ENDS

WIDTH = 8
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# Rows as modalities give them: frames of sound, and pictures or films of one size, whose shape may tell their rows too.
SHAPES = ((5,), (16, 16, 3), (16, 16, 1), (4, 16, 16, 3), (8, 16, 16, 1))
SAMPLES = {
    "conv_widths": (6, 4), "kernels": (3, 2), "strides": (2, 1), "position_kernel": 4, "position_groups": 2,
}  # fmt: skip
OPTIONS = {
    "conv_subsampling": (
        {},
        {"strides": (1, 2), "activation": "gelu"},
        {"kernels": (5, 3), "activation": "glu", "conv_width": 6},
    ),
    "conv2d_subsampling": ({}, {"strides": (1, 2), "band_strides": (2, 3), "channels": 3, "activation": "gelu"}),
    "frame_stacking": ({}, {"stack": 3}),
    "swin": (  # windows that are shifted, incomplete, and larger than the image
        {"patch_size": 2, "channels": 8, "window": 3, "depths": (2, 2), "heads": (2, 4)},
        {"patch_size": 3, "channels": 4, "window": 2, "depths": (1, 2), "heads": (1, 2), "final_norm": False},
        {"channels": 6, "window": 7, "depths": (1,), "heads": (3,), "activation": "silu"},
    ),
    "waveform_stem": ({"kernels": (4, 2, 2), "strides": (2, 1, 1)},),
    "waveform_convolution": (SAMPLES, {**SAMPLES, "conv_norm": "all", "conv_bias": True, "position_kernel": 3}),
}


def build(name: str, shape: tuple[int, ...], options: dict) -> FrontEnd | None:
    """None: this front does not read such rows."""
    torch.manual_seed(1)
    try:
        return FRONT_ENDS[name](WIDTH, shape=shape, **options).eval()
    except (InputError, ValueError):
        return None


CASES = [
    (name, shape, options)
    for name in FRONT_ENDS
    for shape in SHAPES
    for options in OPTIONS.get(name, ({},))
    if build(name, shape, options) is not None
]


def batch(shape: tuple[int, ...], lengths: list[int], more: int = 0) -> Padded:
    """Rows of these lengths; beyond them stands noise. Where the shape tells how many rows there are, all are real."""
    generator = torch.Generator().manual_seed(3)
    whole = len(shape) > 1
    row, longest = (shape[1:], shape[0]) if whole else (shape, max(lengths))
    values = torch.randn(len(lengths), longest, *row, generator=generator)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None] if not whole else torch.ones(values.shape[:2]).bool()
    if more and not whole:
        noise = torch.randn(len(lengths), more, *row, generator=generator)
        values, mask = torch.cat((values, noise), 1), torch.cat((mask, torch.zeros(len(lengths), more).bool()), 1)
    return Padded(values, mask)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[FrontEnd, tuple[int, ...]]:
    name, shape, options = request.param
    front = build(name, shape, options)
    assert front is not None
    return front, shape


LENGTHS = [9, 4, 1, 7, 8]


def test_every_front_end_has_a_case():
    assert {name for name, _, _ in CASES} == set(FRONT_ENDS)


def test_number_of_rows_is_the_size_of_the_grid(case):
    front, shape = case
    source = batch(shape, LENGTHS)
    rows = front.rows(source)
    assert rows.values.shape == (*rows.mask.shape, front.width)
    counts = [math.prod(front.grid(int(length))) for length in source.mask.sum(1)]
    assert rows.mask.sum(1).tolist() == counts
    for row, count in zip(rows.mask, counts, strict=True):  # real rows first
        assert row[:count].all()


def test_rows_do_not_depend_on_padding_or_batch(case):
    front, shape = case
    together = front.rows(batch(shape, LENGTHS))
    for more in (1, 2, 5):
        padded = front.rows(batch(shape, LENGTHS, more))
        assert_close(padded.values[padded.mask], together.values[together.mask], **CLOSE)
    for row in range(len(LENGTHS)):
        alone = front.rows(batch(shape, LENGTHS).select(torch.tensor([row])))
        assert_close(alone.values[alone.mask], together.values[row][together.mask[row]], **CLOSE)


def test_all_parameters_get_gradients_and_padding_none(case):
    front, shape = case
    source = batch(shape, LENGTHS, 2)
    values = source.values.requires_grad_()
    rows = front.train().rows(Padded(values, source.mask))
    rows.values[rows.mask].square().sum().backward()
    assert not [name for name, parameter in front.named_parameters() if parameter.grad is None]
    assert values.grad is not None
    assert not values.grad[~source.mask].any()
    assert values.grad[source.mask].any()
