"""Check of a release: wheel and source archive, their metadata and files, and the demo in a fresh environment."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Files that are no Python: without them the installed package draws no pages and compiles no kernels.
NEEDED = (
    "transduce/py.typed",
    "transduce/studio/static/index.html",
    "transduce/studio/static/studio.js",
    "transduce/studio/static/studio.css",
    "transduce/studio/static/licences.txt",
    "transduce/kernels/native/kernels.c",
    "transduce/kernels/native/simd.h",
)
SMALL_DEMO = ("training.steps=30", "training.validate_every=30", "training.checkpoint_every=30")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    print("$", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=cwd, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive, built in an environment of their own."""
    run(sys.executable, "-m", "venv", folder / "build")
    python = folder / "build" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "hatchling")
    run(python, "-m", "hatchling", "build", "-d", folder / "dist")
    (wheel,), (archive,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, archive


def check_wheel(wheel: Path) -> None:
    """Files and metadata agree with the source tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/transduce/__init__.py").read_text(encoding="utf-8"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(path).decode())
    missing = [name for name in NEEDED if name not in names]
    assert not missing, f"the wheel lacks {missing}"
    source = ROOT / "src"
    files = {
        str(one.relative_to(source)) for one in source.rglob("*") if one.is_file() and "__pycache__" not in one.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == files, "the wheel is not the source tree"
    assert version is not None
    assert (metadata["Name"], metadata["Version"]) == (project["name"], version[1])
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["License-Expression"] == project["license"]
    assert set(metadata.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])


def check_archive(archive: Path) -> None:
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    missing = [name for name in ("pyproject.toml", "README.md", "LICENSE", "tests/conftest.py") if name not in names]
    assert not missing, f"the source archive lacks {missing}"


def check_installed(wheel: Path, folder: Path, constraints: Path) -> None:
    """The wheel works in a fresh environment: version, import without PyTorch, completion, the demo.

    The time of the import is printed and not limited, as it depends on what else the machine does.
    """
    run(sys.executable, "-m", "venv", folder / "fresh")
    programs = folder / "fresh" / "bin"
    run(programs / "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, wheel)
    print(run(programs / "transduce", "--version", cwd=folder).strip())
    code = "import time; begin = time.perf_counter(); import transduce, sys; print(time.perf_counter() - begin)"
    seconds = float(run(programs / "python", "-c", f"{code}; assert 'torch' not in sys.modules", cwd=folder))
    print(f"import transduce: {seconds:.2f} s")
    assert "complete " in run("env", "_TRANSDUCE_COMPLETE=source_bash", programs / "transduce", cwd=folder)
    print(run(programs / "transduce", "demo", *SMALL_DEMO, cwd=folder)[-1500:])
    for name in ("recipe.yaml", "metrics.json", "attention.html", "attention.png"):
        assert (folder / "runs" / "demo" / name).is_file(), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--built", action="store_true", help="check the wheel and the archive only; install nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-") as place:
        wheel, archive = build(Path(place))
        check_wheel(wheel)
        check_archive(archive)
        if not options.built:
            check_installed(wheel, Path(place), ROOT / "constraints" / "cpu.txt")
    print("the release is in order")


if __name__ == "__main__":
    main()
