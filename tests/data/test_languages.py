"""Multilingual data: tags of languages in sources and never in outputs, temperature sampling, fine-tuning."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transduce
from transduce.cli.options import check_language
from transduce.data.batching import DataPosition
from transduce.data.languages import split_language, tagged, temperature_weights
from transduce.data.prepare import prepare_data, train_tokenizers
from transduce.data.readers.corpus import by_language, read_corpus
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import KINDS
from transduce.errors import InputError
from transduce.evaluation.held_out import load_held_out
from transduce.recipe import Corpus, Recipe, parse
from transduce.recipe.build import complete_recipe
from transduce.training.experiment import train

SIZES = {"de": 120, "fr": 30, "it": 6}
ENDINGS = {"de": "en", "fr": "er", "it": "are"}
TEXTS = ["a house", "the houses", "<2de> is text here"]


def lines_of(language: str) -> list[tuple[str, str]]:
    stems = [f"{a}{b}{c}" for a in "bdgklm" for b in "aeiou" for c in "nrst"]
    return [(f"to {stem}", stem + ENDINGS[language]) for stem in stems[: SIZES[language]]]


def written(folder: Path, language: str) -> str:
    path = folder / f"{language}.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in lines_of(language)), encoding="utf-8")
    return str(path)


def recipe_for(folder: Path, train_files: Any = None, **more: Any) -> dict[str, Any]:
    corpora = train_files or [{"path": written(folder, name), "language": name} for name in SIZES]
    part = {"kind": "recurrent", "width": 16}
    return {
        "data": {"train": corpora, "dev_size": 20, "cache": str(folder / "cache"), **more},
        "tokens": {"source": {"kind": "chars"}, "target": {"kind": "chars"}, "shared": True},
        "model": {"encoder": part, "decoder": part},
        "training": {"steps": 3, "batch_tokens": 256, "validate_every": 3, "checkpoint_every": 3},
        "generation": {"strategy": "greedy", "max_length": 8},
        "evaluation": {"metrics": ["exact"], "resamples": 5},
    }


def completed(content: dict[str, Any]) -> Recipe:
    return complete_recipe(parse(content))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tag_is_one_token_of_a_source_and_no_text_of_an_output(kind: str) -> None:
    plain = Tokenizer.train(TEXTS, kind, 300)
    tokenizer = plain.with_languages(["fr", "de", "de"])
    assert (tokenizer.languages, tokenizer.size) == (("de", "fr"), plain.size + 2)
    tags = range(plain.size, tokenizer.size)
    for text in (*TEXTS, "<2de>", "<2de> a\thouse", ""):
        assert tokenizer.encode(text).ids == plain.encode(text).ids  # what looks like a tag in a target is text
        for number, language in zip(tags, ("de", "fr"), strict=True):
            source = tagged(text, language)
            wanted = [number, *plain.encode_sources([text])[0]]
            assert tokenizer.encode_sources([source]) == [wanted]
            encoding = tokenizer.encode_source(source)
            assert encoding.ids == wanted
            assert encoding.pieces[0] == f"<2{language}>"
            assert source[slice(*encoding.offsets[0])].strip() == f"<2{language}>"
    ids = plain.encode(TEXTS[0]).ids
    assert tokenizer.decode([tags[0], *ids[:1], tags[1], *ids[1:], tags[0]]) == plain.decode(ids)
    assert len(tokenizer.word_starts) == tokenizer.size
    with pytest.raises(InputError, match="no language 'da'"):
        tokenizer.encode_sources(["<2da> a"])


def test_tags_are_saved_and_other_vocabularies_do_not_change(tmp_path: Path) -> None:
    plain = Tokenizer.train(TEXTS, "bpe", 300)
    tokenizer = plain.with_languages(["de"])
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode_sources(["<2de> a"]) == tokenizer.encode_sources(["<2de> a"])
    assert tokenizer.fingerprint != plain.fingerprint
    plain.save(tmp_path / "plain.json")
    assert "languages" not in json.loads((tmp_path / "plain.json").read_text())


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500), st.sampled_from([0.5, 1.0, 3.0])), min_size=1),
    st.floats(1, 100),
)
def test_weights_give_shares_to_the_power_of_the_inverse_temperature(
    corpora: list[tuple[str, int, float]], temperature: float
) -> None:
    languages, sizes, weights = (list(column) for column in zip(*corpora, strict=True))
    found = temperature_weights(languages, sizes, weights, temperature)
    before, after = Counter[str](), Counter[str]()
    for name, size, old, new in zip(languages, sizes, weights, found, strict=True):
        before[name] += size * old
        after[name] += size * new
    assert math.isclose(sum(before.values()), sum(after.values()))
    flat = {name: (amount / sum(before.values())) ** (1 / temperature) for name, amount in before.items()}
    for name in flat:
        assert math.isclose(after[name] / sum(after.values()), flat[name] / sum(flat.values()))


def test_groups_of_corpora_are_sampled_by_temperature_too(tmp_path: Path) -> None:
    """Two files of one group count as one."""
    sizes = {"web-1": 60, "web-2": 60, "news": 30}
    for name, size in sizes.items():
        (tmp_path / name).write_text("".join(f"{name} {number}\tx\n" for number in range(size)))
    files = [{"path": str(tmp_path / name), "group": name[:3], "columns": ["1", "2"]} for name in sizes]
    (tmp_path / "dev.tsv").write_text("a\tb\n")
    recipe = completed(recipe_for(tmp_path, files, language_temperature=2.0, dev=str(tmp_path / "dev.tsv")))
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)
    batches = data.batches(recipe, tokenizers)
    rows = [row for index in range(batches.batches_in(0)) for row in batches.at(DataPosition(0, index)).rows]
    drawn = Counter(data.train.example(row).source.split()[0] for row in rows)
    share = math.sqrt(30 / 150) / (math.sqrt(30 / 150) + math.sqrt(120 / 150))
    assert abs(drawn["news"] - share * 150) <= 1
    assert abs(drawn["web-1"] - drawn["web-2"]) <= 1


@pytest.mark.parametrize("temperature", [1.0, 5.0])
@pytest.mark.parametrize("column", [False, True])
def test_languages_are_sampled_by_temperature(temperature: float, column: bool, tmp_path: Path) -> None:
    files = None
    if column:
        rows = [(*pair, name) for name in SIZES for pair in lines_of(name)]
        path = tmp_path / "all.tsv"
        path.write_text("".join("\t".join(row) + "\n" for row in sorted(rows)), encoding="utf-8")
        files = {"path": str(path), "language_column": "column3"}
    dev = [{"path": written(tmp_path, name), "language": name} for name in SIZES]
    recipe = completed(recipe_for(tmp_path, files, language_temperature=temperature, dev=dev))
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)
    batches = data.batches(recipe, tokenizers)
    rows = [row for index in range(batches.batches_in(0)) for row in batches.at(DataPosition(0, index)).rows]
    drawn = Counter(split_language(data.train.example(row).source)[0] for row in rows)
    flat = {name: (size / sum(SIZES.values())) ** (1 / temperature) for name, size in SIZES.items()}
    for name, share in flat.items():
        p = share / sum(flat.values())
        assert abs(drawn[name] - p * len(rows)) <= 2 * math.sqrt(p * (1 - p) * len(rows))
    again = prepare_data(recipe, tokenizers).batches(recipe, tokenizers)
    assert again.at(DataPosition(1, 0)).rows == batches.at(DataPosition(1, 0)).rows


def test_a_column_of_languages_is_read_as_a_corpus_for_each(tmp_path: Path) -> None:
    path = tmp_path / "all.tsv"
    path.write_text("a\tb\tde\nc\td\tfr\n\n", encoding="utf-8")
    corpus = Corpus(path=str(path), language_column="column3")
    german, french = by_language([corpus])
    assert [one.source for one in read_corpus(corpus)] == ["<2de> a", "<2fr> c", ""]
    assert [one.source for one in read_corpus(french)] == ["<2fr> c", ""]
    assert (german.language, french.language) == ("de", "fr")
    path.write_text("a\tb\n", encoding="utf-8")
    with pytest.raises(InputError, match="missing language"):
        list(read_corpus(corpus))
    path.write_text("a\tb\tein Wort\n", encoding="utf-8")
    with pytest.raises(InputError, match="no name of a language"):
        list(read_corpus(corpus))


def test_one_source_in_several_languages_is_held_out_in_all(tmp_path: Path) -> None:
    recipe = completed(recipe_for(tmp_path))
    data = prepare_data(recipe, train_tokenizers(recipe))
    held_out = {split_language(one.source)[1] for one in data.dev_examples()}
    trained = {split_language(data.train.example(int(row)).source)[1] for row in data.rows}
    assert held_out
    assert not held_out & trained


def test_languages_need_texts(tmp_path: Path) -> None:
    content = recipe_for(tmp_path)
    content["data"] |= {"sources": {"features": "tags", "text": "text"}}
    parts = {"features": {"kind": "identity", "width": 16}, "text": {"kind": "recurrent", "width": 16}}
    content["model"]["encoder"] = {"kind": "multi_source", "width": 16, "parts": parts}
    with pytest.raises(InputError, match="first source is a text"):
        completed(content)


@pytest.mark.slow
def test_runs_generate_evaluate_and_are_tuned_by_language(tmp_path: Path, command: Any) -> None:
    train(recipe_for(tmp_path), tmp_path / "run")
    model = transduce.load(tmp_path / "run")
    outputs = model.generate([tagged("to ban", name) for name in SIZES])
    assert not any("<2" in one.text for one in outputs)
    (tmp_path / "in.txt").write_text("to ban\n")
    run, lines = str(tmp_path / "run"), str(tmp_path / "in.txt")
    assert command("generate", run, lines, "--to", "fr").out.rstrip("\n") == outputs[1].text
    assert "in which language? This run has de, fr, it" in command("generate", run, lines).err
    with pytest.raises(InputError, match="no language 'da'"):
        check_language(model, "da")
    called = command("evaluate", run, "--json", str(tmp_path / "scores.json"))
    assert "dev: de" in called.out, called.err
    assert set(json.loads((tmp_path / "scores.json").read_text())["languages"]) <= {*SIZES}
    (tmp_path / "two.tsv").write_text("to ban\tbanen\n")
    assert load_held_out(model, str(tmp_path / "two.tsv"), "de")[1][0].source == "<2de> to ban"
    one = recipe_for(tmp_path, [{"path": str(tmp_path / "it.tsv"), "language": "it"}], dev_size=1)
    train({**one, "init": {"model": run}}, tmp_path / "tuned")
    assert transduce.load(tmp_path / "tuned").source.languages == ("de", "fr", "it")
    new = recipe_for(tmp_path, [{"path": str(tmp_path / "it.tsv"), "language": "es"}], dev_size=1)
    with pytest.raises(InputError, match="no tag for the language 'es'"):
        train({**new, "init": {"model": run}}, tmp_path / "other")
