"""Image augmentation: deterministic by its generator, and only in training."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.modalities.image import Image
from transduce.modalities.image_files import ImageAugmentation, colour_jitter, resampled_window

KINDS = {"flip": 0.9, "shift": 0.2, "crop": 0.5, "rotate": 30.0, "colour": 0.4, "erase": 0.9}
PICTURE = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)


def draws(seed: int, count: int = 1) -> list[np.random.Generator]:
    return [np.random.default_rng((seed, row)) for row in range(count)]


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 10_000), st.sampled_from([1, 3]))
def test_augmentation_keeps_the_shape_and_is_deterministic(kind, seed, channels):
    change, pictures = ImageAugmentation(**{kind: KINDS[kind]}), PICTURE[None, :, :, :channels]
    first, again = (change(pictures, draws(seed)) for _ in range(2))
    assert first.shape == pictures.shape
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_augmentation_changes_images_only_where_enabled(kind):
    assert any(
        not np.array_equal(ImageAugmentation(**{kind: KINDS[kind]})(PICTURE[None], draws(seed))[0], PICTURE)
        for seed in range(9)
    )
    pictures = PICTURE[None]
    assert ImageAugmentation()(pictures, draws(1)) is pictures


def test_augmentation_of_a_row_does_not_depend_on_its_batch():
    image = Image(size=12, width=10, **KINDS)
    whole = image.collate([PICTURE] * 4, draws(5, 4)).values
    alone = image.collate([PICTURE], draws(5, 4)[2:3]).values
    assert np.array_equal(whole[2], alone[0])
    assert not np.array_equal(whole[2], whole[1])
    assert np.array_equal(image.collate([PICTURE]).values, Image(size=12, width=10).collate([PICTURE]).values)


def test_flips_and_shifts_of_a_batch_are_those_of_each_image():
    """The same numbers in the same order as one image at a time, written out with a loop."""
    pictures = np.random.default_rng(1).integers(0, 256, (20, 12, 10, 3), np.uint8)
    found = ImageAugmentation(flip=0.5, shift=0.2)(pictures, draws(4, 20))
    for picture, rng, one in zip(pictures, draws(4, 20), found, strict=True):
        picture = picture[:, ::-1] if rng.random() < 0.5 else picture
        down, right = int(rng.integers(0, 5)) - 2, int(rng.integers(0, 5)) - 2
        rows = np.clip(np.arange(12) + down, 0, 11)
        columns = np.clip(np.arange(10) + right, 0, 9)
        assert np.array_equal(one, picture[rows][:, columns])


def test_erasing_changes_one_rectangle_of_limited_area():
    pictures = np.full((300, 20, 20, 1), 77, np.uint8)
    erased = ImageAugmentation(erase=0.5, erase_area=0.25)(pictures, draws(6, 300))
    assert (pictures == 77).all()
    areas = []
    for changed in (erased != 77)[..., 0]:
        if not changed.any():
            continue
        rows, columns = (np.flatnonzero(changed.any(axis)) for axis in (1, 0))
        high, wide = np.ptp(rows) + 1, np.ptp(columns) + 1
        areas.append(high * wide / 400)
        assert changed.sum() > 0.9 * high * wide  # noise equals the old value once in 256 pixels
        assert 0.25 < high / wide < 4
    assert 110 < len(areas) < 190
    assert min(areas) < 0.1 < 0.2 < max(areas) < 0.3  # sides are rounded


def test_full_window_is_the_identity_and_180_degrees_rotates():
    middle, all_of_it = np.array([0.5, 0.5]), np.ones(2)
    assert np.array_equal(resampled_window(PICTURE, middle, all_of_it, 0.0), PICTURE)
    assert np.array_equal(resampled_window(PICTURE, middle, all_of_it, np.pi), PICTURE[::-1, ::-1])
    square = PICTURE[:10]
    assert np.array_equal(resampled_window(square, middle, all_of_it, np.pi / 2), np.rot90(square))


def test_window_enlarges_its_content():
    picture = np.zeros((8, 8, 1), np.uint8)
    picture[:4, :4] = 200
    corner = resampled_window(picture, np.array([0.25, 0.25]), np.array([0.5, 0.5]), 0.0)
    assert (corner[:7, :7] == 200).all()


def test_colour_jitter_changes_channels_together():
    grey = np.full((4, 4, 3), 100, np.uint8)
    found = colour_jitter(grey, 0.5, *draws(3))
    assert (found == found[0, 0, 0]).all()  # grey stays grey: only its brightness can change
    assert found[0, 0, 0] != 100
