"""Inflection tables: recognised columns, tags as tokens, and a recipe with lemma and features as two sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.autoconfig import plan_for, recipe_for
from transduce.autoconfig.tasks import VARIED_STEMS, inflection_table
from transduce.data.prepare import prepare_data, train_tokenizers
from transduce.data.readers.corpus import read_corpus
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import EOS, UNK
from transduce.recipe import Corpus, build

LINES = [("ház", "házban", "N;IN+ESS;SG"), ("kap", "kaptok", "V;IND;PRS;INDF;2;PL"), ("fa", "fák", "N;NOM;PL")]
FORM_SECOND, FORM_THIRD = (0, 1, 2), (0, 2, 1)


def written(path: Path, order: tuple[int, ...], lines: list[tuple[str, ...]] = LINES) -> str:
    path.write_text("".join("\t".join(line[place] for place in order) + "\n" for line in lines * 40), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("order", [FORM_SECOND, FORM_THIRD])
def test_both_column_orders_give_the_same_examples(order: tuple[int, ...], tmp_path: Path) -> None:
    table = written(tmp_path / "table.tsv", order)
    with pytest.warns(UserWarning, match="holds 10 tags, as in N;IN[+]ESS;SG"):
        recipe = build.complete_recipe(recipe_for(table, [f"data.dev={table}"]))
    for corpus in (*recipe.data.train, *recipe.data.dev, *recipe.data.held_out(table)):
        first = next(read_corpus(corpus))
        assert (first.source, first.target) == ("ház\tN;IN+ESS;SG", "házban")
    assert recipe.evaluation.metrics == ("exact", "cer")


def test_tags_are_tokens_and_lemmas_characters(tmp_path: Path) -> None:
    table = written(tmp_path / "table.tsv", FORM_SECOND)
    with pytest.warns(UserWarning, match="lemma, form, features"):
        recipe = build.complete_recipe(recipe_for(table, [f"data.dev={table}", f"data.cache={tmp_path / 'cache'}"]))
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)
    batch = next(iter(data.dev_batches(recipe)))
    example = data.dev.example(batch.rows[0])
    lemma, features = example.source.split("\t")
    source = tokenizers[0]
    assert [source.piece(number) for number in batch.source.values[0][: len(lemma)].tolist()] == list(lemma)
    tags = batch.extra["features"].values[0][batch.extra["features"].mask[0]].tolist()
    assert [source.piece(number)[1:] for number in tags[:-1]] == features.split(";")
    assert tags[-1] == EOS
    model = build.build_model(recipe.model, source.size, tokenizers[1].size)
    assert model(batch).logits.shape[-1] == source.size


@pytest.mark.parametrize(
    "lines",
    [
        [("a premise", "a hypothesis", "entailment")] * 3,
        [("ein Satz", "a sentence", "0-0 1-1")] * 3,
        [("one", "two", "")] * 3,
        [("CPU", "GPU", "TPU")] * 3,
        [("V;IND", "V;SG", "V;PL")] * 3,
    ],
)
def test_other_files_of_three_columns_are_no_tables(lines: list[tuple[str, ...]], tmp_path: Path) -> None:
    assert inflection_table(Corpus(path=written(tmp_path / "a.tsv", FORM_SECOND, lines)), "error") is None


def test_stated_columns_and_sources_are_kept(tmp_path: Path) -> None:
    table = written(tmp_path / "table.tsv", FORM_SECOND)
    stated = recipe_for(table, [f"data.train={{path: {table}, source_columns: 1}}"])
    assert not stated.data.sources
    assert next(read_corpus(stated.data.train[0])).target == "házban"


def test_the_task_takes_the_second_column_for_features(tmp_path: Path) -> None:
    lines = [("kitap", "pl p1 abl", "kitaplarımdan")] * 9
    recipe = recipe_for(written(tmp_path / "a.tsv", (0, 1, 2), lines), [], "inflect")
    assert list(recipe.data.sources) == ["lemma", "features"]
    assert next(read_corpus(recipe.data.train[0])).target == "kitaplarımdan"


def test_tags_have_pieces_that_no_text_has(tmp_path: Path) -> None:
    letters = Tokenizer.train(["ház V;3"], "chars", 100)
    tokenizer = letters.with_tags(["V;3", "N;3"])
    assert tokenizer.size == letters.size + 3
    assert set(tokenizer.encode("V;3").ids).isdisjoint(tokenizer.encode_tags("V;3;N"))
    assert tokenizer.encode("V;3").ids == letters.encode("V;3").ids
    assert tokenizer.encode_tags("3|V") == tokenizer.encode_tags(" 3 ; V;") == tokenizer.encode_tags("V;3")[::-1]
    assert tokenizer.encode_tags("V;DU") == [tokenizer.encode_tags("V")[0], UNK]
    assert tokenizer.encode_tags("") == []
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode_tags("V;3;N") == tokenizer.encode_tags("V;3;N")
    with pytest.raises(InputError, match="tags are pieces beside characters, not words"):
        Tokenizer.train(["a b"], "words", 100).with_tags(["V"])


def test_columns_of_a_tsv_are_named_by_number(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", FORM_SECOND)
    (one, *_) = read_corpus(Corpus(path=path, columns=("column3", "column1")))
    assert (one.source, one.target, one.extra) == ("N;IN+ESS;SG", "ház", {"column2": "házban"})
    for wrong in (("column1", "column1"), ("column1", "form"), ("column1", "column2", "column9")):
        with pytest.raises(InputError, match="column"):
            list(read_corpus(Corpus(path=path, columns=wrong)))


@pytest.mark.filterwarnings("ignore:column 3 holds")
def test_small_tables_get_artificial_examples(tmp_path: Path) -> None:
    table = written(tmp_path / "table.tsv", FORM_SECOND)
    small = plan_for(table)
    assert small.recipe.data.augmentation == {"kind": "hallucination", "examples": 10_000, **VARIED_STEMS}
    assert "inflect low, conditioned, exchange, edges, citations" in small.reasons["data.augmentation"]
    assert small.recipe.training.monitor == "exact"
    decoder, encoder = small.recipe.model.decoder or {}, small.recipe.model.encoder or {}
    assert decoder["condition_input"]
    assert encoder["parts"]["features"]["dropout"] == 0
    medium = plan_for(written(tmp_path / "medium.tsv", FORM_SECOND, LINES * 5))
    assert medium.recipe.data.augmentation == small.recipe.data.augmentation
    for key in ("data.augmentation", "model.encoder"):
        assert "inflect medium, conditioned 192, dropout 0.4, exchange, edges, citations" in medium.reasons[key]
    assert (medium.recipe.model.decoder or {})["condition_input"]
    assert (medium.recipe.model.decoder or {})["width"] > decoder["width"]
    fewer = plan_for(table, ["data.augmentation.examples=50"])
    assert fewer.recipe.data.augmentation == {"kind": "hallucination", "examples": 50, **VARIED_STEMS}
    none = plan_for(table, ["data.augmentation=null"])
    assert none.recipe.data.augmentation is None
    assert "data.augmentation" not in {*none.reasons, *fewer.reasons}
    assert plan_for(written(tmp_path / "large.tsv", FORM_SECOND, LINES * 25)).recipe.data.augmentation is None
