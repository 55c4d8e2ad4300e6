"""Chance enters; recordings of sung digits leave, with what is said in them and when."""

from __future__ import annotations

import io
import random
import wave
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from transduce.modalities.audio.files import in_16_bits
from transduce.synthetic.files import Filed
from transduce.synthetic.words import is_held_out

RATE = 8000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PITCHES = (360.0, 540.0, 810.0, 1215.0, 1822.5)  # hertz, a fifth apart
CHORDS = dict(zip(WORDS, combinations(PITCHES, 2), strict=True))  # every word is two of them at once
LONGEST = 4  # words


def sing(word: str, chance: random.Random) -> np.ndarray:
    """One word, a little higher or lower, faster or slower, louder or softer each time."""
    pitch, loud = chance.uniform(0.95, 1.05), chance.uniform(0.1, 0.25)
    place = np.arange(int(RATE * chance.uniform(0.16, 0.28))) / RATE
    swell = np.sin(np.pi * np.arange(len(place)) / len(place)) ** 0.5
    notes = [np.sin(2 * np.pi * (note * pitch * place + chance.random())) for note in CHORDS[word]]
    return loud * swell * np.sum(notes, 0)


def record(words: list[str], chance: random.Random) -> tuple[bytes, list[tuple[float, float]]]:
    """A WAV file, and from which second to which each word lasts."""
    parts, spans, now = [], [], 0
    for word in [*words, ""]:
        gap = np.zeros(int(RATE * chance.uniform(0.04, 0.12)))
        sung = sing(word, chance) if word else np.zeros(0)
        begin = now + len(gap)
        now = begin + len(sung)
        parts += [gap, sung]
        spans += [(round(begin / RATE, 4), round(now / RATE, 4))] if word else []
    samples = np.concatenate(parts)
    noise = np.random.default_rng(chance.getrandbits(32)).normal(size=len(samples))
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(in_16_bits(samples + 0.01 * noise).astype("<i2").tobytes())
    return stream.getvalue(), spans


def draw_digits(chance: random.Random, held_out: bool) -> Iterator[Filed]:
    """One to four digits. Two that follow each other are for ever on one side of the split: some pairs are held out."""
    while True:
        words = chance.choices(WORDS, k=chance.randint(1 + held_out, LONGEST))
        if any(is_held_out(" ".join(pair)) for pair in pairwise(words)) == held_out:
            content, spans = record(words, chance)
            yield Filed("", " ".join(words), {"wav": content}, {"spans": spans})
