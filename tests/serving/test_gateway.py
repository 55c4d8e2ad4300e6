"""The gateway before all routes: keys, limits of bytes, request ids, rates, metrics and errors of each interface."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import APIRouter
from fastapi.testclient import TestClient
from protocol_fixtures import reverse_client
from starlette.responses import JSONResponse, Response

from transduce.errors import InputError
from transduce.serving.application import PROBES, Keys, Rates, ServerSettings, ServerState, create_app
from transduce.serving.metrics import Metrics
from transduce.serving.server import DrainingServer, TimedHeaders
from transduce.serving.service import (
    CALLER,
    GeneratedText,
    GenerationRequest,
    GenerationResult,
    Interface,
    Limits,
    ModelInfo,
    RateLimited,
    Service,
    ServiceError,
    TokenEvent,
)

JSON, PAGE = "application/json", "https://page.example"
LIMITS = Limits(body_bytes=1000, upload_bytes=2000, body_seconds=0.2)


class Echo(Service):
    """Answers every text with itself."""

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("echo", "translation")]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return GenerationResult("echo", tuple((GeneratedText(str(one)),) for one in request.sources))

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        yield TokenEvent("")

    async def embed(self, texts: Sequence[str], model: str | None = None) -> list[list[float]]:
        return [[0.0] for _ in texts]


def _router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/echo")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        found = await service.generate(GenerationRequest((body["q"],)))
        return {"text": found.best[0].text, "client": CALLER.get().client}

    @router.get("/fail")
    async def fail() -> None:
        raise RuntimeError("/secret/path and the text of a request")

    @router.get("/wrong")
    async def wrong() -> None:
        raise InputError("a wrong value", where="/secret/path", remedy="give another")

    @router.post("/form")
    async def form() -> dict[str, str]:
        return {}

    return router


def _render(error: ServiceError) -> Response:
    return JSONResponse({"error": error.message}, error.status)


ECHO = Interface("echo", _router, ("/echo", "/fail", "/wrong", "/form"), _render, ("api_key", "apiKey"), 400)


def client(*keys: str, state: ServerState | None = None, limits: Limits = LIMITS, **options: Any) -> TestClient:
    settings = ServerSettings(keys, limits, **options)
    return TestClient(create_app(Echo(), settings, state=state, interfaces=(ECHO,)))


def _routes(router: Any) -> Iterator[Any]:
    """All routes, those of included routers too."""
    for route in router.routes:
        yield from _routes(route.original_router) if hasattr(route, "original_router") else (route,)


def test_every_route_needs_the_key_but_the_probes(tmp_path: Path) -> None:
    """The routes of all interfaces, as the application lists them."""
    server = reverse_client("secret", jobs_folder=tmp_path, suggestions=tmp_path / "suggestions")
    routes = list(_routes(server.app))
    assert len(routes) > 30
    assert {"/health", "/ready", "/live"} == PROBES
    for route in routes:
        for method in route.methods - {"HEAD"}:
            answer = server.request(method, route.path, json={"q": "a"})
            expected = {200} if route.path in PROBES else {400, 401, 403}  # as the interface has it
            assert answer.status_code in expected, route.path
            if answer.status_code == 400:
                assert "key" in answer.text.lower(), route.path
            wrong = server.request(method, route.path, json={"q": "a"}, headers={"Authorization": "Bearer wrong"})
            assert wrong.status_code in ({200} if route.path in PROBES else {401, 403}), route.path
    missing = server.get("/nowhere")
    assert missing.status_code in (400, 401)  # nor do strangers learn which routes there are


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length, by a comparison without early end, with every known key whatever the given one is."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac_compare(one, other)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr("transduce.serving.application.hmac.compare_digest", compare)
    keys = Keys(("first", "second", "third"))
    for given, client_name in (("first", "key-0"), ("third", "key-2"), ("x" * 5000, None), ("\ud800", None)):
        compared.clear()
        assert keys.client(given) == client_name
        assert compared == [(32, 32)] * 3


def served(app: Any, http: Any) -> Iterator[int]:
    """The port of a server in a thread."""
    config = uvicorn.Config(app, port=0, log_config=None, http=http)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


def test_headers_that_do_not_end_or_are_too_long_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first header of a connection, and that of a later request; whole requests are answered before and after."""
    monkeypatch.setattr("transduce.serving.server.HEADER_SECONDS", 0.4)
    begin, whole = b"GET /health HTTP/1.1\r\nHost", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for port in served(create_app(Echo(), ServerSettings()), TimedHeaders):
        for first in (b"", begin):
            with socket.create_connection(("127.0.0.1", port), 20) as slow:
                slow.sendall(first)
                assert slow.recv(100) == b""
        with socket.create_connection(("127.0.0.1", port), 20) as slow:
            slow.sendall(whole)
            answer = slow.recv(1000)
            while not answer.endswith(b"}"):  # its body may come by itself
                answer += slow.recv(1000)
            assert b" 200 " in answer
            slow.sendall(begin)
            assert slow.recv(100) == b""
        with socket.create_connection(("127.0.0.1", port), 20) as large:
            large.sendall(begin + b": x\r\n" + b"X: " + b"a" * 70_000)
            assert b" 431 " in large.recv(100)
        with socket.create_connection(("127.0.0.1", port), 20) as long:
            long.sendall(whole.replace(b"/health", b"/health?q=" + b"a" * 9_000))
            assert b" 200 " in long.recv(1000)


