"""The interface of Transduce itself: texts, streams, wants, jobs, reloading, and errors with their names."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from transduce.errors import InputError
from transduce.inference import Model, load
from transduce.serving.application import ServerSettings, create_app
from transduce.serving.jobs import Jobs
from transduce.serving.model_service import EngineOptions, ModelService
from transduce.serving.models import ModelSpec
from transduce.serving.native import NATIVE, resume_jobs
from transduce.serving.service import Limits

LIMITS = Limits(items=8, characters=200, beam_size=4, n_best=4, output_tokens=40, job_items=50)


@pytest.fixture(scope="module")
def words(attention_run: Path) -> Model:
    return load(attention_run)


@pytest.fixture(scope="module")
def client(words: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    service = ModelService(
        [(words, ModelSpec.parse("colours=runs/x@en-de"))], LIMITS, options=EngineOptions(load=lambda _: words)
    )
    settings = ServerSettings(("secret",), LIMITS, jobs_folder=tmp_path_factory.mktemp("jobs"))
    app = create_app(service, settings, interfaces=(NATIVE,), metrics=service.metrics)
    with TestClient(app, headers={"Authorization": "Bearer secret"}) as found:
        yield found
    service.close()


def test_texts_with_everything_that_is_wanted(client: TestClient, words: Model) -> None:
    wants = ["tokens", "scores", "alignment", "attention", "explanation"]
    body = {"input": ["red green", "blue"], "n_best": 2, "wants": wants}
    answer = client.post("/v1/transduce", json=body)
    found = answer.json()
    offline = words.generate(["red green", "blue"], nbest=2)
    assert [[one["text"] for one in row] for row in found["results"]] == [
        [one.text for one in row.nbest] for row in offline
    ]
    best = found["results"][0][0]
    assert best["score"] == pytest.approx(sum(best["token_scores"]))
    assert [tuple(one) for one in best["alignment"]] == offline[0].alignment
    assert best["explanation"]["source"] == "red green"
    assert found["id"] == answer.headers["x-request-id"]
    assert found["usage"]["source_tokens"] == 3
    plain = client.post("/v1/transduce", json={"input": "red green"}).json()["results"][0][0]
    assert set(plain) == {"text", "score", "finish_reason", "confidence"}


def test_a_stream_of_events(client: TestClient) -> None:
    with client.stream("POST", "/v1/transduce", json={"input": "red green blue", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    whole = client.post("/v1/transduce", json={"input": "red green blue"}).json()["results"][0][0]
    assert "".join(one["text"] for one in events) == whole["text"]
    assert events[-1]["output"] == whole
    assert len([one for one in events if "token" in one]) > 2


@pytest.mark.parametrize(
    ("body", "words_"),
    [
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": "a", "beam": 3}, "beam"),
        ({"input": "a", "beam_size": 0}, "beam_size"),
        ({"input": "a", "beam_size": 5}, "beam_size: at most 4, not 5"),
        ({"input": "a", "n_best": 9}, "n_best: at most 4"),
        ({"input": "a", "max_length": 41}, "max_length: at most 40"),
        ({"input": ["a"] * 9}, "items: at most 8"),
        ({"input": "a" * 201}, "characters: at most 200"),
        ({"input": "a", "deadline": 1000}, "deadline: at most 60"),
        ({"input": [], "prefix": "b"}, "prefixes"),
        ({"input": "a", "wants": ["pickle"]}, "wants"),
        ({"input": "a", "required": ["quite unknown"]}, "vocabulary"),
        ({"input": "a", "source_language": "fr"}, "no model from fr"),
    ],
)
def test_wrong_requests_are_refused_with_a_name(client: TestClient, body: dict[str, Any], words_: str) -> None:
    answer = client.post("/v1/transduce", json=body)
    assert answer.status_code in (400, 404)
    assert words_ in answer.json()["error"]["message"]


def test_damaged_bodies(client: TestClient) -> None:
    for content in (b"", b"{", b"[]", b"\xff", b'{"input": NaN}', b"[" * 5000):
        assert client.post("/v1/transduce", content=content).status_code == 400, content
    assert client.post("/v1/transduce", files={"file": ("a.png", b"x", "image/png")}).status_code == 400
    assert client.post("/v1/transduce", files={"other": b""}, data={"request": "["}).status_code == 400


def test_a_full_queue_is_refused_with_a_time(words: Model) -> None:
    limits = Limits(queued=2)
    service = ModelService([(words, ModelSpec("x", "x"))], limits)
    release = threading.Event()
    engine = next(iter(service._served.values())).engine
    threading.Thread(target=engine.call, args=(lambda: release.wait(20),), daemon=True).start()
    with (
        TestClient(create_app(service, ServerSettings(limits=limits), metrics=service.metrics)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(client.post, "/v1/transduce", json={"input": ["red", "blue"]})
        until = time.monotonic() + 20
        while service.load < 2 and time.monotonic() < until:
            time.sleep(0.005)
        refused = client.post("/v1/transduce", json={"input": "green"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        release.set()
        assert waiting.result().status_code == 200
        assert 'transduce_refusals_total{reason="overloaded"} 1.0' in client.get("/metrics").text
    service.close()


def test_models(client: TestClient) -> None:
    assert client.get("/").json() == {"name": "Transduce", "models": ["colours"], "routes": "/openapi.json"}
    (model,) = client.get("/v1/transduce/models").json()["models"]
    assert (model["name"], model["task"], model["source_languages"]) == ("colours", "translation", ["en"])
    assert set(model["capabilities"]) == {"generate", "stream", "embed"}


def test_a_job_is_answered_in_the_background_and_its_output_is_read_in_parts(client: TestClient, words: Model) -> None:
    texts = ["red green", "blue", "black white red"] * 7
    job = client.post("/v1/jobs", json={"input": texts})
    assert job.status_code == 202
    place = f"/v1/jobs/{job.json()['id']}"
    until = time.monotonic() + 60
    while (state := client.get(place).json())["status"] == "running" and time.monotonic() < until:
        time.sleep(0.02)
    assert (state["status"], state["done"], state["total"]) == ("done", 21, 21)
    whole = client.get(f"{place}/output")
    assert [json.loads(line)["text"] for line in whole.text.splitlines()] == [one.text for one in words.generate(texts)]
    first = client.get(f"{place}/output", headers={"Range": "bytes=0-99"})
    rest = client.get(f"{place}/output", headers={"Range": "bytes=100-"})
    assert (first.status_code, rest.status_code) == (206, 206)
    assert first.content + rest.content == whole.content
    assert client.delete(place).json()["status"] == "cancelled"
    assert client.get(place).status_code == 404


def test_a_job_of_a_file_and_refused_jobs(client: TestClient) -> None:
    file = {"file": ("texts.txt", b"red\nblue green\n", "text/plain")}
    assert client.post("/v1/jobs", files=file, data={"request": '{"beam_size": 1}'}).json()["total"] == 2
    assert client.post("/v1/jobs", json={"input": ["a"] * 51}).json()["error"]["message"].startswith("job items")
    assert client.post("/v1/jobs", json={"input": []}).status_code == 400
    for name in ("0" * 32, "..", "../../etc"):
        assert client.get(f"/v1/jobs/{name}").status_code == 404


def test_every_line_of_a_file_has_an_answer_in_its_place(client: TestClient) -> None:
    content = "\ufeffred\r\n\nblue\u2028green\x85red\x0c".encode()
    job = client.post("/v1/jobs", files={"file": ("texts.txt", content, "text/plain")}).json()
    assert job["total"] == 3
    lines = output_lines(client, job["id"])
    assert [one["text"] for one in lines] == [
        client_text(client, one) for one in ("red", "", "blue\u2028green\x85red\x0c")
    ]
    wrong = client.post("/v1/jobs", files={"file": ("texts.txt", b"\xff\xfe", "text/plain")})
    assert (wrong.status_code, "UTF-8" in wrong.text) == (400, True)


def client_text(client: TestClient, text: str) -> str:
    return str(client.post("/v1/transduce", json={"input": text}).json()["results"][0][0]["text"])


def output_lines(client: TestClient, job: str) -> list[dict[str, Any]]:
    """The output of a job when it has ended."""
    until = time.monotonic() + 60
    while client.get(f"/v1/jobs/{job}").json()["status"] == "running" and time.monotonic() < until:
        time.sleep(0.02)
    return [json.loads(line) for line in client.get(f"/v1/jobs/{job}/output").text.splitlines()]


def test_jobs_of_a_process_that_has_ended_are_continued_once(words: Model, tmp_path: Path) -> None:
    texts = ["red green", "blue", "black white red"] * 10
    service, limits = ModelService([(words, ModelSpec("colours", "colours"))], LIMITS), LIMITS
    left = Jobs(tmp_path, service, limits)  # of a process that ends after 18 answers, 2 of which it has not counted
    job = left.create(texts, {"model": "colours", "beam_size": 2}, "client")
    answers = [f'{{"number": {number}, "text": "{number}"}}' for number in range(18)]
    job.output.write_text("\n".join([*answers, '{"number": 18, "te']), encoding="utf-8")
    job.done = 16
    job.write()
    (tmp_path / "other").mkdir()

    async def continued() -> None:
        one, two = Jobs(tmp_path, service, limits), Jobs(tmp_path, service, limits)
        assert (resume_jobs(one), resume_jobs(two)) == (1, 0)
        while (found := one.find(job.identity)) is not None and found.status == "running":
            await asyncio.sleep(0.01)
        assert found is not None
        assert (found.status, found.done) == ("done", 30)
        assert resume_jobs(two) == 0

    asyncio.run(continued())
    service.close()
    lines = [json.loads(line) for line in job.output.read_text(encoding="utf-8").splitlines()]
    assert [one["number"] for one in lines] == list(range(30))
    expected = [one.text for one in words.generate(texts[16:], beam=2)]
    assert [one["text"] for one in lines] == [*map(str, range(16)), *expected]


def test_reloading_needs_a_key(client: TestClient, words: Model, tmp_path: Path) -> None:
    assert client.post("/admin/reload").json() == {"models": ["colours"]}
    assert client.post("/v1/transduce", json={"input": "red"}).status_code == 200
    assert "transduce_reloads_total" in client.get("/metrics").text
    service = ModelService([(words, ModelSpec("x", "x"))])
    assert TestClient(create_app(service, interfaces=(NATIVE,))).post("/admin/reload").status_code == 400
    service.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/demo", ModelSpec("runs/demo", "demo")),
        ("german=runs/de@en-de", ModelSpec("runs/de", "german", ("en",), ("de",))),
        ("Helsinki-NLP/opus-mt-en-de", ModelSpec("Helsinki-NLP/opus-mt-en-de", "opus-mt-en-de", ("en",), ("de",))),
        ("a/one,a/two@en,fr-de", ModelSpec("a/one,a/two", "one", ("en", "fr"), ("de",))),
        ("x=a/b@en-pt-BR", ModelSpec("a/b", "x", ("en",), ("pt-BR",))),
        ("a/b@zh-Hant-TW,de-en-GB", ModelSpec("a/b", "b", ("zh-Hant-TW", "de"), ("en-GB",))),
        ("a/b@EN-DE", ModelSpec("a/b", "b", ("EN",), ("DE",))),
    ],
)
def test_models_on_the_command_line(text: str, expected: ModelSpec) -> None:
    assert ModelSpec.parse(text) == expected


@pytest.mark.parametrize("text", ["runs/x@en", "x=runs/x@en:de", "runs/x@"])
def test_languages_that_are_no_pair_are_refused_unless_a_run_has_the_name(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text.endswith("@"):
        assert ModelSpec.parse(text).path == text
        return
    with pytest.raises(InputError, match="no pair of languages"):
        ModelSpec.parse(text)
    path = text.removeprefix("x=")
    Path(path).mkdir(parents=True)
    assert ModelSpec.parse(text).path == path
