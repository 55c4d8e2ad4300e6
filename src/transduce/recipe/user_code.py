"""Classes in Python files of the user, named in a recipe as `file:Class`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from transduce.errors import InputError


def load_user_class(contract: type, kind: str, where: str) -> type:
    """Imports the file (with or without .py, relative to the working directory) and returns the class."""
    file, _, name = kind.partition(":")
    path = Path(file if file.endswith(".py") else f"{file}.py").resolve()
    if not path.is_file():
        raise InputError(f"{kind!r} needs the file {path}", where=where)
    module_name = f"transduce_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # get_type_hints looks the module up by name
    spec.loader.exec_module(module)
    part = getattr(module, name, None)
    if not (isinstance(part, type) and issubclass(part, contract)):
        raise InputError(f"{path} has no {contract.__name__} called {name!r}", where=where)
    return part
