"""The public names of the package."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import transduce


def test_public_names_are_sorted_and_documented() -> None:
    assert transduce.__all__ == sorted(transduce.__all__)
    assert len(set(transduce.__all__)) == len(transduce.__all__)
    for name in transduce.__all__:
        assert inspect.getdoc(getattr(transduce, name)), name


def test_public_names_and_their_modules_agree() -> None:
    assert set(transduce._MODULES) == set(transduce.__all__)
    with pytest.raises(AttributeError, match="nothing_here"):
        transduce.nothing_here  # noqa: B018


def test_import_does_not_load_torch() -> None:
    code = "import sys, transduce\nassert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys(), sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from transduce import *", names)
    assert set(transduce.__all__) <= names.keys()


@pytest.mark.parametrize("name", ["load", "train"])
def test_functions_are_typed(name: str) -> None:
    signature = inspect.signature(getattr(transduce, name))
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
