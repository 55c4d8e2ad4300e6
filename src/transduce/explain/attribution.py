"""Attribution of output tokens to source rows: attention, norms, rollout, posterior, gradients, occlusion, zeroing.

Each method gives a matrix T S: how much each row of the source matters for each token of a given target. The methods of
attention are shares, whose rows sum to 1. Those of gradients and occlusion are signed changes of log p(y_t | y_<t, x).
A row is removed by an embedding of zeros, which every encoder reads, of any modality; it is also the baseline of
integrated gradients, so their sum over all rows is log p of the source minus log p of the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.attention.multihead import CrossAttention
from transduce.contracts import Encoder, FrontEnd
from transduce.errors import InputError, nearest
from transduce.flow import BOS, Batch, Memory, Padded, State, Step
from transduce.model import DecoderModel, DecoderOnly, Transducer

STEPS = 64  # points of integrated gradients between the baseline and the source
CHUNK = 64  # changed copies of a source in one batch


@dataclass(frozen=True)
class AttributionInput:
    """A network, one source and a target, whose tokens are attributed to the rows of the source."""

    network: Transducer
    batch: Batch  # the source, once
    ids: Sequence[int]  # target tokens, with the closing </s>

    def copies(self, count: int) -> Batch:
        """A batch with the source `count` times."""
        return self.batch.select(torch.zeros(count, dtype=torch.long))

    def step(self, batch: Batch, *, with_attention: bool = False) -> Step:
        """Teacher forcing of the target for each source of a batch."""
        return self.advance(self.network.start(batch), batch.size, with_attention=with_attention)

    def advance(self, state: State, count: int, *, with_attention: bool = False) -> Step:
        read = torch.tensor([[BOS, *self.ids[:-1]]] * count, device=self.batch.device)
        return self.network.advance(read, state, with_attention=with_attention)

    def log_probabilities(self, batch: Batch) -> Tensor:
        """N T: log p of each target token, given the source and the tokens before it."""
        logits = self.step(batch).logits.float()
        wanted = torch.tensor([[*self.ids]] * batch.size, device=batch.device)
        return logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]

    def memory(self, *, with_attention: bool = False) -> Memory:
        """The output of the encoder."""
        if not isinstance(encoder := getattr(self.network, "encoder", None), Encoder):
            raise _unfit("this model has no encoder")
        memory: Memory = encoder(self.batch, with_attention=with_attention)
        return memory

    def scaled_log_probabilities(self, scales: Tensor) -> Tensor:
        """N T: log p of each target token, for N copies of the source with embeddings multiplied by `scales` (N S)."""
        found = []
        for part in scales.split(CHUNK):
            with _scaled_inputs(self.network, part):
                found.append(self.log_probabilities(self.copies(len(part))))
        return torch.cat(found)


def attribute(inputs: AttributionInput, method: str) -> Tensor:
    """T S: the attribution of each target token to each row of the source, by one of `METHODS`."""
    if method not in METHODS:
        raise InputError(
            f"no attribution method is called {method!r}", where="methods", remedy=nearest(method, METHODS)
        )
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        return METHODS[method](inputs).float().cpu()


def raw_attention(inputs: AttributionInput) -> Tensor:
    """The mean of the cross-attention weights of all layers and heads; of a decoder-only model, on its source."""
    return _attention(inputs).mean((0, 1))


def attention_norm(inputs: AttributionInput) -> Tensor:
    """Attention weights times the norm of what they weigh: || sum_h a_h f_h(x) || (Kobayashi et al. 2020).

    f_h(x) is the value of a row after the output projection of its head; in a recurrent decoder, the row itself.
    The mean over layers, as shares.
    """
    weights = _attention(inputs)  # L H T S
    layers = _cross_attentions(inputs.network)
    if not layers:
        return _shares(weights.mean((0, 1)) * inputs.memory().values[0].norm(dim=-1))
    values = inputs.network.start(inputs.batch).fixed["memory"]
    norms = [_weighted_norms(layer, a, v[0]) for layer, a, (_, v) in zip(layers, weights, values, strict=True)]
    return _shares(torch.stack(norms).mean(0))


def rollout(inputs: AttributionInput) -> Tensor:
    """Cross-attention times the rollout of the encoder, the product of (A + I) / 2 (Abnar & Zuidema 2020)."""
    memory = inputs.memory(with_attention=True)
    if memory.attention is None:
        raise _unfit("rollout needs an encoder with self-attention")
    layers = memory.attention[0].mean(1)  # L S S: the mean over the heads
    total = torch.eye(layers.size(-1), dtype=layers.dtype, device=layers.device)
    for layer in layers:
        total = (layer + torch.eye(len(total), device=total.device)) / 2 @ total
    return _attention(inputs).mean((0, 1)) @ total


def posterior(inputs: AttributionInput) -> Tensor:
    """p(a_t = s | y_t): where a token came from, once it is known (Shankar & Sarawagi 2019).

    Attention is decided before the token: with several objects in sight it says what may be written next. The decoder
    must sum over its alignments.
    """
    tokens = torch.tensor([[BOS, *inputs.ids]], device=inputs.batch.device)
    found = None
    if isinstance(inputs.network, DecoderModel):
        found = inputs.network.decoder.posterior(tokens[:, :-1], inputs.network.start(inputs.batch), tokens[:, 1:])
    if found is None:
        raise _unfit("a posterior needs a decoder that sums over its alignments, such as hard_attention")
    return found[0]


def input_x_gradient(inputs: AttributionInput) -> Tensor:
    """The embedding of a row times the gradient of log p: a linear estimate of its removal."""
    return _integrate(inputs, torch.ones(1, 1, device=inputs.batch.device))


def integrated_gradients(inputs: AttributionInput, steps: int = STEPS) -> Tensor:
    """x_i . mean over a of the gradient of log p at a x, a from 0 to 1 (Sundararajan, Taly & Yan 2017)."""
    points = (torch.arange(steps, device=inputs.batch.device) + 0.5) / steps
    return _integrate(inputs, points[:, None])


def occlusion(inputs: AttributionInput) -> Tensor:
    """log p of a target token, minus its log p without a row of the source (leave one out)."""
    rows = source_rows(inputs)
    scores = inputs.scaled_log_probabilities(1 - torch.eye(rows + 1, device=inputs.batch.device)[:, :rows])
    return (scores[-1] - scores[:-1]).T  # the last copy is complete


def value_zeroing(inputs: AttributionInput) -> Tensor:
    """Cosine distance of the last hidden state when the values of a row are zero in every cross-attention layer.

    Keys and weights stay: it measures what a row adds, not what it attracts (after Mohebbi et al. 2023). As shares.
    """
    state = inputs.network.start(inputs.batch)
    rows = _attention(inputs).size(-1)
    kept = [_hidden(inputs.advance(state, 1))]
    for row in range(rows):
        kept.append(_hidden(inputs.advance(_without_values(state, row), 1)))
    whole, *zeroed = kept
    return _shares(torch.cat([1 - F.cosine_similarity(whole, one, dim=-1) for one in zeroed]).T.clamp(min=0))


METHODS: dict[str, Callable[[AttributionInput], Tensor]] = {
    "attention": raw_attention,
    "attention_norm": attention_norm,
    "rollout": rollout,
    "posterior": posterior,
    "input_x_gradient": input_x_gradient,
    "integrated_gradients": integrated_gradients,
    "occlusion": occlusion,
    "value_zeroing": value_zeroing,
}


def source_rows(inputs: AttributionInput) -> int:
    """The number of rows of a source, as its front ends read them."""
    with _scaled_inputs(inputs.network, torch.ones(1, 1, device=inputs.batch.device)) as leaves:
        inputs.step(inputs.batch)
    return sum(leaf.size(1) for leaf in leaves)


def source_attention(step: Step, batch: Batch) -> Tensor | None:
    """R L H T S: the attention of a step to the source, of a language model to its own past; None: there is none."""
    assert step.attention is not None
    if batch.source is None:
        return step.attention.past
    if step.attention.cross is not None or step.attention.past is None:
        return step.attention.cross
    # A decoder without cross-attention has the source in its past: the weights on it, renormalised to sum to 1.
    past = step.attention.past
    weights = past[..., : past.size(-1) - past.size(-2)]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def front_ends(network: Transducer) -> list[FrontEnd]:
    """The front ends of the encoders of a network, in the order of the sources."""
    encoders = [part for part in network.modules() if isinstance(part, Encoder)]
    return list(dict.fromkeys(part.embedding for part in encoders if hasattr(part, "embedding")))


def _attention(inputs: AttributionInput) -> Tensor:
    """L H T S."""
    weights = source_attention(inputs.step(inputs.batch, with_attention=True), inputs.batch)
    if weights is None or (inputs.batch.source is None and not inputs.batch.extra):
        raise _unfit("this model has no attention over its source")
    return weights[0].float()


def _cross_attentions(network: Transducer) -> list[CrossAttention]:
    if not isinstance(network, DecoderModel):
        return []
    return [part for part in network.decoder.modules() if isinstance(part, CrossAttention)]


def _weighted_norms(layer: CrossAttention, weights: Tensor, values: Tensor) -> Tensor:
    """T S: the norms of the weighted values of one layer (weights H T S, values G S K)."""
    values = values.float().repeat_interleave(layer.heads // values.size(0), 0)  # H S K
    if not isinstance(layer.out_proj, nn.Linear):  # heads are concatenated
        return torch.einsum("hts,hs->ts", weights.square(), values.square().sum(-1)).sqrt()
    output = layer.out_proj.weight.float().unflatten(1, (layer.heads, -1))  # D H K
    transformed = torch.einsum("hsk,dhk->hsd", values, output)
    # || sum_h a_h f_h ||^2 = sum over pairs of heads: no tensor T S D
    products = torch.einsum("hsd,gsd->hgs", transformed, transformed)
    return torch.einsum("hts,gts,hgs->ts", weights, weights, products).clamp(min=0).sqrt()


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def _hidden(step: Step) -> Tensor:
    """1 T D."""
    return (step.logits if step.hidden is None else step.hidden).float()


def _without_values(state: State, row: int) -> State:
    """A state whose cross-attention finds zeros as the values of one row of the source."""

    def zeroed(values: Tensor, axis: int) -> Tensor:
        keep = torch.ones(values.size(axis), dtype=values.dtype, device=values.device)
        keep[row] = 0
        return values * keep.view(-1, *[1] * (values.dim() - axis - 1))

    if state.fixed.get("memory"):  # B G S K in each layer
        memory = tuple((keys, zeroed(values, 2)) for keys, values in state.fixed["memory"])
        return replace(state, fixed={**state.fixed, "memory": memory})
    if "values" in state.fixed:  # B S D
        return replace(state, fixed={**state.fixed, "values": zeroed(state.fixed["values"], 1)})
    raise _unfit("value zeroing needs a decoder with cross-attention")


def _integrate(inputs: AttributionInput, scales: Tensor) -> Tensor:
    """T S: the embeddings of the source times the mean of the gradients at these scales (N 1)."""
    total: Tensor | None = None
    for part in scales.split(CHUNK):
        with torch.enable_grad(), _scaled_inputs(inputs.network, part, gradients=True) as leaves:
            scores = inputs.log_probabilities(inputs.copies(len(part)))  # N T
            if not scores.requires_grad:
                raise _unfit("weights in 8 bits have no gradients")
            found = torch.stack([_row_shares(scores[:, t], leaves, part) for t in range(scores.size(1))])
        total = found if total is None else total + found
    assert total is not None
    return total / len(scales)


def _row_shares(scores: Tensor, leaves: Sequence[Tensor], scales: Tensor) -> Tensor:
    """S: the dot products of the embeddings of the source with the sum of their gradients."""
    gradients = torch.autograd.grad(scores.sum(), list(leaves), retain_graph=True, allow_unused=True)
    shares = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:  # this source has no influence
            shares.append(torch.zeros_like(leaf[0, :, 0]))
        else:
            shares.append((leaf[-1] / scales[-1] * gradient.sum(0)).sum(-1).detach())
    return torch.cat(shares)


@contextmanager
def _scaled_inputs(network: Transducer, scales: Tensor, *, gradients: bool = False) -> Iterator[list[Tensor]]:
    """Inside, the embeddings of a batch of sources are multiplied by `scales` (N S or N 1), and collected (N S D).

    S counts the rows of all sources. The embeddings may be those of the decoder too (`tie: all`, shared layers): only
    what the encoder reads is scaled. A decoder-only model reads its source first: only that call is scaled.
    """
    leaves: list[Tensor] = []
    wanted: list[nn.Module] = list(front_ends(network))
    if alone := isinstance(network, DecoderOnly):
        wanted = [cast(nn.Module, network.decoder.embedding)]
    reading = alone

    def begin_reading(*_: Any) -> None:
        nonlocal reading
        reading = True

    def end_reading(*_: Any) -> None:
        nonlocal reading
        reading = False

    def scale(_: Any, __: Any, output: Any) -> Any:
        if not reading or (alone and leaves):
            return output
        values = output.values if isinstance(output, Padded) else output
        begin = sum(leaf.size(1) for leaf in leaves)
        factors = scales if scales.size(1) == 1 else scales[:, begin : begin + values.size(1)]
        leaf = (values.detach() * factors[..., None]).requires_grad_(gradients)
        leaves.append(leaf)
        return Padded(leaf, output.mask) if isinstance(output, Padded) else leaf

    handles = [front_end.register_forward_hook(scale) for front_end in wanted]
    if not alone:
        encoder = cast(nn.Module, network.encoder)
        handles += [encoder.register_forward_pre_hook(begin_reading), encoder.register_forward_hook(end_reading)]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def _unfit(problem: str) -> InputError:
    return InputError(problem, where="methods", remedy="occlusion fits every model with a source")
