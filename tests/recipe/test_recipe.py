"""Recipes: round trips, and errors that name the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.recipe import Recipe, dump, load, override, parse
from transduce.recipe.build import complete_recipe

SMALL = {"encoder": {"kind": "recurrent"}, "decoder": {"kind": "transformer", "position": "rotary"}}
WHOLE = st.integers(-3, 20) | st.sampled_from([2**40, 10**400, -(10**400)])
SCALARS = st.none() | st.booleans() | WHOLE | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def keys(content: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key path of a recipe."""
    return [
        path
        for name, value in content.items()
        for path in [f"{prefix}{name}", *(keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [])]
    ]


EVERY_KEY = keys(complete_recipe(parse({"model": SMALL})).model_dump(mode="json"))


class TestRoundTrip:
    def test_a_completed_recipe(self, tmp_path: Path) -> None:
        corpora = [
            "a.tsv",
            {"source": "b.en", "target": "b.de", "weight": 2},
            {"path": "c.jsonl", "columns": ["x", "y"]},
        ]
        whole = complete_recipe(parse({"model": SMALL, "data": {"train": corpora}, "training": {"minutes": 1.5}}))
        (tmp_path / "recipe.yaml").write_text(dump(whole), encoding="utf-8")
        assert load(tmp_path / "recipe.yaml") == whole
        assert complete_recipe(load(tmp_path / "recipe.yaml")) == whole  # nothing was left out
        assert dump(load(tmp_path / "recipe.yaml")) == dump(whole)

    def test_every_default_is_written(self) -> None:
        model = complete_recipe(parse({"model": SMALL})).model
        assert model.decoder is not None
        assert model.decoder["position"] == {"kind": "rotary", "base": 10000.0, "share": 1.0}
        assert model.decoder["score"]["kind"] == "scaled_dot"
        assert {"width", "layers", "heads", "ff_width", "dropout", "norm"} <= model.decoder.keys()

    def test_names_in_any_language(self, tmp_path: Path) -> None:
        recipe = parse({"data": {"train": "données/文.tsv"}})
        (tmp_path / "r.yaml").write_text(dump(recipe), encoding="utf-8")
        assert "文" in (tmp_path / "r.yaml").read_text(encoding="utf-8")
        assert load(tmp_path / "r.yaml") == recipe


class TestCorpora:
    @pytest.mark.parametrize(
        ("given_", "expected"),
        [
            ("a.tsv", [{"path": "a.tsv"}]),
            ("a.en,a.de", [{"source": "a.en", "target": "a.de"}]),
            (["a.tsv", "b.en,b.de"], [{"path": "a.tsv"}, {"source": "b.en", "target": "b.de"}]),
            ({"path": "a.tsv", "weight": 3}, [{"path": "a.tsv", "weight": 3}]),
        ],
    )
    def test_notations_of_corpora_are_equivalent(self, given_: Any, expected: list[dict[str, Any]]) -> None:
        assert parse({"data": {"train": given_}}) == parse({"data": {"train": expected}})

    @pytest.mark.parametrize("wrong", [{}, {"path": "a", "source": "b"}, {"weight": 0, "path": "a"}, 7, [7], [None]])
    def test_wrong_corpora_are_refused(self, wrong: Any) -> None:
        with pytest.raises(InputError, match=r"data\.train"):
            parse({"data": {"train": wrong}})


