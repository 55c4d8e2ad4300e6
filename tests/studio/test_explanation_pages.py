"""Pages of `explain --html` and frames of notebooks in a browser: components and values of the studio, no server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from conftest import TIMEOUT, fetch
from playwright.sync_api import Browser, Page, expect
from run_fixtures import Command
from studio_runs import draw_square
from test_model_views import attributes
from test_views import SOURCE, address, cells

import transduce
from transduce.explain.attention import to_words
from transduce.explain.html import notebook_frame, render_page
from transduce.inference import Model
from transduce.studio.runs import Studio, StudioRun

pytestmark = pytest.mark.slow  # a browser
RECORDED = {"nav-alignment", "nav-heads", "nav-model"}


@pytest.fixture
def reader(browser: Browser) -> Iterator[Page]:
    """A tab without a network. At its end it has reported nothing, and asked for nothing but its file."""
    context = browser.new_context(offline=True)
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    yield page
    context.close()
    assert problems == []


def wait_for_cells(page: Page, expected: list[list[float]]) -> None:
    """Waits until the map shows these numbers."""
    for _ in range(TIMEOUT // 100):
        shown = cells(page)
        if np.shape(shown) == np.shape(expected) and np.allclose(shown, expected, atol=1e-6):
            return
        page.wait_for_timeout(100)
    assert np.array(shown) == pytest.approx(np.array(expected), abs=1e-6)


def views(page: Page) -> set[str]:
    page.get_by_test_id("nav-alignment").wait_for()
    return set(page.locator("nav a").evaluate_all("all => all.map(one => one.dataset.testid)"))


def test_the_page_of_the_command_equals_the_studio(
    reader: Page, tab: Page, command: Command, transformer_run: Path, tmp_path: Path
) -> None:
    methods = ("--method", "attention", "--method", "integrated_gradients")
    done = command("explain", transformer_run, SOURCE, *methods, "--html", tmp_path / "page.html")
    assert done.code == 0, done.err
    reader.goto((tmp_path / "page.html").as_uri())
    assert views(reader) == {*RECORDED, "nav-compare"}
    for choice in ({}, {"layer": "0", "head": "1"}, {"read_at": "input"}):
        for name in ("layer", "head"):
            place = 1 + int(choice.get(name, -1))  # the first option is the mean
            reader.get_by_test_id(name).select_option(index=place)
        reader.get_by_test_id("shift").set_checked("read_at" in choice)
        query = urlencode({"run": "transformer", "source": SOURCE, **choice})
        wait_for_cells(reader, fetch(tab, f"map?{query}")["weights"])
    tab.goto(address("alignment", run="transformer"))
    expect(reader.get_by_test_id("trust")).to_have_text(tab.get_by_test_id("trust").inner_text())
    output = fetch(tab, f"explanation?{urlencode({'run': 'transformer', 'source': SOURCE})}")["output"]
    expect(reader.get_by_test_id("output")).to_have_text(output)
    reader.get_by_test_id("nav-model").click()
    expect(reader.get_by_test_id("thumbnail")).to_have_count(2)  # one layer, two heads
    reader.get_by_test_id("nav-compare").click()
    query = {"run": "transformer", "source": SOURCE, "method": "integrated_gradients"}
    found = fetch(tab, f"attribution?{urlencode(query)}")
    for row, known in zip(cells(reader, "cell-1"), found["weights"], strict=True):
        assert row == pytest.approx(known, abs=1e-5)
    curve = reader.locator("[data-testid=curve-point][data-line='1']")
    assert curve.evaluate_all("all => all.map(one => +one.dataset.value)") == pytest.approx(found["deletion_curve"])


def test_a_page_says_what_was_not_measured(reader: Page, model: Model, tmp_path: Path) -> None:
    sources = ["red green blue", "white <img src=x onerror=alert(1)>"]
    page = render_page([model.explain(one) for one in sources], "</title><b>run")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    reader.goto((tmp_path / "page.html").as_uri())
    assert views(reader) == RECORDED
    expect(reader.get_by_test_id("trust")).to_contain_text("Not measured")
    expect(reader.get_by_test_id("output")).to_have_text("BLUE GREEN RED")
    reader.get_by_test_id("examples").select_option(sources[1])
    expect(reader.get_by_test_id("source")).to_have_value(sources[1])
    assert len(cells(reader)[0]) == len(model.explain(sources[1]).source_tokens)
    expect(reader.locator("main img")).to_have_count(0)
    expect(reader.locator("header strong")).to_have_text("</title><b>run")


def test_a_page_of_a_model_without_attention_shows_its_output(
    reader: Page, bottleneck_run: Path, tmp_path: Path
) -> None:
    explained = transduce.load(bottleneck_run).explain("red green")
    (tmp_path / "page.html").write_text(render_page([explained]), encoding="utf-8")
    reader.goto((tmp_path / "page.html").as_uri())
    expect(reader.get_by_test_id("output")).to_have_text(explained.output)
    expect(reader.locator("main")).to_contain_text("no attention to draw")


def test_pictures_are_in_the_page(reader: Page, squares_run: Path, tmp_path: Path) -> None:
    draw_square(tmp_path / "square.png", "blue", 6)
    explained = transduce.load(squares_run).explain(str(tmp_path / "square.png"))
    (tmp_path / "page.html").write_text(render_page([explained]), encoding="utf-8")
    reader.goto((tmp_path / "page.html").as_uri())  # a picture opens its own view
    expect(reader.get_by_test_id("picture-overlay")).to_have_attribute("data-peak", "6")
    shown = [float(value) for (value,) in attributes(reader, "overlay-cell", "value")]
    assert shown == pytest.approx(explained.map().weights[0], abs=1e-6)


def test_the_frame_of_a_notebook_works_without_an_address(reader: Page, model: Model) -> None:
    reader.set_content(notebook_frame(model.explain(SOURCE, methods=["attention"])))
    frame = reader.frame_locator("iframe")
    expect(frame.get_by_test_id("output")).to_have_text("GREEN RED WHITE BLACK")
    frame.get_by_test_id("nav-heads").click()
    frame.get_by_test_id("line").first.wait_for(state="attached")
    frame.get_by_test_id("nav-alignment").click()
    frame.get_by_test_id("shift").check()
    expect(frame.get_by_test_id("reading")).to_contain_text("as input")


def test_maps_between_words(tab: Page, studio: Studio) -> None:
    tab.goto(address("alignment", run="transformer", source="red blue", level="word"))
    expected = to_words(studio.runs["transformer"].model.explain("red blue").map(), keep_end=True)
    for row, known in zip(cells(tab), expected.weights, strict=True):
        assert row == pytest.approx(known, abs=1e-5)
    heads = [one.strip() for one in tab.locator(".cells thead th").all_inner_texts()]
    assert heads == list(expected.source_tokens)
    tab.get_by_test_id("level").select_option("token")
    expect(tab.get_by_test_id("cell")).not_to_have_count(expected.weights.size)


def test_warnings_are_shown_with_the_output(tab: Page, studio: Studio) -> None:
    tab.goto(address("alignment"))
    expect(tab.get_by_test_id("no-warnings")).to_be_visible()
    change = "force-attention:cross:all:2"
    with studio.runs["reverse"].lock:  # a view may still be computing
        changed = studio.runs["reverse"].model.intervene([change]).generate([SOURCE])[0]
        assert "detached_attention" in {one.kind for one in changed.warnings}
    tab.goto(address("what-if", change=change))
    tab.get_by_test_id("warning").first.wait_for()
    shown = attributes(tab, "warning", "kind", "value")
    assert [(kind, pytest.approx(float(value))) for kind, value in shown] == [
        (one.kind, one.value) for one in changed.warnings
    ]
    tab.goto(address("alignment", run="transformer", source="red green blue white black"))
    known = fetch(tab, f"explanation?{urlencode({'run': 'transformer', 'source': 'red green blue white black'})}")
    expect(tab.get_by_test_id("warning")).to_have_count(len(known["warnings"]))
    tab.locator("summary").click()
    rivals = [float(value) for (value,) in attributes(tab, "rival", "value")]
    assert rivals == pytest.approx([one["score"] for one in known["nbest"]])


def test_heads_say_what_they_are_worth(tab: Page) -> None:
    tab.goto(address("model", run="transformer"))
    tab.get_by_test_id("worth").first.wait_for()
    query = urlencode({"run": "transformer", "source": SOURCE, "method": "attention"})
    swap = fetch(tab, f"attribution?{query}")["uniform_swap"]
    worth = [one for layer in swap["heads"] for one in layer]
    assert [float(value) for (value,) in attributes(tab, "worth", "value")] == pytest.approx(worth)
    said = tab.get_by_test_id("worth").all_inner_texts()
    assert [text == "not needed" for text in said] == [abs(one) < 0.05 for one in worth]


@pytest.mark.parametrize(
    ("view", "run"), [("alignment", "reverse"), ("heads", "transformer"), ("image", "squares"), ("audio", "recordings")]
)
def test_every_attention_map_says_how_far_it_can_be_trusted(tab: Page, studio: Studio, view: str, run: str) -> None:
    source = SOURCE if studio.runs[run].model.source_encoding.reads_text else studio.runs[run].examples[0]["source"]
    tab.goto(address(view, run=run, source=source))
    found = fetch(tab, f"attribution?{urlencode({'run': run, 'source': source, 'method': 'attention'})}")
    expect(tab.get_by_test_id("trust")).to_contain_text(found["verdict"])
    expect(tab.get_by_test_id("trust")).to_contain_text(found["uniform_swap"]["verdict"])


def test_a_map_too_large_to_measure_says_so(tab: Page) -> None:
    long = " ".join(["red", "blue", "green"] * 20)
    tab.goto(address("alignment", source=long, target=long.upper()))
    expect(tab.get_by_test_id("trust")).to_contain_text("Not measured")
    expect(tab.get_by_test_id("trust")).to_contain_text("transduce explain --method attention")


def test_maps_of_other_seeds_are_compared(
    tab: Page, studio: Studio, attention_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that differ in their seed alone are compared: here the same weights, and uniform attention."""
    model = studio.runs["reverse"].model
    assert studio.other_seeds(studio.runs["reverse"]) == []
    for seed, changes in ((91, []), (92, ["uniform:cross:all"])):
        other = transduce.load(attention_run).intervene(changes)
        training = other.recipe.training.model_copy(update={"seed": seed})
        other.recipe = other.recipe.model_copy(update={"training": training})
        name = f"seed-{seed}"
        monkeypatch.setitem(studio.runs, name, StudioRun(name, other, examples=["red"]))  # type: ignore[arg-type]
    assert [one.name for one in studio.other_seeds(studio.runs["reverse"])] == ["seed-91", "seed-92"]
    tab.goto(address("compare", first="attention", second="occlusion"))
    shown = [tuple(map(float, one)) for one in attributes(tab, "seed-0", "value", "low", "high")]
    weights = model.explain(SOURCE, methods=["attention"]).attributions["attention"]
    uniform = np.full_like(weights, 1 / weights.shape[1])
    from scipy.spatial.distance import jensenshannon  # here: every worker collects this file

    expected = jensenshannon(weights, uniform, axis=1, base=2) ** 2
    assert [mean for mean, _, _ in shown] == pytest.approx(expected * 2 / 3, abs=1e-5)  # of three pairs, two differ
    assert [low for _, low, _ in shown] == pytest.approx([0] * len(shown), abs=1e-6)
    assert [high for _, _, high in shown] == pytest.approx(expected, abs=1e-5)
    value = tab.get_by_test_id("measure-seed_variance").first.get_attribute("data-value")
    assert float(value or "nan") == pytest.approx(float(np.mean(expected * 2 / 3)), abs=1e-5)
    expect(tab.get_by_test_id("side-0")).to_contain_text(re.compile("trust"))
