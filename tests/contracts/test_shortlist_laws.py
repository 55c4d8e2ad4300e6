"""Laws of shortlists, for every model with one output layer: scores are renormalised over the list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_fixtures import SIZE, example_batch
from torch import Tensor, nn

from transduce.decoders import DECODERS
from transduce.decoding.logits_processors import MinLength, SuppressTokens
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.errors import InputError
from transduce.flow import Batch, Hypothesis
from transduce.inference.lowering import lower_network
from transduce.inference.shortlist import NarrowedModel, OutputRows, ShortlistedModel, apply_shortlists
from transduce.kernels.native.library import library
from transduce.layers.embedding import Output
from transduce.model import Transducer
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

MIXTURES = ("hard_attention", "edit_transducer")  # their logits are not rows of an output layer
LINEAR = [kind for kind in DECODERS if kind not in MIXTURES]
LENGTHS = [(5, 4), (2, 3), (7, 1), (1, 2)]


def lists(rows: int, seed: int = 0) -> Tensor:
    """B V: the special tokens and about half of the others."""
    allowed = torch.rand(rows, SIZE, generator=torch.Generator().manual_seed(seed)) < 0.5
    allowed[:, :4] = True
    return allowed


def speaks(model: nn.Module) -> bool:
    return isinstance(getattr(getattr(model, "decoder", None), "output", None), Output)


def test_scores_are_the_models_own_over_the_list(case: str, model: Transducer, batch: Batch) -> None:
    model = model.eval()
    if not speaks(model):
        with pytest.raises(InputError, match="output layer"):
            OutputRows(model)
        return
    allowed = lists(batch.size)
    small = apply_shortlists(OutputRows(model), allowed)
    given = batch.decoder_inputs.values % 4  # special tokens are known to both
    with torch.inference_mode():
        whole = model.advance(given, model.start(batch)).logits
        few = small.advance(given, small.start(batch)).logits
    wanted = whole.masked_fill(~allowed[:, None], -torch.inf).log_softmax(-1)[..., small.ids]
    torch.testing.assert_close(few.log_softmax(-1), wanted, rtol=1e-4, atol=1e-4)


def found(rows: OutputRows, batch: Batch, allowed: Tensor, width: int) -> list[Hypothesis]:
    small = apply_shortlists(rows, allowed)
    strategy = Greedy() if width == 1 else Beam(width=width, length_penalty=1.0)
    lines = search(small, batch, strategy, max_lengths=torch.full((batch.size,), 12), nbest=1)
    return [small.original_ids(line[0]) for line in lines]


def make(decoder: str) -> Transducer:
    torch.manual_seed(1)
    part = {"kind": decoder, "width": 16, "layers": 2}
    recipe = complete_recipe(parse({"model": {"encoder": {"kind": "transformer", "width": 16}, "decoder": part}}))
    model = build_model(recipe.model, SIZE, SIZE).eval()
    for parameter in model.parameters():  # an untrained model hardly chooses; this one does
        parameter.data *= 2
    return model


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("precision", [None, "fp32", "int8"])
@pytest.mark.parametrize("decoder", LINEAR)
def test_outputs_do_not_depend_on_the_batch(decoder: str, precision: str | None, width: int) -> None:
    if precision == "int8" and library() is None:
        pytest.skip("torch's kernels round all rows of a call by one scale")
    model, batch = make(decoder), example_batch(LENGTHS)
    model = model if precision is None else lower_network(model, precision)  # type: ignore[arg-type]
    rows, allowed = OutputRows(model), lists(len(LENGTHS))
    together = found(rows, batch, allowed, width)
    for number, one in enumerate(together):
        row = torch.tensor([number])
        alone = found(rows, batch.select(row), allowed[row], width)[0]
        assert alone.ids == one.ids
        assert alone.token_scores == pytest.approx(one.token_scores, abs=1e-4)
        assert set(one.ids) <= set(allowed[number].nonzero().flatten().tolist())


@pytest.mark.parametrize("precision", [None, "fp32", "bf16", "int8"])
@pytest.mark.parametrize("decoder", LINEAR)
def test_with_every_token_nothing_changes(decoder: str, precision: str | None) -> None:
    model, batch = make(decoder), example_batch(LENGTHS)
    model = model if precision is None else lower_network(model, precision)  # type: ignore[arg-type]
    every = torch.ones(len(LENGTHS), SIZE, dtype=torch.bool)
    plain = search(model, batch, Beam(width=3, length_penalty=1.0), max_lengths=torch.full((4,), 12), nbest=1)
    few = found(OutputRows(model), batch, every, 3)
    for one, wanted in zip(few, plain, strict=True):
        assert one.ids == wanted[0].ids
        assert one.token_scores == pytest.approx(wanted[0].token_scores, abs=1e-5)


@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_best_of_each_list_come_without_a_layer(
    precision: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes it fast: the plain way gives the same outputs from a layer of all that any line may use."""
    listed = apply_shortlists(OutputRows(lower_network(make("transformer"), precision)), lists(len(LENGTHS)))
    assert isinstance(listed, ShortlistedModel)
    assert listed.top_k is not None
    strategy = Greedy() if width == 1 else Beam(width=width, length_penalty=1.0)

    def found() -> list[list[Hypothesis]]:
        rules = [MinLength(length=2), SuppressTokens(tokens=[5, 6])]
        return search(
            listed, example_batch(LENGTHS), strategy, max_lengths=torch.full((len(LENGTHS),), 12), processors=rules
        )

    best = found()
    assert "narrowed" not in vars(listed)
    monkeypatch.setattr(ShortlistedModel, "top_k", None)
    for line, wanted in zip(best, found(), strict=True):
        assert [one.ids for one in line] == [one.ids for one in wanted]
        for one, other in zip(line, wanted, strict=True):
            assert one.token_scores == pytest.approx(other.token_scores, abs=1e-4)
    assert "narrowed" in vars(listed)


def test_a_packed_layer_is_smaller_and_packed() -> None:
    """What makes other ways faster: were the whole layer read and cut afterwards, outputs would be the same."""
    model = lower_network(make("transformer"), "int8")
    rows = OutputRows(model)
    small = NarrowedModel(rows, lists(1))
    layer = small.inner.decoder.output.projection  # type: ignore[union-attr]
    assert type(layer) is type(rows.layer)
    assert layer.out_features == len(small.ids) < SIZE
    assert model.decoder.output.projection.out_features == SIZE  # type: ignore[union-attr]
    assert (small.top_k is None) == (model.top_k is None)  # no slower way is taken for a line alone
    assert small.inner.decoder.layers is model.decoder.layers  # type: ignore[union-attr]
