"""Options and order of the tests. One thread a process: with more, two busy processes spin at each other's barriers."""

import gc
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# Folders whose tests train and load whole models: they are part of every complete run, not of --quick.
END_TO_END = {
    "benchmarks",
    "cli",
    "fuzz",
    "inference",
    "interop",
    "learning",
    "modalities",
    "studio",
    "synthetic",
    "transfer",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="unit tests, and laws on a thinned registry")


def pytest_configure(config: pytest.Config) -> None:
    """A process that only hands tests to its workers (`-n 2`) does not import PyTorch."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("session_fixtures")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--quick") and collection_path.name in END_TO_END else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first: a file runs in one worker, and no worker should outlast the others."""
    if config.getoption("--quick"):
        thin(config, items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, the loop of a contributor: unit tests, with one parameter set of each law."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(group[len(group) // 2]) for group in groups.values()}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
