"""Learned metrics: BERTScore and COMET, through their own libraries and models in local folders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transduce.contracts import Count, Metric, SourceMetric, TextMetric
from transduce.errors import InputError
from transduce.evaluation.overlap_metrics import References, mean_score, pair_up
from transduce.parsing import read_json

MAX_CONFIG = 2**24  # bytes of a JSON file in a model folder
LARGEST = 2**31  # maximal length of a text in tokens


def require_library(name: str, metric: str) -> Any:
    """The module of a library that an extra installs; the extra has the name of the metric."""
    try:
        return import_module(name)
    except ImportError as missing:
        problem = f"{metric} needs the library {missing.name or name}"
        raise InputError(problem, remedy=f"pip install 'transduce[{metric}]'") from None


class _ModelFolder(Metric):
    """Base of metrics with a model in a local folder; the score is 100 times the mean over lines."""

    library: str  # its module

    def __init__(self, *, model: str | None = None, batch_size: Count = 16) -> None:
        self.model, self.batch_size = model, batch_size

    @property
    def folder(self) -> Path:
        if self.model is None or not Path(self.model).is_dir():
            problem = "no model folder" if self.model is None else f"there is no folder {self.model}"
            remedy = f"write {{kind: {self.name}, model: FOLDER}}; nothing is downloaded"
            raise InputError(f"{self.name}: {problem}", where="evaluation.metrics", remedy=remedy)
        return Path(self.model).absolute()

    def check(self) -> None:
        require_library(self.library, self.name)
        _ = self.folder

    def value(self, totals: np.ndarray) -> float:
        return mean_score(totals)

    @property
    def signature(self) -> str:
        version = getattr(require_library(self.library, self.name), "__version__", "?")
        return f"{self.name}|model:{self.folder.name}|refs:best|mean|{self.library}:{version}"


def _rows(scores: Sequence[float]) -> np.ndarray:
    return np.array([[score, 1.0] for score in scores], dtype=float).reshape(-1, 2)


class BertScore(_ModelFolder, TextMetric):
    """BERTScore: F1 of greedy matches of contextual embeddings, mean over lines (Zhang 2020; bert-score).

    A line without words scores 0. Without `layer` it is the one that bert-score recommends for a model of this name.
    """

    name = "bertscore"
    library = "bert_score"

    def __init__(self, *, model: str | None = None, layer: Count | None = None, batch_size: Count = 64) -> None:
        super().__init__(model=model, batch_size=batch_size)
        self.layer = layer

    def check(self) -> None:
        super().check()
        for name in ("config.json", "tokenizer_config.json"):
            content = read_json(self.folder / name, max_bytes=MAX_CONFIG)
            if "auto_map" in content:
                raise InputError("code of the model itself is not run", where=str(self.folder / name))
            # Without a limit, bert-score asks the tokenizer for one that it cannot hold.
            if name == "tokenizer_config.json" and content.get("model_max_length", LARGEST) >= LARGEST:
                raise InputError("no model_max_length", where=str(self.folder / name), remedy="add it, such as 512")
        _ = self.chosen_layer

    @property
    def chosen_layer(self) -> int:
        if self.layer is not None:
            return self.layer
        known = require_library("bert_score.utils", self.name).model2layers
        for name, layer in known.items():
            if name.rpartition("/")[2] == self.folder.name:
                return int(layer)
        remedy = f"write {{kind: bertscore, model: {self.model}, layer: NUMBER}}"
        raise InputError(f"bert-score recommends no layer for {self.folder.name}", remedy=remedy)

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = [(text, [one for one in line if one.strip()]) for text, line in pair_up(hypotheses, references)]
        scored = [row for row, (text, line) in enumerate(pairs) if text.strip() and line]
        scores = np.zeros(len(pairs))
        if pairs:
            self.check()
        if scored:
            _, _, f1 = require_library(self.library, self.name).score(
                [pairs[row][0] for row in scored],
                [pairs[row][1] for row in scored],
                model_type=str(self.folder),
                num_layers=self.chosen_layer,
                batch_size=self.batch_size,
                use_fast_tokenizer=True,
            )
            scores[scored] = f1.double().numpy()
        return _rows(scores.tolist())

    @property
    def signature(self) -> str:
        return f"{super().signature}|layer:{self.chosen_layer}|idf:no|rescaled:no"


@lru_cache(maxsize=1)
def _load_comet(checkpoint: Path) -> Any:
    """The model of a checkpoint that holds tensors and plain values only: pickled objects are refused."""
    try:
        torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"no plain tensors: {reason}", where=str(checkpoint), remedy="use another copy") from None
    return require_library("comet", "comet").load_from_checkpoint(str(checkpoint), local_files_only=True)


class Comet(_ModelFolder, SourceMetric):
    """COMET: quality that a model trained on human judgements predicts, times 100 (Rei 2020; unbabel-comet).

    The folder is that of a model on the Hub, with checkpoints/model.ckpt and hparams.yaml. A model without references
    (CometKiwi) reads source and output alone; with several references the best score of a line counts.
    """

    name = "comet"
    library = "comet"

    def __init__(self, *, model: str | None = None, batch_size: Count = 16, gpus: int = 0) -> None:
        super().__init__(model=model, batch_size=batch_size)
        self.gpus = gpus

    @property
    def checkpoint(self) -> Path:
        for name in ("checkpoints/model.ckpt", "hparams.yaml"):
            if not (self.folder / name).is_file():
                raise InputError(f"no {name}", where=str(self.folder), remedy="download the whole model folder")
        return self.folder / "checkpoints" / "model.ckpt"

    def check(self) -> None:
        super().check()
        _ = self.checkpoint

    def source_statistics(
        self, sources: Sequence[str], hypotheses: Sequence[str], references: References
    ) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        if len(sources) != len(pairs):
            raise InputError(f"{len(pairs)} hypotheses but {len(sources)} sources")
        if not pairs:
            return _rows([])
        self.check()
        model = _load_comet(self.checkpoint)
        lines = [line if model.requires_references() else [""] for _, line in pairs]
        rows = [row for row, line in enumerate(lines) for _ in line]
        samples = [
            {"src": source, "mt": text, **({"ref": one} if model.requires_references() else {})}
            for source, (text, _), line in zip(sources, pairs, lines, strict=True)
            for one in line
        ]
        found = model.predict(samples, batch_size=self.batch_size, gpus=self.gpus, progress_bar=False).scores
        best = np.full(len(pairs), -np.inf)
        np.maximum.at(best, rows, np.asarray(found, dtype=float))
        return _rows(best.tolist())
