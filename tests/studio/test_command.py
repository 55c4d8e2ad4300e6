"""The command `transduce studio`: its address, a port that is taken, files that belong together."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from typing import TextIO

import pytest
import uvicorn
from run_fixtures import Command

Served = list[tuple[uvicorn.Server, int]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Servers that would run, with their ports."""
    found: Served = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        found.append((server, sockets[0].getsockname()[1]))
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    return found


def test_a_free_port_is_announced_and_opened(
    served: Served, attention_run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str]] = []

    class Now:
        def __init__(self, _: float, function: object, arguments: tuple[str]) -> None:
            opened.append(arguments)

        def start(self) -> None:
            pass

    monkeypatch.setattr("transduce.cli.studio.Timer", Now)
    called = command("studio", attention_run, "--port", "0")
    assert called.code == 0, called.err
    ((_, port),) = served
    assert port > 0
    assert re.search(rf"studio: http://127\.0\.0\.1:{port}/", called.out + called.err)
    assert opened == [(f"http://127.0.0.1:{port}/",)]


def test_handlers_of_the_log_stay_open(served: Served, attention_run: Path, command: Command) -> None:
    closed: list[object] = []

    class Handler(logging.StreamHandler[TextIO]):
        def close(self) -> None:
            closed.append(self)
            super().close()

    handler = Handler()  # known to logging as long as it lives
    assert command("studio", attention_run, "--no-open", "--port", "0").code == 0
    assert closed == []
    handler.close()


def test_a_port_that_is_taken_is_explained(served: Served, attention_run: Path, command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        called = command("studio", attention_run, "--no-open", "--port", str(other.getsockname()[1]))
    assert called.code != 0
    assert "cannot listen on 127.0.0.1" in called.err
    assert "--port" in called.err
    assert "Traceback" not in called.err
    assert served == []


def test_pairs_and_gold_alignments_belong_together(served: Served, attention_run: Path, command: Command) -> None:
    called = command("studio", attention_run, "--pairs", "pairs.tsv")
    assert called.code != 0
    assert "--gold" in called.err
    assert served == []
