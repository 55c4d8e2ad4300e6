"""Bundle: a run in one zip file of safetensors, JSON and YAML.

Members are stored uncompressed, so that a bundle cannot expand when it is opened. Everything is checked before it is
read.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transduce.errors import InputError
from transduce.evaluation.calibration import Calibration
from transduce.interop.legacy import SUFFIXES
from transduce.recipe import InitRecipe, load, registry
from transduce.run import Run
from transduce.storage import TEMPORARY, atomic_path, make_folder, open_new, staged_folder, write_file
from transduce.transfer.lora import load_run_weights

SMALL, LARGE = 2**20, 256 * 2**20  # bytes of metadata, and of a tokenizer
FINAL, CARD = "checkpoints/final", "README.md"
MEMBERS: dict[str, int | None] = {  # all permitted members with their largest size; None: that of the bundle
    "recipe.yaml": SMALL,
    "tokenizer.source.json": LARGE,
    "tokenizer.target.json": LARGE,
    "metrics.json": LARGE,
    "calibration.json": LARGE,
    CARD: SMALL,
    f"{FINAL}/manifest.json": SMALL,
    f"{FINAL}/state.json": SMALL,
    f"{FINAL}/weights.safetensors": None,
}
OPTIONAL = ("metrics.json", "calibration.json", CARD)
CHECKED = {"state.json", "weights.safetensors"}  # the files that a manifest must name
ZIP_START, ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
END_RECORD = struct.Struct("<4s4H2LH")  # signature, disks, counts, size and offset of the directory, comment
EPOCH = (1980, 1, 1, 0, 0, 0)  # date of every member: the same run gives the same bytes
ENCRYPTED = 0x1 | 0x20 | 0x40
CHUNK = 2**20
UNREADABLE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    struct.error,
    ValueError,
    NotImplementedError,
    RuntimeError,
    EOFError,
)


def recognises(path: Path) -> bool:
    """Whether this is a bundle rather than a folder."""
    if not path.is_file() or path.suffix in SUFFIXES:  # checkpoints of other toolkits are zips too
        return False
    with open(path, "rb") as file:
        return file.read(len(ZIP_START)) == ZIP_START or path.suffix == ".zip"


def pack(run: Run, out: str | Path, card: Callable[[], bytes] | None = None) -> Path:
    """Writes recipe, tokenizers and weights of a run as one file. Adapters are merged; code is never included.

    `card`: the model card, which is asked for once the run has been checked.
    """
    out, recipe = Path(out), run.recipe()
    if out.exists():
        raise InputError("the path already exists", where=str(out), remedy="give another name")
    checkpoint = run.checkpoints.for_inference()
    if checkpoint is None:
        raise InputError("this run has no checkpoint yet", where=str(run.folder), remedy="train it with --resume")
    weights = checkpoint.weights if recipe.training.adapters is None else load_run_weights(run, recipe)
    changes = {"training": recipe.training.model_copy(update={"adapters": None}), "init": InitRecipe()}
    make_folder(out.parent)
    with atomic_path(out) as part, tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=out.parent) as folder:
        staged = Run(Path(folder))
        staged.save_model(recipe.model_copy(update=changes), run.tokenizers(), weights, checkpoint.step)
        _check_recipe(staged, run.recipe_file)
        if metrics := run.metrics():
            staged.save_metrics(metrics)
        if (calibration := Calibration.load(run.folder)) is not None:
            calibration.save(staged.folder)
        if card is not None:
            write_file(staged.folder / CARD, card())
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for name in MEMBERS:
                if (path := staged.folder / name).is_file():
                    _add(archive, name, path)
    return out


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    entry.file_size = path.stat().st_size  # written in 64 bits where it needs them
    with open(path, "rb") as source, archive.open(entry, "w") as target:
        shutil.copyfileobj(source, target, CHUNK)


def unpack(path: str | Path, folder: str | Path) -> Run:
    """Extracts a bundle to a new folder, which appears once everything has been checked."""
    path, folder = Path(path), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("the folder already exists and is not empty", where=str(folder), remedy="give another folder")
    with staged_folder(folder) as part:
        staged = Run(part)
        try:
            with zipfile.ZipFile(_check_end(path)) as archive:
                for entry in _members(archive, path):
                    _extract(archive, entry, staged.folder / entry.filename)
        except UNREADABLE as error:
            raise InputError(f"not a complete bundle: {error}", where=str(path), remedy="fetch it again") from None
        _check_manifest(staged, path)
        _check_recipe(staged, path)
        for file in staged.checkpoints.run_files:
            if problem := staged.checkpoints.mismatch(file):
                raise _refused(path, f"{file.name} does not belong to the weights: {problem}", "fetch it again")
    return Run(folder)


@contextmanager
def unpacked(path: str | Path) -> Iterator[Path]:
    """The folder of an extracted bundle, deleted at the end of the context."""
    with tempfile.TemporaryDirectory(prefix="transduce-") as folder:
        yield unpack(path, Path(folder) / "run").folder


def _check_end(path: Path) -> Path:
    """Checks the end record before the zip is opened: few members, and no bytes after them."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(size - END_RECORD.size, 0))
        tail = file.read()
    if len(tail) < END_RECORD.size or not tail.startswith(ZIP_END):
        raise InputError("not a complete bundle: its end is missing", where=str(path), remedy="fetch it again")
    count = END_RECORD.unpack(tail)[4]
    if count > len(MEMBERS):
        raise InputError(
            f"{count} members, but a bundle has at most {len(MEMBERS)}", where=str(path), remedy="this is not a bundle"
        )
    return path


