"""Synthetic data sets whose sources are files: determinism, held-out part, readable files."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest

from transduce.autoconfig import recipe_for
from transduce.autoconfig.tasks import TASK_RECIPES
from transduce.contracts import Modality
from transduce.errors import InputError
from transduce.recipe.registry import factory
from transduce.synthetic import SYNTHETIC, generate, write_files

FILES = [name for name, dataset in SYNTHETIC.items() if dataset.writes_files]
every_file_dataset = pytest.mark.parametrize("name", FILES)


def content(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@every_file_dataset
def test_equal_seeds_give_equal_files(name, tmp_path):
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_files(name, tmp_path / folder, 6, seed)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a") != content(tmp_path / "c")


@every_file_dataset
def test_every_line_names_a_file_and_has_its_truth(name, tmp_path):
    pairs = write_files(name, tmp_path, 12)
    lines = pairs.read_text().splitlines()
    truths = (tmp_path / "truth.jsonl").read_text().splitlines()
    assert len(lines) == len(truths) == 12
    assert {len(line.split("\t")) for line in lines} == {SYNTHETIC[name].columns + 1}
    for line, truth in zip(lines, truths, strict=True):
        assert (tmp_path / line.split("\t")[0]).is_file()
        assert all(line.split("\t"))
        assert json.loads(truth)


@every_file_dataset
def test_recipe_of_its_task_reads_the_files(name, tmp_path):
    task = SYNTHETIC[name].task
    assert task in TASK_RECIPES
    if task == "draw":  # its recipe reads the output of `transduce encode-images`
        return
    pairs = write_files(name, tmp_path, 12)
    recipe = recipe_for(str(pairs), [], task)
    first, *others = recipe.data.sources.values()
    assert len(pairs.read_text().split("\n")[0].split("\t")) == 2 + len(others)
    modality = factory(Modality, {"kind": first} if isinstance(first, str) else dict(first))()
    array = modality.read(str(tmp_path / pairs.read_text().split("\t")[0]))
    assert modality.collate([array]).values.shape[0] == 1


@every_file_dataset
def test_training_and_held_out_files_are_disjoint_for_all_seeds(name):
    parts = []
    for seed, held_out in ((1, False), (2, True)):
        examples = islice(SYNTHETIC[name].generate(random.Random(seed), held_out), 40)
        parts.append({file for one in examples for file in one.files.values()})
    assert min(map(len, parts)) > 5
    assert not parts[0] & parts[1]


def test_unknown_dataset_suggests_the_nearest_name(tmp_path):
    with pytest.raises(InputError, match="did you mean 'shapes'"):
        write_files("shape", tmp_path, 1)


def test_file_and_text_datasets_are_not_confused(tmp_path):
    with pytest.raises(InputError, match="are files"):
        generate("shapes", 1)
    with pytest.raises(InputError, match="are texts"):
        write_files("questions", tmp_path, 1)
