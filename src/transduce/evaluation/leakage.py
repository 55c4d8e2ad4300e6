"""Leakage: test examples that also occur in the training data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from transduce.data.readers.corpus import Invalid, read_corpus
from transduce.data.readers.formats import TEXT, TEXT_KINDS
from transduce.flow import Example
from transduce.recipe import Corpora, DataRecipe


@dataclass(frozen=True)
class Leakage:
    """Counts of test examples: all of them, and those whose pair, source or target is in the training data, exactly."""

    examples: int
    pairs: int
    sources: int  # 0 for data without a source
    targets: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def count_leakage(train: Iterable[Example], test: Iterable[Example]) -> Leakage:
    """The leakage between two sets. Memory grows with the test set only."""
    wanted = [(example.source, example.target or "") for example in test]
    pairs, sources, targets = set(wanted), {source for source, _ in wanted}, {target for _, target in wanted}
    found_pairs, found_sources, found_targets = set[tuple[str, str]](), set[str](), set[str]()
    for example in train:
        source, target = example.source, example.target or ""
        if source in sources:
            found_sources.add(source)
        if target in targets:
            found_targets.add(target)
        if (source, target) in pairs:
            found_pairs.add((source, target))
    return Leakage(
        len(wanted),
        sum(pair in found_pairs for pair in wanted),
        sum(source != "" and source in found_sources for source, _ in wanted),
        sum(target in found_targets for _, target in wanted),
    )


def recipe_leakage(data: DataRecipe) -> Leakage | None:
    """The leakage between the training and the test corpora of a recipe, or its development corpora without a test set.

    None where the recipe names no held-out corpora. Files are compared by their content.
    """
    held_out = data.test or data.dev
    if not held_out:
        return None
    return count_leakage(_examples(data.train, data.invalid), _examples(held_out, data.invalid))


def _examples(corpora: Corpora, invalid: Invalid) -> Iterable[Example]:
    for corpus in corpora:
        for example in read_corpus(corpus, invalid):
            parts = zip(example.source.split("\t"), corpus.modalities or (TEXT,) * corpus.source_columns, strict=False)
            yield Example(
                "\t".join(part if kind in TEXT_KINDS else _content(part) for part, kind in parts), example.target
            )


def _content(name: str) -> str:
    """The digest of a file. A row of an array file (`frames.npz#17`) has its name."""
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else name
