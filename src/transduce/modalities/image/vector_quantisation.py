"""Pictures in, lines of codes out, and back: a small network, trained on them, that writes a picture in few tokens.

    c17 c4 c4 ...    one token a square of pixels, in reading order

A VQ-VAE (van den Oord 2017): convolutions bring a picture to one vector a square, each vector becomes the nearest row
of a codebook, and convolutions make pixels of those rows again. The choice of a row passes gradients straight through.
"""

from __future__ import annotations

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
from transduce.modalities.image.palette import PaletteTokenizer
from transduce.storage import replace_file

WIDTH = 64  # channels of a layer
SIZE = 16  # numbers of a code
COMMITMENT = 0.25  # how much vectors are drawn towards their codes, beside the pixels
DECAY = 0.95  # of the means that codes are
LEAST = 0.1  # a code that stands for fewer vectors of an update, in the mean, begins anew
UPDATES = 2000
PICTURES = 16  # in an update
RATE = 2e-3
LARGEST = 1024  # pixels of a side, and codes


class VQResidual(nn.Module):
    """x + W f(conv f(x)): a square learns of its neighbours"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.around, self.out = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.out(F.relu(self.around(F.relu(values))))
        return values + added


class Codebook(nn.Module):
    """Each vector becomes the nearest code; a code is the moving mean of the vectors that it stands for.

    A code that stands for next to nothing begins anew at some vector of the update; so do all of them at first.
    """

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, SIZE))
        self.register_buffer("counts", torch.zeros(count), persistent=False)  # known while it is trained
        self.register_buffer("sums", torch.zeros(count, SIZE), persistent=False)

    def nearest(self, vectors: Tensor) -> Tensor:
        """... D -> ..., numbers of codes"""
        distances = self.codes.square().sum(-1) - 2 * vectors @ self.codes.T  # and |vector|^2, the same for all
        return distances.argmin(-1)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """P D -> the codes, with the gradient of the vectors; and how far those lie from them."""
        if self.training:
            self._renew(vectors.detach())
        chosen = self.nearest(vectors.detach())
        codes = self.codes[chosen]
        if self.training:
            self._follow(vectors.detach(), chosen)
        return vectors + (codes - vectors).detach(), (vectors - codes).square().mean()

    @torch.no_grad()
    def _renew(self, vectors: Tensor) -> None:
        dead = self.counts < LEAST
        drawn = vectors[torch.randint(len(vectors), (len(self.codes),))]
        self.sums = torch.where(dead[:, None], drawn, self.sums)
        self.codes = torch.where(dead[:, None], drawn, self.codes)
        self.counts = torch.where(dead, torch.ones_like(self.counts), self.counts)

    @torch.no_grad()
    def _follow(self, vectors: Tensor, chosen: Tensor) -> None:
        members = F.one_hot(chosen, len(self.codes)).to(vectors.dtype)  # P K
        self.counts = DECAY * self.counts + (1 - DECAY) * members.sum(0)
        self.sums = DECAY * self.sums + (1 - DECAY) * members.T @ vectors
        self.codes = self.sums / self.counts[:, None]


class VQVAE(nn.Module):
    """Pixels -> a code for each square of `cell` x `cell` of them -> pixels; `cell` is a power of 2."""

    def __init__(self, count: int, cell: int) -> None:
        super().__init__()
        halvings = cell.bit_length() - 1
        down, up = [], []
        for number in range(halvings):
            down += [nn.Conv2d(WIDTH if number else 3, WIDTH, 4, 2, 1), nn.ReLU()]
            up += [nn.ReLU(), nn.ConvTranspose2d(WIDTH, WIDTH if number < halvings - 1 else 3, 4, 2, 1)]
        self.encoder = nn.Sequential(*down, VQResidual(WIDTH), nn.Conv2d(WIDTH, SIZE, 1))
        self.codebook = Codebook(count)
        self.decoder = nn.Sequential(nn.Conv2d(SIZE, WIDTH, 3, padding=1), VQResidual(WIDTH), *up)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """B 3 Y X, from -1 to 1 -> the same again, and what the codes cost"""
        vectors = self.encoder(pixels).permute(0, 2, 3, 1)  # B y x D
        codes, cost = self.codebook(vectors.flatten(0, 2))
        return self.decoder(codes.view_as(vectors).permute(0, 3, 1, 2)), cost


@dataclass(frozen=True)
class VQTokenizer:
    """A trained network, and the size of the pictures that it is used for."""

    network: VQVAE
    height: int
    width: int
    cell: int

    @classmethod
    def of(
        cls,
        pictures: Sequence[np.ndarray],
        count: int,
        cell: int = 4,
        *,
        updates: int = UPDATES,
        tell: Callable[[int, float], None] | None = None,
    ) -> VQTokenizer:
        """So many codes for pictures of one size, Y X 3; the same pictures give the same codes on the same machine.

        `tell` hears of every update and its squared error."""
        height, width = pictures[0].shape[:2]
        if height % cell or width % cell:
            raise InputError(
                f"squares of {cell} x {cell} pixels do not fill a picture of {height} x {width}",
                remedy=f"choose a size that is a multiple of {cell}",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            network = VQVAE(count, cell)
            _learn(network, torch.from_numpy(np.stack(pictures)), updates, tell or (lambda step, error: None))
        return cls(network.eval(), height, width, cell)

    @property
    def what(self) -> str:
        """What its tokens are."""
        return "codes"

    @property
    def count(self) -> int:
        return len(self.network.codebook.codes)

    @property
    def tokens(self) -> int:
        """Of a picture."""
        return self.height * self.width // self.cell**2

    @torch.inference_mode()
    def encode(self, picture: np.ndarray) -> str:
        """A picture of the right size, Y X 3 -> its line."""
        if picture.shape != (self.height, self.width, 3):
            raise ValueError(f"a picture of {picture.shape}, not {self.height} x {self.width} in colour")
        vectors = self.network.encoder(_signed(torch.from_numpy(np.array(picture))[None]))
        numbers = self.network.codebook.nearest(vectors[0].permute(1, 2, 0))
        return " ".join(f"c{number}" for number in numbers.flatten().tolist())

    @torch.inference_mode()
    def decode(self, line: str) -> tuple[np.ndarray, bool]:
        """A line -> its picture, and whether the line has as many codes as the picture has squares.

        What is missing, or is no code, is drawn as the first code; what is too much is left out."""
        names = {f"c{number}": number for number in range(self.count)}
        tokens = line.split()
        numbers = [names.get(token, 0) for token in tokens[: self.tokens]]
        numbers += [0] * (self.tokens - len(numbers))
        codes = self.network.codebook.codes[torch.tensor(numbers)]
        rows = codes.T.view(1, SIZE, self.height // self.cell, self.width // self.cell)
        drawn = (self.network.decoder(rows)[0].permute(1, 2, 0) + 1) * 127.5
        fits = len(tokens) == self.tokens and all(token in names for token in tokens)
        return drawn.round().clamp(0, 255).to(torch.uint8).numpy(), fits

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
                    raise ValueError(f"squares of {cell} in {height} x {width} pixels")
                network = VQVAE(count, cell)
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no iterator
            network.load_state_dict(found)
            if not all(values.isfinite().all() for values in found.values()):
                raise ValueError("weights that are not finite")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(
                f"not a file of codes: {told}", where=str(path), remedy="`transduce encode-images --kind vq` writes one"
            ) from None
        return cls(network.eval(), height, width, cell)


def load_image_tokenizer(path: Path) -> PaletteTokenizer | VQTokenizer:
    """Whatever `transduce encode-images` wrote: codes as safetensors, or a palette."""
    if not path.is_file():
        raise InputError("no such file", where=str(path), remedy="`transduce encode-images` writes it")
    return VQTokenizer.load(path) if path.suffix == ".safetensors" else PaletteTokenizer.load(path)


def _checked(size: Any) -> int:
    if not isinstance(size, int) or not 0 < size <= LARGEST:
        raise ValueError(f"a size of {size}")
    return size


def _signed(pixels: Tensor) -> Tensor:
    """B Y X 3 bytes -> B 3 Y X, from -1 to 1"""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def _learn(network: VQVAE, pictures: Tensor, updates: int, tell: Callable[[int, float], None]) -> None:
    optimiser = torch.optim.Adam(network.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, updates)
    for step in range(updates):
        pixels = _signed(pictures[torch.randint(len(pictures), (PICTURES,))])
        drawn, cost = network(pixels)
        error = (drawn - pixels).square().mean()
        optimiser.zero_grad()
        (error + COMMITMENT * cost).backward()
        optimiser.step()
        schedule.step()
        tell(step + 1, error.item())
