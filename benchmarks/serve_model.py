"""Models that the benchmarks of the server serve: encoder-decoders that reverse words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transduce
from transduce.synthetic import algorithmic


def train_reverse(
    folder: Path, part: dict[str, Any], training: dict[str, Any], *, pairs: int, generation: Any = None, **options: Any
) -> Path:
    """A run whose encoder and decoder are like `part`. `options` are those of the task."""
    for name, count, seed in (("train", pairs, 1), ("dev", 200, 2)):
        examples = algorithmic.generate("reverse", count, seed, **options)
        text = "".join(f"{one.source}\t{one.target}\n" for one in examples)
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    steps = training["steps"]
    recipe = {
        "data": {"train": str(folder / "train.tsv"), "dev": str(folder / "dev.tsv")},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {"encoder": part, "decoder": part},
        "training": {**training, "validate_every": steps, "checkpoint_every": steps},
        "generation": generation or {},
        "evaluation": {"metrics": ["exact"], "resamples": 20},
    }
    transduce.train(recipe, folder / "reverse")
    return folder / "reverse"
