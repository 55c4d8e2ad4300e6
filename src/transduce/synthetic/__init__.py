"""Registry of the synthetic data sets of every modality.

The held-out part of a set (words, names, combinations) depends on the words themselves, never on the seed: whatever
the seeds of two files, nothing held out appears in a file to train on. A new set is one module and one row here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from transduce.errors import InputError, nearest
from transduce.flow import Example
from transduce.storage import make_folder, open_atomic
from transduce.synthetic import algorithmic, dates, grammars, media, sentences, words
from transduce.synthetic.dataset import HELD_OUT, SyntheticDataset, distinct, pair_line, write_folder

__all__ = ["SYNTHETIC", "SyntheticDataset", "generate", "write_files", "write_splits"]

Length = tuple[int, int]  # lowest and highest number of letters

SYNTHETIC: dict[str, SyntheticDataset] = {
    "transliteration": SyntheticDataset(
        "Cyrillic words -> Latin letters", "transliterate", words.generate_transliterations
    ),
    "inflection": SyntheticDataset(
        "Turkish-like nouns TAB case and number -> inflected form", "inflect", words.generate_inflections, columns=2
    ),
    "summaries": SyntheticDataset(
        "news of a few sentences -> one-sentence summary", "summarise", sentences.generate_summaries
    ),
    "questions": SyntheticDataset(
        "a story of who is where and has what TAB a question -> the answer",
        "answer",
        sentences.generate_questions,
        columns=2,
    ),
    "dialogue": SyntheticDataset(
        "five turns of booking a table -> the next turn",
        "converse",
        sentences.generate_dialogues,
        columns=sentences.TURNS,
    ),
    "records": SyntheticDataset("attributes of a restaurant -> a sentence", "describe", sentences.generate_records),
    "translations": SyntheticDataset(
        "English sentences -> German, with agreement and verbs at the end", "translate", grammars.generate_translations
    ),
    "pronouns": SyntheticDataset(
        "a document TAB an English sentence -> German, where `it` needs the sentences before",
        "translate",
        grammars.generate_pronouns,
        columns=2,
        settings=("data.columns=column2,column3", "data.document_column=column1", "data.context=2"),
    ),
    "reviews": SyntheticDataset("reviews of films -> positive or negative", "classify", grammars.generate_reviews),
    "tags": SyntheticDataset("sentences -> part-of-speech tags", "tag", grammars.generate_tags),
    "entailment": SyntheticDataset(
        "who is where TAB a statement -> entailment, contradiction or neutral",
        "entail",
        grammars.generate_entailment,
        columns=2,
    ),
    "lines": SyntheticDataset("lines of text, without a source", "mask", grammars.generate_lines, columns=0),
    "stories": SyntheticDataset("running text, without a source", "lm", grammars.generate_stories, columns=0),
    "copy": SyntheticDataset("letters -> the same letters", "generate", algorithmic.generator("copy")),
    "reverse": SyntheticDataset("letters -> the letters in reverse", "generate", algorithmic.generator("reverse")),
    "sort": SyntheticDataset("letters -> the letters in order", "generate", algorithmic.generator("sort")),
    "dates": SyntheticDataset("dates in many languages and styles -> ISO 8601", "generate", dates.generate_split),
    "pronunciation": SyntheticDataset(
        "English words -> phones (CMU Pronouncing Dictionary)", "pronounce", words.generate_pronunciations
    ),
    "paraphrases": SyntheticDataset("a sentence -> a paraphrase of it", "embed", sentences.generate_split),
    "shapes": SyntheticDataset("images of shapes -> a caption", "caption", media.generate_captions, writes_files=True),
    "icons": SyntheticDataset(
        "images of one shape -> a caption, to draw from text: see `encode-images`",
        "draw",
        media.generate_icons,
        writes_files=True,
    ),
    "shape-kinds": SyntheticDataset(
        "images of one shape -> its kind", "classify-images", media.generate_kinds, writes_files=True
    ),
    "colour-questions": SyntheticDataset(
        "images of three shapes TAB a question about a colour -> the answer",
        "vqa",
        media.generate_column_questions,
        columns=2,
        writes_files=True,
        salt="looks",
    ),
    "scene-questions": SyntheticDataset(
        "images of shapes TAB a question: which, how many, where -> the answer",
        "vqa",
        media.generate_scene_questions,
        columns=2,
        writes_files=True,
        salt="scenes",
    ),
    "sung-digits": SyntheticDataset(
        "recordings of sung digits -> the digits",
        "transcribe",
        media.generate_sung_digits,
        writes_files=True,
        salt="tones",
    ),
    "melodies": SyntheticDataset(
        "recordings of three notes -> rising, falling, peak or valley",
        "classify-audio",
        media.generate_melodies,
        writes_files=True,
    ),
    "moving-shapes": SyntheticDataset(
        "videos of a moving shape -> a caption",
        "caption-videos",
        media.generate_video_captions,
        writes_files=True,
        salt="films",
    ),
    "actions": SyntheticDataset(
        "videos of a moving shape -> the kind of motion",
        "classify-videos",
        media.generate_actions,
        writes_files=True,
    ),
}


def generate(
    name: str, count: int, seed: int = 1, *, held_out: bool = False, length: Length | None = None
) -> Iterator[Example]:
    """`count` distinct examples of a text data set; the columns of a source are separated by tabs."""
    dataset = _dataset(name, length)
    if dataset.writes_files:
        raise InputError(f"the sources of {name} are files", remedy="write them to a folder: --output FOLDER")
    if length is not None:
        algorithmic.require_distinct(count, length, share=1 / HELD_OUT if held_out else 1 - 1 / HELD_OUT)
    return _exactly(count, distinct(dataset.generate(_rng(dataset.salt or name, seed, held_out), held_out)), name)


def write_files(name: str, folder: Path, count: int, seed: int = 1, *, held_out: bool = False) -> Path:
    """Writes `count` examples of a data set whose sources are files; returns the path of its pairs.tsv."""
    dataset = _dataset(name)
    if not dataset.writes_files:
        raise InputError(f"the sources of {name} are texts, not files", remedy="generate its lines")
    return write_folder(islice(dataset.generate(_rng(dataset.salt or name, seed, held_out), held_out), count), folder)


def write_splits(
    name: str, folder: Path, counts: tuple[int, int, int], seed: int = 1, *, length: Length | None = None
) -> list[Path]:
    """Writes train.tsv, dev.tsv and test.tsv of a text data set with `counts` examples; returns their paths.

    Development and test examples are of the held-out part; those of `copy`, `reverse` and `sort` are other sources of
    the same distribution (`algorithmic.split`). No example is in two files; a file without examples is not written.
    """
    dataset, (train, dev, test) = _dataset(name, length), counts
    if dataset.writes_files:
        raise InputError(f"the sources of {name} are files", remedy="write one folder for each split: --held-out")
    parts: list[Iterable[Example]]
    if name in algorithmic.TASKS:
        parts = list(algorithmic.split(name, train, dev, test, seed, length=length or algorithmic.LENGTH))
    else:
        others = list(generate(name, dev + test, seed, held_out=True))
        parts = [generate(name, train, seed), others[:dev], others[dev:]]
    paths = []
    for split, count, examples in zip(("train", "dev", "test"), counts, parts, strict=True):
        if count:
            paths.append(make_folder(folder) / f"{split}.tsv")
            with open_atomic(paths[-1]) as stream:
                stream.writelines(pair_line(example, dataset.columns).encode() for example in examples)
    return paths


def _dataset(name: str, length: Length | None = None) -> SyntheticDataset:
    """The data set of a name; with sources of another `length` where they are letters."""
    if name not in SYNTHETIC:
        raise InputError(f"no synthetic data set is called {name!r}", remedy=nearest(name, SYNTHETIC))
    if length is None:
        return SYNTHETIC[name]
    if name not in algorithmic.TASKS:
        known = ", ".join(algorithmic.TASKS)
        raise InputError(f"the length of {name} cannot be chosen", remedy=f"leave out --length; it is for {known}")
    return replace(SYNTHETIC[name], generate=algorithmic.generator(name, length))


def _rng(salt: str, seed: int, held_out: bool) -> random.Random:
    return random.Random(f"{salt} {seed} {held_out}")


def _exactly(count: int, examples: Iterator[Example], name: str) -> Iterator[Example]:
    """The first `count` examples; an error where the data set has fewer."""
    available = 0
    for example in islice(examples, count):
        available += 1
        yield example
    if available < count:
        raise InputError(f"{name} has only {available:,} examples of this part, not {count:,}", remedy="lower --count")
