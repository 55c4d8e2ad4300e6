"""Windows of lines: their limits, and the lines of a pipe as they come."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from transduce.data.readers import corpus as windows
from transduce.data.readers import files
from transduce.data.readers.corpus import in_windows, read_lines, read_windows
from transduce.errors import InputError


class Input:
    """Standard input that reads from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.buffer = os.fdopen(descriptor, "rb")


@contextmanager
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.FileIO]:
    """Standard input is a pipe; gives its other end."""
    out, into = os.pipe()
    monkeypatch.setattr(sys, "stdin", given := Input(out))
    with given.buffer, open(into, "wb", buffering=0) as writer:
        yield writer


def test_a_window_ends_at_a_number_of_items_or_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(in_windows("abcde", size=2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(in_windows(())) == []
    monkeypatch.setattr(windows, "WINDOW_CHARACTERS", 6)
    assert list(in_windows(["abc", "d", "efg", "hijklmnop", "q"])) == [["abc", "d", "efg"], ["hijklmnop"], ["q"]]


def test_lines_of_a_pipe_are_given_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written after a window is asked for: one that waits for more would never come."""
    with pipe(monkeypatch) as writer:
        found = read_windows("-")
        writer.write(b"one\ntwo\nthr")
        assert next(found) == ["one", "two"]
        writer.write("ee\r\nvierß".encode()[:-1])
        assert next(found) == ["three"]
        writer.write("ß".encode()[1:] + b"\n\n")
        assert next(found) == ["vierß", ""]
        writer.write(b"last, without a line feed")
        writer.close()
        assert list(found) == [["last, without a line feed"]]


def test_a_pipe_gives_the_lines_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = "\ufeff" + "".join(f"{'x' * (number % 997)}\u2028é {number}\r\n" for number in range(5000)) + "\n\nend"
    (tmp_path / "file").write_bytes(content.encode())
    monkeypatch.setattr(windows, "WINDOW_CHARACTERS", 50_000)
    with pipe(monkeypatch) as writer:

        def write() -> None:
            raw = content.encode()
            for begin in range(0, len(raw), 70_001):
                writer.write(raw[begin : begin + 70_001])
            writer.close()

        thread = threading.Thread(target=write)
        thread.start()
        found = list(chain.from_iterable(read_windows("-")))
        thread.join()
    assert found == list(read_lines(tmp_path / "file")) == list(chain.from_iterable(read_windows(tmp_path / "file")))
    assert len(found) == 5003


def test_a_named_pipe_is_a_pipe_and_a_file_is_read_in_full_windows(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"line\n" * 4500)
    assert [len(window) for window in read_windows(tmp_path / "file")] == [2000, 2000, 500]
    os.mkfifo(tmp_path / "named")
    held = os.open(tmp_path / "named", os.O_RDWR)  # so that opening it waits for nobody
    found = read_windows(tmp_path / "named")
    os.write(held, b"one\n")
    assert next(found) == ["one"]
    os.write(held, b"two\nthree\n")
    assert next(found) == ["two", "three"]
    os.close(held)
    assert list(found) == []


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    (tmp_path / "file").write_bytes(b"x" * 1000 + b"\n" + b"x" * 2000)
    for name in (tmp_path / "file", "/dev/zero"):
        with pytest.raises(InputError, match="more than 1,000 bytes"):
            list(read_lines(name))
    (tmp_path / "file").write_bytes(b"x" * 999 + b"\n")
    assert len(next(read_lines(tmp_path / "file"))) == 999


def test_closed_standard_input_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="standard input is closed"):
        next(read_windows("-"))
