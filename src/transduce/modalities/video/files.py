"""Video files: frames from a folder of images, an animated image, or a video file.

Rules: the images of a folder are its frames in the order of their names; frames of an animation (GIF, APNG, WebP) and
of a video (MP4 and whatever else PyAV reads) are taken in display order. A fixed number of frames is sampled uniformly,
each from the middle of its segment; a shorter video repeats some frames. Each frame follows the rules for images. A
video of more than `MAX_FRAMES` frames is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transduce.errors import InputError, UnreadableError
from transduce.modalities.image.files import EXTENSIONS as IMAGE_EXTENSIONS
from transduce.modalities.image.files import MAX_PIXELS, pillow, read_image, to_channels

MAX_FRAMES = 100_000
ANIMATIONS = (".gif", ".apng", ".webp")  # .png is read too, but a folder of .png files is one video, not many
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg")


def frame_indices(count: int, frames: int) -> list[int]:
    """The middle frame of each of `frames` equal segments of a video of `count` frames."""
    return [(2 * segment + 1) * count // (2 * frames) for segment in range(frames)]


def read_video(path: str | Path, frames: int) -> list[Any]:
    """`frames` decoded Pillow images in RGB."""
    path = Path(path)
    if path.is_dir():
        return _from_folder(path, frames)
    if not path.exists():
        raise UnreadableError("no such video", str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries warn about conditions that are checked here
            return _from_video(path, frames) if path.suffix.lower() in VIDEOS else _from_animation(path, frames)
    except (UnreadableError, InputError):
        raise
    except Exception as error:  # decoders raise exceptions of any type
        raise UnreadableError("not a readable video", f"{path}: {error}") from None


def _from_folder(folder: Path, frames: int) -> list[Any]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_EXTENSIONS)
    _check_size(folder, len(files), 0)
    indices = frame_indices(len(files), frames)
    images = {index: read_image(files[index]) for index in set(indices)}
    return [images[index] for index in indices]


def _from_animation(path: Path, frames: int) -> list[Any]:
    with pillow().Image.open(path) as opened:
        count = getattr(opened, "n_frames", 1)
        _check_size(path, count, opened.width * opened.height)
        images = []
        for index in frame_indices(count, frames):
            opened.seek(index)
            images.append(to_channels(opened.copy(), 3))
        return images


def _from_video(path: Path, frames: int) -> list[Any]:
    try:
        import av
    except ImportError:
        raise InputError(
            "videos need PyAV", where=str(path), remedy="pip install 'transduce[video]', or give a folder of images"
        ) from None
    with av.open(str(path)) as opened:
        stream = opened.streams.video[0]
        _check_size(path, max(stream.frames, 1), stream.width * stream.height)
    count = sum(1 for _ in _decoded(av, path))  # the length in the header may be wrong
    _check_size(path, count, 0)
    indices = frame_indices(count, frames)
    images = {index: frame.to_image() for index, frame in enumerate(_decoded(av, path)) if index in set(indices)}
    return [images[index] for index in indices]


def _decoded(av: Any, path: Path) -> Any:
    with av.open(str(path)) as opened:
        for index, frame in enumerate(opened.decode(video=0)):
            if index > MAX_FRAMES:
                raise UnreadableError("video too long", f"{path}: more than {MAX_FRAMES:,} frames")
            yield frame


def _check_size(path: Path, count: int, pixels: int) -> None:
    if not count:
        raise UnreadableError("no frames", str(path))
    if count > MAX_FRAMES:
        raise UnreadableError("video too long", f"{path}: {count:,} frames")
    if pixels > MAX_PIXELS:
        raise UnreadableError("image too large", f"{path}: {pixels:,} pixels per frame")


def write_animation(images: Sequence[Any], stream: Any, milliseconds: int = 100) -> None:
    """Pillow images as a GIF that repeats for ever."""
    first, *others = images
    first.save(stream, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0, disposal=1)
