"""Servers in processes of their own: cold start, drain, reload, overload, slow clients, killed workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from run_fixtures import Command

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2] / "src"
Start = Callable[..., "Running"]


class Running:
    """A server in a process, with what it has written."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", folder / f"server-{self.port}.log"
        command = [sys.executable, "-m", "transduce", "serve", *arguments, "--port", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)

    def get(self, path: str) -> int:
        """The status of a path; 0: nobody listens."""
        try:
            return httpx.get(self.url + path, timeout=20).status_code
        except httpx.TransportError:
            return 0

    def wait(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 120
        while not done():
            assert time.monotonic() < until, f"{what}: {self.log.read_text(encoding='utf-8')}"
            assert self.process.poll() is None or what == "end", self.log.read_text(encoding="utf-8")
            time.sleep(0.05)

    def ready(self) -> Running:
        self.wait(lambda: self.get("/ready") == 200, "ready")
        return self

    def ask(self, text: str, client: httpx.Client | None = None, **options: Any) -> httpx.Response:
        post = httpx.post if client is None else client.post
        answer: httpx.Response = post(f"{self.url}/v1/transduce", json={"input": text, **options}, timeout=60)
        return answer

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=20).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture
def start(tmp_path: Path, attention_run: Path) -> Iterator[Start]:
    running: list[Running] = []

    def serve(*arguments: str, run: Path = attention_run) -> Running:
        running.append(Running(tmp_path, str(run), *arguments))
        return running[-1]

    yield serve
    for one in running:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            one.process.send_signal(signal.SIGTERM)
        one.process.wait(60)


