"""Attention overlay: weights on the pixels of their cells, in PNG and HTML."""

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from transduce.contracts import VisualSource
from transduce.explain import png
from transduce.explain.alignment import share_in_box
from transduce.explain.attention import AttentionMap, Explanation
from transduce.explain.html import render_page


def scene(height: int, width: int, grid: tuple[int, int], **more) -> VisualSource:
    return VisualSource(np.full((height, width, 3), 200, np.uint8), grid, **more)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9), st.data())
def test_the_veil_is_clear_on_the_pixels_of_the_attended_cell_alone(rows, columns, more_down, more_across, data):
    height, width = rows * 3 + more_down, columns * 3 + more_across
    shown = scene(height, width, (rows, columns))
    cell = data.draw(st.integers(0, rows * columns - 1))
    weights = np.zeros(rows * columns)
    weights[cell] = 0.3
    clear = (png.paint(shown, weights, 0.3) == 200).all(-1)
    row, column = divmod(cell, columns)
    for y in range(height):
        for x in range(width):
            assert clear[y, x] == (y * rows // height == row and x * columns // width == column)


def test_cells_have_equal_size():
    clear = (png.paint(scene(64, 64, (8, 8)), np.eye(64)[19], 1.0) == 200).all(-1)
    assert clear[16:24, 24:32].all()
    assert clear.sum() == 64


def test_the_veil_thins_as_the_weight_grows():
    found = png.paint(scene(4, 12, (1, 3)), np.array([0.0, 0.2, 0.4]), 0.4).astype(int)
    none, half, all_of_it = found[0, ::4]
    np.testing.assert_array_equal(none, np.rint(0.2 * 200 + 0.8 * png.VEIL))
    np.testing.assert_array_equal(half, np.rint(0.6 * 200 + 0.4 * png.VEIL))
    assert (all_of_it == 200).all()


def explained(*scenes: VisualSource, cells: int) -> Explanation:
    weights = np.random.default_rng(1).dirichlet(np.ones(cells), (1, 1, 3)).astype(np.float32)
    names = [str(number) for number in range(cells)]
    return Explanation("x.png", "a b", names, ["a", " b", "</s>"], range(cells), [0, 1, -1], [0.0] * 3, 0.0, weights,
                     source_labels=names, visual_sources=scenes)  # fmt: skip


def test_visual_source_uses_its_own_memory_rows():
    shown = scene(8, 8, (2, 2), begin=3)
    one = explained(shown, cells=9)
    assert np.array_equal(png.source_weights(shown, one.map()), one.map().weights[:, 3:7])


@pytest.mark.parametrize("kind", ["picture", "sound", "both"])
def test_png_has_one_panel_per_word(tmp_path, kind):
    picture, sound = scene(16, 16, (2, 2)), scene(20, 90, (1, 7), begin=4, across="seconds", extent=1.5)
    scenes = {"picture": [picture], "sound": [sound], "both": [picture, sound]}[kind]
    png.draw_overlay(scenes, explained(*scenes, cells=11).map(), tmp_path / "x.png", "a title", "x.png")
    assert Pillow.open(tmp_path / "x.png").width > 300


def test_long_text_is_truncated_with_a_note(tmp_path):
    words = [f"w{number}" for number in range(70)]
    weights = np.full((70, 4), 0.25)
    attention = AttentionMap(weights, list("abcd"), words, range(4), range(70))
    png.draw_overlay([scene(8, 8, (2, 2))], attention, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").stat().st_size > 0


def test_html_page_contains_the_pixels_and_loads_nothing(tmp_path):
    shown = VisualSource(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3), (2, 3))
    page = render_page([explained(shown, cells=6)])
    data = json.loads(re.search(r'id="page">(.*?)</script>', page, re.S)[1])
    (found,) = data["explanations"][0]["pictures"]
    assert found["size"] == [4, 6]
    assert found["grid"] == [2, 3]
    assert found["begin"] == 0
    pixels = np.frombuffer(base64.b64decode(found["pixels"]), np.uint8).reshape(4, 6, 3)
    assert np.array_equal(pixels, shown.pixels)
    assert "default-src 'none'" in page


def test_one_scale_serves_all_panels_and_the_words_of_a_question(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(png, "save", lambda figure, path: drawn.append(figure))
    weights = np.array([[0.02, 0.0, 0.0, 0.0, 0.9, 0.08], [0.01, 0.01, 0.0, 0.0, 0.08, 0.9]])
    attention = AttentionMap(weights, [*"0123", "what", "colour"], [" red", "</s>"], range(6), [0, -1])
    shown = scene(8, 8, (2, 2))
    assert png.other_columns([shown], attention) == [4, 5]
    png.draw_overlay([shown], attention, tmp_path / "x.png")
    *panels, question = drawn[0].axes
    assert [panel.get_title("left") for panel in panels] == ["", "red", "</s>"]
    # A picture with 2 % of the attention stays dark; the words are on the same scale.
    assert panels[0].images[0].get_array().min() == 200
    assert panels[1].images[0].get_array().max() < 60
    assert [label.get_text() for label in question.get_xticklabels()] == ["what", "colour"]
    assert question.images[0].get_array().max() == pytest.approx(0.9)
    assert question.images[0].norm.vmax == pytest.approx(0.9)


def test_share_in_a_box_counts_the_area_of_cells():
    """Uniform attention has the share of the box; attention on one cell has the part of that cell inside it."""
    drawn = scene(8, 8, (2, 4), begin=1)
    weights = np.zeros((1, 1, 2, 9))
    weights[0, 0, 0, 1:] = 1 / 8
    weights[0, 0, 1, 1 + 6] = 1  # second row, third column: x 4 to 6, y 4 to 8 of a picture of 8 x 8
    names = [str(number) for number in range(9)]
    explained = Explanation(
        "x", "a b", names, ["a", "b"], range(9), [0, 1], [0, 0], 0.0, weights, visual_sources=[drawn]
    )
    assert share_in_box(explained, 0, (1, 2, 5, 8), (8, 8)) == pytest.approx(4 * 6 / 64)
    assert share_in_box(explained, 1, (4, 4, 6, 8), (8, 8)) == pytest.approx(1)
    assert share_in_box(explained, 1, (5, 0, 8, 6), (8, 8)) == pytest.approx(0.25)
    assert share_in_box(explained, 1, (0, 0, 4, 8), (8, 8)) == 0
