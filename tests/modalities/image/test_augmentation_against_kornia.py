"""Image augmentation with given parameters, against kornia's deterministic functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.modalities.image_files import ImageAugmentation, colour_jitter, resampled_window

# Values that no factor here brings to the ends of the scale: kornia cuts them off after every change, we at the end.
PICTURE = np.random.default_rng(0).integers(80, 150, (12, 10, 3), np.uint8)
Factor = st.floats(0.8, 1.2)


class Told:
    """In place of chance."""

    def __init__(self, *values: float) -> None:
        self.values = np.array(values)

    def uniform(self, low: float, high: float, count: int) -> np.ndarray:
        assert (low <= self.values).all()
        assert (self.values <= high).all()
        return self.values[:count]

    def random(self) -> float:
        return float(self.values[0])


def as_tensor(picture: np.ndarray) -> torch.Tensor:
    return torch.tensor(picture.astype(np.float64) / 255).permute(2, 0, 1)[None]  # 1 C Y X


def as_bytes(picture: torch.Tensor) -> np.ndarray:
    return (picture[0].permute(1, 2, 0) * 255).numpy()


def assert_same(found: np.ndarray, wanted: torch.Tensor) -> None:
    """To half a step of a byte: ours are rounded at last."""
    assert np.abs(found - as_bytes(wanted)).max() <= 0.501


@settings(max_examples=25)
@given(Factor, Factor, Factor, st.sampled_from([1, 3]))
def test_colour_jitter_agrees_with_kornia(bright, contrast, saturation, channels):
    enhance = pytest.importorskip("kornia.enhance")
    picture = PICTURE[:, :, :channels]
    wanted = enhance.adjust_brightness_accumulative(as_tensor(picture), bright)
    wanted = enhance.adjust_contrast_with_mean_subtraction(wanted, contrast)
    if channels == 3:
        wanted = enhance.adjust_saturation_with_gray_subtraction(wanted, saturation)
    assert_same(colour_jitter(picture, 0.21, Told(bright, contrast, saturation)), wanted)


@settings(max_examples=25)
@given(st.floats(0.5, 1), st.floats(0.5, 1), st.floats(0.3, 0.7), st.floats(0.3, 0.7), st.floats(-3.2, 3.2))
def test_rotated_crop_agrees_with_kornia(high, wide, down, across, turn):
    """The map from what is shown to the picture, as ours is; kornia asks for the way back."""
    transform = pytest.importorskip("kornia.geometry.transform")
    height, width = PICTURE.shape[:2]
    cos, sin = np.cos(turn), np.sin(turn)
    turned = np.array([[wide * cos, -high * sin], [wide * sin, high * cos]])  # of x and y
    middle = np.array([across * width - 0.5, down * height - 0.5])
    ahead = np.eye(3)
    ahead[:2, :2], ahead[:2, 2] = turned, middle - turned @ np.array([width / 2 - 0.5, height / 2 - 0.5])
    back = torch.tensor(np.linalg.inv(ahead)[None, :2])
    wanted = transform.warp_affine(as_tensor(PICTURE), back, (height, width), padding_mode="border")
    assert_same(resampled_window(PICTURE, np.array([down, across]), np.array([high, wide]), turn), wanted)


def test_flip_agrees_with_kornia():
    transform = pytest.importorskip("kornia.geometry.transform")
    assert_same(ImageAugmentation(flip=0.5)(PICTURE[None], [Told(0.4)])[0], transform.hflip(as_tensor(PICTURE)))
    assert_same(ImageAugmentation(flip=0.5)(PICTURE[None], [Told(0.6)])[0], as_tensor(PICTURE))
