"""The cache directory: one rule for every kind of cached file."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.errors import InputError
from transduce.storage import cache_directory

SOURCE = Path(__file__).parents[1] / "src" / "transduce"


@pytest.mark.parametrize("value", ["", ".", "cache", "../cache", None])
def test_an_empty_or_relative_cache_home_counts_as_unset(
    value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_directory("native") == tmp_path / ".cache" / "transduce" / "native"


def test_an_absolute_cache_home_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("stores") == tmp_path / "transduce" / "stores"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        cache_directory("native")


def test_no_other_module_reads_the_variable() -> None:
    readers = [path.name for path in SOURCE.rglob("*.py") if "XDG_CACHE_HOME" in path.read_text(encoding="utf-8")]
    assert readers == ["storage.py"]
