"""HTTP application: the routes of all interfaces behind one gateway for keys, limits, request ids and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import json
import random
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import transduce
from transduce.errors import InputError
from transduce.serving.metrics import CONTENT_TYPE, Metrics
from transduce.serving.native import NATIVE
from transduce.serving.protocols import INTERFACES
from transduce.serving.service import (
    CALLER,
    BadRequest,
    BodyTooLarge,
    Caller,
    Draining,
    Interface,
    InvalidKey,
    KeyMissing,
    Limits,
    RateLimited,
    RequestTimeout,
    Service,
    ServiceError,
)
from transduce.serving.telemetry import RequestTrace, Tracing

PROBES = frozenset({"/health", "/ready", "/live"})  # need no key, and are answered while the server stops
SHORT_BODIES = (b"application/json", b"application/x-www-form-urlencoded", b"text/")
REQUEST_ID = re.compile(r"[\w.-]{1,64}")
REQUEST_IDS = random.Random()  # they are no secrets, for which the kernel would be asked each time
LOGGED_BYTES = 2000  # of a request, where texts are logged
HANDLED = (ServiceError, InputError, RequestValidationError, HTTPException)  # errors that the application answers
MOST_CLIENTS = 10_000  # whose rates are remembered


CONNECTION = "transduce.connection"  # the ASGI extension that is a `Connection`


class Connection(Protocol):
    """What our own server offers beside ASGI: whole requests and responses.

    ASGI messages would take longer than the search of a short text.
    """

    def body(self) -> bytes | None:
        """The whole body of the request; None: it has not arrived."""

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Writes a whole response at once; False: it has to be sent in messages."""

    def watch(self, leave: Callable[[], None] | None) -> None:
        """Calls this function when the client leaves; None: no longer."""


@dataclass(frozen=True)
class ServerSettings:
    """How a server is run."""

    keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is needed
    limits: Limits = field(default_factory=Limits)
    cors_origins: tuple[str, ...] = ()  # empty: no page of another origin may read answers
    log: Callable[[dict[str, Any]], None] | None = None  # receives one record for each request
    log_text: bool = False  # True: the records contain the beginning of each request
    jobs_folder: Path | None = None  # None: no jobs are taken
    suggestions: Path | None = None  # file to which better translations of clients are appended; None: none are taken
    tracing: Tracing | None = None  # receives the times of each request; None: nothing is traced
    reload: Callable[[], Awaitable[None]] | None = None  # loads the models of all workers again; None: of this process


@dataclass
class ServerState:
    """What the probes report."""

    ready: bool = False  # True after the first real decode
    draining: bool = False  # True: no new requests
    in_flight: int = 0  # requests that are being answered, but for those of probes


