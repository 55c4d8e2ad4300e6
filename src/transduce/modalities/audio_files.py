"""Audio files, log-mel spectrograms compatible with Kaldi or Whisper, SpecAugment, speed perturbation.

A waveform is read as one channel at one sampling rate in 16 bits: channels are averaged, and values beyond full scale
are clipped. A recording longer than the limit is refused before it is decoded; so is a file with fewer samples than its
header states, and one with non-finite values.

Frames are read from a .npy file with one array, or from a .npz file with many (`FILE#17`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, gcd
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Count
from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.storage import open_atomic

ZERO_CROSSINGS = 16  # of the sinc on each side: more give a steeper filter
CUTOFF = 0.95  # of the low-pass filter, as a share of half the lower rate
EXTENSIONS = (".wav", ".flac", ".ogg")
FRAME_EXTENSIONS = (".npy", ".npz")
FULL_SCALE = 32768  # the 16-bit value of amplitude 1
NonNegative = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Scale = Literal["kaldi", "whisper"]
EMPHASIS = 0.97  # coefficient of the pre-emphasis filter
MIN_FREQUENCY = 20.0  # hertz: lower edge of Kaldi's filter bank


def resample(samples: np.ndarray, rate: int, new: int) -> np.ndarray:
    """S -> S * new / rate, rounded up: y_m = sum_n x_n h(m rate / new - n), with a windowed sinc h."""
    return resample_all([samples], rate, new)[0]


def resample_all(waveforms: Sequence[np.ndarray], rate: int, new: int) -> list[np.ndarray]:
    """As `resample`, of several waveforms in one convolution."""
    common = gcd(rate, new)
    down, up = rate // common, new // common
    longest = max(map(len, waveforms))
    if down == up or not longest:
        return [np.asarray(samples, np.float32) for samples in waveforms]
    filters, half_width = _filters(down, up)
    steps = ceil(ceil(longest * up / down) / up)  # each gives one sample of every phase
    right = max(0, (steps - 1) * down + filters.size(-1) - half_width - longest)
    padded = torch.zeros(len(waveforms), 1, half_width + longest + right)
    for row, samples in zip(padded[:, 0].numpy(), waveforms, strict=True):
        row[half_width : half_width + len(samples)] = samples
    phases = F.conv1d(padded, filters, stride=down)[..., :steps]  # B up steps
    changed = phases.transpose(1, 2).flatten(1).numpy()
    return [row[: ceil(len(samples) * up / down)] for row, samples in zip(changed, waveforms, strict=True)]


@lru_cache(maxsize=64)
def _filters(down: int, up: int) -> tuple[Tensor, int]:
    """up 1 K: the filter of each phase; and the number of its taps to the left of the centre."""
    cutoff = CUTOFF * min(1.0, up / down)
    half_width = ceil(ZERO_CROSSINGS / cutoff)
    taps = torch.arange(-half_width, half_width + down + 1, dtype=torch.double)
    phase = torch.arange(up, dtype=torch.double)[:, None] * down / up
    offset = phase - taps  # up K
    window = torch.cos(offset / half_width * torch.pi / 2).square()
    window = window.where(offset.abs() < half_width, torch.zeros(()).double())
    filters = cutoff * torch.sinc(cutoff * offset) * window
    # Normalised, so that every phase has unit gain at frequency 0.
    return (filters / filters.sum(1, keepdim=True)).float()[:, None], half_width


def soundfile() -> Any:
    """The soundfile library, or an error that says how to install it."""
    try:
        import soundfile as library
    except (ImportError, OSError):  # OSError: the package is installed, but libsndfile is missing
        raise InputError("audio needs soundfile", remedy="pip install 'transduce[sound]'") from None
    return library


def duration(path: str | Path) -> float:
    """Seconds of an audio file, according to its header; 0 where it cannot be read."""
    try:
        return float(soundfile().info(str(path)).duration)
    except (RuntimeError, OSError, TypeError):  # of libsndfile: reading the file says what is wrong with it
        return 0.0


def read_waveform(path: str | Path, rate: int, seconds: float) -> np.ndarray:
    """S: 16-bit samples at `rate` samples per second."""
    library = soundfile()
    if not Path(path).is_file():
        raise UnreadableError("no such audio file", str(path))
    try:
        with library.SoundFile(str(path)) as opened:
            stated, file_rate = opened.frames, opened.samplerate
            _check_header(path, stated, file_rate, seconds, opened.extra_info)
            samples = opened.read(dtype="float32", always_2d=True)  # S C
    except UnreadableError:
        raise
    except Exception as error:  # decoders raise exceptions of any type
        raise UnreadableError("not a readable audio file", f"{path}: {error}") from None
    if len(samples) != stated:
        raise UnreadableError("audio shorter than its header says", f"{path}: {len(samples):,} of {stated:,} samples")
    if not np.isfinite(samples).all():
        raise UnreadableError("audio with non-finite samples", str(path))
    return to_int16(resample(samples.mean(1), file_rate, rate))


def _check_header(path: str | Path, stated: int, rate: int, seconds: float, extra_info: str) -> None:
    if stated == 0:
        raise UnreadableError("empty audio file", str(path))
    if stated > seconds * rate:
        remedy = "cut it into pieces, or raise the limit: data.sources.NAME.seconds"
        raise UnreadableError("audio too long", f"{path}: {stated / rate:.1f} of {seconds:g} seconds", remedy)
    # libsndfile takes the length of a truncated WAV file from its size, and reports that only here.
    if "should be" in extra_info:
        raise UnreadableError("audio shorter than its header says", str(path))


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Amplitudes from -1 to 1 -> 16-bit integers."""
    return np.clip(np.round(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def read_frames(source: str, width: int, max_frames: int) -> np.ndarray:
    """S F of `file.npy`, or of `file.npz#17`: the frames from offsets[17] to offsets[18]."""
    file, mark, number = source.partition("#")
    if not Path(file).is_file():
        raise UnreadableError("no such file of frames", file)
    try:
        frames = _item_frames(file, number) if mark else np.load(file, allow_pickle=False)
    except Exception as error:  # of zipfile, zlib and numpy
        raise UnreadableError("not a readable file of frames", f"{source}: {error}") from None
    if not isinstance(frames, np.ndarray) or frames.ndim != 2 or frames.dtype.kind != "f":
        raise UnreadableError("not a table of frames", source)
    if frames.shape[1] != width:
        remedy = f"set data.sources.NAME.size: {frames.shape[1]}"
        raise UnreadableError("frames of another width", f"{source}: {frames.shape[1]}, not {width}", remedy)
    if not len(frames):
        raise UnreadableError("no frames", source)
    if len(frames) > max_frames:
        raise UnreadableError("too many frames", f"{source}: {len(frames):,}, more than {max_frames:,}")
    if not np.isfinite(frames).all():
        raise UnreadableError("frames with non-finite values", source)
    return frames.astype(np.float32)


def stored_frame_width(source: str) -> int:
    """The number of values per frame in a file."""
    file, mark, number = source.partition("#")
    try:
        frames = _item_frames(file, number) if mark else np.load(file, mmap_mode="r", allow_pickle=False)
        return int(frames.shape[1])
    except Exception as error:  # of zipfile, zlib and numpy
        raise UnreadableError("not a readable file of frames", f"{source}: {error}") from None


def _item_frames(file: str, number: str) -> np.ndarray:
    if not number.isdecimal():
        raise ValueError(f"#{number} is no number")
    frames, offsets = _load_archive(file, Path(file).stat().st_mtime_ns)
    item = int(number)
    if item + 1 >= len(offsets):
        raise IndexError(f"there are {len(offsets) - 1}, counted from 0")
    begin, end = int(offsets[item]), int(offsets[item + 1])
    if not 0 <= begin <= end <= len(frames):
        raise ValueError("offsets beyond the frames")
    result: np.ndarray = frames[begin:end]
    return result


@lru_cache(maxsize=4)
def _load_archive(file: str, modified: int) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of a .npz file, decompressed once per process."""
    with np.load(file, allow_pickle=False) as arrays:
        frames, offsets = arrays["frames"], arrays["offsets"]
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ValueError("offsets must be integers")
    return frames, offsets


def write_frames(items: Sequence[np.ndarray], path: Path) -> None:
    """Several tables S F in one file: item 17 is then `path#17`."""
    offsets = np.cumsum([0, *(len(item) for item in items)], dtype=np.int64)
    with open_atomic(path) as file:
        np.savez_compressed(file, frames=np.concatenate(items), offsets=offsets)


@dataclass(frozen=True)
class LogMelSpectrogram:
    """Framing, windowing, and mel filter bank.

    kaldi: complete windows only, mean removed, pre-emphasis, Povey window; triangular filters on the mel scale
    1127 ln(1 + f/700); natural logarithm of the power of 16-bit samples. whisper: windows centred on every hop, Hann
    window, Slaney's filters of equal area, log10 clipped at 8 below the maximum, (x + 4) / 4 (Radford et al. 2022).
    """

    rate: Count = 16_000  # samples per second
    mels: Count = 80
    window: Positive = 25.0  # milliseconds
    hop: Positive = 10.0  # milliseconds
    scale: Scale = "kaldi"

    def __post_init__(self) -> None:
        if self.step < 1:
            raise InputError(f"a hop of {self.hop:g} ms is less than a sample", remedy="raise hop or rate")

    @property
    def width(self) -> int:
        """Samples per window."""
        return int(self.rate * self.window / 1000)

    @property
    def step(self) -> int:
        return int(self.rate * self.hop / 1000)

    def frames(self, samples: int) -> int:
        """The number of frames of a number of samples."""
        return samples // self.step if self.scale == "whisper" else max(0, 1 + (samples - self.width) // self.step)

    def __call__(self, waveforms: Sequence[Tensor]) -> list[Tensor]:
        """For each waveform: S, 16-bit samples -> S' F"""
        if self.scale == "whisper":
            return [self._whisper(waveform) for waveform in waveforms]
        windows = [waveform.float().unfold(0, self.width, self.step) for waveform in waveforms]
        # One transform for all: on short recordings the operations take longer to start than to run.
        return list(self._kaldi(torch.cat(windows)).split([len(one) for one in windows]))

    def _kaldi(self, frames: Tensor) -> Tensor:
        """S' width -> S' F"""
        frames = frames - frames.mean(1, keepdim=True)
        frames = frames - EMPHASIS * torch.cat((frames[:, :1], frames[:, :-1]), 1)
        hann = torch.hann_window(self.width, periodic=False)
        size = 1 << (self.width - 1).bit_length()
        spectrum = torch.view_as_real(torch.fft.rfft(frames * hann**0.85, size))
        power = spectrum.square().sum(-1)  # S' size/2+1
        return (power @ self._filter_bank).clamp_min(torch.finfo(torch.float).eps).log()

    def _whisper(self, waveform: Tensor) -> Tensor:
        hann = torch.hann_window(self.width)
        spectrum = torch.stft(waveform.float() / 32768, self.width, self.step, window=hann, return_complex=True)
        power = spectrum[:, :-1].abs().square().T  # S' F; the last window extends beyond the end
        logs = (power @ self._filter_bank).clamp_min(1e-10).log10()
        return (torch.maximum(logs, logs.max() - 8) + 4) / 4

    @cached_property
    def _filter_bank(self) -> Tensor:
        """frequencies F"""
        if self.scale == "kaldi":
            size = 1 << (self.width - 1).bit_length()
            hertz = torch.arange(size // 2 + 1).double() * self.rate / size
            edges = torch.linspace(
                _kaldi_mel(MIN_FREQUENCY), _kaldi_mel(self.rate / 2), self.mels + 2, dtype=torch.double
            )
            weights = _triangles(1127 * (1 + hertz / 700).log(), edges)
            weights[-1] = 0.0  # the highest frequency belongs to no filter
            return weights.float()
        hertz = torch.linspace(0, self.rate / 2, self.width // 2 + 1, dtype=torch.double)
        steps = torch.linspace(0, _slaney_mel(self.rate / 2), self.mels + 2, dtype=torch.double)
        edges = torch.tensor([_slaney_hertz(step) for step in steps.tolist()], dtype=torch.double)
        return (_triangles(hertz, edges) * 2 / (edges[2:] - edges[:-2])).float()


def _triangles(frequencies: Tensor, edges: Tensor) -> Tensor:
    """Triangular filters between consecutive edges: P frequencies, F + 2 edges -> P F."""
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies[:, None] - left) / (centre - left)
    falling = (right - frequencies[:, None]) / (right - centre)
    return torch.minimum(rising, falling).clamp_min(0)


def _kaldi_mel(hertz: float) -> float:
    return 1127 * math.log1p(hertz / 700)


def _slaney_mel(hertz: float) -> float:
    """Linear up to 1,000 hertz, then 27 steps for each factor of 6.4."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _slaney_hertz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


MAX_TIME_SHARE = 0.2  # of an utterance that one time mask may cover


@dataclass(frozen=True)
class SpecAugment:
    """Normalisation per utterance, then random masks over time and frequency (Park et al. 2019)."""

    normalise: bool = True
    time_masks: NonNegative = 0
    time_width: Count = 40  # maximum frames of a time mask, and never more than a fifth of the utterance
    frequency_masks: NonNegative = 0
    frequency_width: Count = 15  # maximum bands of a frequency mask

    def __call__(self, frames: Padded, rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        """B S F -> B S F; without random generators, one per utterance, nothing is masked."""
        values, real = frames.values, frames.mask[..., None]
        if self.normalise:
            values = _normalised(values, real)
        if rngs is None or not (self.time_masks or self.frequency_masks):
            return Padded(values, frames.mask)
        lengths, bands = frames.mask.sum(1).tolist(), values.size(2)
        time, frequency = [], []
        for length, rng in zip(lengths, rngs, strict=True):
            longest = min(self.time_width, int(MAX_TIME_SHARE * length))
            time.append([_span(rng, length, longest) for _ in range(self.time_masks)])
            widest = min(self.frequency_width, bands)
            frequency.append([_span(rng, bands, widest) for _ in range(self.frequency_masks)])
        masked = _covered(time, values.size(1))[:, :, None] | _covered(frequency, bands)[:, None]  # B S F
        mean = values.sum((1, 2), keepdim=True) / (real.sum(1, keepdim=True) * bands)  # padding is 0
        return Padded(torch.where(masked & real, mean, values), frames.mask)


def _normalised(values: Tensor, real: Tensor) -> Tensor:
    """B S F, B S 1: mean 0 and deviation 1 over the frames of each utterance; padding is 0.

    In double precision: the order of a sum depends on the padding, and a band may hardly deviate from its mean.
    """
    count, values = real.sum(1, keepdim=True), values.double()
    centred = (values - values.sum(1, keepdim=True) / count).where(real, 0.0)
    deviation = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return (centred / deviation.clamp_min(1e-5)).float()


def _span(rng: np.random.Generator, size: int, max_width: int) -> tuple[int, int]:
    width = int(rng.integers(0, max_width + 1))
    begin = int(rng.integers(0, size - width + 1))
    return begin, begin + width


def _covered(spans: Sequence[Sequence[tuple[int, int]]], size: int) -> Tensor:
    """B N: the places below `size` that one of the spans of a row covers."""
    begin, end = torch.tensor(spans, dtype=torch.long).view(len(spans), -1, 2, 1).unbind(2)  # each B M 1
    places = torch.arange(size)
    return ((places >= begin) & (places < end)).any(1)


def perturb_speed(
    waveforms: Sequence[np.ndarray], strength: float, rngs: Sequence[np.random.Generator]
) -> list[np.ndarray]:
    """One of five speeds from 1 - strength to 1 + strength (Ko et al. 2015); five, so that their filters are cached."""
    drawn, changed = [int(rng.integers(5)) for rng in rngs], list(waveforms)
    for number in sorted(set(drawn)):
        speed = Fraction(1 + strength * (number - 2) / 2).limit_denominator(40)
        rows = [row for row, one in enumerate(drawn) if one == number]
        found = resample_all([waveforms[row] for row in rows], speed.numerator, speed.denominator)
        for row, samples in zip(rows, found, strict=True):
            changed[row] = samples
    return changed
