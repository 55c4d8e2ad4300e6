"""Audio modalities: log-mel frames of a waveform, the waveform itself, precomputed frames, and their front ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Count, FrontEnd, Modality, Rate, VisualSource
from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.kernels.linear import ACTIVATIONS
from transduce.layers.convolution import PositionalConvolution
from transduce.layers.feed_forward import dense
from transduce.layers.norm import InstanceNorm, LayerNorm, NoNorm
from transduce.layers.option_groups import flat_options
from transduce.modalities.audio_files import (
    EXTENSIONS,
    FRAME_EXTENSIONS,
    FULL_SCALE,
    LogMelSpectrogram,
    Positive,
    SpecAugment,
    duration,
    perturb_speed,
    read_frames,
    read_waveform,
    write_frames,
)
from transduce.storage import replace_file, staged_folder

KERNEL = 3
MAX_RECORDING = 4 * 3600.0  # seconds of a recording that is read in windows
VARIANCE_FLOOR = 1e-7  # added to the variance of a recording, which may be silent


class Audio(Modality):
    """a waveform, as frames of log-mel energies"""

    extensions = EXTENSIONS

    @flat_options
    def __init__(
        self,
        *,
        spectrogram: LogMelSpectrogram,
        seconds: Positive = 30.0,
        pad_to_max: bool = False,
        speed: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
        augmentation: SpecAugment,
    ) -> None:
        """`pad_to_max`: pad with silence up to `seconds`. `speed`: strength of the speed perturbation in training."""
        self._spectrogram, self._augment = spectrogram, augmentation
        self._seconds, self._pad_to_max, self._speed = seconds, pad_to_max, speed

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._spectrogram.mels,)

    def read(self, source: str) -> np.ndarray:
        samples = read_waveform(source, self._spectrogram.rate, self._seconds)
        if not self.length(samples) or len(samples) <= self._spectrogram.width // 2:
            raise UnreadableError("audio too short", f"{source}: {len(samples)} samples, less than one window")
        return samples

    def is_long(self, source: str) -> bool:
        """Whether a recording is longer than `seconds`."""
        return duration(source) > self._seconds

    def read_long(self, source: str) -> Tensor:
        """S F: the frames of a recording of any length, from at least `seconds` seconds with `pad_to_max`."""
        return self.collate([read_waveform(source, self._spectrogram.rate, MAX_RECORDING)]).values[0]

    @property
    def rate(self) -> int:
        """Samples per second."""
        return self._spectrogram.rate

    @property
    def window(self) -> int:
        """Frames of `seconds` seconds."""
        return self._spectrogram.frames(self._full_length)

    @property
    def frame_seconds(self) -> float:
        """Seconds from frame to frame."""
        return self._spectrogram.step / self._spectrogram.rate

    def length(self, array: np.ndarray) -> int:
        return self._spectrogram.frames(max(len(array), self._full_length) if self._pad_to_max else len(array))

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        if rngs is not None and self._speed:
            perturbed = perturb_speed(arrays, self._speed, rngs)
            pairs = zip(perturbed, arrays, strict=True)
            arrays = [new if self._spectrogram.frames(len(new)) else old for new, old in pairs]
        return self._augment(pad_frames(self._log_mel(arrays)), rngs)

    def _log_mel(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        if self._pad_to_max:
            arrays = [np.pad(samples, (0, max(0, self._full_length - len(samples)))) for samples in arrays]
        return self._spectrogram([torch.tensor(samples) for samples in arrays])

    @property
    def _full_length(self) -> int:
        return int(self._seconds * self._spectrogram.rate)

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return time_labels(self._duration(array), grid)

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource:
        return spectrogram_image(self._log_mel([array])[0].numpy(), grid, self._duration(array))

    def _duration(self, array: np.ndarray) -> float:
        """Seconds covered by the frames, one hop each."""
        return self.length(array) * self._spectrogram.step / self._spectrogram.rate


class Waveform(Modality):
    """the samples of a recording, one per row"""

    extensions = EXTENSIONS

    def __init__(self, *, rate: Count = 16_000, seconds: Positive = 30.0, normalise: bool = True) -> None:
        """`rate`: samples per second. `normalise`: each recording has mean 0 and variance 1."""
        self.rate, self._seconds, self._normalise = rate, seconds, normalise

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def read(self, source: str) -> np.ndarray:
        return read_waveform(source, self.rate, self._seconds)

    def length(self, array: np.ndarray) -> int:
        return len(array)

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        return pad_frames([self._samples(array)[:, None] for array in arrays])

    def _samples(self, array: np.ndarray) -> Tensor:
        samples = torch.tensor(array).double() / FULL_SCALE
        if self._normalise:
            samples = (samples - samples.mean()) / (samples.var(correction=0) + VARIANCE_FLOOR).sqrt()
        return samples.float()

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return time_labels(len(array) / self.rate, grid)


@dataclass(frozen=True)
class FrameAugment(SpecAugment):
    """SpecAugment of frames with few values, such as 13 MFCCs."""

    frequency_width: Count = 3


class AudioFeatures(Modality):
    """precomputed frames: one file.npy per source, or file.npz#17 of many"""

    extensions = FRAME_EXTENSIONS

    @flat_options
    def __init__(
        self,
        *,
        size: Count = 13,
        rate: Positive = 100.0,
        seconds: Positive = 30.0,
        augmentation: FrameAugment,
    ) -> None:
        """`size`: values per frame. `rate`: frames per second."""
        self._size, self._rate, self._max_frames = size, rate, int(seconds * rate)
        self._augment = augmentation

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._size,)

    def read(self, source: str) -> np.ndarray:
        return read_frames(source, self._size, self._max_frames)

    def length(self, array: np.ndarray) -> int:
        return len(array)

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        return self._augment(pad_frames([torch.tensor(frames) for frames in arrays]), rngs)

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return time_labels(len(array) / self._rate, grid)

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource:
        normalised = SpecAugment()(pad_frames([torch.tensor(array)])).values[0]
        return spectrogram_image(normalised.numpy(), grid, len(array) / self._rate)


