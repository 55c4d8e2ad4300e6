"""Lines that name sounds in, the same lines with frames made of them out: for machines that cannot decode sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from transduce.errors import InputError, UnreadableError
from transduce.sound.frames import write_frames
from transduce.sound.modality import Sound


def keep_frames(pairs: str | Path, folder: str | Path, **options: Any) -> Path:
    """FILE TAB TEXT in each line -> FOLDER/pairs.tsv and FOLDER/frames.npz; options are those of `Sound`."""
    pairs, folder = Path(pairs), Path(folder)
    sound = Sound(normalise=False, **options)
    rows: list[np.ndarray] = []
    lines: list[str] = []
    for number, line in enumerate(pairs.read_text(encoding="utf-8").splitlines(), 1):
        named, tab, text = line.partition("\t")
        try:
            if not tab:
                raise UnreadableError("missing column", "FILE TAB TEXT")
            kept = sound.read(str(pairs.parent / named))
        except UnreadableError as bad:
            raise InputError(bad.problem, where=f"{pairs}:{number}", remedy=bad.remedy) from None
        lines.append(f"frames.npz#{len(rows)}\t{text}\n")
        rows.append(sound.padded([kept]).values[0].numpy())
    if not rows:
        raise InputError("no lines", where=str(pairs), remedy="give lines: FILE TAB TEXT")
    folder.mkdir(parents=True, exist_ok=True)
    write_frames(rows, folder / "frames.npz")
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    return folder / "pairs.tsv"
