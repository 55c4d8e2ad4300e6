"""Laws of encoder-only models: whole = stepwise, independence of padding, scores that add up, learning."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from contract_fixtures import SIZE, SMALL, example_batch
from torch.testing import assert_close

from transduce.decoding.search import score, search
from transduce.decoding.strategies import Beam, Greedy
from transduce.encoders import ENCODERS
from transduce.errors import InputError
from transduce.flow import BOS, EOS, SPECIALS, Batch, Padded
from transduce.heads import HEADS, Pooling
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
STARTS = [number % 2 == 0 for number in range(SIZE)]  # for taggers: even ids begin a word
CASES = [
    (encoder, {"kind": head, **({"pooling": pooling} if head == "classifier" else {})})
    for encoder in ENCODERS
    for head, part in HEADS.items()
    if not part.is_embedding
    and part.label_unit != "path"
    and (ENCODERS[encoder].separate_directions or not part.needs_separate_directions)
    and (ENCODERS[encoder].independent_rows or not part.needs_independent_rows)
    for pooling in (get_args(Pooling) if head == "classifier" else ("",))
]


def recipe(encoder: str, head: dict) -> dict:
    part = HEADS[head["kind"]]
    target = "labels" if part.label_unit == "line" else "words"
    return {
        "data": {"format": "text", "noise": {"kind": part.input_noise}} if part.label_unit == "token" else {},
        "tokens": {"source": {"kind": "words"}, "target": {"kind": target}},
        "model": {"encoder": SMALL[encoder], "head": head},
    }


@pytest.fixture(params=CASES, ids=str)
def model(request):
    torch.manual_seed(1)
    completed = complete_recipe(parse(recipe(*request.param)))
    return build_model(completed.model, SIZE, 9, STARTS).eval()


@pytest.fixture
def batch(model) -> Batch:
    """Labels as the model speaks them: as many as there are words, or one."""
    sources = example_batch([(5, 1), (2, 1), (7, 1), (3, 1)]).source
    real = sources.mask & (sources.values != EOS)
    counted = {"line": real & (real.cumsum(1) == 1), "word": real & torch.tensor(STARTS)[sources.values], "token": real}
    counts = counted[model.head.label_unit].sum(1).tolist()
    targets = [[BOS, *[4 + (row + place) % 5 for place in range(count)], EOS] for row, count in enumerate(counts)]
    return Batch(sources, Padded.from_rows(targets))


def test_whole_sequence_equals_stepwise(model, batch):
    tokens = batch.decoder_inputs.values
    whole = model(batch).logits
    state, logits = model.start(batch), []
    for step in range(tokens.size(1)):
        one = model.advance(tokens[:, step : step + 1], state)
        state = one.state
        logits.append(one.logits)
    assert_close(torch.cat(logits, 1), whole, **CLOSE)


def test_label_smoothing_is_uniform_over_the_labels(model, batch):
    """The gradient of the logits of the head is that of torch's smoothed loss over the labels alone."""
    found = []
    handle = model.head.register_forward_hook(lambda module, inputs, output: found.append(output))
    loss = CrossEntropy(label_smoothing=0.2)(model, batch).total
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, found)
    assert_close(gradient.sum(-1), torch.zeros(gradient.shape[:-1]), atol=1e-4, rtol=0)
    if model.head.label_unit != "line":
        return
    logits = found[0].detach().requires_grad_()
    labels = batch.target.values[:, 1] - len(SPECIALS)
    wanted = torch.nn.functional.cross_entropy(logits[:, len(SPECIALS) :], labels, label_smoothing=0.2, reduction="sum")
    assert_close(gradient, torch.autograd.grad(wanted, logits)[0], **CLOSE)


def test_logits_do_not_depend_on_padding_or_batch(model, batch):
    together = model(batch).logits
    longer = Padded(
        torch.cat((batch.source.values, torch.full((4, 2), 6)), 1),
        torch.cat((batch.source.mask, torch.zeros(4, 2, dtype=torch.bool)), 1),
    )
    padded = model(Batch(longer, batch.target)).logits
    for row in range(4):
        alone = batch.select(torch.tensor([row]))
        real = int(alone.labels.mask.sum())
        assert_close(model(alone).logits[0, :real], together[row, :real], **CLOSE)
        assert_close(padded[row, :real], together[row, :real], **CLOSE)


def test_number_of_labels_matches_the_source(model, batch):
    wanted = (batch.target.mask.sum(1) - 2).tolist()
    for strategy in (Greedy(), Beam(width=3)):
        found = search(model, Batch(batch.source), strategy, max_lengths=torch.full((4,), 20))
        for hypotheses, count in zip(found, wanted, strict=True):
            for one in hypotheses:
                assert len(one.text_ids) == count
                assert min(one.text_ids, default=len(SPECIALS)) >= len(SPECIALS)
        targets = Padded.from_rows([[BOS, *row[0].ids] for row in found])
        for row, scores in zip(found, score(model, Batch(batch.source, targets)), strict=True):
            assert row[0].token_scores == pytest.approx(scores, abs=1e-4)


def test_every_parameter_gets_a_gradient(model, batch):
    gold = batch.labels
    logits = model.train()(batch).logits
    torch.nn.functional.cross_entropy(logits[gold.mask], gold.values[gold.mask]).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_labels_must_match_the_label_unit_of_the_head():
    for head, source, target in (
        ({"kind": "classifier"}, "words", "words"),
        ({"kind": "tagger"}, "words", "labels"),
        ({"kind": "tagger"}, "chars", "words"),
    ):
        tokens = {"source": {"kind": source}, "target": {"kind": target}}
        with pytest.raises(InputError, match="one label"):
            complete_recipe(parse({"tokens": tokens, "model": {"encoder": SMALL["recurrent"], "head": head}}))
