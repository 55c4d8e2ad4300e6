"""Beam tree, insides, pictures, recordings and runs in a browser: what the page shows is what the server computed."""

from __future__ import annotations

import json
import math
import os
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from conftest import Server, fetch
from playwright.sync_api import Page, expect
from studio_runs import CELLS, draw_square
from test_views import SOURCE, address, cells

from transduce.run import LOCK_FILE
from transduce.studio.runs import Studio


def query(**params: Any) -> str:
    return urlencode({"run": "reverse", "source": SOURCE, **params})


def attributes(page: Page, testid: str, *names: str) -> list[tuple[str, ...]]:
    """Data attributes of all elements, in the order of the page."""
    page.get_by_test_id(testid).first.wait_for()
    found = page.get_by_test_id(testid).evaluate_all(
        "(all, names) => all.map(o => names.map(n => o.dataset[n]))", names
    )
    return [tuple(one) for one in found]


def values(page: Page, testid: str) -> list[float]:
    return [float(one) for (one,) in attributes(page, testid, "value")]


def slide(page: Page, testid: str, place: int) -> None:
    page.get_by_test_id(testid).fill(str(place))


def path_to(nodes: dict[str, tuple[str, ...]], leaf: str) -> list[str]:
    """The nodes from the root to a leaf."""
    parent = nodes[leaf][1]
    return [leaf] if parent is None else [*path_to(nodes, parent), leaf]


def test_the_beam_tree_adds_up_to_the_scores(tab: Page) -> None:
    tab.goto(address("beam", beam="3", pruned="all"))
    expect(tab.get_by_test_id("beam")).to_have_attribute("data-done", "true")
    expect(tab.get_by_test_id("hypothesis")).to_have_count(3)
    names = ("id", "parent", "status", "value")
    nodes = {one[0]: one for one in attributes(tab, "beam-node", *names)}
    leaves = [one for one in nodes.values() if one[2] == "finished"]
    assert len(leaves) == 3
    assert sum(one[2] == "pruned" for one in nodes.values()) > 3
    known = fetch(tab, f"beam?{query(beam=3)}")["events"]
    expected = {str(node["id"]): node for event in known[:-1] for node in event["nodes"]}
    assert {key: one[2] for key, one in nodes.items()} == {key: node["status"] for key, node in expected.items()}
    shown = attributes(tab, "hypothesis", "leaf", "value")
    for (leaf, score), one in zip(shown, known[-1]["hypotheses"], strict=True):
        total, tokens, at = 0.0, [], nodes[leaf]
        while at[1] is not None:
            total += float(at[3])
            tokens.insert(0, expected[at[0]]["token"])
            at = nodes[at[1]]
        assert total == pytest.approx(float(score), abs=1e-4)
        assert total == pytest.approx(one["score"], abs=1e-4)
        assert " ".join(tokens[:-1]) == one["text"]
    texts = tab.get_by_test_id("hypothesis").all_inner_texts()
    assert texts == [one["text"] for one in known[-1]["hypotheses"]]
    assert texts[0] == fetch(tab, f"explanation?{query()}")["output"]
    boxes = tab.get_by_test_id("beam-node").evaluate_all(
        "all => all.map(o => o.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"
    )
    for number, (left, top, right, bottom) in enumerate(boxes):  # no node covers another
        for other in boxes[:number]:
            assert right <= other[0] + 1 or other[2] <= left + 1 or bottom <= other[1] + 1 or other[3] <= top + 1
    tab.set_viewport_size({"width": 400, "height": 900})
    slide(tab, "step", 2)
    slide(tab, "step", 3)
    last = tab.locator(f'[data-testid=beam-node][data-id="{list(path_to(nodes, shown[0][0]))[3]}"]')
    expect(last).to_be_in_viewport()  # the tree scrolls to the step
    slide(tab, "step", 1)
    assert {nodes[one][1] for (one,) in attributes(tab, "beam-node", "id")} <= {None, "0"}


