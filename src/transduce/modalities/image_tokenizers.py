"""Image tokenizers: a colour palette, and vector quantisation (VQ-VAE).

    c17 c4 c4 ...    one token per pixel (palette) or per square cell of pixels (VQ-VAE), in reading order

`PaletteTokenizer` maps each pixel to the nearest colour of a palette. The palette is computed from given images by
k-means (Lloyd 1982), initialised with the most frequent colour and then repeatedly with the colour of the largest
error, so the same images always give the same palette.

`VQTokenizer` is a VQ-VAE (van den Oord et al. 2017): convolutions reduce an image to one vector per cell, each vector
is replaced by the nearest row of a codebook, and transposed convolutions reconstruct the pixels. Gradients pass
straight through the choice of a row.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.errors import InputError
from transduce.modalities.image_files import pillow
from transduce.storage import replace_file

K_MEANS_ROUNDS = 50
MAX_COLOURS = 50_000  # distinct colours used by k-means, the most frequent ones
WIDTH = 64  # channels of a convolution
CODE_SIZE = 16  # dimensions of a code
COMMITMENT = 0.25  # weight of the commitment loss relative to the reconstruction loss
DECAY = 0.95  # of the moving averages that define the codes
MIN_USAGE = 0.1  # a code with a lower average number of vectors per update is reinitialised
UPDATES = 2000
BATCH_SIZE = 16  # images per update
LEARNING_RATE = 2e-3
MAX_SIZE = 1024  # pixels per side, and codes


@dataclass(frozen=True)
class PaletteTokenizer:
    """A colour palette, and the size of the images it is used for."""

    colours: np.ndarray  # K 3, uint8
    height: int
    width: int

    @classmethod
    def fit(cls, images: Sequence[np.ndarray], count: int) -> PaletteTokenizer:
        """A palette of at most `count` colours for images Y X 3 of one size."""
        height, width = images[0].shape[:2]
        pixels = np.concatenate([image.reshape(-1, 3) for image in images])
        colours, weights = np.unique(pixels, axis=0, return_counts=True)
        if len(colours) > MAX_COLOURS:
            frequent = np.argsort(-weights, kind="stable")[:MAX_COLOURS]
            colours, weights = colours[frequent], weights[frequent]
        means = _k_means(colours.astype(np.float64), weights.astype(np.float64), min(count, len(colours)))
        return cls(np.rint(means).astype(np.uint8), height, width)

    @property
    def unit(self) -> str:
        """What a token stands for, for messages."""
        return "colours"

    @property
    def count(self) -> int:
        """The number of different tokens."""
        return len(self.colours)

    @property
    def tokens(self) -> int:
        """The number of tokens of an image."""
        return self.height * self.width

    def encode(self, image: np.ndarray) -> str:
        """An image Y X 3 of the right size -> its line of tokens."""
        _check_size(image, self.height, self.width)
        nearest = _distances(image.reshape(-1, 3).astype(np.float64), self.colours.astype(np.float64)).argmin(1)
        return " ".join(f"c{number}" for number in nearest)

    def decode(self, line: str) -> tuple[np.ndarray, bool]:
        """A line of tokens -> its image, and whether the line is complete and valid.

        Missing and invalid tokens give white pixels; surplus tokens are ignored.
        """
        names = {f"c{number}": colour for number, colour in enumerate(self.colours)}
        pixels = np.full((self.height * self.width, 3), 255, np.uint8)
        tokens = line.split()
        for position, token in enumerate(tokens[: len(pixels)]):
            pixels[position] = names.get(token, pixels[position])
        valid = len(tokens) == len(pixels) and all(token in names for token in tokens)
        return pixels.reshape(self.height, self.width, 3), valid

    def save(self, path: Path) -> None:
        content = {"height": self.height, "width": self.width, "colours": self.colours.tolist()}
        replace_file(path, json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: Path) -> PaletteTokenizer:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            colours = np.array(content["colours"], np.int64)
            if colours.ndim != 2 or colours.shape[1] != 3 or colours.min() < 0 or colours.max() > 255:
                raise ValueError("colours are rows of three numbers from 0 to 255")
            height, width = int(content["height"]), int(content["width"])
            if not (0 < height <= MAX_SIZE and 0 < width <= MAX_SIZE):
                raise ValueError(f"{height} x {width} pixels")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"not a palette: {error}", where=str(path), remedy="`transduce encode-images` writes one"
            ) from None
        return cls(colours.astype(np.uint8), height, width)


def _check_size(image: np.ndarray, height: int, width: int) -> None:
    if image.shape != (height, width, 3):
        raise ValueError(f"an image of shape {image.shape}, not {height} x {width} in colour")


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Squared distances of every row of `one` to every row of `other`."""
    return (one**2).sum(1)[:, None] - 2 * one @ other.T + (other**2).sum(1)