def _members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """All members, with names, types and sizes checked."""
    entries = archive.infolist()
    names = [entry.orig_filename for entry in entries]
    for name in names:
        if name not in MEMBERS:
            raise _refused(path, f"{name!r} does not belong in a bundle", f"a bundle holds {', '.join(MEMBERS)}")
        if names.count(name) > 1:
            raise _refused(path, f"{name} occurs twice", "one of the two would be hidden")
    if missing := [name for name in MEMBERS if name not in names and name not in OPTIONAL]:
        raise _refused(path, f"{missing[0]} is missing", "write it with transduce export RUN OUT --to bundle")
    size = path.stat().st_size
    for entry in entries:
        _check_member(entry, path, size)
    if sum(entry.file_size for entry in entries) > size:
        raise _refused(path, "the members together are larger than the file", "fetch it again")
    return entries


def _check_member(entry: zipfile.ZipInfo, path: Path, size: int) -> None:
    name, mode, limit = entry.filename, entry.external_attr >> 16, MEMBERS[entry.filename]
    if entry.flag_bits & ENCRYPTED:
        raise _refused(path, f"{name} is encrypted", "a bundle is not encrypted")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG) or entry.is_dir():
        raise _refused(path, f"{name} is not a regular file", "links and devices do not belong in a bundle")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise _refused(path, f"{name} is compressed", "zip it with -0: members of a bundle are stored uncompressed")
    inside = 0 <= entry.header_offset <= size - entry.file_size
    if entry.file_size > (size if limit is None else limit) or not inside:
        raise _refused(path, f"{name} would be {entry.file_size:,} bytes long", "the size does not fit the file")


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target_path: Path) -> None:
    """Extracts one member; zipfile compares its checksum at the end."""
    make_folder(target_path.parent)
    with archive.open(entry) as source, open(open_new(target_path, os.O_EXCL), "wb") as target:
        shutil.copyfileobj(source, target, CHUNK)
        target.flush()
        os.fsync(target.fileno())
    if target_path.stat().st_size != entry.file_size:
        raise zipfile.BadZipFile(f"{entry.filename} was truncated")


def _check_manifest(run: Run, path: Path) -> None:
    """The manifest must name exactly the files beside it, because its reader opens what it names."""
    try:
        named = set(json.loads((run.folder / FINAL / "manifest.json").read_bytes())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        named = {""}
    if named != CHECKED:
        raise _refused(path, "the manifest does not name exactly the weights and the state", "fetch it again")


def _check_recipe(run: Run, path: Path) -> None:
    """The recipe must not name code or another run."""
    recipe = load(run.recipe_file)
    if own := registry.user_classes(recipe):
        remedy = "a bundle holds no code: copy the folder of the run together with the code"
        raise _refused(path, f"this model needs its own code: {', '.join(own)}", remedy)
    if recipe.training.adapters is not None or recipe.init != InitRecipe():
        raise _refused(path, "the recipe starts from another run", "write it with transduce export RUN OUT --to bundle")


def _refused(path: Path, problem: str, remedy: str) -> InputError:
    return InputError(problem, where=str(path), remedy=remedy)
