"""A run, a bundle, or a model from elsewhere in; the folder of a run out, written once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from transduce.interop import bundle
from transduce.interop.huggingface.hub import located
from transduce.interop.huggingface.importing import convert, recognises


def as_run(path: str | Path) -> Path:
    """What is a run already stays where it is; what is neither is given back as it came, for others to refuse."""
    found = located(path)
    if not bundle.recognises(found) and not recognises(found):
        return Path(path)
    place = _cache() / _fingerprint(found)
    if not place.is_dir():
        begun = place.with_name(f"{place.name}.{os.getpid()}")
        shutil.rmtree(begun, ignore_errors=True)
        try:
            convert(found, begun)
            os.replace(begun, place)  # under its own name once it is complete
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return place


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "transduce" / "imported"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fingerprint(path: Path) -> str:
    """Another one once any of its files was written again."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = [(str(one.absolute()), one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.is_file()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
