"""Palette tokenizer: round trips, determinism, invalid lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture

from transduce.errors import InputError
from transduce.modalities.image_tokenizers import PaletteTokenizer, image_grid

COLOURS = np.array([[250, 250, 250], [200, 10, 10], [10, 10, 200], [10, 180, 10]], np.uint8)


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(4, 9))
def test_images_of_few_colours_round_trip(numbers, count):
    picture = COLOURS[numbers].reshape(3, 4, 3)
    palette = PaletteTokenizer.fit([picture], count)
    assert len(palette.colours) == len(set(numbers))
    drawn, fits = palette.decode(palette.encode(picture))
    assert fits
    assert np.array_equal(drawn, picture)


def test_palette_colours_are_cluster_means():
    noise = np.random.default_rng(1).integers(-9, 10, (20, 8, 8, 3))
    which = np.random.default_rng(2).integers(0, 4, (20, 8, 8))
    pictures = list((COLOURS[which].astype(int) + noise).clip(0, 255).astype(np.uint8))
    palette = PaletteTokenizer.fit(pictures, 4)
    distance = np.abs(palette.colours[:, None].astype(int) - COLOURS[None].astype(int)).max(-1)
    assert sorted(distance.argmin(1)) == [0, 1, 2, 3]
    assert distance.min(1).max() <= 6
    assert np.array_equal(palette.colours, PaletteTokenizer.fit(pictures, 4).colours)


def test_palette_decodes_invalid_lines_as_far_as_possible():
    palette = PaletteTokenizer(COLOURS, 2, 2)
    assert palette.decode("c1 c2 c3 c0")[1]
    for line in ("c1 c2", "c1 c2 c3 c0 c0", "c1 c2 <unk> c0", ""):
        drawn, fits = palette.decode(line)
        assert not fits
        assert drawn.shape == (2, 2, 3)
    assert palette.decode("c1 c2")[0].tolist() == [[[200, 10, 10], [10, 10, 200]], [[255] * 3] * 2]


def test_palette_is_saved_and_loaded(tmp_path):
    palette = PaletteTokenizer(COLOURS, 3, 4)
    palette.save(tmp_path / "palette.json")
    again = PaletteTokenizer.load(tmp_path / "palette.json")
    assert (again.height, again.width, again.colours.tolist()) == (3, 4, COLOURS.tolist())
    good = json.loads((tmp_path / "palette.json").read_text())
    for bad in ({**good, "colours": [[1, 2]]}, {**good, "colours": [[1, 2, 300]]}, {**good, "height": 0}, [], {}):
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(InputError, match="not a palette"):
            PaletteTokenizer.load(tmp_path / "bad.json")


def test_image_grid_shows_every_image_once():
    pictures = [np.full((2, 3, 3), shade, np.uint8) for shade in (10, 20, 30)]
    sheet = image_grid(pictures, scale=2, gap=1)
    assert sheet.shape == (2 * 5 + 1, 2 * 7 + 1, 3)
    counts = {shade: int((sheet[..., 0] == shade).sum()) for shade in (10, 20, 30)}
    assert counts == {10: 24, 20: 24, 30: 24}
    assert Picture.fromarray(sheet).size == (15, 11)
