"""The C source beside this file in, its functions out, compiled; None where there is no compiler, or no wish for it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

SWITCH = "TRANSDUCE_NATIVE"  # 0: go without
HEADERS = ("vectors", "products", "blocks", "choices", "lists", "training", "heads", "readings", "sources")
SOURCES = ("kernels.c", *(f"{name}.h" for name in HEADERS))
PLAIN = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# The first that the compiler takes: not every processor and system has all of them.
FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
COMPILERS = ("cc", "gcc", "clang")

number, address, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
SIGNATURES: dict[str, tuple[type[ctypes.c_int64] | None, tuple[type, ...]]] = {
    "level": (number, ()),
    "panel": (number, ()),
    "advise": (None, (address, number)),
    "pack_floats": (None, (address, number, number, address)),
    "pack_wholes": (None, (address, number, number, address, address)),
    "product": (number, (address, address, number, address, number, number)),
    "step": (number, (address, address, address)),
    "propose": (number, (address,) * 6),
    "read": (number, (address, address, address)),
    "top": (None, (address, number, number, number, address, address)),
    "best": (number, (address, address, number, address, number)),
    "read_rows": (None, (address, *(number,) * 4, *(address,) * 4, number)),
    "write_rows": (None, (address, *(number,) * 4, *(address,) * 3, real, address, number)),
    "meet": (None, (*(address,) * 3, *(number,) * 5, address, number)),
    "part": (None, (*(address,) * 3, *(number,) * 5, *(address,) * 4, number)),
    "look": (number, (address,)),
    "look_slopes": (number, (address,)),
    "read_memory": (number, (address,)),
    "read_memory_slopes": (number, (address,)),
    "drop": (None, (address, address, number, number, address, real, address, number, number)),
}


def library() -> ctypes.CDLL | None:
    """Compiled when it is first asked for, and kept for the next time in the user's cache folder."""
    return None if os.environ.get(SWITCH) == "0" else _found()


def loaded() -> ctypes.CDLL | None:
    """The same where somebody has asked for it before: a search compiles nothing."""
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
            return load(compiled(compiler, flags, cache_folder()))
        except (OSError, subprocess.SubprocessError) as error:
            problem = getattr(error, "stderr", None) or str(error)
    _warn(f"{compiler} could not compile its kernels ({problem.strip()[-200:]})")
    return None


def _warn(reason: str) -> None:
    warnings.warn(f"work on the CPU is slower here: {reason}; {SWITCH}=0 goes without it in silence", stacklevel=4)


def compiled(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    """The library of these sources by this compiler for this processor: there already, or made now."""
    texts = [(Path(__file__).parent / name).read_bytes() for name in SOURCES]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    made_of = [*texts, version, " ".join((*PLAIN, *flags)).encode(), _processor().encode()]
    name = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in made_of)).hexdigest()[:24]
    path = folder / f"{name}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may be here at once: each writes its own file, and the last one to finish stays.
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        part = Path(aside) / path.name
        source = Path(__file__).parent / SOURCES[0]
        command = [compiler, *PLAIN, *flags, "-o", str(part), str(source), "-lm"]
        subprocess.run(command, capture_output=True, check=True, text=True, timeout=120)
        os.replace(part, path)
    return path


def load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(found, f"transduce_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "transduce" / "native"


def _processor() -> str:
    """What `native` stands for: a home folder may be shared by machines of different kinds."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), platform.processor(), platform.system(), *told])
