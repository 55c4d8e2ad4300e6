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
from transduce.recipe import Corpora, Recipe, load, override, parse

SAMPLE = 20_000  # pairs looked at closely; the rest is only counted


@dataclass(frozen=True)
class Side:
    """What one side of the pairs looks like."""

    characters: float  # median of a line: one line of a whole book tells nothing about the others
    words: float  # median of a line
    alphabet: frozenset[str]
    vocabulary: int  # different words in the sample
    unseen: float  # share of words still to come that are new: words met once (Good 1953)

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
    read_all = (example for corpus in corpora for example in read(corpus, invalid, counts))
    sides = ((example.source, example.target or "") for example in read_all)
    pairs = (pair for pair in sides if pair[0].strip() and pair[1].strip())
    sample = list(islice(pairs, SAMPLE))
    more = sum(1 for _ in pairs)
    if not sample:
        files = ", ".join(str(corpus.path or corpus.source) for corpus in corpora)
        raise InputError("no pairs: one side is always empty", where=files, remedy="give lines with two sides")
    return Look(len(sample) + more, Side.of([s for s, _ in sample]), Side.of([t for _, t in sample]))


def choose(data: dict[str, Any], task: str = "generate") -> Recipe:
    """A whole recipe for the pairs in the `data` section."""
    if task not in TASKS:
        raise InputError(f"no task is called {task!r}", remedy=nearest(task, TASKS))
    given = parse({"data": data})
    seen = look(given.data.train, given.data.invalid)
    return parse({"data": data, **TASKS[task](seen)})


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
        "evaluation": {"metrics": ["accuracy"]},
    }


TASKS: dict[str, Callable[[Look], dict[str, Any]]] = {
    "generate": _generate,
    "classify": lambda seen: _label(seen, "labels", {"kind": "classifier", "pooling": "max", "dropout": 0.4}),
    "tag": lambda seen: _label(seen, "words", {"kind": "tagger", "dropout": 0.4}),
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
    chosen = choose(changes["data"], task).model_dump(mode="json")
    return parse(override(chosen, overrides), where="key=value")
