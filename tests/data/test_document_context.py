"""Document context: what is read before each sentence, at the boundaries of documents and in every command."""

from __future__ import annotations

import random

import pytest

from transduce.data.annotations import DocumentContext, lines_in_context, without_context
from transduce.data.readers.corpus import fingerprint, read_corpus
from transduce.errors import InputError
from transduce.evaluation.held_out import empty_contexts, group_references, sources_for
from transduce.recipe import EvaluationRecipe, parse


def data(**options) -> dict:
    return {"data": options, "model": {"encoder": {"kind": "recurrent"}, "decoder": {"kind": "recurrent"}}}


def read(**options) -> list[str]:
    (corpus,) = parse(data(**options)).data.train
    return [example.source for example in read_corpus(corpus)]


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tA\nb\tB\nc\tC\n\nd\tD\ne\tE\n")
    return path


def test_context_is_the_preceding_sentences_of_the_document(tsv) -> None:
    assert read(train=str(tsv), context=2) == ["a\t", "b\ta", "c\ta b", "d\t", "e\td"]
    assert read(train=str(tsv), context=1) == ["a\t", "b\ta", "c\tb", "d\t", "e\td"]


def test_context_equals_a_brute_force_over_random_documents() -> None:
    draw = random.Random(4)
    lines = [draw.choice(["", "x y", "z", "w w w"]) for _ in range(200)]
    for size in (1, 2, 5):
        windows = [lines[begin : begin + 7] for begin in range(0, 200, 7)]
        found = [line for window in lines_in_context(windows, size, 2) for line in window]
        for number, line in enumerate(lines):
            begin = max([0, *(place + 1 for place in range(number) if not lines[place])])
            before = " ".join(lines[max(begin, number - size) : number])
            assert found[number] == (f"{line}\t{before}" if line else "")
            assert without_context(found[number]) == line


def test_a_column_names_the_document(tmp_path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tA\tone\nb\tB\tone\nc\tC\ttwo\n")
    assert read(train=str(path), context=3, document_column="column3") == ["a\t", "b\ta", "c\t"]
    with pytest.raises(InputError, match=r"pairs\.tsv:1: no 'column9', the document"):
        read(train=str(path), context=3, document_column="column9")


def test_parallel_files_end_documents_at_blank_lines_and_tabs_are_white_space(tmp_path) -> None:
    (tmp_path / "x.en").write_text("a\tb\nc\n\nd\n")
    (tmp_path / "x.de").write_text("A\nC\n\nD\n")
    assert read(train=f"{tmp_path}/x.en,{tmp_path}/x.de", context=1) == ["a b\t", "c\ta b", "d\t"]


def test_languages_stay_before_the_sentence(tmp_path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tA\tde\nb\tB\tfr\n")
    assert read(train=[{"path": str(path), "language_column": "column3"}], context=1) == ["<2de> a\t", "<2fr> b\ta"]


def test_held_out_files_have_the_context_of_the_run(tsv) -> None:
    recipe = parse(data(train=str(tsv), context=1, sources={"sentence": "text", "context": "text"}))
    (corpus,) = recipe.data.held_out(str(tsv))
    assert (corpus.context, corpus.source_columns, corpus.source_parts) == (1, 1, 2)
    plain = parse(data(train=str(tsv))).data.train[0]
    assert plain.source_parts == 1
    assert fingerprint(corpus) != fingerprint(plain)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"context": 1, "format": "text"}, "needs pairs"),
        ({"context": 1, "sources": {"sentence": "text"}}, "name the sentence and its context"),
        ({"document_column": "column1"}, "belongs to `context`"),
        ({"context": -1}, "context"),
    ],
)
def test_impossible_settings_are_refused(tsv, options, problem) -> None:
    with pytest.raises(InputError, match=problem):
        parse(data(train=str(tsv), **options))


class _Model:
    def __init__(self, context: int) -> None:
        self.recipe = parse(data(train="x.tsv", context=context))


def test_each_model_reads_what_it_was_trained_on(tsv) -> None:
    def examples(**options):
        (corpus,) = parse(data(train=str(tsv), **options)).data.train
        return group_references(list(read_corpus(corpus)), EvaluationRecipe())

    lines = examples(context=1)
    assert sources_for(_Model(1), lines) == ["a\t", "b\ta", "c\tb", "d\t", "e\td"]
    assert sources_for(_Model(0), lines) == list("abcde")
    assert sources_for(_Model(1), empty_contexts(_Model(1), lines)) == [f"{letter}\t" for letter in "abcde"]
    with pytest.raises(InputError, match="the data have none"):
        sources_for(_Model(1), examples())
    with pytest.raises(InputError, match="reads no context"):
        empty_contexts(_Model(0), lines)


def test_a_line_may_state_its_context() -> None:
    assert [*lines_in_context([["a", "b\tx"], ["c"]], 2, 2)] == [["a\t", "b\tx"], ["c\ta b"]]
    assert [*lines_in_context([["a\tA", "b\tB"]], 1, 3)] == [["a\tA\t", "b\tB\ta A"]]


def test_a_document_is_forgotten_at_its_end() -> None:
    context = DocumentContext(2)
    assert [context.add_to(line) for line in ("a", " ", "b")] == ["a\t", " ", "b\t"]