def _k_means(colours: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    means = colours[[int(weights.argmax())]]
    while len(means) < count:
        worst = (_distances(colours, means).min(1) * weights).argmax()
        means = np.concatenate((means, colours[[int(worst)]]))
    for _ in range(K_MEANS_ROUNDS):
        nearest = _distances(colours, means).argmin(1)
        totals = np.bincount(nearest, weights, len(means))
        sums = np.stack([np.bincount(nearest, weights * colours[:, channel], len(means)) for channel in range(3)], 1)
        updated = np.where(totals[:, None] > 0, sums / np.maximum(totals, 1)[:, None], means)
        if np.allclose(updated, means):
            break
        means = updated
    return means


class VQResidualBlock(nn.Module):
    """x + W f(conv f(x))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.out_proj = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, values: Tensor) -> Tensor:
        residual: Tensor = self.out_proj(F.relu(self.conv(F.relu(values))))
        return values + residual


class Codebook(nn.Module):
    """Nearest-neighbour quantisation; each code is the exponential moving average of its vectors.

    A code with almost no vectors is reinitialised with a vector of the current update; so are all codes at first.
    """

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, CODE_SIZE))
        self.register_buffer("counts", torch.zeros(count), persistent=False)  # used in training only
        self.register_buffer("sums", torch.zeros(count, CODE_SIZE), persistent=False)

    def nearest(self, vectors: Tensor) -> Tensor:
        """... D -> ...: the index of the nearest code"""
        distances = self.codes.square().sum(-1) - 2 * vectors @ self.codes.T  # |vector|^2 is the same for all codes
        return distances.argmin(-1)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """P D -> the codes, with the gradient of the vectors; and the mean squared distance to them."""
        if self.training:
            self._reinitialise(vectors.detach())
        chosen = self.nearest(vectors.detach())
        codes = self.codes[chosen]
        if self.training:
            self._update_averages(vectors.detach(), chosen)
        return vectors + (codes - vectors).detach(), (vectors - codes).square().mean()

    @torch.no_grad()
    def _reinitialise(self, vectors: Tensor) -> None:
        unused = self.counts < MIN_USAGE
        sampled = vectors[torch.randint(len(vectors), (len(self.codes),))]
        self.sums = torch.where(unused[:, None], sampled, self.sums)
        self.codes = torch.where(unused[:, None], sampled, self.codes)
        self.counts = torch.where(unused, torch.ones_like(self.counts), self.counts)

    @torch.no_grad()
    def _update_averages(self, vectors: Tensor, chosen: Tensor) -> None:
        members = F.one_hot(chosen, len(self.codes)).to(vectors.dtype)  # P K
        self.counts = DECAY * self.counts + (1 - DECAY) * members.sum(0)
        self.sums = DECAY * self.sums + (1 - DECAY) * members.T @ vectors
        self.codes = self.sums / self.counts[:, None]


class VQVAE(nn.Module):
    """Pixels -> one code per cell of `cell` x `cell` pixels -> pixels; `cell` is a power of 2."""

    def __init__(self, count: int, cell: int) -> None:
        super().__init__()
        halvings = cell.bit_length() - 1
        down, up = [], []
        for number in range(halvings):
            down += [nn.Conv2d(WIDTH if number else 3, WIDTH, 4, 2, 1), nn.ReLU()]
            up += [nn.ReLU(), nn.ConvTranspose2d(WIDTH, WIDTH if number < halvings - 1 else 3, 4, 2, 1)]
        self.encoder = nn.Sequential(*down, VQResidualBlock(WIDTH), nn.Conv2d(WIDTH, CODE_SIZE, 1))
        self.codebook = Codebook(count)
        self.decoder = nn.Sequential(nn.Conv2d(CODE_SIZE, WIDTH, 3, padding=1), VQResidualBlock(WIDTH), *up)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """B 3 Y X, from -1 to 1 -> the reconstruction, and the commitment loss"""
        vectors = self.encoder(pixels).permute(0, 2, 3, 1)  # B y x D
        codes, commitment = self.codebook(vectors.flatten(0, 2))
        return self.decoder(codes.view_as(vectors).permute(0, 3, 1, 2)), commitment


@dataclass(frozen=True)
class VQTokenizer:
    """A trained VQ-VAE, and the size of the images it is used for."""

    network: VQVAE
    height: int
    width: int
    cell: int

    @classmethod
    def fit(
        cls,
        images: Sequence[np.ndarray],
        count: int,
        cell: int = 4,
        *,
        updates: int = UPDATES,
        progress: Callable[[int, float], None] | None = None,
    ) -> VQTokenizer:
        """`count` codes for images Y X 3 of one size; the same images give the same codes on the same machine.

        `progress` is called after every update with its number and squared error.
        """
        height, width = images[0].shape[:2]
        if height % cell or width % cell:
            raise InputError(
                f"cells of {cell} x {cell} pixels do not tile an image of {height} x {width}",
                remedy=f"choose a size that is a multiple of {cell}",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            network = VQVAE(count, cell)
            _train(network, torch.from_numpy(np.stack(images)), updates, progress or (lambda update, error: None))
        return cls(network.eval(), height, width, cell)

    @property
    def unit(self) -> str:
        """What a token stands for, for messages."""
        return "codes"

    @property
    def count(self) -> int:
        """The number of different tokens."""
        return len(self.network.codebook.codes)

    @property
    def tokens(self) -> int:
        """The number of tokens of an image."""
        return self.height * self.width // self.cell**2

    @torch.inference_mode()
    def encode(self, image: np.ndarray) -> str:
        """An image Y X 3 of the right size -> its line of tokens."""
        _check_size(image, self.height, self.width)
        vectors = self.network.encoder(_signed(torch.from_numpy(np.array(image))[None]))
        numbers = self.network.codebook.nearest(vectors[0].permute(1, 2, 0))
        return " ".join(f"c{number}" for number in numbers.flatten().tolist())

    @torch.inference_mode()
    def decode(self, line: str) -> tuple[np.ndarray, bool]:
        """A line of tokens -> its image, and whether the line is complete and valid.

        The first code replaces missing and invalid tokens; surplus tokens are ignored.
        """
        names = {f"c{number}": number for number in range(self.count)}
        tokens = line.split()
        numbers = [names.get(token, 0) for token in tokens[: self.tokens]]
        numbers += [0] * (self.tokens - len(numbers))
        codes = self.network.codebook.codes[torch.tensor(numbers)]
        cells = codes.T.view(1, CODE_SIZE, self.height // self.cell, self.width // self.cell)
        pixels = (self.network.decoder(cells)[0].permute(1, 2, 0) + 1) * 127.5
        valid = len(tokens) == self.tokens and all(token in names for token in tokens)
        return pixels.round().clamp(0, 255).to(torch.uint8).numpy(), valid

    def save(self, path: Path) -> None:
        sizes = {"height": self.height, "width": self.width, "cell": self.cell, "count": self.count}
        replace_file(path, save(self.network.state_dict(), {"codes": json.dumps(sizes)}))

    @classmethod
    def load(cls, path: Path) -> VQTokenizer:
        try:
            with safe_open(path, "pt") as file:
                sizes = json.loads((file.metadata() or {})["codes"])
                height, width, cell, count = (_checked(sizes[name]) for name in ("height", "width", "cell", "count"))
                if cell & (cell - 1) or cell < 2 or height % cell or width % cell:
                    raise ValueError(f"cells of {cell} in {height} x {width} pixels")
                network = VQVAE(count, cell)
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no iterator
            network.load_state_dict(weights)
            if not all(values.isfinite().all() for values in weights.values()):
                raise ValueError("weights that are not finite")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(
                f"not a file of codes: {reason}",
                where=str(path),
                remedy="`transduce encode-images --kind vq` writes one",
            ) from None
        return cls(network.eval(), height, width, cell)


def load_image_tokenizer(path: Path) -> PaletteTokenizer | VQTokenizer:
    """The tokenizer in a file written by `transduce encode-images`: a VQ-VAE as safetensors, or a palette."""
    if not path.is_file():
        raise InputError("no such file", where=str(path), remedy="`transduce encode-images` writes it")
    return VQTokenizer.load(path) if path.suffix == ".safetensors" else PaletteTokenizer.load(path)


def _checked(size: Any) -> int:
    if not isinstance(size, int) or not 0 < size <= MAX_SIZE:
        raise ValueError(f"a size of {size}")
    return size


def _signed(pixels: Tensor) -> Tensor:
    """B Y X 3 bytes -> B 3 Y X, from -1 to 1"""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def _train(network: VQVAE, images: Tensor, updates: int, progress: Callable[[int, float], None]) -> None:
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, updates)
    for update in range(updates):
        pixels = _signed(images[torch.randint(len(images), (BATCH_SIZE,))])
        reconstruction, commitment = network(pixels)
        error = (reconstruction - pixels).square().mean()
        optimiser.zero_grad()
        (error + COMMITMENT * commitment).backward()
        optimiser.step()
        schedule.step()
        progress(update + 1, error.item())


def image_grid(images: Sequence[np.ndarray], scale: int = 8, gap: int = 4) -> np.ndarray:
    """Images of one size in a nearly square grid, each pixel enlarged `scale` times."""
    large = [np.kron(image, np.ones((scale, scale, 1), np.uint8)) for image in images]
    columns = int(np.ceil(np.sqrt(len(large))))
    height, width = large[0].shape[0] + gap, large[0].shape[1] + gap
    sheet = np.full((-(-len(large) // columns) * height + gap, columns * width + gap, 3), 255, np.uint8)
    for number, image in enumerate(large):
        top, left = gap + number // columns * height, gap + number % columns * width
        sheet[top : top + height - gap, left : left + width - gap] = image
    return sheet


def to_png(pixels: np.ndarray) -> bytes:
    """The content of a PNG file."""
    image: Any = pillow().Image.fromarray(pixels)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
