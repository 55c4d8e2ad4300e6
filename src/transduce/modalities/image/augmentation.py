"""Random image augmentation: flip, shift, crop, rotation, colour jitter.

The augmentation of an image depends only on the random generator of its own row, which depends on the update. So a
resumed run sees the same images as an uninterrupted one, whatever the batches. (kornia's augmentations sample from one
generator per batch, which cannot guarantee that; its deterministic functions agree with those below.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Lt

from transduce.contracts import Rate

LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # weights of red, green and blue (BT.601)


@dataclass(frozen=True)
class ImageAugmentation:
    """The strength of each augmentation; 0 disables it."""

    flip: Rate = 0.0  # probability of a horizontal flip
    shift: Annotated[float, Ge(0), Lt(0.5)] = 0.0  # maximum shift as a share of each side; edge pixels are repeated
    crop: Rate = 0.0  # maximum share of the area that is cropped away; the rest is resized to the old size
    rotate: Annotated[float, Ge(0), Lt(180)] = 0.0  # maximum rotation in degrees, in either direction
    colour: Rate = 0.0  # maximum relative change of brightness, contrast and saturation

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Y X C bytes -> Y X C bytes."""
        if self.flip and rng.random() < self.flip:
            image = image[:, ::-1]
        if self.shift:
            image = random_shift(image, self.shift, rng)
        if self.crop or self.rotate:
            image = self._crop_and_rotate(image, rng)
        return colour_jitter(image, self.colour, rng) if self.colour else image

    def _crop_and_rotate(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Random resized crop (Szegedy et al. 2015) and rotation in one resampling.

        The area is 1 - crop to 1 of the image, the aspect ratio 3:4 to 4:3.
        """
        area = rng.uniform(1 - self.crop, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3))) if self.crop else 1.0
        scale = np.minimum(1.0, np.sqrt([area / ratio, area * ratio]))  # of height and width
        angle = np.deg2rad(rng.uniform(-self.rotate, self.rotate))
        margin = (1 - scale) / 2
        centre = 0.5 + rng.uniform(-margin, margin)
        return resampled_window(image, centre, scale, float(angle))


def random_shift(image: np.ndarray, shift: float, rng: np.random.Generator) -> np.ndarray:
    height, width = image.shape[:2]
    limits = int(shift * height), int(shift * width)
    down, right = (int(rng.integers(0, 2 * limit + 1)) for limit in limits)
    padded = np.pad(image, ((limits[0], limits[0]), (limits[1], limits[1]), (0, 0)), mode="edge")
    return padded[down : down + height, right : right + width]


def resampled_window(image: np.ndarray, centre: np.ndarray, scale: np.ndarray, angle: float) -> np.ndarray:
    """A rotated window of the image, resampled bilinearly to the size of the image; edge pixels are repeated."""
    sides = np.array(image.shape[:2], np.float64)
    y, x = ((np.arange(side) + 0.5 - side / 2) for side in sides)
    y, x = y[:, None] * scale[0], x[None] * scale[1]
    down = y * np.cos(angle) + x * np.sin(angle) + centre[0] * sides[0] - 0.5
    across = x * np.cos(angle) - y * np.sin(angle) + centre[1] * sides[1] - 0.5
    down, across = np.clip(down, 0, sides[0] - 1), np.clip(across, 0, sides[1] - 1)
    top, left = down.astype(int), across.astype(int)
    bottom, right = np.minimum(top + 1, int(sides[0]) - 1), np.minimum(left + 1, int(sides[1]) - 1)
    dy, dx = (down - top)[..., None].astype(np.float32), (across - left)[..., None].astype(np.float32)
    upper = image[top, left] * (1 - dx) + image[top, right] * dx
    lower = image[bottom, left] * (1 - dx) + image[bottom, right] * dx
    return np.rint(upper * (1 - dy) + lower * dy).astype(np.uint8)


def colour_jitter(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Brightness, then contrast around the mean luma, then saturation, each scaled by 1 - strength to 1 + strength."""
    brightness, contrast, saturation = rng.uniform(1 - strength, 1 + strength, 3)
    values = image.astype(np.float32) * brightness
    mean = (values @ LUMA if image.shape[2] == 3 else values).mean()
    values = mean + (values - mean) * contrast
    if image.shape[2] == 3:
        luma = (values @ LUMA)[..., None]
        values = luma + (values - luma) * saturation
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)
