"""Values of the pipeline: Example, Batch, Memory, State, Step, Hypothesis.

Shape letters, used in every trailing comment and einsum of the code base:

    B  sources in a batch        R  rows: hypotheses in flight, R = B * N    N  beams per source
    S  source or memory length   T  target length of this call              U  target length so far
    D  width                     H  heads      K  width of one head         L  layers
    V  vocabulary                M  candidates of a top-k

Tensors are batch first. Masks are boolean and True means "may attend" (a real token, a visible row).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# The first four tokens of every vocabulary, in this order.
PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
SIMILARITY = "similarity"  # the key of the gold similarities of sentence pairs in `Batch.extra`


@dataclass(frozen=True, slots=True)
class Example:
    """One item of a data set: raw text, before tokenisation."""

    source: str
    target: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    line: int = 0  # 1-based line (or row) in `file`, for messages


@dataclass(frozen=True)
class PackedLayout:
    """The positions of several sequences packed end to end in each row of a batch."""

    segment_ids: (
        Tensor  # B S: which of a row's sequences, from 1, each token is of; sequences of a pair have one number
    )
    positions: Tensor  # B S: the position in its sequence, from 0

    def same_segment(self, segment_ids: Tensor) -> Tensor:
        """B 1 T S: which tokens with these segment ids (B S) belong to the same sequence or pair."""
        return (self.segment_ids[:, :, None] == segment_ids[:, None])[:, None]


def copied_to(device: torch.device | str, tensor: Tensor, *, pinned: bool) -> Tensor:
    """A tensor on a device. A copy that is not `pinned` waits for all that a GPU has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)


@dataclass(frozen=True)
class Padded:
    """Sequences of different lengths in one tensor, padded on the right."""

    values: Tensor  # B S (ids) or B S D (frames) ...
    mask: Tensor  # B S
    layout: PackedLayout | None = None  # of a packed batch; None: every row is one sequence

    @classmethod
    def from_rows(cls, rows: list[list[int]], pad: int = PAD) -> Padded:
        lengths = torch.tensor([len(row) for row in rows])
        longest = max((len(row) for row in rows), default=0)
        values = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], dtype=torch.long)
        return cls(values.view(len(rows), longest), torch.arange(longest) < lengths[:, None])

    @property
    def ids(self) -> Tensor | None:
        """B S, where the values are ids."""
        return self.values if self.values.dim() == 2 else None

    def to(self, device: torch.device | str, *, pinned: bool = False) -> Padded:
        """On a device; `pinned`: by an asynchronous copy from page-locked memory, to a GPU."""
        copy = partial(copied_to, device, pinned=pinned)
        layout = None if self.layout is None else PackedLayout(*map(copy, vars(self.layout).values()))
        return Padded(copy(self.values), copy(self.mask), layout)

    def select(self, rows: Tensor) -> Padded:
        """These rows, without columns that are padding in all of them; packed rows keep all columns."""
        mask = self.mask[rows]
        if self.layout is not None:
            return Padded(self.values[rows], mask, PackedLayout(*(part[rows] for part in vars(self.layout).values())))
        longest = int(mask.sum(1).max()) if len(rows) else 0
        return Padded(self.values[rows, :longest], mask[:, :longest])

    def pad_to_multiple(self, multiple: int, max_length: int | None = None, uncounted: int = 0) -> Padded:
        """Padded to a multiple of columns, so that CUDA graphs see few different shapes; ids only.

        `max_length`: never padded beyond this. `uncounted`: columns that do not count.
        """
        length = self.values.size(1) - uncounted
        padding = -length % multiple if self.ids is not None else 0
        padding = padding if max_length is None else min(padding, max(max_length - length, 0))
        return Padded(F.pad(self.values, (0, padding)), F.pad(self.mask, (0, padding))) if padding else self

    def __len__(self) -> int:
        return self.values.size(0)


