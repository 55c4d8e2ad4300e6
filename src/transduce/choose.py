"""A file of pairs in, the recipe that fits it out: tokens, size, schedule and metrics by looking at the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from transduce.data.sources import Invalid, Tally, read
from transduce.errors import InputError, nearest
from transduce.evaluation.overlap import marks_spans
from transduce.flow import Example
from transduce.recipe import Corpora, Corpus, Recipe, load, override, parse
from transduce.run import Run

SAMPLE = 20_000  # pairs looked at closely; the rest is only counted


@dataclass(frozen=True)
class Side:
    """What one side of the pairs looks like."""

    characters: float  # median of a line: one line of a whole book tells nothing about the others
    words: float  # median of a line
    alphabet: frozenset[str]
    vocabulary: int  # different words in the sample
    unseen: float  # share of words still to come that are new: words met once (Good 1953)
    marks: bool = False  # its words are labels that mark spans: B-PER I-PER O

    @classmethod
    def of(cls, lines: Sequence[str]) -> Side:
        words = [line.split() for line in lines]
        counts = Counter(word for line in words for word in line)
        return cls(
            median(map(len, lines)),
            median(map(len, words)),
            frozenset("".join(lines)),
            len(counts),
            sum(count == 1 for count in counts.values()) / max(counts.total(), 1),
            marks_spans(list(counts)),
        )

    @property
    def spelt(self) -> bool:
        """Single words or short strings: what matters is their letters."""
        return self.words < 2.5 or self.characters < 25

    @property
    def symbols(self) -> bool:
        """Words from a small closed set, such as phones, actions or tags."""
        return self.words >= 2 and self.vocabulary <= 200 and self.unseen < 0.01


@dataclass(frozen=True)
class Look:
    """What a corpus looks like."""

    pairs: int
    source: Side
    target: Side

    @property
    def shared(self) -> bool:
        """Both sides are written with much the same letters."""
        both = self.source.alphabet & self.target.alphabet
        return len(both) >= 0.6 * max(len(self.source.alphabet), len(self.target.alphabet), 1)


def look(corpora: Corpora, invalid: Invalid) -> Look:
    counts = Tally()
    sides = (_sides(corpus, example) for corpus in corpora for example in read(corpus, invalid, counts))
    pairs = (pair for pair in sides if pair[0].strip() and pair[1].strip())
    sample = list(islice(pairs, SAMPLE))
    more = sum(1 for _ in pairs)
    if not sample:
        files = ", ".join(str(corpus.path or corpus.source) for corpus in corpora)
        raise InputError("no pairs: one side is always empty", where=files, remedy="give lines with two sides")
    return Look(len(sample) + more, Side.of([s for s, _ in sample]), Side.of([t for _, t in sample]))


def _sides(corpus: Corpus, example: Example) -> tuple[str, str]:
    """The parts of a source as one text, and the target; a text without a source stands for its own."""
    target = example.target or ""
    return (example.source.replace("\t", " ") if corpus.form == "pairs" else target), target


def choose(data: dict[str, Any], task: str = "generate") -> Recipe:
    """A whole recipe for the pairs in the `data` section."""
    if task not in TASKS:
        raise InputError(f"no task is called {task!r}", remedy=nearest(task, TASKS))
    parse({"data": data})  # what is wrong with it is told before anything is added
    data = {**FORMS.get(task, {}), **data}
    if task == "entail":
        data["train"] = _two_inputs(data["train"])
    given = parse({"data": data})
    seen = look(given.data.train, given.data.invalid)
    return parse({"data": data, **TASKS[task](seen)})


def _two_inputs(train: Any) -> list[dict[str, Any]]:
    """Corpora that do not say how many inputs they have, have two: what is held out follows them."""
    corpora = parse({"data": {"train": train}}).data.train
    said = [bool(corpus.model_fields_set & {"inputs", "fields"}) for corpus in corpora]
    return [
        corpus.model_dump() if known else {**corpus.model_dump(), "inputs": 2}
        for corpus, known in zip(corpora, said, strict=True)
    ]


def _generate(seen: Look) -> dict[str, Any]:
    """Pairs of texts: a decoder writes the target."""
    sentences = not (seen.source.spelt or seen.target.spelt) and not seen.target.symbols
    tokens = _tokens(seen)
    return {
        "tokens": tokens,
        "model": _transformer(seen, tokens) if sentences else _recurrent(seen),
        "training": _training(seen, sentences),
        "generation": {"beam": 5},
        "evaluation": {"metrics": _metrics(seen, sentences)},
    }


def _label(seen: Look, target: str, head: dict[str, Any]) -> dict[str, Any]:
    """Labels: an encoder alone, with one head. Words seen once are learnt as <unk>."""
    an_epoch = max(1, int(seen.pairs * (seen.source.words + 1) / 4096))
    steps = max(300, 15 * an_epoch)
    check = max(25, min(500, steps // 15))
    return {
        "tokens": {"source": {"kind": "words", "size": 30_000, "min_count": 2}, "target": {"kind": target}},
        "model": {"encoder": {"kind": "recurrent", "width": 256, "dropout": 0.4}, "head": head},
        "training": {
            "steps": steps,
            "batch_tokens": 4096,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 2e-3},
            "schedule": {"kind": "cosine", "warmup": steps // 20},
            "validate_every": check,
            "checkpoint_every": check,
            "monitor": "accuracy",
            "patience": 5,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", *_label_metrics(seen, target)]},
    }


def _label_metrics(seen: Look, target: str) -> list[str]:
    """Beside the accuracy: every label alike where there is one a line, whole spans where labels mark them."""
    if target == "labels":
        return ["macro_f1"]
    return ["span_f1"] if seen.target.marks else []


def _embed(seen: Look) -> dict[str, Any]:
    """Pairs that mean the same: one encoder for both sides, which learns to bring them together."""
    kind = _kind(seen.source, seen.pairs)
    an_epoch = max(1, int(seen.pairs * (seen.source.words + seen.target.words + 3) * 1.3 / 8192))
    steps = max(300, 20 * an_epoch)
    check = max(25, min(500, steps // 12))
    return {
        "tokens": {"source": kind, "target": kind, "shared": True},
        "model": {
            "encoder": {"kind": "recurrent", "width": 256, "dropout": 0.2},
            "head": {"kind": "embedder", "pooling": "mean"},
        },
        "training": {
            "steps": steps,
            "batch_tokens": 8192,  # a large batch has many negatives
            "objective": {"kind": "contrastive"},
            "optimiser": {"learning_rate": 2e-3},
            "schedule": {"kind": "cosine", "warmup": steps // 20},
            "validate_every": check,
            "checkpoint_every": check,
            "validate_examples": 2000,
            "monitor": "mrr",
            "patience": 6,
        },
        "evaluation": {"metrics": ["recall@1", "recall@10", "mrr"]},
    }


def _mask(seen: Look) -> dict[str, Any]:
    """Lines of text: an encoder learns to say which words are masked. The tokens are those of the tasks with labels,
    so that they may begin from it."""
    words = {"kind": "words", "size": 30_000, "min_count": 2}
    an_epoch = max(1, int(2 * seen.pairs * (seen.target.words + 1) / 8192))
    steps = int(min(100_000, max(1_000, 40 * an_epoch)))  # a token is asked for every seventh time: many epochs
    check = max(50, min(1000, steps // 15))
    return {
        "tokens": {"source": words, "target": words},
        "model": {
            "encoder": {**_transformer(seen, {"shared": True})["encoder"], "dropout": 0.1},
            "head": {"kind": "filler"},
            "tie": "target",
        },
        "training": {
            "steps": steps,
            "batch_tokens": 8192,
            "objective": {"label_smoothing": 0.0},
            "optimiser": {"learning_rate": 2e-3},
            "schedule": {"kind": "cosine", "warmup": steps // 20},
            "validate_every": check,
            "checkpoint_every": check,
            "patience": 10,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "perplexity"]},
    }


def _language(seen: Look) -> dict[str, Any]:
    """Text without a source: characters and a recurrent network for a book, pieces and a Transformer for a library."""
    characters = seen.pairs * seen.target.characters
    library = characters > 5_000_000
    tokens = {"kind": "bpe", "size": 8000} if library else {"kind": "chars", "size": 1000}
    batch = 16_384 if library else 8192
    steps = int(min(50_000, max(500, 20 * characters / (4 if library else 1) / batch)))
    check = max(25, min(1000, steps // 20))
    if library:
        width, layers, dropout = (512, 6, 0.1) if characters > 100_000_000 else (256, 4, 0.1)
        part = {"kind": "transformer", "heads": width // 64, "hidden": 4 * width}
    else:
        width, layers, dropout = 256 if characters < 500_000 else 512, 2, 0.2
        part = {"kind": "recurrent", "cell": "lstm"}
    return {
        "tokens": {"target": tokens},
        "model": {"decoder": {**part, "width": width, "layers": layers, "dropout": dropout}, "tie": "target"},
        "training": {
            "steps": steps,
            "batch_tokens": batch,
            "objective": {"kind": "cross_entropy", "label_smoothing": 0.0},
            "optimiser": {"learning_rate": 1e-3 if library else 2e-3},
            "schedule": {"kind": "cosine", "warmup": max(20, steps // 20)},
            "validate_every": check,
            "checkpoint_every": check,
            "patience": 5,
        },
        "generation": {"strategy": "sample", "beam": 1, "temperature": 0.8},
        "evaluation": {"metrics": ["perplexity", "word_perplexity", "bits_per_character"]},
    }


TASKS: dict[str, Callable[[Look], dict[str, Any]]] = {
    "generate": _generate,
    "classify": lambda seen: _label(seen, "labels", {"kind": "classifier", "pooling": "max", "dropout": 0.4}),
    "tag": lambda seen: _label(seen, "words", {"kind": "tagger", "dropout": 0.4}),
    "embed": _embed,
    "entail": lambda seen: _label(seen, "labels", {"kind": "classifier", "pooling": "max", "dropout": 0.2}),
    "mask": _mask,
    "lm": _language,
}
# What a task says of its files.
FORMS: dict[str, dict[str, Any]] = {
    "mask": {"form": "text", "noise": {"kind": "mask_tokens"}},
    "lm": {"form": "text", "passage": 128},
}


def _tokens(seen: Look) -> dict[str, Any]:
    sides = {name: _kind(side, seen.pairs) for name, side in (("source", seen.source), ("target", seen.target))}
    shared = seen.shared and sides["source"] == sides["target"] and sides["source"]["kind"] == "bpe"
    return {**sides, "shared": shared}


def _kind(side: Side, pairs: int) -> dict[str, Any]:
    if side.symbols:
        return {"kind": "words", "size": 2000}
    if side.spelt:
        return {"kind": "chars", "size": 8000}
    # Few pairs cannot teach many pieces: about one piece for every ten pairs, within reason.
    return {"kind": "bpe", "size": max(1000, min(16000, pairs // 10 // 1000 * 1000))}


def _recurrent(seen: Look) -> dict[str, Any]:
    """Two recurrent networks with attention: hard to beat on short strings and few pairs."""
    width = 128 if seen.pairs < 5_000 else 256
    dropout = 0.3 if seen.pairs < 20_000 else 0.2
    part = {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout}
    return {"encoder": {**part, "layers": 1}, "decoder": {**part, "layers": 1, "reader": "bahdanau"}}


def _transformer(seen: Look, tokens: dict[str, Any]) -> dict[str, Any]:
    """Sentences: a Transformer whose size follows the data; small corpora want small models and much dropout."""
    sizes = {50_000: (128, 4, 0.3), 500_000: (256, 4, 0.2), 5_000_000: (512, 6, 0.1)}
    width, layers, dropout = next((size for most, size in sizes.items() if seen.pairs < most), (512, 6, 0.1))
    heads = max(4, width // 64)
    part = {"kind": "transformer", "width": width, "layers": layers, "heads": heads, "hidden": 4 * width}
    return {
        "encoder": {**part, "dropout": dropout},
        "decoder": {**part, "dropout": dropout},
        "tie": "all" if tokens["shared"] else "target",
    }


def _training(seen: Look, sentences: bool) -> dict[str, Any]:
    tokens_a_pair = (
        (seen.source.words + seen.target.words) * 1.3
        if sentences
        else (seen.source.characters + (seen.target.words if seen.target.symbols else seen.target.characters))
    )
    batch = 8192 if sentences else 4096
    an_epoch = max(1, int(seen.pairs * tokens_a_pair / batch))
    steps = int(min(100_000, max(1_000, 30 * an_epoch)))
    check = max(50, min(1000, an_epoch, steps // 10))
    rate = 2e-3 if sentences else 3e-3
    return {
        "steps": steps,
        "batch_tokens": batch,
        "optimiser": {"learning_rate": rate},
        "schedule": {"kind": "inverse_sqrt" if sentences else "cosine", "warmup": max(20, min(2000, steps // 20))},
        "validate_every": check,
        "checkpoint_every": check,
        # Not the exact matches: while a hard task has none yet, they show no progress and patience runs out.
        "monitor": _metrics(seen, sentences)[0 if sentences else 1],
        "patience": 10,
        "average": 5 if sentences else 1,
    }


def _metrics(seen: Look, sentences: bool) -> list[str]:
    if sentences:
        return ["bleu", "chrf"]
    return ["exact", "wer"] if seen.target.symbols else ["exact", "cer"]


def recipe_for(source: str, overrides: Sequence[str] = (), task: str = "generate") -> Recipe:
    """A recipe file as it is, or the recipe chosen for a file of pairs; with `key=value` changes on top."""
    if Path(source).suffix in (".yaml", ".yml"):
        return load(source, overrides)
    changes = override({"data": {"train": source}}, overrides)
    chosen = _begun(choose(changes["data"], task).model_dump(mode="json"), changes.get("init"))
    return parse(override(chosen, overrides), where="key=value")


def _begun(chosen: dict[str, Any], init: Any) -> dict[str, Any]:
    """The tokens and parts of the run that is begun from: weights are taken where both are the same."""
    given = init if isinstance(init, dict) else {}
    folder = given.get("model") or given.get("encoder")
    if not isinstance(folder, str):
        return chosen
    origin = Run(Path(folder)).recipe()
    tokens, model = origin.tokens.model_dump(mode="json"), origin.model.model_dump(mode="json")
    if origin.data.form == "text":  # one vocabulary, that of its only side
        tokens = {**tokens, "source": tokens["target"], "shared": True}
    joined = given.get("model") is not None and chosen["model"]["head"] is None and model["decoder"] is not None
    if joined and model["encoder"] is not None:
        return {**chosen, "tokens": tokens, "model": model}
    if model["encoder"] is not None:
        chosen["model"]["encoder"], chosen["tokens"]["source"] = model["encoder"], tokens["source"]
        if chosen["data"]["form"] == "text":
            chosen["tokens"]["target"] = tokens["source"]
    return chosen
