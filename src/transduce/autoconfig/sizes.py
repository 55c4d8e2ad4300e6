"""Tokenizers, networks and training settings that suit the data and the time, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import is_normalized

from transduce.autoconfig.statistics import CorpusStatistics, SideStatistics

CPU_MINUTES = 10.0  # time budget on a CPU where none is given
CPU_SPEED, GPU_SPEED = 2.0, 200.0  # nominal, in cores of a CPU; the schedule follows the time that is measured
OVERRUN = 1.5  # a network is taken if its updates take up to this multiple of the time: the schedule is shortened
MORE_UPDATES = 3  # limit of the updates as a multiple of those measured: a curve that still rises is not cut
FEW_PAIRS, SMALL, LARGE = 100, 3_000, 50_000  # pairs
MANY_ACCENTS = 20  # different accented letters
GRID = "benchmarks/results/autoconfig.jsonl"
PRECISIONS = "benchmarks/results/precision-cpu.json"
MEMBERS, FEWEST_MEMBERS = 5, 3  # of an ensemble that is trained without being asked for
NETWORKS = ("normal", "edit transducer")  # of such an ensemble: hard monotonic attention is the normal one


@dataclass(frozen=True)
class Chosen:
    """A value of a recipe, and the reason for it."""

    value: Any
    reason: str


BF16 = Chosen("auto", "bf16 on a device that computes with it, else fp32")


def separate(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """The recipe without reasons, and the reasons by the dotted keys of their values."""
    plain: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Chosen):
            plain[name], reasons[prefix + name] = value.value, value.reason
        elif isinstance(value, Mapping):
            plain[name], more = separate(value, f"{prefix}{name}.")
            reasons |= more
        else:
            plain[name] = value
    return plain, reasons


@dataclass(frozen=True)
class TimeBudget:
    """The time that training may take on a kind of device (cpu, cuda, mps)."""

    device: str = "cpu"
    given: float | None = None  # minutes
    bf16: bool = False  # whether a CPU multiplies matrices in bf16

    @property
    def minutes(self) -> float | None:
        """None: as long as the score improves. On a CPU there is a limit even if none is given."""
        return CPU_MINUTES if self.given is None and self.device == "cpu" else self.given

    @property
    def speed(self) -> float:
        return CPU_SPEED if self.device == "cpu" else GPU_SPEED


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of training that belong to a network."""

    steps: int  # that are expected
    batch_tokens: int
    learning_rate: float
    label_smoothing: float = 0.1
    schedule: str = "warmup_stable_decay"
    average: int = 3  # of the last checkpoints
    bf16: bool = True  # on a CPU, too; False: it multiplies matrices so small as fast in fp32
    measured: bool = True


@dataclass(frozen=True)
class MeasuredNetwork:
    """A network, the training settings that it was measured with, and its time."""

    model: Mapping[str, Any]
    training: TrainingSettings
    microseconds: float  # for one token, on one core of a CPU in fp32
    reason: str
    record: tuple[str, str] = ("", "")  # group and variant in benchmarks/results/autoconfig.jsonl
    bf16_microseconds: float | None = None  # the same in bf16, on a CPU that computes with it; None: it has fp32 there

    def minutes(self, budget: TimeBudget) -> float:
        in_bf16 = self.bf16_microseconds if budget.bf16 else None
        tokens = self.training.steps * self.training.batch_tokens
        return tokens * (in_bf16 or self.microseconds) / 60e6 / budget.speed

    @property
    def evidence(self) -> str:
        if self.record[0]:
            return f"{self.reason} ({GRID}: {', '.join(self.record)})"
        return self.reason if self.training.measured else f"{self.reason} (not measured)"


@dataclass(frozen=True)
class PlannedEnsemble:
    """Networks that are trained with different seeds and generate as one.

    `networks` are names in the portfolio of `--effort best`, of the members in turn.
    """

    members: int
    networks: tuple[str, ...] = NETWORKS

    @property
    def reason(self) -> str:
        kinds = " of two kinds" if len(self.networks) > 1 else ""
        return f"{self.members} small networks{kinds} err in different places"