@dataclass(frozen=True)
class Batch:
    """Tensors of several examples. A target row is `<s> y1 .. yn </s>`, a source row `x1 .. xm </s>`.

    In a packed batch a row holds several pairs: the target is then `<s> y1 .. yn` of each, and `packed_labels` is
    `y1 .. yn </s>`.
    """

    source: Padded | None = None
    target: Padded | None = None
    extra: Mapping[str, Padded] = field(default_factory=dict)  # further named sources
    rows: tuple[int, ...] = ()  # which examples of the data set these are
    loss_mask: Padded | None = None  # B T bool: which tokens of `target` count in the loss; None: all
    packed_labels: Padded | None = None  # B T: the next token of each token of a packed `target`

    def _parts(self) -> list[Padded]:
        return [part for part in (self.source, self.target, *self.extra.values()) if part is not None]

    def map(self, change: Callable[[Padded], Padded]) -> Batch:
        """The same batch with a function applied to every part."""
        return replace(
            self,
            source=change(self.source) if self.source else None,
            target=change(self.target) if self.target else None,
            extra={name: change(part) for name, part in self.extra.items()},
            loss_mask=change(self.loss_mask) if self.loss_mask else None,
            packed_labels=change(self.packed_labels) if self.packed_labels else None,
        )

    def to(self, device: torch.device | str, *, pinned: bool = False) -> Batch:
        return self.map(lambda part: part.to(device, pinned=pinned))

    def select(self, rows: Tensor) -> Batch:
        """These rows of the batch: used to split it over processes, or after running out of memory."""
        numbers = tuple(self.rows[i] for i in rows.tolist()) if self.rows else ()
        return replace(self.map(lambda part: part.select(rows.to(part.values.device))), rows=numbers)

    @property
    def size(self) -> int:
        return len(self._parts()[0])

    @property
    def device(self) -> torch.device:
        return self._parts()[0].values.device

    @property
    def tokens(self) -> int:
        """The number of tokens of source and target, without padding."""
        return sum(int(part.mask.sum()) for part in self._parts())

    @property
    def slots(self) -> int:
        """The number of tokens including padding."""
        return sum(part.mask.numel() for part in self._parts())

    @property
    def decoder_inputs(self) -> Padded:
        """The input of the decoder: the target without its last column."""
        assert self.target is not None, "this batch has no target"
        if self.packed_labels is not None:
            return self.target
        return Padded(self.target.values[:, :-1], self.target.mask[:, 1:])

    @property
    def labels(self) -> Padded:
        """The labels: the target without its first column, masked by `loss_mask`."""
        assert self.target is not None, "this batch has no target"
        if self.packed_labels is not None:
            return self.packed_labels
        mask = self.target.mask if self.loss_mask is None else self.target.mask & self.loss_mask.values
        return Padded(self.target.values[:, 1:], mask[:, 1:])


@dataclass(frozen=True)
class Memory:
    """The output of an encoder, the same for words, patches, grid cells and frames."""

    values: Tensor  # B S D: attended to
    mask: Tensor  # B S
    summary: Tensor  # B D: the whole source as one vector
    attention: Tensor | None = None  # B L H S S: self-attention of the encoder, where requested
    tokens: Tensor | None = None  # B S: the source token of each row, where rows are tokens
    segment_ids: Tensor | None = None  # B S: the sequence of each row, in a packed batch: see `PackedLayout`
    source_ids: Tensor | None = None  # B S: which of several sources each row is of, from 0; None: there is one
    first_source_rows: int | None = None  # all rows of the first source are among so many; None: anywhere

    @classmethod
    def empty(cls, size: int, device: torch.device | str = "cpu") -> Memory:
        """A memory of no rows: a decoder that starts from it is a language model."""
        nothing = torch.zeros(size, 0, device=device)
        return cls(nothing[:, :, None], nothing.bool(), nothing)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the unpadded rows, 0 where there is none: B S D -> B D."""
    return (values * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


Tree = Any  # a tensor, or tuples and dicts of trees; each decoder defines its own


def map_tensors(change: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Applies `change` to each tensor of a tree, and to the corresponding tensors of other trees of that form."""
    if isinstance(tree, Tensor):
        return change(tree, *others)
    if isinstance(tree, dict):
        return {name: map_tensors(change, tree[name], *(other[name] for other in others)) for name in tree}
    return tuple(map_tensors(change, *branches) for branches in zip(tree, *others, strict=True))


