"""A file, or a folder with one, in; which toolkit wrote it, and the model of ours that it becomes, out."""

from __future__ import annotations

from pathlib import Path

from transduce.errors import InputError
from transduce.interop.huggingface.family import Imported
from transduce.interop.legacy import fairseq, joeynmt, marian, opennmt
from transduce.interop.legacy.assemble import assemble
from transduce.interop.legacy.checkpoint_process import opened

ENDINGS = (".pt", ".ckpt", ".npz")
FAVOURITES = ("best.ckpt", "checkpoint_best.pt", "model.npz", "model.pt")  # where a folder has several
# What only the checkpoints of one toolkit have at their top, the most telling first.
PARTS = (
    ("model_state", joeynmt.read),
    ("opt", opennmt.read),
    ("args", fairseq.read),
    ("cfg", fairseq.read),
)


def recognises(path: Path) -> bool:
    """Whether this is a checkpoint of a frozen toolkit, or a folder with one."""
    return path.suffix in ENDINGS if path.is_file() else bool(_candidates(path))


def _candidates(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in ENDINGS and path.is_file())


def _choose(path: Path) -> Path:
    if path.is_file():
        return path
    found = _candidates(path)
    names = [one.name for one in found]
    chosen = next((name for name in FAVOURITES if name in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise InputError(
            f"several checkpoints lie here: {', '.join(names[:5])}",
            where=str(path),
            remedy=f"name one of them: {path / names[0]}",
        )
    return path / chosen


def read(path: Path) -> Imported:
    """What a checkpoint of a frozen toolkit holds, as one of our models."""
    with opened(_choose(path)) as checkpoint:
        if checkpoint.file.suffix == ".npz":
            return assemble(marian.read(checkpoint))
        parts = checkpoint.settings.get("parts", [])
        reader = next((reader for name, reader in PARTS if name in parts), None)
        if reader is None:
            raise InputError(
                f"which toolkit wrote this? It holds {', '.join(parts[:8])}",
                where=str(checkpoint.file),
                remedy="known are checkpoints of JoeyNMT, OpenNMT-py and fairseq, and .npz files of Marian",
            )
        return assemble(reader(checkpoint))
