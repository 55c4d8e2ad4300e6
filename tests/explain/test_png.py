"""PNG images of attention maps: scripts, sizes, labels, warnings."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from transduce.explain import png as picture
from transduce.explain.attention import AttentionMap


def attention(source: list[str], target: list[str]) -> AttentionMap:
    weights = np.random.default_rng(0).dirichlet(np.full(max(1, len(source)), 0.3), size=len(target))
    return AttentionMap(weights[:, : len(source)], source, target, list(range(len(source))), list(range(len(target))))


def size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.parametrize(
    "labels",
    [
        ["Dienstag", "März", "日本語", "नमस्ते", "مرحبا", "שלום", "ქართ", "👩‍👩‍👧", "\U000f0000", "\ud800", "\x00\n"],
        ["$x^", "$\\frac{", "_", "", " ", "\\", "%s {0}"],
        ["long" * 50],
    ],
)
def test_any_label_is_drawn_without_a_warning(labels: list[str], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture.draw_map(attention(labels, labels), tmp_path / "map.png", title=labels[0], subtitle=labels[-1])
        picture.draw_grid([(labels[0], attention(labels, labels))] * 3, tmp_path / "grid.png", labels[0], labels[-1])
    assert size(tmp_path / "map.png")[0] > 100
    assert size(tmp_path / "grid.png")[0] > 100


def test_image_size_grows_with_the_map_up_to_a_limit(tmp_path: Path) -> None:
    sizes = []
    for length in (3, 30, 300):
        picture.draw_map(attention(["a"] * length, ["b"] * 5), tmp_path / "map.png")
        sizes.append(size(tmp_path / "map.png")[0])
    assert sizes[0] < sizes[1] < sizes[2] <= 30_000


def test_large_weights_are_dark(tmp_path: Path) -> None:
    from matplotlib.image import imread

    one = AttentionMap(np.eye(4), list("abcd"), list("abcd"), [0, 1, 2, 3], [0, 1, 2, 3])
    other = AttentionMap(np.eye(4)[::-1], list("abcd"), list("abcd"), [0, 1, 2, 3], [0, 1, 2, 3])
    dark = []
    for number, map_ in enumerate((one, other)):
        picture.draw_map(map_, tmp_path / f"{number}.png")
        image = imread(tmp_path / f"{number}.png")
        blue = (image[..., 2] - image[..., 0] > 0.25) & (image[..., 2] < 0.6)  # cells of weight 1
        rows, columns = np.nonzero(blue[:, : int(image.shape[1] * 0.7)])  # without the colour bar
        dark.append(np.corrcoef(rows, columns)[0, 1])
    assert dark[0] > 0.8
    assert dark[1] < -0.8


def test_single_cells_are_drawn_and_empty_grids_rejected(tmp_path: Path) -> None:
    picture.draw_map(AttentionMap(np.zeros((1, 1)), ["a"], ["b"], [0], [-1]), tmp_path / "one.png")
    with pytest.raises(ValueError, match="at least one"):
        picture.draw_grid([], tmp_path / "none.png")


@pytest.mark.slow
def test_matplotlib_is_imported_late_and_without_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from transduce.explain import png\n"
        "from transduce.explain.attention import AttentionMap\n"
        "assert 'matplotlib' not in sys.modules\n"
        "png.draw_map(AttentionMap(np.ones((1, 1)), ['a'], ['b'], [0], [0]), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "map.png")], check=True)