class TestOverride:
    @pytest.mark.parametrize(
        ("item", "value"),
        [
            ("training.steps=5", 5),
            ("a=1e-3", "1e-3"),  # YAML 1.1 reads this as text; the typed recipe makes it a number
            ("a=[1, x]", [1, "x"]),
            ("a={b: 2}", {"b": 2}),
            ("a=", None),
            ("a=null", None),
            ("a=b=c", "b=c"),
            ("a={unclosed", "{unclosed"),
            ("a=true", True),
        ],
    )
    def test_values_are_read_as_yaml(self, item: str, value: Any) -> None:
        inner: Any = override({}, [item])
        for name in item.partition("=")[0].split("."):
            inner = inner[name]
        assert inner == value

    def test_overrides_change_only_their_keys(self) -> None:
        content = {"training": {"steps": 1, "seed": 2}}
        changed = override(content, ["training.steps=9", "training.schedule.warmup=3", "training.steps=10"])
        assert changed == {"training": {"steps": 10, "seed": 2, "schedule": {"warmup": 3}}}
        assert content == {"training": {"steps": 1, "seed": 2}}

    def test_numbers_with_exponents(self) -> None:
        changed = override({}, ["training.optimiser.learning_rate=3e-4"])
        assert parse(changed).training.optimiser.learning_rate == 3e-4

    @pytest.mark.parametrize("item", ["a=&a [*a]", "a={b: 1, b: 2}", "a=" + "9" * 5000, "a=!!int x", "a=" + "[" * 5000])
    def test_values_that_are_refused(self, item: str) -> None:
        with pytest.raises(InputError, match=r"^a:1: "):
            override({}, [item])

    def test_a_key_of_too_many_parts_is_refused(self) -> None:
        with pytest.raises(InputError, match="30,000 parts"):
            override({}, [".".join("a" * 30_000) + "=1"])

    @pytest.mark.parametrize("item", ["steps", "=5", ""])
    def test_wrong_overrides_are_refused(self, item: str) -> None:
        with pytest.raises(InputError, match=r"key\.path=value"):
            override({}, [item])


class TestOddValues:
    """Whatever stands where: a recipe, or an InputError that names the place."""

    @profile(deadline=None, max_examples=150)
    @given(key=st.sampled_from(EVERY_KEY), value=ANYTHING)
    def test_any_value_under_any_key(self, key: str, value: Any) -> None:
        content = complete_recipe(parse({"model": SMALL})).model_dump(mode="json")
        *parents, last = key.split(".")
        place = content
        for name in parents:
            place = place[name]
        place[last] = value
        message = ""
        try:
            complete_recipe(parse(content))
        except InputError as error:
            message = str(error)
        assert not message or any(name in message for name in (last, *parents[-1:], "width"))

    @profile(deadline=None, max_examples=60)
    @given(content=st.dictionaries(st.sampled_from([*Recipe.model_fields, "x", 3]), ANYTHING, max_size=3))
    def test_any_mapping_is_a_recipe_or_an_input_error(self, content: dict[Any, Any]) -> None:
        try:
            recipe = parse(content)
        except InputError:
            return
        assert parse(yaml.safe_load(dump(recipe))) == recipe

    @pytest.mark.parametrize("key", [key for key in EVERY_KEY if not key.startswith("data.train")])
    def test_a_misspelt_key_is_named_with_the_right_one(self, key: str) -> None:
        content = complete_recipe(parse({"model": SMALL})).model_dump(mode="json")
        *parents, last = key.split(".")
        place = content
        for name in parents:
            place = place[name]
        place[f"{last}q"] = 1
        with pytest.raises(InputError, match=rf"{last}q.*\n.*({last}|known)"):
            complete_recipe(parse(content))

    def test_shared_tokens_must_be_alike(self) -> None:
        with pytest.raises(InputError, match="shared"):
            parse({"tokens": {"shared": True, "source": {"kind": "chars"}}})


@pytest.mark.parametrize("key", EVERY_KEY)
def test_wrong_values_are_reported_in_plain_words_with_their_key(key: str) -> None:
    """No word of the validation library, and no name of a type in the key."""
    for value in ("nonsense", -7, 1.5, [[]], {"nonsense": 1}, None):
        content: Any = value
        for name in reversed(key.split(".")):
            content = {name: content}
        problem = ""
        try:
            parse(content)
        except InputError as error:
            problem = str(error)
        assert not re.search("Input should|valid |pydantic|Value error|unable to parse|Union", problem)
        assert not re.search(r"\.(str|int|bool|float|dict|literal)\b", problem)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("training.steps=abc", "training.steps: this must be a whole number (got 'abc')"),
        ("training.clip=-1", "training.clip: this must be greater than 0 (got -1)"),
        ("training.batch_tokens=x", "training.batch_tokens: this must be a whole number, or one of: 'auto' (got 'x')"),
        ("data.format=x", "data.format: this must be one of: 'pairs', 'text' (got 'x')"),
    ],
)
def test_errors_name_the_permitted_values(change: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(override({}, [change]))
    assert caught.value.problem == problem
