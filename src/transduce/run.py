"""Run directory: recipe, tokenizers, log, metrics, learning curves, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.parsing import read_json
from transduce.recipe import Recipe, dump, load
from transduce.storage import make_folder, replace_file, staged_folder
from transduce.training.checkpoint import CheckpointManager

MAX_METRICS = 64 * 2**20  # bytes of metrics.json


@dataclass(frozen=True)
class Run:
    """The files of one training run."""

    folder: Path

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.json"

    @property
    def curves(self) -> Path:
        return self.folder / "curves.png"

    def tokenizer_file(self, side: str) -> Path:
        return self.folder / f"tokenizer.{side}.json"

    @property
    def checkpoints(self) -> CheckpointManager:
        return CheckpointManager(self.folder / "checkpoints")

    @property
    def exists(self) -> bool:
        return self.recipe_file.is_file()

    @property
    def prepared(self) -> bool:
        return all(self.tokenizer_file(side).is_file() for side in ("source", "target"))

    def recipe(self) -> Recipe:
        """The completed recipe of the run."""
        if not self.exists:
            raise InputError(
                "not a run directory: it has no recipe.yaml",
                where=str(self.folder),
                remedy="give the folder that `transduce train` wrote",
            )
        return load(self.recipe_file)

    def save_recipe(self, recipe: Recipe) -> None:
        """Writes the recipe atomically."""
        make_folder(self.folder)
        replace_file(self.recipe_file, dump(recipe).encode())

    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Source and target tokenizer; one object if both sides share a vocabulary."""
        if not self.prepared:
            raise InputError(
                "the tokenizers are missing",
                where=str(self.folder),
                remedy="the run is damaged or was interrupted before training: train it again with --resume",
            )
        source, target = (Tokenizer.load(self.tokenizer_file(side)) for side in ("source", "target"))
        return (source, source) if source.fingerprint == target.fingerprint else (source, target)

    def save_tokenizers(self, source: Tokenizer, target: Tokenizer) -> None:
        source.save(self.tokenizer_file("source"))
        target.save(self.tokenizer_file("target"))

    def metrics(self) -> dict[str, Any]:
        """The scores of a finished run; empty before its evaluation."""
        remedy = "remove the file: `transduce evaluate` computes the scores again"
        try:
            content = read_json(self.metrics_file, max_bytes=MAX_METRICS, remedy=remedy)
        except FileNotFoundError:
            return {}
        if not isinstance(content, dict):
            raise InputError("expected a JSON object", where=str(self.metrics_file), remedy=remedy)
        return content

    def save_metrics(self, content: dict[str, Any]) -> None:
        replace_file(self.metrics_file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def new_run(folder: str | Path) -> Iterator[Run]:
    """A run that appears in `folder`, which must not have one yet, when the block ends without an error."""
    run = Run(Path(folder))
    if run.exists or run.checkpoints.steps():
        raise InputError("there is already a run here", where=str(folder), remedy="give another folder")
    with staged_folder(folder) as part:
        yield Run(part)
