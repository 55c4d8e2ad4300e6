"""Multi-head attention and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from transduce.attention.attend import Attend
from transduce.errors import InputError
from transduce.kernels.linear import joint_linear, linear
from transduce.layers.feed_forward import dense
from transduce.layers.option_groups import AttentionOptions

PROJECTION_GAIN = 2**-0.5  # of the initial weights of q_proj, k_proj and v_proj


class MultiHeadAttention(nn.Module):
    """concat_h(attend(W_q x, W_k m, W_v m)) W_o (Vaswani 2017): the base of self- and cross-attention

    With fewer key-value heads than heads, groups of heads share keys and values (grouped-query attention, Ainslie 2023;
    one head: multi-query attention, Shazeer 2019), and the cache is that much smaller. Without projections the score
    is e = x_i . x_j.
    """

    def __init__(self, width: int, memory_width: int, options: AttentionOptions, bias: bool = True) -> None:
        super().__init__()
        _check(width, memory_width, options)
        self.heads, self.kv_heads = options.heads, options.key_value_heads
        self.head_width = head = options.head_width or width // options.heads
        self.q_proj: nn.Module = nn.Identity()
        self.k_proj: nn.Module = nn.Identity()
        self.v_proj: nn.Module = nn.Identity()
        self.out_proj: nn.Module = nn.Identity()
        if options.projections == "all":
            # With the gain, a post-norm model on Multi30k had a development loss of 2.5 after 1,000 updates; without
            # it, of 3.3, and 2.4 only after 1,500 (one run each).
            self.q_proj = dense(width, options.heads * head, bias, PROJECTION_GAIN)
            self.k_proj = dense(memory_width, options.key_value_heads * head, bias, PROJECTION_GAIN)
            self.v_proj = dense(memory_width, options.key_value_heads * head, bias, PROJECTION_GAIN)
            self.out_proj = dense(options.heads * head, width, bias)
        self.attend = Attend(options.score(head, head), options.normaliser(), options.attention_dropout)

    def queries(self, rows: Tensor) -> Tensor:
        """Queries of rows: R T D -> R H T K."""
        return _heads(linear(self.q_proj, rows), self.heads)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory (B S D), computed once per source: B G S K, with G key-value heads."""
        keys, values = joint_linear((self.k_proj, self.v_proj), memory)
        return self.attend.keys(_heads(keys, self.kv_heads)), _heads(values, self.kv_heads)

    def queries_keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same rows."""
        query, keys, values = joint_linear((self.q_proj, self.k_proj, self.v_proj), rows)
        keys, values = _heads(keys, self.kv_heads), _heads(values, self.kv_heads)
        return _heads(query, self.heads), self.attend.keys(keys), values

    def attend_heads(
        self,
        query: Tensor,  # R H T K: queries(x), rotated by the position encoding where it does so
        keys: Tensor,  # R G S K
        values: Tensor,  # R G S K
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        with_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.kv_heads < self.heads:  # all heads of a group use the same keys and values
            group = self.heads // self.kv_heads
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        context, weights = self.attend(query, keys, values, mask, bias, causal=causal, with_attention=with_attention)
        return linear(self.out_proj, context.transpose(1, 2).flatten(-2)), weights  # R T D, R H T S


class CrossAttention(MultiHeadAttention):
    """Multi-head attention of target rows to an encoder's memory."""

    def forward(
        self, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, with_attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Cross-attention of rows (R T D) to a memory with one row per source (B G S K); mask: B S or B T S.

        The beams of a source become further query rows, so that its keys and values are never copied.
        """
        shape = rows.shape
        sources = keys.size(0)
        query = self.queries(rows.reshape(sources, -1, shape[-1]))  # B H N*T K
        mask = mask[:, None] if mask.dim() == 3 else mask[:, None, None]  # B 1 . S
        context, weights = self.attend_heads(query, keys, values, mask, with_attention=with_attention)
        if weights is not None:
            beams = shape[0] // sources
            weights = weights.unflatten(2, (beams, shape[1])).transpose(1, 2).flatten(0, 1)  # R H T S
        return context.view(shape), weights


def _heads(rows: Tensor, number: int) -> Tensor:
    """R T (H K) -> R H T K"""
    return rows.unflatten(-1, (number, -1)).transpose(1, 2)


def layers_and_heads(attentions: Sequence[CrossAttention | None]) -> tuple[int, int]:
    """The number of layers with cross-attention, and of heads in each."""
    present = [attention for attention in attentions if attention is not None]
    return len(present), present[0].heads if present else 0


def _check(width: int, memory_width: int, options: AttentionOptions) -> None:
    if width % options.heads and options.head_width is None:
        raise InputError(
            f"a width of {width} cannot be divided into {options.heads} heads",
            remedy="choose heads that divide the width, or set head_width",
        )
    if options.heads % options.key_value_heads:
        raise InputError(
            f"{options.heads} heads cannot share {options.key_value_heads} key heads evenly",
            remedy="choose kv_heads that divide heads",
        )
    uneven = options.head_width is not None and options.head_width * options.heads != width
    unequal = memory_width != width or options.key_value_heads != options.heads or uneven
    if options.projections == "none" and unequal:
        raise InputError(
            "attention without projections compares rows as they are: widths and heads of both sides must be equal",
            remedy="give encoder and decoder one width and leave kv_heads out, or set projections: all",
        )
