"""Image files: decoding and resizing; random augmentation (flip, shift, crop, rotation, colour, erasing).

Rules: an image is rotated as its EXIF data state; transparency is blended onto white; CMYK and greyscale are converted
to the requested channels; 16-bit values become 8-bit by their upper byte, floating point values by their range; only
the first frame of an animation is read; an image of more than `MAX_PIXELS` pixels is refused before it is decoded, and
so is a truncated file. Only the formats in `FORMATS` are tried: some decoders for others would start programs.

The augmentation of an image depends only on the random generator of its own row, which depends on the update. So a
resumed run sees the same images as an uninterrupted one, whatever the batches. (kornia's augmentations sample from one
generator per batch, which cannot guarantee that; its deterministic functions agree with those below.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt

from transduce.contracts import Rate
from transduce.errors import InputError, UnreadableError

MAX_PIXELS = 64_000_000  # beyond this a small file could fill the memory
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
Resampling = Literal["bicubic", "bilinear"]
MARGIN = 200  # of 255
MIN_ERASED = 0.02  # share of the area of an image
MAX_LOG_RATIO = math.log(10 / 3)  # of height and width of an erased rectangle
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # weights of red, green and blue (BT.601)


def pillow() -> Any:
    """The Pillow library, or an error that says how to install it."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise InputError("images need Pillow", remedy="pip install 'transduce[image]'") from None
    return PIL


