"""Heat maps in the terminal: alignment of columns in any script, width, colour."""

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from transduce.explain import terminal
from transduce.explain.attention import AttentionMap

SCRIPTS = ["März", "日本語", "नमस्ते", "שלום", "e\u0301te\u0301", "a", "한국어", "👩‍👩‍👧", " ", "", "a\nb"]


def attention(source: list[str], target: list[str], weights: np.ndarray | None = None) -> AttentionMap:
    if weights is None:
        weights = np.random.default_rng(0).dirichlet(np.full(len(source), 0.3), size=len(target))
    return AttentionMap(weights, source, target, list(range(len(source))), list(range(len(target))))


def drawn(
    map_: AttentionMap, width: int = 80, colour: str | None = None, encoding: str = "utf-8", how=terminal.draw
) -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(file=file, width=width, color_system=colour, force_terminal=colour is not None)  # type: ignore[arg-type]
    how(map_, console)
    file.flush()
    return raw.getvalue().decode(encoding).split("\n")


def test_small_map_output() -> None:
    map_ = attention(["ab", "c"], ["x", "yy"], np.array([[1.0, 0.0], [0.26, 0.74]]))
    assert drawn(map_)[:5] == ["      a", "      b   c", "x   █99   ·", "yy  ▒26 ▓74", ""]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=30),
    st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=5),
    st.integers(24, 100),
)
def test_rows_have_equal_width_in_any_script_and_fit(source: list[str], target: list[str], width: int) -> None:
    lines = drawn(attention(source, target), width)
    body = lines[: lines.index(next(line for line in lines if line.startswith("percent")))]
    panels, panel = [], []
    for line in body:
        if line:
            panel.append(line)
        else:
            panels.append(panel)
            panel = []
    for panel in panels:
        rows = panel[-len(target) :]
        assert len({cell_len(row) for row in rows}) == 1
        assert all(cell_len(line) <= min(width, cell_len(rows[0])) for line in panel)
    # One number or dot for each pair: nothing is lost between the panels.
    cell = 4 if len(panels) == 1 and 4 * len(source) <= width - 1 - min(18, max(map(_shown, target))) else 3
    margin = min(18, max(map(_shown, target))) + 1
    assert sum((cell_len(panel[-1]) - margin) // cell for panel in panels) == len(source)


def _shown(token: str) -> int:
    return cell_len(terminal._label(token, False))


def test_headers_are_above_their_columns() -> None:
    lines = drawn(attention(["x", "日", "y"], ["t"], np.array([[0.5, 0.3, 0.2]])))
    header, row = lines[:2]
    assert header.index("x") == row.index("50") + 1
    before = header[: header.index("日")]
    assert cell_len(before) == row.index("30")  # a wide character stands over both digits


def test_coloured_output_has_the_same_numbers() -> None:
    map_ = attention(["ab", "c"], ["x"], np.array([[0.64, 0.36]]))
    text = "\n".join(drawn(map_, colour="truecolor"))
    assert "64" in text
    assert "36" in text
    assert "\x1b[" in text


def test_long_sources_continue_in_further_panels() -> None:
    lines = drawn(attention([f"w{i:02}" for i in range(50)], ["t"]), width=40)
    assert sum(line.startswith("t ") for line in lines) == 5  # 38 cells, 3 each: 12 columns a panel


def test_control_characters_in_labels_are_removed() -> None:
    text = "\n".join(drawn(attention(["\x1b[2J", "[red]a[/red]"], ["[bold]", "\r\n"])))
    assert "\x1b" not in text
    assert "\r" not in text
    assert "[bold]" in text


def test_ascii_terminals() -> None:
    lines = drawn(attention(["März", "日"], ["x" * 30, " "], np.array([[1, 0], [0.3, 0.7]])), encoding="ascii")
    assert any("#99" in line for line in lines)
    assert any("?" in line for line in lines)


def test_empty_map() -> None:
    assert "empty" in drawn(attention([], ["a"], np.zeros((1, 0))))[0]


def test_draw_strongest_prints_the_largest_weights() -> None:
    map_ = attention(["1,1", "1,2", "2,1"], ["x", "yyy"], np.array([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]))
    lines = drawn(map_, how=lambda map_, console: terminal.draw_strongest(map_, console, count=2))
    assert lines[:2] == ["x   1,2 70%  2,1 20%", "yyy 1,1 50%  2,1 40%"]
