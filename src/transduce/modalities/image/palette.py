"""Pictures in, lines of colours out, and back: each pixel of a small picture is the nearest colour of a palette.

    c3 c3 c0 ...    one token a pixel, in reading order

The palette is made of the colours of given pictures: k means (Lloyd 1982), begun from the commonest colour and then
each time from the colour that is worst met so far, so the same pictures always give the same palette.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transduce.errors import InputError
from transduce.modalities.image.files import pillow

ROUNDS = 50
MAX_COLOURS = 50_000  # different colours that means are taken of: enough to tell where they lie


@dataclass(frozen=True)
class PaletteTokenizer:
    """So many colours, and the size of the pictures that they are used for."""

    colours: np.ndarray  # K 3, uint8
    height: int
    width: int

    @classmethod
    def of(cls, pictures: Sequence[np.ndarray], count: int) -> PaletteTokenizer:
        """At most so many colours for pictures of one size, Y X 3."""
        height, width = pictures[0].shape[:2]
        pixels = np.concatenate([picture.reshape(-1, 3) for picture in pictures])
        found, weights = np.unique(pixels, axis=0, return_counts=True)
        if len(found) > MAX_COLOURS:  # the commonest of them
            kept = np.argsort(-weights, kind="stable")[:MAX_COLOURS]
            found, weights = found[kept], weights[kept]
        means = _k_means(found.astype(np.float64), weights.astype(np.float64), min(count, len(found)))
        return cls(np.rint(means).astype(np.uint8), height, width)

    @property
    def what(self) -> str:
        """What its tokens are."""
        return "colours"

    @property
    def count(self) -> int:
        return len(self.colours)

    @property
    def tokens(self) -> int:
        """Of a picture."""
        return self.height * self.width

    def encode(self, picture: np.ndarray) -> str:
        """A picture of the right size, Y X 3 -> its line."""
        if picture.shape != (self.height, self.width, 3):
            raise ValueError(f"a picture of {picture.shape}, not {self.height} x {self.width} in colour")
        nearest = _distances(picture.reshape(-1, 3).astype(np.float64), self.colours.astype(np.float64)).argmin(1)
        return " ".join(f"c{number}" for number in nearest)

    def decode(self, line: str) -> tuple[np.ndarray, bool]:
        """A line -> its picture, and whether the line has as many colours as the picture has pixels.

        What is missing, or is no colour, stays white; what is too much is left out.
        """
        names = {f"c{number}": colour for number, colour in enumerate(self.colours)}
        pixels = np.full((self.height * self.width, 3), 255, np.uint8)
        tokens = line.split()
        for place, token in enumerate(tokens[: len(pixels)]):
            pixels[place] = names.get(token, pixels[place])
        fits = len(tokens) == len(pixels) and all(token in names for token in tokens)
        return pixels.reshape(self.height, self.width, 3), fits

    def save(self, path: Path) -> None:
        content = {"height": self.height, "width": self.width, "colours": self.colours.tolist()}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PaletteTokenizer:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            colours = np.array(content["colours"], np.int64)
            if colours.ndim != 2 or colours.shape[1] != 3 or colours.min() < 0 or colours.max() > 255:
                raise ValueError("colours are rows of three numbers from 0 to 255")
            height, width = int(content["height"]), int(content["width"])
            if not (0 < height <= 1024 and 0 < width <= 1024):
                raise ValueError(f"{height} x {width} pixels")
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"not a palette: {error}", where=str(path), remedy="`transduce encode-images` writes one"
            ) from None
        return cls(colours.astype(np.uint8), height, width)


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Squared, of every row of one to every row of the other."""
    return (one**2).sum(1)[:, None] - 2 * one @ other.T + (other**2).sum(1)


def _k_means(colours: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    means = colours[[int(weights.argmax())]]
    while len(means) < count:
        worst = (_distances(colours, means).min(1) * weights).argmax()
        means = np.concatenate((means, colours[[int(worst)]]))
    for _ in range(ROUNDS):
        nearest = _distances(colours, means).argmin(1)
        totals = np.bincount(nearest, weights, len(means))
        sums = np.stack([np.bincount(nearest, weights * colours[:, part], len(means)) for part in range(3)], 1)
        moved = np.where(totals[:, None] > 0, sums / np.maximum(totals, 1)[:, None], means)
        if np.allclose(moved, means):
            break
        means = moved
    return means


def image_grid(pictures: Sequence[np.ndarray], times: int = 8, gap: int = 4) -> np.ndarray:
    """Pictures of one size in a grid as square as can be, each pixel so many times larger."""
    large = [np.kron(picture, np.ones((times, times, 1), np.uint8)) for picture in pictures]
    columns = int(np.ceil(np.sqrt(len(large))))
    height, width = large[0].shape[0] + gap, large[0].shape[1] + gap
    sheet = np.full((-(-len(large) // columns) * height + gap, columns * width + gap, 3), 255, np.uint8)
    for number, picture in enumerate(large):
        top, left = gap + number // columns * height, gap + number % columns * width
        sheet[top : top + height - gap, left : left + width - gap] = picture
    return sheet


def write_png(pixels: np.ndarray, path: Path) -> None:
    picture: Any = pillow().Image.fromarray(pixels)
    picture.save(path, "PNG")
