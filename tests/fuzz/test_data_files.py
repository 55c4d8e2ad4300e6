"""Damaged data files: an error, or examples and arrays of the right form; of a file with a checksum, the same ones."""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzzing import Outcome, fuzz, mutate_bytes

from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.modalities.audio import Audio, AudioFeatures
from transduce.modalities.image import Image
from transduce.recipe import Corpus

PAIRS = [(f"wort {number} ä", f"word {number} 😀") for number in range(40)]
TSV = "".join(f"{source}\t{target}\n" for source, target in PAIRS).encode()
JSONL = "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in PAIRS).encode()


def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    columns = {name: [pair[side] for pair in PAIRS] for side, name in enumerate(("source", "target"))}
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


def zstandard() -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(TSV)


CORPORA: dict[str, tuple[Callable[[], bytes], bool]] = {  # content, and whether it has a checksum
    "pairs.tsv": (lambda: TSV, False),
    "pairs.jsonl": (lambda: JSONL, False),
    "pairs.tsv.gz": (lambda: gzip.compress(TSV), True),
    "pairs.tsv.zst": (zstandard, True),
    "pairs.parquet": (parquet, False),
}


@pytest.mark.parametrize("name", CORPORA)
def test_corpora(name: str, tmp_path: Path) -> None:
    make, checked = CORPORA[name]
    content, path = make(), tmp_path / name
    corpus = Corpus(path=str(path), columns=("source", "target"))

    def attempt(draw: random.Random) -> Outcome:
        path.write_bytes(mutate_bytes(draw, content))
        found = list(read_corpus(corpus))
        assert all(isinstance(one, Example) and isinstance(one.target, str) for one in found)
        assert [one.line for one in found] == list(range(1, len(found) + 1))
        assert all("\n" not in one.source or "parquet" in name or "json" in name for one in found)
        if [(one.source, one.target) for one in found] == PAIRS:
            return "equal"
        assert not checked, "other pairs from a file with a checksum"
        return "accepted"

    fuzz(f"corpus {path.suffix[1:]}", f"{path.name.partition('.')[2]} corpora", attempt, cases=25)


def wave(samples: np.ndarray) -> bytes:
    data = samples.astype("<i2").tobytes()
    form = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
    )


def pictures() -> dict[str, bytes]:
    import io

    import PIL.Image

    values = np.random.default_rng(1).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    found = {}
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        stream = io.BytesIO()
        PIL.Image.fromarray(values).save(stream, kind)
        found[f"image.{kind.lower()}"] = stream.getvalue()
    return found


def test_images(tmp_path: Path) -> None:
    files, modality = pictures(), Image(size=16)

    def attempt(draw: random.Random) -> Outcome:
        name = draw.choice(sorted(files))
        (tmp_path / name).write_bytes(mutate_bytes(draw, files[name]))
        try:
            found = modality.read(str(tmp_path / name))
        except UnreadableError as error:
            raise InputError(error.problem) from None
        assert (found.shape, found.dtype) == ((16, 16, 3), np.uint8)
        return "accepted"

    fuzz("images", "PNG, JPEG, GIF, WebP, TIFF and BMP files", attempt, cases=60)


def test_audio(tmp_path: Path) -> None:
    import soundfile

    samples = (3000 * np.sin(np.arange(8000) / 7)).astype(np.int16)
    soundfile.write(tmp_path / "sound.flac", samples, 16000)
    soundfile.write(tmp_path / "sound.ogg", samples, 16000)
    np.save(tmp_path / "frames.npy", np.ones((5, 8), np.float32))
    np.savez_compressed(tmp_path / "frames.npz", frames=np.ones((9, 8), np.float32), offsets=np.array([0, 4, 9]))
    files = {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())} | {"sound.wav": wave(samples)}
    waves, frames = Audio(mels=8), AudioFeatures(size=8)

    def attempt(draw: random.Random) -> Outcome:
        name = draw.choice(sorted(files))
        path = tmp_path / f"damaged-{name}"
        path.write_bytes(mutate_bytes(draw, files[name]))
        try:
            part = f"{path}#1" if name.endswith("npz") else str(path)
            found = (frames if name.startswith("frames") else waves).read(part)
        except UnreadableError as error:
            raise InputError(error.problem) from None
        assert len(found)
        assert np.isfinite(found).all()
        return "accepted"

    fuzz("audio", "WAV, FLAC and Ogg files, and files of frames", attempt, cases=60)
