"""Image files: decoding and resizing.

Rules: an image is rotated as its EXIF data state; transparency is blended onto white; CMYK and greyscale are converted
to the requested channels; 16-bit values become 8-bit by their upper byte, floating point values by their range; only
the first frame of an animation is read; an image of more than `MAX_PIXELS` pixels is refused before it is decoded, and
so is a truncated file. Only the formats in `FORMATS` are tried: some decoders for others would start programs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transduce.errors import InputError, UnreadableError

MAX_PIXELS = 64_000_000  # beyond this a small file could fill the memory
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
Resampling = Literal["bicubic", "bilinear"]


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


def fit(image: Any, height: int, width: int, how: str, resampling: Resampling = "bicubic") -> np.ndarray:
    """Y X C bytes of this size: `crop` keeps the centre, `pad` adds a grey border, `stretch` distorts."""
    library = pillow()
    size, method = (width, height), library.Image.Resampling[resampling.upper()]
    if image.size != size:
        if how == "crop":
            image = library.ImageOps.fit(image, size, method)
        elif how == "pad":
            image = library.ImageOps.pad(image, size, method, color="gray")
        else:
            image = image.resize(size, method)
    pixels = np.asarray(image, np.uint8)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
