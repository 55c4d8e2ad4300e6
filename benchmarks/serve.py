"""The server under load, beside CTranslate2 behind a plain FastAPI endpoint with the same weights.

`python -m benchmarks.serve` trains a small model that reverses letters, or takes `--run`, and serves it. Every answer
is compared with the output of `generate` for the same text, so a lost, swapped or mixed reply is counted. `--demo` adds
the run of `transduce demo`. `--soak MINUTES` watches the memory and the open files under a moderate load instead, and
`--engine` compares the engine with `generate` in one process. `--quick` only checks that everything works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

import transduce
from benchmarks.serve_engine import measure_engine
from benchmarks.serve_load import BEAM, Connection, Endpoint, Load, Tally, free_port, get, metric, process
from benchmarks.serve_model import train_reverse
from transduce.interop.export import write_ctranslate2
from transduce.synthetic import algorithmic, dates

PART = {"kind": "transformer", "width": 128, "layers": 2, "heads": 4, "ff_width": 512, "dropout": 0.0}
CLIENTS = (1, 16, 64)
PEER, TUNED_PEER = "CTranslate2", "CTranslate2, one thread a call"
STEADY_REQUESTS = 20_000
OVERLOAD_QUEUE = 32
SOAK_CLIENTS, SOAK_PAUSE = 4, 0.02
SOAK_SAMPLES = 200


def train_letters(folder: Path, steps: int) -> Path:
    """A Transformer of 2 + 2 layers and width 128 that reverses letters."""
    training = {
        "steps": steps,
        "batch_tokens": 2048,
        "optimiser": {"learning_rate": 0.002},
        "schedule": {"kind": "cosine", "warmup": min(100, steps // 4)},
        "objective": {"label_smoothing": 0.0},
    }
    return train_reverse(folder, PART, training, pairs=20_000)


class Measurements:
    """All rows of the record."""

    def __init__(self, run: Path, texts: Sequence[str], seconds: float, workers: int) -> None:
        self.run, self.texts, self.seconds, self.workers = run, texts, seconds, workers
        self.expected = [one.text for one in transduce.load(run).generate(texts, beam=BEAM)]
        self.rows: list[dict[str, Any]] = []

    def load(self, clients: int, seconds: float | None = None, **options: Any) -> Load:
        return Load(self.texts, self.expected, clients, self.seconds if seconds is None else seconds, **options)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    @contextmanager
    def server(self, *options: str, workers: int = 1) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
        """Our server, when all its workers have decoded, and the seconds until the first was ready."""
        command = [sys.executable, "-m", "transduce", "serve", str(self.run), "--quiet", *options]
        self.port = free_port()
        with process([*command, "--workers", str(workers)], self.port, "/ready") as (running, seconds):
            while asyncio.run(metric(self.port, "transduce_sources_total")) < workers:
                time.sleep(0.1)
            yield running, seconds

    @property
    def ours(self) -> Endpoint:
        return Endpoint(self.port, "/v1/transduce", True)

    def counted(self, setting: str, load: Load) -> Tally:
        """A row of a load on our server. The metrics of the server have to agree with the clients' tally."""
        before = asyncio.run(self._counts())
        tally = asyncio.run(load.run(self.ours))
        after = asyncio.run(self._counts())
        differences = {status: after[status] - before[status] for status in after if after[status] != before[status]}
        equal = differences == {status: float(count) for status, count in tally.statuses.items()}
        self.add({**tally.row(setting, "transduce"), "metrics_equal_tally": equal})
        return tally

    async def _counts(self) -> dict[int, float]:
        route = 'route="/v1/transduce"'
        return {
            status: await metric(self.port, "transduce_requests_total", route, f'status="{status}"')
            for status in (200, 400, 429, 500, 503, 504)
        }

    def cold_start(self) -> None:
        """Seconds until the first answer 200 of /ready, which follows a real decode; what /health said before."""
        command = [sys.executable, "-m", "transduce", "serve", str(self.run), "--quiet"]
        port, seen, begin = free_port(), set[int](), time.perf_counter()
        with process(command, port, "/live") as (running, _):
            while (status := asyncio.run(get(port, "/health"))[0]) != 200:
                seen.add(status)
                time.sleep(0.01)
                assert running.poll() is None
            seconds = time.perf_counter() - begin
        self.add({"setting": "cold start", "name": "transduce", "seconds": round(seconds, 2), "before": sorted(seen)})

    def beside_peers(self, counts: Sequence[int], rounds: int) -> None:
        """Clients in a closed loop, which ask the three servers in turns, so that all see the same machine.

        Of the rounds the one with the median throughput is recorded.
        """
        with ExitStack() as stack:
            running, _ = stack.enter_context(self.server(workers=self.workers))
            servers = [("transduce", self.ours, running.pid)]
            cores = str(os.cpu_count() or 1)
            for name, options in ((PEER, ()), (TUNED_PEER, ("--peer-calls", cores))):
                servers.append((name, *stack.enter_context(self.peer(*options))))
            for _, endpoint, _ in servers:
                asyncio.run(self.load(8, 1.0).run(endpoint))
            for count in counts:
                found: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in servers}
                for _ in range(rounds):
                    for name, endpoint, process_id in servers:
                        found[name].append(self._round(f"{count} clients", count, name, endpoint, process_id))
                for rows in found.values():
                    self.add(sorted(rows, key=lambda row: float(row["requests_per_second"]))[rounds // 2])

    def _round(self, setting: str, clients: int, name: str, endpoint: Endpoint, process_id: int) -> dict[str, Any]:
        """One load, with the processor time of the server for each request."""
        before = processor_seconds(process_id)
        tally = asyncio.run(self.load(clients).run(endpoint))
        used = processor_seconds(process_id) - before
        return {**tally.row(setting, name), "processor_ms": round(1000 * used / max(len(tally.latencies), 1), 3)}

    def steady(self, requests: int) -> None:
        """64 clients with a number of requests."""
        with self.server(workers=self.workers):
            asyncio.run(self.load(8, 1.0).run(self.ours))
            self.counted("steady", Load(self.texts[:requests], self.expected[:requests], 64, rounds=1))

    def batching_gain(self) -> None:
        speeds = {}
        for batch in (1, 32):
            with self.server("--max-batch", str(batch)):
                asyncio.run(self.load(8, 1.0).run(self.ours))
                tally = asyncio.run(self.load(64).run(self.ours))
                self.add(tally.row("64 clients", f"transduce, max_batch {batch}"))
                speeds[batch] = len(tally.latencies) / tally.seconds
        ratio = round(speeds[32] / speeds[1], 2)
        self.add({"setting": "batching gain", "name": "transduce", "ratio": ratio})

    def overload(self) -> None:
        """Four times as many clients as the queue has places; the queue is read every second."""
        depths: list[float] = []

        async def watch() -> None:
            while True:
                names = ("transduce_queue_depth", "transduce_active_sources")
                depths.append(await metric(self.port, names))
                await asyncio.sleep(1)

        async def run() -> Tally:
            watching = asyncio.ensure_future(watch())
            tally = await self.load(4 * OVERLOAD_QUEUE).run(self.ours)
            watching.cancel()
            return tally

        with self.server("--limit", f"queued={OVERLOAD_QUEUE}"):
            row = asyncio.run(run()).row("overload", "transduce")
            self.add({**row, "queue_limit": OVERLOAD_QUEUE, "queue_most": max(depths)})

    def disconnects(self) -> None:
        """Clients that leave, deadlines that pass, and headers that never end."""
        many = {"input": list(self.texts[:100]), "beam_size": 16}
        with self.server("--max-batch", "8"):
            for _ in range(5):
                self._post(many).close()
            begin = time.perf_counter()
            while asyncio.run(metric(self.port, "transduce_requests_in_flight")) > 1:  # 1: this one
                time.sleep(0.01)
            row = {"setting": "client left", "name": "transduce", "seconds": round(time.perf_counter() - begin, 3)}
            self.add({**row, "cancelled": asyncio.run(metric(self.port, "transduce_cancelled_sources_total"))})
            begin = time.perf_counter()
            with self._post({**many, "deadline": 0.1}) as sent:
                status = int(sent.recv(100).split()[1])
            row = {"setting": "deadline of 0.1 s", "name": "transduce", "status": status}
            row["seconds"] = round(time.perf_counter() - begin, 3)
            self.add({**row, "active_after": asyncio.run(metric(self.port, "transduce_active_sources"))})
            begin = time.perf_counter()
            with socket.create_connection(("127.0.0.1", self.port)) as slow:
                slow.sendall(b"POST /v1/transduce HTTP/1.1\r\nHost")
                slow.settimeout(60)
                closed = slow.recv(10) == b""
            seconds = round(time.perf_counter() - begin, 1)
            self.add({"setting": "unfinished header", "name": "transduce", "closed": closed, "seconds": seconds})

    def _post(self, body: dict[str, Any]) -> socket.socket:
        content = json.dumps(body).encode()
        sent = socket.create_connection(("127.0.0.1", self.port))
        head = "POST /v1/transduce HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sent.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return sent

    def limits(self) -> None:
        """The status of requests beyond each limit."""
        bodies: dict[str, dict[str, Any]] = {
            "body bytes": {"input": "a" * 1_000_001},
            "characters": {"input": "a " * 10_001},
            "items": {"input": ["a"] * 129},
            "beam_size": {"input": "a", "beam_size": 17},
            "n_best": {"input": "a", "n_best": 17},
            "max_length": {"input": "a", "max_length": 1025},
        }
        with self.server():
            answers = {name: asyncio.run(Connection(self.ours).exchange(body)) for name, body in bodies.items()}
        found = {name: [status, name in content.decode()] for name, (status, _, content) in answers.items()}
        self.add({"setting": "limits", "name": "transduce", "status_and_named": found})

    def drain(self) -> None:
        async def stopped(running: subprocess.Popen[bytes]) -> tuple[Tally, float, float]:
            load = self.load(64, stops=True)
            waiting = asyncio.ensure_future(load.run(self.ours))
            await asyncio.sleep(self.seconds / 2)
            begin = time.perf_counter()
            running.send_signal(signal.SIGTERM)
            ended = asyncio.ensure_future(asyncio.to_thread(running.wait, 60))
            while (await get(self.port, "/health"))[0] == 200:
                await asyncio.sleep(0.001)
            health = time.perf_counter() - begin
            await ended
            return await waiting, health, time.perf_counter() - begin

        with self.server() as (running, _):
            tally, health, seconds = asyncio.run(stopped(running))
        times = {"health_503_after": round(health, 3), "exit_after": round(seconds, 2)}
        self.add({**tally.row("SIGTERM under load", "transduce"), "exit_code": running.returncode, **times})

    @contextmanager
    def peer(self, *options: str) -> Iterator[tuple[Endpoint, int]]:
        """CTranslate2, one text a call, in the threads of FastAPI, as users write it: its endpoint and process."""
        with tempfile.TemporaryDirectory() as folder:
            place = write_ctranslate2(self.run, Path(folder) / "model")
            port = free_port()
            command = [sys.executable, "-m", "benchmarks.serve", "--peer", str(place), *options]
            with process(command, port, "/health") as (running, _):
                yield Endpoint(port, "/translate", False), running.pid

    def soak(self, minutes: float) -> None:
        """Memory and open files while requests, streams, refusals and clients that leave go on for a time."""
        seconds = 60 * minutes
        with self.server(workers=self.workers) as (running, _):
            parent = psutil.Process(running.pid)
            samples: list[tuple[int, int, int]] = []

            async def watch() -> None:
                while True:
                    everyone = [parent, *parent.children(recursive=True)]
                    memory = sum(one.memory_info().rss for one in everyone)
                    samples.append((memory, sum(map(_files, everyone)), sum(one.num_threads() for one in everyone)))
                    await asyncio.sleep(seconds / SOAK_SAMPLES)

            async def disturb() -> None:
                """Streams, wrong requests, and clients that leave in the middle."""
                connection = Connection(self.ours)
                for number in range(10**9):
                    text = self.texts[number % len(self.texts)]
                    self._post({"input": [text] * 20, "stream": True}).close()
                    await connection.exchange({"input": text, "beam_size": 10**6})
                    await connection.exchange({"input": [text], "n_best": 4, "wants": ["alignment", "scores"]})
                    await asyncio.sleep(10 * SOAK_PAUSE)

            async def run() -> Tally:
                others = [asyncio.ensure_future(watch()), asyncio.ensure_future(disturb())]
                tally = await self.load(SOAK_CLIENTS, seconds, pause=SOAK_PAUSE).run(self.ours)
                for one in others:
                    one.cancel()
                return tally

            tally = asyncio.run(run())
            part = max(len(samples) // 10, 1)
            early, late = samples[part : 2 * part] or samples, samples[-part:]
            memory, files, threads = (
                [round(median(one[place] for one in some)) for some in (early, late)] for place in range(3)
            )
            row = {**tally.row("soak", "transduce"), "minutes": minutes, "rss_bytes": memory}
            for name in ("requests_per_second", "p50_ms", "p99_ms", "refusal_p99_ms"):  # a soak shares its machine
                del row[name]
            row |= {"rss_growth": round(memory[1] / memory[0] - 1, 4), "open_files": files, "threads": threads}
            self.add({**row, "cancelled": asyncio.run(metric(self.port, "transduce_cancelled_sources_total"))})


def processor_seconds(process_id: int) -> float:
    """Of a process and those that it started."""
    first = psutil.Process(process_id)
    return sum(sum(one.cpu_times()[:2]) for one in (first, *first.children(recursive=True)))


def _files(process: psutil.Process) -> int:
    """Open file descriptors: files, sockets and pipes."""
    return int(process.num_fds())


def serve_peer(folder: str, port: int, calls: int) -> None:
    """The endpoint of the peer. Tokens are words, so that both sides do the same. `calls`: 0 is its own default."""
    import ctranslate2
    import uvicorn
    from fastapi import Body, FastAPI

    threads = {"inter_threads": calls, "intra_threads": 1} if calls else {}
    translator, app = ctranslate2.Translator(folder, device="cpu", **threads), FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/translate")
    def translate(text: str = Body(embed=True)) -> dict[str, str]:
        found = translator.translate_batch([text.split()], beam_size=BEAM, length_penalty=1)
        return {"text": " ".join(found[0].hypotheses[0])}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


def ratios(rows: Sequence[dict[str, Any]], clients: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Our throughput and 99th percentile beside those of the peers."""
    found = {(row["setting"], row["name"]): row for row in rows}
    for peer in (PEER, TUNED_PEER):
        for setting in (f"{count} clients" for count in clients):
            ours, other = found[setting, "transduce"], found[setting, peer]
            speed = round(ours["requests_per_second"] / other["requests_per_second"], 2)
            latency = round(ours["p99_ms"] / other["p99_ms"], 2)
            work = round(other["processor_ms"] / ours["processor_ms"], 2)
            row = {"setting": setting, "name": f"ratio to {peer}", "throughput": speed, "p99": latency}
            yield {**row, "requests_per_processor_second": work}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--run", type=Path, help="a run of the reverse task; by default one is trained")
    parser.add_argument("--demo", type=Path, help="a run of `transduce demo`, which is loaded too")
    parser.add_argument("--steps", type=int, default=400, help="updates of the training")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3, help="of each load beside the peers; the median is recorded")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of the server beside the peer")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="only watch memory and open files")
    parser.add_argument("--engine", action="store_true", help="only compare the engine with generate, in one process")
    parser.add_argument("--tiny", action="store_true", help="with --engine: a small model, on the CPU")
    parser.add_argument("--quick", action="store_true", help="a short run that only checks that everything works")
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/serve*.json]")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--peer-calls", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_server(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of the record of a load or of a soak."""
    run = args.run or train_letters(folder, args.steps)
    pairs = list(algorithmic.generate("reverse", 500 if args.quick else STEADY_REQUESTS, 3))
    found = Measurements(run, [one.source for one in pairs], args.seconds, args.workers)
    exact = sum(one.target == text for one, text in zip(pairs, found.expected, strict=True)) / len(pairs)
    found.add({"setting": "model", "name": "transduce", "exactly_reversed": round(exact, 4)})
    if args.soak:
        found.soak(args.soak)
        return found.rows
    found.cold_start()
    found.beside_peers(CLIENTS, args.rounds)
    if not args.quick:
        found.steady(STEADY_REQUESTS)
    for row in ratios(found.rows, CLIENTS):
        found.add(row)
    for measurement in (found.batching_gain, found.overload, found.disconnects, found.limits, found.drain):
        measurement()
    if args.demo:
        texts = [one.source for one in dates.generate(2000, 3)]
        demo = Measurements(args.demo, texts, args.seconds, args.workers)
        with demo.server(workers=args.workers):
            demo.counted("64 clients, demo model", demo.load(64))
        found.rows += demo.rows
    return found.rows


def main() -> None:
    args = parse_arguments()
    if args.peer:
        serve_peer(args.peer, args.port, args.peer_calls)
        return
    if args.quick:
        args.seconds, args.steps, args.rounds = 1.0, min(args.steps, 20), 1
    name = "serve-engine" if args.engine else ("serve-soak" if args.soak else "serve")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_engine(Path(folder), tiny=args.tiny) if args.engine else measure_server(args, Path(folder))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    if args.engine and torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    settings = {"seconds": args.seconds, "rounds": args.rounds, "beam": BEAM, "workers": args.workers}
    content = {"benchmark": name, "machine": machine, **({} if args.engine else settings), "rows": rows}
    output = args.output or Path(f"benchmarks/results/{name}{'-tiny' if args.tiny else ''}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