UPGRADE = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "probe": ("GET", "/health", {}),
    "head": ("HEAD", "/health", {}),
    "list": ("GET", "/languages", {}),
    "text": ("POST", "/v1/transduce", {"json": {"input": "a"}}),
    "stream": ("POST", "/v1/transduce", {"json": {"input": "a", "stream": True}}),
    "query": ("POST", "/translate", {"params": {"q": "a", "source": "en", "target": "de"}}),
    "form": ("POST", "/translate", {"data": {"q": "a", "source": "en", "target": "de"}}),
    "chunks": ("POST", "/v1/transduce", {"content": [b'{"input": ', b'"a"}'], "headers": {"content-type": JSON}}),
    "upgrade": ("POST", "/v1/transduce", {"json": {"input": "a"}, "headers": UPGRADE}),
    "upgrade without a body": ("GET", "/languages", {"headers": UPGRADE}),
    "wrong body": ("POST", "/v1/transduce", {"content": b"{", "headers": {"content-type": JSON}}),
    "large body": ("POST", "/v1/transduce", {"content": b"a" * 2000, "headers": {"content-type": JSON}}),
    "no route": ("GET", "/nowhere", {}),
    "head of no route": ("HEAD", "/nowhere", {}),
    "no method": ("DELETE", "/health", {}),
    "other page": ("POST", "/v1/transduce", {"json": {"input": "a"}, "headers": {"Origin": PAGE}}),
    "refused to a page": ("POST", "/v1/transduce", {"content": b"a" * 2000, "headers": {"Origin": PAGE}}),
    "preflight": ("OPTIONS", "/v1/transduce", {"headers": {"Origin": PAGE, "Access-Control-Request-Method": "POST"}}),
}


@pytest.mark.parametrize(
    "settings", [{}, {"keys": ("secret",)}, {"cors_origins": (PAGE,)}], ids=["open", "keys", "cors"]
)
def test_a_connection_has_the_answers_of_the_application(settings: dict[str, Any]) -> None:
    """The server reads and writes whole messages, past the application. All requests share one connection."""
    app = create_app(Echo(), ServerSettings(limits=LIMITS, **settings))
    own = {"connection", "date", "server", "transfer-encoding"}
    for port in served(app, TimedHeaders):
        address, named = f"http://127.0.0.1:{port}", {"X-Request-ID": "request-1"}
        with TestClient(app, headers=named) as expected, httpx.Client(base_url=address, headers=named) as connection:
            for name, (method, path, options) in REQUESTS.items():
                answers = [client.request(method, path, **options) for client in (expected, connection)]
                found = [
                    (one.status_code, one.content, {key: text for key, text in one.headers.items() if key not in own})
                    for one in answers
                ]
                assert found[0] == found[1], name


