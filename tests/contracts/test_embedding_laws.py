"""Embedding models, for every encoder and embedding head: padding, shared encoders, refusals, learning."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from contract_fixtures import SIZE, SMALL, example_batch
from torch.testing import assert_close

from transduce.decoding.search import search
from transduce.decoding.strategies import Greedy
from transduce.encoders import ENCODERS
from transduce.errors import InputError
from transduce.flow import BOS, Batch, Padded
from transduce.heads import HEADS, Pooling
from transduce.objectives import Contrastive
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
OPTIONS = [{"pooling": pooling} for pooling in get_args(Pooling)] + [{"projection": 5}, {"normalise": False}]
CASES = [
    (encoder, {"kind": head, **options})
    for encoder in ENCODERS
    for head, part in HEADS.items()
    if part.is_embedding
    for options in (OPTIONS if head == "embedder" else ({},))
]


def recipe(encoder: dict, head: dict | None, **changes: object) -> dict:
    return {
        "tokens": {"shared": True},
        "model": {"encoder": encoder, "head": head},
        "training": {"objective": {"kind": "contrastive"}},
        **changes,
    }


@pytest.fixture(params=CASES, ids=str)
def model(request):
    torch.manual_seed(1)
    encoder, head = request.param
    return build_model(complete_recipe(parse(recipe(SMALL[encoder], head))).model, SIZE, SIZE).eval()


@pytest.fixture
def batch() -> Batch:
    return example_batch([(5, 3), (2, 6), (7, 1), (3, 4)])


def test_embeddings_do_not_depend_on_padding_or_batch(model, batch):
    together = model.embed(batch.source)
    assert together.shape[0] == 4
    assert together.dim() == 2
    longer = Padded(
        torch.cat((batch.source.values, torch.full((4, 2), 6)), 1),
        torch.cat((batch.source.mask, torch.zeros(4, 2, dtype=torch.bool)), 1),
    )
    assert_close(model.embed(longer), together, **CLOSE)
    for row in range(4):
        assert_close(model.embed(batch.source.select(torch.tensor([row])))[0], together[row], **CLOSE)


def test_a_text_has_the_same_embedding_as_source_and_target(model, batch):
    starts = torch.full((4, 1), BOS)
    target = Padded(
        torch.cat((starts, batch.source.values), 1),
        torch.cat((torch.ones(4, 1, dtype=torch.bool), batch.source.mask), 1),
    )
    found = model(Batch(batch.source, target))
    assert_close(found.target, found.source, **CLOSE)
    assert_close(found.source, model.embed(batch.source), **CLOSE)


def test_normalised_embeddings_have_unit_length(model, batch):
    lengths = model.embed(batch.source).norm(dim=-1)
    assert torch.allclose(lengths, torch.ones(4)) == model.head.normalise


def test_every_parameter_gets_a_gradient(model, batch):
    Contrastive()(model.train(), batch).total.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_generation_raises_an_input_error(model, batch):
    with pytest.raises(InputError, match="transduce embed"):
        search(model, Batch(batch.source), Greedy(), max_lengths=torch.full((4,), 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": {"shared": False}}, "one vocabulary"),
        ({"training": {}}, "cross_entropy reads token logits"),
        ({"model": {"encoder": SMALL["recurrent"], "decoder": SMALL["recurrent"]}}, "contrastive compares vectors"),
    ],
)
def test_incompatible_recipes_raise_input_errors(changes, message):
    with pytest.raises(InputError, match=message):
        complete_recipe(parse(recipe(SMALL["recurrent"], {"kind": "embedder"}, **changes)))


def test_every_model_with_an_encoder_can_embed(batch):
    pair = {"model": {"encoder": SMALL["transformer"], "decoder": SMALL["recurrent"]}}
    model = build_model(complete_recipe(parse(pair)).model, SIZE, SIZE).eval()
    memory = model.encoder(batch)
    mean = torch.stack([values[mask].mean(0) for values, mask in zip(memory.values, memory.mask, strict=True)])
    assert_close(model.embed(batch.source), mean, **CLOSE)
    alone = {"tokens": {"shared": True}, "model": {"decoder": SMALL["recurrent"]}}
    with pytest.raises(InputError, match="no encoder"):
        build_model(complete_recipe(parse(alone)).model, SIZE, SIZE).embed(batch.source)
