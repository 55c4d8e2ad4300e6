"""Models that the original toolkits trained: scores, greedy search and beams equal to what the toolkits recorded.

`make oracles` records them again (tests/oracles/toolkits); RECORD_TOOLKITS=FILE keeps the differences that are measured
here, for the table of docs/interop.md.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import transduce

FOLDERS = sorted((Path(__file__).parent / "recorded").iterdir())
BEAM = 4


def read(folder: Path) -> tuple[dict[str, Any], transduce.Model]:
    record = json.loads((folder / "record.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return record, transduce.load(folder / record["files"][0], device="cpu")


def outputs(model: transduce.Model, record: dict[str, Any], **search: Any) -> list[str]:
    return [one.text for one in model.generate(record["sources"], max_length=record["max_length"], **search)]


def ended(found: list[str], theirs: list[str], max_length: int) -> list[tuple[str, str]]:
    """The lines that both sides ended: at the longest output each toolkit has a rule of its own."""
    pairs = zip(found, theirs, strict=True)
    return [pair for pair in pairs if max(len(one.split()) for one in pair) < max_length - 1]


def keep(folder: Path, **measured: Any) -> None:
    if place := os.environ.get("RECORD_TOOLKITS"):
        file = Path(place)
        content = json.loads(file.read_text()) if file.exists() else {}
        content.setdefault(folder.name, {}).update(measured)
        file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_scores_and_outputs_equal_the_toolkit(folder):
    record, model = read(folder)
    scored = model.score(list(zip(record["sources"], record["targets"], strict=True)))
    worst = max(abs(one.score - expected) for one, expected in zip(scored, record["scores"], strict=True))
    assert worst < record["tolerance"]
    counts = {}
    for name, search in (("greedy", {"strategy": "greedy"}), ("beam", {"beam": BEAM, **record.get("search", {})})):
        if record[name] is not None:
            pairs = ended(outputs(model, record, **search), record[name], record["max_length"])
            counts[name] = [sum(found == theirs for found, theirs in pairs), len(pairs)]
            assert len(pairs) > len(record["sources"]) - 5
            assert [found for found, _ in pairs] == [theirs for _, theirs in pairs], name
    facts = {name: record[name] for name in ("toolkit", "version", "settings")}
    keep(folder, **facts, score=worst, **counts)


@pytest.mark.parametrize("name", ["marian-int8", "marian-ssru"])
def test_folder_with_a_binary_of_marian_is_not_taken_for_one_of_ctranslate2(name):
    """Both call it model.bin."""
    folder = Path(__file__).parent / "recorded" / name
    assert (folder / "model.bin").is_file()
    assert transduce.load(folder, device="cpu").recipe.model.decoder["token_mixer"]["kind"] == "ssru"


def test_bridge_that_mixes_the_sentences_of_a_batch_is_warned_of():
    """OpenNMT-py before version 3: what was recorded has batches of one."""
    with pytest.warns(UserWarning, match="outputs here are those that it gives with a batch size of 1"):
        transduce.load(Path(__file__).parent / "recorded" / "opennmt-version-1", device="cpu")