def create_app(
    service: Service,
    settings: ServerSettings | None = None,
    *,
    state: ServerState | None = None,
    metrics: Metrics | None = None,
    interfaces: Sequence[Interface] = (NATIVE, *INTERFACES),
) -> FastAPI:
    """The application that serves these models. Without a state it is ready at once."""
    settings, state, metrics = settings or ServerSettings(), state or ServerState(ready=True), metrics or Metrics()
    app = Application(title="Transduce", version=transduce.__version__, docs_url=None, redoc_url=None)
    app.state.server, app.state.metrics, app.state.service = state, metrics, service
    routers = [_operation_routes(service, state, metrics), *(one.router(service, settings) for one in interfaces)]
    for router in routers:
        app.include_router(router)
    errors = ErrorRenderer(interfaces, metrics)
    for kind in (*HANDLED, Exception):
        app.add_exception_handler(kind, errors.handle)
    direct = direct_endpoints(routers)
    app.outermost = partial(Gateway, settings=settings, state=state, metrics=metrics, errors=errors, direct=direct)
    if settings.cors_origins:
        gateway, origins = app.outermost, settings.cors_origins
        app.outermost = lambda inner: CORSMiddleware(
            gateway(inner), allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Application(FastAPI):
    """FastAPI behind the gateway, which answers most requests itself."""

    outermost: Callable[[ASGIApp], ASGIApp] = staticmethod(lambda app: app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Starlette.__call__(self, scope, receive, send)  # FastAPI looks for telemetry here; ours is in the gateway

    def build_middleware_stack(self) -> ASGIApp:
        return self.outermost(super().build_middleware_stack())


Endpoint = Callable[[Request], Awaitable[Response]]


def direct_endpoints(routers: Sequence[APIRouter]) -> dict[tuple[str, str], Endpoint]:
    """The endpoints, by method and path, that take a request and nothing else, and return a response.

    The gateway calls them itself: the middleware, routing and dependencies of FastAPI would take longer than a search
    with a small model.
    """
    found: dict[tuple[str, str], Endpoint] = {}
    for route in (one for router in routers for one in router.routes if isinstance(one, APIRoute)):
        signature = inspect.signature(route.endpoint)
        plain = list(signature.parameters) == ["request"] and signature.return_annotation in (Response, "Response")
        if plain and not route.param_convertors and inspect.iscoroutinefunction(route.endpoint):
            found |= {(method, route.path): route.endpoint for method in route.methods or ()}
    return found


def _operation_routes(service: Service, state: ServerState, metrics: Metrics) -> APIRouter:
    refusals: dict[int | str, dict[str, Any]] = {400: {}, 401: {}, 403: {}, 429: {}, 503: {}}
    router = APIRouter(tags=["operation"], responses=refusals)

    def status() -> JSONResponse:
        ok = state.ready and not state.draining
        word = "ok" if ok else ("draining" if state.draining else "starting")
        return JSONResponse({"status": word}, 200 if ok else 503)

    @router.get("/health", summary="200 while requests are accepted, else 503.")
    async def health() -> Response:
        return status()

    @router.get("/ready", summary="200 after the first real decode, else 503.")
    async def ready() -> Response:
        return status()

    @router.get("/live", summary="200 while the process runs.")
    async def live() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/", summary="The models of this server, and where its routes are described.")
    async def welcome() -> Response:
        models = [one.name for one in service.models()]
        return JSONResponse({"name": "Transduce", "models": models, "routes": "/openapi.json"})

    @router.get("/metrics", summary="Metrics in the text format of Prometheus.", response_class=PlainTextResponse)
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    return router


def to_service_error(error: Exception) -> ServiceError:
    """An exception as an error that may be shown: without paths, stack traces or values of the server."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, InputError):
        return BadRequest(f"{error.problem}; {error.remedy}" if error.remedy else error.problem)
    if isinstance(error, RequestValidationError):
        places = [(".".join(str(part) for part in one["loc"][1:]), one["msg"]) for one in error.errors()[:4]]
        return BadRequest("; ".join(f"{place}: {text}" if place else text for place, text in places))
    if isinstance(error, HTTPException):
        found = ServiceError(str(error.detail))
        found.status, found.reason = error.status_code, "http"
        return found
    return ServiceError()


class ErrorRenderer:
    """Writes every error in the form of the interface that its path belongs to."""

    def __init__(self, interfaces: Sequence[Interface], metrics: Metrics) -> None:
        self.interfaces, self.metrics = interfaces, metrics

    def interface(self, path: str) -> Interface | None:
        for one in self.interfaces:
            prefixes = tuple(place for place in one.paths if place.endswith("/") and place != "/")
            if path in one.paths or path.startswith(prefixes):
                return one
        return None

    def render(self, path: str, error: ServiceError) -> Response:
        interface = self.interface(path)
        if isinstance(error, KeyMissing) and interface is not None:
            error.status = interface.missing_key_status
        if interface is None:
            response: Response = JSONResponse({"error": {"type": error.reason, "message": error.message}}, error.status)
        else:
            response = interface.render_error(error)
        if error.retry_after is not None:
            response.headers["Retry-After"] = str(error.retry_after)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        self.metrics.refusals.labels(error.reason).inc()
        return response

    async def handle(self, request: Request, error: Exception) -> Response:
        return self.render(request.url.path, to_service_error(error))


class Keys:
    """API keys, compared in constant time; clients are named by the place of their key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def client(self, key: str) -> str | None:
        digest, found = hashlib.sha256(key.encode(errors="replace")).digest(), None
        for number, known in enumerate(self._digests):  # all of them: the time tells nothing about the place
            if hmac.compare_digest(digest, known):
                found = f"key-{number}"
        return found


class Rates:
    """Token buckets: requests of each client within a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, at this time

    def admit(self, client: str) -> None:
        if not self.per_minute:
            return
        now = self._clock()
        left, before = self._buckets.pop(client, (float(self.per_minute), now))
        left = min(left + (now - before) * self.per_minute / 60, float(self.per_minute))
        allowed = left >= 1
        self._buckets[client] = (left - allowed, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = int((1 - left) * 60 / self.per_minute) + 1
            raise RateLimited(f"at most {self.per_minute} requests a minute", retry_after=wait)


@dataclass
class Exchange:
    """One request on its way through the gateway."""

    scope: Scope
    path: str
    request_id: str
    begin: float
    client: str = ""
    status: int = 0
    text: str = ""  # the beginning of the body
    headers: dict[bytes, bytes] = field(default_factory=dict)  # of those with one name, the first
    connection: Connection | None = None
    trace: RequestTrace | None = None
    direct: bool = False  # True: the path is the template of its route

    @property
    def route(self) -> str:
        """The template of the route: a metric label of few values."""
        return self.path if self.direct else str(getattr(self.scope.get("route"), "path", "other"))


class ReceivedRequest(Request):
    """A request whose body has been read."""

    def __init__(self, scope: Scope, receive: Receive, body: bytes) -> None:
        super().__init__(scope, receive)
        self._body = body


class Gateway:
    """Middleware that reads a request within its limits, checks its key, and cancels it when the client leaves."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        state: ServerState,
        metrics: Metrics,
        errors: ErrorRenderer,
        direct: Mapping[tuple[str, str], Endpoint],
    ) -> None:
        self.app, self.settings, self.state, self.metrics, self.errors = app, settings, state, metrics, errors
        self.direct = direct
        self.keys, self.rates = Keys(settings.keys), Rates(settings.limits.requests_per_minute)
        self._counters: dict[tuple[str, str, int], Any] = {}  # finding them takes longer than counting
        self._latencies: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if given and REQUEST_ID.fullmatch(given) else f"{REQUEST_IDS.getrandbits(128):032x}"
        exchange = Exchange(scope, scope["path"], request_id, time.perf_counter(), headers=headers)
        exchange.connection = scope.get("extensions", {}).get(CONNECTION)
        counted = exchange.path not in PROBES
        if self.settings.tracing is not None and counted:
            exchange.trace = self._begin_trace(self.settings.tracing, exchange)
        self.metrics.in_flight.inc()
        self.state.in_flight += counted
        try:
            await self._serve(exchange, receive, self._sender(exchange, send))
        finally:
            self.metrics.in_flight.dec()
            self.state.in_flight -= counted
            self._record(exchange)

    def _begin_trace(self, tracing: Tracing, exchange: Exchange) -> RequestTrace:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.scope["headers"]}
        attributes = {"http.request.method": exchange.scope["method"], "transduce.request_id": exchange.request_id}
        return tracing.begin(headers, attributes)

    def _sender(self, exchange: Exchange, send: Send) -> Send:
        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = self._headers(exchange, message["headers"])
            await send(message)

        return forward

    def _headers(self, exchange: Exchange, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        own = [*headers, (b"x-request-id", exchange.request_id.encode())]
        return [*own, (b"connection", b"close")] if self.state.draining else own

    async def _send(self, exchange: Exchange, response: Response, receive: Receive, send: Send) -> None:
        """Sends a response: one that is a body in memory in one piece, where the server can."""
        whole = type(response) in (JSONResponse, Response) and not response.background
        if (
            exchange.connection is not None and whole and not self.settings.cors_origins
        ):  # CORS adds headers to messages
            headers = self._headers(exchange, response.raw_headers)
            if exchange.connection.answer(response.status_code, headers, bytes(response.body)):
                exchange.status = response.status_code
                return
        await response(exchange.scope, receive, send)

    async def _serve(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        try:
            body = await self._admit(exchange, receive)
            CALLER.set(Caller(exchange.client, exchange.request_id, exchange.trace))
            await self._forward(exchange, body, receive, send)
        except ServiceError as error:
            await self._send(exchange, self.errors.render(exchange.path, error), receive, send)
        except Exception as error:
            self._log_failure(exchange, error)
            if not exchange.status:
                await self._send(exchange, self.errors.render(exchange.path, ServiceError()), receive, send)

    async def _admit(self, exchange: Exchange, receive: Receive) -> bytes:
        """The body of a request that may be served."""
        if exchange.path in PROBES:
            return b""
        if self.state.draining or not self.state.ready:
            raise Draining("the server is stopping" if self.state.draining else "the server is starting")
        body = await self._read(exchange, receive)
        check_unicode(body)
        exchange.client = self._client(exchange, body)
        self.rates.admit(exchange.client)
        if self.settings.log_text:
            exchange.text = body[:LOGGED_BYTES].decode("utf-8", "replace")
        return body

    async def _read(self, exchange: Exchange, receive: Receive) -> bytes:
        """The body, within the limits of its kind in bytes and seconds."""
        limits, kind = self.settings.limits, exchange.headers.get(b"content-type", b"application/json")
        short = kind.startswith(SHORT_BODIES)
        name, most = ("body bytes", limits.body_bytes) if short else ("upload bytes", limits.upload_bytes)
        length = exchange.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > most:
            raise BodyTooLarge(name, most, int(length))
        whole = None if exchange.connection is None else exchange.connection.body()
        if whole is not None:
            if len(whole) > most:
                raise BodyTooLarge(name, most)
            return whole
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestTimeout("the client left")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise BodyTooLarge(name, most)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestTimeout(f"the request did not arrive within {limits.body_seconds:g} seconds") from None

    def _client(self, exchange: Exchange, body: bytes) -> str:
        """The name of the client: its key, or its address where no keys are needed."""
        if not self.settings.keys:
            return str((exchange.scope.get("client") or ("",))[0])
        key = request_key(Request(exchange.scope), body, self.errors.interface(exchange.path))
        if not key:
            raise KeyMissing
        client = self.keys.client(key)
        if client is None:
            raise InvalidKey
        return client

    async def _forward(self, exchange: Exchange, body: bytes, receive: Receive, send: Send) -> None:
        """Runs the application, and cancels it when the client leaves."""
        gone, unread = asyncio.Event(), [body]
        work, watcher = asyncio.current_task(), None
        assert work is not None

        def leave() -> None:
            gone.set()
            work.cancel()

        async def receive_body() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            leave()

        if exchange.connection is None:
            watcher = asyncio.ensure_future(watch())
        else:
            exchange.connection.watch(leave)
        try:
            await self._answer(exchange, body, receive_body, send)
        except asyncio.CancelledError:
            if not gone.is_set():
                raise
            work.uncancel()
            self.metrics.disconnects.inc()
        finally:
            if watcher is not None:
                watcher.cancel()
            if exchange.connection is not None:
                exchange.connection.watch(None)

    async def _answer(self, exchange: Exchange, body: bytes, receive: Receive, send: Send) -> None:
        endpoint = self.direct.get((exchange.scope["method"], exchange.path))
        if endpoint is None:
            await self.app(exchange.scope, receive, send)
            return
        exchange.direct, request = True, ReceivedRequest(exchange.scope, receive, body)
        try:
            response = await endpoint(request)
        except HANDLED as error:
            response = await self.errors.handle(request, error)
        await self._send(exchange, response, receive, send)

    def _record(self, exchange: Exchange) -> None:
        seconds, status = time.perf_counter() - exchange.begin, exchange.status or 499  # 499: the client left
        method = exchange.scope["method"]
        route = exchange.route
        if (route, method, status) not in self._counters:
            self._counters[route, method, status] = self.metrics.requests.labels(route, method, str(status))
            self._latencies[route] = self.metrics.latency.labels(route)
        self._counters[route, method, status].inc()
        self._latencies[route].observe(seconds)
        if exchange.trace is not None:
            exchange.trace.end(route, method, status)
        if self.settings.log is not None:
            record = {"event": "request", "request_id": exchange.request_id, "route": route, "method": method}
            record |= {"text": exchange.text} if self.settings.log_text else {}
            self.settings.log({**record, "status": status, "seconds": round(seconds, 6), "client": exchange.client})

    def _log_failure(self, exchange: Exchange, error: Exception) -> None:
        """The kind and place of an unexpected error. Its message may quote the request."""
        if self.settings.log is None:
            return
        frame, place = error.__traceback__, ""
        while frame is not None:
            place = f"{frame.tb_frame.f_globals.get('__name__')}:{frame.tb_lineno}"
            frame = frame.tb_next
        record = {"event": "failure", "request_id": exchange.request_id, "error": type(error).__name__}
        self.settings.log({**record, "at": place})


def check_unicode(body: bytes) -> None:
    r"""Refuses JSON with half of a surrogate pair, such as "\ud800": no tokenizer and no answer could contain it."""
    if re.search(rb"\\u[dD][89a-fA-F]", body) is None:
        return
    with suppress(ValueError, RecursionError):  # no JSON, which the routes refuse
        content = json.loads(body)
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("the body is no valid Unicode") from None


def request_key(request: Request, body: bytes, interface: Interface | None) -> str:
    """The API key of a request: in a header, or where the interface has it in the query or the body."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "deepl-auth-key") and value:
        return value.strip()
    for header in ("x-api-key", "deepl-auth-key"):
        if header in request.headers:
            return request.headers[header]
    if interface is None or not interface.key_fields:
        return ""
    given: dict[str, Any] = dict(request.query_params)
    kind = request.headers.get("content-type", "")
    if kind.startswith("application/x-www-form-urlencoded"):
        given |= dict(parse_qsl(body.decode("utf-8", "replace")))
    elif kind.startswith("multipart/form-data"):
        given |= _multipart_fields(body, interface.key_fields)
    else:
        with suppress(ValueError, RecursionError):
            content = json.loads(body)
            given |= content if isinstance(content, dict) else {}
    found = (given.get(name) for name in interface.key_fields)
    return next((key for key in found if isinstance(key, str) and key), "")


def _multipart_fields(body: bytes, names: Sequence[str]) -> dict[str, str]:
    """The short fields of these names in a multipart body."""
    found = {}
    for name in names:
        field_ = rb'name="' + re.escape(name.encode()) + rb'"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{0,512})\r\n'
        if match := re.search(field_, body):
            found[name] = match.group(1).decode("utf-8", "replace")
    return found
