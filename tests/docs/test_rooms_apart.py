"""What is no text is known in its own room and at the doors, and nowhere else: a walk of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "transduce"
ROOMS = ("images", "sound", "video")
# Shelves and tables of names, recipes for tasks, commands with their examples, models from and for elsewhere.
DOORS = ("modalities.py", "fronts.py", "sets.py", "choose/", "commands/", "interop/", "export/")
SENSES = re.compile(r"(?<![a-z])(image|photo|photograph|audio|sound|speech|video|film|waveform|spectrogram)s?(?![a-z])")
WORDS = {"data/paraphrases.py"}  # invented sentences, in which people take photographs


def places() -> list[str]:
    names = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))]
    return [name for name in names if not name.startswith((*(f"{room}/" for room in ROOMS), *DOORS))]


@pytest.mark.parametrize("name", places())
def test_nobody_else_knows(name: str) -> None:
    text = (SOURCE / name).read_text().lower()
    assert not re.search(r"transduce\.(images|sound|video)\b", text)
    found = [] if name in WORDS else SENSES.findall(text)
    assert not found, f"{name} speaks of {sorted(set(found))}"


def test_the_walk_would_find_it() -> None:
    assert len(places()) > 150
    assert all((SOURCE / room).is_dir() for room in ROOMS)
    assert all(SENSES.search(text) for text in ("an image of it", "audio", "two films"))
    assert not SENSES.search("imagine a profile")
