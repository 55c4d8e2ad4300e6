"""Reading of a checkpoint in a child process that imports almost nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transduce.errors import InputError
from transduce.interop.huggingface.folder import MAX_JSON, StoredTensor, inside, list_weights
from transduce.interop.legacy.unpack import MAX_SECONDS
from transduce.storage import DISK_ERRORS, WriteError

HERE = Path(__file__).parent
# The child gets three package names with their folders, so that it imports unpack.py and safe_pickle.py but no
# package initialisation.
CHILD = """
import sys, types
from pathlib import Path
for name, folder in zip(("transduce", "transduce.interop", "transduce.interop.legacy"), sys.argv[3:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from transduce.interop.legacy.unpack import main
main(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@dataclass(frozen=True)
class LegacyCheckpoint:
    """Content of a checkpoint file."""

    file: Path
    settings: dict[str, Any]
    weights: dict[str, StoredTensor]  # by name, with the top-level key they are under: model/NAME


@contextmanager
def open_checkpoint(file: Path) -> Iterator[LegacyCheckpoint]:
    """The tensors can be read while the context is open."""
    inside(file.parent, file.name)  # JoeyNMT's best.ckpt is a symbolic link to a file in the same folder
    with TemporaryDirectory(prefix="transduce-") as temporary:
        folder = Path(temporary)
        _run(file, folder)
        written = folder / "content.json"
        if written.stat().st_size > MAX_JSON:
            raise InputError(f"the settings are larger than {MAX_JSON:,} bytes", where=str(file))
        content = json.loads(written.read_bytes())
        if "refused" in content:
            raise InputError(content["refused"], where=str(file), remedy="fetch it again")
        yield LegacyCheckpoint(file, content["settings"], list_weights(folder))


def _run(file: Path, folder: Path) -> None:
    packages = [str(HERE.parents[1]), str(HERE.parents[0]), str(HERE)]
    command = [sys.executable, "-I", "-B", "-c", CHILD, str(file.resolve()), str(folder), *packages]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads reserve memory
    problem = ""
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, timeout=2 * MAX_SECONDS, check=False
        )
        if done.returncode in DISK_ERRORS:
            error = OSError(done.returncode, os.strerror(done.returncode))
            raise WriteError(folder, error, "free space there, or set TMPDIR to a folder on another disk")
        if done.returncode or not (folder / "content.json").is_file():
            problem = f"the process that read it exited with code {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"reading it took longer than {2 * MAX_SECONDS} seconds"
    if problem:
        remedy = "an intact checkpoint needs little memory and time to be read: fetch it again"
        raise InputError(problem, where=str(file), remedy=remedy)
