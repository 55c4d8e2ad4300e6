"""Laws of simultaneous decoding, for every decoder: no look-ahead, training is streaming, all tokens read is greedy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from contract_fixtures import SIZE, example_batch, shared
from test_search_laws import longest

from transduce.decoders import DECODERS
from transduce.decoding.search import search
from transduce.decoding.simultaneous import source_prefix, stream_alignatt, stream_wait_k, wait_k_logits, wait_k_search
from transduce.decoding.strategies import Greedy
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.objectives import OBJECTIVES, CrossEntropy, WaitK

WALKED = ["transformer>transformer", "alone>transformer", *(f"recurrent>{decoder}" for decoder in DECODERS)]


def batch_of() -> Batch:
    return example_batch([(6, 5), (2, 6), (7, 3), (1, 3)])


@cache
def found_in(case: str, k: int):
    batch = batch_of()
    return wait_k_search(shared(case), batch, k, longest(batch))


@pytest.mark.parametrize("case", WALKED)
def test_with_the_whole_source_it_is_greedy_search(case):
    batch = batch_of()
    greedy = search(shared(case), batch, Greedy(), max_lengths=longest(batch))
    found, delays = found_in(case, batch.source.values.size(1))
    assert [one.ids for one in found] == [line[0].ids for line in greedy]
    assert all(set(row) == {length} for row, length in zip(delays, batch.source.mask.sum(1).tolist(), strict=True))


@pytest.mark.parametrize("case", WALKED)
@torch.no_grad()
def test_no_label_depends_on_source_tokens_after_its_prefix(case):
    model, batch, k = shared(case), batch_of(), 2
    before = wait_k_logits(model, batch, k)
    assert before.shape[:2] == batch.labels.values.shape
    moved = 0
    for first in range(k, batch.source.values.size(1)):
        values = batch.source.values.clone()
        values[:, first:] = torch.where(
            values[:, first:] > EOS, (values[:, first:] - 4 + 1) % (SIZE - 4) + 4, values[:, first:]
        )
        after = wait_k_logits(model, replace(batch, source=Padded(values, batch.source.mask)), k)
        unread = first - k + 1  # labels t with k + t - 1 <= first, from 1
        torch.testing.assert_close(after[:, :unread], before[:, :unread], rtol=0, atol=1e-5)
        moved += bool(((after - before)[:2, unread:].abs() > 1e-5).any())
    assert moved  # it does depend on what it reads


@pytest.mark.parametrize("case", WALKED)
def test_training_is_streaming(case):
    """Tokens that arrive one by one, the batch of whole sources, and the logits of training agree."""
    model, batch, k = shared(case), batch_of(), 3
    found, delays = found_in(case, k)
    target = Padded.from_rows([[BOS, *one.ids] for one in found])
    with torch.no_grad():
        log_probs = wait_k_logits(model, replace(batch, target=target), k).log_softmax(-1)
    for row, one in enumerate(found):
        own = log_probs[row].gather(-1, target.values[row, 1:, None]).squeeze(-1)[: len(one.ids)]
        assert one.token_scores == pytest.approx(own.tolist(), abs=2e-4)
        alone = batch.select(torch.tensor([row]))
        size = alone.source.values.size(1)
        arriving = [(source_prefix(alone, length), length == size) for length in range(1, size + 1)]
        steps = list(stream_wait_k(model, arriving, k, longest(batch)[row].item()))
        assert [step.token for step in steps] == list(one.ids)
        assert [step.delay for step in steps] == delays[row] == [min(k + t, size) for t in range(len(steps))]
        assert [step.log_prob for step in steps] == pytest.approx(one.token_scores, abs=2e-4)


def test_tokens_are_written_as_soon_as_their_prefix_has_arrived():
    model, batch = shared("transformer>transformer"), example_batch([(6, 5)])
    size, arrived, written = batch.source.values.size(1), [], []

    def prefixes():
        for length in range(1, size + 1):
            arrived.append(length)
            yield source_prefix(batch, length), length == size

    for step in stream_wait_k(model, prefixes(), 2, 12):
        written.append((arrived[-1], step.token))
    partial = [at for at, _ in written if at < size]
    assert partial == list(range(2, size))
    assert EOS not in [token for at, token in written if at < size]  # no output ends before its source


MONOTONIC = "recurrent>recurrent,context=luong-coverage-{'kind': 'monotonic', 'offset': 0.1}"
ALIGNED = ["transformer>transformer", "recurrent>convolutional", MONOTONIC]


def aligned(case: str, batch: Batch, guard: int) -> list:
    size = batch.source.values.size(1)
    arriving = [(source_prefix(batch, length), length == size) for length in range(1, size + 1)]
    return list(stream_alignatt(shared(case), arriving, guard, 9))


@pytest.mark.parametrize("case", ALIGNED)
def test_alignatt_reads_until_the_alignment_is_behind(case):
    """Each token is the greedy one of its prefix, attends to none of the last tokens, and waits no longer than that."""
    model, batch, guard = shared(case), example_batch([(6, 5)]), 1
    size, steps, before = batch.source.values.size(1), aligned(case, batch, guard), 1
    ids = [BOS]
    for step in steps:
        for length in range(before, step.delay + 1):
            with torch.no_grad():
                state = model.start(source_prefix(batch, length))
                found = model.advance(torch.tensor([ids]), state, with_attention=True)
            peak = int(found.attention.cross[0, :, :, -1].mean((0, 1)).argmax())
            best = int(found.logits[0, -1].argmax())
            ready = length == size or (peak < length - guard and best != EOS)
            assert ready == (length == step.delay)
        ids, before = [*ids, step.token], step.delay
    assert [step.delay for step in steps] == sorted(step.delay for step in steps)


@pytest.mark.parametrize("case", ALIGNED)
def test_alignatt_with_a_wide_guard_is_greedy_search(case):
    batch = example_batch([(6, 5)])
    greedy = search(shared(case), batch, Greedy(), max_lengths=longest(batch, 9))[0][0]
    assert [step.token for step in aligned(case, batch, 100)] == list(greedy.ids)


@pytest.mark.parametrize("case", ["transformer>transformer", "recurrent>recurrent"])
def test_the_loss_is_cross_entropy_with_a_large_k_and_has_gradients_with_a_small_one(case):
    model, batch = shared(case), batch_of()
    assert OBJECTIVES["wait_k"] is WaitK
    plain, whole = (objective(model, batch) for objective in (CrossEntropy(), WaitK(k=8)))
    torch.testing.assert_close(whole.total, plain.total)
    some = WaitK(k=1, label_smoothing=0.0)(model, batch)
    with torch.no_grad():
        nll = -wait_k_logits(model, batch, 1).log_softmax(-1).gather(-1, batch.labels.values[..., None]).squeeze(-1)
    torch.testing.assert_close(some.total, (nll * batch.labels.mask).sum())
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert any(
        one is not None and one.abs().sum() > 0 for one in torch.autograd.grad(some.total, weights, allow_unused=True)
    )


def test_models_that_cannot_stream_are_refused():
    model, batch = shared("transformer>transformer"), batch_of()
    with pytest.raises(InputError, match="k = 0"):
        wait_k_search(model, batch, 0, longest(batch))
    with pytest.raises(InputError, match="no such source"):
        wait_k_logits(model, replace(batch, source=None), 1)
    with pytest.raises(InputError, match="wait_k trains a decoder"):
        WaitK().check(torch.nn.Linear(1, 1))
