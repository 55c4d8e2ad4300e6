"""A Transformer decoder in, the same decoder out, which reads the new rows of a search in eight kernels a block.

A norm after a sum needs the whole row, which no kernel that makes a part of it has. So a sum is handed on as it is, and
the products that read it take its norm along; the first of them writes it down, as the residual of the next sum.
Everything but a step of a search goes the way it always went.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHeadAttention
from transduce.attention.positions import Learned, NoPosition, Sinusoidal
from transduce.attention.self_attention import CacheSlots
from transduce.contracts import AttentionScore, TopKRequest
from transduce.decoders.transformer import TransformerDecoder
from transduce.flow import State, Step, TopK
from transduce.inference.lowering.joint_projections import JointMemory, JointSelf
from transduce.kernels.attention_decode import MOST
from transduce.kernels.decode_rows import Entry, Kernels, Plain, Product
from transduce.kernels.dispatch import has_hooks, has_triton
from transduce.layers.embedding import Embedding, Output
from transduce.layers.norm import LayerNorm
from transduce.layers.transformer import TransformerLayer

ROWS = 64  # up to which a step is mostly kernels that wait; above it the plain products are quicker
PLACES = 4096  # whose sine waves are kept: a search with room for more goes the plain way


@dataclass(frozen=True)
class FusedBlock:
    """The products of a block, each with what comes before it."""

    looks: Product  # queries, keys and values
    answers: Product
    asks: Product | None  # of the memory
    tells: Product | None
    grows: Product
    shrinks: Product
    scale: float
    memory_scale: float


class FusedDecoder(TransformerDecoder):
    """masked self-attention, cross-attention and feed-forward blocks, a step in few kernels"""

    waves: Tensor | None

    def __init__(self, plain: TransformerDecoder, pieces: Plain) -> None:
        nn.Module.__init__(self)
        for part in (vars(plain), plain._modules):
            for name, value in part.items():
                if not name.startswith("_") and name != "training":
                    setattr(self, name, value)
        self.eval()
        self.pieces = pieces
        self.register_buffer("waves", _waves(plain), persistent=False)
        pending: Any = plain.embedding_norm if plain.final_norm is None else None
        self.fused: list[FusedBlock] = []
        for block in plain.layers:
            self.fused.append(_fused(block, pending))
            pending = block.residuals[-1].norm if plain.final_norm is None else None
        last: Any = plain.final_norm or pending
        self.speaks = Product(plain.output.projection, last, keeps=True)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        if with_attention or mask is not None or not self._suits(tokens, state):
            return super().advance(tokens, state, mask, with_attention=with_attention)
        return self._step(tokens, state)

    @property
    def proposes(self) -> bool:
        return True

    def propose(self, tokens: Tensor, state: State, asked: TopKRequest) -> TopK:
        read = self.advance(tokens, state)
        logs, found = self.pieces.best(read.logits[:, -1], asked.k, asked.suppressed)
        return TopK(logs, found, read.state)

    def _step(self, tokens: Tensor, state: State) -> Step:
        slots = CacheSlots(state.past["next"], state.past["owners"], state.beams, self.window)
        entered = self.pieces.embed(self._entry, tokens[:, 0], slots)
        slots, rows = replace(slots, owners=entered.owners), entered.rows
        if self.embedding_norm is not None and self.final_norm is not None:
            rows = self.embedding_norm(rows)
        for number, block in enumerate(self.fused):
            memory = state.fixed["memory"][number] if block.asks is not None else None
            rows = self._run(block, rows, state.fixed["room"][number], memory, state.fixed["mask"], slots)
        logits, hidden = self.pieces.product(self.speaks, rows)
        state = replace(state, past={"next": entered.following, "owners": entered.owners})
        return Step(logits[:, None], state, None, hidden[:, None])

    def _run(self, block: FusedBlock, rows: Tensor, past: Any, memory: Any, mask: Tensor, slots: CacheSlots) -> Tensor:
        """R D -> R D: look back, look up, think."""
        pieces = self.pieces
        query, rows = pieces.look(block.looks, rows, past, slots)
        rows, _ = pieces.product(block.answers, pieces.attend_slots(query, past, slots, block.scale), rows)
        if block.asks is not None and block.tells is not None:
            query, rows = pieces.product(block.asks, rows)
            rows, _ = pieces.product(block.tells, pieces.attend_memory(query, memory, mask, block.memory_scale), rows)
        grown, rows = pieces.product(block.grows, rows)
        return pieces.product(block.shrinks, grown, rows)[0]

    def _suits(self, tokens: Tensor, state: State) -> bool:
        if "room" not in state.fixed or tokens.size(1) != 1 or len(tokens) > ROWS or state.beams > MOST:
            return False
        room = state.past["owners"].size(1)
        return not torch.is_grad_enabled() and (not isinstance(self.position, Sinusoidal) or room <= PLACES)

    @property
    def _entry(self) -> Entry:
        assert isinstance(self.embedding, Embedding)
        waves = self.position.embed_positions.weight if isinstance(self.position, Learned) else self.waves
        return Entry(self.embedding.weight, self.embedding.scale, waves)


def fuse(network: nn.Module) -> int:
    """Every decoder that can be is replaced by its fused one; gives how many blocks that are."""
    found = 0
    for parent in list(network.modules()):
        for name, part in list(parent._modules.items()):
            if type(part) is TransformerDecoder and _fits(part):
                on_gpu = part.output.projection.weight.is_cuda and has_triton()
                parent._modules[name] = FusedDecoder(part, Kernels() if on_gpu else Plain())
                found += len(part.layers)
    return found


def _fused(block: TransformerLayer, pending: nn.Module | None) -> FusedBlock:
    """`pending`: the norm of what enters, where the block before left it to this one."""
    own: Any = block.self_attention
    cross: Any = block.cross_attention
    think = block.feed_forward
    norms: list[Any] = [one.norm for one in block.residuals]
    after = block.residuals[0].place == "post"
    # before: each layer has the norm of its own; after: the norm of the layer before, whose result it goes on with.
    reads: list[Any] = [pending, *norms[:-1]] if after else norms
    keeps = [after and norm is not None for norm in reads]
    return FusedBlock(
        looks=Product(own.all, reads[0], keeps[0]),
        answers=Product(own.out_proj),
        asks=None if cross is None else Product(cross.q_proj, reads[1], keeps[1]),
        tells=None if cross is None else Product(cross.out_proj),
        grows=Product(think.fc1, reads[-1], keeps[-1], think.activation, think.fc_gate),
        shrinks=Product(think.fc2),
        scale=own.attend.score.scale,
        memory_scale=1.0 if cross is None else cross.attend.score.scale or 1.0,
    )


def _waves(decoder: TransformerDecoder) -> Tensor | None:
    """P D: the vectors of all places, where they are computed."""
    if not isinstance(decoder.position, Sinusoidal):
        return None
    like = decoder.output.projection.weight
    with torch.no_grad():
        return decoder.position.add(like.new_zeros(1, PLACES, decoder.width), torch.arange(PLACES, device=like.device))[
            0
        ]


def _fits(decoder: TransformerDecoder) -> bool:
    """The common kind: embeddings that know their places, plain softmax attention, layer norms, plain matrices."""
    output, position = decoder.output, decoder.position
    if type(position) not in (Learned, NoPosition, Sinusoidal) or getattr(position, "concat_proj", None) is not None:
        return False
    if type(decoder.embedding) is not Embedding or type(output) is not Output or output.transform is not None:
        return False
    return decoder.has_kv_cache and _plain(output.projection) and all(_block_fits(block) for block in decoder.layers)


def _block_fits(block: TransformerLayer) -> bool:
    own, cross, think = block.self_attention, block.cross_attention, block.feed_forward
    if type(block) is not TransformerLayer or not isinstance(own, JointSelf):
        return False
    if not isinstance(cross, JointMemory | None) or not all(type(one.norm) is LayerNorm for one in block.residuals):
        return False
    looks: list[MultiHeadAttention] = [own, *([] if cross is None else [cross])]
    matrices = [own.all, think.fc1, think.fc2, *(one.out_proj for one in looks)]
    matrices += [one for one in (think.fc_gate, None if cross is None else cross.q_proj) if one is not None]
    return (
        all(_plain(one) for one in matrices)
        and own.head_width in (32, 64, 128)
        and all(one.attend.fused and type(one.attend.score).keys is AttentionScore.keys for one in looks)
    )


def _plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and not has_hooks(layer)
