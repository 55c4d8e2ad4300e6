"""Native library: the C sources of this folder, compiled on first use and cached; the allocator of the C library."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transduce.errors import InputError
from transduce.storage import TEMPORARY, cache_directory, make_folder, sync

SWITCH = "TRANSDUCE_NATIVE"  # 0: do not use the library
HEADERS = (
    *("simd", "linear", "block_step", "top_k", "shortlists", "encoder_block", "beam_search"),
    *("elements", "cross_entropy", "dropout", "attention", "additive_attention"),
)
SOURCES = ("kernels.c", *(f"{name}.h" for name in HEADERS))
PLAIN = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# The first set that the compiler accepts: not every processor and system supports all of them.
FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
COMPILERS = ("cc", "gcc", "clang")
VERSION_SECONDS, COMPILE_SECONDS = 10.0, 120.0  # after which a compiler counts as hanging

number, address, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
SIGNATURES: dict[str, tuple[type[ctypes.c_int64] | None, tuple[type, ...]]] = {
    "simd_level": (number, ()),
    "panel": (number, ()),
    "advise_huge_pages": (None, (address, number)),
    "pack_fp32": (None, (address, number, number, address)),
    "pack_int8": (None, (address, number, number, address, address)),
    "linear": (number, (address, address, number, address, number, number)),
    "block_step": (number, (address, address, address)),
    "decoder_step": (number, (address,) * 6),
    "encoder_block": (number, (address, address, address)),
    "search_enter": (number, (address, address, number, number, *(address,) * 4)),
    "search_advance": (number, (address, address, number)),
    "top_k": (None, (address, number, number, number, address, address)),
    "linear_top_k": (number, (address, address, number, address, number)),
    "cross_entropy_forward": (None, (address, *(number,) * 4, *(address,) * 4, number)),
    "cross_entropy_backward": (None, (address, *(number,) * 4, *(address,) * 3, real, address, number)),
    "additive_scores_forward": (None, (*(address,) * 3, *(number,) * 5, address, number)),
    "additive_scores_backward": (None, (*(address,) * 3, *(number,) * 5, *(address,) * 4, number)),
    "attention_forward": (number, (address,)),
    "attention_backward": (number, (address,)),
    "additive_context_forward": (number, (address,)),
    "additive_context_backward": (number, (address,)),
    "dropout": (None, (address, address, number, number, address, real, address, number, number)),
}


def library() -> ctypes.CDLL | None:
    """The library, compiled on first use and cached; None: it cannot be compiled, or is switched off."""
    return None if os.environ.get(SWITCH) == "0" else _found()


def loaded() -> ctypes.CDLL | None:
    """The library if it has been loaded before; a search never starts a compilation."""
    return library() if _found.cache_info().currsize else None


@functools.cache
def _found() -> ctypes.CDLL | None:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        _warn("there is no C compiler (cc, gcc or clang)")
        return None
    problem = ""
    for flags in FLAGS:
        try:
            return load(compiled(compiler, flags, cache_directory("native")))
        except subprocess.TimeoutExpired as error:  # other flags would wait as long
            _warn(f"{compiler} did not finish in {error.timeout:g} seconds")
            return None
        except (OSError, subprocess.SubprocessError, InputError) as error:
            problem = getattr(error, "stderr", None) or str(error)
    _warn(f"{compiler} could not compile its kernels ({problem.strip()[-200:]})")
    return None


def _warn(reason: str) -> None:
    warnings.warn(
        f"work on the CPU is slower without native kernels: {reason}; {SWITCH}=0 hides this",
        stacklevel=4,
    )


def compiled(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    """Path of the library for these sources, compiler, flags and processor; compiled if the folder has none.

    The name of the file ends with the hash of its content. A file with another content (cut off, or zeroed by a crash)
    is never loaded: reading its missing pages would end the process with SIGBUS. It is deleted and compiled again.
    """
    key = _cache_key(compiler, flags)
    for path in sorted(folder.glob(f"{key}-*.so")):
        if _is_whole(path):
            return path
        warnings.warn(f"{path} is damaged: the native kernels are compiled again", stacklevel=4)
        path.unlink(missing_ok=True)
    make_folder(folder)
    # Several processes may compile at once: each writes its own file, and the last rename wins.
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as temporary:
        part = Path(temporary) / "library.so"
        source = Path(__file__).parent / SOURCES[0]
        _run([compiler, *PLAIN, *flags, "-o", str(part), str(source), "-lm"], COMPILE_SECONDS)
        sync(part)
        path = folder / f"{key}-{_digest(part.read_bytes())}.so"
        os.replace(part, path)
    sync(folder)
    return path


def _cache_key(compiler: str, flags: Sequence[str]) -> str:
    sources = [(Path(__file__).parent / name).read_bytes() for name in SOURCES]
    version = _run([compiler, "--version"], VERSION_SECONDS).encode()
    inputs = [*sources, version, " ".join((*PLAIN, *flags)).encode(), _processor().encode()]
    return _digest(b"\0".join(hashlib.sha256(part).digest() for part in inputs))


def _is_whole(path: Path) -> bool:
    try:
        return path.stem.endswith(f"-{_digest(path.read_bytes())}")
    except OSError:  # unreadable, or deleted by another process since it was listed
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _run(command: Sequence[str], seconds: float) -> str:
    """The output of a command. One that hangs is killed together with the processes that it started."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **pipes) as process:
        try:
            output, problem = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, problem)
    return output


def load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(found, f"transduce_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def _processor() -> str:
    """Description of the processor: a home folder may be shared by machines with different instruction sets."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    described = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), platform.processor(), platform.system(), *described])


TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, in glibc's malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Sets glibc's allocator so that freed memory stays with the process; False: not glibc, nothing was changed.

    Large tensors are allocated and freed in every update. By default glibc returns them to the system and requests new
    pages, which the system clears: 4 to 11 % of an update on a CPU. The setting holds for the whole process, so only
    commands of this project make it, at their start.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(TRIM_THRESHOLD, NEVER)) and bool(libc.mallopt(MMAP_MAX, 0))
