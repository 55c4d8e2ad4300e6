"""Recipe selection: recipes for files of very different shape can be built and fit the data."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from transduce import build
from transduce.autoconfig import choose, recipe_for
from transduce.errors import InputError
from transduce.recipe import Recipe

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word(draw: random.Random, longest: int = 9) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randint(2, longest)))


def sentences(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(1)
    words = [word(draw) for _ in range(2000)]
    return [tuple(" ".join(draw.choices(words, k=draw.randint(8, 20))) for _ in range(2)) for _ in range(count)]


def phones(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(2)
    return [(one, " ".join(letter.upper() + "H" for letter in one)) for one in (word(draw) for _ in range(count))]


def dates(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(3)
    return [(f"{draw.randint(1, 28)}. March {draw.randint(1900, 2100)}", f"{draw.random():.6f}") for _ in range(count)]


def commands(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(4)
    steps = ["walk", "jump", "turn left", "look around right", "twice"]
    return [
        (" ".join(draw.choices(steps, k=6)), " ".join(draw.choices(["GO", "JUMP", "LEFT"], k=9))) for _ in range(count)
    ]


def written(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def check(recipe: Recipe) -> None:
    """Complete, buildable, and its measures fit together."""
    completed = build.complete_recipe(recipe)
    build.build_model(completed.model, 50, 50)
    training = recipe.training
    assert training.monitor in recipe.evaluation.metrics
    assert training.monitor != "exact"  # it may stay at 0 for long while the model learns
    assert training.validate_every <= training.steps
    assert training.checkpoint_every <= training.steps
    assert training.schedule.warmup < training.steps


@pytest.mark.parametrize(
    ("pairs", "kinds", "encoder", "metrics"),
    [
        (sentences(), ("bpe", "bpe"), "transformer", ("bleu", "chrf")),
        (phones(), ("chars", "words"), "recurrent", ("exact", "wer")),
        (dates(), ("chars", "chars"), "recurrent", ("exact", "cer")),
        (commands(), ("words", "words"), "recurrent", ("exact", "wer")),
    ],
    ids=["sentences", "phones", "dates", "commands"],
)
def test_what_fits(tmp_path: Path, pairs, kinds, encoder: str, metrics) -> None:
    recipe = recipe_for(str(written(tmp_path / "pairs.tsv", pairs)))
    check(recipe)
    assert (recipe.tokens.source.kind, recipe.tokens.target.kind) == kinds
    assert recipe.model.encoder["kind"] == encoder
    assert recipe.evaluation.metrics == metrics


@profile(deadline=None, max_examples=40)
@given(pairs=st.lists(st.tuples(*[st.text("ab cé漢 ", min_size=1, max_size=60).filter(str.strip)] * 2), min_size=1))
def test_any_pairs_have_a_recipe(bench: Path, pairs: list[tuple[str, str]]) -> None:
    path = str(written(bench / "any.tsv", pairs))
    recipe = recipe_for(path)
    check(recipe)
    assert recipe_for(path) == recipe
    assert choose({"train": path}) == recipe


def test_more_data_means_longer_training(tmp_path: Path) -> None:
    few, many = (recipe_for(str(written(tmp_path / f"{n}.tsv", sentences(50) * n))) for n in (1, 400))
    assert few.training.steps < many.training.steps <= 100_000
    assert few.training.validate_every < many.training.validate_every


def test_blank_and_endless_lines_do_not_decide(tmp_path: Path) -> None:
    plain = recipe_for(str(written(tmp_path / "pairs.tsv", phones())))
    odd = [*[("", "")] * 400, *phones(), ("x " * 100_000, "y " * 100_000)]
    mixed = recipe_for(str(written(tmp_path / "pairs.tsv", odd)))
    assert mixed.tokens == plain.tokens
    assert mixed.model == plain.model
    assert mixed.evaluation == plain.evaluation


def test_shared_letters_share_a_vocabulary(tmp_path: Path) -> None:
    assert recipe_for(str(written(tmp_path / "a.tsv", sentences()))).tokens.shared
    foreign = [(source, target.translate({ord(a): 0x4E00 + ord(a) for a in LETTERS})) for source, target in sentences()]
    apart = recipe_for(str(written(tmp_path / "b.tsv", foreign)))
    assert not apart.tokens.shared
    assert apart.model.tie == "target"


def test_changes_come_on_top(tmp_path: Path) -> None:
    path = str(written(tmp_path / "pairs.tsv", phones()))
    recipe = recipe_for(path, ["training.steps=7", "model.encoder.layers=3", "data.max_length=99"])
    assert (recipe.training.steps, recipe.model.encoder["layers"], recipe.data.max_length) == (7, 3, 99)
    with pytest.raises(InputError, match="steps"):
        recipe_for(path, ["training.stepz=7"])


def test_a_recipe_file_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("training: {steps: 5}")
    assert recipe_for(str(tmp_path / "r.yaml"), ["training.seed=3"]).training.model_dump(include={"steps", "seed"}) == {
        "steps": 5,
        "seed": 3,
    }


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="empty"):
        recipe_for(str(written(tmp_path / "pairs.tsv", [("a", ""), ("", "b"), (" ", " ")])))


def test_labels_without_a_task_get_a_hint(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    lines = [f"a film number {number} of some length\t{('good', 'bad')[number % 2]}\n" for number in range(200)]
    (tmp_path / "labels.tsv").write_text("".join(lines), encoding="utf-8")
    recipe_for(str(tmp_path / "labels.tsv"), [], "classify")
    assert not recwarn.list
    recipe_for(str(tmp_path / "labels.tsv"))
    assert "2 different lines" in str(recwarn.pop().message)
    assert not recwarn.list


def test_few_examples_get_a_warning(tmp_path: Path) -> None:
    (tmp_path / "few.tsv").write_text("one line\tanother line\ntwo lines\tmore lines\n" * 3, encoding="utf-8")
    with pytest.warns(UserWarning, match="6 examples are few"):
        recipe_for(str(tmp_path / "few.tsv"))
