"""Video: frames of a folder of images, an animation or a video file; frame and tubelet embedding.

Rules: the images of a folder are its frames in the order of their names; frames of an animation (GIF, APNG, WebP) and
of a video (MP4 and whatever else PyAV reads) are taken in display order. A fixed number of frames is sampled uniformly,
each from the middle of its segment; a shorter video repeats some frames. Each frame follows the rules for images. A
video of more than `MAX_FRAMES` frames is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from transduce.contracts import Count, FrontEnd, Modality, VisualSource
from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.layers.feed_forward import dense
from transduce.modalities.image import DownsamplingStage, without_padding
from transduce.modalities.image_files import EXTENSIONS as IMAGE_EXTENSIONS
from transduce.modalities.image_files import MAX_PIXELS, fit, pillow, read_image, to_channels

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


class Video(Modality):
    """a video, as a fixed number of uniformly sampled frames: a folder of images, an animation or a video file"""

    extensions = ANIMATIONS + VIDEOS

    def __init__(
        self,
        *,
        frames: Count = 8,
        size: Count = 64,
        width: Count | None = None,
        resize_mode: Literal["crop", "pad", "stretch"] = "crop",
    ) -> None:
        self._frames, self._height, self._width, self._resize_mode = frames, size, width or size, resize_mode

    @property
    def shape(self) -> tuple[int, ...]:
        """Frames included: every video has the same number."""
        return (self._frames, self._height, self._width, 3)

    def read(self, source: str) -> np.ndarray:
        images = read_video(source, self._frames)
        return np.stack([fit(image, self._height, self._width, self._resize_mode) for image in images])  # S Y X C

    def length(self, array: np.ndarray) -> int:
        return self._frames

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        values = torch.from_numpy(np.stack(arrays)).float() / 127.5 - 1  # B S Y X C
        return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        times, *cells = grid
        names = [f":{row + 1},{column + 1}" for row in range(cells[0]) for column in range(cells[1])] if cells else [""]
        return [f"{time + 1}{name}" for time in range(times) for name in names]

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource:
        """A strip of frames: side by side where a row of the memory is a frame; one below the other where it is part of
        a frame, so that the rows of the memory are in reading order. Of frames that share rows the middle one is shown.
        """
        times, *cells = grid
        shown = array[frame_indices(len(array), times)]
        if not cells:
            return VisualSource(np.concatenate(list(shown), 1), (1, times))
        return VisualSource(np.concatenate(list(shown), 0), (times * cells[0], cells[1]))


class FrameEmbedding(FrontEnd):
    """W [cells of a convolutional network] + p_t: each frame is one row that keeps the layout of its cells"""

    def __init__(
        self, width: int, *, shape: tuple[int, ...] = (), channels: Count = 8, stages: Count = 3, position: bool = True
    ) -> None:
        super().__init__()
        frames, height, frame_width, colours = shape or (1, 2**stages, 2**stages, 3)
        if height % 2**stages or frame_width % 2**stages:
            raise InputError(
                f"{stages} stages cannot halve {height} x {frame_width} pixels", remedy="choose fewer stages"
            )
        self.width, self._frames = width, frames
        sizes = [min(channels << stage, 4 * channels) for stage in range(stages)]
        self.stages = nn.ModuleList(
            DownsamplingStage(below, size) for below, size in zip([colours, *sizes[:-1]], sizes, strict=True)
        )
        self.out_proj = dense(sizes[-1] * (height >> stages) * (frame_width >> stages), width)
        table = nn.init.normal_(torch.empty(frames, width), std=0.02) if position else None
        self.position_embedding = None if table is None else nn.Parameter(table)

    def forward(self, source: Padded) -> Padded:
        size, frames = source.values.shape[:2]
        cells = source.values.flatten(0, 1).permute(0, 3, 1, 2)  # B*S C Y X
        for stage in self.stages:
            cells = stage(cells)
        rows = self.out_proj(cells.flatten(1)).view(size, frames, -1)  # B S D
        return Padded(rows if self.position_embedding is None else rows + self.position_embedding, source.mask)

    def grid(self, length: int) -> tuple[int, ...]:
        return (self._frames,)


class TubeletEmbedding(FrontEnd):
    """W x + p: blocks of pixels over several frames, each a row (Arnab et al. 2021)"""

    def __init__(
        self, width: int, *, shape: tuple[int, ...] = (), patch_size: Count = 8, tubelet_size: Count = 2
    ) -> None:
        super().__init__()
        frames, height, frame_width, colours = shape or (tubelet_size, patch_size, patch_size, 3)
        if height % patch_size or frame_width % patch_size or frames % tubelet_size:
            raise InputError(
                f"tubelets of {tubelet_size} x {patch_size} x {patch_size} do not tile "
                f"{frames} frames of {height} x {frame_width} pixels",
                remedy="choose divisors",
            )
        self.width, self._cells = width, (frames // tubelet_size, height // patch_size, frame_width // patch_size)
        tubelet = (tubelet_size, patch_size, patch_size)
        self.projection = nn.Conv3d(colours, width, tubelet, tubelet)
        cells = self._cells[0] * self._cells[1] * self._cells[2]
        self.position_embedding = nn.Parameter(nn.init.normal_(torch.empty(cells, width), std=0.02))

    def forward(self, source: Padded) -> Padded:
        rows: Tensor = self.projection(source.values.permute(0, 4, 1, 2, 3)).flatten(2).transpose(1, 2)  # B S' D
        return without_padding(rows + self.position_embedding)

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells
