"""One thread a process: with more, two busy processes spin at each other's barriers and take ten times as long."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from run_fixtures import RECURRENT, TRANSFORMER, Command, call, colour_pairs, settings

import transduce

# A search for counter-examples belongs to development; what lands must not depend on its luck.
hypothesis_settings.register_profile("landing", derandomize=True, deadline=None)
hypothesis_settings.register_profile("search", deadline=None)
hypothesis_settings.load_profile("landing" if os.environ.get("CI") else "search")


# Folders whose tests train and load whole models: they are part of every complete run, not of --quick.
END_TO_END = {"benchmarks", "cli", "inference", "interop", "learning", "modalities", "synthetic", "transfer"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="unit tests, and laws on a thinned registry")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--quick") and collection_path.name in END_TO_END else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, the loop of a contributor: unit tests, with one parameter set of each law."""
    if not config.getoption("--quick"):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(group[len(group) // 2]) for group in groups.values()}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def command() -> Command:
    return call


@pytest.fixture(scope="session", autouse=True)
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the shared runs. The user's own cache is never touched: the workers of a test run share one."""
    folder = tmp_path_factory.mktemp("runs")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        patched.setenv("COLUMNS", "200")
        yield folder


@pytest.fixture(scope="session")
def pairs(bench: Path) -> Path:
    path = bench / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(400)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def attention_run(bench: Path, pairs: Path) -> Path:
    """Two recurrent networks with attention over words, trained until they know the task."""
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "luong"}}
    transduce.train(settings(pairs, model, "words", steps=200), bench / "attention")
    return bench / "attention"


@pytest.fixture(scope="session")
def transformer_run(bench: Path, pairs: Path) -> Path:
    """A Transformer over characters whose positions end at 48."""
    model = {"encoder": TRANSFORMER, "decoder": TRANSFORMER}
    transduce.train(settings(pairs, model, "chars", steps=40), bench / "transformer")
    return bench / "transformer"


@pytest.fixture(scope="session")
def bottleneck_run(bench: Path, pairs: Path) -> Path:
    """No attention: all the decoder knows came through one vector."""
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "initial"}}
    transduce.train(settings(pairs, model, "words", steps=20), bench / "bottleneck")
    return bench / "bottleneck"


@pytest.fixture(scope="session")
def model(attention_run: Path) -> transduce.Model:
    return transduce.load(attention_run)
