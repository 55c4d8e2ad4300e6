"""A picture and a draw in, the picture changed at random out: mirrored, moved, cut out, turned, in other colours.

All changes of a picture follow from the draw of its own row, which follows from the update: so a resumed run sees the
pictures that the whole run would have seen, in whatever batches. (The augmentations of kornia draw from one generator
for a whole batch, which cannot promise that. Its functions, which draw nothing, do the same as those below.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GREY = np.array([0.299, 0.587, 0.114], np.float32)  # how bright red, green and blue are (BT.601)


@dataclass(frozen=True)
class ImageAugmentation:
    """How far a picture may be changed; 0: not at all."""

    flip: float = 0.0  # how often it is mirrored
    shift: float = 0.0  # by what share of its sides it is moved at most; the edge is repeated
    crop: float = 0.0  # what share of its area may be cut away; the rest is brought to the old size
    rotate: float = 0.0  # by how many degrees it is turned at most, either way
    colour: float = 0.0  # by what share brightness, contrast and saturation are raised or lowered at most

    def __call__(self, picture: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Y X C bytes -> Y X C bytes."""
        if self.flip and draw.random() < self.flip:
            picture = picture[:, ::-1]
        if self.shift:
            picture = random_shift(picture, self.shift, draw)
        if self.crop or self.rotate:
            picture = self._seen_again(picture, draw)
        return colour_jitter(picture, self.colour, draw) if self.colour else picture

    def _seen_again(self, picture: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Random resized crop (Szegedy 2015) and a turn, in one sampling: 1 - crop to all of the area, 3:4 to 4:3."""
        area = draw.uniform(1 - self.crop, 1.0)
        ratio = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3))) if self.crop else 1.0
        share = np.minimum(1.0, np.sqrt([area / ratio, area * ratio]))  # of height and width
        turn = np.deg2rad(draw.uniform(-self.rotate, self.rotate))
        free = (1 - share) / 2
        middle = 0.5 + draw.uniform(-free, free)
        return resampled_window(picture, middle, share, float(turn))


def random_shift(picture: np.ndarray, shift: float, draw: np.random.Generator) -> np.ndarray:
    height, width = picture.shape[:2]
    most = int(shift * height), int(shift * width)
    down, right = (int(draw.integers(0, 2 * side + 1)) for side in most)
    around = np.pad(picture, ((most[0], most[0]), (most[1], most[1]), (0, 0)), mode="edge")
    return around[down : down + height, right : right + width]


def resampled_window(picture: np.ndarray, middle: np.ndarray, share: np.ndarray, turn: float) -> np.ndarray:
    """A turned window of the picture at its own size, between pixels by their distance; beyond the edge, the edge."""
    sides = np.array(picture.shape[:2], np.float64)
    y, x = ((np.arange(side) + 0.5 - side / 2) for side in sides)
    y, x = y[:, None] * share[0], x[None] * share[1]
    down = y * np.cos(turn) + x * np.sin(turn) + middle[0] * sides[0] - 0.5
    across = x * np.cos(turn) - y * np.sin(turn) + middle[1] * sides[1] - 0.5
    down, across = np.clip(down, 0, sides[0] - 1), np.clip(across, 0, sides[1] - 1)
    top, left = down.astype(int), across.astype(int)
    bottom, right = np.minimum(top + 1, int(sides[0]) - 1), np.minimum(left + 1, int(sides[1]) - 1)
    low, far = (down - top)[..., None].astype(np.float32), (across - left)[..., None].astype(np.float32)
    upper = picture[top, left] * (1 - far) + picture[top, right] * far
    lower = picture[bottom, left] * (1 - far) + picture[bottom, right] * far
    return np.rint(upper * (1 - low) + lower * low).astype(np.uint8)


def colour_jitter(picture: np.ndarray, most: float, draw: np.random.Generator) -> np.ndarray:
    """Brightness, then contrast around the mean grey, then saturation around grey, each times 1 - most to 1 + most."""
    bright, contrast, saturation = draw.uniform(1 - most, 1 + most, 3)
    values = picture.astype(np.float32) * bright
    mean = (values @ GREY if picture.shape[2] == 3 else values).mean()
    values = mean + (values - mean) * contrast
    if picture.shape[2] == 3:
        grey = (values @ GREY)[..., None]
        values = grey + (values - grey) * saturation
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)
