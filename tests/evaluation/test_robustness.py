"""Perturbations of sources, and the probes that compare outputs before and after them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_fixtures import Command

from transduce.errors import InputError
from transduce.evaluation import robustness
from transduce.evaluation.held_out import HeldOutExample
from transduce.evaluation.robustness import PERTURBATIONS, ProbeSettings, parse_substitutions, probe, substitute
from transduce.recipe import parse

TEXT = "The old modern Hotel, on 10 hills: it rained."


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_perturbations_depend_on_seed_and_rate_alone(name: str) -> None:
    change = PERTURBATIONS[name]
    assert change(TEXT, random.Random(1), 1.0) == change(TEXT, random.Random(1), 1.0) != TEXT
    assert change("", random.Random(1), 1.0) == ""
    if name not in ("upper", "lower", "punctuation"):
        assert change(TEXT, random.Random(1), 0.0) == TEXT
        assert len(change(TEXT, random.Random(1), 1.0).split()) == len(TEXT.split())


def test_each_perturbation_does_what_its_name_says() -> None:
    chance = random.Random(3)
    for word in ("ab", "house"):
        assert sorted(robustness.swapped(word, chance)) == sorted(word)
        assert len(robustness.deleted(word, chance)) == len(word) - 1
        assert len(robustness.doubled(word, chance)) == len(word) + 1
    assert robustness.confused("rn 0", chance, 1.0) == "m O"
    assert PERTURBATIONS["punctuation"]("a, b. 3.5 c!", chance, 1.0) == "a b 3.5 c"
    assert PERTURBATIONS["upper"]("a\u00df", chance, 1.0) == "ASS"


def test_substitution_exchanges_whole_words_in_both_directions() -> None:
    pairs = parse_substitutions(["he\tshe", "man\twoman"], "pairs.tsv")
    assert substitute("He sees the woman, she the mankind", pairs) == "She sees the man, he the mankind"
    assert substitute(substitute("the man", pairs), pairs) == "the man"
    bad: list[str]
    for bad in (["he she"], ["he\tshe\tit"], []):
        with pytest.raises(InputError, match="he TAB she"):
            parse_substitutions(bad, "pairs.tsv")


def stub(answer: Any) -> Any:
    """A model whose output is a function of the source."""
    recipe = parse({"evaluation": {"metrics": ["exact"], "resamples": 50}})
    return SimpleNamespace(
        recipe=recipe,
        sourceless=False,
        source_encoding=SimpleNamespace(reads_text=True),
        generate=lambda texts, **settings: [
            SimpleNamespace(text=answer(text), source_cut=0, token_scores=()) for text in texts
        ],
        max_source_tokens=lambda **settings: 100,
    )


LINES = [HeldOutExample(f"{who} {verb} it", (verb,)) for who in ("he", "she") for verb in ("likes", "hates")] * 10


def exact(text: str) -> str:
    return next((verb for verb in ("likes", "hates") if verb in text), "?")


def test_a_model_that_compares_letters_is_not_robust_and_one_that_ignores_case_is() -> None:
    settings = ProbeSettings(["upper", "swap", "lower"], rate=1.0)
    upper, swap, lower = probe(stub(exact), LINES, settings)
    assert upper.changed_sources == upper.changed_outputs == 100
    assert (upper.scores["exact"].clean, upper.scores["exact"].perturbed) == (100, 0)
    assert upper.scores["exact"].p_value < 0.05
    assert swap.scores["exact"].perturbed < 50
    assert (lower.changed_sources, lower.changed_outputs) == (0, 0)
    assert upper.examples[0] == ("he likes it", "likes", "HE LIKES IT", "?")
    blind = probe(stub(lambda text: exact(text.lower())), LINES, settings)[0]
    assert (blind.changed_outputs, blind.scores["exact"].perturbed) == (0, 100)


def test_misspelt_texts_have_one_typing_error_each() -> None:
    found = robustness.misspelt(TEXT, random.Random(2))
    assert 1 < len(found) == len(set(found)) <= robustness.TRIES
    for text in found:
        changed = [(a, b) for a, b in zip(TEXT.split(), text.split(), strict=True) if a != b]
        assert len(changed) == 1
        assert abs(len(text) - len(TEXT)) <= 1
    assert robustness.misspelt("a 1 !", random.Random(2)) == []
    assert "aa" not in robustness.misspelt("aa", random.Random(2))


def test_an_adversary_finds_the_error_that_hurts() -> None:
    """The stub gives a reference its full probability where its word is spelt right, and less for each other error."""

    def score(pairs: Any) -> list[Any]:
        return [SimpleNamespace(score=-0.1 * len(set(text)) - 5.0 * (target not in text)) for text, target in pairs]

    model = stub(exact)
    model.score = score
    (attacked,) = probe(model, LINES, ProbeSettings([robustness.ADVERSARIAL]))
    (random_errors,) = probe(model, LINES, ProbeSettings(["swap"], rate=0.34))
    assert attacked.changed_sources == 100
    assert attacked.scores["exact"].clean == 100
    assert attacked.scores["exact"].perturbed <= 5  # where none of the tries is in the word that counts
    assert random_errors.scores["exact"].perturbed > 20  # one word of three: most errors are elsewhere
    assert robustness.adversarial_sources(model, [HeldOutExample("a", ("b",))], 1) == ["a"]


def test_exchanged_words_show_a_bias_but_not_the_exchange_itself() -> None:
    settings = ProbeSettings((), substitutions={"he": "she"})
    (fair,) = probe(stub(lambda text: f"{text.split()[0]} is fine"), LINES, settings)
    assert (fair.name, fair.changed_sources, fair.changed_outputs) == ("substitution", 100, 0)
    (biased,) = probe(stub(lambda text: "likes" if text.startswith("he ") else "hates"), LINES, settings)
    assert biased.changed_outputs == 100
    assert biased.scores == {}
    assert biased.to_json()["examples"][0][3] in ("likes", "hates")


def test_models_and_names_that_cannot_be_probed_are_refused() -> None:
    with pytest.raises(InputError, match="swap"):
        probe(stub(str), LINES, ProbeSettings(["swop"]))
    deaf = stub(str)
    deaf.source_encoding.reads_text = False
    with pytest.raises(InputError, match="reads texts"):
        probe(deaf, LINES, ProbeSettings())


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(command: Command, bottleneck_run: Path, tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text("red\tblue\n")
    options = ["--perturbations", "upper", "--substitutions", tmp_path / "words.tsv", "--json", tmp_path / "out.json"]
    found = command("probe", bottleneck_run, *options)
    assert "upper" in found.out
    content = json.loads((tmp_path / "out.json").read_text())
    assert [one["name"] for one in content["probes"]] == ["upper", "substitution"]
    assert content["probes"][0]["changed_sources"] == 100
