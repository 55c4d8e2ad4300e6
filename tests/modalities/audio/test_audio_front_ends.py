"""Front ends of audio frames: convolutions over time and frequency."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from transduce.errors import InputError
from transduce.flow import Padded
from transduce.modalities.audio import Conv2dSubsampling

FRAMES, BANDS = 20, 20


@pytest.fixture
def source() -> Padded:
    """One recording with energy far from the first and last bands and frames."""
    torch.manual_seed(1)
    values = torch.zeros(1, FRAMES, BANDS)
    values[:, 4:6, 4:8] = torch.randn(1, 2, 4)
    return Padded(values, torch.ones(1, FRAMES, dtype=torch.bool))


def features(front: Conv2dSubsampling, source: Padded) -> torch.Tensor:
    """B S C F before the projection, without the value of silence."""
    front.out_proj = nn.Identity()
    for layer in front.layers:
        nn.init.zeros_(layer.bias)
    return front.rows(source).values.unflatten(2, (4, -1)).detach()


@pytest.mark.parametrize(("bands", "frames"), [(4, 0), (0, 4), (4, 4)])
def test_moved_energies_give_moved_features(source, bands, frames):
    front = Conv2dSubsampling(8, shape=(BANDS,), channels=4)
    moved = Padded(source.values.roll((frames, bands), (1, 2)), source.mask)
    before, after = features(front, source), features(front, moved)
    assert before.any()
    assert_close(after, before.roll((frames // 4, bands // 4), (1, 3)))
    assert not torch.allclose(after, before)


def test_strides_of_frames_and_of_bands():
    front = Conv2dSubsampling(8, shape=(10,), channels=3, strides=(2, 1), band_strides=(1, 4))
    assert [layer.stride for layer in front.layers] == [(2, 1), (1, 4)]
    assert front.out_proj.in_features == 3 * 3
    assert front.grid(9) == (5,)


def test_strides_of_each_layer_are_needed():
    with pytest.raises(InputError, match="band_strides"):
        Conv2dSubsampling(8, shape=(10,), strides=(2, 2), band_strides=(2,))
