"""Classes of the user for every extension point: named in a recipe as `file:Class`, trained, and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_fixtures import colour_pairs
from test_extending import RECIPES

import transduce
from transduce import contracts
from transduce.errors import InputError
from transduce.recipe import parse
from transduce.recipe.registry import REGISTRIES, user_classes

# Each class notes that it was used, in a file of the working directory.
CODE = """
from pathlib import Path

from transduce.attention.multihead import PredictedWindow
from transduce.attention.positions import Sinusoidal
from transduce.attention.scores import Softmax
from transduce.contracts import Augmentation, Noise, NoisedText, Tracker
from transduce.decoders.recurrent import Luong
from transduce.heads import Classifier


def used(name):
    Path(f"{name}.used").touch()


class MyNormaliser(Softmax):
    fusible = False

    def forward(self, scores, mask):
        used("normaliser")
        return super().forward(scores, mask)


class MyWindow(PredictedWindow):
    def forward(self, query, mask, past):
        used("window")
        return super().forward(query, mask, past)


class MyPosition(Sinusoidal):
    def add(self, values, positions):
        used("position")
        return super().add(values, positions)


class MyContext(Luong):
    def step_output(self, hidden, fed, state, with_attention):
        used("context")
        return super().step_output(hidden, fed, state, with_attention)


class MyHead(Classifier):
    def forward(self, values, mask):
        used("head")
        return super().forward(values, mask)


class MyNoise(Noise):
    def __init__(self, tokenizer, *, kept: int = 2) -> None:
        super().__init__(tokenizer)
        self.kept = kept

    def __call__(self, ids, rng):
        used("noise")
        return NoisedText(list(ids[: self.kept]))


class MyAugmentation(Augmentation):
    def __call__(self, examples, rng):
        used("augmentation")
        yield from examples[:3]


class MyTracker(Tracker):
    def __init__(self, folder, recipe) -> None:
        pass

    def track(self, group, step, scalars):
        used("tracker")
"""
RNN = {"kind": "recurrent", "width": 16}
NETWORK = {"encoder": RNN, "decoder": RNN}


def attending(**options: Any) -> dict[str, Any]:
    return {"encoder": RNN, "decoder": {**RNN, "context": {"kind": "luong", **options}}}


CASES: dict[type, tuple[str, dict[str, Any]]] = {
    contracts.Normaliser: ("normaliser", {"model": attending(normaliser="mine:MyNormaliser")}),
    contracts.Window: ("window", {"model": attending(window="mine:MyWindow")}),
    contracts.PositionEncoding: (
        "position",
        {"model": {"encoder": {"kind": "transformer", "width": 16, "position": "mine:MyPosition"}, "decoder": RNN}},
    ),
    contracts.ContextMechanism: ("context", {"model": attending(kind="mine:MyContext")}),
    contracts.Head: ("head", {"model": {"encoder": RNN, "head": {"kind": "mine:MyHead"}}}),
    contracts.Noise: (
        "noise",
        {"data": {"format": "text", "noise": {"kind": "mine:MyNoise", "kept": 1}}, "model": NETWORK},
    ),
    contracts.Augmentation: (
        "augmentation",
        {"data": {"augmentation": {"kind": "mine:MyAugmentation"}}, "model": NETWORK},
    ),
    contracts.Tracker: ("tracker", {"training": {"trackers": ["mine:MyTracker"]}, "model": NETWORK}),
}
# Those whose code is on the page docs/extending.md, trained in test_extending.py.
ON_THE_PAGE = {
    contracts.AttentionScore: "Cosine",
    contracts.Strategy: "Patient",
    contracts.LogitsProcessor: "Discourage",
    contracts.Metric: "FirstWord",
    contracts.Encoder: "DeepAveraging",
    contracts.Decoder: "Ngram",
    contracts.TokenMixer: "MovingAverage",
    contracts.Objective: "Focal",
    contracts.Modality: "TimeSeries",
    contracts.FrontEnd: "Projection",
}


@pytest.mark.parametrize("contract", CASES, ids=lambda contract: contract.__name__)
def test_a_class_of_the_user_is_trained_and_loaded(
    contract: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE, encoding="utf-8")
    name, recipe = CASES[contract]
    text = "noise" in recipe.get("data", {})
    pairs = [
        (source, target.split()[0]) if "head" in recipe["model"] else (source, target)
        for source, target in colour_pairs(40)
    ]
    Path("data.tsv").write_text("".join(f"{source}\n" if text else f"{source}\t{target}\n" for source, target in pairs))
    corpora = {"train": "data.tsv", "dev": "data.tsv", "cache": "cache"}
    target = "labels" if "head" in recipe["model"] else "words"
    training = {"steps": 2, "log_every": 1, "validate_every": 2, "checkpoint_every": 2, **recipe.get("training", {})}
    recipe = {
        **recipe,
        "data": {**corpora, **recipe.get("data", {})},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": target}, "shared": False},
        "training": training,
    }
    assert len(user_classes(parse(recipe))) == 1
    transduce.train(recipe, "run")
    assert Path(f"{name}.used").exists()
    with pytest.raises(InputError, match="trust_user_code"):
        transduce.load("run")
    assert len(transduce.load("run", trust_user_code=True).generate(["red green"])) == 1


def test_every_extension_point_is_tested_with_a_class_of_the_user() -> None:
    assert CASES.keys() | ON_THE_PAGE.keys() == REGISTRIES.keys()
    assert all(any(f":{name}" in str(recipe) for recipe in RECIPES) for name in ON_THE_PAGE.values())