def test_events_of_a_search_arrive_one_by_one(server: Server, tab: Page) -> None:
    answer = tab.request.get(f"/api/beam/events?{query(beam=2)}")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text().split("\n\n") if line]
    assert events == fetch(tab, f"beam?{query(beam=2)}")["events"]
    refused = tab.request.get("/api/beam/events?run=reverse&source=")
    assert json.loads(refused.text().removeprefix("data: "))["kind"] == "error"


def test_products_of_queries_and_keys_add_up_to_scores(tab: Page) -> None:
    module = "decoder.layers.0.cross_attention.attend"
    tab.goto(address("neurons", run="transformer", source="red blue", module=module, row="2", head="1"))
    products = cells(tab, "product")
    known = fetch(tab, "neurons?" + query(run="transformer", source="red blue", module=module, row=2, head=1))
    for row, expected in zip(products, known["products"], strict=True):
        assert row == pytest.approx(expected, abs=1e-6)
    logits, weights = values(tab, "logit"), values(tab, "weight")
    width = len(products[0])
    assert logits == pytest.approx([sum(row) / math.sqrt(width) for row in products], abs=1e-3)
    largest = sum(math.exp(one) for one in logits)
    assert weights == pytest.approx([math.exp(one) / largest for one in logits], abs=1e-4)
    tab.get_by_test_id("query-token").nth(0).click()
    expect(tab.get_by_test_id("query-token").nth(0)).to_have_attribute("aria-pressed", "true")
    assert values(tab, "logit") != logits


def test_gates_are_between_0_and_1(tab: Page) -> None:
    tab.goto(address("gates"))
    layers = fetch(tab, f"gates?{query()}")["layers"]
    shown = values(tab, "gate")
    assert all(0 <= one <= 1 for one in shown)
    expected = [x for gate in layers[0]["gates"].values() for row in gate for x in row]
    assert shown == pytest.approx(expected, abs=1e-6)
    tab.get_by_test_id("layer").select_option(layers[-1]["name"])
    expect(tab.get_by_test_id("state")).to_have_count(sum(len(row) for row in layers[-1]["states"]["hidden"]))
    width = len(layers[-1]["states"]["hidden"][0])
    assert width > 20  # every fifth column is named
    named = tab.locator("figure table").first.locator("thead th span:not(.unseen)")
    expect(named).to_have_text(["1", *map(str, range(5, width + 1, 5))])


def test_the_nearest_neighbour_of_a_training_sentence_is_itself(tab: Page, pairs: Path) -> None:
    source, target = pairs.read_text(encoding="utf-8").splitlines()[0].split("\t")
    tab.goto(address("neighbours", source=source, target=target, position="1", k="6"))
    found = attributes(tab, "neighbour", "value", "source")
    distances = [float(distance) for distance, _ in found]
    assert len(found) == 6
    assert all(one <= other for one, other in pairwise(distances))
    assert found[0][1] == source
    assert distances[0] == pytest.approx(0, abs=1e-4)
    known = fetch(tab, "neighbours?" + query(source=source, target=target, position=1, k=6))["neighbours"]
    assert distances == pytest.approx([one["distance"] for one in known], abs=1e-4)
    tab.get_by_test_id("decoder-token").nth(1).click()
    expect(tab.get_by_test_id("neighbour")).to_have_count(6)
    assert "side=decoder" in tab.url


def test_the_overlay_covers_the_picture_and_peaks_on_the_square(tab: Page, tmp_path: Path) -> None:
    cell = 9
    draw_square(tmp_path / "square.png", "red", cell)
    tab.goto(address("image", run="squares", source=str(tmp_path / "square.png")))
    expect(tab.get_by_test_id("output")).to_have_text("red square")
    for width in (1280, 420):
        tab.set_viewport_size({"width": width, "height": 900})
        picture, overlay = (tab.get_by_test_id(one).bounding_box() for one in ("picture", "picture-overlay"))
        assert picture is not None
        assert picture == pytest.approx(overlay, abs=1)
        assert picture["width"] == pytest.approx(picture["height"], abs=1)
    assert attributes(tab, "picture-overlay", "peak") == [(str(cell),)]
    first = values(tab, "overlay-cell")
    known = fetch(tab, "overlays?" + query(run="squares", source=str(tmp_path / "square.png")))
    assert first == pytest.approx(known["pictures"][0]["maps"][0], abs=1e-6)
    assert len(first) == CELLS**2
    slide(tab, "step", 1)
    expect(tab.get_by_test_id("step-name")).to_have_text("2: square")
    second = values(tab, "overlay-cell")
    assert second != first
    assert second == pytest.approx(known["pictures"][0]["maps"][1], abs=1e-6)


