"""A run in, one file out to move it with, and back: a zip of safetensors, JSON and YAML, checked before it is read.

A bundle is stored, not compressed: what lies in it is as large as it looks, and a file cannot swell when it is opened.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from transduce.errors import InputError
from transduce.interop.legacy import SUFFIXES
from transduce.recipe import InitRecipe
from transduce.recipe import registry as shelves
from transduce.run import Run
from transduce.storage import TEMPORARY, sync
from transduce.transfer.lora import load_run_weights

SMALL, LARGE = 2**20, 256 * 2**20  # bytes of a list of facts, and of a tokenizer
FINAL = "checkpoints/final"
MEMBERS: dict[str, int | None] = {  # all that may be in one, and how large; None: as large as the bundle
    "recipe.yaml": SMALL,
    "tokenizer.source.json": LARGE,
    "tokenizer.target.json": LARGE,
    "metrics.json": LARGE,
    f"{FINAL}/manifest.json": SMALL,
    f"{FINAL}/state.json": SMALL,
    f"{FINAL}/weights.safetensors": None,
}
OPTIONAL = ("metrics.json",)
CHECKED = {"state.json", "weights.safetensors"}  # what a manifest may name
BEGINS, ENDS = b"PK\x03\x04", b"PK\x05\x06"
LAST = struct.Struct("<4s4H2LH")  # the record at the end of a zip: mark, disks, counts, size and place, comment
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every member: the same run gives the same bytes
ENCRYPTED = 0x1 | 0x20 | 0x40
PIECE = 2**20
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
    """Whether this looks like a bundle rather than like a folder."""
    if not path.is_file() or path.suffix in SUFFIXES:  # checkpoints of other toolkits are zips too
        return False
    with open(path, "rb") as file:
        return file.read(len(BEGINS)) == BEGINS or path.suffix == ".zip"


def pack(run: Run, out: str | Path) -> Path:
    """Writes what a run predicts with as one file, whole or not at all; adapters are merged, code is never taken."""
    out, recipe = Path(out), run.recipe()
    if out.exists():
        raise InputError("there is something here already", where=str(out), remedy="give another name")
    checkpoint = run.checkpoints.for_inference()
    if checkpoint is None:
        raise InputError("this run has no checkpoint yet", where=str(run.folder), remedy="train it with --resume")
    weights = checkpoint.weights if recipe.training.adapters is None else load_run_weights(run, recipe)
    changes = {"training": recipe.training.model_copy(update={"adapters": None}), "init": InitRecipe()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=out.parent) as folder:
        staged = Run(Path(folder) / "run")
        staged.save_recipe(recipe.model_copy(update=changes))
        _check_recipe(staged, run.recipe_file)
        staged.save_tokenizers(*run.tokenizers())
        staged.checkpoints.save_final(checkpoint.step, weights, {})
        if metrics := run.metrics():
            staged.save_metrics(metrics)
        whole = Path(folder) / out.name
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
            for name in MEMBERS:
                if (path := staged.folder / name).is_file():
                    _add(archive, name, path)
        sync(whole)
        os.replace(whole, out)
    sync(out.parent)
    return out


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    entry.file_size = path.stat().st_size  # so that it is told in 64 bits where it needs them
    with open(path, "rb") as source, archive.open(entry, "w") as target:
        shutil.copyfileobj(source, target, PIECE)


def unpack(path: str | Path, folder: str | Path) -> Run:
    """The run that a bundle holds, in a folder of its own, which is there once all of it was checked."""
    path, folder = Path(path), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("there is something here already", where=str(folder), remedy="give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder.parent) as beside:
        staged = Run(Path(beside) / "run")
        try:
            with zipfile.ZipFile(_whole(path)) as archive:
                for entry in _members(archive, path):
                    _extract(archive, entry, staged.folder / entry.filename)
        except UNREADABLE as error:
            raise InputError(f"not a whole bundle: {error}", where=str(path), remedy="fetch it again") from None
        _check_manifest(staged, path)
        _check_recipe(staged, path)
        os.replace(staged.folder, folder)
    return Run(folder)


@contextmanager
def unpacked(path: str | Path) -> Iterator[Path]:
    """The same for as long as it is read."""
    with tempfile.TemporaryDirectory(prefix="transduce-") as folder:
        yield unpack(path, Path(folder) / "run").folder


def _whole(path: Path) -> Path:
    """The record at its end, read by hand: few members, and nothing after them."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(size - LAST.size, 0))
        tail = file.read()
    if len(tail) < LAST.size or not tail.startswith(ENDS):
        raise InputError("not a whole bundle: its end is missing", where=str(path), remedy="fetch it again")
    count = LAST.unpack(tail)[4]
    if count > len(MEMBERS):
        raise InputError(
            f"{count} members, and a bundle has at most {len(MEMBERS)}", where=str(path), remedy="this is no bundle"
        )
    return path


