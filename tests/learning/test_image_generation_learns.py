"""A text becomes a picture: what is drawn looks like what was asked for, and like nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import transduce
from transduce.modalities.image.files import fit, read_image
from transduce.modalities.image.tokenizers import PaletteTokenizer, VQTokenizer
from transduce.synthetic import write_files

pytestmark = pytest.mark.slow


def pictures(folder: Path, count: int, size: int) -> list[tuple[str, np.ndarray]]:
    """Texts and pictures of the invented set."""
    pairs = write_files("icons", folder, count, 1)
    lines = [line.split("\t") for line in pairs.read_text().splitlines()]
    return [(text, fit(read_image(folder / name), size, size, "crop")) for name, text in lines]


@pytest.mark.parametrize("kind", ["colours", "codes"])
def test_image_generation_from_text_learns(tmp_path, kind):
    """In 64 tokens, each a pixel; or in 16, each a square of 16 pixels."""
    seen = pictures(tmp_path / "seen", 600, 8 if kind == "colours" else 16)
    shown = [picture for _, picture in seen]
    palette = PaletteTokenizer.fit(shown, 24) if kind == "colours" else VQTokenizer.fit(shown, 128, 4, updates=450)
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{palette.encode(picture)}\n" for text, picture in seen))
    part = {"kind": "transformer", "width": 48, "heads": 4, "ff_width": 96, "dropout": 0.0}
    recipe = {
        "data": {"train": str(tmp_path / "train.tsv"), "cache": str(tmp_path / "cache"), "dev_size": 20},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {
            "encoder": {**part, "layers": 1},
            "decoder": {**part, "layers": 2, "position": {"kind": "learned", "max_positions": 600}},
        },
        "training": {
            "steps": 300,
            "batch_tokens": 32 * 70,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 2e-3},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": 300,
            "checkpoint_every": 300,
        },
        "generation": {"strategy": "greedy", "max_ratio": 100.0},
        "evaluation": {"metrics": ["wer"], "resamples": 10},
    }
    transduce.train(recipe, tmp_path / "run")
    model = transduce.load(tmp_path / "run")
    texts = sorted({text for text, _ in seen})
    usual = np.stack([np.mean([picture for said, picture in seen if said == text], 0) for text in texts])
    found = []
    for one in model.generate(texts):
        drawn, fits = palette.decode(one.text)
        assert fits
        found.append(texts[np.abs(usual - drawn).mean((1, 2, 3)).argmin()])  # which text it looks like most
    assert len(texts) > 30
    colours, wholes = (
        [part(one) == part(text) for one, text in zip(found, texts, strict=True)] for part in (_colour, str)
    )
    assert np.mean(colours) >= 0.95
    assert np.mean(wholes) >= 0.85  # a small circle and a small square differ in four pixels


def _colour(text: str) -> str:
    return text.split()[2]