@dataclass(frozen=True)
class State:
    """The state of a decoder between two calls.

    `fixed` has one row per source (projected keys and values, the summary): beams share it, so it is neither repeated
    nor reordered. `past` has one row per hypothesis (recurrent states, KV caches).
    """

    fixed: dict[str, Tree]
    past: dict[str, Tree]
    beams: int = 1  # N: rows of `past` for each row of `fixed`

    def repeat(self, n: int) -> State:
        """Every hypothesis n times, in adjacent rows."""
        past = {name: map_tensors(lambda x: x.repeat_interleave(n, 0), tree) for name, tree in self.past.items()}
        return State(self.fixed, past, self.beams * n)

    def reorder(self, rows: Tensor) -> State:
        """Row i continues hypothesis rows[i], which must belong to the same source."""
        past = {name: map_tensors(lambda x: x.index_select(0, rows), tree) for name, tree in self.past.items()}
        return State(self.fixed, past, self.beams)

    def select_sources(self, sources: Tensor, *, owned: bool = False) -> State:
        """Only these sources, with all their beams: finished sources leave the batch.

        `owned`: no other state shares `fixed`, as after an earlier call. Then only sources whose index changes are
        copied, in place, so each must keep its index or come from behind those that do.
        """
        moved = (sources != torch.arange(len(sources), device=sources.device)).nonzero().flatten() if owned else None

        def choose(x: Tensor) -> Tensor:
            if moved is None:
                return x.index_select(0, sources)
            return x.index_copy_(0, moved, x[sources[moved]])[: len(sources)]

        fixed = {name: map_tensors(choose, tree) for name, tree in self.fixed.items()}
        return State(fixed, self.reorder(self._rows(sources)).past, self.beams)

    def replace_sources(self, sources: Tensor, other: State, *, owned: bool = False) -> State:
        """The sources at these indices replaced, with all their beams, by the first ones of another state.

        The other has the same names and, but for the number of sources, the same shapes. `owned`: no other state shares
        these tensors, so they are overwritten.
        """

        def replaced(x: Tensor, new: Tensor, index: Tensor) -> Tensor:
            new = new[: len(index)].to(x.dtype)
            # Not in place where elements share an address, as after `expand`.
            return x.index_copy_(0, index, new) if owned and x.is_contiguous() else x.index_copy(0, index, new)

        fixed = map_tensors(lambda x, new: replaced(x, new, sources), self.fixed, other.fixed)
        rows = self._rows(sources)
        past = map_tensors(lambda x, new: replaced(x, new, rows), self.past, other.past)
        return State(fixed, past, self.beams)

    def _rows(self, sources: Tensor) -> Tensor:
        """The rows of the hypotheses of these sources."""
        return (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()


@dataclass(frozen=True)
class CacheSlots:
    """Slots of a preallocated KV cache B N L G K: one per beam and position.

    Beams that continue another one do not copy its cache: the indirection says whose slots they read.
    """

    positions: Tensor  # R: the position of each new row
    indirection: Tensor  # R L: the beam whose slot holds the token of a row at each position
    beams: int  # N
    window: int | None = None  # how far back a row attends; None: to all earlier rows

    @cached_property
    def rows(self) -> Tensor:
        """R: the slot, of B*N*L, that each new row fills."""
        rows, capacity = self.indirection.shape
        return torch.arange(rows, device=self.positions.device) * capacity + self.positions

    @cached_property
    def mask(self) -> Tensor:
        """B 1 N N*L: the slots that each beam attends to."""
        slots = torch.arange(self.indirection.size(1), device=self.positions.device)
        visible = slots <= self.positions[:, None]  # R L
        if self.window is not None:
            visible = visible & (self.positions[:, None] - slots <= self.window)
        if self.beams > 1:
            beams = torch.arange(self.beams, dtype=self.indirection.dtype, device=slots.device)  # N
            visible = (visible[:, None] & (self.indirection[:, None] == beams[:, None])).flatten(1)  # R N*L
        return visible.unflatten(0, (-1, self.beams))[:, None]

    @cached_property
    def without_window(self) -> CacheSlots:
        """The same slots for layers that attend to all earlier rows."""
        return replace(self, window=None)

    @cached_property
    def additive_mask(self) -> Tensor:
        """The additive form of `mask`, computed once for all layers."""
        return additive_mask(self.mask)


def additive_mask(mask: Tensor) -> Tensor:
    """A boolean mask as a bias of the scores: 0 or -inf."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


@dataclass(frozen=True)
class Attention:
    """Exact attention weights; the last axis sums to 1. None: the decoder has no such attention."""

    cross: Tensor | None = None  # R L H T S: over the memory
    past: Tensor | None = None  # R L H T U: over the target so far
    entropy: Tensor | None = (
        None  # R L H T: entropy of the distribution that `cross` was sampled from, where it was sampled
    )


@dataclass(frozen=True)
class Step:
    """The result of one `advance`: logits of the next tokens, and the next state."""

    logits: Tensor  # R T V
    state: State
    attention: Attention | None = None
    hidden: Tensor | None = None  # R T D: the input of the output layer; its mean where the logits are of a mixture


@dataclass(frozen=True)
class Shortlists:
    """The target tokens allowed for each source. The softmax is taken over them alone."""

    tokens: Tensor  # int32: the lists, concatenated, each sorted
    begins: Tensor  # the offset of each list, and the end of the last one
    which: Tensor  # B: the list of each source


@dataclass(frozen=True)
class TopKRequest:
    """Arguments of one top-k step of a search."""

    k: int  # M: the number of best next tokens
    suppressed: tuple[int, ...]  # tokens left out of the result, though not of the softmax
    active: Tensor  # R: the rows that continue; the results of the others are undefined
    shortlists: Shortlists | None = None  # None: all tokens are allowed


@dataclass(frozen=True)
class TopK:
    """The k best next tokens of each row, best first, with their log-probabilities, and the next state."""

    log_probs: Tensor  # R M: -inf beyond the last candidate and in inactive rows
    tokens: Tensor  # R M
    state: State


@dataclass(frozen=True)
class LexicalConstraints:
    """Phrases that the outputs of each source must contain, and phrases that they must not, as ids."""

    required: Tensor  # B C A P: C phrases with A alternatives each, padded on the right; all PAD: none
    banned: Tensor  # B K P

    @classmethod
    def from_rows(cls, required: list[list[list[list[int]]]], banned: list[list[list[int]]]) -> LexicalConstraints:
        """`required`: for each source its phrases, for each phrase its alternatives; `banned`: phrases."""
        alternatives = max((len(phrase) for row in required for phrase in row), default=1)
        phrases = max([1, *map(len, required)])
        flat = [
            [ids for phrase in row for ids in phrase + [[]] * (alternatives - len(phrase))]
            + [[]] * (alternatives * (phrases - len(row)))
            for row in required
        ]
        return cls(_phrase_tensor(flat).unflatten(1, (phrases, alternatives)), _phrase_tensor(banned))

    def select(self, rows: Tensor) -> LexicalConstraints:
        return LexicalConstraints(self.required[rows], self.banned[rows])

    def to(self, device: torch.device | str) -> LexicalConstraints:
        return LexicalConstraints(self.required.to(device), self.banned.to(device))


def _phrase_tensor(rows: list[list[list[int]]]) -> Tensor:
    """B K P, padded on the right; at least one phrase of one token, which may be padding."""
    count = max([1, *map(len, rows)])
    length = max([1, *(len(ids) for row in rows for ids in row)])
    values = torch.full((len(rows), count, length), PAD)
    for number, row in enumerate(rows):
        for column, ids in enumerate(row):
            values[number, column, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    return values


@dataclass(frozen=True)
class Hypothesis:
    """One finished hypothesis of a search. `score` is the sum of `token_scores`, natural logarithms."""

    ids: tuple[int, ...]  # without <s>; with </s> when complete
    token_scores: tuple[float, ...]
    rank: float  # the sorting key of the search: the score after the length penalty
    complete: bool = True  # False: truncated at the maximum length

    @property
    def score(self) -> float:
        return sum(self.token_scores)

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The ids without the final </s>."""
        return self.ids[:-1] if self.complete else self.ids
