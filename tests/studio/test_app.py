"""The server of the studio: built files, security headers, errors, cache."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from fastapi.testclient import TestClient

import transduce
from transduce.studio.app import create_app, is_loopback, static_folder
from transduce.studio.runs import CACHED, Studio, StudioRun, name_runs

ROOT = Path(__file__).parents[2]
SOURCES = ("index.html", "package.json", "package-lock.json", "vite.config.js")


@pytest.fixture(scope="module")
def client(studio: Studio) -> TestClient:
    return TestClient(create_app(studio), base_url="http://127.0.0.1")


def source_hash(folder: Path) -> str:
    inside = [path.relative_to(folder).as_posix() for path in (folder / "src").rglob("*") if path.is_file()]
    total = hashlib.sha256()
    for name in sorted([*SOURCES, *inside]):
        total.update(f"{name}\0".encode())
        total.update((folder / name).read_bytes())
        total.update(b"\0")
    return total.hexdigest()


def test_built_files_are_those_of_the_sources() -> None:
    recorded = (static_folder() / "sources.sha256").read_text().strip()
    assert recorded == source_hash(ROOT / "studio"), "the built files are stale: run `make studio-build`"


def test_built_files_name_the_licences_of_what_they_contain() -> None:
    licences = (static_folder() / "licences.txt").read_text()
    for package in ("svelte", "d3-array"):
        version = json.loads((ROOT / "studio" / "package-lock.json").read_text())["packages"][f"node_modules/{package}"]
        assert f"{package} {version['version']}\n" in licences
    assert licences.lower().count("permission") >= 2


def test_pages_load_nothing_from_elsewhere() -> None:
    page = (static_folder() / "index.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "<style" not in page
    assert "<script>" not in page


def test_every_answer_has_a_security_policy(client: TestClient) -> None:
    for path in ("/", "/studio.js", "/api/runs", "/api/map?run=nothing", "/nothing"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"sec-fetch-site": "cross-site"}])
def test_foreign_pages_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs", headers=headers).status_code == 403


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.8.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.2", "example.org")))


def test_runs_have_names_that_differ() -> None:
    assert name_runs(["runs/a", "runs/b"]) == ["a", "b"]
    assert name_runs(["x/run", "y/run"]) == ["x/run", "y/run"]
    assert len(set(name_runs(["x/run", "x/run"]))) == 2


def test_examples_are_lines_of_the_data(client: TestClient) -> None:
    runs = client.get("/api/runs").json()["runs"][:2]
    assert [run["name"] for run in runs] == ["reverse", "transformer"]
    for run in runs:
        assert run["shape"] == "encoder-decoder"
        assert run["examples"]
        assert all(one["source"].split()[0].upper() in one["target"].split() for one in run["examples"])


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"run": "revers", "source": "red"}, "no run"),
        ({"run": "reverse", "source": ""}, "empty"),
        ({"run": "reverse", "source": "red", "layer": "7"}, "no layer"),
        ({"run": "reverse", "source": "red", "head": "x"}, "no head"),
        ({"run": "reverse", "source": "red", "method": "magic"}, "no attribution method"),
        ({"run": "reverse", "source": "red", "method": "rollout"}, "rollout"),
    ],
)
def test_wrong_input_is_explained(client: TestClient, query: dict[str, str], problem: str) -> None:
    answer = client.get(f"/api/map?{urlencode(query)}")
    assert answer.status_code == 400
    assert problem in answer.json()["problem"]
    assert answer.json()["remedy"]


@pytest.mark.parametrize("run", ["reverse", "transformer"])
def test_maps_are_those_of_the_explanation(client: TestClient, studio: Studio, run: str) -> None:
    source = "red green blue"
    found = client.get(f"/api/map?{urlencode({'run': run, 'source': source, 'layer': '0', 'head': '0'})}").json()
    expected = studio.runs[run].model.explain(source)
    assert expected.attention is not None
    assert np.array(found["weights"]) == pytest.approx(expected.attention[0, 0], abs=1e-5)
    assert found["rows"] == list(expected.target_tokens)
    assert found["columns"] == list(expected.source_tokens)
    tile = client.get(f"/api/map/tile?{urlencode({'run': run, 'source': source, 'top': 1, 'left': 1, 'size': 2})}")
    mean = expected.map().weights
    assert np.frombuffer(tile.content, "<f4").reshape(-1, 2) == pytest.approx(mean[1:3, 1:3], abs=1e-6)


def test_shifted_maps_are_read_one_step_later(client: TestClient) -> None:
    query = {"run": "reverse", "source": "red green blue"}
    plain = client.get(f"/api/map?{urlencode(query)}").json()
    shifted = client.get(f"/api/map?{urlencode({**query, 'read_at': 'input'})}").json()
    assert shifted["weights"][:-1] == plain["weights"][1:]
    assert shifted["rows"] == plain["rows"]
    assert shifted["reading"] != plain["reading"]


def test_self_attention_of_encoder_and_decoder(client: TestClient, studio: Studio) -> None:
    query = {"run": "transformer", "source": "red blue"}
    kinds = client.get(f"/api/explanation?{urlencode(query)}").json()["kinds"]
    assert set(kinds) == {"cross", "encoder", "decoder"}
    for kind in ("encoder", "decoder"):
        found = client.get(f"/api/map?{urlencode({**query, 'kind': kind, 'layer': 0, 'head': 1})}").json()
        weights = np.array(found["weights"])
        assert weights.shape == tuple(kinds[kind][2:]) == (len(found["rows"]), len(found["columns"]))
        assert weights.sum(1) == pytest.approx(1, abs=1e-4)
    assert np.triu(weights, 1) == pytest.approx(0)  # the decoder attends to its past
    recurrent = client.get(f"/api/explanation?{urlencode({**query, 'run': 'reverse'})}").json()
    assert set(recurrent["kinds"]) == {"cross"}


def test_results_are_computed_once_and_forgotten_in_order(model: transduce.Model) -> None:
    run = StudioRun("one", model, examples=["red"])
    counted: list[int] = []
    for number in [*range(CACHED), 0, CACHED, 0, 1]:
        run.once(number, lambda number=number: counted.append(number))  # type: ignore[misc]
    assert counted == [*range(CACHED), CACHED, 1]
    assert json.dumps(run.describe())
    assert run.examples == [{"source": "red", "target": ""}]