class SlowEcho(Echo):
    """Answers the text `wait` after a time, and notes when its work is cancelled."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.started, self.cancelled = seconds, threading.Event(), threading.Event()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if request.sources == ("wait",):
            self.started.set()
            try:
                await asyncio.sleep(self.seconds)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return await super().generate(request)


def transduce_request(text: str, **headers: str) -> bytes:
    body = json.dumps({"input": text}).encode()
    headers = {"Host": "x", "Content-Type": JSON, "Content-Length": str(len(body)), **headers}
    lines = ["POST /v1/transduce HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body


def answered_texts(connection: socket.socket, count: int) -> list[str]:
    """The texts of so many answers, fewer where the connection ends."""
    found = b""
    while found.count(b'"usage"') < count and (part := connection.recv(10_000)):
        found += part
    return [text.decode() for text in re.findall(rb'"text":"(\w+)"', found)]


@pytest.mark.parametrize("pipelined", [0, 2])
def test_the_work_for_a_client_that_leaves_ends_without_an_error(
    pipelined: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it is the last request of its connection or not."""
    service, metrics = SlowEcho(60), Metrics()
    for port in served(create_app(service, ServerSettings(), metrics=metrics), TimedHeaders):
        with socket.create_connection(("127.0.0.1", port), 20) as leaving:
            leaving.sendall(transduce_request("wait") + transduce_request("a") * pipelined)
            assert service.started.wait(20)
        assert service.cancelled.wait(20)
        counts = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert "transduce_disconnects_total 1.0" in counts
    assert 'transduce_requests_total{method="POST",route="/v1/transduce",status="499"} 1.0' in counts
    assert capsys.readouterr().err == ""


