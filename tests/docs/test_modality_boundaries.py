"""Only the modality rooms and a few registries know about images, audio and video."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "transduce"
ROOMS = (
    *(
        f"modalities/{name}.py"
        for name in (
            "image",
            "image_files",
            "image_patches",
            "image_tokenizers",
            "swin",
            "audio",
            "audio_files",
            "video",
        )
    ),
    "modalities/transcription.py",
    "synthetic/",
)
# Registries of names, recipes of tasks, rows of the scoreboard, commands with their examples, models of other toolkits,
# the drawings of attention, which are images themselves, servers, which receive and show files of every modality, and
# the names that columns have in the files of others.
REGISTRIES = (
    *("modalities/__init__.py", "autoconfig/", "cli/", "interop/", "explain/png.py", "evaluation/scoreboard.py"),
    *("serving/", "studio/", "data/readers/delimited.py"),
)
WORDS = re.compile(r"(?<![a-z])(image|photo|photograph|audio|sound|speech|video|film|waveform|spectrogram)s?(?![a-z])")


def other_modules() -> list[str]:
    names = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))]
    return [name for name in names if not name.startswith((*ROOMS, *REGISTRIES))]


@pytest.mark.parametrize("name", other_modules())
def test_other_modules_do_not_mention_a_modality(name: str) -> None:
    text = (SOURCE / name).read_text().lower()
    assert not re.search(r"transduce\.modalities\.(image|audio|video)(_[a-z]+)?\b", text)
    mentioned = sorted(set(WORDS.findall(text)))
    assert not mentioned, f"{name} mentions {mentioned}"


def test_the_check_covers_the_tree_and_finds_the_words() -> None:
    assert len(other_modules()) > 120
    assert all((SOURCE / room).exists() for room in ROOMS)
    assert all(WORDS.search(text) for text in ("an image of it", "audio", "two films"))
    assert not WORDS.search("imagine a profile")
