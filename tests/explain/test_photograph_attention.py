"""Measures of attention on photographs: mosaics of four pictures, and the border of a picture."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from transduce.contracts import VisualSource
from transduce.explain.attention import Explanation

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import photograph_attention as measured

GRID = (10, 10)
CELLS = GRID[0] * GRID[1]
COLOURS = {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250), "grey": (99, 99, 99)}


def explanation(words: list[str], weights: np.ndarray) -> Explanation:
    """A caption whose words have these weights (T S) on a grid of cells."""
    names = [f"{row},{column}" for row in range(1, 11) for column in range(1, 11)]
    tokens = [words[0], *(f" {word}" for word in words[1:])]
    scene = VisualSource(np.zeros((80, 80, 3), np.uint8), GRID)
    count, zeros = range(len(words)), [0.0] * len(words)
    return Explanation("x.png", " ".join(words), names, tokens, range(CELLS), count, zeros, 0.0, weights[None, None],
                       source_labels=names, visual_sources=[scene])  # fmt: skip


def pictures(folder: Path) -> dict[str, str]:
    for name, colour in COLOURS.items():
        Image.new("RGB", (60, 40), colour).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in COLOURS}


def test_quarters_of_a_mosaic_are_its_pictures_row_by_row(tmp_path):
    measured.write_mosaic(list(pictures(tmp_path).values()), tmp_path / "four.png")
    four = np.asarray(Image.open(tmp_path / "four.png"))
    assert four.shape == (2 * measured.TILE, 2 * measured.TILE, 3)
    for quarter, colour in enumerate(COLOURS.values()):
        left, top, right, bottom = map(int, measured.quarter_box(quarter))
        assert (four[top:bottom, left:right] == colour).all()


def test_words_of_a_picture_are_those_that_no_other_picture_has():
    explained = explanation(["A", "dog", "and", "a", "ball"], np.full((5, CELLS), 1 / CELLS))
    assert measured.own_words(explained, {"a", "dog", "ball", "runs"}, [{"a", "boy"}, {"ball"}]) == [1]


@pytest.mark.parametrize(("cell", "share"), [(0, 1), (9, 1), (45, 0), (90, 1), (11, 0), (59, 1)])
def test_border_is_the_outermost_cells(cell, share):
    explained = explanation(["dog"], np.eye(CELLS)[[cell]])
    assert measured.border_share(explained, 0) == pytest.approx(share)


def test_even_attention_has_the_border_of_the_grid():
    explained = explanation(["dog"], np.full((1, CELLS), 1 / CELLS))
    assert measured.border_share(explained, 0) == pytest.approx(measured.even_border(explained)) == pytest.approx(0.36)


class Stub:
    """A model whose words attend to the cells of their colour; with `even`, to all cells.

    Its posteriors are the other way round.
    """

    def __init__(self, even: bool) -> None:
        self.even = even

    def explain(
        self, path: str, caption: str, methods: list[str] | None = None, *, measures: bool = False
    ) -> Explanation:
        found = self._attending(path, caption, self.even)
        if methods is None:
            return found
        assert not measures
        return replace(found, attributions={"posterior": self._attending(path, caption, not self.even).attention[0, 0]})

    def _attending(self, path: str, caption: str, even: bool) -> Explanation:
        pixels = np.asarray(Image.open(path).resize(GRID, Image.Resampling.NEAREST)).reshape(CELLS, 3)
        words = caption.split()
        weights = np.full((len(words), CELLS), 1 / CELLS)
        for row, word in enumerate(words):
            if word in COLOURS and not even:
                found = (pixels == COLOURS[word]).all(-1)
                weights[row] = found / found.sum()
        return explanation(words, weights)


@pytest.mark.parametrize(
    ("even", "method", "quarter"),
    [(False, "attention", 100), (True, "attention", 25), (True, "posterior", 100), (False, "posterior", 25)],
)
def test_mosaics_tell_attention_to_the_named_picture_from_even_attention(tmp_path, even, method, quarter):
    names = pictures(tmp_path)
    captions = {path: f"a {name} wall" for name, path in names.items()}
    words = {path: {"a", name, "wall"} for name, path in names.items()}
    found = measured.mosaic_measures(Stub(even), method, captions, words)
    assert found == {"quarter": pytest.approx(quarter), "pointed": pytest.approx(quarter), "words": 4}


def test_caption_measures_are_means_over_words_and_captions():
    centre, corner = np.eye(CELLS)[[45]], np.eye(CELLS)[[0]]
    faith = SimpleNamespace(comprehensiveness=0.5, random_comprehensiveness=0.1, rank_correlation=0.2)
    vain = SimpleNamespace(comprehensiveness=0.1, random_comprehensiveness=0.1, rank_correlation=None)
    both = [
        replace(explanation(["dog"], weights), faithfulness={"attention": one}, uniform_swap=SimpleNamespace(all=swap))
        for weights, one, swap in ((centre, faith, 0.3), (corner, vain, 0.1))
    ]
    found = measured.caption_measures([*both, explanation(["dog"], corner)])
    wanted = {
        "border": 200 / 3,
        "even": 36,
        "removed": 0.3,
        "random": 0.1,
        "occlusion": 0.1,
        "swap": 0.2,
        "readable": 50,
        "removals": 2,
    }
    assert found == {name: pytest.approx(value) for name, value in wanted.items()}
    unswapped = [replace(one, uniform_swap=None) for one in both]
    assert measured.caption_measures(unswapped).keys() == wanted.keys() - {"swap"}


def test_captions_of_a_picture_are_read_together(tmp_path):
    (tmp_path / "c.tsv").write_text("a.png\tA dog .\nb.png\ta cat\na.png\tone Dog runs\nc.png\tx\n")
    found = measured.read_captions(tmp_path / "c.tsv", 2)
    assert found == {str(tmp_path / "a.png"): {"a", "dog", ".", "one", "runs"}, str(tmp_path / "b.png"): {"a", "cat"}}
