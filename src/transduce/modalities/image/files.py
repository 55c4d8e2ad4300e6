"""A picture file in, its pixels out: upright, in the colours asked for; what cannot be trusted is refused by name.

The rules: a picture is turned as its EXIF data say; transparency is laid on white; CMYK and grey become what is asked
for; 16 bits become 8 by their upper half, real numbers by their range; of an animation the first frame is taken; a
picture of more than `LARGEST` pixels is refused before it is decoded, and one that ends too early is refused as well.
Only the formats of `FORMATS` are tried: some others would start programs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transduce.errors import InputError, UnreadableError

LARGEST = 64_000_000  # pixels: beyond, a small file can fill the memory
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
Resampling = Literal["bicubic", "bilinear"]


def pillow() -> Any:
    """The library, and a word of help where it is missing."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise InputError("pictures need Pillow", remedy="pip install 'transduce[image]'") from None
    return PIL


def read_image(path: str | Path, channels: int = 3) -> Any:
    """A decoded picture of the library, in colour (3) or grey (1)."""
    library = pillow()
    if not Path(path).is_file():
        raise UnreadableError("no such picture", str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the library, about what is checked here
            with library.Image.open(path, formats=FORMATS) as opened:
                if opened.width * opened.height > LARGEST:
                    raise UnreadableError("picture too large", f"{path}: {opened.width} x {opened.height} pixels")
                upright = library.ImageOps.exif_transpose(opened)
                return to_channels(upright, channels)
    except UnreadableError:
        raise
    except library.Image.DecompressionBombError as error:  # the library's own limit, which comes before ours
        raise UnreadableError("picture too large", f"{path}: {error}") from None
    except Exception as error:  # the library raises whatever a format's decoder raises
        raise UnreadableError("not a readable picture", f"{path}: {error}") from None


def to_channels(picture: Any, channels: int) -> Any:
    if picture.mode in ("RGBA", "LA", "PA") or (picture.mode == "P" and "transparency" in picture.info):
        picture = picture.convert("RGBA")
        ground = pillow().Image.new("RGBA", picture.size, "white")
        picture = pillow().Image.alpha_composite(ground, picture)
    if picture.mode.startswith("I"):
        values = np.asarray(picture).astype(np.int64)
        picture = pillow().Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    elif picture.mode == "F":
        real = np.nan_to_num(np.asarray(picture, np.float32))
        low, high = float(real.min()), float(real.max())
        picture = pillow().Image.fromarray(((real - low) / max(high - low, 1e-9) * 255).astype(np.uint8))
    return picture.convert("RGB" if channels == 3 else "L")


def fit(picture: Any, height: int, width: int, how: str, smoothing: Resampling = "bicubic") -> np.ndarray:
    """Y X C bytes of this size: `crop` keeps the middle, `pad` puts grey around, `stretch` changes the proportions."""
    library = pillow()
    size, smooth = (width, height), library.Image.Resampling[smoothing.upper()]
    if picture.size != size:
        if how == "crop":
            picture = library.ImageOps.fit(picture, size, smooth)
        elif how == "pad":
            picture = library.ImageOps.pad(picture, size, smooth, color="gray")
        else:
            picture = picture.resize(size, smooth)
    pixels = np.asarray(picture, np.uint8)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
