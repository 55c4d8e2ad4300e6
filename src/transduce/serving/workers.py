"""Worker processes on one port. The process that starts them loads no model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from transduce.errors import InputError

POLL_SECONDS = 0.05
RESTART_SECONDS = 1.0  # before a worker that ended by itself is started again


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    shared: bool = False  # True: several processes listen on the port

    def socket(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            found.bind((self.host, self.port))
        except OSError as error:
            found.close()
            place = f"{self.host}:{self.port}"
            remedy = "give another --port; 0 takes a free one" if error.errno == errno.EADDRINUSE else "check --host"
            raise InputError(f"cannot listen on {place}: {error.strerror}", remedy=remedy) from None
        return found


def log_json(record: dict[str, Any]) -> None:
    """One record as a line of JSON on standard error."""
    line = json.dumps({"time": round(time.time(), 3), **record}, ensure_ascii=False)
    print(line, file=sys.stderr, flush=True)


class Workers:
    """Several processes on one port. One that dies is started again; signals are passed on to all."""

    def __init__(self, command: Sequence[str], address: Address, count: int) -> None:
        self.count, self._stopping = count, False
        self._reserved = Address(address.host, address.port, shared=True).socket()  # the port is taken from now on
        self.port = int(self._reserved.getsockname()[1])
        self.command = [*command, "--port", str(self.port)]
        self._folder = Path(tempfile.mkdtemp(prefix="transduce-metrics-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wake = threading.Event()

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        threads = str(max(1, (os.cpu_count() or 1) // self.count))  # workers share the cores
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._folder)}
        try:
            self._processes = [subprocess.Popen(self.command, env=environment) for _ in range(self.count)]
            while not self._stopping or any(one.poll() is None for one in self._processes):
                self._wake.wait(POLL_SECONDS if self._stopping else 4 * POLL_SECONDS)
                self._revive(environment)
            return max((one.returncode for one in self._processes), default=0)
        finally:
            self._reserved.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _revive(self, environment: dict[str, str]) -> None:
        """Starts workers again that were killed. One that ends with an error of the user's input ends all."""
        for place, one in enumerate(self._processes):
            if one.poll() is None or self._stopping:
                continue
            mark_process_dead(one.pid, path=str(self._folder))
            if one.returncode == 2:
                self._pass_on(signal.SIGTERM, None)
                return
            log_json({"event": "worker ended", "code": one.returncode})
            time.sleep(RESTART_SECONDS)
            self._processes[place] = subprocess.Popen(self.command, env=environment)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopping = self._stopping or number != signal.SIGHUP
        for one in self._processes:
            if one.poll() is None:
                one.send_signal(signal.SIGHUP if number == signal.SIGHUP else signal.SIGTERM)
