"""Video: frame sampling, file formats, front ends, visualisation."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture
from torch.testing import assert_close

from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.modalities.video import (
    FrameEmbedding,
    TubeletEmbedding,
    Video,
    frame_indices,
    read_video,
    write_animation,
)

SHADES = [0, 60, 120, 180, 240]


def pictures() -> list:
    return [Picture.new("RGB", (16, 16), (shade, 0, 0)) for shade in SHADES]


def reds(frames: list) -> list[int]:
    return [int(np.asarray(frame)[8, 8, 0]) for frame in frames]


@given(st.integers(1, 300), st.integers(1, 40))
def test_frames_are_sampled_uniformly(count, frames):
    chosen = frame_indices(count, frames)
    assert len(chosen) == frames
    assert chosen == sorted(chosen)
    assert chosen[0] >= 0
    assert chosen[-1] < count
    steps = np.diff(chosen)
    assert not len(steps) or steps.max() - steps.min() <= 1
    assert abs(chosen[0] - (count - 1 - chosen[-1])) <= 1  # as much is left out before as behind
    if count == frames:
        assert chosen == list(range(count))


def test_folder_frames_are_in_name_order(tmp_path):
    for place, picture in enumerate(pictures()):
        picture.save(tmp_path / f"frame{place:02}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    assert reds(read_video(tmp_path, 5)) == SHADES
    assert reds(read_video(tmp_path, 1)) == [120]
    assert reds(read_video(tmp_path, 10)) == [shade for shade in SHADES for _ in range(2)]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations(kind, tmp_path):
    first, *others = pictures()
    path = tmp_path / f"video.{kind.lower()}"
    options = {"lossless": True} if kind == "WEBP" else {}
    first.save(path, kind, save_all=True, append_images=others, duration=50, **options)
    assert reds(read_video(path, 5)) == pytest.approx(SHADES, abs=2)


def test_animation_round_trip(tmp_path):
    stream = io.BytesIO()
    write_animation(pictures(), stream)
    (tmp_path / "video.gif").write_bytes(stream.getvalue())
    assert reds(read_video(tmp_path / "video.gif", 5)) == SHADES


def test_videos(tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "video.mp4"
    with av.open(str(path), "w") as written:
        stream = written.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for picture in pictures():
            for packet in stream.encode(av.VideoFrame.from_image(picture)):
                written.mux(packet)
        for packet in stream.encode(None):
            written.mux(packet)
    assert reds(read_video(path, 5)) == pytest.approx(SHADES, abs=16)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.gif", None, "no such video"),
        ("text.gif", b"not a video", "not a readable video"),
        ("text.mp4", b"not a video", "not a readable video"),
        ("folder", "folder", "no frames"),
    ],
)
def test_unreadable_videos_are_refused(name, content, reason, tmp_path):
    if name.endswith("mp4"):
        pytest.importorskip("av")
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableError) as message:
        read_video(tmp_path / name, 4)
    assert message.value.reason == reason


def test_missing_library_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    (tmp_path / "video.mp4").write_bytes(b"")
    with pytest.raises(InputError, match=r"transduce\[video\]"):
        read_video(tmp_path / "video.mp4", 2)


@pytest.fixture
def sample_video(tmp_path):
    for place in range(4):
        pixels = np.random.default_rng(place).integers(0, 256, (8, 16, 3)).astype(np.uint8)
        Picture.fromarray(pixels).save(tmp_path / f"{place}.png")
    return Video(frames=4, size=8, width=16), tmp_path


def test_collated_video_batch(sample_video):
    video, path = sample_video
    kept = video.read(str(path))
    assert (kept.shape, kept.dtype, video.shape, video.length(kept)) == ((4, 8, 16, 3), np.uint8, (4, 8, 16, 3), 4)
    padded = video.collate([kept, kept])
    assert padded.values.shape == (2, 4, 8, 16, 3)
    assert padded.mask.all()
    assert_close(padded.values[1], torch.from_numpy(kept).float() / 127.5 - 1)


@pytest.mark.parametrize(("front", "grid"), [(FrameEmbedding, (4,)), (TubeletEmbedding, (2, 2, 4))])
def test_rows_match_their_cells_in_the_visualisation(front, grid, sample_video):
    """Change one cell of the strip: the rows that stand for it change, and no others. One law for both."""
    video, path = sample_video
    kept = video.read(str(path))
    torch.manual_seed(1)
    options = {"patch_size": 4, "tubelet_size": 2} if front is TubeletEmbedding else {"stages": 2}
    rows = front(12, shape=video.shape, **options).eval()
    assert rows.grid(4) == grid
    assert len(video.position_labels(kept, grid)) == len(set(video.position_labels(kept, grid))) == int(np.prod(grid))
    before = rows.rows(video.collate([kept])).values[0]
    assert len(before) == int(np.prod(grid))
    scene = video.visualise(kept, grid)
    down, across = scene.grid
    assert down * across == len(before)
    cells = [cell for band in np.split(scene.pixels, down, 0) for cell in np.split(band, across, 1)]
    for place, cell in enumerate(cells):
        changed = kept.copy()
        for time in range(4):
            for top in range(0, 8, cell.shape[0]):
                for left in range(0, 16, cell.shape[1]):
                    spot = changed[time, top : top + cell.shape[0], left : left + cell.shape[1]]
                    if np.array_equal(spot, cell):
                        spot += 90
        moved = (rows.rows(video.collate([changed])).values[0] - before).abs().amax(1) > 1e-5
        assert moved.nonzero().flatten().tolist() == [place]


@pytest.mark.parametrize("front", [FrameEmbedding, TubeletEmbedding])
def test_videos_in_a_batch_are_independent(front, sample_video):
    video, path = sample_video
    kept = video.read(str(path))
    rows = front(12, shape=video.shape, **({"stages": 2} if front is FrameEmbedding else {"patch_size": 4})).eval()
    both = rows.rows(video.collate([kept, kept[::-1].copy()]))
    assert isinstance(both, Padded)
    assert_close(both.values[:1], rows.rows(video.collate([kept])).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("front", "options", "problem"),
    [
        (FrameEmbedding, {"stages": 4}, "cannot halve"),
        (TubeletEmbedding, {"patch_size": 5}, "do not tile"),
        (TubeletEmbedding, {"tubelet_size": 3}, "4 frames"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(front, options, problem):
    with pytest.raises(InputError, match=problem):
        front(12, shape=(4, 8, 16, 3), **options)