def _members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """What lies in it, once names, kinds and sizes were found to be those of a run."""
    entries = archive.infolist()
    names = [entry.orig_filename for entry in entries]
    for name in names:
        if name not in MEMBERS:
            raise _refused(path, f"{name!r} has no place in a bundle", f"it holds {', '.join(MEMBERS)}")
        if names.count(name) > 1:
            raise _refused(path, f"{name} is in it twice", "one of the two would be hidden")
    if missing := [name for name in MEMBERS if name not in names and name not in OPTIONAL]:
        raise _refused(path, f"{missing[0]} is missing", "write it with transduce export RUN OUT --to bundle")
    size = path.stat().st_size
    for entry in entries:
        _check_member(entry, path, size)
    if sum(entry.file_size for entry in entries) > size:
        raise _refused(path, "its members are larger together than the file they lie in", "fetch it again")
    return entries


def _check_member(entry: zipfile.ZipInfo, path: Path, size: int) -> None:
    name, mode, most = entry.filename, entry.external_attr >> 16, MEMBERS[entry.filename]
    if entry.flag_bits & ENCRYPTED:
        raise _refused(path, f"{name} is encrypted", "a bundle is open to read")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG) or entry.is_dir():
        raise _refused(path, f"{name} is no plain file", "links and devices have no place in a bundle")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise _refused(path, f"{name} is compressed", "zip it with -0: a bundle is stored as it is")
    if entry.file_size > (size if most is None else most) or entry.header_offset + entry.file_size > size:
        raise _refused(path, f"{name} would be {entry.file_size:,} bytes long", "this is no such file")


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, place: Path) -> None:
    """The library compares the sum of the bytes with the one written down, once it has come to their end."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(entry) as source, open(place, "xb") as target:
        shutil.copyfileobj(source, target, PIECE)
    if place.stat().st_size != entry.file_size:
        raise zipfile.BadZipFile(f"{entry.filename} was cut")


def _check_manifest(run: Run, path: Path) -> None:
    """It must speak of the files beside it alone: whoever reads it opens what it names."""
    try:
        named = set(json.loads((run.folder / FINAL / "manifest.json").read_bytes())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        named = {""}
    if named != CHECKED:
        raise _refused(path, "its manifest does not name the weights and the facts, and these alone", "fetch it again")


def _check_recipe(run: Run, path: Path) -> None:
    """It names no code, no other run, and nothing twice: nested references could make a short file endless."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(run.recipe_file.read_bytes())):
            raise _refused(path, "its recipe refers to parts of itself", "write them out")
    except yaml.YAMLError as error:
        raise _refused(path, f"its recipe is not readable as YAML: {error}", "fetch it again") from None
    recipe = run.recipe()
    if own := shelves.own_parts(recipe):
        remedy = "a bundle holds no code: move the folder of the run, and the code with it"
        raise _refused(path, f"this model needs code of its own: {', '.join(own)}", remedy)
    if recipe.training.adapters is not None or recipe.init != InitRecipe():
        raise _refused(path, "its recipe begins from another run", "write it with transduce export RUN OUT --to bundle")


def _refused(path: Path, problem: str, remedy: str) -> InputError:
    return InputError(problem, where=str(path), remedy=remedy)
