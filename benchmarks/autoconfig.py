"""Grid of recipes over data sets: the evidence behind the recipes that `transduce train` chooses.

Every data set is trained with every variant and seed; several trainings run at the same time, each in a process of its
own. Then ensembles of these trainings are scored. Scores are those of the development set: test sets are never read
here. A run that is stopped keeps what it has.

    python -m benchmarks.autoconfig --data DATA --grid characters --jobs 10 --minutes 9
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

LOW, MEDIUM = ("ice", "khm", "lav", "slv"), ("bul", "hbs_latn")  # the other languages are held out
INFLECTION = ("russian", "hungarian")  # Hebrew and Spanish are held out
SIZES = ("low", "medium", "high")
LANGUAGES = ("en", "de")  # of Multi30k
METRICS = ("exact", "bleu", "accuracy")  # the first that a data set has is the one of the tables


@dataclass(frozen=True)
class DataSet:
    name: str
    group: str  # the scores of a group are averaged
    task: str
    train: str
    dev: str
    metric: str
    steps: int


@dataclass(frozen=True)
class Variant:
    name: str
    model: dict[str, Any] | None = None  # None: the recipe that is chosen
    training: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()  # key=value changes of the recipe that is chosen
    groups: tuple[str, ...] = ()  # of data sets; none: all


@dataclass(frozen=True)
class Trial:
    """One training: a data set, a variant, a seed, and what was seen."""

    dataset: str
    group: str
    variant: str
    seed: int
    scores: dict[str, float]
    steps: int
    seconds: float
    parameters: int
    device: str = ""
    failed: str = ""


def character_sets(data: Path, folder: Path) -> Iterator[DataSet]:
    """Pronunciation of 800 and 8,000 words, and inflection from 100, 1,000 and 10,000 examples."""
    g2p = data / "g2p2021"
    for size, languages, steps in (("low", LOW, 2500), ("medium", MEDIUM, 6000)):
        for language in languages:
            stem = g2p / f"{size}_{language}"
            yield DataSet(
                f"g2p-{language}",
                f"g2p {size}",
                "pronounce",
                f"{stem}_train.tsv",
                f"{stem}_dev.tsv",
                "exact",
                steps,
            )
    for language in INFLECTION:
        dev = _reordered(data / "inflection2017" / f"{language}-dev.tsv", folder)
        for size, steps in zip(SIZES, (1500, 3000, 8000), strict=True):
            train = _reordered(data / "inflection2017" / f"{language}-train-{size}.tsv", folder)
            yield DataSet(f"inflect-{language}-{size}", f"inflect {size}", "inflect", train, dev, "exact", steps)


def sentence_sets(data: Path, folder: Path) -> Iterator[DataSet]:
    """Multi30k from English to German: lower-cased, tokenised text, its pieces joined to words."""
    files = {}
    for name in ("train", "val"):
        sides = [
            (data / "multi30k" / "bpe" / f"{name}.{language}").read_text(encoding="utf-8") for language in LANGUAGES
        ]
        pairs = zip(*(side.replace("@@ ", "").splitlines() for side in sides), strict=True)
        files[name] = folder / f"multi30k-{name}.tsv"
        files[name].write_text("".join("\t".join(pair) + "\n" for pair in pairs), encoding="utf-8")
    yield DataSet("multi30k-en-de", "sentences", "translate", str(files["train"]), str(files["val"]), "bleu", 8000)


def budget_sets(data: Path, folder: Path) -> Iterator[DataSet]:
    """The same sentences, for networks that a CPU trains in the 10 minutes that `transduce train` takes by default."""
    for one in sentence_sets(data, folder):
        yield replace(one, group="sentences, 10 CPU minutes")


def label_sets(data: Path, folder: Path) -> Iterator[DataSet]:
    """Universal tags of UD English EWT, and the sentiment of SST-2."""
    for name, task in (("ud_ewt", "tag"), ("sst2", "classify")):
        train, dev = (str(data / name / f"{part}.tsv") for part in ("train", "dev"))
        yield DataSet(f"{task}-{name}", task, task, train, dev, "accuracy", 700)
    train, dev = (str(data / "sst2" / f"{part}.tsv") for part in ("train", "dev"))
    if (encoder := data / "sst2" / "minilm").is_dir():  # all-MiniLM-L6-v2
        yield DataSet(f"classify-{encoder.name}", "fine-tune", "classify", train, dev, "accuracy", 700)


def _reordered(path: Path, folder: Path) -> str:
    """Lemma, form, features -> lemma, features, form."""
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    target = folder / path.name
    target.write_text("".join(f"{lemma}\t{tags}\t{form}\n" for lemma, form, tags in lines), encoding="utf-8")
    return str(target)


def _recurrent(cell: str, width: int, layers: int, dropout: float, context: Any = "bahdanau") -> dict[str, Any]:
    part = {"kind": "recurrent", "cell": cell, "width": width, "layers": layers, "dropout": dropout}
    return {"encoder": part, "decoder": {**part, "context": context}}


def _transformer(width: int, layers: int, dropout: float, **options: Any) -> dict[str, Any]:
    part = {
        "kind": "transformer",
        "width": width,
        "layers": layers,
        "heads": 4,
        "ff_width": 4 * width,
        "dropout": dropout,
        **options,
    }
    return {"encoder": part, "decoder": part, "tie": "target"}


def _with_features(model: dict[str, Any]) -> dict[str, Any]:
    """The same model for inflection: its encoder reads the lemma, and each feature is a row beside it."""
    encoder = model["encoder"]
    if encoder["kind"] == "multi_source":
        return model
    features = {"kind": "identity", "width": encoder["width"], "dropout": encoder["dropout"]}
    parts = {"lemma": encoder, "features": features}
    return {**model, "encoder": {"kind": "multi_source", "width": encoder["width"], "parts": parts}}


SMOOTH = {"objective": {"kind": "cross_entropy", "label_smoothing": 0.1}}


def _schedule(rate: float, batch: int, **more: Any) -> dict[str, Any]:
    return {"optimiser": {"learning_rate": rate}, "batch_tokens": batch, **SMOOTH, **more}


def _hard(layers: int, dropout: float, **options: Any) -> dict[str, Any]:
    part = {"width": 256, "cell": "lstm", "dropout": dropout}
    encoder = {"kind": "recurrent", "layers": layers, **part}
    return {"encoder": encoder, "decoder": {"kind": "hard_attention", "layers": 1, **part, **options}}


def _edit(layers: int, dropout: float, *, copies: bool = False, width: int = 256) -> dict[str, Any]:
    part = {"width": width, "cell": "lstm", "dropout": dropout}
    encoder = {"kind": "recurrent", "layers": layers, **part}
    return {"encoder": encoder, "decoder": {"kind": "edit_transducer", "copy_action": copies, **part}}


def _conditioned(width: int, dropout: float) -> dict[str, Any]:
    """An edit transducer whose decoder reads the features at every step; features are never dropped."""
    part = {"width": width, "cell": "lstm", "dropout": dropout}
    parts = {
        "lemma": {"kind": "recurrent", **part},
        "features": {"kind": "identity", "width": width, "dropout": 0.0},
    }
    encoder = {"kind": "multi_source", "width": width, "parts": parts}
    return {"encoder": encoder, "decoder": {"kind": "edit_transducer", "condition_input": True, **part}}


def _copying(model: dict[str, Any]) -> dict[str, Any]:
    """The model as a pointer-generator that copies characters of the lemma."""
    return {**model, "copy": {"source": "lemma"}}


PLAIN = {"objective": {"kind": "cross_entropy", "label_smoothing": 0.0}}
PRONUNCIATION = ("g2p low", "g2p medium")
INFLECTIONS = ("inflect low", "inflect medium", "inflect high")
# A validation of 1,000 forms takes a CPU as long as a hundred updates of so small a network.
SHORT = _schedule(2e-3, 1024, validate_every=400, checkpoint_every=400, **PLAIN)
HALLUCINATION = {"kind": "hallucination", "keep_vowels": True}
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "conditioned, exchange, edges, citations": {"exchange": 0.7, "replace_edges": True, "citations": 0.1},
    "conditioned, exchange, citations": {"exchange": 0.7, "citations": 0.1},
    "conditioned, exchange, edges": {"exchange": 0.7, "replace_edges": True},
}


def _with_examples(options: dict[str, Any] | None) -> tuple[str, ...]:
    """The augmentation of a variant; None: without one."""
    augmentation = None if options is None else HALLUCINATION | options
    return (f"data.augmentation={json.dumps(augmentation)}",)


VARIED = AUGMENTATIONS["conditioned, exchange, edges, citations"]
# For 1,000 forms: names of variants, with width, dropout and artificial examples.
MEDIUM_EDITS: dict[str, tuple[int, float, dict[str, Any] | None]] = {
    "conditioned 128, exchange, edges, citations": (128, 0.3, VARIED),
    "conditioned 192, dropout 0.4, exchange, edges, citations": (192, 0.4, VARIED),
    "conditioned 192, dropout 0.4, exchange, edges, citations, 3,000": (192, 0.4, VARIED | {"examples": 3_000}),
    "conditioned 192, dropout 0.4, exchange, citations": (192, 0.4, {"exchange": 0.7, "citations": 0.1}),
    "conditioned 192, dropout 0.4, as in the paper": (192, 0.4, {"keep_vowels": False}),
    "conditioned 192, without augmentation": (192, 0.4, None),
    "conditioned 256, dropout 0.5, exchange, edges, citations": (256, 0.5, VARIED),
}
CHARACTER_VARIANTS = (
    Variant("chosen"),
    Variant("chosen, without augmentation", settings=("data.augmentation=null",), groups=INFLECTIONS[:2]),
    Variant("hard monotonic, 2 layers", _hard(2, 0.4), _schedule(1e-3, 2048, **PLAIN), groups=PRONUNCIATION),
    Variant("hard monotonic, dropout 0.5", _hard(2, 0.5), _schedule(1e-3, 2048, **PLAIN), groups=PRONUNCIATION),
    Variant("hard monotonic, 1 layer", _hard(1, 0.4), _schedule(1e-3, 2048, **PLAIN), groups=PRONUNCIATION),
    Variant("hard, order 0", _hard(2, 0.4, order=0), _schedule(1e-3, 2048), groups=PRONUNCIATION),
    Variant("edit transducer", _edit(2, 0.4), _schedule(1e-3, 1024, **PLAIN), groups=PRONUNCIATION),
    Variant("edit transducer, copying", _edit(1, 0.4, copies=True), _schedule(1e-3, 1024, **PLAIN), groups=INFLECTIONS),
    Variant(
        "edit transducer 96, copying",
        _edit(1, 0.4, copies=True, width=96),
        SHORT,
        ("data.augmentation.keep_vowels=false",),
        groups=INFLECTIONS[:1],
    ),
    Variant(
        "conditioned",
        _conditioned(96, 0.4),
        SHORT,
        ("data.augmentation.keep_vowels=false",),
        groups=INFLECTIONS[:1],
    ),
    Variant(
        "conditioned, without augmentation",
        _conditioned(96, 0.4),
        SHORT,
        ("data.augmentation=null",),
        groups=INFLECTIONS[:1],
    ),
    Variant(
        "conditioned, vowels kept",
        _conditioned(96, 0.4),
        SHORT,
        ("data.augmentation.keep_vowels=true",),
        groups=INFLECTIONS[:1],
    ),
    *(
        Variant(
            name,
            _conditioned(96, 0.4),
            SHORT,
            (f"data.augmentation={json.dumps(HALLUCINATION | options)}",),
            INFLECTIONS[:1],
        )
        for name, options in AUGMENTATIONS.items()
    ),
    Variant(
        "edit transducer 128, copying",
        _edit(1, 0.3, copies=True, width=128),
        SHORT,
        _with_examples({"keep_vowels": False}),
        INFLECTIONS[1:2],
    ),
    *(
        Variant(name, _conditioned(width, dropout), SHORT, _with_examples(options), INFLECTIONS[1:2])
        for name, (width, dropout, options) in MEDIUM_EDITS.items()
    ),
    Variant("lstm 256 x 2", _recurrent("lstm", 256, 2, 0.4), _schedule(1e-3, 2048), groups=PRONUNCIATION),
    Variant(
        "lstm 256 x 2, not smoothed",
        _recurrent("lstm", 256, 2, 0.4),
        _schedule(1e-3, 2048, **PLAIN),
        groups=PRONUNCIATION,
    ),
    Variant("lstm 256, luong", _recurrent("lstm", 256, 1, 0.4, "luong"), _schedule(1e-3, 2048), groups=PRONUNCIATION),
    Variant(
        "transformer 256 x 4, rotary",
        _transformer(256, 4, 0.3, position="rotary"),
        _schedule(1e-3, 4096),
        groups=PRONUNCIATION,
    ),
    Variant(
        "lstm 256 x 2, copying",
        _copying(_recurrent("lstm", 256, 2, 0.4)),
        _schedule(1e-3, 2048),
        groups=INFLECTIONS,
    ),
    Variant(
        "transformer 256 x 4, rotary, copying",
        _copying(_transformer(256, 4, 0.3, position="rotary")),
        _schedule(1e-3, 4096),
        groups=INFLECTIONS,
    ),
)
# The same updates with another schedule, on a network that a CPU trains in a minute or two (--scale 0.4).
WARMUP_STABLE_DECAY = {"schedule": {"kind": "warmup_stable_decay", "warmup": 100}}
SCHEDULE_VARIANTS = (
    Variant("gru 128, cosine", _recurrent("gru", 128, 1, 0.3), _schedule(3e-3, 2048)),
    Variant("gru 128, stable", _recurrent("gru", 128, 1, 0.3), _schedule(3e-3, 2048, **WARMUP_STABLE_DECAY)),
    Variant("gru 128, stable 1e-3", _recurrent("gru", 128, 1, 0.3), _schedule(1e-3, 2048, **WARMUP_STABLE_DECAY)),
    Variant("lstm 128 x 2, cosine", _recurrent("lstm", 128, 2, 0.3), _schedule(2e-3, 2048)),
)


# What is chosen, in both precisions of a CPU.
PRECISION_VARIANTS = tuple(
    Variant(f"chosen, {precision}", settings=(f"training.precision={precision}",)) for precision in ("fp32", "bf16")
)


def precision_sets(data: Path, folder: Path) -> Iterator[DataSet]:
    """Icelandic words, and the sentiment of SST-2."""
    yield next(one for one in character_sets(data, folder) if one.name == "g2p-ice")
    yield next(one for one in label_sets(data, folder) if one.name == "classify-sst2")


def _cosine(updates: int, rate: float) -> Variant:
    """The network that is chosen for sentences, with a cosine schedule of so many updates."""
    check = updates // 5
    return Variant(
        f"cosine, {updates:,} updates, {rate:g}",
        settings=(
            f"training.steps={updates}",
            f"training.optimiser.learning_rate={rate}",
            f"training.schedule={{kind: cosine, warmup: {updates // 12}}}",
            f"training.validate_every={check}",
            f"training.checkpoint_every={check}",
            "training.patience=null",
            "training.average_checkpoints=3",
        ),
    )


SENTENCE_VARIANTS = (
    Variant("chosen"),
    *(_cosine(*one) for one in ((3500, 3e-3), (3500, 5e-3), (5000, 5e-3), (8000, 5e-3))),
)


def _in_time(name: str, model: Mapping[str, Any], batch: int, rate: float, pieces: int = 8_000) -> Variant:
    """A network for little time, with the schedule that is chosen for such networks."""
    tokens = json.dumps({"kind": "bpe", "size": pieces})
    values = {
        **{f"model.{part}": json.dumps(spec) for part, spec in model.items()},
        **{f"tokens.{side}": tokens for side in ("source", "target")},
        "training.batch_tokens": batch,
        "training.optimiser.learning_rate": rate,
        "training.steps": 20_000,
        "training.schedule": "{kind: warmup_stable_decay, warmup: 200}",
        "training.validate_every": 200,
        "training.checkpoint_every": 200,
    }
    return Variant(f"{name}, {pieces:,} pieces", settings=tuple(f"{key}={value}" for key, value in values.items()))


def _narrow(width: int, layers: int, dropout: float, decoder_layers: int | None = None) -> dict[str, Any]:
    part = {"kind": "transformer", "width": width, "heads": 4, "ff_width": 256, "dropout": dropout}
    return {
        "encoder": {**part, "layers": layers},
        "decoder": {**part, "layers": decoder_layers or layers},
    }


BUDGET_VARIANTS = (
    Variant("chosen"),
    _in_time("transformer 64 x 2", _narrow(64, 2, 0.1), 2048, 3e-3),
    _in_time("transformer 128 x 4", _narrow(128, 4, 0.1), 4096, 2e-3),
    _in_time("transformer 128 x 4", _narrow(128, 4, 0.1), 4096, 2e-3, 4_000),
    _in_time("transformer 128 x 2", _narrow(128, 2, 0.1), 2048, 2e-3, 4_000),
    _in_time("gru 256", _recurrent("gru", 256, 1, 0.2), 2048, 1e-3, 4_000),
    _in_time("lstm 256, luong", _recurrent("lstm", 256, 1, 0.2, "luong"), 2048, 1e-3, 4_000),
)
WORDS = "tokens.source={kind: words, size: 30000, min_count: 2}"
GRU = "model.encoder={kind: recurrent, width: 256, dropout: 0.4}"


def _pieces(size: int, dropout: float = 0.0) -> str:
    return f"tokens.source={{kind: bpe, size: {size}, dropout: {dropout}}}"


def _character_aware(**options: Any) -> str:
    spec = {"kind": "character_aware", "width": 256, "embedding_width": 128, "dropout": 0.4, **options}
    return f"model.encoder={json.dumps(spec)}"


def _fine_tuning(rate: float, layer_decay: float, updates: int, **head: Any) -> Variant:
    """Training from an imported encoder, whose lower layers have smaller learning rates."""
    spec = {"kind": "classifier", "pooling": "mean", "activation": "none", "dropout": 0.1, **head}
    name = f"{rate:g}, layer decay {layer_decay:g}, {updates} updates, {spec['pooling']} pooling"
    settings = (
        f"training.optimiser.learning_rate={rate}",
        "training.optimiser.weight_decay=0.01",
        f"training.layer_decay={layer_decay}",
        f"training.steps={updates}",
        f"training.schedule={{kind: linear, warmup: {updates // 10}}}",
        "training.batch_tokens=1024",
        f"training.validate_every={updates // 8}",
        f"training.checkpoint_every={updates // 8}",
        f"model.head={json.dumps(spec)}",
    )
    return Variant(name, settings=settings, groups=("fine-tune",))


TAGS, TEXTS = ("tag",), ("classify",)
LABEL_VARIANTS = (
    Variant("chosen", groups=(*TAGS, *TEXTS)),
    Variant(
        "chosen, stable",
        settings=(
            "training.schedule={kind: warmup_stable_decay, warmup: 38}",
            "training.steps=900",
            "training.validate_every=25",
            "training.checkpoint_every=25",
            "training.patience=10",
            "training.min_epochs=5",
            "training.average_checkpoints=3",
        ),
        groups=TEXTS,
    ),
    Variant("gru 256 over words", settings=(WORDS, GRU, "training.batch_tokens=4096"), groups=(*TAGS, *TEXTS)),
    Variant("gru 256 over 8,000 pieces, dropout", settings=(_pieces(8000, 0.1), GRU), groups=(*TAGS, *TEXTS)),
    Variant("character-aware, 2,000 pieces", settings=(_pieces(2000), _character_aware()), groups=(*TAGS, *TEXTS)),
    Variant("character-aware, 8,000 pieces", settings=(_pieces(8000), _character_aware()), groups=(*TAGS, *TEXTS)),
    Variant(
        "character-aware, word dropout 0.4",
        settings=(_pieces(2000), _character_aware(word_dropout=0.4)),
        groups=(*TAGS, *TEXTS),
    ),
    Variant(
        "character-aware, 2 layers",
        settings=(_pieces(2000), _character_aware(layers=2)),
        groups=TAGS,
    ),
    *(_fine_tuning(rate, decay, 1000) for rate in (3e-5, 1e-4) for decay in (1.0, 0.8)),
    _fine_tuning(5e-5, 0.9, 2000),
    _fine_tuning(5e-5, 0.9, 1000, pooling="first"),
)
GRIDS = {
    "characters": (character_sets, CHARACTER_VARIANTS),
    "sentences": (sentence_sets, SENTENCE_VARIANTS),
    "budget": (budget_sets, BUDGET_VARIANTS),
    "labels": (label_sets, LABEL_VARIANTS),
    "schedules": (character_sets, SCHEDULE_VARIANTS),
    "precisions": (precision_sets, PRECISION_VARIANTS),
}
MIXED = ("hard monotonic, 2 layers", "edit transducer", "lstm 256 x 2", "transformer 256 x 4, rotary")
MIXED_INFLECTION = ("edit transducer, copying", "lstm 256 x 2, copying", "transformer 256 x 4, rotary, copying")


def ensembles(variants: Sequence[Variant], seeds: Sequence[int]) -> dict[str, list[tuple[str, int]]]:
    """Names of ensembles, and variant and seed of their members: each variant with all seeds, and mixed ones."""
    found = {f"{len(seeds)} x {one.name}": [(one.name, seed) for seed in seeds] for one in variants}
    if len(seeds) < 2:
        found = {}
    for members in (MIXED, MIXED_INFLECTION):
        found[f"mixed: {len(members)} networks"] = [(name, seeds[0]) for name in members]
        if len(seeds) > 1:
            found[f"mixed: {len(members)} networks, {len(seeds)} seeds"] = [(n, s) for n in members for s in seeds]
    return found


def recipe_of(dataset: DataSet, variant: Variant, seed: int, device: str, scale: float) -> Any:
    from transduce.autoconfig import recipe_for
    from transduce.recipe import parse

    files = [f"data.dev={dataset.dev}", f"training.device={device}", *variant.settings]
    chosen = recipe_for(dataset.train, files, dataset.task).model_dump(mode="json")
    training = {**chosen["training"], "seed": seed}
    if variant.model is not None:
        chosen["model"] = _with_features(variant.model) if chosen["data"]["sources"] else variant.model
        steps = max(20, int(dataset.steps * scale))
        check = max(10, steps // 20)
        training |= {
            "steps": steps,
            "schedule": {"kind": "cosine", "warmup": max(1, steps // 10)},
            "validate_every": check,
            "checkpoint_every": check,
            "patience": None,
            "minutes": None,
            "average_checkpoints": 1,
            "precision": "fp32",
            **variant.training,
        }
    elif scale < 1:
        training["steps"] = max(20, int(training["steps"] * scale))
    training |= {"monitor": dataset.metric, "validate_examples": 1000, "log_every": 50}
    return parse({**chosen, "training": training})


def run_trial(
    dataset: DataSet, variant: Variant, seed: int, device: str, scale: float, folder: Path, until: float
) -> Trial | None:
    """Trains in `folder`; None: there is no time left."""
    from transduce.training.experiment import train

    if time.time() > until:
        return None

    def scored() -> tuple[dict[str, float], int, int]:
        result = train(recipe_of(dataset, variant, seed, device, scale), folder)
        scores = {name: score.value for name, score in result.scores["dev"].scores.items()}
        return scores, result.outcome.step, sum(p.numel() for p in result.model.network.parameters())

    return _timed(scored, dataset, variant.name, seed, device)


def run_ensemble(dataset: DataSet, name: str, members: Sequence[Path], device: str, until: float) -> Trial | None:
    """Scores an ensemble of finished trainings; None: there is no time left."""
    from transduce.inference import load
    from transduce.training.ensemble_run import evaluate_model

    if time.time() > until:
        return None

    def scored() -> tuple[dict[str, float], int, int]:
        model = load(list(members), device=device)
        scores = evaluate_model(model)["dev"].scores
        return {key: score.value for key, score in scores.items()}, 0, model.parameters

    return _timed(scored, dataset, name, 0, device)


def _timed(
    scored: Callable[[], tuple[dict[str, float], int, int]], dataset: DataSet, name: str, seed: int, device: str
) -> Trial:
    import torch

    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        scores, steps, parameters = scored()
        failed = ""
    except Exception as error:  # one failure must not end the grid; it is part of the record
        scores, steps, parameters, failed = {}, 0, 0, f"{type(error).__name__}: {error}"[:300]
    seconds = time.monotonic() - began
    return Trial(dataset.name, dataset.group, name, seed, scores, steps, seconds, parameters, device, failed)


def score_of(scores: Mapping[str, float]) -> float:
    return next(scores[metric] for metric in METRICS if metric in scores)


def show(trials: list[Trial], console: Console) -> None:
    """The mean development score of each group and variant."""
    groups = sorted({trial.group for trial in trials})
    table = Table("variant", *groups, "seconds", "failed", title="mean development score (number of trainings)")
    by_variant: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_variant[trial.variant].append(trial)
    for name, mine in by_variant.items():
        cells = []
        for group in groups:
            scores = [score_of(trial.scores) for trial in mine if trial.group == group and trial.scores]
            cells.append(f"{mean(scores):.1f} ({len(scores)})" if scores else "")
        seconds = mean(trial.seconds for trial in mine)
        table.add_row(name, *cells, f"{seconds:.0f}", str(sum(bool(trial.failed) for trial in mine)))
    console.print(table)


def collect(tasks: Mapping[Future[Trial | None], Any], output: Path, trials: list[Trial]) -> list[Any]:
    """Writes each trial as it ends; returns the keys of the tasks that did not fail."""
    done = []
    with output.open("a", encoding="utf-8") as record:
        for future in as_completed(tasks):
            trial = future.result()
            if trial is None:
                continue
            trials.append(trial)
            record.write(json.dumps(asdict(trial)) + "\n")
            record.flush()
            if not trial.failed:
                done.append(tasks[future])
    return done


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoconfig", description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with g2p2021 and inflection2017, multi30k, or ud_ewt and sst2"
    )
    parser.add_argument("--grid", choices=list(GRIDS), default="characters")
    parser.add_argument("--only", nargs="*", default=[], help="variants, by name")
    parser.add_argument("--sets", nargs="*", default=[], help="data sets or groups of them, by name")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--minutes", type=float, default=60.0, help="no training starts after this time")
    parser.add_argument("--ensemble-minutes", type=float, default=2.0, help="further time for ensembles")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of updates")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/autoconfig.jsonl"))
    return parser.parse_args()


def run_grid(args: argparse.Namespace, folder: Path) -> list[Trial]:
    """All trainings, then all ensembles whose members are there."""
    make_sets, variants = GRIDS[args.grid]
    variants = tuple(one for one in variants if not args.only or one.name in args.only)
    every, wanted = make_sets(args.data, folder), {*args.sets}
    sets = {one.name: one for one in every if not wanted or wanted & {one.group, one.name}}
    todo = [(s, v, seed) for seed in args.seeds for s in sets.values() for v in variants]
    todo = [one for one in todo if not one[1].groups or one[0].group in one[1].groups]
    todo.sort(key=lambda one: (one[2], -one[0].steps))  # the longest first, so that no worker is left with one
    trials: list[Trial] = []
    places = {(s.name, v.name, seed): folder / s.name / v.name / str(seed) for s, v, seed in todo}
    until = time.time() + 60 * args.minutes
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = {}
        for s, v, seed in todo:
            key = (s.name, v.name, seed)
            tasks[pool.submit(run_trial, s, v, seed, args.device, args.scale, places[key], until)] = key
        done = set(collect(tasks, args.output, trials))
        until += 60 * args.ensemble_minutes
        combined = {}
        for name, members in ensembles(variants, args.seeds).items():
            for s in sets.values():
                if all((s.name, *member) in done for member in members):
                    folders = [places[s.name, *member] for member in members]
                    combined[pool.submit(run_ensemble, s, name, folders, args.device, until)] = name
        collect(combined, args.output, trials)
    return trials


def main() -> None:
    args = parse_arguments()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trials = run_grid(args, Path(folder))
    console = Console(width=160)
    show(trials, console)
    console.print(f"{len(trials)} trials; {args.output}")
    for trial in trials:
        if trial.failed:
            console.print(f"{trial.dataset} {trial.variant}: {trial.failed}", markup=False)


if __name__ == "__main__":
    main()