def test_the_play_head_stands_at_the_column_of_its_time(tab: Page, recordings_run: Path) -> None:
    clip = str(next(recordings_run.parent.rglob("*.wav")))
    tab.goto(address("audio", run="recordings", source=clip))
    picture = fetch(tab, "overlays?" + query(run="recordings", source=clip))["pictures"][0]
    columns, extent = picture["grid"][1], picture["extent"]
    assert values(tab, "column") == pytest.approx(picture["maps"][0], abs=1e-6)
    assert values(tab, "mass")[0] == pytest.approx(1, abs=1e-3)  # nothing on padding
    player = tab.get_by_test_id("audio")
    player.wait_for()
    player.evaluate("one => one.readyState > 0 || new Promise(done => { one.onloadedmetadata = () => done() })")
    for share in (0.3, 0.8):
        player.evaluate("(one, time) => { one.currentTime = time }", share * extent)
        head = tab.get_by_test_id("playhead")
        expect(head).to_have_attribute("data-column", str(int(share * columns)))
        time = float(head.get_attribute("data-time") or 0)
        assert abs(time - share * extent) < extent / columns
    box = tab.get_by_test_id("spectrogram").bounding_box()
    assert box is not None
    tab.mouse.click(box["x"] + box["width"] * 0.55, box["y"] + 20)
    expect(tab.get_by_test_id("playhead")).to_have_attribute("data-column", str(int(0.55 * columns)))


def test_one_input_is_followed_through_the_checkpoints(tab: Page) -> None:
    tab.goto(address("checkpoints", run="history"))
    steps = [int(step) for (step,) in attributes(tab, "row", "step")]
    assert len(steps) >= 5
    assert steps == sorted(steps)
    known = fetch(tab, f"checkpoints?{query(run='history')}")
    for place, one in enumerate(known["checkpoints"]):
        slide(tab, "checkpoint", place)
        expect(tab.get_by_test_id("checkpoint-name")).to_have_text(str(one["name"]))
        expect(tab.get_by_test_id("output")).to_have_text(one["output"])
        changes = [change for change in one["changes"] if change["kind"] != "equal"]
        removed, added = (tab.get_by_test_id(name).all_inner_texts() for name in ("removed", "added"))
        assert removed == [token for change in changes for token in change["before"]]
        assert added == [token for change in changes for token in change["after"]]
    expect(tab.get_by_test_id("other-output")).to_have_text(known["other"]["output"])
    tab.get_by_test_id("other").select_option("bottleneck")
    rival = fetch(tab, f"explanation?{query(run='bottleneck')}")["output"]
    expect(tab.get_by_test_id("other-output")).to_have_text(rival)


def test_the_ladder_shows_every_run_at_the_same_step(tab: Page) -> None:
    tab.goto(address("ladder", step="1"))
    rungs = {one["name"]: one for one in fetch(tab, f"ladder?{query()}")["rungs"]}
    assert [name for (name,) in attributes(tab, "rung", "run")] == list(rungs)
    assert {"reverse", "transformer", "bottleneck"} <= set(rungs)
    for name, one in rungs.items():
        rung = tab.locator(f'[data-testid="rung"][data-run="{name}"]')
        expect(rung.get_by_test_id("output")).to_have_text(one["output"] or "∅")
        shown = rung.get_by_test_id("source-token").evaluate_all("all => all.map(o => +o.dataset.value)")
        assert shown == pytest.approx([] if one["weights"] is None else one["weights"][1], abs=1e-6)
    assert rungs["bottleneck"]["weights"] is None
    buckets = [bucket for one in rungs.values() for bucket in one["by_length"].get("exact", [])]
    shown = [tuple(map(float, one)) for one in attributes(tab, "quality", "x", "value")][: len(buckets)]
    assert [value for _, value in shown] == pytest.approx([one["interval"]["value"] for one in buckets])
    assert [x for x, _ in shown] == pytest.approx([(one["low"] + one["high"]) / 2 for one in buckets])


