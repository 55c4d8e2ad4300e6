"""Interventions: masked tokens, heads and layers, changed attention, forced tokens, states of another source.

An intervention is a value. `intervene` returns a copy of a network that shares every weight with it, with other parts
in the places that the interventions name; the network itself is not changed, so there is nothing to undo. A changed
attention computes its weights explicitly; all other attention keeps its kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.attention.multihead import Attend, CrossAttention, MultiHeadAttention
from transduce.contracts import Decoder, Encoder
from transduce.decoders.latent_alignment import EditTransducerDecoder
from transduce.decoders.recurrent import AttentionContext
from transduce.errors import InputError, nearest
from transduce.flow import BOS, PAD, Attention, Batch, Memory, Padded, State, Step, Tree, map_tensors
from transduce.kernels.add_norm import ResidualStream
from transduce.layers.recurrent import RecurrentStack
from transduce.layers.transformer import TransformerLayer, TransformerStack
from transduce.model import CTCModel, DecoderModel, DecoderOnly, Transducer

Place = Literal["cross", "self", "encoder"]
KINDS = {  # the form of each kind as text
    "mask-token": "mask-token:ROW",
    "mask-head": "mask-head:PLACE:LAYER.HEAD",
    "mask-layer": "mask-layer:PLACE:LAYER",
    "skip-layer": "skip-layer:encoder|decoder:LAYER",
    "uniform": "uniform:PLACE:LAYER.HEAD[@STEP]",
    "permute": "permute:PLACE:LAYER.HEAD[:SEED][@STEP]",
    "force-attention": "force-attention:PLACE:LAYER.HEAD:ROW[@STEP]",
    "force-prefix": "force-prefix:TEXT",
    "force-token": "force-token:STEP:TOKEN",
    "swap-memory": "swap-memory:SOURCE",
    "swap-summary": "swap-summary:SOURCE",
    "swap-row": "swap-row:ROW:SOURCE",
}
ATTENTION_KINDS = ("mask-head", "mask-layer", "uniform", "permute", "force-attention")
FORCED_KINDS = ("force-prefix", "force-token")
BEFORE = -(2**30)  # the step of a token before <s>


@dataclass(frozen=True)
class Intervention:
    """One change of a model. Layers, heads, rows and steps count from 0; None: all of them.

    `place` is the attention: `cross` (decoder to source), `self` (decoder to its past), `encoder` (source to itself);
    of `skip-layer` the stack, `encoder` or `decoder`. `row` is a row of the source, of `self` one of the past.
    """

    kind: str
    place: str = "cross"
    layer: int | None = None
    head: int | None = None
    row: int | None = None
    step: int | None = None  # the output token whose step is changed
    text: str = ""  # a prefix, a token, or another source
    seed: int = 1  # of a permutation

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _unreadable(f"no intervention is called {self.kind!r}", nearest(self.kind, KINDS))
        places: tuple[str, ...] = ("encoder", "decoder") if self.kind == "skip-layer" else get_args(Place)
        if self.place not in places:
            raise _unreadable(f"no attention is called {self.place!r}", f"choose one of {', '.join(places)}")
        numbers = {"row": self.row, "layer": self.layer, "head": self.head, "step": self.step}
        wanted = {
            "mask-token": ["row"],
            "mask-head": ["layer", "head"],
            "mask-layer": ["layer"],
            "skip-layer": ["layer"],
            "force-attention": ["row"],
            "force-token": ["step"],
            "swap-row": ["row"],
        }.get(self.kind, [])
        lacking = [name for name in wanted if numbers[name] is None]
        negative = [name for name, value in numbers.items() if value is not None and value < 0]
        if lacking or negative:
            raise _unreadable(f"{self.kind} needs {(lacking or negative)[0]} from 0", f"write {KINDS[self.kind]}")

    @classmethod
    def parse(cls, text: str) -> Intervention:
        """An intervention from its text: one of the forms of `KINDS`."""
        kind, _, rest = text.partition(":")
        if kind not in KINDS:
            raise _unreadable(f"no intervention is called {kind!r}", nearest(kind, KINDS))
        try:
            return _parse(kind, rest)
        except ValueError:
            raise _unreadable(f"unreadable intervention {text!r}", f"write {KINDS[kind]}") from None

    def __str__(self) -> str:
        heads = "all" if self.layer is None else f"{self.layer}" if self.head is None else f"{self.layer}.{self.head}"
        at = "" if self.step is None else f"@{self.step}"
        rest = {
            "mask-token": f"{self.row}",
            "mask-layer": f"{self.place}:{self.layer}",
            "skip-layer": f"{self.place}:{self.layer}",
            "permute": f"{self.place}:{heads}:{self.seed}{at}",
            "force-attention": f"{self.place}:{heads}:{self.row}{at}",
            "force-token": f"{self.step}:{self.text}",
            "swap-row": f"{self.row}:{self.text}",
        }
        own = f"{self.place}:{heads}{at}" if self.kind in ATTENTION_KINDS else self.text
        return f"{self.kind}:{rest.get(self.kind, own)}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "form": str(self)}


def parse_interventions(given: Sequence[Intervention | str]) -> tuple[Intervention, ...]:
    """Interventions, some of them as text."""
    if isinstance(given, str):
        raise _unreadable("interventions are a list", f"write interventions=[{given!r}]")
    return tuple(Intervention.parse(one) if isinstance(one, str) else one for one in given)


def _parse(kind: str, rest: str) -> Intervention:
    """The intervention of a kind from what follows the first colon; a ValueError where it is unreadable."""
    if kind in ("force-prefix", "swap-memory", "swap-summary"):
        return Intervention(kind, text=rest)
    first, _, after = rest.partition(":")
    if kind in ("mask-token", "swap-row"):
        return Intervention(kind, row=int(first), text=after)
    if kind == "force-token":
        return Intervention(kind, step=int(first), text=after)
    after, _, step = after.partition("@")
    where, _, last = after.partition(":")
    layer, _, head = where.partition(".")
    numbers: dict[str, Any] = {"layer": None if layer == "all" else int(layer), "head": int(head) if head else None}
    if last:
        numbers["seed" if kind == "permute" else "row"] = int(last)
    return Intervention(kind, first, **numbers, step=int(step) if step else None)


def intervene(
    network: Transducer, interventions: Sequence[Intervention], encode: Callable[[str], Batch] | None = None
) -> Transducer:
    """A copy of a network with interventions, which shares its weights; `encode` reads the other sources of swaps.

    Forced tokens and prefixes belong to the search: see `Model.intervene`.
    """
    given = [one for one in interventions if one.kind not in FORCED_KINDS]
    if not given:
        return network
    copied = shared_copy(network)
    for name in {"encoder", "decoder"} & copied._modules.keys():  # apart, though they may share layers
        copied._modules[name] = shared_copy(copied._modules[name])
    encoder = [one for one in given if one.kind in ("mask-token", "swap-memory", "swap-summary", "swap-row")]
    for one in given:
        if one.kind == "skip-layer":
            _skip_layer(copied, one)
    hidden = [cast(int, one.row) for one in encoder if one.kind == "mask-token"]
    if encoder and not isinstance(copied, DecoderOnly):
        copied._modules["encoder"] = _changed_encoder(copied, encoder, encode)
    elif any(one.kind != "mask-token" for one in encoder):
        raise _unfit("a decoder alone has no memory of another source")
    elif hidden and not attention_modules(copied, "self"):
        raise _unfit("a decoder alone without self-attention has no row that can be masked")
    attention = [one for one in given if one.kind in ATTENTION_KINDS]
    _check_heads(copied, attention)
    _change_encoder_attention(copied, [one for one in attention if one.place == "encoder"])
    if isinstance(copied, DecoderModel):
        keys = hidden if isinstance(copied, DecoderOnly) else []
        changed = InterventionDecoder(copied.decoder, [one for one in attention if one.place != "encoder"], keys)
        copied._modules["decoder"] = changed
    return copied


def shared_copy(module: Any, copies: dict[int, nn.Module] | None = None) -> Any:
    """A copy of a tree of modules: its nodes are new, all parameters and buffers are those of the original."""
    copies = {} if copies is None else copies
    if id(module) not in copies:
        new = copies[id(module)] = copy.copy(module)
        children = {name: None if one is None else shared_copy(one, copies) for name, one in module._modules.items()}
        new.__dict__["_modules"] = children
    return copies[id(module)]


def attention_modules(network: nn.Module, place: str) -> list[MultiHeadAttention | AttentionContext]:
    """The attention of a place, in the order of its layers."""
    parts = network if isinstance(network, Decoder) else getattr(network, "decoder", None)
    if place == "encoder":
        parts = getattr(network, "encoder", None)
    found: list[MultiHeadAttention | AttentionContext] = []
    for part in [] if parts is None else parts.modules():
        if not isinstance(part, (MultiHeadAttention, AttentionContext)):
            continue
        if isinstance(part, (CrossAttention, AttentionContext)) == (place == "cross"):
            found.append(part)
    return found


def heads_of(network: nn.Module, place: str) -> list[int]:
    """The number of heads of each layer with attention in a place."""
    return [getattr(one, "heads", 1) for one in attention_modules(network, place)]


@dataclass(frozen=True)
class AttentionEdit:
    """A change of the weights of some heads: `uniform`, `permute`, `force-attention`; or their output is zero."""

    kind: str
    head: int | None = None  # None: all
    row: int = 0
    seed: int = 1
    place: str = "cross"

    def change(self, weights: Tensor, visible: Tensor) -> Tensor:
        """New weights (B H T S); `visible` is boolean, of the same shape."""
        new = {"uniform": self._uniform, "permute": self._permuted, "force-attention": self._forced}.get(self.kind)
        if new is None:
            return weights
        heads = torch.arange(weights.size(1), device=weights.device)[:, None, None]
        chosen = heads >= 0 if self.head is None else heads.eq(self.head)
        return torch.where(chosen & visible.any(-1, keepdim=True), new(weights, visible), weights)

    def _uniform(self, weights: Tensor, visible: Tensor) -> Tensor:
        return visible.to(weights) / visible.sum(-1, keepdim=True).clamp(min=1)

    def _permuted(self, weights: Tensor, visible: Tensor) -> Tensor:
        """The weights of the visible rows in another order, which depends on the seed and on their number alone."""
        columns = weights.size(-1)
        draws = torch.from_numpy(np.random.default_rng(self.seed).random(columns)).to(weights.device)
        draws = draws[(visible.cumsum(-1) - 1).clamp(min=0)]
        places = torch.arange(columns, device=weights.device, dtype=draws.dtype)
        here, there = (torch.where(visible, key, torch.inf).argsort(dim=-1, stable=True) for key in (places, draws))
        moved = torch.zeros_like(weights).scatter(-1, here, weights.gather(-1, there))
        return torch.where(visible, moved, weights)

    def _forced(self, weights: Tensor, visible: Tensor) -> Tensor:
        if self.row >= weights.size(-1):
            if self.place == "self":
                return weights  # the row is still to come
            raise _unfit(f"no row {self.row}: the source has {weights.size(-1)}")
        one = F.one_hot(torch.tensor(self.row, device=weights.device), weights.size(-1)).to(weights)
        return torch.where(visible[..., self.row, None], one, weights)


class IntervenedAttend(Attend):
    """Attention with explicit weights, which edits change; without edits its result is that of the fused kernel."""

    def __init__(self, attend: Attend, edits: Sequence[AttentionEdit], *, multihead: bool, hidden: Sequence[int] = ()):
        super().__init__(attend.score, attend.normaliser, attend.dropout, carries_past=True)
        self.edits, self.multihead, self.hidden = tuple(edits), multihead, tuple(hidden)
        self.train(attend.training)

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        with_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*query.shape[:-1], keys.size(-2))
        visible = torch.ones(shape, dtype=torch.bool, device=query.device)
        visible = visible.tril() if causal else visible if mask is None else mask.expand(shape)
        visible = self._without_hidden(visible)
        weights = self._edited(self._weights(query, keys, visible, bias, False), visible)
        return self._context(weights, values), weights if with_attention else None

    def stateful_forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        bias: Tensor | None,
        past: dict[str, Tree],
    ) -> tuple[Tensor, Tensor]:
        _, weights = super().stateful_forward(query, keys, values, mask, bias, past)
        weights = self._edited(weights, mask.expand(weights.shape))
        return self._context(weights, values), weights

    def _without_hidden(self, visible: Tensor) -> Tensor:
        """Hidden rows are visible to themselves alone: the softmax of an empty row would be nan."""
        rows, columns = visible.shape[-2:]
        own = torch.arange(columns - rows, columns, device=visible.device)[:, None]
        for row in self.hidden:
            column = torch.arange(columns, device=visible.device) == row
            visible = visible & (~column | (own == row))
        return visible

    def _edited(self, weights: Tensor, visible: Tensor) -> Tensor:
        if not self.multihead:
            weights, visible = weights[:, None], visible[:, None]
        for edit in self.edits:
            weights = edit.change(weights, visible)
        return weights if self.multihead else weights[:, 0]

    def _context(self, weights: Tensor, values: Tensor) -> Tensor:
        context = self.used(weights).to(values.dtype) @ values
        for edit in self.edits:
            if edit.kind in ("mask-head", "mask-layer"):
                whole = edit.head is None or not self.multihead
                chosen = slice(None) if whole else slice(cast(int, edit.head), cast(int, edit.head) + 1)
                context = context.clone()
                context[:, chosen] = 0
        return context


class InterventionDecoder(Decoder):
    """A decoder with changed attention, at all steps or at some; its state counts the steps after <s>."""

    def __init__(self, decoder: Decoder, interventions: Sequence[Intervention], hidden: Sequence[int] = ()) -> None:
        super().__init__()
        steps = sorted({one.step for one in interventions if one.step is not None})
        every = [one for one in interventions if one.step is None]
        self.decoder: Decoder = _with_attention_edits(decoder, every, hidden)
        self.at = {
            step: _with_attention_edits(decoder, [one for one in interventions if one.step in (None, step)], hidden)
            for step in steps
        }
        self.constant_state = decoder.constant_state
        self.train(decoder.training)

    @property
    def embedding(self) -> nn.Module:
        """The embedding of the target."""
        return cast(nn.Module, self.decoder.embedding)

    @property
    def attention_shape(self) -> tuple[int, int]:
        return self.decoder.attention_shape

    def memory_mask(self, state: State) -> Tensor | None:
        return self.decoder.memory_mask(state)

    def start(self, memory: Memory) -> State:
        state = self.decoder.start(memory)
        if not self.at:
            return state
        steps = torch.full((memory.mask.size(0),), BEFORE, device=memory.mask.device)
        return replace(state, past={**state.past, "intervention_step": steps})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        if not self.at:
            return self.decoder.advance(tokens, state, mask, with_attention=with_attention)
        found = []
        for column in range(tokens.size(1)):
            now = slice(column, column + 1)
            found.append(self._step(tokens[:, now], state, None if mask is None else mask[:, now], with_attention))
            state = found[-1].state
        return _joined(found)

    def _step(self, tokens: Tensor, state: State, mask: Tensor | None, with_attention: bool) -> Step:
        """One token of each row, by the decoder of its step; rows of several steps by each of their decoders."""
        before = state.past["intervention_step"]
        steps = torch.where(tokens[:, 0] == BOS, 0, before + 1)
        inner = replace(state, past={name: tree for name, tree in state.past.items() if name != "intervention_step"})
        numbers = steps.tolist()
        chosen = list(dict.fromkeys(one if one in self.at else None for one in numbers))
        made = [
            (self.decoder if one is None else self.at[one]).advance(tokens, inner, mask, with_attention=with_attention)
            for one in chosen
        ]
        step = made[0]
        for one, other in zip(chosen[1:], made[1:], strict=True):
            rows = torch.tensor([(n if n in self.at else None) == one for n in numbers], device=tokens.device)
            step = _chosen(rows, other, step)
        if mask is not None:
            steps = torch.where(mask[:, 0], steps, before)
        return replace(step, state=replace(step.state, past={**step.state.past, "intervention_step": steps}))


def _chosen(rows: Tensor, one: Step, other: Step) -> Step:
    """The rows (R) of one step, else those of the other."""

    def choose(first: Tensor | None, second: Tensor | None) -> Any:
        if first is None or second is None:
            return None
        return torch.where(rows.view(-1, *[1] * (first.dim() - 1)), first, second)

    attention = None
    if one.attention is not None and other.attention is not None:
        pairs = zip(vars(one.attention).values(), vars(other.attention).values(), strict=True)
        attention = Attention(*(choose(*pair) for pair in pairs))
    past = map_tensors(choose, one.state.past, other.state.past)
    return Step(
        choose(one.logits, other.logits), replace(one.state, past=past), attention, choose(one.hidden, other.hidden)
    )


def _joined(steps: Sequence[Step]) -> Step:
    """Several steps of one token as one of all tokens."""
    attention = None
    if steps[0].attention is not None:
        given = [one.attention for one in steps if one.attention is not None]
        cross = [one.cross for one in given if one.cross is not None]
        past = [one.past for one in given if one.past is not None]
        longest = past[-1].size(-1) if past else 0
        past = [F.pad(one, (0, longest - one.size(-1))) for one in past]
        attention = Attention(torch.cat(cross, 3) if cross else None, torch.cat(past, 3) if past else None)
    hidden = [one.hidden for one in steps if one.hidden is not None]
    logits = torch.cat([one.logits for one in steps], 1)
    return Step(logits, steps[-1].state, attention, torch.cat(hidden, 1) if hidden else None)


def _with_attention_edits(decoder: Decoder, given: Sequence[Intervention], hidden: Sequence[int]) -> Decoder:
    """A copy of a decoder with changed attention."""
    copied: Decoder = shared_copy(decoder)
    for place in ("cross", "self"):
        edits = [one for one in given if one.place == place]
        _edit_modules(attention_modules(copied, place), edits, hidden if place == "self" else ())
    return copied


def _change_encoder_attention(network: Transducer, given: Sequence[Intervention]) -> None:
    _edit_modules(attention_modules(network, "encoder"), given)


def _edit_modules(
    modules: Sequence[MultiHeadAttention | AttentionContext], given: Sequence[Intervention], hidden: Sequence[int] = ()
) -> None:
    """Replaces the attention of copied modules whose layers are named."""
    for number, module in enumerate(modules):
        own = [one for one in given if one.layer in (None, number)]
        if own or hidden:
            edits = [AttentionEdit(one.kind, one.head, one.row or 0, one.seed, one.place) for one in own]
            multihead = isinstance(module, MultiHeadAttention)
            module._modules["attend"] = IntervenedAttend(module.attend, edits, multihead=multihead, hidden=hidden)


def _check_heads(network: Transducer, given: Sequence[Intervention]) -> None:
    for one in given:
        heads = heads_of(network, one.place)
        if not heads:
            raise _unfit(f"this model has no {one.place} attention whose weights can be changed")
        if one.layer is not None and one.layer >= len(heads):
            raise _unfit(f"no layer {one.layer}: {one.place} attention has {len(heads)}")
        if one.head is not None and one.head >= min(heads):
            raise _unfit(f"no head {one.head}: each layer of {one.place} attention has {min(heads)}")
        if one.place == "encoder" and one.step is not None:
            raise _unfit("an encoder has no steps")


class SkippedLayer(TransformerLayer):
    """A layer whose output is its input; it still has a state, whose length counts the positions."""

    def run(
        self, values: ResidualStream, past: Tree, sequence: Any, source: Any
    ) -> tuple[ResidualStream, Tree, Tensor | None, Tensor | None]:
        return values, *super().run(values, past, sequence, source)[1:]


def _skip_layer(network: Transducer, one: Intervention) -> None:
    stack = getattr(network, one.place, None)
    while isinstance(stack, Decoder) and not isinstance(stack, TransformerStack) and hasattr(stack, "decoder"):
        stack = cast(Any, stack.decoder)  # of a decoder that copies, or that is combined with CTC
    if not isinstance(stack, TransformerStack):
        raise _unfit(f"only layers of a Transformer can be skipped: this model has no such {one.place}")
    layers = cast(nn.ModuleList, stack.layers)
    number = cast(int, one.layer)
    if number >= len(layers):
        raise _unfit(f"no layer {number}: the {one.place} has {len(layers)}")
    skipped = copy.copy(layers[number])
    skipped.__class__ = SkippedLayer
    layers._modules[str(number)] = skipped


def _changed_encoder(
    network: Transducer, given: Sequence[Intervention], encode: Callable[[str], Batch] | None
) -> ChangedEncoder:
    encoder = getattr(network, "encoder", None)
    if not isinstance(encoder, Encoder):
        raise _unfit("this model has no encoder")
    hidden = [cast(int, one.row) for one in given if one.kind == "mask-token"]
    decoder = getattr(network, "decoder", network)
    if hidden and any(isinstance(one, (EditTransducerDecoder, CTCModel)) for one in decoder.modules()):
        raise _unfit("this model aligns its output with all rows of the source, and none can be masked")
    swaps = [one for one in given if one.kind != "mask-token"]
    if swaps and encode is None:
        raise _unfit("a swap needs another source")
    others = {one: encode(one.text) for one in swaps if encode is not None}
    return ChangedEncoder(encoder, hidden, others)


class ChangedEncoder(Encoder):
    """An encoder whose memory lacks rows, or has rows, summary or all of another source.

    A masked token is padding to the encoder. A recurrent encoder needs its padding at the end: it reads an embedding of
    zeros instead. Neither does the decoder see the row. Of a source that is not one text, the row of the memory is
    masked.
    """

    def __init__(self, encoder: Encoder, hidden: Sequence[int], others: Mapping[Intervention, Batch]) -> None:
        super().__init__()
        self.encoder, self.hidden, self.others = encoder, tuple(hidden), dict(others)
        self.width = encoder.width
        recurrent = any(isinstance(part, RecurrentStack) for part in encoder.modules())
        self.holes = not recurrent and hasattr(encoder, "embedding")
        self.train(encoder.training)

    def grids(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return self.encoder.grids(lengths)

    def leading(self) -> list[int]:
        return self.encoder.leading()

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        memory: Memory = self.encoder(self._masked(batch), with_attention=with_attention)
        if self.hidden:
            memory = replace(memory, mask=_without(memory.mask, self.hidden))
        for one, other in self.others.items():
            memory = _swapped(memory, self.encoder(other.to(batch.device)), one)
        return memory

    def _masked(self, batch: Batch) -> Batch:
        source = batch.source
        if not self.hidden or source is None or source.ids is None or batch.extra:
            return batch
        mask = _without(source.mask, self.hidden)
        values = source.values.masked_fill(~mask, PAD)
        return replace(batch, source=Padded(values, mask if self.holes else source.mask, source.layout))


def _without(mask: Tensor, rows: Sequence[int]) -> Tensor:
    """A mask (B S) without these rows."""
    shortest = int(mask.sum(1).min())
    if max(rows) >= mask.size(1) or (mask.all() and max(rows) >= shortest):
        raise _unfit(f"no row {max(rows)}: the source has {shortest}")
    kept = mask.clone()
    kept[:, list(rows)] = False
    if not kept.any(1).all():
        raise _unfit("every row of the source is masked")
    return kept


def _swapped(memory: Memory, other: Memory, how: Intervention) -> Memory:
    """The memory with all, the summary or one row of another one."""
    size = memory.mask.size(0)

    def every(x: Any) -> Any:
        return x.expand(size, *x.shape[1:]) if isinstance(x, Tensor) else x

    if how.kind == "swap-memory":
        return Memory(*(every(part) for part in vars(other).values()))
    if how.kind == "swap-summary":
        return replace(memory, summary=every(other.summary))
    row = cast(int, how.row)
    if row >= min(memory.mask.size(1), other.mask.size(1)):
        raise _unfit(f"no row {row}: the sources have {memory.mask.size(1)} and {other.mask.size(1)}")
    values = memory.values.clone()
    values[:, row] = other.values[:, row]
    return replace(memory, values=values)


def _unreadable(problem: str, remedy: str) -> InputError:
    return InputError(problem, where="interventions", remedy=remedy)


def _unfit(problem: str) -> InputError:
    return InputError(problem, where="interventions", remedy="leave it out; docs/explain.md lists what fits a model")
