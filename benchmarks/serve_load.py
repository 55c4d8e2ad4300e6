"""Load generator for servers: clients in a closed loop whose answers are compared with the expected ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BEAM = 4  # as the endpoints of users have it


@dataclass
class Tally:
    """What the clients of one load counted."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  # of right answers
    different: int = 0  # answers of the peer that are not ours: rounding may decide between two hypotheses
    refused: list[float] = field(default_factory=list)  # latencies of 429 and 503
    without_retry_after: int = 0
    wrong: int = 0
    lost: int = 0  # no answer to a request that was sent
    statuses: Counter[int] = field(default_factory=Counter)  # of all answers

    def row(self, setting: str, name: str) -> dict[str, Any]:
        answered = len(self.latencies)
        return {
            "setting": setting,
            "name": name,
            "requests": answered + len(self.refused) + self.wrong + self.lost,
            "answered": answered,
            "refused": len(self.refused),
            "without_retry_after": self.without_retry_after,
            "wrong": self.wrong,
            "different": self.different,
            "lost": self.lost,
            "requests_per_second": round(answered / self.seconds, 1),
            "p50_ms": _percentile(self.latencies, 50),
            "p99_ms": _percentile(self.latencies, 99),
            "refusal_p99_ms": _percentile(self.refused, 99),
        }


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    if not seconds:
        return None
    return round(1000 * sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)], 1)


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and where their answers have the text."""

    port: int
    path: str
    ours: bool

    def body(self, text: str) -> dict[str, Any]:
        return {"input": text, "beam_size": BEAM} if self.ours else {"text": text}

    def text(self, answer: Any) -> str:
        return str(answer["results"][0][0]["text"] if self.ours else answer["text"])


class Connection:
    """A kept connection. A client library would cost more time than the server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, text: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. ConnectionRefusedError: nothing was sent."""
        return await self.exchange(self.endpoint.body(text))

    async def exchange(self, content: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        """The same for any body."""
        body = json.dumps(content).encode()
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.endpoint.port)
        reader, writer = self.streams
        head = f"POST {self.endpoint.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(first.split()[1]), headers, answer

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


@dataclass(frozen=True)
class Load:
    """Clients that send texts one after the other, until the time is over or all texts were sent `rounds` times."""

    texts: Sequence[str]
    expected: Sequence[str]
    clients: int
    seconds: float = 10**9
    rounds: int = 10**9
    pause: float = 0.0  # of a client after each answer
    stops: bool = False  # True: the server is stopped in the middle, and refused connections are its end

    async def run(self, endpoint: Endpoint) -> Tally:
        tally, numbers, begin = Tally(), iter(range(self.rounds * len(self.texts))), time.perf_counter()
        await asyncio.gather(*(self._client(endpoint, tally, numbers, begin) for _ in range(self.clients)))
        tally.seconds = time.perf_counter() - begin
        return tally

    async def _client(self, endpoint: Endpoint, tally: Tally, numbers: Iterator[int], begin: float) -> None:
        connection = Connection(endpoint)
        while time.perf_counter() - begin < self.seconds and (place := next(numbers, None)) is not None:
            number = place % len(self.texts)
            kept, sent = connection.streams is not None, time.perf_counter()
            try:
                status, headers, body = await connection.ask(self.texts[number])
            except ConnectionRefusedError:
                break
            except (OSError, asyncio.IncompleteReadError):
                connection.close()
                # An idle connection that is closed while a request is on its way had not accepted it.
                tally.lost += not (self.stops and kept)
                continue
            self._count(tally, endpoint, number, (status, headers, body), time.perf_counter() - sent)
            if pause := self.pause or 0.05 * (status in (429, 503)):
                await asyncio.sleep(pause)
        connection.close()

    def _count(
        self, tally: Tally, endpoint: Endpoint, number: int, answer: tuple[int, dict[str, str], bytes], seconds: float
    ) -> None:
        status, headers, body = answer
        tally.statuses[status] += 1
        if status in (429, 503):
            tally.refused.append(seconds)
            tally.without_retry_after += "retry-after" not in headers
            return
        equal = status == 200 and endpoint.text(json.loads(body)) == self.expected[number]
        if equal or (status == 200 and not endpoint.ours):
            tally.latencies.append(seconds)
            tally.different += not equal
        else:
            tally.wrong += 1


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def process(command: Sequence[str], port: int, path: str) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A server in a process, after the seconds that it took to answer a path with 200."""
    # Waiting threads that sleep make CTranslate2 thirty times slower: no server has the thread settings of this shell.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_"))}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    begin = time.perf_counter()
    running = subprocess.Popen([*command, "--port", str(port)], env=environment)
    try:
        while asyncio.run(get(port, path))[0] != 200:
            if running.poll() is not None or time.perf_counter() - begin > 300:
                raise SystemExit(f"no server: {' '.join(command)}")
            time.sleep(0.02)
        yield running, time.perf_counter() - begin
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
        running.wait(60)


async def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; 0: nobody listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    except OSError:
        return 0, ""
    return int(head.split()[1]) if head else 0, body


async def metric(port: int, names: str | Sequence[str], *labels: str) -> float:
    """The sum of metrics over all series that have these labels, such as `status="200"`, read at one moment."""
    lines = (await get(port, "/metrics"))[1].splitlines()
    starts = tuple(f"{name}{end}" for name in ([names] if isinstance(names, str) else names) for end in "{ ")
    found = [line for line in lines if line.startswith(starts) and all(one in line for one in labels)]
    return sum(float(line.split()[-1]) for line in found)
