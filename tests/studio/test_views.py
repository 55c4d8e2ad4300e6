"""Views of the studio in a browser: what the page shows is what the server computed."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from conftest import fetch
from PIL import Image
from playwright.sync_api import Page, expect
from run_fixtures import Command

from transduce.studio.runs import GoldFiles, Studio

pytestmark = pytest.mark.slow  # a browser
SOURCE = "black white red green"


def address(view: str, **params: str) -> str:
    return f"/#/{view}?{urlencode({'run': 'reverse', 'source': SOURCE, **params})}"


def cells(page: Page, testid: str = "cell") -> list[list[float]]:
    """The values that the cells of a map carry, row by row."""
    page.get_by_test_id(testid).first.wait_for()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    found = page.get_by_test_id(testid).evaluate_all(
        "all => all.map(one => [+one.dataset.row, +one.dataset.column, +one.dataset.value])"
    )
    rows: dict[int, list[float]] = {}
    for row, _, value in sorted(found):
        rows.setdefault(int(row), []).append(value)
    return list(rows.values())


def test_alignment_map_shows_the_tensor(tab: Page) -> None:
    tab.goto(address("alignment"))
    shown = cells(tab)
    expected = fetch(tab, f"map?{urlencode({'run': 'reverse', 'source': SOURCE})}")["weights"]
    assert len(shown) == len(expected)
    for row, known in zip(shown, expected, strict=True):
        assert row == pytest.approx(known, abs=1e-4)
        assert sum(row) == pytest.approx(1, abs=1e-3)
    words = len(SOURCE.split())
    assert [row.index(max(row)) for row in shown[:words]] == [words - 1 - number for number in range(words)]
    expect(tab.get_by_test_id("output")).to_have_text("GREEN RED WHITE BLACK")


def test_alignment_map_by_method_and_step(tab: Page) -> None:
    tab.goto(address("alignment"))
    plain = cells(tab)
    tab.get_by_test_id("shift").check()
    expect(tab.get_by_test_id("reading")).to_contain_text("as input")
    assert cells(tab) == [*plain[1:], plain[-1]]
    tab.get_by_test_id("method").select_option("occlusion")
    expect(tab.get_by_test_id("legend")).to_contain_text("change of log p")
    expect(tab.get_by_test_id("trust")).to_contain_text("rows")
    query = urlencode({"run": "reverse", "source": SOURCE, "method": "occlusion"})
    for row, known in zip(cells(tab), fetch(tab, f"attribution?{query}")["weights"], strict=True):
        assert row == pytest.approx(known, abs=1e-4)
    assert "method=occlusion" in tab.url


def test_a_first_visit_shows_an_example_that_was_run(tab: Page) -> None:
    tab.goto("/")
    assert cells(tab)
    expect(tab.get_by_test_id("source")).not_to_have_value("")
    tab.get_by_test_id("source").fill("blue green red")
    tab.get_by_test_id("go").click()
    expect(tab.get_by_test_id("output")).to_have_text("RED GREEN BLUE")
    assert "source=blue+green+red" in tab.url


def test_head_view_draws_the_weights_above_the_threshold(tab: Page) -> None:
    tab.goto(address("heads", run="transformer", above="0.1", head="1", layer="0"))
    query = {"run": "transformer", "source": SOURCE, "kind": "cross", "layer": "0", "head": "1"}
    tab.get_by_test_id("line").first.wait_for(state="attached")
    weights = fetch(tab, f"map?{urlencode(query)}")["weights"]
    expect(tab.get_by_test_id("line")).to_have_count(sum(value > 0.1 for row in weights for value in row))
    for token in (0, 3):
        tab.get_by_test_id("row-token").nth(token).hover()
        expect(tab.get_by_test_id("line")).to_have_count(sum(value > 0.1 for value in weights[token]))
        rows = tab.get_by_test_id("line").evaluate_all("all => all.map(one => one.dataset.row)")
        assert set(rows) <= {str(token)}
    for kind in ("encoder", "decoder"):
        tab.get_by_test_id(f"kind-{kind}").click()
        expect(tab).to_have_url(re.compile(f"kind={kind}"))
        tab.get_by_test_id("line").first.wait_for(state="attached")


def test_model_view_has_a_picture_of_every_head(tab: Page) -> None:
    tab.goto(address("model", run="transformer"))
    pictures = tab.get_by_test_id("thumbnail")
    pictures.first.wait_for()
    layers, heads, *_ = fetch(tab, f"explanation?{urlencode({'run': 'transformer', 'source': SOURCE})}")["kinds"][
        "cross"
    ]
    assert pictures.count() == layers * heads
    pictures.nth(1).click()
    expect(tab).to_have_url(re.compile("#/alignment.*layer=0&head=1"))
    expected = fetch(tab, f"map?{urlencode({'run': 'transformer', 'source': SOURCE, 'layer': '0', 'head': '1'})}")
    assert [row[0] for row in cells(tab)] == pytest.approx([row[0] for row in expected["weights"]], abs=1e-4)


def test_step_inspector_shows_falling_probabilities(tab: Page) -> None:
    tab.goto(address("steps", k="5", probe="BLUE", step="1"))
    shown = [float(one.get_attribute("data-value") or "nan") for one in _all(tab, "bar")]
    query = {"run": "reverse", "source": SOURCE, "k": "5", "probe": "BLUE"}
    step = fetch(tab, f"steps?{urlencode(query)}")["steps"][1]
    assert shown == pytest.approx([one["probability"] for one in step["top"]])
    assert len(shown) == 5
    assert shown == sorted(shown, reverse=True)
    assert sum(shown) <= 1 + 1e-6
    probed = tab.get_by_test_id("probe-probability").get_attribute("data-value")
    assert float(probed or "nan") == pytest.approx(step["probe"]["probability"])
    expect(tab.get_by_test_id("rank")).to_have_text("1")
    tab.get_by_test_id("reference").fill("GREEN BLUE")
    tab.get_by_text("Show", exact=True).click()
    forced = fetch(tab, f"steps?{urlencode({**query, 'target': 'GREEN BLUE'})}")["steps"][1]["reference"]
    expect(tab.get_by_test_id("rank")).to_have_text(str(forced["rank"]))
    value = tab.get_by_test_id("reference-probability").get_attribute("data-value")
    assert float(value or "nan") == pytest.approx(forced["probability"])
    assert forced["probability"] == pytest.approx(step["probe"]["probability"])


def test_what_if_marks_changed_tokens_and_undoes(tab: Page) -> None:
    tab.goto(address("what-if"))
    expect(tab.get_by_test_id("after")).to_have_text("GREEN RED WHITE BLACK")
    asked = f"what-if?{urlencode({'run': 'reverse', 'source': SOURCE})}"
    before = fetch(tab, asked)
    tab.get_by_test_id("edited").fill("black blue red green")
    tab.get_by_test_id("edit").click()
    expect(tab.get_by_test_id("after")).to_have_text("GREEN RED BLUE BLACK")
    marked = tab.locator("li.marked [data-testid=after-token]")
    assert [text.strip() for text in marked.all_inner_texts()] == ["BLUE"]
    tab.get_by_test_id("undo").click()
    expect(tab.get_by_test_id("after")).to_have_text("GREEN RED WHITE BLACK")
    assert "edited=" not in tab.url
    assert fetch(tab, asked) == before


def test_what_if_forces_attention_and_prefixes(tab: Page) -> None:
    tab.goto(address("what-if"))
    tab.get_by_test_id("row").select_option("2")
    tab.get_by_test_id("force-attention").click()
    expect(tab.get_by_test_id("change")).to_have_text("force-attention:cross:all:2")
    expect(tab.locator("[data-testid=cell][data-row='0'][data-column='2']")).to_have_attribute("data-value", "1")
    assert all(row.index(max(row)) == 2 for row in cells(tab))
    tab.get_by_test_id("undo").click()
    expect(tab.get_by_test_id("change")).to_have_count(0)
    tab.get_by_test_id("prefix").fill("BLUE")
    tab.get_by_test_id("force-prefix").click()
    expect(tab.get_by_test_id("after")).to_have_text(re.compile("^BLUE"))
    tab.get_by_test_id("undo").click()
    tab.get_by_test_id("source-token").nth(3).click()
    expect(tab.get_by_test_id("change")).to_have_text("mask-token:3")
    assert all(row[3] == pytest.approx(0, abs=1e-6) for row in cells(tab))


def test_what_if_masks_a_head_and_makes_attention_uniform(tab: Page, studio: Studio) -> None:
    tab.goto(address("what-if", run="transformer", source="red blue"))
    expect(tab.get_by_test_id("mask-head")).to_be_disabled()
    tab.get_by_test_id("layer").select_option(index=1)
    tab.get_by_test_id("head").select_option(index=2)  # the second head
    tab.get_by_test_id("mask-head").click()
    expect(tab.get_by_test_id("change")).to_have_text("mask-head:cross:0.1")
    with studio.runs["transformer"].lock:  # a view may still be computing
        model = studio.runs["transformer"].model
        changed = model.generate(["red blue"], interventions=["mask-head:cross:0.1"])[0]
    expect(tab.get_by_test_id("after")).to_have_text(changed.text)
    shown = [float(one.inner_text()) for one in tab.locator("li:has([data-testid=after-token]) small").all()]
    assert shown == pytest.approx([math.exp(score) for score in changed.token_scores], abs=0.006)  # two digits
    tab.get_by_test_id("undo").click()
    expect(tab.get_by_test_id("change")).to_have_count(0)
    tab.get_by_test_id("uniform").click()
    expect(tab.get_by_test_id("change")).to_have_text("uniform:cross:0.1")
    assert all(row == pytest.approx([1 / len(row)] * len(row), abs=1e-5) for row in cells(tab))


def test_attributions_side_by_side_with_curves(tab: Page) -> None:
    tab.goto(address("compare", first="integrated_gradients", second="attention"))
    for number, method in enumerate(("integrated_gradients", "attention")):
        found = fetch(tab, f"attribution?{urlencode({'run': 'reverse', 'source': SOURCE, 'method': method})}")
        for row, known in zip(cells(tab, f"cell-{number}"), found["weights"], strict=True):
            assert row == pytest.approx(known, abs=1e-4)
        tab.get_by_test_id("curve-point").first.wait_for()
        points = tab.locator(f"[data-testid=curve-point][data-line='{number}']")
        shown = points.evaluate_all("all => all.map(one => [+one.dataset.x, +one.dataset.value])")
        assert [x for x, _ in shown] == found["fractions"]
        assert [y for _, y in shown] == pytest.approx(found["deletion_curve"])
        verdict = tab.get_by_test_id(f"side-{number}").get_by_test_id("trust").inner_text()
        assert found["verdict"] in verdict
        assert found["verdict"]
    tab.get_by_test_id("second").select_option("integrated_gradients")  # a method beside itself
    expect(tab.locator("[data-testid=curve-point][data-series='Integrated gradients']")).to_have_count(10)


def test_gold_overlay_has_the_error_rate_of_the_command(
    tab: Page, studio: Studio, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [SOURCE, "red green blue", "blue white"]
    (tmp_path / "pairs.tsv").write_text(
        "".join(f"{one}\t{' '.join(reversed(one.upper().split()))}\n" for one in sources)
    )
    (tmp_path / "gold.txt").write_text("0-3 1-2 2-1 3-0\n0-2 1?1 2-1\n0-0 1-1\n")
    files = GoldFiles(str(tmp_path / "pairs.tsv"), str(tmp_path / "gold.txt"))
    monkeypatch.setitem(vars(studio), "gold", files)
    folder = studio.runs["reverse"].folder
    done = command("align", folder, files.pairs, "--gold", files.gold, "--json", tmp_path / "aer.json")
    assert done.code == 0, done.err
    expected = json.loads((tmp_path / "aer.json").read_text())["alignment_error_rate"]
    assert 0 < expected < 100
    tab.goto(address("gold", gold="0-3 1-2 2-1 3-1"))
    shown = tab.get_by_test_id("file-aer").get_attribute("data-value")
    assert 100 * float(shown or "nan") == pytest.approx(expected)
    own = fetch(tab, f"gold?{urlencode({'run': 'reverse', 'source': SOURCE, 'gold': '0-3 1-2 2-1 3-1'})}")
    assert own["links"] == [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert own["error_rate"] == pytest.approx(0.25)
    expect(tab.get_by_test_id("pair-aer")).to_have_attribute("data-value", str(own["error_rate"]))
    expect(tab.locator("td.marked")).to_have_count(4)
    tab.locator("[data-testid=cell][data-row='1'][data-column='3']").click()
    tab.locator("[data-testid=cell][data-row='0'][data-column='3']").click()
    expect(tab.get_by_test_id("pair-aer")).to_have_attribute("data-value", "0")


def test_saved_page_opens_without_a_network_and_equals_the_live_values(tab: Page, tmp_path: Path) -> None:
    tab.goto(address("alignment"))
    live = cells(tab)
    tab.get_by_test_id("trust").wait_for()
    with tab.expect_download() as download:
        tab.get_by_test_id("save-page").click()
    saved = tmp_path / "page.html"
    download.value.save_as(saved)
    context = tab.context.browser.new_context(offline=True)  # type: ignore[union-attr]
    reader = context.new_page()
    problems: list[str] = []
    reader.on("console", lambda message: problems.append(message.text))
    reader.on("pageerror", lambda error: problems.append(str(error)))
    reader.goto(saved.as_uri())
    assert cells(reader) == live
    expect(reader.get_by_test_id("output")).to_have_text("GREEN RED WHITE BLACK")
    expect(reader.get_by_test_id("trust")).to_contain_text("rows")
    reader.get_by_test_id("nav-steps").click()
    expect(reader.get_by_test_id("failure")).to_contain_text("does not contain")
    assert problems == []
    context.close()


def assert_colours_of_cells(svg: str, png: bytes) -> None:
    """The PNG is the SVG at twice its size: the middle of each cell has the colour that the SVG gives it."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    found = re.findall(r'<rect x="([^"]+)" y="([^"]+)" width="22" height="22" rx="3" fill="rgb\(([^)]+)\)"', svg)
    assert len(found) == svg.count("data-value")
    for x, y, colour in found:
        middle = picture.getpixel((round(2 * float(x) + 22), round(2 * float(y) + 22)))
        assert middle == pytest.approx([int(one) for one in colour.split()], abs=1)


def test_pictures_json_and_permalink(tab: Page) -> None:
    tab.goto(address("alignment", layer="0", read_at="input"))
    live = cells(tab)
    content = {}
    for name in ("svg", "png", "json"):
        with tab.expect_download() as download:
            tab.get_by_test_id(f"save-{name}").click()
        content[name] = Path(download.value.path()).read_bytes()
    values = [float(one) for one in re.findall(rb'data-value="([^"]+)"', content["svg"])]
    assert values == pytest.approx([value for row in live for value in row])
    assert_colours_of_cells(content["svg"].decode(), content["png"])
    assert "attention weight" in content["svg"].decode()  # the unit of the legend
    assert any("map?" in key for key in json.loads(content["json"]))
    other = tab.context.new_page()
    other.goto(tab.url)
    assert cells(other) == live
    expect(other.get_by_test_id("shift")).to_be_checked()


def _all(page: Page, testid: str) -> list[Any]:
    page.get_by_test_id(testid).first.wait_for()
    return page.get_by_test_id(testid).all()
