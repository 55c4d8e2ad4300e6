"""Native library: the C sources of this folder, compiled on first use."""

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

from transduce.storage import cache_directory

SWITCH = "TRANSDUCE_NATIVE"  # 0: do not use the library
HEADERS = (
    *("simd", "linear", "block_step", "top_k", "shortlists", "encoder_block"),
    *("elements", "cross_entropy", "dropout", "attention", "additive_attention"),
)
SOURCES = ("kernels.c", *(f"{name}.h" for name in HEADERS))
PLAIN = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# The first set that the compiler accepts: not every processor and system supports all of them.
FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
COMPILERS = ("cc", "gcc", "clang")

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
    """The library, compiled on first use and stored in the user's cache folder; None: no compiler, or switched off."""
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
        except (OSError, subprocess.SubprocessError) as error:
            problem = getattr(error, "stderr", None) or str(error)
    _warn(f"{compiler} could not compile its kernels ({problem.strip()[-200:]})")
    return None


def _warn(reason: str) -> None:
    warnings.warn(
        f"work on the CPU is slower without native kernels: {reason}; {SWITCH}=0 hides this",
        stacklevel=4,
    )


def compiled(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    """Path of the library for these sources, compiler, flags and processor; compiled if it does not exist yet."""
    sources = [(Path(__file__).parent / name).read_bytes() for name in SOURCES]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    inputs = [*sources, version, " ".join((*PLAIN, *flags)).encode(), _processor().encode()]
    name = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in inputs)).hexdigest()[:24]
    path = folder / f"{name}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may compile at once: each writes its own file, and the last rename wins.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        part = Path(temporary) / path.name
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


def _processor() -> str:
    """Description of the processor: a home folder may be shared by machines with different instruction sets."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    described = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), platform.processor(), platform.system(), *described])
