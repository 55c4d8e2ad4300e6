"""What holds for every view of the studio: errors, foreign requests, accessibility, narrow screens, lost servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import Server
from playwright.sync_api import Page, Route, expect

pytestmark = pytest.mark.slow  # a browser
VIEWS = sorted(
    re.search(r"id: '([\w-]+)'", path.read_text())[1]  # type: ignore[index]
    for path in (Path(__file__).parents[2] / "studio" / "src" / "views").glob("*.svelte")
)
SOURCE = "black white red green"
HOSTILE = "<img src=x onerror=alert(1)> </script><script>alert(2)</script> مرحبا بالعالم 你好 👩‍👩‍👧 \u202ered"
FITS = 400  # pixels of the narrowest screen


def address(view: str, **params: str) -> str:
    return f"/#/{view}?{urlencode({'run': 'reverse', 'source': SOURCE, **params})}"


def wait_until_idle(page: Page) -> None:
    """Waits until all answers are there."""
    page.locator("main h1").wait_for()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


def test_the_table_has_all_views(tab: Page) -> None:
    tab.goto("/")
    tab.get_by_test_id("nav-alignment").wait_for()
    links = tab.locator("nav a").evaluate_all("all => all.map(one => one.dataset.testid)")
    assert sorted(links) == [f"nav-{view}" for view in VIEWS]
    assert len(VIEWS) >= 7
    expect(tab.get_by_test_id("try").locator("a")).to_have_count(3)


@pytest.fixture(scope="module")
def axe() -> Axe:
    return Axe()


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_accessible_and_fit_narrow_screens(tab: Page, axe: Axe, view: str) -> None:
    """axe finds nothing serious, and enough contrast on a dark page too; nothing is wider than a telephone."""
    tab.goto(address(view))
    wait_until_idle(tab)
    for scheme in ("light", "dark"):
        if scheme == "dark":
            tab.get_by_role("button", name="Switch to the dark theme").click()
        rules = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
        found = axe.run(tab, options={"resultTypes": ["violations"], **rules}).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert not serious, [(one["id"], one["nodes"][0]["html"]) for one in serious]
    tab.set_viewport_size({"width": FITS, "height": 800})
    wait_until_idle(tab)
    # Not `wait_for_function`, which the content security policy of the studio refuses to evaluate again.
    for _ in range(50):
        if tab.evaluate("document.documentElement.scrollWidth") <= FITS:
            return
        tab.wait_for_timeout(100)
    assert tab.evaluate("document.documentElement.scrollWidth") <= FITS


@pytest.mark.parametrize("view", VIEWS)
def test_hostile_and_foreign_tokens_are_text(tab: Page, view: str) -> None:
    """No dialog opens and nothing is requested: see the fixture. The tokens are there, letter by letter."""
    tab.goto(address(view, source=HOSTILE, run="reverse"))
    wait_until_idle(tab)
    expect(tab.locator("main img")).to_have_count(0)
    assert tab.evaluate("document.scripts.length") == 1
    if tab.get_by_test_id("source").count():
        assert tab.get_by_test_id("source").input_value() == HOSTILE
    if view == "alignment":
        heads = tab.locator("thead th").all_inner_texts()
        assert {"</script><script>alert(2)</script>", "مرحبا", "你好", "👩‍👩‍👧", "red"} <= {
            one.strip() for one in heads
        }
        assert (
            tab.locator("thead th span", has_text="مرحبا").evaluate("one => getComputedStyle(one).direction") == "rtl"
        )


def lightness(colour: str) -> float:
    """The lightness (CIE L*) of a colour such as rgb(1, 2, 3)."""
    channels = [int(one) / 255 for one in re.findall(r"\d+", colour)[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * light ** (1 / 3) - 16 if light > 0.008856 else 903.3 * light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_larger_weight_differs_in_lightness(tab: Page, scheme: str) -> None:
    """A scale that changes in lightness alone in one direction can be read without telling colours apart."""
    tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    tab.goto(address("gates"))
    wait_until_idle(tab)
    found = tab.get_by_test_id("gate").evaluate_all(
        "all => all.map(one => [+one.dataset.value, getComputedStyle(one).backgroundColor])"
    )
    sign = -1 if scheme == "light" else 1
    levels = [sign * lightness(colour) for _, colour in sorted(found)]
    assert all(later >= earlier - 0.5 for earlier, later in pairwise(levels))  # rounded to 8 bits
    assert levels[-1] - levels[0] > 60
    assert tab.get_by_test_id("legend").count() == tab.locator("main figure").count()


def test_columns_stand_in_the_order_in_which_they_are_read(tab: Page) -> None:
    for source, sign in (("مرحبا بالعالم", -1), ("red green", 1)):
        tab.goto(address("alignment", source=source))
        expect(tab.locator(".cells thead th").first).to_contain_text(source.split()[0])
        first, second = (tab.locator(".cells thead th").nth(number).bounding_box() for number in (0, 1))
        assert first is not None
        assert second is not None
        assert sign * (second["x"] - first["x"]) > 0


def test_rows_of_tokens_run_in_the_direction_of_their_script(tab: Page) -> None:
    for source, sign in (("مرحبا بالعالم", -1), ("red green", 1)):
        tab.goto(address("neighbours", source=source))
        tokens = tab.locator("main ol button", has_text=re.compile("|".join(source.split())))
        expect(tokens.nth(1)).to_be_visible()
        first, second = (tokens.nth(number).bounding_box() for number in (0, 1))
        assert first is not None
        assert second is not None
        assert sign * (second["x"] - first["x"]) > 0


def test_every_view_can_be_reached_by_keyboard(tab: Page) -> None:
    tab.goto(address("alignment"))
    wait_until_idle(tab)
    tab.keyboard.press("Tab")
    expect(tab.locator(".skip")).to_be_focused()
    reached: list[str] = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        name = tab.evaluate("document.activeElement.dataset.testid ?? ''")
        if name.startswith("nav-"):
            reached.append(name)
        if len(reached) == len(VIEWS):
            break
    assert sorted(reached) == [f"nav-{view}" for view in VIEWS]
    tab.get_by_test_id("nav-steps").focus()
    tab.keyboard.press("Enter")
    expect(tab.locator("h1")).to_have_text("Step inspector")
    tab.goto(address("alignment"))
    wait_until_idle(tab)
    tab.get_by_test_id("cells").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    expect(tab.get_by_test_id("readout")).to_contain_text("output 2")
    expect(tab.get_by_test_id("readout")).to_contain_text("source 2")


def test_two_tabs_are_independent(tab: Page) -> None:
    other = tab.context.new_page()
    tab.goto(address("alignment", run="reverse"))
    other.goto(address("steps", run="transformer", source="blue red"))
    wait_until_idle(tab)
    wait_until_idle(other)
    expect(tab.get_by_test_id("source")).to_have_value(SOURCE)
    expect(tab.get_by_test_id("run")).to_have_value("reverse")
    expect(other.get_by_test_id("source")).to_have_value("blue red")
    expect(other.get_by_test_id("run")).to_have_value("transformer")
    other.get_by_test_id("run").select_option("reverse")
    tab.reload()
    wait_until_idle(tab)
    expect(tab.locator("h1")).to_have_text("Alignment map")


def test_a_lost_server_is_announced_and_found_again(tab: Page, server: Server) -> None:
    tab.goto(address("alignment", run="reverse"))
    wait_until_idle(tab)
    server.stop()
    tab.watched.expects_errors = True  # type: ignore[attr-defined]
    try:
        tab.get_by_test_id("source").fill("red green blue")
        tab.get_by_test_id("go").click()
        expect(tab.get_by_test_id("lost")).to_be_visible()
    finally:
        server.start()
    expect(tab.get_by_test_id("lost")).to_have_count(0)
    expect(tab.get_by_test_id("output")).to_have_text("BLUE GREEN RED")


@pytest.fixture(scope="module")
def weights() -> Iterator[np.ndarray]:
    rows = np.random.default_rng(1).random((2048, 2048), np.float32) ** 8
    return rows / rows.sum(1, keepdims=True)


def test_large_maps_are_drawn_by_tiles(tab: Page, weights: np.ndarray) -> None:
    """The tiles in sight are drawn, the others not; the row under the pointer is the row of the tensor."""
    names = [f"t{number}" for number in range(len(weights))]
    content = {"rows": names, "columns": names, "weights": None, "largest": float(weights.max()), "signed": False}

    def tile(route: Route) -> None:
        query = dict(part.split("=") for part in route.request.url.partition("?")[2].split("&"))
        top, left, size = (int(query[name]) for name in ("top", "left", "size"))
        part = np.ascontiguousarray(weights[top : top + size, left : left + size], "<f4")
        route.fulfill(body=part.tobytes(), content_type="application/octet-stream")

    tab.route("**/api/map?*", lambda route: route.fulfill(body=json.dumps({**content, "method": "attention"})))
    tab.route("**/api/map/tile?*", tile)
    tab.goto(address("alignment"))
    tab.locator("[data-testid=tile][data-drawn=true]").first.wait_for()
    wait_until_idle(tab)
    tiles = tab.get_by_test_id("tile")
    assert tiles.count() == 64
    assert 0 < tab.locator("[data-drawn=true]").count() < 64
    colours = tiles.first.evaluate("one => [...one.getContext('2d').getImageData(0, 0, 256, 1).data]")
    darkness = -np.array(colours).reshape(-1, 4)[:, :3].sum(1)
    order = np.argsort(weights[0, :256], kind="stable")
    assert (np.diff(darkness[order]) >= 0).all()  # a larger weight is never lighter
    tab.get_by_test_id("canvas-map").hover(position={"x": 100, "y": 7})
    tab.get_by_test_id("hovered-row").wait_for()
    shown = tab.get_by_test_id("hovered-row").locator("td").evaluate_all("all => all.map(one => +one.dataset.value)")
    row = int(tab.get_by_test_id("hovered-row").get_attribute("aria-label").split()[-1]) - 1  # type: ignore[union-attr]
    known = {float(value) for value in weights[row]}
    assert shown == sorted(shown, reverse=True)
    assert set(shown) <= known
    assert weights[row, :256].max() <= shown[0] + 1e-9
