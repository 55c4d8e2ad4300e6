"""A browser and a server for each file of the tests of the studio, and their runs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from studio_runs import history_run, recordings_run, squares_run

from transduce.inference import load
from transduce.studio.app import create_app
from transduce.studio.runs import Studio, StudioRun

__all__ = ["history_run", "recordings_run", "squares_run"]

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-gpu",
)
INSTALL = Path(__file__).with_name("install_chromium.sh")
TIMEOUT = 30_000  # milliseconds, of a loaded machine
expect.set_options(timeout=TIMEOUT)


class Server:
    """A studio on a free port of this machine, in a thread; it can be stopped and started again."""

    def __init__(self, studio: Studio) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.studio = studio
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = {"log_level": "error", "access_log": False, "lifespan": "off"}
        config = uvicorn.Config(create_app(self.studio), "127.0.0.1", self.port, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(TIMEOUT / 1000)
        assert not self._thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def studio(
    attention_run: Path,
    transformer_run: Path,
    bottleneck_run: Path,
    history_run: Path,
    squares_run: Path,
    recordings_run: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Studio:
    """Models that reverse words, a Transformer over characters, a run with checkpoints, pictures, recordings."""
    folders = {"reverse": attention_run, "transformer": transformer_run, "bottleneck": bottleneck_run}
    folders |= {"history": tmp_path_factory.mktemp("studio") / "history"}  # a copy: a test writes into it
    shutil.copytree(history_run, folders["history"])
    folders |= {"squares": squares_run, "recordings": recordings_run}
    return Studio({name: StudioRun(name, load(folder), folder) for name, folder in folders.items()})


@pytest.fixture(scope="module")
def server(studio: Studio) -> Iterator[Server]:
    """A server for one file: it does not run beside tests of other folders, which may replace the clock."""
    running = Server(studio)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser. Its event loop runs in this thread until it is closed, so it is not shared by all files."""
    if not Path(CHROMIUM).exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["bash", str(INSTALL)], check=False, capture_output=True)
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser: {CHROMIUM} is missing and could not be installed (bash {INSTALL.name})")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield launched
        launched.close()


class Watched:
    """What a tab must not do: report errors, or send requests to other hosts."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.expects_errors = False
        context.on("console", lambda message: self._told(message.type, message.text))
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        context.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        context.route(lambda address: not address.startswith((url, "data:", "blob:")), self._refuse)

    def _told(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def _refuse(self, route: Any) -> None:
        self.foreign.append(route.request.url)
        route.abort()


@pytest.fixture
def tab(browser: Browser, server: Server) -> Iterator[Page]:
    """A tab with a context of its own. At its end it has reported no error and asked no other host."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=server.url)
    context.set_default_timeout(TIMEOUT)
    watched = Watched(context, server.url)
    page = context.new_page()
    page.watched = watched  # type: ignore[attr-defined]
    yield page
    context.close()
    assert not watched.foreign
    assert watched.expects_errors or not watched.errors, watched.errors


def fetch(page: Page, path: str) -> Any:
    """The answer of the server that a page would have."""
    return page.request.get(f"/api/{path}").json()
