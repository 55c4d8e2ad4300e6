"""Tasks and their recipes; the recipes of text-to-text tasks and of inflection."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transduce.autoconfig.media import (
    LONGEST,
    PICTURED,
    PICTURES,
    QUESTION_SOURCES,
    VIDEO_SOURCE,
    TaskRecipe,
    ask,
    audio_source,
    caption_videos,
    classify_audio,
    classify_videos,
    clip_source,
    draw,
    transcribe,
)
from transduce.autoconfig.sizes import (
    GRID,
    Chosen,
    MeasuredNetwork,
    TimeBudget,
    TrainingSettings,
    affordable,
    cosine,
    letters_of,
    metrics_for,
    pairs_recipe,
    pieces_for,
    share,
    tokens_for,
    tokens_of,
    training_for,
    transformer,
    usual,
)
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
UNSMOOTHED = {
    "kind": "cross_entropy",
    "label_smoothing": Chosen(0.0, "smoothing would ask an edit transducer for the end before the lemma is read"),
}
BATCH_TOKENS, EPOCHS = 1024, 60
VERY_FEW_FORMS = 500  # below this many examples the network that was measured with 100
FEW_FORMS = 3_000  # below this many examples there are artificial ones
MANY_FORMS = 5_000  # from this many on a pointer-generator
ARTIFICIAL_FORMS = 10_000
VARIED_STEMS = {"keep_vowels": True, "replace_edges": True, "exchange": 0.7, "citations": 0.1}
COVERAGE = {"kind": "attention_penalty", "penalty": "coverage", "weight": 0.3, "label_smoothing": 0.0}
PLAIN = {"kind": "cross_entropy", "label_smoothing": 0.0}


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
    few = statistics.pairs < FEW_FORMS
    candidates = (*([POINTER] if statistics.pairs >= MANY_FORMS else []), _edits(statistics))
    candidate = affordable(candidates, budget)
    training = training_for(candidate.training, "cer", budget)
    if few:
        training["monitor"] = Chosen("exact", "a few outputs that repeat themselves would decide the error rate")
    return {
        "data": {"augmentation": _hallucination(candidate)} if few else {},
        "tokens": {"source": CHARACTERS, "target": CHARACTERS, "shared": True},
        "model": {**candidate.model, "encoder": Chosen(candidate.model["encoder"], candidate.evidence)},
        "training": training if candidate is POINTER else {**training, "objective": UNSMOOTHED},
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["exact", "cer"], "references": "by_source"},
    }


def _with_features(lemma: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    """An encoder of the lemma, beside which each feature is a row."""
    features = {"kind": "identity", "width": lemma["width"], "dropout": dropout}
    return {"kind": "multi_source", "width": lemma["width"], "parts": {"lemma": lemma, "features": features}}


EDITS = (
    "a transducer that edits the characters of the lemma, given one token for each feature, with all features at every "
    "step"
)


def _edit_transducer(
    width: int, dropout: float, steps: int, forms: str = "", record: tuple[str, str] = ("", "")
) -> MeasuredNetwork:
    """An edit transducer whose recurrent layers read all features at every step; features are never dropped.

    `forms`: the number of examples with which it is the best network of the grid; none: it is not in the grid.
    """
    part = {"width": width, "dropout": dropout}
    model = {
        "encoder": _with_features({"kind": "recurrent", "cell": "lstm", **part}, dropout=0.0),
        "decoder": {"kind": "edit_transducer", "condition_input": True, **part},
    }
    reason = f"{EDITS}, the best network of the grid for {forms} inflected forms" if forms else EDITS
    return MeasuredNetwork(
        model,
        TrainingSettings(steps, BATCH_TOKENS, 2e-3, measured=bool(forms), label_smoothing=0.0, bf16=width > 192),
        50,
        reason,
        record,
        bf16_microseconds=None if width <= 192 else 46,
    )


VARIED = "exchange, edges, citations"
LOW_EDITS = _edit_transducer(96, 0.4, 1_000, "100", ("inflect low", f"conditioned, {VARIED}"))
MEDIUM_EDITS = _edit_transducer(192, 0.4, 3_000, "1,000", ("inflect medium", f"conditioned 192, dropout 0.4, {VARIED}"))


def _edits(statistics: CorpusStatistics) -> MeasuredNetwork:
    """An edit transducer for a table of this size."""
    if statistics.pairs < FEW_FORMS:
        return LOW_EDITS if statistics.pairs < VERY_FEW_FORMS else MEDIUM_EDITS
    tokens = EPOCHS * statistics.pairs * (statistics.source.characters + statistics.target.characters)
    steps = int(min(30_000, max(1_000, tokens / BATCH_TOKENS)))
    return _edit_transducer(192 if statistics.pairs < MANY_FORMS else 256, 0.3, steps)


_POINTER_PART = {"kind": "transformer", "width": 256, "layers": 4, "heads": 4, "ff_width": 1024, "dropout": 0.3}
POINTER = MeasuredNetwork(
    {
        "encoder": _with_features({**_POINTER_PART, "position": "rotary"}, dropout=0.3),
        "decoder": {**_POINTER_PART, "position": "rotary"},
        "tie": "target",
        "copy": {"source": "lemma"},
    },
    TrainingSettings(8_000, 4096, 1e-3),
    264,
    "a pointer-generator, the best network of the grid for 10,000 inflected forms",
    ("inflect high", "transformer 256 x 4, rotary, copying"),
    bf16_microseconds=107,
)


def _hallucination(candidate: MeasuredNetwork) -> Chosen:
    """Artificial examples for a small table."""
    reason = (
        f"artificial lemmas: fewer than {FEW_FORMS:,} examples teach their own stems; stems get beginnings of other "
        "lemmas and other consonants, vowels stay, for suffixes may depend on them, and lemmas are their own citation "
        f"forms ({GRID}: {', '.join(candidate.record)})"
    )
    return Chosen({"kind": "hallucination", "examples": ARTIFICIAL_FORMS, **VARIED_STEMS}, reason)


def _translate(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """Sentence-level model: BPE and a Transformer."""
    kind = Chosen(pieces_for(statistics.pairs), "translation: a piece for every three pairs, up to 8,000")
    tokens = {"source": kind, "target": kind, "shared": share(statistics.shared, statistics)}
    return pairs_recipe(statistics, tokens, ["bleu", "chrf"], True, budget)


def _spell(target: dict[str, Any], rate: str) -> TaskRecipe:
    """Character-level model; a source may have several references."""

    def recipe(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
        by_task, pairs = "the task: letters to letters or phones", statistics.pairs
        letters = letters_of(statistics.target, pairs, by_task) if target == CHARACTERS else Chosen(target, by_task)
        tokens = {"source": letters_of(statistics.source, pairs, by_task), "target": letters, "shared": False}
        chosen = pairs_recipe(statistics, tokens, ["exact", rate], False, budget, monotonic=True)
        return {**chosen, "evaluation": {**chosen["evaluation"], "references": "by_source"}}

    return recipe


def _take_over(
    statistics: CorpusStatistics,
    metrics: list[str],
    model: dict[str, Any],
    objective: dict[str, Any],
    budget: TimeBudget,
) -> dict[str, Any]:
    """Outputs that reuse source words: a shared vocabulary of words, placeholders for rare words, copying."""
    words = {"kind": "words", "size": 30_000, "min_count": 5 if statistics.pairs >= 2000 else 2}
    an_epoch = max(1, int(statistics.pairs * (statistics.source.words + statistics.target.words + 3) / 4096))
    steps = int(min(100_000, max(600, 20 * an_epoch)))
    settings = usual(steps, 4096, 4e-3 if statistics.pairs < 20_000 else 2e-3)
    return {
        "tokens": {"source": words, "target": words, "shared": True, "oov_placeholders": 50},
        "model": {**model, "copy": Chosen({}, "rare words and names of the source are copied into the output")},
        "training": {**training_for(settings, metrics[-1], budget), "objective": objective},
        "generation": {"beam": 5},
        "evaluation": {"metrics": metrics, "references": "by_source"},
    }


def _reader(statistics: CorpusStatistics) -> dict[str, Any]:
    """Recurrent networks."""
    width, dropout = (128, 0.1) if statistics.pairs < 20_000 else (256, 0.2)
    part = {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout}
    decoder = {**part, "context": {"kind": "luong", "input_feeding": False}}
    return {"encoder": part, "decoder": Chosen(decoder, "its attention selects the place that is copied from")}


def _listener(statistics: CorpusStatistics) -> dict[str, Any]:
    """A Transformer."""
    width, dropout = (64, 0.1) if statistics.pairs < 20_000 else (256, 0.2)
    part = {"kind": "transformer", "width": width, "heads": 4, "ff_width": 2 * width, "dropout": dropout}
    encoder = Chosen({**part, "layers": 2}, "a Transformer attends to all turns of a dialogue at once")
    return {"encoder": encoder, "decoder": {**part, "layers": 1}}


# Tasks whose network is the best that the time allows.
PAIRS: dict[str, TaskRecipe] = {
    "translate": _translate,
    "pronounce": _spell({"kind": "words", "size": 1000}, "per"),
    "transliterate": _spell(CHARACTERS, "cer"),
    "inflect": inflect,
}
TEXTS: dict[str, TaskRecipe] = {
    "summarise": lambda statistics, budget: _take_over(
        statistics, ["rouge1", "rouge2", "rougeL"], _reader(statistics), COVERAGE, budget
    ),
    "answer": lambda statistics, budget: _take_over(
        statistics, ["exact", "token_f1"], _reader(statistics), PLAIN, budget
    ),
    "converse": lambda statistics, budget: _take_over(
        statistics, ["exact", "bleu"], _listener(statistics), PLAIN, budget
    ),
    "describe": lambda statistics, budget: _take_over(statistics, ["chrf", "bleu"], _reader(statistics), PLAIN, budget),
}


def _generate(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """Text to text."""
    sentences = (
        not (statistics.source.character_level or statistics.target.character_level)
        and not statistics.target.closed_vocabulary
    )
    metrics = metrics_for(statistics, sentences)
    return pairs_recipe(statistics, tokens_for(statistics), metrics, sentences, budget)


def _label(statistics: CorpusStatistics, target: str, head: dict[str, Any], budget: TimeBudget) -> dict[str, Any]:
    """Labels: an encoder with a head. Words with count one are trained as <unk>."""
    an_epoch = max(1, int(statistics.pairs * (statistics.source.words + 1) / 4096))
    steps = max(300, 15 * an_epoch)
    check = max(25, min(500, steps // 15))
    encoder = {"kind": "recurrent", "width": 256, "dropout": 0.4}
    words = {"kind": "words", "size": 30_000, "min_count": 2}
    return {
        "tokens": {
            "source": Chosen(words, "whole words; those that occur once are learned as <unk>"),
            "target": {"kind": target},
        },
        "model": {
            "encoder": Chosen(encoder, "a bidirectional recurrent network, which few lines suffice for"),
            "head": head,
        },
        "training": {
            **cosine(steps, check, 2e-3, "15 passes over the pairs, at least 300 updates"),
            "batch_tokens": 4096,
            "objective": {"label_smoothing": 0.0},
            "validate_examples": 2000,
            "monitor": "accuracy",
            "patience": Chosen(5, "validations without improvement"),
            "minutes": budget.given,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", *_label_metrics(statistics, target)]},
    }


def _entail(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """A label for two texts, which one encoder reads with </s> between them."""
    chosen = _label(statistics, "labels", {"kind": "classifier", "pooling": "max", "dropout": 0.1}, budget)
    width, layers = (128, 2) if statistics.pairs < 50_000 else (256, 4)
    part = {"kind": "transformer", "width": width, "layers": layers, "heads": 4, "ff_width": 2 * width, "dropout": 0.1}
    an_epoch = max(1, int(statistics.pairs * (statistics.source.words + 2) / 4096))
    return {
        **chosen,
        "model": {**chosen["model"], "encoder": Chosen(part, COMPARING)},
        "training": {
            **training_for(usual(max(1_200, 15 * an_epoch), 4096, 1e-3), "accuracy", budget),
            "validate_examples": 2000,
        },
    }


COMPARING = (
    "self-attention compares the words of one text with those of the other, which a recurrent network did not learn "
    "(benchmarks/results/defaults.jsonl: entailment)"
)


def _tag(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """A label for each word, from its spelling, its own vector and its context."""
    chosen = _label(statistics, "words", {"kind": "tagger", "dropout": 0.4}, budget)
    encoder = {"kind": "character_aware", "width": 256, "embedding_width": 128, "dropout": 0.4}
    spec = {"kind": "bpe", "size": 2000, "normalisation": ["spaces"]}  # two spaces are no word
    pieces = Chosen(spec, "pieces spell words that are new")
    return {
        **chosen,
        "tokens": {**chosen["tokens"], "source": pieces},
        "model": {**chosen["model"], "encoder": Chosen(encoder, SPELLING)},
        "training": {**chosen["training"], "batch_tokens": Chosen(6000, "as in the record of this network")},
    }


SPELLING = (
    "words composed from their pieces, which are tagged better than words of a vocabulary "
    f"({GRID}: tag, character-aware, 2,000 pieces)"
)


def _label_metrics(statistics: CorpusStatistics, target: str) -> list[str]:
    """Metrics beside accuracy: macro F1 for one label a line, span F1 for BIO tags."""
    if target == "labels":
        return ["macro_f1"]
    return ["span_f1"] if statistics.target.bio_tags else []


def _embed(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """Sentence embeddings: one encoder for both sides, trained with a contrastive objective."""
    kind = tokens_of(statistics.source, statistics.pairs).value
    an_epoch = max(1, int(statistics.pairs * (statistics.source.words + statistics.target.words + 3) * 1.3 / 8192))
    steps = max(300, 20 * an_epoch)
    check = max(25, min(500, steps // 12))
    encoder = {"kind": "recurrent", "width": 256, "dropout": 0.2}
    return {
        "tokens": {"source": kind, "target": kind, "shared": True},
        "model": {
            "encoder": Chosen(encoder, "a bidirectional recurrent network, whose rows are averaged"),
            "head": {"kind": "embedder", "pooling": "mean"},
        },
        "training": {
            **cosine(steps, check, 2e-3, "20 passes over the pairs, at least 300 updates"),
            "batch_tokens": Chosen(8192, "a large batch has many negatives"),
            "objective": {"kind": "contrastive"},
            "validate_examples": 2000,
            "monitor": "mrr",
            "patience": Chosen(6, "validations without improvement"),
            "minutes": budget.given,
        },
        "evaluation": {"metrics": ["recall@1", "recall@10", "mrr"]},
    }


def _mask(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """Masked language model. Its tokenizer is that of the label tasks, which can be initialised from it."""
    words = {"kind": "words", "size": 30_000, "min_count": 2}
    an_epoch = max(1, int(2 * statistics.pairs * (statistics.target.words + 1) / 8192))
    # A seventh of the tokens is predicted per epoch, so many epochs.
    steps = int(min(100_000, max(1_000, 40 * an_epoch)))
    return {
        "tokens": {"source": words, "target": words},
        "model": {
            "encoder": Chosen(transformer(statistics), "a Transformer of a width that the amount of text can train"),
            "head": {"kind": "mlm"},
            "tie": "target",
        },
        "training": training_for(usual(steps, 8192, 2e-3), "loss", budget),
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "perplexity"]},
    }


def _language(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """Language model: characters and a recurrent network for a book, BPE and a Transformer for more text."""
    characters = statistics.pairs * statistics.target.characters
    library = characters > 5_000_000
    tokens = {"kind": "bpe", "size": 8000} if library else {"kind": "chars", "size": 1000}
    batch = 16_384 if library else 8192
    steps = int(min(50_000, max(500, 20 * characters / (4 if library else 1) / batch)))
    if library:
        width, layers, dropout = (512, 6, 0.1) if characters > 100_000_000 else (256, 4, 0.1)
        part = {"kind": "transformer", "heads": width // 64, "ff_width": 4 * width}
        reason = "a Transformer over pieces, for more than 5 million characters"
    else:
        width, layers, dropout = 256 if characters < 500_000 else 512, 2, 0.2
        part = {"kind": "recurrent", "cell": "lstm"}
        reason = "a recurrent network over characters, for less than 5 million of them"
    decoder = {**part, "width": width, "layers": layers, "dropout": dropout}
    return {
        "tokens": {"target": tokens},
        "model": {"decoder": Chosen(decoder, reason), "tie": "target"},
        "training": training_for(usual(steps, batch, 1e-3 if library else 2e-3), "loss", budget),
        "generation": {"strategy": "sample", "beam": 1, "temperature": 0.8},
        "evaluation": {"metrics": ["perplexity", "word_perplexity", "bits_per_character"]},
    }


MONOTONIC_TASKS = ("pronounce", "transliterate")  # the output follows the order of the input
TASK_RECIPES: dict[str, TaskRecipe] = {
    "generate": _generate,
    **PAIRS,
    **TEXTS,
    "classify": lambda statistics, budget: _label(
        statistics, "labels", {"kind": "classifier", "pooling": "max", "dropout": 0.4}, budget
    ),
    "tag": _tag,
    "embed": _embed,
    "entail": _entail,
    "mask": _mask,
    "lm": _language,
    **PICTURES,
    "vqa": ask,
    "caption-videos": caption_videos,
    "classify-videos": classify_videos,
    "draw": draw,
    "transcribe": transcribe,
    "classify-audio": classify_audio,
}

# The `data` section of a task; tasks of recordings derive it from the first file.
DATA_SECTIONS: dict[str, dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mask": {"format": "text", "noise": {"kind": "mask_tokens"}},
    "lm": {"format": "text", "block_size": 128},
    "summarise": {"max_length": 1000},
    **PICTURED,
    "vqa": QUESTION_SOURCES,
    "caption-videos": VIDEO_SOURCE,
    "classify-videos": VIDEO_SOURCE,
    "draw": {"max_length": LONGEST - 100},
    "transcribe": audio_source,
    "classify-audio": clip_source,
}
# Number of leading TSV columns that form the source; None: all but the last.
SOURCE_COLUMNS: dict[str, int | None] = {"entail": 2, "answer": 2, "converse": None}
