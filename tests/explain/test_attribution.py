"""Explanation of an encoder with a head: integrated gradients, and the self-attention of the encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_fixtures import Command

import transduce
from transduce.explain import html
from transduce.explain.attribution import front_ends, integrated_gradients, midpoints
from transduce.inference import Model

ENCODERS = {
    "transformer": {"kind": "transformer", "width": 16, "layers": 2, "heads": 2, "ff_width": 16},
    "recurrent": {"kind": "recurrent", "width": 8, "layers": 1},
}
TASKS = {"classifier": ["good", "bad"], "tagger": ["A B C", "B B"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier and a tagger, hardly trained."""
    folder, made = tmp_path_factory.mktemp("heads"), {}
    for head, encoder in (("classifier", "transformer"), ("tagger", "recurrent")):
        rows = [pair for number in range(20) for pair in ((f"a film {number}", 0), (f"dull {number}", 1))]
        path = folder / f"{head}.tsv"
        path.write_text("".join(f"{text}\t{TASKS[head][label]}\n" for text, label in rows))
        recipe: dict[str, Any] = {
            "data": {"train": str(path), "dev_size": 4, "cache": str(folder / "cache")},
            "tokens": {"source": {"kind": "words"}, "target": {"kind": "words" if head == "tagger" else "labels"}},
            "model": {"encoder": ENCODERS[encoder], "head": {"kind": head}},
            "training": {"steps": 2, "validate_every": 2, "checkpoint_every": 2, "batch_tokens": 256},
            "evaluation": {"metrics": ["exact"], "resamples": 2},
        }
        made[head] = transduce.train(recipe, folder / head).run.folder
    return made


def log_probabilities(model: Model, source: Any, ids: tuple[int, ...], scale: float) -> np.ndarray:
    """Independent of the hooks: the embedding table itself is scaled."""
    (front_end,) = front_ends(model.network)
    weight = front_end.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(scale)
        batch = model.source_encoding.batch([source])
        read = torch.tensor([[2, *ids[:-1]]])
        logits = model.network.advance(read, model.network.start(batch)).logits
        weight.copy_(kept)
    return logits[0].log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("head", TASKS)
def test_integrated_gradients_sum_to_the_change_of_the_log_probability(runs: dict[str, Path], head: str) -> None:
    model = transduce.load(runs[head])
    decoded = model.generate(["what a dull film"])[0].decoded
    assert decoded is not None
    ids, steps = decoded.hypothesis.ids, midpoints(200)
    found = integrated_gradients(model.network, model.source_encoding.batch([decoded.source] * len(steps)), ids, steps)
    assert found is not None
    change = [log_probabilities(model, decoded.source, ids, scale) for scale in (1.0, 0.0)]
    assert found.sum(1) == pytest.approx(change[0] - change[1], abs=2e-3)
    assert np.abs(found[:-1]).max() > 1e-3
    assert not any(one._forward_hooks for one in front_ends(model.network))


def test_a_classifier_is_explained_by_attribution_and_self_attention(runs: dict[str, Path]) -> None:
    explained = transduce.load(runs["classifier"]).explain("what a film", nbest=4, beam=4)
    assert explained.attention is None
    assert explained.self_attention is not None
    assert explained.self_attention.shape == (2, 2, 4, 4)
    shown = explained.map()
    assert shown.target_tokens == [explained.output, "what", "a", "film", "</s>"]
    assert shown.weights.sum(1) == pytest.approx(np.ones(5), abs=1e-5)
    assert shown.weights[1:] == pytest.approx(explained.self_attention.mean((0, 1)))
    assert {text for text, _ in explained.nbest} <= {"good", "bad"}
    assert '"attributed":1' in html.render_page([explained])


def test_a_recurrent_tagger_has_attributions_alone(runs: dict[str, Path]) -> None:
    explained = transduce.load(runs["tagger"]).explain("so dull")
    assert explained.self_attention is None
    assert len(explained.map().target_tokens) == 2


def test_explain_says_what_it_shows(runs: dict[str, Path], tmp_path: Path, command: Command) -> None:
    pictures = ("--html", tmp_path / "a.html", "--png", tmp_path / "a.png")
    called = command("explain", runs["classifier"], "what a film", *pictures)
    assert called.code == 0, called.err
    assert "attribution" in called.out
    assert "does not attend" not in called.out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<title>classifier: attention</title>" in (tmp_path / "a.html").read_text()