def test_a_header_that_the_server_does_not_read_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a client that pipelines waits for an answer, nothing more is read."""
    monkeypatch.setattr("transduce.serving.server.HEADER_SECONDS", 0.4)
    service, last = SlowEcho(1.2), transduce_request("c")
    for port in served(create_app(service, ServerSettings()), TimedHeaders):
        with socket.create_connection(("127.0.0.1", port), 20) as connection:
            connection.sendall(transduce_request("wait"))
            assert service.started.wait(20)
            connection.sendall(transduce_request("b") + last[:30])
            time.sleep(0.05)  # the server has read these, and reads no more
            connection.sendall(last[30:])
            assert answered_texts(connection, 3) == ["wait", "b", "c"]


@pytest.mark.parametrize("piece", [10_000, 100, 7])
def test_an_upgrade_that_is_ignored_loses_no_body(piece: int) -> None:
    """Java and Ktor ask for HTTP/2 with every first request. Others follow on the connection."""
    sent = transduce_request("a") + transduce_request("b", **UPGRADE) * 2 + transduce_request("c")
    for port in served(create_app(Echo(), ServerSettings()), TimedHeaders):
        with socket.create_connection(("127.0.0.1", port), 20) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for begin in range(0, len(sent), piece):
                connection.sendall(sent[begin : begin + piece])
            assert answered_texts(connection, 4) == ["a", "b", "b", "c"]
        with socket.create_connection(("127.0.0.1", port), 20) as last:
            last.sendall(transduce_request("a", **{**UPGRADE, "Connection": "close, Upgrade"}))
            assert answered_texts(last, 2) == ["a"]
        with socket.create_connection(("127.0.0.1", port), 20) as tunnel:  # whose request is never read again
            tunnel.sendall(b"CONNECT /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
            assert b" 404 " in tunnel.recv(1000)


def test_connections_that_wait_to_be_accepted_are_answered_before_the_port_closes() -> None:
    state, request = ServerState(ready=True, draining=True), b"GET /languages HTTP/1.1\r\nHost: x\r\n\r\n"
    config = uvicorn.Config(create_app(Echo(), ServerSettings(), state=state), http=TimedHeaders, lifespan="off")
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    early, late = (socket.create_connection(address, 20) for _ in range(2))
    early.sendall(request)

    async def drain() -> None:
        server = DrainingServer(config, state, 5.0)
        server.lifespan, server.servers = config.lifespan_class(config), []
        ending = asyncio.ensure_future(server.shutdown([listener]))
        await asyncio.sleep(0.05)
        late.sendall(request)  # after the port was closed, on a connection that was made before
        await ending

    asyncio.run(drain())
    for client in (early, late):
        with client:
            assert b" 503 " in client.recv(1000)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 20)


@pytest.mark.parametrize(
    "sent",
    [
        {"headers": {"Authorization": "Bearer second"}},
        {"headers": {"Authorization": "DeepL-Auth-Key second"}},
        {"headers": {"X-API-Key": "second"}},
        {"params": {"api_key": "second"}},
        {"json": {"q": "a", "apiKey": "second"}},
    ],
)
def test_a_key_is_accepted_wherever_clients_send_it(sent: dict[str, Any]) -> None:
    answer = client("first", "second").post("/echo", **{"json": {"q": "a"}, **sent})
    assert answer.json() == {"text": "a", "client": "key-1"}


def test_keys_of_forms() -> None:
    server = client("secret")
    assert server.post("/form", data={"api_key": "secret"}).status_code == 200
    assert server.post("/form", data={"api_key": "other"}).status_code == 403
    assert server.post("/form", files={"file": b"x"}, data={"api_key": "secret"}).status_code == 200
    assert server.post("/form", files={"file": b"x"}, data={"api_key": "other"}).status_code == 403


def test_bodies_beyond_a_limit_are_refused_with_its_name() -> None:
    server = client()
    answer = server.post("/echo", json={"q": "x" * 1000})
    assert answer.status_code == 413
    assert answer.json()["error"].startswith("body bytes: at most 1,000")
    answer = server.post("/echo", content=iter([b"x" * 600] * 2), headers={"content-type": "application/json"})
    assert answer.status_code == 413  # without a length
    assert server.post("/form", files={"file": b"x" * 1500}).status_code == 200
    assert server.post("/form", files={"file": b"x" * 2000}).status_code == 413


def test_errors_show_no_path_and_no_stack() -> None:
    records: list[dict[str, Any]] = []
    server = client(log=records.append)
    answer = server.get("/fail")
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error"}
    assert server.get("/wrong").json() == {"error": "a wrong value; give another"}
    assert server.get("/nowhere").json() == {"error": {"type": "http", "message": "Not Found"}}
    assert "secret" not in str(records)
    assert records[0]["error"] == "RuntimeError"
    assert records[0]["request_id"] == answer.headers["x-request-id"]


def test_request_ids_are_kept_or_made() -> None:
    server = client()
    assert server.get("/health", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(server.get("/health", headers={"X-Request-ID": "a b\tc"}).headers["x-request-id"]) == 32


def test_the_metrics_equal_the_tally_of_the_client() -> None:
    metrics = Metrics()
    server = TestClient(create_app(Echo(), ServerSettings(limits=LIMITS), metrics=metrics, interfaces=(ECHO,)))
    for _ in range(7):
        server.post("/echo", json={"q": "a"})
    for _ in range(3):
        server.post("/echo", json={"q": "x" * 2000})
    text = server.get("/metrics").text
    assert 'transduce_requests_total{method="POST",route="/echo",status="200"} 7.0' in text
    assert 'transduce_requests_total{method="POST",route="other",status="413"} 3.0' in text
    assert 'transduce_refusals_total{reason="limit"} 3.0' in text
    assert 'transduce_request_seconds_count{route="/echo"} 7.0' in text
    assert "transduce_requests_in_flight 1.0" in text  # this request itself


def test_rates_are_of_each_client() -> None:
    now = 0.0
    rates = Rates(2, lambda: now)
    rates.admit("a")
    rates.admit("a")
    with pytest.raises(RateLimited) as refused:
        rates.admit("a")
    assert refused.value.retry_after == 31
    rates.admit("b")
    now = 30.0
    rates.admit("a")


def test_probes_follow_the_state_and_other_routes_wait() -> None:
    state = ServerState()
    server = client(state=state)
    assert [server.get(path).status_code for path in ("/health", "/ready", "/live")] == [503, 503, 200]
    assert server.post("/echo", json={"q": "a"}).status_code == 503
    state.ready = True
    assert server.get("/health").json() == {"status": "ok"}
    assert server.post("/echo", json={"q": "a"}).status_code == 200
    state.draining = True
    refused = server.post("/echo", json={"q": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert server.get("/health").json() == {"status": "draining"}


def test_pages_of_other_origins_may_read_answers_only_where_allowed() -> None:
    asked = {"Origin": PAGE}
    assert "access-control-allow-origin" not in client().get("/health", headers=asked).headers
    allowed = client(cors_origins=(PAGE,)).get("/health", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == PAGE
