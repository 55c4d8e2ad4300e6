"""Checkpoints of legacy toolkits (fairseq, OpenNMT-py, JoeyNMT, Marian): detection and import."""

from __future__ import annotations

from pathlib import Path

from transduce.errors import InputError
from transduce.interop.huggingface.family import ImportedModel
from transduce.interop.legacy import fairseq, joeynmt, marian, opennmt
from transduce.interop.legacy.checkpoint_process import open_checkpoint
from transduce.interop.legacy.model import assemble
from transduce.interop.legacy.unpack import MARIAN_BINARY

TOOLKITS = ("fairseq", "OpenNMT-py", "JoeyNMT", "Marian")
SUFFIXES = (".pt", ".ckpt", ".npz")
BINARY = ".bin"  # of Marian, if the file begins as its binaries do
PREFERRED = ("best.ckpt", "checkpoint_best.pt", "model.npz", "model.pt")  # where a folder has several checkpoints
# Top-level keys that identify the toolkit, the most specific first.
READERS = (
    ("model_state", joeynmt.read),
    ("opt", opennmt.read),
    ("args", fairseq.read),
    ("cfg", fairseq.read),
)


def recognises(path: Path) -> bool:
    """Whether this is a checkpoint of a legacy toolkit, or a folder with one."""
    return _is_checkpoint(path) if path.is_file() else bool(_candidates(path))


def _is_checkpoint(path: Path) -> bool:
    if path.suffix not in (*SUFFIXES, BINARY) or not path.is_file():
        return False
    if path.suffix != BINARY:
        return True
    with open(path, "rb") as file:
        return file.read(len(MARIAN_BINARY)) == MARIAN_BINARY


def _candidates(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _is_checkpoint(path))


def _choose(path: Path) -> Path:
    if path.is_file():
        return path
    names = [one.name for one in _candidates(path)]
    chosen = next((name for name in PREFERRED if name in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise InputError(
            f"there are several checkpoints here: {', '.join(names[:5])}",
            where=str(path),
            remedy=f"name one of them: {path / names[0]}",
        )
    return path / chosen


def read(path: Path) -> ImportedModel:
    with open_checkpoint(_choose(path)) as checkpoint:
        if checkpoint.file.suffix in (".npz", BINARY):
            return assemble(marian.read(checkpoint))
        keys = checkpoint.settings.get("parts", [])
        reader = next((reader for name, reader in READERS if name in keys), None)
        if reader is None:
            raise InputError(
                f"the toolkit that wrote this checkpoint is unknown; it holds {', '.join(keys[:8])}",
                where=str(checkpoint.file),
                remedy="supported: checkpoints of JoeyNMT, OpenNMT-py and fairseq, and .npz and .bin files of Marian",
            )
        return assemble(reader(checkpoint))


__all__ = ["SUFFIXES", "TOOLKITS", "read", "recognises"]
