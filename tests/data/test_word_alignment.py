"""Word alignments: reading from every format, token alignment, batches, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transduce.data.annotations import AlignmentError, check_alignment, parse_alignment, token_alignment
from transduce.data.batching import AlignedBatches, Batches, DataPosition
from transduce.data.filters import Filters
from transduce.data.readers.corpus import fingerprint, read_corpus
from transduce.data.store import build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.recipe import Corpus, parse

PAIRS = [("ab c", "X YZ", "0-1 1-0"), ("d", "Q", ""), ("c c ab", "YZ", "2-0 0-0")]


def tokenizers(kind: str) -> tuple[Tokenizer, Tokenizer]:
    source, target = (Tokenizer.train([pair[side] for pair in PAIRS], kind, 300) for side in (0, 1))
    return source, target


def corpora(folder: Path) -> dict[str, Corpus]:
    """The same pairs with their links in a column, in a field and in a third file."""
    (folder / "pairs.tsv").write_text("".join("\t".join(pair) + "\n" for pair in PAIRS))
    names = ("source", "target", "links")
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(dict(zip(names, pair, strict=True))) + "\n" for pair in PAIRS)
    )
    for side, name in enumerate(names):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    return {
        "tsv": Corpus(path=str(folder / "pairs.tsv"), alignment="column3"),
        "jsonl": Corpus(path=str(folder / "pairs.jsonl"), alignment="links"),
        "parallel": Corpus(
            source=str(folder / "source"), target=str(folder / "target"), alignment=str(folder / "links")
        ),
    }


@pytest.mark.parametrize("form", ["tsv", "jsonl", "parallel"])
def test_alignments_are_read_from_every_format(form: str, tmp_path: Path) -> None:
    found = list(read_corpus(corpora(tmp_path)[form]))
    assert [(one.source, one.target, one.extra["alignment"]) for one in found] == PAIRS


def test_token_alignment_links_all_tokens_of_linked_words() -> None:
    words, chars = tokenizers("words"), tokenizers("chars")
    assert token_alignment("0-1 1-0", "ab c", "X YZ", words) == [(0, 1), (1, 0)]
    # a b _ c; X _ Y Z: white space goes with the word after it
    expected = {(s, t) for s in (0, 1) for t in (1, 2, 3)} | {(2, 0), (3, 0)}
    assert set(token_alignment("0-1 1-0", "ab c", "X YZ", chars)) == expected
    assert token_alignment("1-0", "ab\tc", "X", words) == [(2, 0)]  # place 1 is the </s> between the parts


def test_batch_contains_the_alignment_of_its_rows(tmp_path: Path) -> None:
    both = tokenizers("words")
    store = build_store([corpora(tmp_path)["tsv"]], *both, Filters(), "error", tmp_path / "stores")
    plain = Batches(store, range(3), batch_tokens=100, bucket_batches=1, seed=1)  # type: ignore[arg-type]
    batch = AlignedBatches(plain, both).at(DataPosition())
    links = batch.extra["alignment"]
    for place, row in enumerate(batch.rows):
        held = [tuple(link) for link in links.values[place][links.mask[place]].tolist()]
        assert held == parse_alignment(PAIRS[row][2])  # one word is one token here
    assert batch.select(links.mask.sum(1).argmin()[None]).extra["alignment"].values.shape == (1, 0, 2)


def test_invalid_alignments_are_reported_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(AlignmentError, match="word 2 of a target of 2 words"):
        check_alignment("0-0 1-2", "a b", "X Y")
    with pytest.raises(AlignmentError, match="1:2"):
        check_alignment("1:2", "a b", "X Y")
    file = tmp_path / "bad.tsv"
    file.write_text("a b\tX\t0-0\na\tX\t1-0\nc\tY\n")
    corpus = Corpus(path=str(file), alignment="column3")
    with pytest.raises(InputError, match=r"bad\.tsv:2: invalid alignment"):
        list(read_corpus(corpus))
    assert len(list(read_corpus(corpus, "drop"))) == 1  # the third has no links at all
    (tmp_path / "short").write_text("0-0\n")
    sides = corpora(tmp_path)["parallel"].model_copy(update={"alignment": str(tmp_path / "short")})
    with pytest.raises(InputError, match="3 lines"):
        list(read_corpus(sides))


def test_alignment_changes_the_fingerprint(tmp_path: Path) -> None:
    corpus = corpora(tmp_path)["parallel"]
    before = fingerprint(corpus)
    (tmp_path / "links").write_text("0-0\n\n\n")
    assert fingerprint(corpus) != before
    assert fingerprint(corpus.model_copy(update={"alignment": None})) != fingerprint(corpus)


def test_recipe_checks_the_requirements_of_guided_alignment() -> None:
    objective = {"objective": {"kind": "guided_alignment"}}
    with pytest.raises(InputError, match="alignment"):
        parse({"data": {"train": "a.tsv"}, "training": objective})
    linked = {"train": {"path": "a.tsv", "alignment": "column3"}}
    parse({"data": linked, "training": objective})
    with pytest.raises(InputError, match="dropout"):
        parse({"data": linked, "training": objective, "tokens": {"source": {"dropout": 0.1}}})
