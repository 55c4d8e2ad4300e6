"""A run with normalised text: outputs, scores, explanations, evaluation, bundles, exports, the automatic choice."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from run_fixtures import RECURRENT, settings

import transduce
from transduce.autoconfig import plan_for
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.interop import bundle
from transduce.interop.huggingface.tokenizers import write_tokenizer
from transduce.run import Run

WORDS = ["가나", "나가", "각나", "낙가", "강산", "산강", "바다", "다바", "고기", "기고"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words and the words read backwards."""
    path = tmp_path_factory.mktemp("korean") / "pairs.tsv"
    words = [f"{one}{other}" for one in WORDS for other in WORDS]
    path.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "luong"}}
    recipe = settings(pairs, model, "chars", steps=30, batch_tokens=1024)
    for side in ("source", "target"):
        recipe["tokens"][side] |= {"normalisation": ["nfd"]}
    return transduce.train(recipe, tmp_path_factory.mktemp("korean") / "run").run.folder


@pytest.mark.slow
def test_outputs_are_composed_and_scores_are_of_jamo(run, command, pairs, tmp_path):
    model = transduce.load(run)
    source = tmp_path / "in.txt"
    source.write_text("각강\n", encoding="utf-8")  # syllables that were seen, in a new order
    found = command("generate", run, source)
    assert found.code == 0, found.err
    text = found.out.rstrip("\n")
    assert text == model.generate(["각강"])[0].text
    assert unicodedata.is_normalized("NFC", text)
    assert [*model.score([("각강", "강각")])[0].tokens][:3] == ["\u1100", "\u1161", "\u11bc"]
    assert "exact" in command("evaluate", run, pairs).out
    explained = model.explain_pairs([("각강", "강각")])[0]
    assert explained.output == "강각"
    assert set(explained.source_tokens) == {"각", "강", "</s>"}


@pytest.mark.slow
def test_a_bundle_keeps_the_normalisation(run, tmp_path):
    packed = bundle.pack(Run(run), tmp_path / "model.zip")
    loaded = transduce.load(packed)
    assert loaded.target.normalisation == ("nfd",)
    assert loaded.generate(WORDS[:3])[0].text == transduce.load(run).generate(WORDS[:3])[0].text


def test_export_to_transformers_is_refused_where_it_cannot_undo_the_normalisation(tmp_path):
    tokenizer = Tokenizer.train(WORDS, "chars", 100, normalisation=("nfd",))
    with pytest.raises(InputError, match="the normalisation nfd is undone in the output"):
        write_tokenizer(tmp_path, tokenizer, None, source_eos=True, max_length=9)  # type: ignore[arg-type]


def test_hangul_is_read_as_jamo_by_the_automatic_choice(pairs, tmp_path):
    plan = plan_for(str(pairs), task="transliterate")
    assert plan.recipe.tokens.source.normalisation == plan.recipe.tokens.target.normalisation == ("nfd",)
    assert "Hangul syllables" in plan.reasons["tokens.source"]
    assert plan_for(str(pairs)).recipe.tokens.source.normalisation == ("nfd",)
    plain = tmp_path / "plain.tsv"
    plain.write_text("".join(f"été{i}\tcafé{i}\n" for i in range(100)), encoding="utf-8")
    assert plan_for(str(plain)).recipe.tokens.source.normalisation == ()  # two accented letters are few
    accents = "".join(chr(letter) for letter in range(0x1EA1, 0x1EF9, 2))
    many = tmp_path / "many.tsv"
    many.write_text("".join(f"{accents[i % 44]}{accents[(i * 7) % 44]}\ta\n" for i in range(200)), encoding="utf-8")
    assert plan_for(str(many), task="transliterate").recipe.tokens.source.normalisation == ("nfd",)
