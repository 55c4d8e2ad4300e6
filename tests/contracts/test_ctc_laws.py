"""CTC models: the laws of every model, scores equal to the CTC probability, exact best-path search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product

import pytest
import torch
import torch.nn.functional as F
from contract_fixtures import SIZE, SMALL, example_batch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch.testing import assert_close

from transduce.decoders.ctc import advance_paths, begin_paths, read_paths
from transduce.decoding.search import score, search
from transduce.decoding.strategies import Beam, BestPath, Greedy
from transduce.encoders import ENCODERS
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Padded, State
from transduce.objectives import CTC, CrossEntropy, JointCTC
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def recipe(encoder: str = "recurrent", **training: object) -> dict:
    objective = training or {"kind": "ctc"}
    return {"model": {"encoder": SMALL[encoder], "head": {"kind": "ctc"}}, "training": {"objective": objective}}


def make(encoder: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return build_model(complete_recipe(parse(recipe(encoder))).model, SIZE, SIZE).eval()


@pytest.fixture(params=list(ENCODERS))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make(request.param)


@pytest.fixture
def batch() -> Batch:
    return example_batch([(8, 3), (6, 1), (9, 4), (7, 2)])


def test_whole_sequence_equals_stepwise_and_padding_does_not_change_the_state(model, batch):
    tokens = batch.decoder_inputs.values
    whole, state, logits = model(batch), model.start(batch), []
    for step in range(tokens.size(1)):
        one = model.advance(tokens[:, step : step + 1], state)
        state = one.state
        logits.append(one.logits)
    assert_close(torch.cat(logits, 1), whole.logits, **CLOSE)
    padded = model.advance(tokens, model.start(batch), batch.decoder_inputs.mask).state
    after = model.advance(torch.full((4, 1), 5), padded).logits
    for row in range(4):
        alone = batch.select(torch.tensor([row]))
        own = model.advance(alone.decoder_inputs.values, model.start(alone)).state
        assert_close(model.advance(torch.full((1, 1), 5), own).logits[0], after[row], **CLOSE)


def test_logits_do_not_depend_on_padding_batch_or_later_tokens(model, batch):
    together = model(batch).logits
    longer = Padded(F.pad(batch.source.values, (0, 3), value=6), F.pad(batch.source.mask, (0, 3)))
    assert_close(model(Batch(longer, batch.target)).logits, together, **CLOSE)
    for row in range(4):
        alone = batch.select(torch.tensor([row]))
        real = int(alone.labels.mask.sum())
        assert_close(model(alone).logits[0, :real], together[row, :real], **CLOSE)
    changed = batch.decoder_inputs.values.clone()
    changed[:, 3] = 7
    assert_close(model.advance(changed, model.start(batch)).logits[:, :3], together[:, :3], **CLOSE)


def test_score_is_the_ctc_probability_and_search_returns_it(model, batch):
    state = model(Batch(batch.source)).state
    lengths = batch.target.mask.sum(1) - 2
    paths, rows = state.fixed["paths"], state.fixed["rows"]
    wanted = -F.ctc_loss(paths.transpose(0, 1), batch.labels.values, rows, lengths, blank=PAD, reduction="none")
    assert_close(torch.tensor([sum(row) for row in score(model, batch)]), wanted.detach(), **CLOSE)
    for strategy in (Greedy(), Beam(width=3, length_penalty=0.0)):
        found = search(model, Batch(batch.source), strategy, max_lengths=torch.full((4,), 20))
        targets = Padded.from_rows([[BOS, *row[0].ids] for row in found])
        for row, scores in zip(found, score(model, Batch(batch.source, targets)), strict=True):
            assert row[0].token_scores == pytest.approx(scores, abs=1e-3)


def test_best_path_is_the_text_of_the_most_probable_tokens_with_its_ctc_probability(model, batch):
    paths, rows = (model.start(Batch(batch.source)).fixed[name] for name in ("paths", "rows"))
    found = search(model, Batch(batch.source), BestPath(), max_lengths=torch.full((4,), 20))
    for row, (one,) in enumerate(found):
        assert one.text_ids == spelt(paths[row, : int(rows[row])].argmax(-1).tolist())
    targets = Padded.from_rows([[BOS, *one.ids] for (one,) in found])
    for (one,), scores in zip(found, score(model, Batch(batch.source, targets)), strict=True):
        assert one.token_scores == pytest.approx(scores, abs=1e-3)
        assert one.rank == pytest.approx(one.score)
    longest = max(len(one.ids) for (one,) in found)
    (cut, *_), *_ = search(model, Batch(batch.source), BestPath(), max_lengths=torch.full((4,), 1))
    assert len(cut.ids) == 1
    assert cut.complete == (found[0][0].ids == (EOS,))
    assert longest > 1


def test_cross_entropy_and_ctc_have_equal_loss_and_gradient(model, batch):
    gradients, totals = [], []
    for objective in (CrossEntropy(label_smoothing=0.0), CTC()):
        model.zero_grad()
        loss = objective(model, batch)
        loss.total.backward()
        totals.append(loss.total.detach())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    assert_close(*totals, **CLOSE)
    assert set(gradients[0]) == set(gradients[1]) == {name for name, _ in model.named_parameters()}
    for name, one in gradients[0].items():
        assert_close(one, gradients[1][name], rtol=1e-3, atol=1e-4)


def spelt(path: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token, _ in groupby(path) if token != PAD)


@trials(deadline=None, max_examples=15)
@given(st.integers(1, 4), st.integers(0, 2), st.integers(0, 999))
def test_exhaustive_beam_finds_the_most_probable_text(rows: int, more: int, seed: int) -> None:
    """Brute force: every path, its probability added to the text it spells."""
    torch.manual_seed(seed)
    logits = 2 * torch.randn(1, rows, 6)
    fixed = read_paths(F.pad(logits, (0, 0, 0, more)), torch.arange(rows + more)[None] < rows)
    chances: dict[tuple[int, ...], float] = {}
    for path in product((0, 3, 4, 5), repeat=rows):
        chance = float(torch.stack([fixed["paths"][0, t, token] for t, token in enumerate(path)]).sum().exp())
        chances[spelt(path)] = chances.get(spelt(path), 0.0) + chance
    assert sum(chances.values()) == pytest.approx(1, abs=1e-4)
    for text, chance in chances.items():
        _, scores = advance_paths(fixed, begin_paths(fixed), torch.tensor([[BOS, *text]]))
        gold = torch.tensor([*text, EOS])
        logs = scores[0].log_softmax(-1).gather(-1, gold[:, None])
        assert float(logs.sum().exp()) == pytest.approx(chance, rel=1e-3, abs=1e-7)
    found = search(
        Fixed(fixed), example_batch([(3, 1)]), Beam(width=90, length_penalty=0.0), max_lengths=torch.tensor([9])
    )
    best = max(chances, key=lambda text: chances[text])
    assert found[0][0].text_ids == best
    assert found[0][0].score == pytest.approx(torch.tensor(chances[best]).log().item(), abs=1e-3)


class Fixed(torch.nn.Module):
    """A model whose rows say the same, whatever it reads."""

    top_k = None

    def __init__(self, fixed: dict) -> None:
        super().__init__()
        self.fixed, self.shape = fixed, make("identity")
        self.advance, self.reserve = self.shape.advance, self.shape.reserve

    def start(self, batch: Batch) -> State:
        return State(self.fixed, begin_paths(self.fixed))


def test_text_longer_than_the_rows_ends():
    fixed = read_paths(torch.randn(1, 2, 6), torch.ones(1, 2, dtype=torch.bool))
    _, scores = advance_paths(fixed, begin_paths(fixed), torch.tensor([[BOS, 4, 4, 5]]))
    assert scores[0, -1].argmax() == EOS
    assert scores.isfinite().all()


def test_joint_loss_is_its_formula_and_trains_encoder_and_decoder(batch):
    torch.manual_seed(1)
    given = {"encoder": SMALL["recurrent"], "decoder": SMALL["recurrent"], "ctc": {"weight": 0.4}}
    completed = complete_recipe(parse({"model": given, "training": {"objective": {"kind": "joint_ctc"}}}))
    model = build_model(completed.model, SIZE, SIZE)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    step = model(batch)
    fixed = step.state.fixed
    lengths = batch.target.mask.sum(1) - 2
    paths = F.ctc_loss(fixed["paths"].transpose(0, 1), batch.labels.values, fixed["rows"], lengths, reduction="sum")
    mask = batch.labels.mask
    decoder_loss = F.cross_entropy(step.logits[mask], batch.labels.values[mask], reduction="sum")
    for weight in (0.0, 0.3, 1.0):
        loss = JointCTC(weight=weight, label_smoothing=0.0)(model, batch)
        assert_close(loss.total, (1 - weight) * decoder_loss + weight * paths, **CLOSE)
    JointCTC()(model, batch).total.backward()
    assert not [name for name, one in model.named_parameters() if one.grad is None]
    # Once trained, it says what decoder and rows agree on.
    model.eval()
    alone = model.decoder.decoder.advance(
        batch.decoder_inputs.values, model.decoder.decoder.start(model.encoder(batch))
    )
    spelling = advance_paths(fixed, begin_paths(fixed), batch.decoder_inputs.values)[1]
    mixed = 0.6 * alone.logits.log_softmax(-1) + 0.4 * spelling
    assert_close(model(batch).logits[mask].log_softmax(-1), mixed[mask].log_softmax(-1), **CLOSE)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": {"decoder": SMALL["recurrent"]}, "training": {"objective": {"kind": "ctc"}}}, "CTC head"),
        (
            {"model": {"decoder": SMALL["recurrent"]}, "training": {"objective": {"kind": "joint_ctc"}}},
            "CTC projection",
        ),
        ({"model": {"decoder": SMALL["recurrent"], "ctc": {}}}, "does not train the CTC layer"),
        ({"model": {"head": {"kind": "ctc"}, "ctc": {}}}, "ctc needs an encoder and a decoder"),
    ],
)
def test_incompatible_recipes_raise_input_errors(change, problem):
    given = {**change, "model": {"encoder": SMALL["recurrent"], **change["model"]}}
    with pytest.raises(InputError, match=problem):
        complete_recipe(parse(given))
