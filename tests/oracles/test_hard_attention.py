"""Exact hard attention against a sum over every alignment path."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from contract_fixtures import SIZE, WIDTH, example_batch
from torch.testing import assert_close

from transduce.decoders.latent_alignment import HardAttentionDecoder, initial_cells
from transduce.errors import InputError
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

ENCODER = {"kind": "recurrent", "width": WIDTH}
PRODUCT = {"order": 0, "emission": "product"}
OPTIONS = (
    {"order": 0},
    {"monotonic": True},
    {"monotonic": False, "max_jump": 1},
    {"score": "mlp", "cell": "gru"},
    PRODUCT,
    {**PRODUCT, "initial": "zero"},
)


def model_with(**options: Any) -> torch.nn.Module:
    torch.manual_seed(5)
    decoder = {"kind": "hard_attention", "width": WIDTH, **options}
    recipe = complete_recipe(parse({"model": {"encoder": ENCODER, "decoder": decoder}}))
    model = build_model(recipe.model, SIZE, SIZE).eval()
    if model.decoder.transitions.order:  # biases of jumps that differ
        torch.nn.init.normal_(model.decoder.jump_bias)
    return model


def paths(model: torch.nn.Module, source: Any, target: list[int]) -> dict[tuple[int, ...], torch.Tensor]:
    """p(y, a | x) of every alignment path a_1 ... a_T."""
    decoder: HardAttentionDecoder = model.decoder
    transitions = decoder.transitions
    memory = model.encoder(source)
    tokens = torch.tensor([target])
    cells = decoder.rnn.zeros(1, memory.values)
    if decoder.bridge is not None:
        cells = initial_cells(decoder.bridge, decoder.rnn, memory.summary)
    hidden, _ = decoder.rnn(decoder.embedding(tokens[:, :-1]), cells)
    scores = decoder.score(hidden, decoder.score.keys(memory.values))[0]  # T S
    before, row = decoder.hidden_proj(hidden)[0][:, None], decoder.memory_proj(memory.values)[0]
    if decoder.factorised:
        emission = (decoder.emission(before) + decoder.emission(row)).softmax(-1)  # T S V
    else:
        emission = decoder.emission(torch.tanh(before + row)).softmax(-1)
    rows, steps = scores.size(1), scores.size(0)
    found = {}
    for path in product(range(rows), repeat=steps):
        probability, before = torch.ones(()), 0
        for step, row in enumerate(path):
            logits = scores[step].clone()
            if transitions.order:
                for other in range(rows):
                    jump = other - before
                    most = transitions.max_jump
                    logits[other] += decoder.jump_bias[max(-most, min(most, jump)) + most]
                    if transitions.monotonic and jump < 0:
                        logits[other] = -torch.inf
            probability = probability * logits.softmax(-1)[row] * emission[step, row, target[step + 1]]
            before = row
        found[path] = probability
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_likelihood_is_the_sum_over_all_alignments(options):
    model, batch = model_with(**options), example_batch([(3, 4)])
    target = batch.target.values[0].tolist()
    logits = model(batch).logits[0]
    found = logits.log_softmax(-1)[torch.arange(len(target) - 1), target[1:]].sum()
    assert_close(found, sum(paths(model, batch, target).values()).log(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_posterior_is_the_share_of_the_paths_through_a_row(options):
    """Of all paths up to a token, the part whose last row is this one."""
    model, batch = model_with(**options), example_batch([(3, 4)])
    target = batch.target.values[0].tolist()
    found = model.decoder.posterior(torch.tensor([target[:-1]]), model.start(batch), torch.tensor([target[1:]]))[0]
    for step in range(1, len(target)):
        known = paths(model, batch, target[: step + 1])
        through = torch.zeros(found.size(1))
        for path, probability in known.items():
            through[path[-1]] += probability
        assert_close(found[step - 1], through / through.sum(), atol=1e-5, rtol=1e-4)


def test_posterior_shares_the_memory_between_beams():
    model, batch = model_with(**PRODUCT), example_batch([(3, 4), (5, 4)])
    read, written = batch.target.values[:, :-1], batch.target.values[:, 1:]
    once = model.decoder.posterior(read, model.start(batch), written)
    twice = model.decoder.posterior(
        read.repeat_interleave(2, 0), model.start(batch).repeat(2), written.repeat_interleave(2, 0)
    )
    assert_close(twice, once.repeat_interleave(2, 0))
    assert (once[0, :, 4:] == 0).all()  # padding, after </s>


def test_a_state_that_begins_with_zeros_knows_the_source_through_its_rows_alone():
    """Where all rows are equal, attention has nothing to choose from, and the state is the same for every source."""
    model, batch = model_with(**PRODUCT, initial="zero"), example_batch([(3, 4), (3, 4)])
    assert all(not tensor.any() for layer in model.start(batch).past["cells"] for tensor in layer)
    assert not hasattr(model_with(**PRODUCT, initial="zero").decoder.bridge, "weight")


def test_a_product_begins_as_a_language_model():
    """Before training, the rows of another source hardly change log p of a token; in a joint emission they do."""
    changes = []
    for options in (PRODUCT, {"order": 0}):
        model, batch = model_with(**options, initial="zero"), example_batch([(6, 4), (6, 4)])
        sources = batch.source.values
        assert not torch.equal(sources[0], sources[1])
        logits = model.decoder.advance(batch.target.values[:1].expand(2, -1), model.start(batch)).logits
        changes.append((logits[0] - logits[1]).abs().mean().item())
    assert changes[0] < 0.2 * changes[1]


def test_a_product_needs_order_0():
    with pytest.raises(InputError, match="order 0"):
        model_with(emission="product")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_are_log_probabilities(options):
    model = model_with(**options)
    logits = model(example_batch([(3, 4), (5, 2)])).logits
    assert_close(logits.logsumexp(-1), torch.zeros(logits.shape[:2]), atol=1e-5, rtol=0)


def test_monotonic_alignment_never_moves_back():
    """After an emission that only the last source row allows, the earlier rows have no weight."""
    model, batch = model_with(monotonic=True), example_batch([(4, 4)])
    decoder = model.decoder
    state = model.start(batch)
    prior = torch.full_like(state.past["prior"], -1e9)
    prior[:, 2] = 0.0  # all paths are at row 2
    state.past["prior"] = prior
    weights = decoder.advance(batch.target.values[:, :1], state, with_attention=True).attention.cross
    assert (weights[..., :2] == 0).all()
    assert weights[..., 2:].sum().item() == pytest.approx(1.0, abs=1e-6)


def test_a_stateful_score_is_refused():
    with pytest.raises(InputError, match="sums over all alignments"):
        model_with(score="coverage")
