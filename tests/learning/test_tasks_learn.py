"""Each text task is learned from its recipe on its synthetic set, better than by a simpler baseline."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from transduce.evaluation.overlap_metrics import RougeL
from transduce.flow import Example
from transduce.recipe import load
from transduce.synthetic import SYNTHETIC, generate
from transduce.synthetic.sentences import missing_values
from transduce.synthetic.words import LATIN
from transduce.training.experiment import TrainingResult, train

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
TESTED = 300


def learn(folder: Path, name: str, file: str, count: int, *more: str) -> TrainingResult:
    """The run of a recipe on so many lines, tested on names, words or lemmas that training never saw."""
    sets = {"train": (count, 1, False), "dev": (100, 1, True), "test": (TESTED, 2, True)}
    for part, (lines, seed, held_out) in sets.items():
        examples = generate(name, lines, seed, held_out=held_out)
        (folder / f"{part}.tsv").write_text("".join(f"{one.source}\t{one.target}\n" for one in examples))
    settings = [
        f"data.train={{path: {folder / 'train.tsv'}, source_columns: {SYNTHETIC[name].columns}}}",
        f"data.dev={folder / 'dev.tsv'}",
        f"data.test={folder / 'test.tsv'}",
        f"data.cache={folder / 'cache'}",
        "evaluation.resamples=10",
        *more,
    ]
    return train(load(RECIPES / name / f"{file}.yaml", settings), folder / "run")


def value(trained: TrainingResult, metric: str) -> float:
    return trained.scores["test"].scores[metric].value


def held_out(name: str) -> list[Example]:
    return list(generate(name, TESTED, 2, held_out=True))


def exact(answers: list[str], examples: list[Example]) -> float:
    right = sum(answer == one.target for answer, one in zip(answers, examples, strict=True))
    return 100 * right / len(examples)


def test_transliteration(tmp_path):
    assert value(learn(tmp_path, "transliteration", "attention", 8000), "exact") >= 80
    # The same rules without a look at the neighbours.
    table = {**LATIN, "е": "e", "ё": "yo", "ь": "", "ъ": ""}
    examples = held_out("transliteration")
    assert exact(["".join(table[letter] for letter in one.source) for one in examples], examples) <= 55


def test_inflection(tmp_path):
    assert value(learn(tmp_path, "inflection", "attention", 8000), "exact") >= 85
    # The commonest ending of each combination of features, whatever the lemma.
    endings: dict[str, Counter[str]] = defaultdict(Counter)
    for one in generate("inflection", 8000, 1):
        lemma, features = one.source.split("\t")
        if one.target.startswith(lemma):
            endings[features][one.target.removeprefix(lemma)] += 1
    examples = held_out("inflection")
    parts = [one.source.split("\t") for one in examples]
    assert exact([lemma + endings[features].most_common(1)[0][0] for lemma, features in parts], examples) <= 40


def test_summaries(tmp_path):
    trained = learn(tmp_path, "summaries", "copy", 3000)
    assert value(trained, "rougeL") >= 95
    assert value(trained, "exact") >= 85
    examples = held_out("summaries")
    first = [one.source.partition(" .")[0] + " ." for one in examples]  # what is hard to beat in newspapers
    lead = RougeL().statistics(first, [str(one.target) for one in examples])
    assert RougeL().value(lead.sum(0)) <= 50


def test_without_copying_no_summary_has_the_right_names(tmp_path):
    plain = ("tokens.oov_placeholders=0", "model.copy=null", "training.steps=80")
    assert value(learn(tmp_path, "summaries", "copy", 3000, *plain), "exact") == 0


def test_questions(tmp_path):
    trained = learn(tmp_path, "questions", "copy", 6000)
    assert value(trained, "exact") >= 85
    examples = held_out("questions")
    blank = trained.model.generate([one.source.partition("\t")[0] + "\t" for one in examples])
    assert exact([one.text for one in blank], examples) <= 40


def test_dialogue(tmp_path):
    trained = learn(tmp_path, "dialogue", "transformer", 3000)
    assert value(trained, "exact") >= 90
    booked = [one for one in held_out("dialogue") if str(one.target).startswith("a table")]
    last = trained.model.generate(["\t\t\t\t" + one.source.rpartition("\t")[2] for one in booked])
    assert exact([one.text for one in last], booked) <= 10  # what was said before the last turn is needed


def test_records(tmp_path):
    trained = learn(tmp_path, "records", "copy", 3000)
    assert value(trained, "bleu") >= 95
    sources = list(dict.fromkeys(one.source for one in held_out("records")))
    unsaid = [missing_values(one.source, one.text) for one in trained.model.generate(sources)]
    values = sum(source.count("[") for source in sources)
    assert sum(map(len, unsaid)) <= 0.05 * values
