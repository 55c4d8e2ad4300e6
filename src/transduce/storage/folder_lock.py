"""Advisory lock of a folder: one process works in it, and the next is told which."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from transduce.errors import InputError
from transduce.storage import WriteError, is_alive, make_folder

HEARTBEAT = 20.0  # seconds between two signs of life
SILENCE = 120.0  # seconds without one after which a holder on another host counts as dead


class FolderLock:
    """An advisory lock (flock) on a file of the folder, which holds the process, host and time of its holder.

    The kernel releases it when the holder dies. A file system may have no such locks, or not share them between hosts;
    there, the process, or the time of modification, which the holder renews, tells whether it lives. Readers of the
    folder take no lock.
    """

    def __init__(self, path: Path, does: str, remedy: str) -> None:
        """`does`: what the holder does in the folder of the file; `remedy`: for who finds it locked."""
        self.path, self._does, self._remedy = path, does, remedy
        self.recovered = ""  # the holder that died, if there was one
        self._descriptor: int | None = None
        self._released = Event()
        self._created: list[Path] = []

    def acquire(self) -> None:
        """Takes the lock, or raises an `InputError` that names its holder."""
        folder = self.path.parent
        try:
            self._created = [one for one in (folder, *folder.parents) if not one.exists()]
            make_folder(folder)
            while not self._try_lock():  # until nobody has removed the file meanwhile
                pass
        except OSError as error:
            raise WriteError(folder, error) from error

    def _try_lock(self) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locked = flock(descriptor)
            if not _is_file(self.path, descriptor):  # released by its holder, which removes the file
                return False
            holder = read_holder(descriptor)
            if holder:
                self._check_death(holder, time.time() - os.fstat(descriptor).st_mtime, locked)
            self.recovered = _describe(holder)
            own = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(own).encode(), 0)
            self._descriptor = descriptor
            Thread(target=self._renew, args=(descriptor,), name="folder lock", daemon=True).start()
            return True
        except BlockingIOError:
            raise self._refusal(read_holder(descriptor)) from None
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def _check_death(self, holder: dict[str, Any], silence: float, locked: bool) -> None:
        """Refuses the lock of a holder that may be alive, where the kernel cannot know."""
        if holder.get("host") != socket.gethostname():
            alive = silence < SILENCE
        else:
            alive = not locked and isinstance(holder.get("pid"), int) and is_alive(holder["pid"])
        if alive:
            raise self._refusal(holder, f"; its last sign of life was {max(silence, 0):.0f} seconds ago")

    def _renew(self, descriptor: int) -> None:
        while not self._released.wait(HEARTBEAT):
            with suppress(OSError):
                os.utime(descriptor)

    def _refusal(self, holder: dict[str, Any], detail: str = "") -> InputError:
        known = _describe(holder) or "another process"
        problem = f"{known} {self._does} in this folder{detail}"
        return InputError(problem, where=str(self.path.parent), remedy=self._remedy)

    def release(self) -> None:
        """Removes the lock, and folders that were created for it and stayed empty."""
        if self._descriptor is None:
            return
        self._released.set()
        with suppress(OSError):
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None
        with suppress(OSError):
            for folder in self._created:
                folder.rmdir()


def flock(descriptor: int) -> bool:
    """Locks a file, or raises BlockingIOError; False: the file system has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            return False
        raise
    return True


def read_holder(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return ""
    with suppress(TypeError, ValueError, OverflowError, OSError):
        since = datetime.fromtimestamp(holder["since"]).isoformat(" ", "seconds")
        return f"process {holder['pid']} on {holder['host']} (since {since})"
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