def words(number: int) -> str:
    colours = ("red", "green", "blue", "black", "white")
    return " ".join(colours[number // 5**place % 5] for place in range(4))


def test_a_server_from_its_start_to_its_end(start: Start) -> None:
    """503 until the first decode; metrics equal the tally; slow clients are closed, the work of those that leave is
    cancelled; SIGHUP loads the model again; a second SIGTERM ends it now."""
    server = start("--limit", "body_seconds=1")
    seen = set[int]()
    server.wait(lambda: seen.add(server.get("/health")) or 200 in seen, "ready")  # type: ignore[func-returns-value]
    assert seen <= {0, 503, 200}
    assert server.get("/live") == 200
    with ThreadPoolExecutor(8) as pool, httpx.Client() as client:
        answers = list(pool.map(lambda number: server.ask(words(number), client), range(60)))
    assert {one.status_code for one in answers} == {200}
    assert server.metric('transduce_requests_total{method="POST",route="/v1/transduce"') == 60
    assert server.metric("transduce_sources_total") == 61  # and the first decode
    with socket.create_connection(("127.0.0.1", server.port)) as slow:  # a body that never ends
        slow.sendall(b"POST /v1/transduce HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        slow.sendall(b'Content-Length: 100\r\n\r\n{"input"')
        slow.settimeout(60)
        assert b"408" in slow.recv(1000)
    body = json.dumps({"input": [words(number) for number in range(100)], "beam_size": 16}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as left:  # a client that leaves before the answer
        left.sendall(b"POST /v1/transduce HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        left.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    server.wait(lambda: server.metric("transduce_disconnects_total") == 1, "disconnect")
    server.wait(lambda: server.metric("transduce_active_sources") + server.metric("transduce_queue_depth") == 0, "idle")
    assert server.metric("transduce_cancelled_sources_total") == 100
    assert server.metric("transduce_sources_total") == 61
    server.process.send_signal(signal.SIGHUP)
    server.wait(lambda: server.metric("transduce_reloads_total") == 1, "reload")
    assert server.metric("transduce_sources_total") == 62  # the new model has decoded
    records = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert [one["status"] for one in records if one.get("route") == "/v1/transduce"].count(200) == 60
    assert "red" not in server.log.read_text()
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"POST /v1/transduce HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: server.get("/health") in (503, 0), "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) in (0, 128 + signal.SIGTERM)  # 0: it had drained before


def test_workers_share_a_port_and_a_killed_one_is_replaced_and_all_drain(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# keys\nsecret\n")
    server = start("--workers", "2", "--api-key-file", str(keys))
    parent = psutil.Process(server.process.pid)

    def answered(number: int = 0) -> int:
        header = {"Authorization": "Bearer secret"}
        try:
            body = {"input": words(number)}
            return httpx.post(f"{server.url}/v1/transduce", json=body, headers=header, timeout=60).status_code
        except httpx.TransportError:
            return 0

    def listening() -> int:
        children = parent.children()
        return sum(any(one.status == "LISTEN" for one in child.net_connections()) for child in children)

    server.wait(lambda: listening() == 2, "both workers")
    header = {"Authorization": "Bearer secret"}
    job = httpx.post(f"{server.url}/v1/jobs", json={"input": ["red"] * 40}, headers=header, timeout=60).json()
    place = f"{server.url}/v1/jobs/{job['id']}"  # each request is a connection of its own: to either worker
    server.wait(lambda: httpx.get(place, headers=header, timeout=60).json()["status"] == "done", "the job")
    assert {httpx.get(place, headers=header, timeout=60).status_code for _ in range(12)} == {200}
    assert httpx.post(f"{server.url}/admin/reload", headers=header, timeout=60).status_code == 200
    server.wait(lambda: server.log.read_text().count('"event": "reloaded"') == 2, "both workers loaded again")
    assert server.get("/v1/models") == 401
    assert [answered() for _ in range(10)] == [200] * 10
    victim = parent.children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    server.wait(lambda: answered() == 200, "the other worker")
    server.wait(lambda: victim.pid not in {one.pid for one in parent.children()} and listening() == 2, "a new worker")
    before = server.log.read_text().count('"status": 200')
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(answered, number) for number in range(200)]
        server.wait(lambda: sum(one.done() for one in waiting) > 20, "answers")
        server.process.send_signal(signal.SIGTERM)
        statuses = [one.result() for one in waiting]
        assert server.process.wait(60) == 0
    assert set(statuses) <= {200, 503, 0}  # 0: refused, nobody listened any more
    assert server.log.read_text().count('"status": 200') - before == statuses.count(200)  # what was accepted


def test_a_job_goes_on_in_the_next_server_and_workers_end_with_the_process_that_started_them(
    start: Start, tmp_path: Path
) -> None:
    folder = ("--jobs-folder", str(tmp_path / "jobs"), "--workers", "2")
    server = start(*folder, "--max-batch", "1").ready()
    texts = [words(number) for number in range(600)]
    job = httpx.post(f"{server.url}/v1/jobs", json={"input": texts, "beam_size": 8}, timeout=60).json()
    output = tmp_path / "jobs" / job["id"] / "output.jsonl"
    server.wait(lambda: output.stat().st_size > 0, "the first answers")
    workers = psutil.Process(server.process.pid).children()
    server.process.kill()  # which tells its workers nothing
    server.wait(lambda: not any(one.is_running() for one in workers), "end")
    assert output.read_bytes().count(b"\n") < 600
    server = start(*folder).ready()
    place = f"{server.url}/v1/jobs/{job['id']}"
    server.wait(lambda: httpx.get(place, timeout=60).json()["status"] == "done", "the rest")
    lines = [json.loads(line) for line in httpx.get(f"{place}/output", timeout=60).text.splitlines()]
    assert [one["number"] for one in lines] == list(range(600))
    assert lines[599]["text"] == server.ask(texts[599], beam_size=8).json()["results"][0][0]["text"]


def test_wrong_arguments_are_errors_of_the_user(command: Command, tmp_path: Path) -> None:
    ended = command("serve", str(tmp_path / "nothing"), "--port", "0")
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    for options in (["--workers", "2"], ["--port", "0"]):
        ended = command("serve", "run", "--backend", "ray", *options)
        assert (ended.code, options[0] in ended.err) == (2, True)
    ended = command("serve", "run", "--limit", "characterz=3")
    assert (ended.code, "characters" in ended.err) == (2, True)
    for options in (["--limit", "characters=-5"], ["--limit", "request_seconds=nan"], ["--limit", "items=1e3"]):
        ended = command("serve", "run", *options)
        assert (ended.code, options[1].split("=")[0] in ended.err) == (2, True)
    for options in (["--port", "99999"], ["--port", "-1"], ["--drain-seconds", "-1"], ["--replicas", "2"]):
        ended = command("serve", "run", *options)
        assert (ended.code, options[0] in ended.err, "Traceback" in ended.err) == (2, True, False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = command("serve", "run", "--port", str(taken.getsockname()[1]))
    assert (ended.code, "in use" in ended.err, "another --port" in ended.err) == (2, True, True)


def test_the_help_names_every_limit(command: Command) -> None:
    from transduce.serving.service import Limits

    text = "".join(command("serve", "--help").out.split())
    assert [name for name in vars(Limits()) if name not in text] == []
