"""Audio files: resampling against sines, channels, rates, refused files, files of frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from transduce.errors import UnreadableError
from transduce.modalities.audio import Audio, AudioFeatures
from transduce.modalities.audio_files import FULL_SCALE, read_frames, read_waveform, resample, to_int16, write_frames


def sine(rate: int, seconds: float = 0.5, pitch: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate)


def save(path: Path, samples: np.ndarray, rate: int = 8000, **more: str) -> str:
    soundfile.write(path, samples, rate, **more)
    return str(path)


def reason(path: str, rate: int = 8000, seconds: float = 30.0) -> str:
    with pytest.raises(UnreadableError) as error:
        read_waveform(path, rate, seconds)
    return error.value.reason


@trials(deadline=None, max_examples=30)
@given(st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]), st.sampled_from([8000, 16000, 24000]))
def test_resampled_sine_is_a_sine(rate: int, new: int) -> None:
    found, wanted = resample(sine(rate), rate, new), sine(new)
    assert abs(len(found) - len(wanted)) <= 1
    inner = slice(200, len(wanted) - 200)  # beyond the ends there is silence
    assert np.abs(found[inner] - wanted[inner]).max() < 2e-3


def test_resampling_removes_frequencies_above_nyquist() -> None:
    high = resample(sine(16000, pitch=6000.0), 16000, 8000)
    assert np.abs(high[200:-200]).max() < 0.01


@pytest.mark.parametrize(("ending", "loss"), [("wav", 2), ("flac", 2), ("ogg", 3000)])
def test_formats_and_channels(tmp_path: Path, ending: str, loss: int) -> None:
    left, right = sine(8000), np.zeros(4000)
    path = save(tmp_path / f"a.{ending}", np.stack([left, right], 1))
    found = read_waveform(path, 8000, 30.0)
    assert found.dtype == np.int16
    assert np.abs(found - to_int16(left / 2).astype(int)).max() <= loss


def test_unreadable_audio_is_refused(tmp_path: Path) -> None:
    assert reason(str(tmp_path / "none.wav")) == "no such audio file"
    (tmp_path / "text.wav").write_text("no sound at all")
    assert reason(str(tmp_path / "text.wav")) == "not a readable audio file"
    assert reason(save(tmp_path / "empty.wav", np.zeros(0))) == "empty audio file"
    assert reason(save(tmp_path / "long.wav", sine(8000, 2.0)), seconds=1.5) == "audio too long"
    holed = sine(8000)
    holed[17] = np.nan
    assert reason(save(tmp_path / "nan.wav", holed, subtype="FLOAT")) == "audio with non-finite samples"
    loud = read_waveform(save(tmp_path / "loud.wav", 3 * sine(8000), subtype="FLOAT"), 8000, 30.0)
    assert loud.max() == FULL_SCALE - 1


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_truncated_audio_is_refused(tmp_path: Path, ending: str) -> None:
    path = Path(save(tmp_path / f"whole.{ending}", np.random.default_rng(1).normal(size=8000) / 9))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert reason(str(path)) in ("audio shorter than its header says", "not a readable audio file")


def test_audio_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "short.wav", sine(8000, 0.02))
    with pytest.raises(UnreadableError, match="audio too short"):
        Audio(rate=8000).read(path)


def test_frames_of_many_items_in_one_file(tmp_path: Path) -> None:
    rows = [np.random.default_rng(n).normal(size=(n + 2, 3)).astype(np.float32) for n in range(4)]
    write_frames(rows, tmp_path / "all.npz")
    part = AudioFeatures(size=3)
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(part.read(f"{tmp_path}/all.npz#{number}"), row)
    np.save(tmp_path / "one.npy", rows[1].astype(np.float64))
    np.testing.assert_allclose(part.read(f"{tmp_path}/one.npy"), rows[1])


def test_invalid_frames_are_refused(tmp_path: Path) -> None:
    def reason(named: str, width: int = 3, most: int = 100) -> str:
        with pytest.raises(UnreadableError) as error:
            read_frames(str(tmp_path / named), width, most)
        return error.value.reason

    write_frames([np.ones((2, 3), np.float32)], tmp_path / "all.npz")
    np.save(tmp_path / "nan.npy", np.full((2, 3), np.nan))
    np.save(tmp_path / "whole.npy", np.ones((2, 3), int))
    np.save(tmp_path / "empty.npy", np.ones((0, 3)))
    np.save(tmp_path / "objects.npy", np.array([["a", None]], object), allow_pickle=True)
    np.savez(tmp_path / "astray.npz", frames=np.ones((2, 3)), offsets=np.array([0, 9]))
    np.savez(tmp_path / "unnamed.npz", np.ones((2, 3)))
    unreadable = "not a readable file of frames"
    for named in ("all.npz#1", "all.npz#x", "all.npz#-1", "objects.npy", "astray.npz#0", "unnamed.npz#0"):
        assert reason(named) == unreadable, named
    assert reason("none.npy") == "no such file of frames"
    assert reason("all.npz") == "not a table of frames"
    assert reason("whole.npy") == "not a table of frames"
    assert reason("all.npz#0", width=4) == "frames of another width"
    assert reason("all.npz#0", most=1) == "too many frames"
    assert reason("empty.npy") == "no frames"
    assert reason("nan.npy") == "frames with non-finite values"
