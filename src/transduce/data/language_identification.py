"""Language identification by character n-grams (Cavnar and Trenkle 1994), as naive Bayes over a few candidates.

The profile of a language has two sources: its names of places, languages, units and times in CLDR (the Unicode locale
data that Babel carries), and, for common languages, their most frequent function words. There is nothing to download.

`identify` ranks candidates for one text. `LanguageIdentifier` labels many texts at once, and learns from these
profiles or from samples.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from transduce.data.near_duplicates import character_windows
from transduce.errors import InputError
from transduce.storage import replace_file

SIZES = (1, 2, 3, 4)
BUCKETS = 1 << 16  # of hashed n-grams of one size
SMOOTHING = 0.5  # count of every n-gram before the samples
BATCH = 4096  # texts at a time
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_FIELDS = ("date_fields", "unit_patterns", "list_patterns", "days", "months", "territories", "languages")
_FUNCTION_WORDS = {
    "cs": "a se na v je že to s z o do i ve k by pro jsem ale jako za si po jsou nebo tak být byl není jeho které",
    "da": "og i at det er en til på som af for med den de ikke har var et jeg der han vi fra men om sig så hun være",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an er wir sie ich "
    "du hat war bei sind einen nach aus wird kann noch mir mich was wie so dass wenn ihr sein haben habe bist einem",
    "en": "the of and to in a is that for it as was with be by on not he i this are or his from at which but have an "
    "had they you were there one all we can her has would what will she do my me your him them who when how out about",
    "es": "de la que el en y a los se del las un por con no una su para es al lo como más o pero sus le ha me si sin "
    "este ya todo esta son también fue muy yo qué está tengo puede hay",
    "et": "ja on ei et ta see kui oli ka mis oma aga ma nii või siis ning kes välja tema nad me pole olid veel sa",
    "fi": "ja on ei että se hän oli en mutta joka kun niin tai ovat mitä myös minä jos kuin sen olen tämä ole vain nyt",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec je elle "
    "nous vous mais ou son cette tu leur était être ont été aux tout",
    "hr": "i je u se na da su za od s a koji o ne što kao bi to do nije iz ali sam će ili kako po samo smo",
    "hu": "a az és hogy nem is egy van volt meg de ez azt csak ki már mint ha még mert azonban nagyon vagy én lesz",
    "id": "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena ada adalah oleh mereka kami",
    "it": "di e che la il un a per è in una sono mi non con si da come io lo ho ha del le della se i gli ma al anche "
    "nel più questo alla era suo ci dei",
    "lt": "ir į iš kad su yra tai bet kaip per apie ar nuo o jis jo aš tik dar po buvo jei jų nėra",
    "lv": "un ir ar ka no uz par kas tas bet kā lai pie es viņš tā vai nav bija jau tikai viņa gan arī",
    "nl": "de van het een en in is dat op te zijn voor met die niet aan er om ook als dan maar bij nog uit naar heb ik "
    "je hij ze we was hebben heeft wordt kan zou door over geen mijn deze",
    "no": "og i det på som er en til å av for at med har ikke den om et var jeg de han fra vi men så seg hun være kan",
    "pl": "i w na z do się nie jest to że o jak a po co tak za od przez ale czy dla już tylko jego był ja mnie oraz są",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das tem à seu "
    "sua ou ser eu também só pelo pela está você são muito",
    "ro": "de și în a la cu pe nu este că un o din se care pentru mai ce sau ca sunt lui dar ei fi au am să",
    "sk": "a sa na v je že to s z o do aj vo k by pre som ale ako za si po sú alebo tak byť bol nie jeho ktoré",
    "sl": "in je v se na da za so pa z ki ne po tudi kot o bi od ali še le bil sem kaj ni pri",
    "sv": "och i att det som en på är av för med den till inte har de ett om han var jag men sig från vi så kan hon",
    "tr": "bir ve bu da de için ile ne o çok mı daha gibi ben var sonra ama kadar olarak değil olan en mi her",
    "bg": "на и да се в не за е от с че по а това като си до са но той ще или аз бе мен ли",
    "ru": "и в не на я что с он а как это по но они к у из за вы так же от о мы все она для бы был его только",
    "ja": "は です の に を た が で て と し れ さ ある いる も する から な こと として い や この その ます",
    "zh": "的 一 是 在 不 了 有 和 人 这 中 大 为 上 个 国 我 以 要 他 时 来 用 们 這 個 會 你",
    "uk": "і в не на що з я це та до як він а за по але ми ви є у від для про його так вона був чи було",
}
_FUNCTION_WORD_COUNT = 12  # a function word counts as often as a name that CLDR has twelve times


@dataclass(frozen=True)
class DetectedLanguage:
    """A language with the posterior probability that a text is written in it."""

    language: str
    confidence: float  # 0 to 1


def ngrams(words: Iterable[str]) -> Iterator[str]:
    """The n-grams of 1 to 4 characters of words with a space on both sides."""
    for word in words:
        padded = f" {word} "
        yield from word
        for size in (2, 3, 4):
            yield from (padded[place : place + size] for place in range(len(padded) - size + 1))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif hasattr(value, "values"):
        for one in value.values():
            yield from _texts(one)


def _word_counts(language: str) -> Counter[str]:
    """The words of CLDR and the function words; none for a language that CLDR does not have."""
    from babel import Locale, UnknownLocaleError

    base = re.split("[-_]", language)[0]
    words: Counter[str] = Counter()
    try:
        data = Locale.parse(base)._data
        words.update(word for field in _FIELDS for text in _texts(data.get(field, {})) for word in _words(text))
    except (UnknownLocaleError, ValueError, TypeError):
        return words
    for word in _FUNCTION_WORDS.get(base, "").split():
        words[word] += _FUNCTION_WORD_COUNT
    return words


@lru_cache(maxsize=256)
def profile(language: str) -> dict[str, float]:
    """Log-probabilities of n-grams; empty for a language that CLDR does not have. "" stands for unseen n-grams."""
    words = _word_counts(language)
    if not words:
        return {}
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for ngram in ngrams([word]):
            counts[ngram] += min(count, _FUNCTION_WORD_COUNT)
    total = sum(counts.values()) + 20_000  # additive smoothing: half a count for each of 40,000 possible n-grams
    return {"": math.log(0.5 / total), **{one: math.log((count + 0.5) / total) for one, count in counts.items()}}


def identify(text: str, candidates: Sequence[str]) -> list[DetectedLanguage]:
    """The candidates with their posterior probabilities, most probable first; no evidence: all equal, in order."""
    found = list(ngrams(_words(text[:4096])))
    scores = [_score(found, profile(language)) for language in candidates]
    highest = max(scores, default=0.0)
    # N-grams overlap: as independent events, each character would count ten times.
    weights = [math.exp((score - highest) / 10) for score in scores]
    total = sum(weights)
    ranked = [DetectedLanguage(one, weight / total) for one, weight in zip(candidates, weights, strict=True)]
    return sorted(ranked, key=lambda one: -one.confidence)


def _score(found: Sequence[str], known: dict[str, float]) -> float:
    unseen = known.get("", math.log(0.5 / 20_000))
    return sum(known.get(ngram, unseen) for ngram in found)


class LanguageIdentifier:
    """The most probable language of each text, by the hashed n-grams of words and of the spaces between them."""

    def __init__(self, names: Sequence[str], log_probs: np.ndarray) -> None:
        self.names, self.log_probs = tuple(names), log_probs  # log_probs: size bucket language

    @classmethod
    def train(cls, samples: Mapping[str, Sequence[str]]) -> Self:
        """An identifier of the languages of these texts."""
        if len(samples) < 2 or not all(any(text.strip() for text in texts) for texts in samples.values()):
            raise InputError(
                f"samples of {', '.join(samples) or 'no language'}",
                where="language samples",
                remedy="give text of at least two languages",
            )
        counts = np.full((len(SIZES), BUCKETS, len(samples)), SMOOTHING)
        for language, texts in enumerate(samples.values()):
            for begin in range(0, len(texts), BATCH):
                for place, size in enumerate(SIZES):
                    buckets, _ = _buckets(texts[begin : begin + BATCH], size)
                    counts[place, :, language] += np.bincount(buckets, minlength=BUCKETS)
        return cls(list(samples), np.log(counts / counts.sum(1, keepdims=True)).astype(np.float32))

    @staticmethod
    def known_words(language: str) -> list[str]:
        """The words of the profile of a language, as a sample: for languages without another one."""
        words = [
            word for word, count in _word_counts(language).items() for _ in range(min(count, _FUNCTION_WORD_COUNT))
        ]
        if not words:
            remedy = f"give a sample: {language}=FILE"
            raise InputError(f"no profile of the language {language!r}", where="languages", remedy=remedy)
        return words

    def scores(self, texts: Sequence[str]) -> np.ndarray:
        """(n, languages): the log-probability of each text in each language, for a character of it."""
        total = np.zeros((len(texts), len(self.names)))
        if not texts:
            return total
        for place, size in enumerate(SIZES):
            buckets, begins = _buckets(texts, size)
            total += np.add.reduceat(self.log_probs[place][buckets].astype(np.float64), begins, axis=0)
        return total / np.array([len(text) + 2 for text in texts])[:, None]

    def languages(self, texts: Sequence[str]) -> list[str]:
        """The language of each text."""
        return [self.names[best] for best in self.scores(texts).argmax(1)]

    def save(self, path: Path) -> None:
        head = json.dumps(list(self.names)).encode()
        replace_file(path, len(head).to_bytes(8, "little") + head + self.log_probs.astype("<f4").tobytes())

    @classmethod
    def load(cls, path: Path) -> Self:
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        names = [str(name) for name in json.loads(content[8:end])]
        return cls(names, np.frombuffer(content[end:], "<f4").reshape(len(SIZES), BUCKETS, len(names)))


def _buckets(texts: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The buckets of the n-grams of all texts, with a space on both sides, and where each text begins."""
    hashed, begins = character_windows([f" {text.lower()} " for text in texts], size)
    return hashed & np.uint32(BUCKETS - 1), begins
