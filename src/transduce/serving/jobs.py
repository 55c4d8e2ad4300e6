"""Jobs: many texts answered in the background, with their progress and output in files that all workers read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transduce.serving.service import Draining, GenerationRequest, Limits, Overloaded, Service, ServiceError
from transduce.storage import replace_file
from transduce.storage.folder_lock import flock

JOB_PRIORITY = -10  # jobs fill what requests leave free
CHUNK = 16  # texts of a job that are asked for at once


@dataclass
class BatchJob:
    """A job in its folder."""

    folder: Path
    client: str
    total: int
    options: dict[str, Any]
    created: int
    done: int = 0
    status: str = "running"  # running, done, failed, cancelled
    error: str = ""

    @property
    def identity(self) -> str:
        return self.folder.name

    @property
    def output(self) -> Path:
        return self.folder / "output.jsonl"

    def public(self) -> dict[str, Any]:
        """What the client may know."""
        found: dict[str, Any] = {"id": self.identity, "status": self.status, "done": self.done, "total": self.total}
        return found | {"created": self.created} | ({"error": self.error} if self.error else {})

    def write(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "folder"}
        replace_file(self.folder / "job.json", json.dumps(content).encode())


class Jobs:
    """The jobs of a folder."""

    def __init__(self, folder: Path, service: Service, limits: Limits) -> None:
        self.folder, self.service, self.limits = folder, service, limits
        self._running: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, int] = {}  # file descriptors of the locks of these jobs

    def create(self, texts: Sequence[str], options: dict[str, Any], client: str) -> BatchJob:
        """A job with its texts on disk."""
        job = BatchJob(self.folder / secrets.token_hex(16), client, len(texts), options, int(time.time()))
        job.folder.mkdir(parents=True)
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        (job.folder / "input.jsonl").write_text(lines, encoding="utf-8")
        job.output.touch()
        job.write()
        return job

    def find(self, identity: str) -> BatchJob | None:
        """The job of this name, as it was last written."""
        folder = self.folder / identity
        if not re.fullmatch(r"[0-9a-f]{32}", identity) or not (folder / "job.json").is_file():
            return None
        return BatchJob(folder, **json.loads((folder / "job.json").read_text(encoding="utf-8")))

    def start(self, job: BatchJob, request: Callable[[Sequence[str]], GenerationRequest]) -> bool:
        """Works on a job beside the requests; False: another process does."""
        if not self._lock(job):
            return False
        task = asyncio.ensure_future(self._run(job, request))
        self._running[job.identity] = task
        task.add_done_callback(lambda _: self._ended(job))
        return True

    def unfinished(self) -> list[BatchJob]:
        """The jobs that are neither done nor failed: of this process, of others, and of those that have ended."""
        folders = sorted(self.folder.glob("*/")) if self.folder.is_dir() else []
        found = list[BatchJob]()
        for folder in folders:
            with suppress(ValueError, TypeError, OSError):  # no job, or one that its client removes now
                found += [job] if (job := self.find(folder.name)) is not None else []
        return sorted((job for job in found if job.status == "running"), key=lambda job: job.created)

    def _lock(self, job: BatchJob) -> bool:
        """Takes a job for this process: a lock that ends with the process, however it ends."""
        descriptor = os.open(job.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            flock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks[job.identity] = descriptor
        return True

    def _ended(self, job: BatchJob) -> None:
        self._running.pop(job.identity, None)
        os.close(self._locks.pop(job.identity))

    def cancel(self, job: BatchJob) -> None:
        """Marks a job as cancelled; the worker that runs it stops before its next texts."""
        job.status = "cancelled"
        shutil.rmtree(job.folder, ignore_errors=True)

    async def _run(self, job: BatchJob, request: Callable[[Sequence[str]], GenerationRequest]) -> None:
        try:
            texts = await asyncio.to_thread(self._continued, job)
            while job.done < job.total:
                some = self._next(texts[job.done : job.done + CHUNK])
                found = await self._answer(replace(request(some), priority=JOB_PRIORITY, deadline=None))
                if not job.folder.exists():
                    return
                await asyncio.to_thread(self._append, job, found)
            job.status = "done"
        except Draining:  # the next process continues
            return
        except ServiceError as error:
            job.status, job.error = "failed", error.message
        except Exception:
            job.status, job.error = "failed", "internal error"
        if job.folder.exists():
            job.write()

    def _continued(self, job: BatchJob) -> list[str]:
        """The texts of a job, whose output ends after the last answers that are counted as done."""
        with job.output.open("r+b") as file:
            for _ in range(job.done):
                file.readline()
            file.truncate(file.tell())
        lines = (job.folder / "input.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    def _next(self, texts: Sequence[str]) -> list[str]:
        """The first texts, as many as one request may have."""
        some, characters = list[str](), 0
        for text in texts[: self.limits.items]:
            characters += len(text)
            if some and characters > self.limits.characters:
                break
            some.append(text)
        return some

    async def _answer(self, request: GenerationRequest) -> list[list[str]]:
        """The texts of the outputs. A full queue is waited for."""
        while True:
            try:
                result = await self.service.generate(request)
                return [[one.text for one in ranked] for ranked in result.outputs]
            except Overloaded as full:
                await asyncio.sleep(full.retry_after or 1)

    def _append(self, job: BatchJob, found: Sequence[Sequence[str]]) -> None:
        with job.output.open("a", encoding="utf-8") as file:
            for number, ranked in enumerate(found, job.done):
                more = {"alternatives": list(ranked[1:])} if len(ranked) > 1 else {}
                line = {"number": number, "text": ranked[0], **more}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        job.done += len(found)
        job.write()
