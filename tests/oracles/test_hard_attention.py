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
OPTIONS = ({"order": 0}, {"monotonic": True}, {"monotonic": False, "max_jump": 1}, {"score": "mlp", "cell": "gru"})


def model_with(**options: Any) -> torch.nn.Module:
    torch.manual_seed(5)
    decoder = {"kind": "hard_attention", "width": WIDTH, **options}
    recipe = complete_recipe(parse({"model": {"encoder": ENCODER, "decoder": decoder}}))
    model = build_model(recipe.model, SIZE, SIZE).eval()
    if model.decoder.order:  # biases of jumps that differ
        torch.nn.init.normal_(model.decoder.jump_bias)
    return model


def log_probability_of_paths(model: torch.nn.Module, source: Any, target: list[int]) -> torch.Tensor:
    """log p(y | x) as the sum over all alignment paths a_1 ... a_T of the product of their probabilities."""
    decoder: HardAttentionDecoder = model.decoder
    memory = model.encoder(source)
    tokens = torch.tensor([target])
    hidden, _ = decoder.rnn(
        decoder.embedding(tokens[:, :-1]), initial_cells(decoder.bridge, decoder.rnn, memory.summary)
    )
    scores = decoder.score(hidden, decoder.score.keys(memory.values))[0]  # T S
    readout = torch.tanh(decoder.hidden_proj(hidden)[0][:, None] + decoder.memory_proj(memory.values)[0])
    emission = decoder.emission(readout).softmax(-1)  # T S V
    rows, steps = scores.size(1), scores.size(0)
    total = torch.zeros(())
    for path in product(range(rows), repeat=steps):
        probability, before = torch.ones(()), 0
        for step, row in enumerate(path):
            logits = scores[step].clone()
            if decoder.order:
                for other in range(rows):
                    jump = other - before
                    logits[other] += decoder.jump_bias[
                        max(-decoder.max_jump, min(decoder.max_jump, jump)) + decoder.max_jump
                    ]
                    if decoder.monotonic and jump < 0:
                        logits[other] = -torch.inf
            probability = probability * logits.softmax(-1)[row] * emission[step, row, target[step + 1]]
            before = row
        total = total + probability
    return total.log()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_likelihood_is_the_sum_over_all_alignments(options):
    model, batch = model_with(**options), example_batch([(3, 4)])
    target = batch.target.values[0].tolist()
    logits = model(batch).logits[0]
    found = logits.log_softmax(-1)[torch.arange(len(target) - 1), target[1:]].sum()
    assert_close(found, log_probability_of_paths(model, batch, target), atol=1e-5, rtol=1e-5)


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
