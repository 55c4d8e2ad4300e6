"""Server process: loading, warm start, signals, draining and reloading."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from httptools import HttpParserUpgrade, HttpRequestParser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from transduce.inference.model import Model
from transduce.serving.application import CONNECTION, ServerSettings, ServerState, create_app
from transduce.serving.jobs import Jobs
from transduce.serving.metrics import Metrics
from transduce.serving.model_service import EngineOptions, ModelService
from transduce.serving.models import ModelSpec
from transduce.serving.native import resume_jobs
from transduce.serving.workers import Address

HEADER_SECONDS = 10.0  # in which the header of a request must have arrived
HEADER_BYTES = 64 * 1024  # of a header: clients of LibreTranslate send texts in the query
SWITCH_SECONDS = 0.0002  # after which the event loop gets the interpreter from an engine: 5 ms make answers wait
YOUNG_OBJECTS = 20_000  # before the interpreter looks for cycles: with its 700, that is a twentieth of all time
NOTICE_SECONDS = 0.5  # in which probes see that the server is draining


@dataclass(frozen=True)
class ServerPlan:
    """What a process serves."""

    specs: Sequence[ModelSpec]
    load: Callable[[ModelSpec], Model]
    settings: ServerSettings
    address: Address
    max_batch: int = 64
    cache_entries: int = 0
    drain_seconds: float = 30.0  # in which accepted requests may end after SIGTERM
    parent: int = 0  # the process that started this worker; 0: this is no worker
    announce: Callable[[str], None] = field(default=print)  # receives the address when the server is ready


class StartingApplication:
    """Answers 503 until the models are loaded and warm, then hands requests to the application."""

    def __init__(self) -> None:
        self.application: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.application is not None:
            await self.application(scope, receive, send)
        elif scope["type"] == "http":
            live = scope["path"] == "/live"
            answer = JSONResponse({"status": "ok" if live else "starting"}, 200 if live else 503)
            answer.headers["Retry-After"] = "1"
            await answer(scope, receive, send)


class WholeMessages:
    """One request of a connection, read and answered in one piece: `Connection` of the application."""

    leave: Callable[[], None] | None = None  # called when the client leaves

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle

    def watch(self, leave: Callable[[], None] | None) -> None:
        self.leave = leave
        self.cycle.flow.resume_reading()  # a large body has paused it

    def disconnect(self) -> None:
        """The client has left. uvicorn notes that for the last request of a connection only."""
        self.cycle.disconnected = not self.cycle.response_complete
        if self.leave is not None:
            self.leave()

    def body(self) -> bytes | None:
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected or cycle.response_complete:
            return None
        found, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return found

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        cycle = self.cycle
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
            return False
        if cycle.scope["method"] == "HEAD":
            body = b""
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))
        if head.count(b"\n") != len(lines) + 2:
            return False  # a line feed in a header, which the messages refuse
        cycle.transport.write(head + body)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


class TimedHeaders(HttpToolsProtocol):
    """A connection that is closed when the header of a request takes too long to arrive, or is too large."""

    _timer: asyncio.TimerHandle | None = None
    _pending = 0  # bytes since the header began
    _ignored: int | None = None  # where the header of a request ended whose upgrade is ignored
    _requests: Sequence[WholeMessages] = ()  # that have not been answered: several of a client that pipelines

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        self._parse(data)
        if self._timer is not None and self._pending > HEADER_BYTES:
            self.transport.write(b"HTTP/1.1 431 \r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Reads requests; one that asks for an upgrade which is ignored, as if it did not ask.

        httptools takes what follows its header for the other protocol: the body, which would be lost
        (https://github.com/Kludex/uvicorn/issues/2722).
        """
        rest: Any = memoryview(data)
        while rest:
            self._ignored = None
            super().data_received(rest)
            if self._ignored is None:
                return
            rest, header = rest[self._ignored :], self._without_upgrade()
            self.parser = HttpRequestParser(self)  # the other one has ended where the connection does not stay open
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            super().data_received(header)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        if self._ignores_upgrade():
            return
        super().on_headers_complete()
        if self.cycle is not None:
            new = WholeMessages(self.cycle)
            self._requests = [*(one for one in self._requests if not one.cycle.response_complete), new]
            cast(Any, self.scope)["extensions"] = {CONNECTION: new}

    def on_message_complete(self) -> None:
        if not self._ignores_upgrade():
            super().on_message_complete()

    def _ignores_upgrade(self) -> bool:
        """Whether a request asks for another protocol than WebSocket, as clients do that would rather have HTTP/2."""
        asks = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        return asks and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn calls this in its handler of HttpParserUpgrade."""
        upgrade = sys.exc_info()[1]
        if isinstance(upgrade, HttpParserUpgrade) and self._ignores_upgrade():  # else CONNECT, which has no body
            self._ignored = upgrade.args[0]

    def _without_upgrade(self) -> bytes:
        """The header of the present request without that of its upgrade."""
        begin = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join((begin, *lines, b"\r\n"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        for one in self._requests:
            one.disconnect()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer, self._pending = self.loop.call_later(HEADER_SECONDS, self._expire), 0

    def _expire(self) -> None:
        """Closes the connection, unless nothing is read from it now: the rest of the header may have arrived."""
        if self.flow.read_paused:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._expire)
        else:
            self.transport.close()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class DrainingServer(uvicorn.Server):
    """A server that answers what it has accepted before it stops. A second signal stops it at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_seconds: float) -> None:
        super().__init__(config)
        self.state, self._drain_seconds, self._since = state, drain_seconds, 0.0
        self.parent = 0  # the process that started this worker, without which it drains; 0: this is no worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.state.draining:
            os._exit(128 + sig)
        self.state.draining = True
        self._since = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: the server stops when nothing is in flight any more."""
        if self.parent and not self.state.draining and os.getppid() != self.parent:
            self.handle_exit(signal.SIGTERM, None)  # nobody would stop it, and it would share the port with the next
        if self.state.draining and not self.should_exit:
            seconds = time.monotonic() - self._since
            idle = not self.state.in_flight and seconds > NOTICE_SECONDS
            self.should_exit = idle or seconds > self._drain_seconds
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers the clients whose connection was made before the port is closed, then ends."""
        listeners = [one.dup() for one in sockets or []]  # which keep what waits to be accepted
        for server in self.servers:
            server.close()
        for listener in listeners:
            await self._accept_waiting(listener)
        end = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < end and any(map(_is_new, self.server_state.connections)):
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    async def _accept_waiting(self, listener: socket.socket) -> None:
        loop, kind = asyncio.get_running_loop(), cast("Any", self.config.http_protocol_class)
        make = partial(kind, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        listener.setblocking(False)
        accepted = list[socket.socket]()
        with listener, suppress(BlockingIOError):
            while True:
                accepted.append(listener.accept()[0])
        for connection in accepted:
            connection.setblocking(False)
            with suppress(OSError):  # the client left
                await loop.connect_accepted_socket(make, connection)


def tune_interpreter() -> None:
    """For an event loop beside engines, when all models are loaded. It changes the whole process."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # what is loaded stays: later collections need not look at it
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def _is_new(connection: Any) -> bool:
    """Whether the first request of a connection is still on its way."""
    return isinstance(connection, TimedHeaders) and connection.cycle is None


class ServerProcess:
    """One process: loads the models while it answers that it is starting, serves them, and drains."""

    def __init__(self, plan: ServerPlan) -> None:
        self.plan, self.state, self.metrics = plan, ServerState(), Metrics()
        self.starting = StartingApplication()
        self.service: ModelService | None = None
        self.failure: BaseException | None = None
        self._waiting: list[asyncio.Future[None]] = []  # for the models to be loaded again

    def run(self) -> None:
        listener = None if self.plan.address.shared else self.plan.address.socket()
        config = uvicorn.Config(
            self.starting,
            http=TimedHeaders,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        server = DrainingServer(config, self.state, self.plan.drain_seconds)
        server.parent = self.plan.parent
        if listener is None:  # beside other workers, a process that is not ready would only refuse requests
            self._run(self._start(server), config)
            listener = self.plan.address.socket()
        self._run(self._serve(server, listener), config)
        if self.service is not None:
            self.service.close()
        if self.plan.settings.tracing is not None:
            self.plan.settings.tracing.close()
        if self.failure is not None:
            raise self.failure

    @staticmethod
    def _run(work: Coroutine[Any, Any, None], config: uvicorn.Config) -> None:
        """Runs in the event loop that uvicorn prefers: uvloop, where it is installed."""
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(work)

    async def _serve(self, server: DrainingServer, listener: socket.socket) -> None:
        loop, starting = asyncio.get_running_loop(), None
        if self.service is None:
            starting = asyncio.ensure_future(self._start(server))
        loop.add_signal_handler(signal.SIGHUP, lambda: self._reload(loop))
        if self.service is not None:
            self._announce(listener)
        elif starting is not None:
            starting.add_done_callback(lambda _: self._announce(listener))
        await server.serve(sockets=[listener])
        if starting is not None and not starting.done():
            starting.cancel()

    def _announce(self, listener: socket.socket) -> None:
        if self.failure is None and self.state.ready:
            host, port = listener.getsockname()[:2]
            self.plan.announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            self._resume_jobs()

    async def _start(self, server: DrainingServer) -> None:
        """Loads the models, decodes with each, and opens the application."""
        plan = self.plan
        try:
            options = EngineOptions(plan.max_batch, plan.cache_entries, plan.load)
            models = [(await asyncio.to_thread(plan.load, spec), spec) for spec in plan.specs]
            service = ModelService(models, plan.settings.limits, metrics=self.metrics, options=options)
            await service.warm_up()
            tune_interpreter()
            settings = replace(plan.settings, reload=self._reload_workers) if plan.parent else plan.settings
            app = create_app(service, settings, state=self.state, metrics=self.metrics)
            self.service, self.starting.application, self.state.ready = service, app, True
        except BaseException as error:
            self.failure, server.should_exit = error, True
            if not isinstance(error, Exception):
                raise

    def _resume_jobs(self) -> None:
        """Continues what a process before this one has left."""
        settings = self.plan.settings
        if settings.jobs_folder is None or self.service is None:
            return
        if count := resume_jobs(Jobs(settings.jobs_folder, self.service, settings.limits)):
            self._log({"event": "jobs resumed", "jobs": count})

    def _log(self, record: dict[str, Any]) -> None:
        if self.plan.settings.log is not None:
            self.plan.settings.log(record)

    def _reload(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.service is not None:
            waiting, self._waiting = self._waiting, []
            self._reloading = loop.create_task(self._reload_models(self.service, waiting))

    async def _reload_workers(self) -> None:
        """Loads the models of all workers again: the process that started them sends SIGHUP to each, this one too."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        os.kill(self.plan.parent, signal.SIGHUP)
        await done

    async def _reload_models(self, service: ModelService, waiting: Sequence[asyncio.Future[None]]) -> None:
        """Loads the models again. Where that fails, the old ones go on serving."""
        failure: Exception | None = None
        try:
            await service.reload()
            self._log({"event": "reloaded", "models": [one.name for one in service.models()]})
        except Exception as error:
            failure = error
            self._log({"event": "reload failed", "error": str(error) or type(error).__name__})
        for one in waiting:
            if not one.done():
                one.set_result(None) if failure is None else one.set_exception(failure)
