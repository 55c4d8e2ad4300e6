"""Lexical shortlists: the target tokens that each source may use, from IBM Model 1 translation probabilities."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from transduce.data.store import Store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import BOS, PAD, SPECIALS, Batch, Hypothesis, Padded, Shortlists, State, Step, TopK, TopKRequest
from transduce.kernels.dispatch import has_hooks
from transduce.kernels.linear import PackedLinear
from transduce.layers.embedding import Output
from transduce.model import TopKDecoder, TopKStep, Transducer
from transduce.storage import replace_file

FORMAT = "transduce shortlist 1"


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The most probable target tokens of each source token, and the tokens that are allowed for every source."""

    likeliest: Tensor  # Vs K, int32: <pad> where there are fewer
    always: Tensor  # N, int32: special tokens and frequent ones
    size: int  # V: all target tokens
    fingerprints: tuple[str, str]  # fingerprints of both tokenizers

    def allowed(self, source: Padded) -> Tensor:
        """B V: the target tokens allowed for each source. They depend on the source alone, not on its batch."""
        lists = self.likeliest[source.values.masked_fill(~source.mask, PAD)].flatten(1).long()  # B S*K
        allowed = torch.zeros(len(source), self.size, dtype=torch.bool)
        allowed[:, self.always.long()] = True
        allowed.scatter_(1, lists, True)
        if self.fingerprints[0] == self.fingerprints[1]:  # one vocabulary: source tokens may be generated unchanged
            allowed.scatter_(1, source.values, True)
        return allowed

    def check(self, tokenizers: tuple[Tokenizer, Tokenizer], where: str = "shortlist") -> None:
        """Raises an error if the shortlist was made for other vocabularies."""
        if self.fingerprints != tuple(one.fingerprint for one in tokenizers):
            raise InputError(
                "the shortlist was made for other tokens",
                where=where,
                remedy="make one for this run: transduce shortlist RUN FILE",
            )

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, atomically."""
        source, target = self.fingerprints
        metadata = {"format": FORMAT, "size": str(self.size), "source": source, "target": target}
        tensors = {"likeliest": self.likeliest.contiguous(), "always": self.always.contiguous()}
        replace_file(Path(path), save(tensors, metadata))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"format {metadata.get('format')!r}, expected {FORMAT!r}")
                found = cls(
                    file.get_tensor("likeliest"),
                    file.get_tensor("always"),
                    int(metadata["size"]),
                    (metadata["source"], metadata["target"]),
                )
            found._check_numbers()
        except FileNotFoundError:
            raise InputError(
                "no such shortlist", where=str(path), remedy="make one: transduce shortlist RUN FILE"
            ) from None
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise InputError(f"not a shortlist: {error}", where=str(path), remedy="make it again") from None
        return found

    def _check_numbers(self) -> None:
        for name, tensor, axes in (("likeliest", self.likeliest, 2), ("always", self.always, 1)):
            if tensor.dtype != torch.int32 or tensor.dim() != axes:
                raise ValueError(f"{name} is {tensor.dtype} with {tensor.dim()} axes")
            if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < self.size:
                raise ValueError(f"{name} names tokens beyond the {self.size:,} of the vocabulary")
        if set(range(len(SPECIALS))) - set(self.always.tolist()):
            raise ValueError("the special tokens are missing")


NULL = BOS  # the empty word of IBM Model 1, before every source; no source contains <s>
LINKS = 1 << 22  # token pairs per chunk
ROUNDS = 5


@dataclass(frozen=True)
class Translations:
    """p(target | source) of every pair of tokens that occurs in a line; sorted by source, then by target."""

    sources: np.ndarray
    targets: np.ndarray
    probabilities: np.ndarray

    def likeliest(self, size: int, count: int) -> np.ndarray:
        """(size, count) int32: the most probable target tokens of each source token, best first, padded with <pad>."""
        kept = np.flatnonzero((self.probabilities > 0) & (self.sources != NULL))
        kept = kept[np.lexsort((-self.probabilities[kept], self.sources[kept]))]
        sources = self.sources[kept]
        rank = np.arange(len(kept)) - np.searchsorted(sources, sources)  # within the same source token
        lists, near = np.zeros((size, count), np.int32), rank < count
        lists[sources[near], rank[near]] = self.targets[kept][near]
        return lists


def make_shortlist(
    store: Store,
    tokenizers: tuple[Tokenizer, Tokenizer],
    *,
    likeliest: int = 100,
    frequent: int = 100,
    lines: int = 100_000,
) -> Shortlist:
    """A shortlist estimated from at most `lines` evenly spaced pairs of a store, which bounds time and memory."""
    if store.sourceless or store.items is not None:
        raise InputError("a shortlist is made from pairs of texts", where=store.names[0])
    rows = np.arange(0, len(store), -(-len(store) // lines))
    source, target = tokenizers
    counts = np.zeros(target.size, np.int64)
    for some in np.array_split(rows, -(-len(rows) // 10_000)):
        counts += np.bincount(store.token_ids("target", some)[0], minlength=target.size)
    common = np.argsort(-counts, kind="stable")[:frequent]
    always = np.union1d([*range(len(SPECIALS)), *target.oov_ids], common[counts[common] > 0])
    lists = translate(store, rows, target.size).likeliest(source.size, likeliest)
    fingerprints = source.fingerprint, target.fingerprint
    return Shortlist(torch.from_numpy(lists), torch.from_numpy(always.astype(np.int32)), target.size, fingerprints)


def translate(store: Store, rows: np.ndarray, size: int, rounds: int = ROUNDS) -> Translations:
    """EM: c(t, s) = sum of p(t | s) / sum over s' of p(t | s'), p(t | s) = c(t, s) / sum over t' of c(t', s)."""
    table = np.zeros(0, np.int64)  # source * size + target
    for codes, _ in _links(store, rows, size):
        table = np.union1d(table, codes)
    sources, probabilities = table // size, np.ones(len(table))
    for _ in range(rounds):
        counts = np.zeros(len(table))
        for codes, target_index in _links(store, rows, size):
            index = np.searchsorted(table, codes)
            share = probabilities[index]
            share /= np.bincount(target_index, share)[target_index]
            counts += np.bincount(index, share, len(table))
        probabilities = counts / np.bincount(sources, counts)[sources]
    return Translations(sources, table % size, probabilities)


def _links(store: Store, rows: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunks of all token pairs (source * size + target), with the index of the target token of each pair."""
    lengths = store.lengths[rows].astype(np.int64)
    filled = np.cumsum((lengths[:, 0] + 1) * lengths[:, 1])
    for some in np.split(rows, np.flatnonzero(np.diff(filled // LINKS)) + 1):
        flat, of_source = store.token_ids("source", some)
        targets, of_target = store.token_ids("target", some)
        if not len(targets):
            continue
        ends = np.cumsum(of_source)
        sources = np.insert(flat.astype(np.int64), ends - of_source, NULL)
        counts = np.repeat(of_source + 1, of_target)  # source tokens, with NULL, that each target token is paired with
        begins = np.repeat(ends - of_source + np.arange(len(some)), of_target)
        target_index = np.repeat(np.arange(len(targets)), counts)
        offset = np.arange(len(target_index)) - np.repeat(np.cumsum(counts) - counts, counts)
        yield sources[begins[target_index] + offset] * size + targets[target_index], target_index


LARGE = 2.0**60  # so large that a bias is lost to rounding: LARGE w + b = LARGE w
LINE = "line"  # key in State.fixed: the index of each source in its batch


class OutputRows:
    """The output layer of a network as unpacked rows, from which layers over any subset of tokens are built."""

    def __init__(self, network: Transducer) -> None:
        output = getattr(getattr(network, "decoder", None), "output", None)
        if not isinstance(output, Output):
            raise InputError(
                "a shortlist needs a decoder with one output layer",
                remedy="leave it out: this model copies source words, uses CTC, or has no decoder",
            )
        self.network: Any = network  # has a decoder with an output layer
        self.layer: nn.Module = output.projection
        self.weight, self.bias = _unpacked(output.projection)
        self._blank = nn.Linear(self.weight.size(1), 1, device="meta")

    def chosen(self, ids: Tensor) -> nn.Module:
        """A layer with these rows only, packed like the original."""
        chosen = copy.copy(self._blank)  # a new layer would initialise its weights first
        chosen.out_features = len(ids)
        numbers = {"weight": self.weight[ids], "bias": self.bias[ids]}
        chosen._parameters = {name: nn.Parameter(one, requires_grad=False) for name, one in numbers.items()}
        return type(self.layer)(chosen) if isinstance(self.layer, PackedLinear) else chosen

    def network_of(self, ids: Tensor) -> Transducer:
        """The network with an output layer of these rows; all other modules are shared."""
        module: nn.Module = self.chosen(ids)
        decoder = self.network.decoder
        for part, name in ((decoder.output, "projection"), (decoder, "output"), (self.network, "decoder")):
            shallow = copy.copy(part)
            shallow._modules = {**part._modules, name: module}
            module = shallow
        assert isinstance(module, Transducer)
        return module


def _unpacked(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """W (V D) and b (V) of a layer that computes W x + b in any packed format: W is its output for unit vectors.

    Weights in int8 are returned times their scales; packed again, they are rounded to the same integers.
    """
    if type(layer) is nn.Linear and not has_hooks(layer):
        assert layer.bias is not None
        return layer.weight.detach(), layer.bias.detach()
    first = next(layer.parameters(), None)
    like = torch.zeros(0) if first is None else first
    width = int(layer.in_features)  # type: ignore[arg-type]
    with torch.inference_mode(False), torch.no_grad():
        units = torch.eye(width, dtype=like.dtype, device=like.device) * LARGE
        bias = layer(torch.zeros_like(units[:1]))[0]
        return (layer(units).t() / LARGE).contiguous(), bias


class NarrowedModel(Transducer):
    """A network whose vocabulary is the union of the shortlists of a batch; token ids are indices into it."""

    def __init__(self, rows: OutputRows, allowed: Tensor) -> None:
        super().__init__()
        self.ids = allowed.any(0).nonzero().flatten().to(rows.weight.device)
        self.inner = rows.network_of(self.ids)
        several = len(allowed) > 1 and bool((allowed != allowed[:1]).any())
        # B V; None: all sources of the batch have the same list
        self.forbidden = ~allowed.to(self.ids.device)[:, self.ids] if several else None

    def start(self, batch: Batch) -> State:
        return _numbered(self.inner.start(batch), batch)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        return self.read(self.ids[tokens], state, mask, with_attention=with_attention)

    def read(self, named: Tensor, state: State, mask: Tensor | None, *, with_attention: bool) -> Step:
        """As `advance`, but the input ids are those of the full vocabulary."""
        step = self.inner.advance(named, state, mask, with_attention=with_attention)
        if self.forbidden is None:
            return step
        forbidden = self.forbidden[state.fixed[LINE]].repeat_interleave(state.beams, 0)[:, None]  # R 1 V
        return replace(step, logits=step.logits.masked_fill(forbidden, -torch.inf))

    @property
    def top_k(self) -> TopKStep | None:
        """Available where all sources have the same list."""
        inner = self.inner.top_k
        if inner is None or self.forbidden is not None:
            return None
        return lambda tokens, state, request: inner(self.ids[tokens], state, request)

    def reserve(self, state: State, more: int, beams: int) -> State:
        return self.inner.reserve(state, more, beams)

    def memory_mask(self, state: State) -> Tensor | None:
        return self.inner.memory_mask(state)

    def indices_of(self, tokens: Sequence[int]) -> list[int]:
        """The indices of these tokens in the list; tokens that are not in it are left out."""
        return [int(offset) for token in tokens for offset in (self.ids == token).nonzero().flatten()]

    def original_ids(self, found: Hypothesis) -> Hypothesis:
        """The hypothesis with ids of the full vocabulary."""
        return replace(found, ids=tuple(self.ids[list(found.ids)].tolist()))


class ShortlistedModel(Transducer):
    """A network restricted to shortlists, with unchanged token ids, for lowered decoders that support shortlists.

    `top_k` computes only the scores of the tokens in the list of each source, and no output layer is built for a batch.
    Where a search needs the logits of all tokens, they come from a `NarrowedModel`, and are -inf outside the lists.
    """

    def __init__(self, rows: OutputRows, allowed: Tensor) -> None:
        super().__init__()
        self.inner: Transducer = rows.network
        self._rows, self._allowed = rows, allowed
        lines, tokens = allowed.nonzero(as_tuple=True)
        self._tokens, self._begins = tokens.int(), torch.searchsorted(lines, torch.arange(len(allowed) + 1))

    @cached_property
    def narrowed(self) -> NarrowedModel:
        return NarrowedModel(self._rows, self._allowed)

    def start(self, batch: Batch) -> State:
        return _numbered(self.inner.start(batch), batch)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        narrowed, size = self.narrowed, self._allowed.size(1)
        step = narrowed.read(tokens, state, mask, with_attention=with_attention)
        logits = step.logits.new_full((*step.logits.shape[:-1], size), -torch.inf)  # R T V
        return replace(step, logits=logits.index_copy_(-1, narrowed.ids, step.logits))

    @property
    def top_k(self) -> TopKStep | None:
        return self._top_k

    def _top_k(self, tokens: Tensor, state: State, request: TopKRequest) -> TopK:
        lists = Shortlists(self._tokens, self._begins, state.fixed[LINE])
        assert self.inner.top_k is not None
        return self.inner.top_k(tokens, state, TopKRequest(request.k, request.suppressed, request.active, lists))

    def reserve(self, state: State, more: int, beams: int) -> State:
        return self.inner.reserve(state, more, beams)

    def memory_mask(self, state: State) -> Tensor | None:
        return self.inner.memory_mask(state)

    def indices_of(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    def original_ids(self, found: Hypothesis) -> Hypothesis:
        return found


def _numbered(state: State, batch: Batch) -> State:
    """Adds the index of each source, so that its list is found after rows have been dropped."""
    return replace(state, fixed={**state.fixed, LINE: torch.arange(batch.size, device=batch.device)})


def apply_shortlists(rows: OutputRows, allowed: Tensor) -> NarrowedModel | ShortlistedModel:
    """The network restricted to the tokens that each source allows (B V)."""
    decoder = rows.network.decoder
    supported = isinstance(decoder, TopKDecoder) and decoder.supports_shortlists
    return (ShortlistedModel if supported else NarrowedModel)(rows, allowed)
