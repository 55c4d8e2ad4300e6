"""Imitation learning of edit transducers: the expert against every edit script, the roll-in, the loss, learning."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.objectives import Imitation
from transduce.objectives.sequence_level import COPIED, DELETED, ENDED, FIXED, EditProblem, Expert
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

A, B, SIZE = 4, 5, 7
WEIGHT = 3.0
Ids = tuple[int, ...]
State = tuple[Ids, int]  # output, row


def distance(one: Ids, other: Ids) -> int:
    """Levenshtein distance, by its recursive definition."""
    if not one or not other:
        return len(one) + len(other)
    same = one[-1] == other[-1]
    return min(
        distance(one[:-1], other) + 1, distance(one, other[:-1]) + 1, distance(one[:-1], other[:-1]) + (not same)
    )


def successors(state: State, source: Ids, copies: bool, substitutes: bool, most: int) -> dict[int, tuple[State, int]]:
    """Action -> the next state and the cost of the action."""
    output, row = state
    found: dict[int, tuple[State, int]] = {}
    if row < len(source):
        found[DELETED] = (output, row + 1), 1
        if copies and len(output) < most:
            found[COPIED] = ((*output, source[row]), row + 1), 0
    for token in (A, B) if len(output) < most else ():
        if row < len(source) and substitutes:
            found[FIXED + token] = ((*output, token), row + 1), 1
        found[FIXED + SIZE + token] = ((*output, token), row), 1
    return found


def best_costs(source: Ids, target: Ids, copies: bool, substitutes: bool, most: int) -> dict[State, float]:
    """The smallest cost from every state on, by relaxation over all states: nothing of the oracle's theory."""
    outputs = [ids for length in range(most + 1) for ids in itertools.product((A, B), repeat=length)]
    states = [(output, row) for row in reversed(range(len(source) + 1)) for output in sorted(outputs, key=len)[::-1]]
    costs: dict[State, float] = {}
    for state in states:
        ends = WEIGHT * distance(state[0], target) if state[1] == len(source) else float("inf")
        following = successors(state, source, copies, substitutes, most).values()
        costs[state] = min([ends, *(cost + costs[after] for after, cost in following)])
    return costs


