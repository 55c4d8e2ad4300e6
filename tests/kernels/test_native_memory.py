"""Memory that is freed stays with the process: a tensor of the same size is there again without new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import ctypes
from transduce.kernels.native.memory import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        block = library.malloc(size)
        ctypes.memset(block, 1, size)
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

library, size = ctypes.CDLL(None), 2**26
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_memory_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert given_back > 100
    assert kept < given_back / 20
