"""Native library: compiled once, verified before it is loaded, and replaced by torch where it cannot be built."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from transduce.kernels.linear import PackedFloat32, PackedInt8
from transduce.kernels.native import library as libraries

COMPILER = next((path for name in libraries.COMPILERS if (path := libraries.shutil.which(name))), "")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
CONTENT = b"a library " * 1000


@pytest.fixture
def not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not asked for the library yet."""
    monkeypatch.setattr(libraries, "_found", libraries.functools.cache(libraries._found.__wrapped__))


def script(folder: Path, commands: str) -> str:
    """A compiler that is a shell script; $out is the file it is to write."""
    folder.mkdir(exist_ok=True)
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n{commands}\n')
    path.chmod(0o755)
    return str(path)


def copying_compiler(folder: Path) -> str:
    (folder / "content").write_bytes(CONTENT)
    return script(folder / "bin", f'[ -z "$out" ] || {{ echo >> {folder}/calls; cat {folder}/content > "$out"; }}')


def calls(folder: Path) -> int:
    return (folder / "calls").read_text().count("\n")


@needs_compiler
def test_a_compiler_is_used_where_there_is_one() -> None:
    found = libraries.library()
    assert found is not None
    assert found.transduce_simd_level() >= 1


@pytest.mark.parametrize("kind", [PackedFloat32, PackedInt8])
def test_the_library_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, kind: type[PackedFloat32 | PackedInt8]
) -> None:
    monkeypatch.setenv(libraries.SWITCH, "0")
    assert libraries.library() is None
    layer, values = nn.Linear(20, 30), torch.randn(4, 20)
    packed = kind(layer)
    assert packed.native is None
    with torch.inference_mode():
        torch.testing.assert_close(packed(values), layer(values), rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("not_asked")
def test_a_missing_compiler_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="no C compiler"):
        assert libraries.library() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert libraries.library() is None
    assert PackedInt8(nn.Linear(4, 4)).native is None


@pytest.mark.usefixtures("not_asked")
def test_a_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = script(tmp_path, '[ -z "$out" ] && exit 0\necho out of luck >&2\nexit 1')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries.shutil, "which", lambda name: broken)
    with pytest.warns(UserWarning, match="could not compile.*out of luck"):
        assert libraries.library() is None
    assert not list((tmp_path / "transduce" / "native").iterdir())  # nothing is left behind


@pytest.mark.usefixtures("not_asked")
@pytest.mark.parametrize("step", ["--version", "compilation"])
def test_a_hanging_compiler_is_killed_and_reported(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    condition = '-n "$out"' if step == "--version" else '-z "$out"'
    hanging = script(tmp_path, f"[ {condition} ] && exit 0\nsleep 600 &\necho $! >> {tmp_path}/children\nwait")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries.shutil, "which", lambda name: hanging)
    monkeypatch.setattr(libraries, "VERSION_SECONDS" if step == "--version" else "COMPILE_SECONDS", 0.5)
    wait = subprocess.Popen.communicate

    def communicate(process: subprocess.Popen[str], *arguments: Any, **options: Any) -> Any:
        """The time begins when the compiler hangs, however slow this machine is."""
        hangs = ("-o" not in process.args) == (step == "--version")
        while hangs and not (tmp_path / "children").exists():
            time.sleep(0.01)
        return wait(process, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.warns(UserWarning, match=r"did not finish in 0\.5 seconds"):
        assert libraries.library() is None
    (child,) = (tmp_path / "children").read_text().split()  # one set of flags is tried, not four
    for _ in range(10_000):
        if not running(int(child)):
            break
        time.sleep(0.02)
    assert not running(int(child))


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended; in a container nobody may collect it


@pytest.mark.usefixtures("not_asked")
def test_an_unwritable_cache_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transduce").write_text("a file where the folder belongs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries.shutil, "which", lambda name: copying_compiler(tmp_path))
    with pytest.warns(UserWarning, match="slower without native kernels"):
        assert libraries.library() is None


def test_the_library_is_compiled_once_for_each_set_of_flags(tmp_path: Path) -> None:
    compiler, folder = copying_compiler(tmp_path), tmp_path / "cache"
    first = libraries.compiled(compiler, ("-O0",), folder)
    assert libraries.compiled(compiler, ("-O0",), folder) == first
    assert calls(tmp_path) == 1
    assert libraries.compiled(compiler, ("-O1",), folder) != first
    assert [path.suffix for path in folder.iterdir()] == [".so", ".so"]


DAMAGES = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "zeroed": lambda content: bytes(len(content)),
    "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(damage: str, tmp_path: Path) -> None:
    compiler, folder = copying_compiler(tmp_path), tmp_path / "cache"
    path = libraries.compiled(compiler, (), folder)
    path.write_bytes(DAMAGES[damage](CONTENT))
    with pytest.warns(UserWarning, match="damaged"):
        again = libraries.compiled(compiler, (), folder)
    assert again.read_bytes() == CONTENT
    assert calls(tmp_path) == 2
    assert list(folder.iterdir()) == [again]


LOAD = """
import os
from transduce.kernels.native import library
library.FLAGS = (("-O0",),)
found = library.library()
print(found is not None and found.transduce_simd_level())
"""


@pytest.mark.slow
@needs_compiler
def test_a_truncated_library_does_not_end_the_process(tmp_path: Path) -> None:
    """Without verification the loader maps pages that are not there, and the process dies by SIGBUS."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    path = libraries.compiled(COMPILER, ("-O0",), tmp_path / "transduce" / "native")
    path.write_bytes(path.read_bytes()[:5000])
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, signal.strsignal(-done.returncode) if done.returncode < 0 else done.stderr
    assert int(done.stdout) >= 1
    assert "damaged" in done.stderr
    assert libraries._is_whole(path)


@needs_compiler
def test_no_library_is_read_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    folder = libraries.cache_directory("native")
    assert folder.is_absolute()
    assert folder.is_relative_to(tmp_path / "home")


@pytest.mark.slow
def test_nothing_is_compiled_at_import() -> None:
    code = (
        "import transduce.inference.model, transduce.decoding.search; "
        "import transduce.kernels.native.library as l; print(l.loaded())"
    )
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout.strip(), done.returncode) == ("None", 0), done.stderr


def test_the_sources_are_part_of_the_package() -> None:
    folder = Path(libraries.__file__).parent
    assert sorted(libraries.SOURCES) == sorted(path.name for path in folder.iterdir() if path.suffix in (".c", ".h"))


PAGE_FAULTS = """
import resource
import ctypes
from transduce.kernels.native.library import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

libc, size = ctypes.CDLL(None), 2**26
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
default = faults()
assert keep_freed_memory()
faults()
print(default, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_memory_stays_with_the_process() -> None:
    """A block of the same size is there again without new pages."""
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True)
    default, kept = map(int, done.stdout.split())
    assert default > 100
    assert kept < default / 20
