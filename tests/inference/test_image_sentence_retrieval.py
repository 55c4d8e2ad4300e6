"""Image-sentence retrieval: two encoders, one embedding space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from contract_fixtures import SIZE, SMALL, example_batch
from torch.testing import assert_close
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.inference.retrieval import nearest_neighbours
from transduce.model import EmbeddingModel, PairEmbeddings
from transduce.objectives import Contrastive
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.experiment import train

RECIPES = Path(__file__).parents[2] / "recipes"


def two_towers(**changes: object) -> dict:
    head = {"kind": "embedder", "projection": 6}
    model = {"encoder": SMALL["transformer"], "target_encoder": {**SMALL["recurrent"], "width": 12}, "head": head}
    return {"model": {**model, **changes}, "training": {"objective": {"kind": "contrastive"}}}


def test_each_side_goes_through_its_own_encoder() -> None:
    torch.manual_seed(1)
    model = build_model(complete_recipe(parse(two_towers())).model, SIZE, SIZE + 3).eval()
    assert isinstance(model, EmbeddingModel)
    batch = example_batch([(5, 3), (2, 6), (7, 1)])
    assert batch.source is not None
    found = model(batch)
    assert found.source.shape == found.target.shape == (3, 6)
    assert_close(found.source, model.embed(batch.source))
    assert_close(found.target, model.embed_targets(batch.labels))
    assert not torch.allclose(model.embed(batch.labels), found.target)
    Contrastive()(model.train(), batch).total.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    alone = Padded(batch.labels.values[:1, :4], batch.labels.mask[:1, :4])
    assert_close(model.eval().embed_targets(alone), found.target[:1], rtol=1e-4, atol=1e-5)


def test_equal_images_are_not_negatives() -> None:
    one, other = torch.randn(2, 3, 5)
    images = torch.rand(3, 4, 2)
    images[1] = images[0]
    batch = Batch(
        Padded(images, torch.ones(3, 4, dtype=torch.bool)), Padded.from_rows([[1, 4, 2], [1, 5, 2], [1, 6, 2]])
    )
    loss = Contrastive(temperature=0.5)(lambda batch: PairEmbeddings(one, other), batch)
    logits = torch.nn.functional.cosine_similarity(one[:, None], other[None], dim=-1) / 0.5
    forth = -logits.log_softmax(-1).diagonal().sum()
    backward = logits.T.clone()
    backward[0, 1] = backward[1, 0] = -torch.inf
    assert_close(loss.total, (forth - backward.log_softmax(-1).diagonal().sum()) / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": {"kind": "embedder"}}, "width 8 and 12 cannot be compared|width 16 and 12 cannot be compared"),
        ({"head": None, "decoder": SMALL["recurrent"]}, "only embeddings"),
    ],
)
def test_target_encoders_that_cannot_be_used_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        complete_recipe(parse(two_towers(**changes)))


@pytest.mark.slow
def test_sentences_retrieve_images(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["data", "icons", "--count", "300", "--output", str(tmp_path / "icons")])
    assert made.exit_code == 0
    recipe = yaml.safe_load((RECIPES / "search" / "shapes.yaml").read_text())
    recipe["data"] |= {"train": str(tmp_path / "icons" / "pairs.tsv"), "dev_size": 40}
    recipe["training"] |= {"steps": 120, "validate_every": 120, "checkpoint_every": 120}
    scores = train(recipe, tmp_path / "run").scores["dev"].scores
    assert scores["recall@10"].value >= 70  # by chance about 25
    model = transduce.load(tmp_path / "run")
    lines = (tmp_path / "icons" / "pairs.tsv").read_text().splitlines()[:100]
    files = [str(tmp_path / "icons" / line.split("\t")[0]) for line in lines]
    captions = [line.split("\t")[1] for line in lines]
    ((best, *_),) = nearest_neighbours(model.embed_targets(captions[:1]), model.embed(files), 1)
    assert captions[best.row].split()[2] == captions[0].split()[2]  # the colour
    pictures = str(tmp_path / "icons" / "files")
    found = CliRunner().invoke(app, ["search", str(tmp_path / "run"), pictures, captions[0], "--top", "2", "--json"])
    assert ".png" in found.stdout
    assert np.isfinite(model.embed(files[:2])).all()
