"""Invented sets of files: the same for the same seed, nothing held out in training, files that can be read."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest

from transduce.autoconfig import recipe_for
from transduce.autoconfig.tasks import TASKS
from transduce.contracts import Modality
from transduce.errors import InputError
from transduce.recipe.registry import maker
from transduce.synthetic import SETS
from transduce.synthetic.file_sets import FILED
from transduce.synthetic.files import write_set

EVERY = pytest.mark.parametrize("name", FILED)


def content(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@EVERY
def test_the_same_seed_gives_the_same_files(name, tmp_path):
    for place, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_set(FILED, name, tmp_path / place, 6, seed, False)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a") != content(tmp_path / "c")


@EVERY
def test_lines_name_files_and_every_line_has_its_truth(name, tmp_path):
    pairs = write_set(FILED, name, tmp_path, 12, 1, False)
    lines = pairs.read_text().splitlines()
    truths = (tmp_path / "truth.jsonl").read_text().splitlines()
    assert len(lines) == len(truths) == 12
    columns = {len(line.split("\t")) for line in lines}
    assert len(columns) == 1
    for line, truth in zip(lines, truths, strict=True):
        assert (tmp_path / line.split("\t")[0]).is_file()
        assert all(line.split("\t"))
        assert json.loads(truth)


@EVERY
def test_its_task_reads_it(name, tmp_path):
    """The files are what the sources of the task's own recipe name."""
    assert name not in SETS
    if FILED[name].task not in TASKS or FILED[name].task == "draw":  # which reads what `pixels` writes
        return
    pairs = write_set(FILED, name, tmp_path, 12, 1, False)
    recipe = recipe_for(str(pairs), [], FILED[name].task)
    first, *others = recipe.data.sources.values()
    assert len(pairs.read_text().split("\n")[0].split("\t")) == 2 + len(others)
    modality = maker(Modality, {"kind": first} if isinstance(first, str) else dict(first))()
    kept = modality.read(str(tmp_path / pairs.read_text().split("\t")[0]))
    assert modality.padded([kept]).values.shape[0] == 1


@EVERY
def test_nothing_held_out_is_trained_on(name):
    """Whatever the seeds: no file of one side stands on the other."""
    sides = []
    for seed, held_out in ((1, False), (2, True)):
        examples = islice(FILED[name].draw(random.Random(seed), held_out), 40)
        sides.append({file for one in examples for file in one.files.values()})
    assert min(map(len, sides)) > 5
    assert not sides[0] & sides[1]


def test_an_unknown_set_is_named(tmp_path):
    with pytest.raises(InputError, match="did you mean 'shapes'"):
        write_set(FILED, "shape", tmp_path, 1, 1, False)
