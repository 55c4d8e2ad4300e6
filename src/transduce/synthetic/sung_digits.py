"""Recordings of sung digits: each digit is a chord of two pitches."""

from __future__ import annotations

import io
import random
import wave
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from transduce.modalities.audio.files import to_int16
from transduce.synthetic.dataset import FileExample, is_held_out

RATE = 8000  # samples per second
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PITCHES = (360.0, 540.0, 810.0, 1215.0, 1822.5)  # hertz, a fifth apart
CHORDS = dict(zip(WORDS, combinations(PITCHES, 2), strict=True))
MAX_WORDS = 4


def generate(rng: random.Random, held_out: bool) -> Iterator[FileExample]:
    """One to four digits. Some pairs of adjacent digits are held out. The truth is the time span of each digit."""
    while True:
        words = rng.choices(WORDS, k=rng.randint(1 + held_out, MAX_WORDS))
        if any(is_held_out(" ".join(pair)) for pair in pairwise(words)) == held_out:
            content, spans = record(words, rng)
            yield FileExample("", " ".join(words), {"wav": content}, {"spans": spans})


def record(words: list[str], rng: random.Random) -> tuple[bytes, list[tuple[float, float]]]:
    """A WAV file, and the time span of each word in seconds."""
    parts, spans, now = [], [], 0
    for word in [*words, ""]:
        gap = np.zeros(int(RATE * rng.uniform(0.04, 0.12)))
        sung = sing(word, rng) if word else np.zeros(0)
        begin = now + len(gap)
        now = begin + len(sung)
        parts += [gap, sung]
        spans += [(round(begin / RATE, 4), round(now / RATE, 4))] if word else []
    samples = np.concatenate(parts)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(size=len(samples))
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(to_int16(samples + 0.01 * noise).astype("<i2").tobytes())
    return stream.getvalue(), spans


def sing(word: str, rng: random.Random) -> np.ndarray:
    """The waveform of one word, with random pitch, tempo and volume."""
    pitch, volume = rng.uniform(0.95, 1.05), rng.uniform(0.1, 0.25)
    time = np.arange(int(RATE * rng.uniform(0.16, 0.28))) / RATE
    envelope = np.sin(np.pi * np.arange(len(time)) / len(time)) ** 0.5
    notes = [np.sin(2 * np.pi * (note * pitch * time + rng.random())) for note in CHORDS[word]]
    return volume * envelope * np.sum(notes, 0)
