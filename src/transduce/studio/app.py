"""FastAPI application of the studio: routes, built files, content security policy.

The server keeps no state of a visitor: what a view shows is in its address, so two tabs are independent. Each answer is
a pure function of its query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transduce.errors import InputError
from transduce.studio import (
    attention,
    beam_tree,
    gold_alignment,
    network_shapes,
    network_states,
    overlays,
    page,
    steps,
    training_history,
)
from transduce.studio.runs import Studio

# Each module answers the requests of its views: one row here is all that a new one needs.
ROUTERS: Sequence[Callable[[Studio], APIRouter]] = (
    attention.router,
    steps.router,
    gold_alignment.router,
    page.router,
    beam_tree.router,
    network_shapes.router,
    network_states.router,
    overlays.router,
    training_history.router,
)

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def create_app(studio: Studio, hosts: Sequence[str] = LOOPBACK) -> FastAPI:
    """The application. Requests for other host names are refused: a foreign page cannot reach it by DNS rebinding."""
    app = FastAPI(title="Transduce studio", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, hosts=tuple(hosts))
    app.add_exception_handler(InputError, _refuse)
    for router in (_runs, *ROUTERS):
        app.include_router(router(studio), prefix="/api")
    app.mount("/", StaticFiles(directory=str(static_folder()), html=True))
    return app


def static_folder() -> Path:
    """The folder of the built files of the browser."""
    return Path(str(files("transduce.studio") / "static"))


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _runs(studio: Studio) -> APIRouter:
    router = APIRouter()

    @router.get("/alive")
    def alive() -> dict[str, bool]:
        return {"alive": True}

    @router.get("/runs")
    def runs() -> dict[str, Any]:
        return {"runs": [run.describe() for run in studio.runs.values()], "gold": studio.gold is not None}

    return router


def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, InputError)
    content = {"problem": error.problem, "where": error.where, "remedy": error.remedy}
    return JSONResponse(content, status_code=400)


class _Guard:
    """Adds the security headers to every answer; refuses requests for foreign host names and from foreign pages."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        request = Request(scope)
        if self._hosts and (request.url.hostname not in self._hosts or _foreign(request)):
            refused = JSONResponse({"problem": "this host name is not served here"}, status_code=403)
            await refused(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def _foreign(request: Request) -> bool:
    """Whether a page of another origin sent this request."""
    return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
