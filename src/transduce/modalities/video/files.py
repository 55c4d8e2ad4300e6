"""A film in, some of its frames out: a folder of pictures, an animated picture, or a video file.

The rules: the pictures of a folder are its frames in the order of their names; of an animation (GIF, APNG, WebP) and
of a video (MP4 and whatever else PyAV reads) the frames are taken as they are shown; so many frames are taken evenly,
each from the middle of its share, and a film that has fewer shows some of them longer. Each frame follows the rules
for pictures; a film of more than `LONGEST` frames is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transduce.errors import InputError, UnreadableError
from transduce.modalities.image.files import ENDINGS, LARGEST, pillow, read_image, to_channels

LONGEST = 100_000  # frames
MOVING = (".gif", ".apng", ".webp")  # .png too is read; but a folder of such files is one film, not many
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg")


def frame_indices(count: int, frames: int) -> list[int]:
    """Which of so many frames stand for the film: the middle of each of `frames` equal shares."""
    return [(2 * place + 1) * count // (2 * frames) for place in range(frames)]


def read_video(path: str | Path, frames: int) -> list[Any]:
    """So many decoded pictures of the library, in colour."""
    path = Path(path)
    if path.is_dir():
        return _from_folder(path, frames)
    if not path.exists():
        raise UnreadableError("no such film", str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries, about what is checked here
            return _from_video(path, frames) if path.suffix.lower() in VIDEOS else _from_animation(path, frames)
    except (UnreadableError, InputError):
        raise
    except Exception as error:  # the libraries raise whatever a format's decoder raises
        raise UnreadableError("not a readable film", f"{path}: {error}") from None


def _from_folder(folder: Path, frames: int) -> list[Any]:
    pictures = sorted(one for one in folder.iterdir() if one.suffix.lower() in ENDINGS)
    _check(folder, len(pictures), 0)
    read = {number: read_image(pictures[number]) for number in set(frame_indices(len(pictures), frames))}
    return [read[number] for number in frame_indices(len(pictures), frames)]


def _from_animation(path: Path, frames: int) -> list[Any]:
    with pillow().Image.open(path) as opened:
        count = getattr(opened, "n_frames", 1)
        _check(path, count, opened.width * opened.height)
        found = []
        for number in frame_indices(count, frames):
            opened.seek(number)
            found.append(to_channels(opened.copy(), 3))
        return found


def _from_video(path: Path, frames: int) -> list[Any]:
    try:
        import av
    except ImportError:
        raise InputError(
            "videos need PyAV", where=str(path), remedy="pip install 'transduce[video]', or give a folder of pictures"
        ) from None
    with av.open(str(path)) as opened:
        stream = opened.streams.video[0]
        _check(path, max(stream.frames, 1), stream.width * stream.height)
    count = sum(1 for _ in _decoded(av, path))  # what a file says of its own length need not be true
    _check(path, count, 0)
    wanted = frame_indices(count, frames)
    kept = {number: frame.to_image() for number, frame in enumerate(_decoded(av, path)) if number in set(wanted)}
    return [kept[number] for number in wanted]


def _decoded(av: Any, path: Path) -> Any:
    with av.open(str(path)) as opened:
        for number, frame in enumerate(opened.decode(video=0)):
            if number > LONGEST:
                raise UnreadableError("film too long", f"{path}: more than {LONGEST:,} frames")
            yield frame


def _check(path: Path, count: int, pixels: int) -> None:
    if not count:
        raise UnreadableError("no frames", str(path))
    if count > LONGEST:
        raise UnreadableError("film too long", f"{path}: {count:,} frames")
    if pixels > LARGEST:
        raise UnreadableError("picture too large", f"{path}: {pixels:,} pixels a frame")


def write_animation(pictures: Sequence[Any], stream: Any, milliseconds: int = 100) -> None:
    """Pictures of the library as a GIF that goes on for ever."""
    first, *others = pictures
    first.save(stream, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0, disposal=1)
