"""Image generation from text: outputs resemble the images of their own captions most."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

import transduce
from transduce.modalities.image_files import fit, read_image
from transduce.modalities.image_tokenizers import PaletteTokenizer, VQTokenizer
from transduce.synthetic import write_files

pytestmark = pytest.mark.slow


def pictures(folder: Path, size: int) -> list[tuple[str, np.ndarray]]:
    """Texts and pictures of the invented set."""
    lines = [line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()]
    return [(text, fit(read_image(folder / name), size, size, "crop")) for name, text in lines]


@pytest.fixture(scope="module")
def icons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("icons")
    write_files("icons", folder / "seen", 600, 1)
    write_files("icons", folder / "new", 60, 2)
    return folder


@pytest.fixture(scope="module")
def codes(icons: Path) -> VQTokenizer:
    return VQTokenizer.fit([picture for _, picture in pictures(icons / "seen", 16)], 128, 4, updates=900)


def squared(drawn: list[np.ndarray], true: list[np.ndarray]) -> float:
    return float(np.mean([(one.astype(float) - other) ** 2 for one, other in zip(drawn, true, strict=True)]))


def test_vq_reconstruction_is_better_than_a_palette_of_equal_length(icons: Path, codes: VQTokenizer) -> None:
    """16 tokens for 256 pixels, on new pictures: the pixels of a palette would have to be 4 x 4, and drawn larger."""
    seen, new = ([picture for _, picture in pictures(icons / part, 16)] for part in ("seen", "new"))
    drawn = [codes.decode(codes.encode(picture)) for picture in new]
    assert all(fits for _, fits in drawn)

    def resized(picture: np.ndarray, side: int, how: Picture.Resampling) -> np.ndarray:
        return np.asarray(Picture.fromarray(picture).resize((side, side), how))

    palette = PaletteTokenizer.fit([resized(picture, 4, Picture.Resampling.BOX) for picture in seen], 128)
    small = [palette.decode(palette.encode(resized(picture, 4, Picture.Resampling.BOX)))[0] for picture in new]
    assert codes.tokens == palette.tokens == 16
    best = min(
        squared([resized(picture, 16, how) for picture in small], new)
        for how in (Picture.Resampling.NEAREST, Picture.Resampling.BICUBIC)
    )
    assert squared([picture for picture, _ in drawn], new) < 0.5 * best


@pytest.mark.parametrize("kind", ["colours", "codes"])
def test_image_generation_from_text_learns(tmp_path, icons, codes, kind):
    """In 64 tokens, each a pixel; or in 16, each a square of 16 pixels."""
    seen = pictures(icons / "seen", 8 if kind == "colours" else 16)
    palette = PaletteTokenizer.fit([picture for _, picture in seen], 24) if kind == "colours" else codes
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
            "steps": 450,
            "batch_tokens": 32 * 70,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 4e-3},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": 450,
            "checkpoint_every": 450,
        },
        "generation": {"strategy": "greedy", "max_ratio": 100.0},
        "evaluation": {"metrics": ["wer"], "resamples": 10},
    }
    transduce.train(recipe, tmp_path / "run")
    model = transduce.load(tmp_path / "run")
    texts = sorted({text for text, _ in seen})
    usual = np.stack([np.mean([picture for caption, picture in seen if caption == text], 0) for text in texts])
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