def test_training_is_followed_while_it_runs(tab: Page, studio: Studio) -> None:
    folder = studio.runs["history"].folder
    assert folder is not None
    tab.goto(address("training", run="history"))
    expect(tab.get_by_test_id("training-state")).to_have_attribute("data-running", "false")
    expect(tab.get_by_test_id("training-state")).to_contain_text("Finished: all updates done 120 updates")
    log = fetch(tab, "training?run=history")
    expected = [one["nll"] for one in log["updates"]] + [one["loss"] for one in log["validations"]]
    assert values(tab, "loss") == pytest.approx(expected)
    states = fetch(tab, "training/checkpoints?run=history")["checkpoints"]
    assert values(tab, "entropy") == pytest.approx([one["entropy"] for one in states])
    for place in (0, len(states) - 1):
        slide(tab, "checkpoint", place)
        expect(tab.get_by_test_id("example-output")).to_have_text(
            [one["output"] or "∅" for one in states[place]["outputs"]]
        )
    norms = cells(tab, "norm")
    assert [row[-1] for row in norms] == pytest.approx(list(states[-1]["gradient_norms"].values()))
    lines = (folder / "log.jsonl").read_text(encoding="utf-8")
    last = json.loads([line for line in lines.splitlines() if '"update"' in line][-1])
    try:
        (folder / LOCK_FILE).write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
        tab.reload()
        expect(tab.get_by_test_id("training-state")).to_have_attribute("data-running", "true")
        with (folder / "log.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**last, "step": 777}) + "\n")
        expect(tab.get_by_test_id("training-state")).to_have_attribute("data-step", "777")
    finally:
        (folder / LOCK_FILE).unlink()
        (folder / "log.jsonl").write_text(lines, encoding="utf-8")


def test_every_module_is_drawn_with_its_shape(tab: Page) -> None:
    tab.goto(address("shapes", run="transformer"))
    trees = fetch(tab, "shapes?run=transformer")["trees"]

    def walk(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for node in nodes for one in (node, *walk(node["children"]))]

    expected = walk(trees["training"])
    assert [path for (path,) in attributes(tab, "module", "path")] == [one["path"] for one in expected]
    drawn = dict(attributes(tab, "module", "path", "letters"))
    sizes = dict(attributes(tab, "module", "path", "sizes"))
    letters = {name: int(value) for name, value in attributes(tab, "letter", "letter", "value")}
    for one in expected:
        if one["tensors"]:
            shape = one["tensors"][0]
            assert (drawn[one["path"]], sizes[one["path"]]) == (shape["letters"], " ".join(map(str, shape["sizes"])))
            for letter, size in zip(shape["letters"].split(), shape["sizes"], strict=True):
                assert letters.get(letter, size) == size
    attention = next(one for one in expected if one["class"] == "SelfAttention")
    tab.locator(f'[data-testid="module"][data-path="{attention["path"]}"]').click()
    expect(tab.get_by_test_id("file")).to_have_text(f"{attention['file']}:{attention['line']}")
    expect(tab.get_by_test_id("paper")).to_contain_text("Vaswani 2017")
    expect(tab.get_by_test_id("equation")).to_have_text(attention["equation"])
    tab.get_by_test_id("stage-generation").click()
    expect(tab.locator('[data-testid="tensor"][data-name="tokens"]')).to_have_attribute("data-letters", "R T")