def pad_frames(items: Sequence[Tensor]) -> Padded:
    """Tensors S F of several utterances -> B S F"""
    lengths = torch.tensor([len(item) for item in items])
    values = torch.nn.utils.rnn.pad_sequence(list(items), batch_first=True)
    return Padded(values, torch.arange(values.size(1)) < lengths[:, None])


def time_labels(seconds: float, grid: Sequence[int]) -> list[str]:
    """The start time of each row of the memory."""
    rows = int(np.prod(grid))
    return [f"{row * seconds / rows:.2f}s" for row in range(rows)]


def spectrogram_image(frames: np.ndarray, grid: Sequence[int], seconds: float) -> VisualSource:
    """S F -> an image with time from left to right and frequency from bottom to top; high energy is dark."""
    low, high = np.percentile(frames, [1, 99])
    level = np.clip((frames - low) / max(float(high - low), 1e-9), 0, 1)
    grey = (255 * (1 - level)).astype(np.uint8).T[::-1]  # F S
    return VisualSource(np.repeat(grey[..., None], 3, 2), (1, int(np.prod(grid))), across="seconds", extent=seconds)


def extract_features(pairs: str | Path, folder: str | Path, **options: Any) -> Path:
    """Computes the frames of the files in lines FILE TAB TEXT; writes FOLDER/pairs.tsv and FOLDER/frames.npz.

    The options are those of `Audio`.
    """
    pairs, folder = Path(pairs), Path(folder)
    audio = Audio(normalise=False, **options)
    items: list[np.ndarray] = []
    lines: list[str] = []
    for number, line in enumerate(pairs.read_text(encoding="utf-8").splitlines(), 1):
        name, tab, text = line.partition("\t")
        try:
            if not tab:
                raise UnreadableError("missing column", "FILE TAB TEXT")
            samples = audio.read(str(pairs.parent / name))
        except UnreadableError as bad:
            raise InputError(bad.problem, where=f"{pairs}:{number}", remedy=bad.remedy) from None
        lines.append(f"frames.npz#{len(items)}\t{text}\n")
        items.append(audio.collate([samples]).values[0].numpy())
    if not items:
        raise InputError("no lines", where=str(pairs), remedy="give lines of FILE TAB TEXT")
    with staged_folder(folder) as part:
        write_frames(items, part / "frames.npz")
        replace_file(part / "pairs.tsv", "".join(lines))
    return folder / "pairs.tsv"


