"""Speculative decoding equals greedy search, for every decoder and every draft."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from contract_fixtures import SIZE, SMALL, example_batch

from transduce.contracts import LogitsProcessor
from transduce.decoders import DECODERS
from transduce.decoding.logits_processors import ForcedBOS, ForcedEOS, MinLength, NoRepeatNgram
from transduce.decoding.search import search
from transduce.decoding.speculative import speculative_search
from transduce.decoding.strategies import Greedy
from transduce.flow import Hypothesis
from transduce.model import Transducer
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

LENGTHS = [(5, 1), (2, 1), (7, 1), (1, 1)]
LONGEST = torch.tensor([14, 12, 10, 1])
DRAFTS = ["itself", "another", "nearly"]
RULES: dict[str, list[LogitsProcessor]] = {
    "none": [],
    "long": [MinLength(length=9), NoRepeatNgram(size=2)],
    "forced": [ForcedBOS(token=5), ForcedEOS(max_length=12)],
}


@cache
def shared(decoder: str, seed: int, alone: bool = False) -> Transducer:
    """A model that nobody changes."""
    torch.manual_seed(seed)
    model = {"encoder": None if alone else SMALL["recurrent"], "decoder": SMALL[decoder]}
    model = build_model(
        complete_recipe(parse({"tokens": {"shared": alone or decoder == "edit_transducer"}, "model": model})).model,
        SIZE,
        SIZE,
    ).eval()
    for parameter in model.parameters():  # an untrained model hardly chooses; this one does
        parameter.data *= 2
    return model


@cache
def greedy(decoder: str, alone: bool, rules: str) -> list[Hypothesis]:
    """What the model says without a draft."""
    options = {"max_lengths": LONGEST, "processors": RULES[rules]}
    return [one[0] for one in search(shared(decoder, 1, alone), example_batch(LENGTHS), Greedy(), **options)]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("decoder", DECODERS)
def test_outputs_equal_greedy_search(decoder: str, alone: bool, draft: str) -> None:
    """Every decoder meets every draft and all rules, every draft all rules."""
    rules = list(RULES)[(list(DECODERS).index(decoder) + DRAFTS.index(draft) + alone) % len(RULES)]
    model = shared(decoder, 1, alone)
    other = model if draft == "itself" else copy.deepcopy(shared(decoder, 1 if draft == "nearly" else 2, alone))
    if draft == "nearly":
        torch.manual_seed(5)
        for parameter in other.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    for ahead in (1, 3) if draft == "nearly" else (3,):  # the others are always or hardly ever taken
        found = speculative_search(
            model, other, example_batch(LENGTHS), max_lengths=LONGEST, processors=RULES[rules], draft_tokens=ahead
        )
        for one, wanted in zip(found, greedy(decoder, alone, rules), strict=True):
            assert one.ids == wanted.ids
            assert one.complete == wanted.complete
            assert one.token_scores == pytest.approx(wanted.token_scores, abs=1e-4)


def test_a_good_draft_saves_calls() -> None:
    """Itself is the best draft: every call but the last gives as many tokens as were proposed, and one more."""
    model, longest = copy.deepcopy(shared("transformer", 1)), torch.tensor([40] * 4)
    rules: list[LogitsProcessor] = [MinLength(length=39)]
    calls = 0
    advance = model.advance

    def counted(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        return advance(*arguments, **options)  # type: ignore[arg-type]

    draft = shared("transformer", 1)
    model.advance = counted  # type: ignore[method-assign, assignment]
    speculative_search(model, draft, example_batch(LENGTHS), max_lengths=longest, processors=rules, draft_tokens=4)
    assert calls == 8
