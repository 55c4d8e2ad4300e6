"""Storage: atomic replacement, errors with a path, the cache directory; nothing in the package goes around it."""

from __future__ import annotations

import ast
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from transduce.errors import InputError
from transduce.storage import (
    REMEDIES,
    WriteError,
    atomic_path,
    cache_directory,
    make_folder,
    open_text,
    replace_file,
    size_text,
    staged_folder,
    write_file,
    write_tensors,
)

SOURCE = Path(__file__).parents[1] / "src" / "transduce"
WRITERS = {  # functions and methods that write files, wherever they come from
    *("write_text", "write_bytes", "save_file", "savefig", "savez", "savez_compressed", "tofile", "memmap", "touch"),
    *(
        "NamedTemporaryFile",
        "TemporaryFile",
        "mkstemp",
        "mkdtemp",
        "TemporaryDirectory",
        "copyfile",
        "copytree",
        "copy2",
    ),
    *("snapshot_download", "SummaryWriter", "FileHandler", "symlink_to", "link"),
}
# The only calls outside storage/, each inside a block that reports its errors, and the reason.
ALLOWED = {
    ("api.py", "TemporaryDirectory"): "run of an estimator without a folder",
    ("cli/data.py", "savefig"): "into memory",
    ("data/filters.py", "TemporaryFile"): "table of hashes in the folder of an unfinished store",
    ("evaluation/claims/report.py", "savefig"): "into an atomic path, and into memory",
    ("evaluation/evaluate.py", "savefig"): "into an atomic path",
    ("evaluation/calibration.py", "savefig"): "into an atomic path",
    ("evaluation/comparison.py", "write_text"): "/proc/self/clear_refs",
    ("explain/png.py", "savefig"): "into an atomic path",
    ("interop/bundle.py", "TemporaryDirectory"): "files of an unfinished bundle",
    ("interop/bundle.py", "ZipFile"): "into an atomic path",
    ("interop/bundle.py", "open"): "a member of that file",
    ("data/streaming.py", "TemporaryDirectory"): "folder of the store of a window",
    ("interop/__init__.py", "snapshot_download"): "download of an unfinished folder",
    ("interop/ctranslate2/importer.py", "TemporaryDirectory"): "weights between two formats",
    ("interop/export.py", "TemporaryDirectory"): "files that are uploaded, and a run that becomes a bundle",
    ("interop/legacy/checkpoint_process.py", "TemporaryDirectory"): "folder of the child process",
    ("interop/legacy/unpack.py", "open"): "in the child process, which imports nothing",
    ("interop/legacy/unpack.py", "write_text"): "in the child process, which imports nothing",
    ("kernels/native/library.py", "TemporaryDirectory"): "output of the compiler",
    ("modalities/audio_files.py", "savez_compressed"): "into an atomic file",
    ("modalities/sources.py", "memmap"): "read only",
    ("inference/retrieval.py", "savefig"): "into an atomic path",
    ("cli/serve.py", "TemporaryDirectory"): "jobs of a server without a folder for them",
    ("serving/jobs.py", "open"): "in a request: the answer is an error without the path",
    ("serving/jobs.py", "touch"): "in a request: the answer is an error without the path",
    ("serving/jobs.py", "write_text"): "in a request: the answer is an error without the path",
    ("serving/models.py", "TemporaryDirectory"): "uploads of one request",
    ("serving/models.py", "write_bytes"): "uploads of one request",
    ("serving/models.py", "open"): "a waveform in memory",
    ("serving/ray_backend.py", "TemporaryDirectory"): "files with the metrics of the replicas",
    ("serving/protocols/libretranslate.py", "open"): "in a request: the answer is an error without the path",
    ("serving/protocols/libretranslate.py", "write_bytes"): "in a request: the answer is an error without the path",
    ("serving/workers.py", "mkdtemp"): "files with the metrics of the workers",
    ("studio/overlays.py", "open"): "a waveform in memory",
    ("synthetic/media.py", "open"): "a waveform in memory",
    ("training/report.py", "savefig"): "into an atomic path",
    ("training/report.py", "SummaryWriter"): "TensorBoard",
}


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _writes(call: ast.Call) -> bool:
    name = _name(call)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name in ("open", "ZipFile", "fdopen"):
        own = arguments and isinstance(arguments[0], ast.Call) and _name(arguments[0]) == "open_new"
        return not own and any(set(mode) & set("wax+") for mode in modes if len(mode) <= 3)
    if name in ("dump", "save") and isinstance(call.func, ast.Attribute):
        return isinstance(call.func.value, ast.Name) and call.func.value.id in ("json", "yaml", "np", "torch", "onnx")
    return name in WRITERS


def test_only_storage_writes_files() -> None:
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent.name != "storage":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _writes(node):
                    found.add((str(path.relative_to(SOURCE)), _name(node)))
    assert found - ALLOWED.keys() == set(), "write through storage/: a full disk must be told with the path"
    assert ALLOWED.keys() - found == set(), "these exceptions are no longer needed"