@pytest.mark.parametrize(("copies", "substitutes"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("source", [(A, B), (B, A, A), ()], ids=str)
@pytest.mark.parametrize("target", [(A,), (B, B, A), ()], ids=str)
def test_optimal_actions_are_those_of_an_exhaustive_search(
    source: Ids, target: Ids, copies: bool, substitutes: bool
) -> None:
    most = 5
    costs = best_costs(source, target, copies, substitutes, most)
    rows = torch.tensor([[*source, EOS]])
    problem = EditProblem(
        rows,
        torch.tensor([len(source)]),
        torch.tensor([[*target]], dtype=torch.long).view(1, -1),
        torch.tensor([len(target)]),
        (rows > EOS) & copies,
        substitutes,
    )
    expert = Expert(problem, SIZE, WEIGHT)
    checked = 0
    for state, cost in costs.items():
        if len(state[0]) > 2:  # close to the longest output the search has not seen every continuation
            continue
        after = successors(state, source, copies, substitutes, most)
        wanted = {action for action, (following, paid) in after.items() if paid + costs[following] == cost}
        if state[1] == len(source) and WEIGHT * distance(state[0], target) == cost:
            wanted.add(ENDED)
        distances = expert.start()
        for token in state[0]:
            distances = expert.write(distances, torch.tensor([token]))
        found = expert.optimal(distances, torch.tensor([state[1]]))[0]
        assert set(found.nonzero()[:, 0].tolist()) == wanted, state
        checked += 1
    assert checked == 7 * (len(source) + 1)


def model_with(**options: Any) -> torch.nn.Module:
    torch.manual_seed(2)
    part = {"kind": "recurrent", "width": 8, "dropout": 0.0}
    decoder = {**part, "kind": "edit_transducer", **options}
    content = {"tokens": {"shared": True}, "model": {"encoder": part, "decoder": decoder}}
    content["training"] = {"objective": {"kind": "imitation"}}
    return build_model(complete_recipe(parse(content)).model, SIZE, SIZE)


def pairs(*rows: tuple[Ids, Ids]) -> Batch:
    source = Padded.from_rows([[*one, EOS] for one, _ in rows])
    target = Padded.from_rows([[BOS, *other, EOS] for _, other in rows])
    return Batch(source, target, rows=tuple(range(len(rows))))


def script_loss(model: Any, batch: Batch, visited: list[tuple[int, int, set[int]]]) -> Tensor:
    """-log of the probability of the optimal actions at states (tokens written, row), from the full distributions."""
    state = model.start(batch)
    edits, _ = model.decoder.edit_actions(model.decoder.read(batch.decoder_inputs.values, state)[0], state)
    total = torch.zeros(())
    for place, row, actions in visited:
        copied, substituted, inserted, deleted, ended = edits.actions[0, place, row].exp()
        characters = edits.characters[0, place, row]
        every = torch.cat((torch.stack((copied, deleted, ended)), substituted * characters, inserted * characters))
        total = total - every[sorted(actions)].sum().log()
    return total


def test_without_sampling_the_loss_is_that_of_the_optimal_script() -> None:
    model, batch = model_with(), pairs(((A, B), (A, B, B)))
    loss = Imitation(rate=0.0)(model, batch)
    # COPY, then COPY or INSERT B; the roll-in takes the one or the other.
    first, last = (0, 0, {COPIED}), (3, 2, {ENDED})
    choice = {COPIED, FIXED + SIZE + B}
    either = (
        script_loss(model, batch, [first, (1, 1, choice), (2, 2, {FIXED + SIZE + B}), last]),
        script_loss(model, batch, [first, (1, 1, choice), (2, 1, {COPIED}), last]),
    )
    assert min(abs(loss.total.item() - one.item()) for one in either) < 1e-5
    assert loss.parts["mistakes"] == 0


def test_rows_do_not_depend_on_the_batch_and_every_parameter_learns() -> None:
    model, rows = model_with(), [((A, B), (A, B, B)), ((B, A, A, B), ()), ((), (B,)), ((B,), (A, A, A, A))]
    whole = pairs(*rows)
    for rate in (0.0, 0.5, 1.0):
        losses = []
        for part in (whole, *(whole.select(torch.tensor([number])) for number in range(4))):
            torch.manual_seed(1)
            losses.append(Imitation(rate=rate)(model, part))
        assert_close(losses[0].total, sum(one.total for one in losses[1:]))
        assert_close(losses[0].parts["mistakes"], sum(one.parts["mistakes"] for one in losses[1:]))
        assert (losses[0].parts["mistakes"] > 0) == (rate > 0)
    losses[0].total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_trained_transducer_edits() -> None:
    model, objective = model_with(), Imitation()
    words = [tuple(word) for length in (1, 2) for word in itertools.product((A, B), repeat=length)]
    batch = pairs(*((word, (*word, B)) for word in words))
    optimiser = torch.optim.Adam(model.parameters(), 3e-2)
    for step in range(1, 41):
        torch.manual_seed(step)
        optimiser.zero_grad()
        objective.at_step(step, 40)(model, batch).total.backward()
        optimiser.step()
    scores = model(batch).logits.log_softmax(-1).gather(-1, batch.labels.values[..., None])[..., 0]
    likelihood = scores.where(batch.labels.mask, 0.0).sum(1).exp()
    assert likelihood.mean() > 0.4  # 0.0001 before training


def test_the_rate_grows_and_other_decoders_are_refused() -> None:
    rates = [Imitation(rate=0.8).at_step(step, 1000).rate for step in (1, 500, 1000)]
    assert rates[0] < 0.05
    assert rates[1] == pytest.approx(0.4, abs=0.01)
    assert 0.7 < rates[2] <= 0.8
    part = {"kind": "recurrent", "width": 8}
    with pytest.raises(InputError, match="edit_transducer"):
        complete_recipe(
            parse({"model": {"encoder": part, "decoder": part}, "training": {"objective": {"kind": "imitation"}}})
        )