def read_image(path: str | Path, channels: int = 3) -> Any:
    """A decoded Pillow image, in RGB (3) or greyscale (1)."""
    library = pillow()
    if not Path(path).is_file():
        raise UnreadableError("no such image", str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about conditions that are checked here
            with library.Image.open(path, formats=FORMATS) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise UnreadableError("image too large", f"{path}: {opened.width} x {opened.height} pixels")
                upright = library.ImageOps.exif_transpose(opened)
                return to_channels(upright, channels)
    except UnreadableError:
        raise
    except library.Image.DecompressionBombError as error:  # Pillow's own limit, which applies first
        raise UnreadableError("image too large", f"{path}: {error}") from None
    except Exception as error:  # decoders raise exceptions of any type
        raise UnreadableError("not a readable image", f"{path}: {error}") from None


def to_channels(image: Any, channels: int) -> Any:
    """The image in 8-bit RGB (3) or greyscale (1)."""
    if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
        image = image.convert("RGBA")
        background = pillow().Image.new("RGBA", image.size, "white")
        image = pillow().Image.alpha_composite(background, image)
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        image = pillow().Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        real = np.nan_to_num(np.asarray(image, np.float32))
        low, high = float(real.min()), float(real.max())
        image = pillow().Image.fromarray(((real - low) / max(high - low, 1e-9) * 255).astype(np.uint8))
    return image.convert("RGB" if channels == 3 else "L")


def fit(
    image: Any,
    height: int,
    width: int,
    how: str,
    resampling: Resampling = "bicubic",
    shrinking: Resampling | None = None,  # of the second step of a thumbnail; None: as the first
) -> np.ndarray:
    """Y X C bytes of this size.

    `crop` keeps the centre, `shortest_edge` too, but resizes first; `pad` adds a grey border, `thumbnail` a black one;
    `stretch` distorts.
    """
    library = pillow()
    size, method = (width, height), library.Image.Resampling[resampling.upper()]
    if image.size != size:
        if how == "crop":
            image = library.ImageOps.fit(image, size, method)
        elif how == "pad":
            image = library.ImageOps.pad(image, size, method, color="gray")
        elif how == "shortest_edge":
            image = _centre(_resize_shorter(image, max(size), method), size)
        elif how == "thumbnail":
            second = method if shrinking is None else library.Image.Resampling[shrinking.upper()]
            image = _on_black(_thumbnail(image, size, method, second), size)
        else:
            image = image.resize(size, method)
    pixels = np.asarray(image, np.uint8)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _resize_shorter(image: Any, side: int, method: Any) -> Any:
    """With a shorter side of this length, and the same proportions."""
    across, down = image.size
    scaled = side, int(side * max(across, down) / min(across, down))
    return image.resize(scaled if across <= down else scaled[::-1], method)


def _centre(image: Any, size: tuple[int, int]) -> Any:
    left, top = ((have - need) // 2 for have, need in zip(image.size, size, strict=True))
    return image.crop((left, top, left + size[0], top + size[1]))


def _thumbnail(image: Any, size: tuple[int, int], method: Any, second: Any) -> Any:
    """Resized to the shorter side of `size`, then shrunk to fit within it (Kim et al. 2022)."""
    image = _resize_shorter(image, min(size), method)
    limits = [min(side, limit) for side, limit in zip(image.size, size, strict=True)]
    if tuple(limits) == image.size:
        return image
    longer = 0 if image.width > image.height else 1
    limits[1 - longer] = int(image.size[1 - longer] * limits[longer] / image.size[longer])
    return image.resize((limits[0], limits[1]), second)


def _on_black(image: Any, size: tuple[int, int]) -> Any:
    """In the middle of a black image."""
    canvas = pillow().Image.new(image.mode, size)
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return canvas


def align_long_axis(image: Any, height: int, width: int) -> Any:
    """Turned clockwise by 90 degrees where it is wider than high and the size is not, or the reverse."""
    turned = (width < height and image.width > image.height) or (width > height and image.width < image.height)
    return image.transpose(pillow().Image.Transpose.ROTATE_270) if turned else image


def crop_margin(image: Any) -> Any:
    """Without margins, whose pixels are brighter than `MARGIN` on a scale from the darkest to the brightest."""
    grey = np.asarray(image.convert("L"))
    low, high = int(grey.min()), int(grey.max())
    if low == high:
        return image
    rows, columns = np.nonzero((grey - low) / (high - low) * 255 < MARGIN)
    return image.crop((int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1))


@dataclass(frozen=True)
class ImageAugmentation:
    """The strength of each augmentation; 0 disables it."""

    flip: Rate = 0.0  # probability of a horizontal flip
    shift: Annotated[float, Ge(0), Lt(0.5)] = 0.0  # maximum shift as a share of each side; edge pixels are repeated
    crop: Rate = 0.0  # maximum share of the area that is cropped away; the rest is resized to the old size
    rotate: Annotated[float, Ge(0), Lt(180)] = 0.0  # maximum rotation in degrees, in either direction
    colour: Rate = 0.0  # maximum relative change of brightness, contrast and saturation
    erase: Rate = 0.0  # probability that a rectangle becomes noise (random erasing: Zhong et al. 2020)
    erase_area: Annotated[float, Gt(MIN_ERASED), Lt(1)] = 0.33  # maximum share of the area of that rectangle

    def __call__(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """B Y X C bytes -> B Y X C bytes, each image by its own generator."""
        if self.flip:
            flipped = np.array([rng.random() < self.flip for rng in rngs])
            images = np.where(flipped[:, None, None, None], images[:, :, ::-1], images)
        if self.shift:
            images = random_shift(images, self.shift, rngs)
        if self.crop or self.rotate:
            images = np.stack([self._crop_and_rotate(*pair) for pair in zip(images, rngs, strict=True)])
        if self.colour:
            images = np.stack([colour_jitter(image, self.colour, rng) for image, rng in zip(images, rngs, strict=True)])
        return random_erasing(images, self.erase, self.erase_area, rngs) if self.erase else images

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


def random_shift(images: np.ndarray, shift: float, rngs: Sequence[np.random.Generator]) -> np.ndarray:
    height, width = images.shape[1:3]
    limits = int(shift * height), int(shift * width)
    drawn = [[rng.integers(0, 2 * limit + 1) for limit in limits] for rng in rngs]
    padded = np.pad(images, ((0, 0), (limits[0], limits[0]), (limits[1], limits[1]), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (1, 2))  # B 2h+1 2w+1 C Y X
    down, right = np.array(drawn, np.int64).reshape(-1, 2).T
    return windows[np.arange(len(images)), down, right].transpose(0, 2, 3, 1)


def random_erasing(
    images: np.ndarray, probability: float, max_area: float, rngs: Sequence[np.random.Generator]
) -> np.ndarray:
    """Random erasing (Zhong et al. 2020): noise in a rectangle of random area and of aspect ratio 3:10 to 10:3."""
    erased, (height, width, channels) = images.copy(), images.shape[1:]
    for image, rng in zip(erased, rngs, strict=True):
        if rng.random() >= probability:
            continue
        area = rng.uniform(MIN_ERASED, max_area) * height * width
        ratio = math.exp(rng.uniform(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        high = min(max(round(math.sqrt(area * ratio)), 1), height)
        wide = min(max(round(math.sqrt(area / ratio)), 1), width)
        top, left = int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1))
        noise = rng.integers(0, 256, (high, wide, channels), np.uint8)
        image[top : top + high, left : left + wide] = noise
    return erased


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