@contextmanager
def failing_fsync(number: int) -> Iterator[None]:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        yield


@pytest.mark.parametrize("number", REMEDIES)
def test_every_error_has_a_remedy_and_keeps_the_old_content(number: int, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    replace_file(path, "old")
    with pytest.raises(InputError) as caught, failing_fsync(number):
        replace_file(path, "new")
    assert str(caught.value).startswith(f"{path}: cannot be written: {os.strerror(number)}")
    assert caught.value.remedy == REMEDIES[number]
    assert (" free)" in caught.value.problem) == (number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_a_missing_folder_and_a_folder_as_target_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="create the folder first"):
        replace_file(tmp_path / "no" / "a.txt", "x")
    with pytest.raises(InputError, match="give the name of a file"):
        replace_file(tmp_path, "x")
    with pytest.raises(InputError, match="cannot be written"):
        replace_file(tmp_path / ("x" * 400), "x")


def test_an_error_of_another_file_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    def write() -> None:
        with open_text(tmp_path / "out") as file:
            file.write("some lines\n")
            (tmp_path / "input").read_text()

    with pytest.raises(FileNotFoundError, match="input"):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), InputError("x")])
def test_any_exception_keeps_the_old_file_and_the_old_folder(error: BaseException, tmp_path: Path) -> None:
    def write_one() -> None:
        with atomic_path(tmp_path / "a.txt") as part:
            part.write_text("new")
            raise error

    def write_folder() -> None:
        with staged_folder(tmp_path / "folder") as part:
            write_file(part / "b", b"b")
            raise error

    replace_file(tmp_path / "a.txt", "old")
    for write in (write_one, write_folder):
        with pytest.raises(type(error)) as caught:
            write()
        assert caught.value is error
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "old")]


def test_staged_files_join_a_folder_that_has_others(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "kept").write_text("kept")
    (tmp_path / "folder" / "deep" / "b").write_text("old")
    with staged_folder(tmp_path / "folder") as part:
        (part / "deep").mkdir()
        write_file(part / "deep" / "b", b"new")
        assert (tmp_path / "folder" / "deep" / "b").read_text() == "old"
    files = {str(one.relative_to(tmp_path)): one.read_text() for one in tmp_path.rglob("*") if one.is_file()}
    assert files == {"folder/kept": "kept", "folder/deep/b": "new"}


def test_nested_errors_name_the_output_and_not_the_temporary_folder(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as caught, failing_fsync(errno.ENOSPC), staged_folder(tmp_path / "out") as part:
        replace_file(part / "a", "x")
    assert caught.value.where == str(tmp_path / "out")


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("😀" * 62 + ".txt")
    replace_file(path, "x")
    assert path.read_text() == "x"


def test_tensors_that_cannot_be_written_raise_an_os_error(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0)}
    write_tensors(tmp_path / "a.safetensors", tensors, {"note": "x"})
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], tensors["a"])
    with pytest.raises(OSError, match="No such file"):
        write_tensors(tmp_path / "no" / "a.safetensors", tensors)


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_modes_follow_the_umask_and_a_replaced_file_keeps_its_own(
    umask: int, file: int, folder: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with staged_folder(tmp_path / "out") as part:
            replace_file(part / "a", "x")
            write_tensors(part / "b", {"a": torch.zeros(1)})
            write_file(part / "c", b"")
        make_folder(tmp_path / "more" / "deep")
    finally:
        os.umask(before)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.rglob("*")}
    assert modes == {"a": file, "b": file, "c": file, "out": folder, "more": folder, "deep": folder}
    (tmp_path / "out" / "a").chmod(0o640)
    replace_file(tmp_path / "out" / "a", "y")
    assert stat.S_IMODE((tmp_path / "out" / "a").stat().st_mode) == 0o640


def test_the_cache_directory_is_private_whatever_the_umask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = os.umask(0o002)
    try:
        folder = make_folder(tmp_path / "home" / "transduce" / "stores")
        replace_file(folder / "a", "x")
        write_tensors(folder / "b", {"a": torch.zeros(1)})
    finally:
        os.umask(before)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.rglob("*")}
    assert modes == {"home": 0o775, "transduce": 0o700, "stores": 0o700, "a": 0o600, "b": 0o600}


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (9_999, "9,999 bytes"), (12_345, "12.3 kB"), (5e12, "5 TB")]
)
def test_sizes_are_short(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize("value", ["", ".", "cache", "../cache", None])
def test_an_empty_or_relative_cache_home_counts_as_unset(
    value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_directory("native") == tmp_path / ".cache" / "transduce" / "native"


def test_an_absolute_cache_home_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("stores") == tmp_path / "transduce" / "stores"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        cache_directory("native")


def test_no_other_module_reads_the_variable() -> None:
    readers = [path for path in SOURCE.rglob("*.py") if "XDG_CACHE_HOME" in path.read_text(encoding="utf-8")]
    assert readers == [SOURCE / "storage" / "__init__.py"]
