"""Edit transducer against a sum over every edit script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract_fixtures import SIZE, WIDTH, example_batch
from torch import Tensor
from torch.testing import assert_close

from transduce.decoders.latent_alignment import (
    COPY,
    DELETE,
    END,
    INSERT,
    SUBSTITUTE,
    EditTransducerDecoder,
    initial_cells,
)
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

PART = {"kind": "recurrent", "width": WIDTH}
TWO = {"kind": "multi_source", "width": WIDTH, "parts": {"lemma": PART, "features": {**PART, "kind": "identity"}}}
OPTIONS = (
    {},
    {"copy_action": False},
    {"substitute_action": False},
    {"score": "mlp", "cell": "gru"},
    {"condition_input": True},
)


def model_with(encoder: dict[str, Any] = PART, **options: Any) -> torch.nn.Module:
    torch.manual_seed(5)
    decoder = {"kind": "edit_transducer", "width": WIDTH, **options}
    sources = {"lemma": "text", "features": "tags"} if encoder is TWO else {}
    content = {"data": {"sources": sources}, "tokens": {"shared": True}, "model": {"encoder": encoder}}
    content["model"]["decoder"] = decoder
    return build_model(complete_recipe(parse(content)).model, SIZE, SIZE).eval()


def scripts(source: list[int], target: list[int], row: int = 0) -> Iterator[list[tuple[int, int]]]:
    """Every script of (action, row) that writes the target, from this row of `x1 .. xm </s>` on."""
    last = row == len(source) - 1
    if last and not target:
        yield [(END, row)]
    for action in (COPY, SUBSTITUTE, INSERT, DELETE):
        writes, moves = action != DELETE, action != INSERT
        if (writes and not target) or (moves and last) or (action == COPY and source[row] != target[0]):
            continue
        for rest in scripts(source, target[writes:], row + moves):
            yield [(action, row), *rest]


def action_probabilities(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """T S 5 and T S V, from the weights alone."""
    decoder: EditTransducerDecoder = model.decoder
    memory = model.encoder(batch)
    edited = batch.source.values.size(1)
    attended = slice(edited if batch.extra else 0, None)
    inputs = decoder.embedding(batch.target.values[:, :-1])
    if decoder.condition_input:
        mean = memory.values[:, attended].mean(1, keepdim=True)
        inputs = torch.cat((inputs, mean.expand(-1, inputs.size(1), -1)), -1)
    hidden, _ = decoder.rnn(inputs, initial_cells(decoder.bridge, decoder.rnn, memory.summary))
    weights = decoder.score(hidden, decoder.score.keys(memory.values))[:, :, attended].softmax(-1)
    context = decoder.context_proj(weights @ memory.values[:, attended])
    query = decoder.hidden_proj(hidden) + context
    readout = torch.tanh(query[0, :, None] + decoder.memory_proj(memory.values)[0, :edited])
    actions, characters = decoder.action_proj(readout), decoder.emission(readout)
    characters[..., EOS] = -torch.inf
    actions[:, :-1, END] = -torch.inf
    actions[:, -1, [COPY, SUBSTITUTE, DELETE]] = -torch.inf
    if not decoder.copy_action:
        actions[..., COPY] = -torch.inf
    if not decoder.substitute_action:
        actions[..., SUBSTITUTE] = -torch.inf
    return actions.softmax(-1), characters.softmax(-1)


def probability_of_scripts(model: torch.nn.Module, batch: Batch) -> Tensor:
    source, target = batch.source.values[0].tolist(), batch.target.values[0, 1:-1].tolist()
    actions, characters = action_probabilities(model, batch)
    total = torch.zeros(())
    for script in scripts(source, target):
        probability, written = torch.ones(()), 0
        for action, row in script:
            probability = probability * actions[written, row, action]
            if action in (SUBSTITUTE, INSERT):
                probability = probability * characters[written, row, target[written]]
            written += action in (COPY, SUBSTITUTE, INSERT)
        total = total + probability
    return total


def pair(source: list[int], target: list[int], tags: list[int] | None = None) -> Batch:
    extra = {} if tags is None else {"features": Padded.from_rows([[*tags, EOS]])}
    return Batch(Padded.from_rows([[*source, EOS]]), Padded.from_rows([[BOS, *target, EOS]]), extra=extra)


def likelihood(model: torch.nn.Module, batch: Batch) -> Tensor:
    logits = model(batch).logits[0].log_softmax(-1)
    return logits.gather(-1, batch.labels.values[0][:, None]).sum()


@pytest.mark.parametrize("target", [[], [5], [5, 6, 7], [6, 6]], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_likelihood_is_the_sum_over_all_scripts(options: dict[str, Any], target: list[int]) -> None:
    model, batch = model_with(**options), pair([5, 6, 7], target)
    assert_close(likelihood(model, batch).exp(), probability_of_scripts(model, batch), atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("condition_input", [False, True])
def test_features_are_attended_to_and_not_edited(condition_input: bool) -> None:
    model, batch = model_with(TWO, condition_input=condition_input), pair([5, 6], [5, 8], [9, 10])
    assert_close(likelihood(model, batch).exp(), probability_of_scripts(model, batch), atol=1e-7, rtol=1e-4)
    assert model.start(batch).fixed["projected"].size(1) == 3  # rows of features cost no actions
    weights = model(batch, with_attention=True).attention.cross
    assert (weights[..., 3:] == 0).all()
    assert_close(weights[..., :3].sum(-1), torch.ones(weights.shape[:-1]))


def test_gradient_is_that_of_the_sum_over_all_scripts() -> None:
    model, batch = model_with(), pair([5, 6, 7], [5, 7])
    wanted = torch.autograd.grad(probability_of_scripts(model, batch).log(), list(model.parameters()))
    found = torch.autograd.grad(likelihood(model, batch), list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=1e-6, rtol=1e-3)


def test_unlikely_deletions_have_a_finite_gradient() -> None:
    model, batch = model_with(), pair([5, 6, 7, 8] * 8, [8])
    with torch.no_grad():
        model.decoder.action_proj.bias[DELETE] = -30.0
    likelihood(model, batch).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_are_log_probabilities(options: dict[str, Any]) -> None:
    logits = model_with(**options)(example_batch([(3, 4), (5, 2)])).logits
    assert_close(logits.logsumexp(-1), torch.zeros(logits.shape[:2]), atol=1e-5, rtol=0)


def test_a_copying_model_writes_unseen_combinations() -> None:
    """With COPY certain, every source is its own target."""
    model = model_with()
    with torch.no_grad():
        model.decoder.action_proj.bias[COPY] = 100.0
        model.decoder.action_proj.bias[END] = 100.0
    assert likelihood(model, pair([9, 4, 4, 10], [9, 4, 4, 10])).item() == pytest.approx(0, abs=1e-4)


def test_a_character_whose_probability_underflows_has_a_finite_loss() -> None:
    model, batch = model_with(copy_action=False), pair([5, 6, 7], [6, 5])
    with torch.no_grad():
        model.decoder.emission.projection.bias[5] = -200.0
    loss = -likelihood(model, batch)
    loss.backward()
    assert 80 < loss.item() < 300  # that of a sum of logarithms is about 200
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


def test_copying_needs_one_vocabulary() -> None:
    content = {"model": {"encoder": PART, "decoder": {"kind": "edit_transducer", "width": WIDTH}}}
    with pytest.raises(InputError, match="need one vocabulary"):
        complete_recipe(parse(content))
    content["model"]["decoder"]["copy_action"] = False
    complete_recipe(parse(content))


def test_source_vocabulary_may_be_larger_than_that_of_the_target() -> None:
    torch.manual_seed(5)
    decoder = {"kind": "edit_transducer", "width": WIDTH, "copy_action": False}
    recipe = complete_recipe(parse({"model": {"encoder": PART, "decoder": decoder}}))
    model = build_model(recipe.model, SIZE + 9, SIZE).eval()
    batch = pair([SIZE + 8, 6, SIZE], [5, 6])
    assert_close(likelihood(model, batch).exp(), probability_of_scripts(model, batch), atol=1e-7, rtol=1e-4)