class ConvSubsampling(FrontEnd):
    """f(conv f(conv x)): strided convolutions, over three frames each by default

    A row is valid where the centre of its window is. Padding is set to zero before every layer, like the values beyond
    the end, so it cannot leak into valid rows.
    """

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        strides: tuple[Count, ...] = (2, 2),
        kernels: tuple[Count, ...] = (),
        conv_width: Count | None = None,
        activation: Literal["relu", "gelu", "silu", "glu"] = "relu",
    ) -> None:
        """`kernels`: the frames of each layer, odd numbers; empty: three each. `conv_width`: the width of all layers
        but the last; None: that of the model. `activation: glu`: a gate of each layer (Synnaeve et al. 2019)."""
        super().__init__()
        kernels = kernels or (KERNEL,) * len(strides)
        if len(kernels) != len(strides) or not all(kernel % 2 for kernel in kernels):
            raise InputError(f"kernels {kernels} of {len(strides)} layers", remedy="give one odd number per layer")
        self.width, self.strides = width, strides
        self.activation = partial(F.glu, dim=1) if activation == "glu" else ACTIVATIONS[activation]
        sizes = [frame_width(shape), *(conv_width or width for _ in strides[1:]), width]
        gates = 2 if activation == "glu" else 1
        self.layers = nn.ModuleList(
            nn.Conv1d(below, gates * size, kernel, stride, kernel // 2)
            for below, size, kernel, stride in zip(sizes[:-1], sizes[1:], kernels, strides, strict=True)
        )

    def forward(self, source: Padded) -> Padded:
        values, mask = source.values.transpose(1, 2), source.mask  # B F S
        for layer, stride in zip(self.layers, self.strides, strict=True):
            values = self.activation(layer(values * mask[:, None]))
            mask = mask[:, ::stride]
        return Padded(values.transpose(1, 2), mask)

    def grid(self, length: int) -> tuple[int, ...]:
        for stride in self.strides:
            length = -(-length // stride)
        return (length,)


class Conv2dSubsampling(FrontEnd):
    """W f(conv f(conv x)): strided 3 x 3 convolutions over time and frequency (Amodei et al. 2016)

    Neighbouring frames and neighbouring bands share their weights, so that a voice of another pitch looks alike.
    Validity and padding are those of `ConvSubsampling`.
    """

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        channels: Count = 32,
        strides: tuple[Count, ...] = (2, 2),
        band_strides: tuple[Count, ...] = (),
        activation: Literal["relu", "gelu", "silu"] = "relu",
    ) -> None:
        """`strides`: over the frames, of each layer; `band_strides`: over the bands of a frame; empty: the same."""
        super().__init__()
        band_strides, bands = band_strides or strides, frame_width(shape)
        if len(band_strides) != len(strides):
            raise InputError(f"band_strides {band_strides} of {len(strides)} layers", remedy="give one per layer")
        self.width, self.strides, self.activation = width, strides, ACTIVATIONS[activation]
        sizes = [1, *(channels for _ in strides)]
        self.layers = nn.ModuleList(
            nn.Conv2d(below, size, KERNEL, step, KERNEL // 2)
            for below, size, step in zip(sizes[:-1], sizes[1:], zip(strides, band_strides, strict=True), strict=True)
        )
        for stride in band_strides:
            bands = -(-bands // stride)
        self.out_proj = dense(sizes[-1] * bands, width)

    def forward(self, source: Padded) -> Padded:
        values, mask = source.values[:, None], source.mask  # B C S F
        for layer, stride in zip(self.layers, self.strides, strict=True):
            values = self.activation(layer(values * mask[:, None, :, None]))
            mask = mask[:, ::stride]
        return Padded(self.out_proj(values.transpose(1, 2).flatten(2)), mask)

    def grid(self, length: int) -> tuple[int, ...]:
        for stride in self.strides:
            length = -(-length // stride)
        return (length,)


class FrameStacking(FrontEnd):
    """W x + b of each frame, or of several concatenated frames"""

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), stack: Count = 1) -> None:
        super().__init__()
        self.width, self.stack = width, stack
        self.projection = dense(frame_width(shape) * stack, width)

    def forward(self, source: Padded) -> Padded:
        frames: Tensor = source.values * source.mask[..., None]
        frames = F.pad(frames, (0, 0, 0, -frames.size(1) % self.stack))  # the last row may have fewer frames
        rows = frames.unflatten(1, (-1, self.stack)).flatten(2)  # B S' F*k
        return Padded(self.projection(rows), source.mask[:, :: self.stack])

    def grid(self, length: int) -> tuple[int, ...]:
        return (-(-length // self.stack),)


class SampleConvolutions(FrontEnd):
    """Base of front ends with convolutions over samples, without padding.

    A row is real where all samples of its window are. A recording shorter than one window is continued with zeros.
    """

    convs: nn.ModuleList
    kernels: tuple[int, ...]
    strides: tuple[int, ...]

    def convolve(self, source: Padded) -> Padded:
        """B S F -> B S' D after the last convolution."""
        values, mask, counts = source.values, source.mask, source.mask.sum(1)  # B S F, B S, B
        for number, conv in enumerate(self.convs):
            values = values * mask[..., None]
            values = F.pad(values, (0, 0, 0, max(0, self.kernels[number] - values.size(1))))
            values = conv(values.transpose(1, 2)).transpose(1, 2)
            counts = self._rows_after(counts, number)
            mask = torch.arange(values.size(1), device=values.device) < counts[:, None]
            values = self.activate(values, mask, number)
        return Padded(values, mask)

    def activate(self, values: Tensor, mask: Tensor, number: int) -> Tensor:
        """What follows a convolution."""
        raise NotImplementedError

    def _rows_after(self, counts: Tensor, number: int) -> Tensor:
        """The real rows after a layer, of so many real rows before it."""
        return ((counts - self.kernels[number]).clamp(min=0) // self.strides[number]) + 1

    def grid(self, length: int) -> tuple[int, ...]:
        counts = torch.tensor(length)
        for number in range(len(self.kernels)):
            counts = self._rows_after(counts, number)
        return (int(counts),)


class WaveformStem(SampleConvolutions):
    """gelu(conv gelu(conv norm(tanh(conv x)))): three convolutions over samples (Moonshine, Jeffries et al. 2024)"""

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        kernels: tuple[Count, Count, Count] = (127, 7, 3),
        strides: tuple[Count, Count, Count] = (64, 3, 2),
    ) -> None:
        super().__init__()
        self.width, self.kernels, self.strides = width, kernels, strides
        sizes = (frame_width(shape), width, 2 * width, width)
        self.convs = nn.ModuleList(
            nn.Conv1d(sizes[n], sizes[n + 1], kernels[n], strides[n], bias=n > 0) for n in range(len(kernels))
        )
        self.norm = InstanceNorm(width, joint=True)

    def forward(self, source: Padded) -> Padded:
        return self.convolve(source)

    def activate(self, values: Tensor, mask: Tensor, number: int) -> Tensor:
        if number:
            return F.gelu(values)
        normed: Tensor = self.norm(values.tanh(), mask)
        return normed


@dataclass(frozen=True)
class SampleConvolutionOptions:
    """The strided convolutions over the samples of a waveform."""

    conv_widths: tuple[Count, ...] = (512,) * 7
    kernels: tuple[Count, ...] = (10, 3, 3, 3, 3, 2, 2)
    strides: tuple[Count, ...] = (5, 2, 2, 2, 2, 2, 2)
    conv_norm: Literal["first", "all"] = "first"  # instance norm after the first one, or layer norm after all
    conv_bias: bool = False

    def make(self, input_width: int) -> Iterator[nn.Conv1d]:
        if not len(self.conv_widths) == len(self.kernels) == len(self.strides):
            raise InputError("conv_widths, kernels and strides differ in length", remedy="give one value per layer")
        inputs = (input_width, *self.conv_widths)
        return (
            nn.Conv1d(below, size, kernel, stride, bias=self.conv_bias)
            for below, size, kernel, stride in zip(inputs, self.conv_widths, self.kernels, self.strides, strict=False)
        )

    def make_norms(self) -> Iterator[nn.Module]:
        if self.conv_norm == "all":
            return (LayerNorm(size) for size in self.conv_widths)
        return iter([InstanceNorm(self.conv_widths[0])])


class WaveformConvolution(SampleConvolutions):
    """W norm(conv .. conv x) over samples, with a positional convolution over its rows (wav2vec 2.0, Baevski 2020)"""

    @flat_options
    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        convolutions: SampleConvolutionOptions,
        activation: Literal["relu", "gelu", "silu"] = "gelu",
        projection_norm: bool = True,
        norm_eps: Annotated[float, Gt(0)] = 1e-5,
        position_kernel: Count = 128,
        position_groups: Count = 16,
        dropout: Rate = 0.0,
    ) -> None:
        """`projection_norm`: layer norm before the projection to the width of the model. `position_kernel`: rows of
        the positional convolution."""
        super().__init__()
        self.width, self.activation, last = width, ACTIVATIONS[activation], convolutions.conv_widths[-1]
        self.kernels, self.strides = convolutions.kernels, convolutions.strides
        self.convs = nn.ModuleList(convolutions.make(frame_width(shape)))
        self.conv_norms = nn.ModuleList(convolutions.make_norms())
        self.projection_norm = LayerNorm(last, eps=norm_eps) if projection_norm else NoNorm()
        self.projection, self.dropout = dense(last, width), nn.Dropout(dropout)
        self.position = PositionalConvolution(width, position_kernel, position_groups, self.activation)

    def forward(self, source: Padded) -> Padded:
        rows = self.convolve(source)
        values = self.dropout(self.projection(self.projection_norm(rows.values, rows.mask)))
        return Padded(self.position(values, rows.mask), rows.mask)

    def activate(self, values: Tensor, mask: Tensor, number: int) -> Tensor:
        if number < len(self.conv_norms):
            values = self.conv_norms[number](values, mask)
        activated: Tensor = self.activation(values)
        return activated


def frame_width(shape: tuple[int, ...]) -> int:
    """The width of a frame; 1 where it is not known yet."""
    if len(shape) > 1:
        raise InputError(f"frames have one axis, not {len(shape)}", remedy="this front end reads audio frames")
    return shape[0] if shape else 1
