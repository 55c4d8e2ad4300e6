"""Position encodings: sinusoidal, learned, rotary, relative bias, learned with relative bias, Shaw, ALiBi."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from transduce.contracts import Count, PositionEncoding
from transduce.errors import InputError
from transduce.kernels.dispatch import host_may_read
from transduce.layers.feed_forward import dense

Join = Literal["add", "concatenate"]


class NoPosition(PositionEncoding):
    """no positions: without a causal mask, attention is independent of the order of rows"""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()


class AdditivePosition(PositionEncoding):
    """Base of encodings with one vector per position: x + p, or W [x; p] with `join: concatenate`."""

    def __init__(self, width: int, join: Join) -> None:
        super().__init__()
        self.concat_proj = dense(2 * width, width) if join == "concatenate" else None

    def join(self, values: Tensor, vectors: Tensor) -> Tensor:
        if self.concat_proj is None:
            return values + vectors
        result: Tensor = self.concat_proj(torch.cat((values, vectors.expand_as(values)), -1))
        return result


class Sinusoidal(AdditivePosition):
    """sines and cosines of the position, added to the embedding (Vaswani 2017)"""

    frequencies: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        *,
        join: Join = "add",
        halves: bool = False,
        inclusive: bool = False,
        offset: Annotated[int, Ge(0)] = 0,
    ) -> None:
        """`halves`: all sines before all cosines, instead of alternating. `inclusive`: the lowest frequency is exactly
        1 / 10000. `offset`: the position of the first row. Marian uses the first two; fairseq also starts at 2."""
        super().__init__(width, join)
        steps = torch.arange(0, width, 2) / (max(width - 2, 1) if inclusive else width)
        self.register_buffer("frequencies", 10000**-steps, persistent=False)
        self.width, self.halves, self.offset = width, halves, offset

    def add(self, values: Tensor, positions: Tensor) -> Tensor:
        angles = (positions + self.offset)[..., None] * self.frequencies  # . T D/2
        pair = (angles.sin(), angles.cos())
        vectors = torch.cat(pair, -1) if self.halves else torch.stack(pair, -1).flatten(-2)
        return self.join(values, vectors[..., : self.width].to(values.dtype))


class Learned(AdditivePosition):
    """one learned vector per position, added to the embedding (Gehring 2017)"""

    def __init__(
        self, width: int, heads: int, causal: bool, *, max_positions: Count = 2048, join: Join = "add"
    ) -> None:
        super().__init__(width, join)
        self.max_positions: int = max_positions
        self.embed_positions = nn.Embedding(max_positions, width)
        # As large as sinusoids, with embeddings of standard deviation 1. With D ** -0.5 the model ignored the order for
        # the first few hundred updates (Shakespeare by characters: best development loss 1.505, now 1.468).
        nn.init.normal_(self.embed_positions.weight, std=0.5**0.5)

    def add(self, values: Tensor, positions: Tensor) -> Tensor:
        # A single step belongs to a search, which checks its maximum length itself.
        several = values.size(-2) > 1  # rows
        if values.size(-2) > self.max_positions or (
            several and host_may_read(values) and int(positions.max()) >= self.max_positions
        ):
            raise InputError(
                f"learned positions end at {self.max_positions}",
                remedy="set position: {kind: learned, max_positions: ...}, or choose rotary, relative or sinusoidal",
            )
        vectors = self.embed_positions(positions.clamp(max=self.max_positions - 1))
        if self.training and several and not host_may_read(values):
            # Not truncated silently: a non-finite update is run again outside of the CUDA graph, where the check runs.
            vectors = vectors.masked_fill((positions >= self.max_positions)[..., None], torch.nan)
        return self.join(values, vectors)


def max_positions(model: nn.Module) -> int | None:
    """The smallest number of positions of the encodings of a model; None: unlimited."""
    encodings = [part for part in model.modules() if isinstance(part, PositionEncoding)]
    return min((one.max_positions for one in encodings if one.max_positions is not None), default=None)


class Rotary(PositionEncoding):
    """queries and keys rotated by angles proportional to the position (Su 2021)"""

    frequencies: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        *,
        base: Annotated[float, Gt(0)] = 10000.0,
        share: Annotated[float, Gt(0), Le(1)] = 1.0,
    ) -> None:
        """`base`: the longest wavelength is about 2 pi times as long. `share`: the part of a head that is rotated."""
        super().__init__()
        head = int(width // heads * share)
        if head % 2 or not head:
            raise InputError(f"rotary positions need an even head width, not {head}")
        self.register_buffer("frequencies", base ** -(torch.arange(0, head, 2) / head), persistent=False)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        angles = (positions[..., None] * self.frequencies)[:, None]  # . 1 T K/2
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        half = cos.size(-1)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class RelativeBias(PositionEncoding):
    """one learned bias per head and bucket of distances, added to the scores (Raffel 2020)"""

    def __init__(self, width: int, heads: int, causal: bool, *, buckets: Count = 32, max_distance: Count = 128) -> None:
        super().__init__()
        self.causal, self.buckets, self.max_distance = causal, buckets, max_distance
        self.relative_attention_bias = nn.Embedding(buckets, heads)
        nn.init.normal_(self.relative_attention_bias.weight, std=0.1)

    def bias(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return self.relative_attention_bias(self._bucket(keys[:, None, :] - queries[:, :, None])).permute(
            0, 3, 1, 2
        )  # . H T S

    def _bucket(self, offsets: Tensor) -> Tensor:
        """One bucket per near distance, logarithmic buckets for far ones; separate buckets ahead and behind."""
        buckets, side = self.buckets, torch.zeros_like(offsets)
        if self.causal:
            away = (-offsets).clamp(min=0)
        else:
            buckets //= 2
            side, away = (offsets > 0) * buckets, offsets.abs()
        exact = buckets // 2
        growth = torch.log(away.clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        return side + torch.where(away < exact, away, far)


class LearnedRelative(Learned):
    """learned vectors added to the embedding, and a bias per head and bucket of distances (MPNet, Song 2020)"""

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        *,
        max_positions: Count = 2048,
        buckets: Count = 32,
        max_distance: Count = 128,
    ) -> None:
        super().__init__(width, heads, causal, max_positions=max_positions)
        self.relative = RelativeBias(width, heads, causal, buckets=buckets, max_distance=max_distance)

    def bias(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return self.relative.bias(heads, queries, keys)


class Shaw(PositionEncoding):
    """one learned vector per clipped distance, added to the keys: q . (k + a) (Shaw 2018)"""

    def __init__(self, width: int, heads: int, causal: bool, *, max_distance: Count = 16) -> None:
        super().__init__()
        self.max_distance, self.scale = max_distance, 1 / math.sqrt(width // heads)
        self.relative_keys = nn.Embedding(2 * max_distance + 1, width // heads)
        nn.init.normal_(self.relative_keys.weight, std=(width // heads) ** -0.5)

    def bias(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        limit = self.max_distance
        offsets = (keys[:, None, :] - queries[:, :, None]).clamp(-limit, limit) + limit  # . T S
        scores = torch.einsum("rhtk,ok->rhto", heads, self.relative_keys.weight) * self.scale
        return scores.gather(-1, offsets[:, None].expand(heads.size(0), heads.size(1), -1, -1))  # R H T S


class ALiBi(PositionEncoding):
    """a penalty proportional to the distance, with a slope per head (Press 2022)"""

    head_slopes: Tensor

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        head_slopes = 2 ** (-8 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("head_slopes", head_slopes[:, None, None], persistent=False)

    def bias(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return -(keys[:, None, None, :] - queries[:, None, :, None]).abs() * self.head_slopes  # . H T S


class LayerPositions(PositionEncoding):
    """One encoding per layer, each with weights of its own (UMT5, Chung 2023)."""

    def __init__(self, layers: Sequence[PositionEncoding]) -> None:
        super().__init__()
        if position_in_embedding(layers[0]) or type(layers[0]).add is not PositionEncoding.add:
            raise InputError(
                f"{type(layers[0]).__name__} positions are added to embeddings, before the first layer",
                remedy="leave position_per_layer out, or choose position: relative or shaw",
            )
        self.layers = nn.ModuleList(layers)

    def of_layer(self, number: int) -> PositionEncoding:
        encoding: PositionEncoding = self.layers[number]  # type: ignore[assignment]
        return encoding


def position_in_embedding(position: PositionEncoding) -> bool:
    """Whether positions are added to the embeddings, so that attention does not depend on them."""
    kind = type(position)
    in_attention = (PositionEncoding.rotate, PositionEncoding.bias, PositionEncoding.of_layer)
    return (kind.rotate, kind.bias, kind.of_layer) == in_attention


def embedded_only(position: PositionEncoding, part: str) -> PositionEncoding:
    """The encoding, if it is added to embeddings; an InputError for one that acts in self-attention.

    `part` is what has no self-attention, for the message.
    """
    if not position_in_embedding(position):
        raise InputError(
            f"{type(position).__name__} positions act in self-attention, and {part} has none",
            remedy="choose position: sinusoidal, learned or none",
        )
    return position


POSITIONS: dict[str, type[PositionEncoding]] = {
    "none": NoPosition,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "relative": RelativeBias,
    "learned_relative": LearnedRelative,
    "shaw": Shaw,
    "alibi": ALiBi,
}