def affordable(candidates: Sequence[MeasuredNetwork], budget: TimeBudget) -> MeasuredNetwork:
    """The first candidate that the time allows, for the best ones come first; else the last, which is the fastest."""
    if budget.minutes is None:
        return candidates[0]
    most = OVERRUN * budget.minutes
    return next((one for one in candidates if one.minutes(budget) <= most), candidates[-1])


def usual(steps: int, batch_tokens: int, learning_rate: float, bf16: bool = True) -> TrainingSettings:
    """The training settings of a task that has one network for all data, which was not measured beside others."""
    return TrainingSettings(steps, batch_tokens, learning_rate, label_smoothing=0.0, bf16=bf16, measured=False)


def _recurrent(cell: str, width: int, layers: int, dropout: float, context: str = "bahdanau") -> dict[str, Any]:
    part = {"kind": "recurrent", "cell": cell, "width": width, "layers": layers, "dropout": dropout}
    return {"encoder": part, "decoder": {**part, "context": context}}


def _transformer(width: int, layers: int, ff_width: int, dropout: float, **options: Any) -> dict[str, Any]:
    heads = max(4, width // 64)
    part = {"kind": "transformer", "width": width, "layers": layers, "heads": heads, "ff_width": ff_width}
    return {key: {**part, "dropout": dropout, **options} for key in ("encoder", "decoder")}


def _hard_monotonic() -> dict[str, Any]:
    part = {"cell": "lstm", "width": 256, "dropout": 0.4}
    return {
        "encoder": {"kind": "recurrent", "layers": 2, **part},
        "decoder": {"kind": "hard_attention", "layers": 1, **part},
    }


def _edit_transducer() -> dict[str, Any]:
    part = {"cell": "lstm", "width": 256, "dropout": 0.4}
    return {
        "encoder": {"kind": "recurrent", "layers": 2, **part},
        "decoder": {"kind": "edit_transducer", "copy_action": False, **part},
    }


TINY = MeasuredNetwork(
    _recurrent("gru", 64, 1, 0.3),
    TrainingSettings(300, 1024, 3e-3, measured=False, bf16=False),
    20,
    "so few pairs determine no large network; this small one trains in seconds",
)
GRU_128 = MeasuredNetwork(
    _recurrent("gru", 128, 1, 0.3),
    TrainingSettings(2_000, 2048, 3e-3),
    19,
    "the fastest network that was measured, for little time",
    ("g2p low", "gru 128, cosine"),
    bf16_microseconds=14,
)
# Letters and phones, by number of pairs; the best first.
LETTERS: dict[int, tuple[MeasuredNetwork, ...]] = {
    FEW_PAIRS: (TINY,),
    SMALL: (
        MeasuredNetwork(
            {**_transformer(256, 4, 1024, 0.3, position="rotary"), "tie": "target"},
            TrainingSettings(2_500, 4096, 1e-3),
            264,
            "the best network with soft attention of the grid for 800 words",
            ("g2p low", "transformer 256 x 4, rotary"),
            bf16_microseconds=107,
        ),
        MeasuredNetwork(
            _recurrent("lstm", 256, 1, 0.4, "luong"),
            TrainingSettings(2_500, 2048, 1e-3),
            48,
            "a recurrent network of the grid for 800 words, which takes less time than the Transformer",
            ("g2p low", "lstm 256, luong"),
            bf16_microseconds=26,
        ),
        GRU_128,
    ),
    LARGE: (
        MeasuredNetwork(
            _recurrent("lstm", 256, 2, 0.4),
            TrainingSettings(6_000, 2048, 1e-3),
            88,
            "the best network with soft attention of the grid for 8,000 words",
            ("g2p medium", "lstm 256 x 2"),
            bf16_microseconds=44,
        ),
        MeasuredNetwork(
            _recurrent("gru", 256, 1, 0.4),
            TrainingSettings(6_000, 2048, 2e-3),
            56,
            "a network of the grid for 8,000 words that takes about two thirds of the time",
            ("g2p medium", "gru 256, small batch"),
            bf16_microseconds=30,
        ),
        GRU_128,
    ),
}
# Pronunciation and transliteration: the output follows the order of the input.
MONOTONIC: dict[int, tuple[MeasuredNetwork, ...]] = {
    FEW_PAIRS: (TINY,),
    SMALL: (
        MeasuredNetwork(
            _hard_monotonic(),
            TrainingSettings(2_500, 2048, 1e-3, label_smoothing=0.0),
            56,
            "exact hard monotonic attention, the best network of the grid for 800 words",
            ("g2p low", "hard monotonic, 2 layers"),
            bf16_microseconds=43,
        ),
        MeasuredNetwork(
            _edit_transducer(),
            TrainingSettings(2_500, 1024, 1e-3, label_smoothing=0.0),
            66,
            "edit actions summed out, close to hard attention in the grid for 800 words",
            ("g2p low", "edit transducer"),
            bf16_microseconds=46,
        ),
        *LETTERS[SMALL],
    ),
    LARGE: (
        MeasuredNetwork(
            _hard_monotonic(),
            TrainingSettings(6_000, 2048, 1e-3, label_smoothing=0.0),
            56,
            "exact hard monotonic attention, as good as the best network of the grid for 8,000 words, and the fastest",
            ("g2p medium", "hard monotonic, 2 layers"),
            bf16_microseconds=43,
        ),
        MeasuredNetwork(
            _edit_transducer(),
            TrainingSettings(6_000, 1024, 1e-3, label_smoothing=0.0),
            66,
            "edit actions summed out, close to hard attention in the grid for 8,000 words",
            ("g2p medium", "edit transducer"),
            bf16_microseconds=46,
        ),
        *LETTERS[LARGE],
    ),
}
MANY_LETTERS = (
    MeasuredNetwork(
        {
            "encoder": _recurrent("lstm", 512, 2, 0.3)["encoder"],
            "decoder": _recurrent("lstm", 512, 1, 0.3)["decoder"],
        },
        TrainingSettings(12_000, 8192, 1e-3),
        192,
        "the network of recipes/cmudict/attention.yaml, whose scores for 114,000 lines are in docs/results.md",
        bf16_microseconds=86,
    ),
    *LETTERS[LARGE],
)
TINY_TRANSFORMER = "Transformer-Tiny (Wu et al. 2021), whose scores for 29,000 sentence pairs are in docs/results.md"
LITTLE_TIME = (
    MeasuredNetwork(
        _transformer(128, 4, 256, 0.1),
        TrainingSettings(2_500, 4096, 2e-3, average=5),
        91,
        "Transformer-Tiny with smaller batches, the better of two networks in 10 minutes of a CPU",
        ("sentences, 10 CPU minutes", "chosen"),
        bf16_microseconds=48,
    ),
    MeasuredNetwork(
        _transformer(64, 2, 256, 0.1),
        TrainingSettings(1_500, 2048, 3e-3),
        40,
        "a small Transformer for very little time, measured in 10 minutes of a CPU",
        ("sentences, 10 CPU minutes", "transformer 64 x 2, 8,000 pieces"),
        bf16_microseconds=25,
    ),
)
# Sentences, by number of pairs.
SENTENCES: dict[int, tuple[MeasuredNetwork, ...]] = {
    FEW_PAIRS: (TINY,),
    LARGE: (
        MeasuredNetwork(
            _transformer(128, 4, 256, 0.3),
            TrainingSettings(8_000, 16_384, 5e-3, schedule="inverse_sqrt", average=10),
            128,
            TINY_TRANSFORMER,
            bf16_microseconds=52,
        ),
        *LITTLE_TIME,
    ),
    500_000: (
        MeasuredNetwork(
            _transformer(256, 4, 1024, 0.2),
            TrainingSettings(20_000, 16_384, 2e-3, schedule="inverse_sqrt", average=5, measured=False),
            350,
            "a wider Transformer for more pairs",
            bf16_microseconds=124,
        ),
        *LITTLE_TIME,
    ),
}
MANY_SENTENCES = (
    MeasuredNetwork(
        _transformer(512, 6, 2048, 0.1),
        TrainingSettings(100_000, 32_768, 7e-4, schedule="inverse_sqrt", average=5, measured=False),
        3_500,
        "the base Transformer of Vaswani et al. 2017",
        bf16_microseconds=1_200,
    ),
    *SENTENCES[500_000],
)


def candidates_for(pairs: int, sentences: bool, monotonic: bool = False) -> tuple[MeasuredNetwork, ...]:
    """The networks for this many pairs, the best first; `monotonic`: the output follows the order of the input."""
    letters = MONOTONIC if monotonic else LETTERS
    table, rest = (SENTENCES, MANY_SENTENCES) if sentences else (letters, MANY_LETTERS)
    return next((rows for most, rows in table.items() if pairs < most), rest)


def ensemble_for(pairs: int, budget: TimeBudget) -> PlannedEnsemble | None:
    """The ensemble for so many pairs of a monotonic task, if each of at least three members can be trained in full.

    Small networks, which differ by several points between seeds, err in different places. With 8,000 words, four that
    shared 10 minutes of a CPU were worse than one.
    """
    if not FEW_PAIRS <= pairs < LARGE:
        return None
    best = candidates_for(pairs, sentences=False, monotonic=True)[0]
    members = MEMBERS
    if budget.minutes is not None:
        members = min(MEMBERS, int(budget.minutes / best.minutes(budget)))
    if members < FEWEST_MEMBERS:
        return None
    return PlannedEnsemble(members)


def tokens_for(statistics: CorpusStatistics) -> dict[str, Any]:
    sides = {
        name: tokens_of(side, statistics.pairs)
        for name, side in (("source", statistics.source), ("target", statistics.target))
    }
    shared = statistics.shared and sides["source"].value == sides["target"].value
    return {**sides, "shared": share(shared and sides["source"].value["kind"] == "bpe", statistics)}


def share(shared: bool, statistics: CorpusStatistics) -> Chosen:
    if shared:
        return Chosen(True, "both sides are written with the same letters, in pieces")
    why = "the sides have other kinds of tokens, or none that are pieces" if statistics.shared else "other letters"
    return Chosen(False, f"one vocabulary would not help: {why}")


def tokens_of(side: SideStatistics, pairs: int) -> Chosen:
    if side.closed_vocabulary:
        reason = f"{side.vocabulary} different words, and further text would have hardly any other"
        return Chosen({"kind": "words", "size": 2000}, reason)
    if side.character_level:
        reason = f"short strings: {side.characters:g} characters and {side.words:g} words a line"
        return letters_of(side, pairs, reason)
    reason = f"sentences of {side.words:g} words; a piece for every three pairs up to 8,000, for every ten above 80,000"
    return Chosen(pieces_for(pairs), reason)


def letters_of(side: SideStatistics, pairs: int, reason: str) -> Chosen:
    """Characters, decomposed where that makes rare letters of frequent parts."""
    letters: dict[str, Any] = {"kind": "chars", "size": 8000}
    steps, why = normalisation_for(side, pairs)
    return Chosen({**letters, "normalisation": steps} if steps else letters, f"{reason}; {why}" if why else reason)


def normalisation_for(side: SideStatistics, pairs: int) -> tuple[list[str], str]:
    """The normalisation of characters, and its reason: `nfd` for Hangul, or for many accented letters in few pairs."""
    composed = [one for one in side.alphabet if not one.isascii() and is_normalized("NFC", one)]
    composed = [one for one in composed if not is_normalized("NFD", one)]
    hangul = sum("가" <= one <= "힣" for one in composed)
    if hangul and pairs < LARGE:
        return ["nfd"], f"{hangul} Hangul syllables are read as jamo, so that the model can spell others (not measured)"
    if pairs < SMALL and len(composed) >= max(MANY_ACCENTS, len(side.alphabet) / 4):
        return ["nfd"], f"{len(composed)} accented letters in few pairs are read as letter and accent (not measured)"
    return [], ""


def pieces_for(pairs: int) -> dict[str, Any]:
    """A BPE vocabulary of pairs / 3 from 1,000 to 8,000, or of pairs / 10 up to 16,000."""
    size = max(min(8_000, pairs // 3), min(16_000, pairs // 10))
    return {"kind": "bpe", "size": max(1000, size // 1000 * 1000)}


def transformer(statistics: CorpusStatistics) -> dict[str, Any]:
    """Transformer encoder of a masked language model. Smaller corpora get smaller models."""
    sizes = {50_000: (128, 4), 500_000: (256, 4)}
    width, layers = next((size for most, size in sizes.items() if statistics.pairs < most), (512, 6))
    return {**_transformer(width, layers, 4 * width, 0.1)["encoder"]}


def cosine(steps: int, check: int, rate: float, reason: str) -> dict[str, Any]:
    """The training of labels and embeddings, whose development scores soon fall again; `reason`: of the updates."""
    return {
        "steps": Chosen(steps, reason),
        "optimiser": {"learning_rate": rate},
        "schedule": {"kind": Chosen("cosine", "as in the records of such networks"), "warmup": steps // 20},
        "validate_every": check,
        "checkpoint_every": check,
        "precision": BF16,
    }


def pairs_recipe(
    statistics: CorpusStatistics,
    tokens: Mapping[str, Any],
    metrics: Sequence[str],
    sentences: bool,
    budget: TimeBudget,
    monotonic: bool = False,
) -> dict[str, Any]:
    """The recipe for pairs of texts: the best candidate that the time allows, and its training."""
    candidate = affordable(candidates_for(statistics.pairs, sentences, monotonic), budget)
    kind = "sentences" if sentences else "letters or phones"
    reason = f"{statistics.pairs:,} pairs of {kind}: {candidate.evidence}"
    model: dict[str, Any] = {**candidate.model, "encoder": Chosen(candidate.model["encoder"], reason)}
    if sentences and candidate is not TINY:
        shared = tokens["shared"].value if isinstance(tokens["shared"], Chosen) else tokens["shared"]
        model["tie"] = Chosen("all" if shared else "target", "embeddings and output layer share their weights")
    return {
        "tokens": tokens,
        "model": model,
        "training": training_for(candidate.training, metrics[0 if sentences else 1], budget),
        "generation": {"beam": 5},
        "evaluation": {"metrics": list(metrics)},
    }


def training_for(settings: TrainingSettings, monitor: str, budget: TimeBudget) -> dict[str, Any]:
    """The training of a network within the time, with reasons."""
    expected, limit = settings.steps, MORE_UPDATES * settings.steps
    stable = settings.schedule == "warmup_stable_decay"
    shape = "constant until the score has stopped improving, then a decay" if stable else "as in the record"
    recorded = "as in the record of this network" if settings.measured else "usual for such a network; not measured"
    check = max(25, min(1000, expected // 20))
    result: dict[str, Any] = {
        "steps": Chosen(limit, f"a limit: {expected:,} updates are expected, and a score that still rises is not cut"),
        "batch_tokens": Chosen(settings.batch_tokens, recorded),
        "optimiser": {"learning_rate": Chosen(settings.learning_rate, recorded)},
        "schedule": {
            "kind": Chosen(settings.schedule, shape),
            "warmup": Chosen(min(2000, expected // 10), "a tenth of the updates that are expected, at most 2,000")
            if stable
            else Chosen(min(2000, expected // 4), "a quarter of the updates that are expected, at most 2,000"),
        },
        "objective": {"kind": "cross_entropy", "label_smoothing": Chosen(settings.label_smoothing, recorded)},
        "validate_every": Chosen(check, "twenty validations in the updates that are expected, or every 1,000 updates"),
        "checkpoint_every": check,
        # Not exact match: while a hard task has none yet, it shows no progress and patience runs out.
        "monitor": Chosen(monitor, "it shows progress before any output is exactly right"),
        "patience": Chosen(10, "validations without improvement, half of the updates that are expected"),
        "min_epochs": Chosen(5, "no end before all pairs were seen five times"),
        "average_checkpoints": Chosen(
            settings.average, "the mean of the last checkpoints is kept if it scores at least as well as the best"
        ),
        "precision": precision_for(settings, budget),
    }
    if budget.minutes is not None:
        why = "the limit on a CPU; --minutes gives another" if budget.given is None else "the time given"
        result["minutes"] = Chosen(budget.minutes, f"{why}: the schedule is fitted to the updates that it allows")
    return result


def precision_for(settings: TrainingSettings, budget: TimeBudget) -> Chosen:
    """bf16 where it is faster: a CPU multiplies small matrices as fast in fp32."""
    if budget.device == "cpu" and not settings.bf16:
        return Chosen("fp32", f"on a CPU bf16 does not pay for so small a network ({PRECISIONS})")
    return BF16


def metrics_for(statistics: CorpusStatistics, sentences: bool) -> list[str]:
    if sentences:
        return ["bleu", "chrf"]
    return ["exact", "wer"] if statistics.target.closed_vocabulary else ["exact", "cer"]
