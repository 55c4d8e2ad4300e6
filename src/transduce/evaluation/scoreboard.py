"""Scoreboard: real data sets, the recipes to train on them, and published results.

A row is reproduced with `transduce reproduce NAME --data FOLDER`. FOLDER is the copy of the data set that the user
has: nothing is downloaded. `prepare` writes what a recipe needs besides the files of FOLDER, such as a TSV of
recordings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transduce.autoconfig.sizes import MEMBERS, NETWORKS
from transduce.errors import InputError, nearest
from transduce.storage import make_folder, replace_file

Files = Mapping[str, str]  # train, dev, test -> what a recipe's `data` section names
MULTI30K = "multi30k/dataset, research use"
TUTORIALS = "bentrevett/pytorch-seq2seq"


@dataclass(frozen=True)
class Published:
    """A published result, or a mark. `seen`: read in the source named; otherwise from memory, to be confirmed."""

    system: str
    scores: Mapping[str, float]
    source: str
    seen: bool = False


@dataclass(frozen=True)
class Row:
    """One row: the data set, its recipe, the metrics that the papers report, and what was published.

    `prepare(data, folder, part)` returns the files of a part of the row (a language, a speaker), after writing those
    that have to be made into `folder`. Each part is a training of its own, and the score of the row is their mean.
    """

    title: str
    origin: str  # of the data, with its licence
    recipe: str  # below recipes/, or `task NAME`: the recipe that the toolkit chooses
    prepare: Callable[[Path, Path, str], Files]
    metrics: tuple[str, ...]
    published: tuple[Published, ...] = ()
    parts: tuple[str, ...] = ("",)
    settings: tuple[str, ...] = ()  # key=value changes to the recipe; {data} is the folder of the data set
    kind_column: str = ""  # extra column with the kind of each test example, for scores by kind
    ensemble: int = 1  # models of one output
    networks: tuple[str, ...] = ()  # of the members in turn: recipes, or names from the portfolio of `--effort best`
    shares: str = ""  # the row whose trainings it shares, as an ensemble of its models
    teacher: str = ""  # the row whose models are distilled into one
    parameters: int | None = None  # no more than the published system has
    remark: str = ""


def mark(**scores: float) -> Published:
    """A score to pass where no published result is comparable, or where it has been passed."""
    return Published("mark to pass", scores, "set for this row", seen=True)


def named(train: str, dev: str, test: str) -> Callable[[Path, Path, str], Files]:
    """The files as they are in the data folder; {part} stands for the part. An empty name: no such set."""

    def files(data: Path, folder: Path, part: str) -> Files:
        sets = {"train": train, "dev": dev, "test": test}
        return {name: _located(data, value.format(part=part)) for name, value in sets.items() if value}

    return files


def _located(data: Path, names: str) -> str:
    """One file, or two parallel files separated by a comma."""
    paths = [data / name for name in names.split(",")]
    for path in paths:
        if not path.exists():
            raise InputError(
                "the data set has no such file", where=str(path), remedy="see `transduce reproduce --list`"
            )
    return ",".join(map(str, paths))


def _write(path: Path, lines: Iterable[str]) -> str:
    replace_file(make_folder(path.parent) / path.name, "".join(f"{line}\n" for line in lines))
    return str(path)


def _lines(path: Path) -> list[str]:
    return Path(_located(path.parent, path.name)).read_text(encoding="utf-8").splitlines()


def simple_tokens(text: str) -> str:
    """Lower-cased words and punctuation marks, separated by spaces."""
    return " ".join(re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", text.lower()))


def _tokenised_multi30k(data: Path, folder: Path, part: str) -> Files:
    """Lower-cased, tokenised pairs from German to English, as the tutorials read them."""

    def write(name: str, stem: str) -> str:
        sides = [_lines(data / f"{stem}.{language}") for language in ("de", "en")]
        pairs = zip(*([simple_tokens(line) for line in side] for side in sides), strict=True)
        return _write(folder / f"{name}.tsv", map("\t".join, pairs))

    return {name: write(name, stem) for name, stem in (("train", "train"), ("dev", "val"), ("test", "test2016"))}


def _joined_multi30k(data: Path, folder: Path, part: str) -> Files:
    """The lower-cased, tokenised text of the published results, its pieces joined to words."""

    def write(name: str, stem: str) -> str:
        sides = [_lines(data / "bpe" / f"{stem}.{language}") for language in ("en", "de")]
        pairs = zip(*([line.replace("@@ ", "") for line in side] for side in sides), strict=True)
        return _write(folder / f"{name}.tsv", map("\t".join, pairs))

    return {name: write(name, stem) for name, stem in (("train", "train"), ("dev", "val"), ("test", "test2016"))}


def _scan_cutoff(data: Path, folder: Path, part: str) -> Files:
    """All commands of SCAN: up to 26 actions for training, longer ones for the test."""
    lines = _lines(data / "length.train.tsv") + _lines(data / "length.test.tsv")
    short = [line for line in lines if len(line.split("\t")[1].split()) <= 26]
    long = [line for line in lines if len(line.split("\t")[1].split()) > 26]
    return {"train": _write(folder / "train.tsv", short), "test": _write(folder / "test.tsv", long)}


def _shakespeare(data: Path, folder: Path, part: str) -> Files:
    """The first nine tenths of the characters for training, the rest for validation, as nanoGPT splits them."""
    make_folder(folder)
    text = Path(_located(data, "input.txt")).read_text(encoding="utf-8")
    cut = int(0.9 * len(text))
    files = {"train": (folder / "train.txt", text[:cut]), "dev": (folder / "dev.txt", text[cut:])}
    for path, content in files.values():
        replace_file(path, content)
    return {name: str(path) for name, (path, _) in files.items()}


def _an4(data: Path, folder: Path, part: str) -> Files:
    """Utterances of train.npz and test.npz with their transcripts."""

    def write(name: str) -> str:
        frames = _located(data.absolute(), f"{name}.npz")
        texts = [json.loads(line)["text"] for line in _lines(data / f"{name}.jsonl")]
        return _write(folder / f"{name}.tsv", (f"{frames}#{number}\t{text}" for number, text in enumerate(texts)))

    return {"train": write("train"), "test": write("test")}


def _fsdd(data: Path, folder: Path, part: str) -> Files:
    """Recordings `digit_speaker_take.wav`: takes 0 to 4 are the test set; with a speaker, all recordings of theirs."""
    recordings = sorted(Path(_located(data.absolute(), "recordings")).glob("*.wav"))
    sets: dict[str, list[str]] = {"train": [], "test": []}
    for path in recordings:
        digit, speaker, take = path.stem.split("_")
        held_out = speaker == part if part else int(take) < 5
        sets["test" if held_out else "train"].append(f"{path}\t{digit}")
    return {name: _write(folder / f"{name}.tsv", lines) for name, lines in sets.items()}


def _idx(data: Path, folder: Path, part: str) -> Files:
    sets = {"train": "train", "test": "t10k"}
    return {
        name: _located(data, f"{stem}-images-idx3-ubyte.gz,{stem}-labels-idx1-ubyte.gz") for name, stem in sets.items()
    }


def _tutorial(rung: str, recipe: str, bleu: float, parameters: int) -> Row:
    """A rung of the de-en tutorials. Their parameter counts are quoted from memory and rounded down."""
    return Row(
        f"Multi30k de-en, test 2016: {rung}",
        MULTI30K,
        f"scoreboard/multi30k-de-en-{recipe}.yaml",
        _tokenised_multi30k,
        ("bleu_tokenised",),
        (Published(rung, {"bleu_tokenised": bleu}, TUTORIALS, True),),
        parameters=parameters,
        remark="Lower-cased, tokenised text, greedy search, words that occur twice, as in the tutorials.",
    )


LOW = ("ice", "ita", "khm", "lav", "mlt_latn", "rum", "slv", "wel_sw")
MEDIUM = ("arm_e", "bul", "geo", "hbs_latn", "jpn_hira", "vie_hanoi")
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
MEMORY = "the paper"
SCAN = "brendenlake/SCAN, BSD"
SIGMORPHON = "baseline of the shared task, README"
PRE_NORM = ("model.encoder.norm=pre", "model.decoder.norm=pre")
CAPTIONS = ("caption_bleu1", "caption_bleu2", "caption_bleu3", "caption_bleu4", "cider")


def _captions(values: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(CAPTIONS, values, strict=False))


MIXED = ("normal", "edit transducer", "lstm 256 x 2", "transformer 256 x 4, rotary")  # networks of autoconfig/sizes.py


def _pronunciation(
    size: str, languages: tuple[str, ...], baseline: float, ensemble: int = 1, networks: tuple[str, ...] = ()
) -> Row:
    """One model of the recipe that is chosen, the ensemble that is chosen, or models of several networks."""
    words, models = {"low": "800", "medium": "8,000"}[size], f", {ensemble} models" if ensemble > 1 else ", one model"
    models += f" of {len(networks)} networks" if networks else ""
    remark = {
        (): "The network that is chosen without any option, with `--ensemble 1`.",
        NETWORKS: "What is chosen without any option.",
        MIXED: "Networks that `--effort best` compares, each trained in full.",
    }[networks]
    return Row(
        f"SIGMORPHON 2021 pronunciation, {len(languages)} languages, {words} words{models}",
        "SIGMORPHON 2021 task 1, CC BY-SA",
        "task pronounce",
        named(f"{size}_{{part}}_train.tsv", f"{size}_{{part}}_dev.tsv", f"{size}_{{part}}_test.tsv"),
        ("ser", "per"),
        (Published(f"baseline, an ensemble, mean of these {len(languages)}", {"ser": baseline}, SIGMORPHON, True),),
        parts=languages,
        ensemble=ensemble,
        networks=networks,
        shares=f"g2p2021-{size}",
        remark=remark,
    )


def _inflection(size: str, baseline: float, best: float, ensemble: int = 1) -> Row:
    models = f", {ensemble} models" if ensemble > 1 else ""
    return Row(
        f"CoNLL-SIGMORPHON 2017 inflection, {size}{models}",
        "CoNLL-SIGMORPHON 2017 task 1, CC BY-SA",
        "task inflect",
        _inflection_files(size),
        ("exact",),
        (
            Published("baseline, mean of 52 languages", {"exact": baseline}, MEMORY),
            Published("best system, mean of 52 languages", {"exact": best}, MEMORY),
        ),
        parts=("hebrew", "hungarian", "russian", "spanish"),
        ensemble=ensemble,
        shares=f"inflection2017-{size}",
        remark="The recipe is the one that is chosen without any option. Mean of four languages; the published figures "
        "are means of 52, so they are a mark, not a comparison.",
    )


def _inflection_files(size: str) -> Callable[[Path, Path, str], Files]:
    """`lemma TAB form TAB features` in the order of the toolkit: lemma, features, form."""

    def files(data: Path, folder: Path, part: str) -> Files:
        def write(name: str, stem: str) -> str:
            rows = (line.split("\t") for line in _lines(data / f"{part}-{stem}.tsv"))
            turned = (f"{lemma}\t{features}\t{form}" for lemma, form, features in rows)
            return _write(folder / f"{name}.tsv", turned)

        sets = {"train": f"train-{size}", "dev": "dev", "test": "test"}
        return {name: write(name, stem) for name, stem in sets.items()}

    return files


def _cogs_relative(title: str, recipe: str) -> Row:
    """A Transformer with relative positions, scored on the generalisation set."""
    remedies = "Transformer, scaled embeddings, no early stopping, relative positions"
    return Row(
        title,
        "najoungkim/COGS, MIT",
        recipe,
        named("train.tsv", "dev.tsv", "gen.tsv"),
        ("exact",),
        (Published(remedies, {"exact": 81.0}, "Csordás et al. 2021", True),),
        kind_column="column3",
    )


ROWS: dict[str, Row] = {
    "multi30k-en-de": Row(
        "Multi30k en-de, test 2016, lower-cased and tokenised",
        f"{MULTI30K}; lower-cased, tokenised, joint BPE",
        "task translate",
        _joined_multi30k,
        ("bleu_tokenised",),
        (
            Published("Transformer-Tiny (Wu et al. 2021)", {"bleu_tokenised": 41.02}, "Revisit-MMT, README", True),
            mark(bleu_tokenised=42.0),
        ),
        remark="The pieces of the published text are joined to words. The recipe is the one that is chosen without any "
        "option.",
    ),
    "multi30k-en-de-r-drop": Row(
        "Multi30k en-de, test 2016, lower-cased and tokenised, R-Drop",
        f"{MULTI30K}; lower-cased, tokenised, joint BPE",
        "multi30k/r_drop.yaml",
        _joined_multi30k,
        ("bleu_tokenised",),
        (
            Published("Transformer-Tiny (Wu et al. 2021)", {"bleu_tokenised": 41.02}, "Revisit-MMT, README", True),
            mark(bleu_tokenised=42.0),
        ),
        remark="The network of `multi30k-en-de`, trained with R-Drop.",
    ),
    "multi30k-en-de-raw": Row(
        "Multi30k en-de, test 2016, raw text",
        MULTI30K,
        "multi30k/transformer.yaml",
        named("train.en,train.de", "val.en,val.de", "test2016.en,test2016.de"),
        ("bleu", "chrf"),
        settings=(*PRE_NORM, "tokens.source={kind: bpe, size: 10000}", "tokens.target={kind: bpe, size: 10000}"),
        remark="The same model on raw text, with subwords of its own. No published figure.",
    ),
    "multi30k-de-en-lstm": _tutorial("LSTM", "lstm", 13.8, 13_800_000),
    "multi30k-de-en-gru": _tutorial("GRU", "gru", 20.6, 14_200_000),
    "multi30k-de-en-attention": _tutorial("GRU with attention", "attention", 28.3, 20_500_000),
    "multi30k-de-en-convolution": _tutorial("convolution", "convolution", 34.1, 37_300_000),
    "multi30k-de-en-transformer": _tutorial("Transformer", "transformer", 36.5, 9_000_000),
    "cmudict": Row(
        "CMUdict, one model",
        "CMUdict 0.7b, BSD",
        "cmudict/attention.yaml",
        named("train.tsv", "", "test.tsv"),
        ("ser", "per"),
        (
            Published("Transformer (g2p-seq2seq)", {"ser": 20.6}, "g2p-seq2seq", True),
            Published("attention, one model", {"ser": 21.7, "per": 5.04}, MEMORY),
        ),
        remark="A word is right if it equals any listed pronunciation; phone errors count against the closest.",
    ),
    "cmudict-ensemble": Row(
        "CMUdict, five models",
        "CMUdict 0.7b, BSD",
        "cmudict/attention.yaml",
        named("train.tsv", "", "test.tsv"),
        ("ser", "per"),
        (Published("attention, five models", {"ser": 20.2, "per": 4.69}, MEMORY),),
        ensemble=5,
        shares="cmudict",
    ),
    "cmudict-mixed": Row(
        "CMUdict, five models of three networks",
        "CMUdict 0.7b, BSD",
        "cmudict/attention.yaml",
        named("train.tsv", "", "test.tsv"),
        ("ser", "per"),
        (Published("attention, five models", {"ser": 20.2, "per": 4.69}, MEMORY), mark(ser=19.5)),
        ensemble=5,
        networks=("cmudict/attention.yaml", "cmudict/hard_monotonic.yaml", "cmudict/transformer.yaml"),
        settings=("data.dev_seed=1",),
        remark="Two LSTMs with additive attention, two with hard monotonic attention, and one Transformer.",
    ),
    "cmudict-distilled": Row(
        "CMUdict, one model, distilled from five",
        "CMUdict 0.7b, BSD",
        "cmudict/attention.yaml",
        named("train.tsv", "", "test.tsv"),
        ("ser", "per"),
        (
            Published("Transformer (g2p-seq2seq)", {"ser": 20.6}, "g2p-seq2seq", True),
            Published("attention, one model", {"ser": 21.7, "per": 5.04}, MEMORY),
        ),
        teacher="cmudict-mixed",
        settings=("data.dev_seed=1", "training.steps=8000"),
        remark="The network of `cmudict`, which learns the token distributions of the five models of `cmudict-mixed`.",
    ),
    "cmudict-bottleneck": Row(
        "CMUdict, without attention",
        "CMUdict 0.7b, BSD",
        "cmudict/bottleneck.yaml",
        named("train.tsv", "", "test.tsv"),
        ("ser", "per"),
        (Published("LSTM without attention", {"ser": 28.6, "per": 7.63}, MEMORY),),
    ),
    "g2p2021-low": _pronunciation("low", LOW, 26.0),  # ice 12, ita 19, khm 34, lav 55, mlt 19, rum 10, slv 49, wel 10
    "g2p2021-low-ensemble": _pronunciation("low", LOW, 26.0, MEMBERS, NETWORKS),
    "g2p2021-low-mixed": _pronunciation("low", LOW, 26.0, 8, MIXED),
    # arm_e 7.0, bul 18.3, geo 0.0, hbs_latn 32.1, jpn_hira 5.2, vie_hanoi 2.5
    "g2p2021-medium": _pronunciation("medium", MEDIUM, 10.85),
    "g2p2021-medium-ensemble": _pronunciation("medium", MEDIUM, 10.85, MEMBERS, NETWORKS),
    "g2p2021-medium-mixed": _pronunciation("medium", MEDIUM, 10.85, 4, MIXED),
    "inflection2017-low": _inflection("low", 37.9, 50.6),
    "inflection2017-low-ensemble": _inflection("low", 37.9, 50.6, ensemble=5),
    "inflection2017-medium": _inflection("medium", 64.7, 82.8),
    "inflection2017-medium-ensemble": _inflection("medium", 64.7, 82.8, ensemble=5),
    "inflection2017-high": _inflection("high", 77.8, 95.3),
    "inflection2017-high-ensemble": _inflection("high", 77.8, 95.3, ensemble=3),
    "scan-simple": Row(
        "SCAN, simple split",
        SCAN,
        "scoreboard/scan-recurrent.yaml",
        named("simple.train.tsv", "", "simple.test.tsv"),
        ("exact",),
        (Published("best recurrent", {"exact": 99.8}, MEMORY),),
        settings=(
            "model.decoder.context=bahdanau",
            "training.batch_tokens=1024",
            "training.steps=4000",
            "training.checkpoint_every=1000",
            "training.validate_every=1000",
        ),
    ),
    "scan-length": Row(
        "SCAN, length split",
        SCAN,
        "scoreboard/scan-recurrent.yaml",
        named("length.train.tsv", "", "length.test.tsv"),
        ("exact",),
        (Published("best recurrent", {"exact": 20.8}, MEMORY),),
    ),
    "scan-jump": Row(
        "SCAN, add jump",
        SCAN,
        "scoreboard/scan-recurrent.yaml",
        named("jump.train.tsv", "", "jump.test.tsv"),
        ("exact",),
        (Published("best recurrent", {"exact": 1.2}, MEMORY),),
    ),
    "scan-jump-convolution": Row(
        "SCAN, add jump, convolutions",
        SCAN,
        "scoreboard/scan-convolution.yaml",
        named("jump.train.tsv", "", "jump.test.tsv"),
        ("exact",),
        (Published("convolution (Dessì & Baroni 2019)", {"exact": 69.0}, MEMORY),),
        remark="Width 64 in place of 512, and no positions.",
    ),
    "scan-length-relative": Row(
        "SCAN, length split, relative positions",
        SCAN,
        "scoreboard/scan-relative.yaml",
        named("length.train.tsv", "", "length.test.tsv"),
        ("exact",),
        remark="The same Transformer as for cut-off 26.",
    ),
    "scan-cutoff-26": Row(
        "SCAN, trained on up to 26 actions, tested on more",
        SCAN,
        "scoreboard/scan-relative.yaml",
        _scan_cutoff,
        ("exact",),
        (Published("Transformer, relative positions", {"exact": 100.0}, "Csordás et al. 2021", True),),
    ),
    "cogs": Row(
        "COGS generalisation, plain Transformer",
        "najoungkim/COGS, MIT",
        "scoreboard/cogs-plain.yaml",
        named("train.tsv", "dev.tsv", "gen.tsv"),
        ("exact",),
        (Published("Transformer", {"exact": 35.0}, "Kim & Linzen 2020", True),),
        kind_column="column3",
    ),
    "cogs-relative": _cogs_relative("COGS generalisation, with the remedies", "scoreboard/cogs-relative.yaml"),
    "cogs-published-settings": _cogs_relative(
        "COGS generalisation, with the remedies and all settings of the published code",
        "scoreboard/cogs-published-settings.yaml",
    ),
    "shakespeare": Row(
        "tiny-shakespeare, characters, validation loss",
        "karpathy/char-rnn",
        "shakespeare/transformer.yaml",
        _shakespeare,
        ("nats_per_character",),
        (Published("nanoGPT, 6 layers of 384", {"nats_per_character": 1.4697}, "nanoGPT", True),),
        settings=("evaluation.metrics=[nats_per_character]",),
        parameters=10_750_000,
    ),
    "shakespeare-small": Row(
        "tiny-shakespeare, the small setting for a CPU",
        "karpathy/char-rnn",
        "scoreboard/shakespeare-small.yaml",
        _shakespeare,
        ("nats_per_character",),
        (Published("nanoGPT, 4 layers of 128", {"nats_per_character": 1.88}, "nanoGPT", True),),
        remark="2,000 updates of 12 blocks of 64 characters.",
    ),
    "flickr8k-soft": Row(
        "Flickr8k, soft attention",
        "Flickr8k, research use; EfficientNet-Lite0 from PyPI as lite0.safetensors",
        "scoreboard/flickr8k-soft.yaml",
        named("train.tsv", "dev.tsv", "test.tsv"),
        CAPTIONS,
        (Published("soft attention (Xu et al. 2015)", _captions((67.0, 44.8, 29.9, 19.5)), MEMORY),),
        settings=("data.sources.picture.network={data}/lite0.safetensors",),
        remark="The paper has a VGG network on 224 pixels; here a smaller one reads images of 160 pixels.",
    ),
    "flickr8k-hard": Row(
        "Flickr8k, hard attention",
        "Flickr8k, research use; EfficientNet-Lite0 from PyPI as lite0.safetensors",
        "scoreboard/flickr8k-hard.yaml",
        named("train.tsv", "dev.tsv", "test.tsv"),
        CAPTIONS,
        (Published("hard attention (Xu et al. 2015)", _captions((67.0, 45.7, 31.4, 21.3)), MEMORY),),
        settings=("data.sources.picture.network={data}/lite0.safetensors",),
    ),
    "an4-attention": Row(
        "AN4, attention",
        "CMU AN4, free",
        "an4/attention.yaml",
        _an4,
        ("cer",),
        (Published("attention (ESPnet)", {"cer": 70.6}, "ESPnet", True),),
        remark="948 utterances do not suffice to train cross-attention.",
    ),
    "an4-joint": Row(
        "AN4, attention and CTC",
        "CMU AN4, free",
        "an4/joint.yaml",
        _an4,
        ("cer",),
        (Published("joint (ESPnet)", {"cer": 15.3}, "ESPnet", True),),
    ),
    "an4-ctc": Row(
        "AN4, CTC",
        "CMU AN4, free",
        "an4/ctc.yaml",
        _an4,
        ("cer",),
        (Published("CTC (ESPnet)", {"cer": 12.6}, "ESPnet", True),),
    ),
    "fsdd": Row(
        "FSDD, official split",
        "Jakobovski/free-spoken-digit-dataset, CC BY-SA 4.0",
        "task classify-audio",
        _fsdd,
        ("accuracy",),
        (Published("convolutional networks, best", {"accuracy": 99.0}, "reports on the web"),),
        remark="The recipe is the one that is chosen without any option.",
    ),
    "fsdd-speakers": Row(
        "FSDD, one speaker left out",
        "Jakobovski/free-spoken-digit-dataset, CC BY-SA 4.0",
        "task classify-audio",
        _fsdd,
        ("accuracy",),
        parts=SPEAKERS,
        remark="The recipe is the one that is chosen without any option. Mean of six trainings; the test recordings "
        "are those of a speaker who is not in the training data.",
    ),
    "fashion-mnist": Row(
        "Fashion-MNIST, Vision Transformer",
        "zalandoresearch/fashion-mnist, MIT (Debian: dataset-fashion-mnist)",
        "fashion_mnist/patches.yaml",
        _idx,
        ("accuracy",),
        (Published("two-layer CNN, best", {"accuracy": 93.4}, "the benchmark of the data set", True),),
    ),
    "sst2": Row(
        "SST-2, from scratch",
        "Stanford Sentiment Treebank, research use",
        "task classify",
        named("train.tsv", "dev.tsv", "test.tsv"),
        ("accuracy",),
        (Published("LSTM with pretrained word vectors", {"accuracy": 84.9}, MEMORY),),
    ),
    "sst2-minilm": Row(
        "SST-2, on MiniLM",
        "Stanford Sentiment Treebank, research use; all-MiniLM-L6-v2 as minilm/",
        "task classify",
        named("train.tsv", "dev.tsv", "test.tsv"),
        ("accuracy",),
        (mark(accuracy=90.0),),
        settings=("init.encoder={data}/minilm", "training.optimiser.learning_rate=0.00005"),
    ),
    "ud-ewt": Row(
        "UD English EWT, universal tags, from scratch",
        "UD_English-EWT, CC BY-SA",
        "task tag",
        named("train.tsv", "dev.tsv", "test.tsv"),
        ("accuracy",),
        (mark(accuracy=93.0), Published("tagger with pretrained word vectors", {"accuracy": 95.4}, MEMORY)),
    ),
    "ud-ewt-minilm": Row(
        "UD English EWT, universal tags, on MiniLM",
        "UD_English-EWT, CC BY-SA; all-MiniLM-L6-v2 as minilm/",
        "task tag",
        named("train.tsv", "dev.tsv", "test.tsv"),
        ("accuracy",),
        (Published("tagger with pretrained word vectors", {"accuracy": 95.4}, MEMORY),),
        settings=("init.encoder={data}/minilm", "training.optimiser.learning_rate=0.00005"),
    ),
    "stsb": Row(
        "STS-B, trained from MiniLM, Spearman",
        "STS benchmark; all-MiniLM-L6-v2 as minilm/",
        "task embed",
        named("train.tsv", "dev.tsv", "test.tsv"),
        ("spearman",),
        (Published("all-MiniLM-L6-v2", {"spearman": 82.0}, MEMORY), mark(spearman=84.0)),
        settings=(
            "init.model={data}/minilm",
            "training.objective={kind: cosent}",
            "training.optimiser.learning_rate=0.00002",
            "training.batch_tokens=1024",
            "training.steps=1000",
            "training.validate_every=100",
            "training.monitor=spearman",
            "evaluation.metrics=[spearman]",
        ),
        remark="Graded similarities with CoSENT.",
    ),
    "tatoeba": Row(
        "Tatoeba en-de, our split, sacreBLEU",
        "Tatoeba, CC BY 2.0 FR",
        "scoreboard/tatoeba.yaml",
        named("train.tsv", "dev.tsv", "test.tsv"),
        ("bleu", "chrf"),
        remark="No published figure: this record sets the mark.",
    ),
}


def find_row(name: str) -> Row:
    if name not in ROWS:
        raise InputError(f"the scoreboard has no row {name!r}", remedy=nearest(name, ROWS))
    return ROWS[name]
