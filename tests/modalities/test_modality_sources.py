"""Modality sources with a user's own modality and front end, from data to training and explanation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import transduce
from transduce.data.batching import Batches, DataPosition, gather
from transduce.data.filters import Filters
from transduce.data.store import build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import EOS
from transduce.recipe import build, parse
from transduce.training.experiment import train

OWN = '''
import json
import numpy as np
import torch
from transduce.contracts import Count, FrontEnd, Modality, VisualSource
from transduce.errors import UnreadableError
from transduce.flow import Padded

READ = []

class Numbers(Modality):
    """a file of numbers"""
    extensions = (".num",)
    def __init__(self, *, noise: float = 0.0) -> None:
        self.noise = noise
    @property
    def shape(self):
        return (1,)
    def read(self, named):
        READ.append(named)
        try:
            return np.array(json.loads(open(named).read()), np.float32)[:, None]
        except FileNotFoundError:
            raise UnreadableError("no such file", named) from None
        except ValueError as error:
            raise UnreadableError("no numbers", f"{named}: {error}") from None
    def length(self, kept):
        return len(kept)
    def collate(self, kept, draws=None):
        longest = max(map(len, kept))
        values = np.zeros((len(kept), longest, 1), np.float32)
        for row, one in enumerate(kept):
            values[row, : len(one)] = one
            if draws is not None and self.noise:
                values[row, : len(one)] += self.noise * draws[row].standard_normal((len(one), 1))
        lengths = torch.tensor([len(one) for one in kept])
        return Padded(torch.from_numpy(values), torch.arange(longest) < lengths[:, None])
    def position_labels(self, kept, grid):
        return [f"{number:g}" for number in kept[:, 0]]
    def visualise(self, kept, grid):
        return VisualSource(np.zeros((4, 4 * len(kept), 3), np.uint8), (1, len(kept)))

class Lifted(FrontEnd):
    """W x"""
    def __init__(self, width, *, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.width = width
        self.layer = torch.nn.Linear(*shape, width)
    def forward(self, source):
        return Padded(self.layer(source.values), source.mask)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of numbers whose signs are to be written; some lines share a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "data").mkdir()
    chance = np.random.default_rng(1)
    lines = []
    for number in range(60):
        signs = chance.choice([-1, 1], chance.integers(1, 5))
        (tmp_path / "data" / f"{number}.num").write_text(
            json.dumps((signs * chance.uniform(0.5, 2, len(signs))).tolist())
        )
        lines += [f"{number}.num\t{' '.join('up' if sign > 0 else 'down' for sign in signs)}"] * (1 + number % 2)
    (tmp_path / "data" / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def recipe(folder: Path, **data: object) -> dict:
    part = {"kind": "recurrent", "width": 16, "dropout": 0.0}
    return {
        "data": {
            "train": str(folder / "data" / "pairs.tsv"),
            "sources": {"rows": {"kind": "own.py:Numbers"}},
            "cache": str(folder / "cache"),
            **data,
        },
        "tokens": {"target": {"kind": "words"}},
        "model": {"encoder": {**part, "front": "own.py:Lifted"}, "decoder": {**part, "context": "bahdanau"}},
        "training": {
            "steps": 400,
            "batch_tokens": 200,
            "optimiser": {"learning_rate": 0.01},
            "schedule": {"kind": "cosine", "warmup": 10},
            "objective": {"label_smoothing": 0.0},
            "validate_every": 200,
        },
        "evaluation": {"metrics": ["exact"]},
    }


def test_custom_modality_trains_and_explains(folder: Path) -> None:
    trained = train(recipe(folder), folder / "run")
    model = transduce.load(folder / "run", trust_user_code=True)
    names = [str(folder / "data" / f"{number}.num") for number in range(40)]
    right = dict(line.split("\t") for line in (folder / "data" / "pairs.tsv").read_text().splitlines())
    outputs = [one.text for one in model.generate(names)]
    assert np.mean([generated == right[Path(name).name] for generated, name in zip(outputs, names, strict=True)]) > 0.9
    explained = model.explain(names[3])
    numbers = json.loads(Path(names[3]).read_text())
    assert list(explained.source_tokens) == [f"{number:g}" for number in numbers]
    assert explained.attention is not None
    assert explained.attention.shape[2:] == (len(explained.target_tokens), len(numbers))
    assert np.allclose(explained.attention.sum(-1), 1, atol=1e-5)
    assert explained.visual_sources[0].grid == (1, len(numbers))
    assert model.score([(names[0], right["0.num"])])[0].score < 0
    assert trained.run.folder == folder / "run"


def test_run_with_custom_code_reports_it(folder: Path) -> None:
    train({**recipe(folder), "training": {"steps": 1}}, folder / "run")
    with pytest.raises(InputError, match=r"own\.py:Numbers"):
        transduce.load(folder / "run")


def perceived(folder: Path, **options: object):
    completed = build.complete_recipe(parse(recipe(folder, sources={"rows": {"kind": "own.py:Numbers", **options}})))
    target = Tokenizer.train(["up down"], "words", 10)
    source = build.build_modality_source(completed, target)
    data = completed.data
    return source, build_store(data.train, source, target, Filters(), data.invalid, folder / "cache")


def test_every_file_is_read_once_and_stored_exactly(folder: Path) -> None:
    source, store = perceived(folder)
    assert len(store) == 90
    for row in (0, 1, 2, 50, 89):
        kept = store.items.items([row])[0].parts[0]
        assert np.array_equal(kept, source.read(store.example(row).source).parts[0])
        assert store.lengths[row, 0] == len(kept)
    held = {int(number) for number in store.items._item["rows"]}
    assert len(held) == 60
    batch = gather(store, [3, 4, 5])
    assert batch.source.values.shape[0] == 3
    assert batch.source.mask.sum(1).tolist() == store.lengths[[3, 4, 5], 0].tolist()
    assert (batch.target.values == EOS).sum() == 3


def test_changed_file_gives_another_store(folder: Path) -> None:
    _, before = perceived(folder)
    (folder / "data" / "7.num").write_text("[1, 2, 3, 4, 5, 6]")
    _, after = perceived(folder)
    assert before.folder != after.folder


def test_damaged_arrays_are_read_again_with_a_notice(folder: Path) -> None:
    _, store = perceived(folder)
    whole = {path: path.read_bytes() for path in store.folder.iterdir()}
    for path in (*store.folder.glob("part.*"), store.folder / "source.rows"):
        path.write_bytes(bytes(len(whole[path])))
        with pytest.warns(UserWarning, match=f"{path.name} differs from what was written: building it again"):
            perceived(folder)
        assert path.read_bytes() == whole[path]


def test_augmentation_depends_only_on_epoch_and_row(folder: Path) -> None:
    _, store = perceived(folder, noise=1.0)
    one, other = (Batches(store, np.arange(len(store)), batch_tokens=100, bucket_batches=4, seed=3) for _ in range(2))
    for place in (DataPosition(0, 1), DataPosition(2, 0)):
        assert torch.equal(one.at(place).source.values, other.at(place).source.values)
    rows = one.at(DataPosition(0, 0)).rows
    assert not torch.equal(one.at(DataPosition(0, 0)).source.values, gather(store, rows).source.values)


@pytest.mark.parametrize(("content", "reason"), [(None, "no such file"), ("nonsense", "no numbers")])
def test_unreadable_files_are_reported_or_counted(folder: Path, content: str | None, reason: str) -> None:
    lines = (folder / "data" / "pairs.tsv").read_text()
    (folder / "data" / "pairs.tsv").write_text(lines + "bad.num\tup\n")
    if content is not None:
        (folder / "data" / "bad.num").write_text(content)
    completed = build.complete_recipe(parse(recipe(folder)))
    target = Tokenizer.train(["up down"], "words", 10)
    source = build.build_modality_source(completed, target)
    with pytest.raises(InputError, match=rf"pairs.tsv:91.*{reason}"):
        build_store(completed.data.train, source, target, Filters(), "error", folder / "cache")
    store = build_store(completed.data.train, source, target, Filters(), "drop", folder / "cache")
    assert store.report.dropped == {reason: 1}
    assert store.report.first[reason] == (0, 91)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": {"kind": "recurrent"}}, "needs a front"),
        ({"encoder": None}, "sources need an encoder"),
        ({"encoder": {"kind": "recurrent", "front": {"kind": "own.py:Lifted", "shape": [3]}}}, "made for"),
        ({"encoder": {"kind": "multi_source", "parts": {"other": {"kind": "recurrent"}}}}, "sources rows but encoders"),
        ({"encoder": {"kind": "recurrent", "parts": {}}}, "no parts"),
        ({"tie": "all"}, "text on both sides"),
    ],
)
def test_incompatible_recipes_are_reported(folder: Path, change: dict, message: str) -> None:
    content = recipe(folder)
    content["tokens"]["shared"] = "tie" in change or change == {"encoder": None}
    content["tokens"]["source"] = {"kind": "words"}
    content["model"].update(change)
    with pytest.raises(InputError, match=message):
        build.complete_recipe(parse(content))


def test_missing_file_is_reported_by_name(folder: Path) -> None:
    train({**recipe(folder), "training": {"steps": 1}}, folder / "run")
    model = transduce.load(folder / "run", trust_user_code=True)
    with pytest.raises(InputError, match=r"nowhere\.num"):
        model.generate(["nowhere.num"])
