"""Overrides of parts: options by name, and a changed kind."""

from __future__ import annotations

import itertools

import pytest

from transduce.recipe import override, parse
from transduce.recipe.build import complete_recipe

GRU = {"kind": "recurrent", "width": 32, "cell": "gru", "context": "bahdanau"}


def test_a_part_by_its_name_takes_options() -> None:
    changed = override({"model": {"decoder": GRU}}, ["model.decoder.context.score=dot"])
    assert changed["model"]["decoder"]["context"] == {"kind": "bahdanau", "score": "dot"}
    twice = override(
        {"model": {"decoder": GRU}}, ["model.decoder.context=luong", "model.decoder.context.score.kind=dot"]
    )
    assert twice["model"]["decoder"]["context"] == {"kind": "luong", "score": {"kind": "dot"}}


def test_another_kind_begins_afresh_in_whatever_order_its_options_come() -> None:
    items = ["model.decoder.kind=transformer", "model.decoder.heads=2", "model.decoder.position.kind=rotary"]
    for order in itertools.permutations(items):
        changed = override({"model": {"encoder": GRU, "decoder": GRU}}, order)
        assert changed["model"]["decoder"] == {"kind": "transformer", "heads": 2, "position": {"kind": "rotary"}}
        assert changed["model"]["encoder"] == GRU


def test_the_same_kind_keeps_its_options() -> None:
    changed = override({"model": {"decoder": GRU}}, ["model.decoder.kind=recurrent", "model.decoder.layers=2"])
    assert changed["model"]["decoder"] == {**GRU, "layers": 2}
    unnamed = override({"model": {"decoder": {"width": 8}}}, ["model.decoder.kind=transformer"])
    assert unnamed["model"]["decoder"] == {"width": 8, "kind": "transformer"}


def test_a_completed_recipe_may_change_a_kind() -> None:
    """What `train RUN/recipe.yaml model.encoder.kind=...` comes to: no option of the old kind is left to be refused."""
    whole = complete_recipe(parse({"model": {"encoder": {"kind": "recurrent"}, "decoder": GRU}})).model_dump(
        mode="json"
    )
    for kind in ("transformer", "convolutional"):
        complete_recipe(parse(override(whole, [f"model.encoder.kind={kind}"])))


def test_an_objective_without_a_kind_is_cross_entropy() -> None:
    content = {"training": {"objective": {"label_smoothing": 0.0}}}
    assert override(content, ["training.objective.kind=cross_entropy"])["training"]["objective"] == {
        "kind": "cross_entropy",
        "label_smoothing": 0.0,
    }
    assert override(content, ["training.objective.kind=r_drop"])["training"]["objective"] == {"kind": "r_drop"}


@pytest.mark.parametrize("section", ["training.schedule", "training.optimiser", "tokens.source"])
def test_overrides_of_other_sections_keep_their_keys(section: str) -> None:
    first, second = section.split(".")
    content = {first: {second: {"kind": "one", "other": 1}}}
    assert override(content, [f"{section}.kind=two"])[first][second] == {"kind": "two", "other": 1}
