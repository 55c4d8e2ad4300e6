"""Structure of the package: one direction of imports, no cycles, device code in two rooms."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "transduce"
PATHS = {
    ".".join(("transduce", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
# What the rooms of the model's equations may import, besides themselves.
BASE = {"flow", "errors", "contracts"}
EQUATIONS = BASE | {"kernels", "attention", "layers"}
MAY_IMPORT = {
    "errors": set(),
    "flow": set(),
    "storage": {"errors"},
    "contracts": {"flow", "errors"},
    "kernels": BASE | {"storage"},
    "attention": EQUATIONS,
    "layers": EQUATIONS,
    "encoders": EQUATIONS,
    "decoders": EQUATIONS,
    "heads": EQUATIONS,
    "synthetic": {"flow", "errors", "modalities", "storage"},
}
DEVICE = re.compile(
    r"\b(cuda|triton|is_cpu|is_cuda|grad_fn|untyped_storage|threading|ctypes|is_compiling|is_exporting|current_stream)\b"
    r"|\bdevice\.type\b|_current_graph_task_id"
)
DEVICE_FREE = (
    "attention",
    "layers",
    "encoders",
    "decoders",
    "heads",
    "objectives",
    "flow",
    "contracts",
    "model",
    "decoding",
)


def imported(path: Path) -> set[str]:
    """The modules that a module imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transduce"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in PATHS else str(node.module) for name in names}
    return found


@cache
def imports() -> dict[str, set[str]]:
    return {name: imported(path) for name, path in PATHS.items()}


def room(module: str) -> str:
    return (*module.split("."), "")[1]


def test_modules_import_each_other_in_one_direction() -> None:
    """Remove modules that import nothing that is left; what remains is a cycle."""
    left = {name: targets - {name} for name, targets in imports().items()}
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert not left, f"import cycle among {sorted(left)}"


@pytest.mark.parametrize("name", list(MAY_IMPORT))
def test_lower_rooms_do_not_import_higher_ones(name: str) -> None:
    for module, targets in imports().items():
        if room(module) == name:
            assert {room(target) for target in targets} <= MAY_IMPORT[name] | {name}, module


def test_nothing_imports_the_command_line() -> None:
    users = {module for module, targets in imports().items() if any(room(target) == "cli" for target in targets)}
    assert {room(module) for module in users} <= {"cli", "__main__"}


@pytest.mark.parametrize("name", DEVICE_FREE)
def test_equations_know_no_devices(name: str) -> None:
    for module, path in PATHS.items():
        if room(module) == name:
            code = ast.unparse(ast.parse(path.read_text(encoding="utf-8")))
            assert not DEVICE.search(code), module


def test_the_top_of_the_package_shows_the_architecture() -> None:
    entries = [path for path in SOURCE.iterdir() if not path.name.startswith("__") and path.name != "py.typed"]
    assert len(entries) <= 30
