"""Inflection: recognition of lemma, form and features in a file of three columns, and a recipe for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transduce.autoconfig.sizes import Chosen, MeasuredNetwork, TimeBudget, affordable, training_for
from transduce.autoconfig.statistics import CorpusStatistics
from transduce.data.readers.corpus import Invalid, read_corpus
from transduce.data.readers.files import TAGS, TEXT, corpus_format
from transduce.data.tokenizers.vocabulary import split_tags
from transduce.recipe import Corpus, parse

SAMPLE = 1000  # lines that are looked at
ALMOST_ALL = 0.95
UNIMORPH = re.compile(r"[A-Z0-9][^\s;|]*(;[^\s;|]+)*")  # V;IND;3;SG, or a part of speech alone
SOURCES = {"lemma": {"kind": TEXT}, "features": {"kind": TAGS}}
ORDERS = {3: ("column1", "column3", "column2"), 2: ("column1", "column2", "column3")}  # lemma, features, form
CHARACTERS = {"kind": "chars", "size": 8000}
PLAIN = {
    "kind": "cross_entropy",
    "label_smoothing": Chosen(0.0, "smoothing would ask an edit transducer for the end before the lemma is read"),
}
BATCH_TOKENS, EPOCHS = 1024, 60
FEW_FORMS = 3_000  # below this many examples there are artificial ones
MANY_FORMS = 5_000  # from this many on a pointer-generator
ARTIFICIAL_FORMS, ARTIFICIAL_EPOCHS = 10_000, 20


@dataclass(frozen=True)
class InflectionTable:
    """Where a file has its lemmas, features and forms, and how that was seen."""

    columns: tuple[str, ...]  # lemma, features, form
    reason: str


def inflection_table(corpus: Corpus, invalid: Invalid) -> InflectionTable | None:
    """The columns of a file of lemmas, forms and features; None: it does not look like one.

    SIGMORPHON 2016 to 2020 and UniMorph write lemma, form, features; from 2021 on lemma, features, form.
    """
    if corpus_format(corpus) != "tsv" or corpus.format != "pairs" or corpus.modalities:
        return None
    lines = [(one.target or "", one.extra.get("column3", "")) for one in islice(read_corpus(corpus, invalid), SAMPLE)]
    columns = {number: cells for number, cells in enumerate(zip(*lines, strict=True), 2) if _are_tags(cells)}
    if len(columns) != 1:
        return None
    (number, cells), tags = next(iter(columns.items())), set[str]()
    for cell in cells:
        tags.update(split_tags(cell))
    order = "lemma, form, features" if number == 3 else "lemma, features, form"
    return InflectionTable(
        ORDERS[number], f"column {number} holds {len(tags)} tags, as in {cells[0]}: lines are read as {order}"
    )


def _are_tags(cells: tuple[str, ...]) -> bool:
    """Whether almost all cells are features of the UniMorph schema, most of them several."""
    matching = sum(UNIMORPH.fullmatch(cell) is not None for cell in cells)
    several = sum(";" in cell for cell in cells)
    return matching >= ALMOST_ALL * len(cells) and several >= len(cells) / 2


def inflection_data(data: Mapping[str, Any], task: str) -> tuple[dict[str, Any], str]:
    """The data section with lemma and features as two sources, and the reason; unchanged where the data are no table.

    With `--task inflect` the second column is taken for the features, unless the third looks like them.
    """
    given = parse({"data": data}).data
    stated = any(corpus.model_fields_set & {"source_columns", "columns"} for corpus in given.train)
    if task not in ("generate", "inflect") or stated or given.sources or not given.train:
        return dict(data), ""
    found = inflection_table(given.train[0], given.invalid)
    if found is None and task == "inflect":
        found = InflectionTable(ORDERS[2], "lines are read as lemma, features, form")
    if found is None:
        return dict(data), ""
    train = [
        {**corpus.model_dump(exclude_unset=True), "columns": list(found.columns), "source_columns": 2}
        for corpus in given.train
    ]
    return {**data, "train": train, "sources": SOURCES}, found.reason


def inflect(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """From lemma and features to a form; each feature is one token."""
    artificial = ARTIFICIAL_FORMS if statistics.pairs < FEW_FORMS else 0
    candidates = (*([POINTER] if statistics.pairs >= MANY_FORMS else []), _edits(statistics, artificial))
    candidate = affordable(candidates, budget)
    training = training_for(candidate, "cer", budget)
    return {
        "data": {"augmentation": _hallucination(artificial)} if artificial else {},
        "tokens": {"source": CHARACTERS, "target": CHARACTERS, "shared": True},
        "model": {**candidate.model, "encoder": Chosen(candidate.model["encoder"], candidate.evidence)},
        "training": training if candidate is POINTER else {**training, "objective": PLAIN},
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["exact", "cer"], "references": "by_source"},
    }


def _with_features(lemma: Mapping[str, Any]) -> dict[str, Any]:
    """An encoder of the lemma, beside which each feature is a row."""
    features = {"kind": "identity", "width": lemma["width"], "dropout": lemma["dropout"]}
    return {"kind": "multi_source", "width": lemma["width"], "parts": {"lemma": lemma, "features": features}}


def _edits(statistics: CorpusStatistics, artificial: int) -> MeasuredNetwork:
    """An edit transducer for a table of this size, with artificial examples beside it."""
    width = 96 if statistics.pairs < 500 else 128 if statistics.pairs < MANY_FORMS else 256
    part = {"width": width, "dropout": 0.4 if statistics.pairs < 500 else 0.3}
    model = {
        "encoder": _with_features({"kind": "recurrent", "cell": "lstm", **part}),
        "decoder": {"kind": "edit_transducer", **part},
    }
    examples = max(EPOCHS * statistics.pairs, ARTIFICIAL_EPOCHS * (statistics.pairs + artificial))
    tokens = examples * (statistics.source.characters + statistics.target.characters)
    steps = int(min(30_000, max(1_000, tokens / BATCH_TOKENS)))
    reason = "a transducer that edits the characters of the lemma, given one token for each feature"
    return MeasuredNetwork(model, steps, BATCH_TOKENS, 2e-3, 150, reason, measured=False, label_smoothing=0.0)


_POINTER_PART = {"kind": "transformer", "width": 256, "layers": 4, "heads": 4, "ff_width": 1024, "dropout": 0.3}
POINTER = MeasuredNetwork(
    {
        "encoder": _with_features({**_POINTER_PART, "position": "rotary"}),
        "decoder": {**_POINTER_PART, "position": "rotary"},
        "tie": "target",
        "copy": {"source": "lemma"},
    },
    8_000,
    4096,
    1e-3,
    480,
    "a pointer-generator, the best network of the grid for 10,000 inflected forms",
    ("inflect high", "transformer 256 x 4, rotary, copying"),
)


def _hallucination(examples: int) -> Chosen:
    """Artificial examples for a small table."""
    reason = f"artificial lemmas: fewer than {FEW_FORMS:,} examples teach their own stems (not measured)"
    return Chosen({"kind": "hallucination", "examples": examples}, reason)
