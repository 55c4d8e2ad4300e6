"""Attention over pictures and recordings: the right cell, the right time, nothing on padding."""

import io
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from studio_runs import CELL, CELLS, draw_square

import transduce
from transduce.contracts import VisualSource
from transduce.errors import InputError
from transduce.studio.overlays import cell_box, column_at, overlays, recording


@pytest.mark.parametrize("cell", [0, 6, 15])
def test_the_peak_lies_on_the_bright_square(squares_run: Path, tmp_path: Path, cell: int) -> None:
    draw_square(tmp_path / "square.png", "blue", cell)
    found = overlays(transduce.load(squares_run).explain(str(tmp_path / "square.png")))
    assert found["output"] == "blue square"
    (picture,) = found["pictures"]
    assert picture["grid"] == [CELLS, CELLS]
    assert int(np.argmax(picture["maps"][0])) == cell
    row, column = divmod(cell, CELLS)
    assert picture["peaks"][0] == {
        "left": column * CELL,
        "top": row * CELL,
        "right": (column + 1) * CELL,
        "bottom": (row + 1) * CELL,
    }
    assert picture["mass"] == pytest.approx([1.0] * len(found["tokens"]), abs=1e-3)


def test_a_model_without_attention_shows_an_attribution(squares_run: Path, tmp_path: Path) -> None:
    draw_square(tmp_path / "square.png", "blue", 6)
    explained = transduce.load(squares_run).explain(str(tmp_path / "square.png"), methods=["occlusion"])
    found = overlays(replace(explained, attention=None))
    assert (found["method"], found["layers"], found["heads"]) == ("occlusion", 1, 1)
    shares = np.abs(explained.attributions["occlusion"])
    maps = np.array(found["pictures"][0]["maps"])
    assert found["tokens"] == list(explained.target_tokens[:-1])  # without </s>
    assert maps == pytest.approx((shares[:, : CELLS * CELLS] / shares.sum(1, keepdims=True))[:-1], abs=1e-6)
    assert int(maps[0].argmax()) == 6
    with pytest.raises(InputError, match="no attention over its source"):
        overlays(replace(explained, attention=None, attributions={}))


def test_cells_tile_the_picture_and_columns_the_time() -> None:
    source = VisualSource(np.zeros((30, 50, 3), np.uint8), (3, 4))
    boxes = [cell_box(source, cell) for cell in range(12)]
    assert sum((one.right - one.left) * (one.bottom - one.top) for one in boxes) == pytest.approx(30 * 50)
    assert (boxes[5].left, boxes[5].top) == (12.5, 10)
    sound = VisualSource(np.zeros((20, 100, 3), np.uint8), (1, 25), across="seconds", extent=5.0)
    assert [column_at(sound, time) for time in (0.0, 0.19, 0.21, 4.99, 5.0, 9.0)] == [0, 0, 1, 24, 24, 24]


def test_a_padded_recording_has_no_attention_on_its_padding(recordings_run: Path) -> None:
    model = transduce.load(recordings_run)
    clips = sorted(recordings_run.parent.rglob("*.wav"), key=lambda path: path.stat().st_size)
    short, long = str(clips[0]), str(clips[-1])
    together = model.generate([short, long])  # one batch: the short one is padded with silence
    alone = model.explain(short)
    found = overlays(together[0].explanation)
    (picture,) = found["pictures"]
    assert picture["mass"] == pytest.approx([1.0] * len(found["tokens"]), abs=1e-3)
    assert np.array(picture["maps"]) == pytest.approx(np.array(overlays(alone)["pictures"][0]["maps"]), abs=1e-4)
    assert picture["across"] == "seconds"


def test_the_recording_is_what_the_model_hears(recordings_run: Path) -> None:
    model, clip = transduce.load(recordings_run), next(recordings_run.parent.rglob("*.wav"))
    with wave.open(io.BytesIO(recording(model, str(clip)))) as heard:
        seconds = heard.getnframes() / heard.getframerate()
    (picture,) = model.explain(str(clip)).visual_sources
    assert seconds == pytest.approx(picture.extent, abs=0.05)


def test_texts_have_no_overlay(model: transduce.Model) -> None:
    with pytest.raises(InputError, match="not a picture"):
        overlays(model.explain("red blue"))
    with pytest.raises(InputError, match="does not hear"):
        recording(model, "red blue")
