"""Arguments of every operation of the kernel table, in a given precision and on a given device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transduce.contracts import Selection
from transduce.decoding.strategies import Beam, Greedy, length_power
from transduce.flow import EOS, CacheSlots, State, additive_mask
from transduce.kernels.attention import AttentionInput
from transduce.kernels.beam_update import BeamState, FinishedHypotheses, beam_update_reference
from transduce.kernels.cross_entropy import IGNORED
from transduce.kernels.cuda_graph import tensors_of
from transduce.kernels.decode_step import EmbeddingTables, FusedLinear

Numbers = Callable[..., Tensor]


class Case(NamedTuple):
    """The arguments of an operation, and what is compared: results, and gradients of these inputs."""

    args: tuple[Any, ...]
    inputs: Sequence[Tensor] = ()  # none: the operation has no gradients
    results: Callable[[Any], list[Tensor]] = tensors_of  # of what the operation returned


def numbers_of(dtype: torch.dtype, device: str) -> Numbers:
    """Random tensors: the same numbers in every precision, because all of them are representable in bf16."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int, parameter: bool = False) -> Tensor:
        kind = torch.float32 if parameter and dtype != torch.float64 else dtype  # parameters are stored in fp32
        values = torch.randn(*shape, generator=generator).bfloat16()
        return values.to(device, kind).requires_grad_()

    return numbers


def with_parameters(module: nn.Module, numbers: Numbers) -> nn.Module:
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(numbers(*parameter.shape, parameter=True).detach()))
    return module


def linear_cases(numbers: Numbers) -> Iterator[Case]:
    for activation in ("", "relu", "gelu", "gelu_tanh", "silu"):
        for sizes in ((16,), (16, 8)):
            for biased in (True, False):
                x, weights = numbers(2, 5, 24), [numbers(size, 24, parameter=True) for size in sizes]
                biases = [numbers(size, parameter=True) for size in sizes] if biased else []
                yield Case((x, weights, biases, activation), [x, *weights, *biases])


def split_cases(numbers: Numbers) -> Iterator[Case]:
    for sizes in ((4, 4, 4), (6, 6), (2, 10)):
        x = numbers(2, 5, 12)
        yield Case((x, sizes), [x])


def output_projection_cases(numbers: Numbers) -> Iterator[Case]:
    for size in (41, 7):
        x, weight, bias = numbers(2, 5, 8), numbers(size, 8, parameter=True), numbers(size, parameter=True)
        yield Case((x, weight, bias), [x, weight, bias])
        yield Case((x, weight, None), [x, weight])


def recurrent_layer_cases(numbers: Numbers) -> Iterator[Case]:
    for cell in (nn.RNN, nn.GRU, nn.LSTM):
        for directions in (1, 2):
            layer = cell(5, 6, batch_first=True, bidirectional=directions == 2)
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(numbers(*parameter.shape).detach()))
            inputs, hidden = numbers(3, 4, 5), tuple(numbers(directions, 3, 6) for _ in range(1 + (cell is nn.LSTM)))
            mask = torch.arange(4, device=inputs.device) < torch.tensor([[3], [1], [2]], device=inputs.device)
            yield Case((layer, inputs, hidden, mask, True), [inputs, *hidden, *layer.parameters()])


def norms(width: int, numbers: Numbers) -> Iterator[nn.Module]:
    for norm in (nn.LayerNorm(width), nn.LayerNorm(width, bias=False), nn.RMSNorm(width, eps=1e-5)):
        yield with_parameters(norm, numbers)


def norm_cases(numbers: Numbers) -> Iterator[Case]:
    for norm in norms(48, numbers):
        x = numbers(2, 5, 48)
        yield Case((norm, x), [x, *norm.parameters()])


def add_norm_cases(numbers: Numbers) -> Iterator[Case]:
    """Without dropout, whose masks differ between backends."""
    for shape in ((2, 5, 48), (70, 16)):
        for norm in norms(shape[-1], numbers):
            residual, x = numbers(*shape), numbers(*shape)
            yield Case((norm, residual, x, 0.0), [residual, x, *norm.parameters()])


def attention_cases(numbers: Numbers) -> Iterator[Case]:
    for queries, length, causal, masked in (
        (5, 7, False, ""),
        (5, 7, False, "keys"),
        (1, 20, False, "keys"),
        (9, 9, True, ""),
        (17, 33, False, "queries"),
        (1, 40, False, "keys"),
        (5, 32, False, "queries"),
    ):
        query, keys, values = (numbers(2, 2, size, 32) for size in (queries, length, length))
        mask = None
        if masked:
            lengths = torch.tensor([[length], [(length + 1) // 2]], device=query.device)
            mask = (torch.arange(length, device=query.device) < lengths)[:, None, None]
        if masked == "queries":
            pattern = torch.rand(2, 1, queries, length, generator=torch.Generator().manual_seed(1)).to(query.device)
            mask = pattern < 0.6
            mask[..., 0] = True  # a query without any key has no softmax
        yield Case((AttentionInput(query, keys, values, mask, None, 0.3, causal, 0.0),), [query, keys, values])


def additive_scores_cases(numbers: Numbers) -> Iterator[Case]:
    for sources, queries, length, width in ((1, 1, 1, 1), (3, 2, 7, 16), (2, 1, 5, 33)):
        layer = with_parameters(nn.Linear(width, 1, bias=False), numbers)
        query, keys = numbers(sources, queries, width), numbers(sources, length, width)
        yield Case((query, keys, layer), [query, keys, *layer.parameters()])


def additive_context_cases(numbers: Numbers) -> Iterator[Case]:
    for sources, queries, length, width in ((1, 1, 1, 1), (3, 2, 7, 16), (2, 1, 5, 33)):
        for masked in (False, True):
            layer = with_parameters(nn.Linear(width, 1, bias=False), numbers)
            query, keys = numbers(sources, queries, width), numbers(sources, length, width)
            values = numbers(sources, length, width + 1)
            mask = torch.arange(length)[None, None] < torch.arange(1, sources + 1)[:, None, None] if masked else None
            yield Case((query, keys, values, layer, mask), [query, keys, values, *layer.parameters()])


def cross_entropy_cases(numbers: Numbers) -> Iterator[Case]:
    for size in (40, 77, 1):
        for smoothing in (0.0, 0.1):
            logits = numbers(6, size)
            labels = torch.tensor([0, size - 1, IGNORED, size // 2, IGNORED, 0], device=logits.device)
            yield Case((logits, labels, smoothing), [logits])


def no_gradients(numbers: Numbers) -> Callable[..., Tensor]:
    return lambda *shape: numbers(*shape).detach()


def linear_layer(numbers: Callable[..., Tensor], inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """In the precision of the numbers, as the layers of a lowered decoder are."""
    layer = nn.Linear(inputs, outputs, bias).requires_grad_(False)
    layer.weight = nn.Parameter(numbers(outputs, inputs) / 2 ** round(math.log2(inputs) / 2), requires_grad=False)
    layer.bias = nn.Parameter(numbers(outputs), requires_grad=False) if bias else None
    return layer


def layer_norm(numbers: Callable[..., Tensor], width: int, bias: bool = True) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, bias=bias)
    norm.weight = nn.Parameter(numbers(width), requires_grad=False)
    norm.bias = nn.Parameter(numbers(width), requires_grad=False) if bias else None
    return norm


def decode_linear_cases(numbers: Numbers) -> Iterator[Case]:
    """Few rows and many; rows longer than a tile: 2,048 inputs of one row, 128 of twenty."""
    numbers = no_gradients(numbers)
    for rows, inputs, outputs in ((1, 48, 100), (3, 130, 30), (5, 48, 30), (20, 200, 40), (70, 130, 100), (1, 2100, 9)):
        for bias in (True, False) if rows < 20 else (True,):
            layer, gate = (linear_layer(numbers, inputs, outputs, bias) for _ in range(2))
            norm, x = layer_norm(numbers, inputs, bias), numbers(rows, inputs).abs()
            yield Case((FusedLinear(layer), x))
            yield Case((FusedLinear(layer, norm, returns_norm=True, activation="relu"), x))
            yield Case((FusedLinear(layer, activation="gelu"), x, numbers(rows, outputs)))
            yield Case((FusedLinear(layer, norm, True, "gelu_tanh", gate), x))
            yield Case((FusedLinear(layer, norm, False, "silu", gate), x, numbers(rows, outputs)))


def slots_of(sources: int, beams: int, capacity: int, window: int | None, device: torch.device) -> CacheSlots:
    """Rows at random positions, whose earlier tokens are in the slots of random beams."""
    generator = torch.Generator().manual_seed(7)
    positions = torch.randint(capacity, (sources, 1), generator=generator).repeat(1, beams).flatten()
    owners = torch.randint(beams, (sources * beams, capacity), generator=generator).short()
    own = torch.arange(beams).repeat(sources)[:, None].short()
    owners = owners.scatter(1, positions[:, None], own)
    return CacheSlots(positions.to(device), owners.to(device), beams, window)


CACHES = [(1, 1, 2, 2, None), (3, 1, 2, 1, 3), (2, 5, 2, 2, None), (2, 5, 2, 2, 3), (1, 16, 4, 2, None)]


def decode_qkv_cases(numbers: Numbers) -> Iterator[Case]:
    numbers, head_width, capacity = no_gradients(numbers), 32, 80
    for sources, beams, heads, groups, window in CACHES:
        cache = tuple(numbers(sources, beams, capacity, groups, head_width) for _ in range(2))
        layer, rows = linear_layer(numbers, 64, (heads + 2 * groups) * head_width), numbers(sources * beams, 64)
        slots = slots_of(sources, beams, capacity, window, rows.device)
        op = FusedLinear(layer, layer_norm(numbers, 64), returns_norm=True)
        yield Case((op, rows, cache, slots), results=lambda made, cache=cache: [*made, *cache])


def cache_attention_cases(numbers: Numbers) -> Iterator[Case]:
    numbers, head_width, capacity = no_gradients(numbers), 32, 80
    for sources, beams, heads, groups, window in CACHES:
        cache = tuple(numbers(sources, beams, capacity, groups, head_width) for _ in range(2))
        query = numbers(sources * beams, heads * head_width)
        yield Case((query, cache, slots_of(sources, beams, capacity, window, query.device), 0.3))


def memory_attention_cases(numbers: Numbers) -> Iterator[Case]:
    numbers, length = no_gradients(numbers), 21
    for beams, heads, groups in ((1, 2, 2), (5, 2, 2), (16, 4, 2)):
        for additive in (False, True):
            memory = tuple(numbers(3, groups, length, 32) for _ in range(2))
            query = numbers(3 * beams, heads * 32)
            mask = (torch.arange(length) < torch.tensor([[21], [1], [9]]))[:, None, None].to(query.device)
            yield Case((query, memory, additive_mask(mask).to(query.dtype) if additive else mask, 0.2))


def decode_embedding_cases(numbers: Numbers) -> Iterator[Case]:
    numbers = no_gradients(numbers)
    for beams in (1, 3):
        for positions in (True, False):
            table = numbers(30, 72)
            slots = slots_of(2, beams, 40, None, table.device)
            slots.positions[0] = 39  # the last position stays where it is
            history = torch.randint(30, (2 * beams, 7), generator=torch.Generator().manual_seed(3)).to(table.device)
            tables = EmbeddingTables(table, 3.0, numbers(30, 72) if positions else None)
            yield Case((tables, history[:, -1], slots))


def top_k_cases(numbers: Numbers) -> Iterator[Case]:
    """Which of two equal scores is found is open, so the scores at the indices are compared."""
    numbers = no_gradients(numbers)
    for shape, k in (((3, 2000), 3), ((2, 2, 700), 1), ((2, 40), 10), ((4, 6), 6), ((1, 30_000), 32), ((1, 9000), 12)):
        scores = numbers(*shape)
        yield Case((scores, k), results=lambda made, scores=scores: [made[0], scores.gather(-1, made[1])])


def top_k_tokens_cases(numbers: Numbers) -> Iterator[Case]:
    numbers = no_gradients(numbers)
    for rows, size, k in ((1, 5000, 1), (3, 1025, 5), (2, 40, 10), (2, 4, 6)):
        logits = 4 * numbers(rows, size)
        for suppressed in ((), (0, 1), (int(logits[0].argmax()), 2)):

            def results(made: Any, logits: Tensor = logits, suppressed: tuple[int, ...] = suppressed) -> list[Tensor]:
                log_probs, tokens = made
                allowed = logits.double().log_softmax(-1).index_fill(1, torch.tensor(suppressed).to(tokens), -torch.inf)
                found = allowed.gather(1, tokens).where(log_probs > -torch.inf, -torch.inf)
                for row, kept in zip(tokens, log_probs > -torch.inf, strict=True):
                    assert len(set(row[kept].tolist())) == int(kept.sum())
                return [log_probs, found]

            yield Case((logits, k, suppressed), results=results)


def beam_update_cases(numbers: Numbers) -> Iterator[Case]:
    """Six steps of a search each, from the state that the reference reaches."""
    device, generator = numbers(1).device, torch.Generator().manual_seed(11)
    for strategy in (Greedy(), Beam(width=2), Beam(width=5, length_penalty=0.6), Beam(width=3, length_penalty=0.0)):
        sources, beams = 4, first_beams(4, strategy.width, 70, device)
        for num_results in (1, strategy.width):
            live = beams
            for _ in range(6):
                shape, options = (sources, strategy.width), {"generator": generator}
                totals = (live.totals - torch.rand(shape, **options).to(device)).sort(1, descending=True).values
                tokens = torch.randint(EOS, EOS + 4, shape, **options).to(device)
                parents = torch.randint(strategy.width, shape, **options).to(device)
                log_probs = torch.randn(shape, **options).to(device)
                args = strategy, live, Selection(parents, tokens, totals), log_probs, num_results
                args = (*args, length_power(strategy))
                yield Case(args, results=beam_tensors)
                live = beam_update_reference(*args)


def first_beams(sources: int, width: int, columns: int, device: torch.device) -> BeamState:
    empty, numbers = torch.zeros(sources, width, device=device), torch.zeros(sources, dtype=torch.long, device=device)
    history = torch.zeros(sources, width, columns, dtype=torch.long, device=device)
    return BeamState(
        state=State({}, {"row": torch.arange(sources * width, device=device)}, width),
        history=history,
        token_scores=history.float(),
        totals=empty,
        lengths=numbers,
        max_lengths=torch.tensor([5, 8, 60, 69], device=device),
        prefix_lengths=numbers,
        steps=numbers,
        finished=FinishedHypotheses(history, history.float(), empty - torch.inf, empty.long(), empty.bool()),
        noise=None,
        max_columns=columns,
    )


def beam_tensors(beams: BeamState) -> list[Tensor]:
    """All of a search; of finished hypotheses, those that exist."""
    finished = beams.finished
    real = finished.ranks > -torch.inf
    values = finished.ids, finished.token_scores, finished.lengths
    names = ("history", "token_scores", "totals", "lengths", "steps")
    tensors = [getattr(beams, name) for name in names] + [one[real] for one in values]
    return [*tensors, finished.ranks, finished.complete, beams.state.past["row"]]


CASES: dict[str, Callable[[Numbers], Iterator[Case]]] = {
    "linear": linear_cases,
    "split": split_cases,
    "output_projection": output_projection_cases,
    "norm": norm_cases,
    "pre_norm": add_norm_cases,
    "post_norm": add_norm_cases,
    "attention": attention_cases,
    "additive_scores": additive_scores_cases,
    "additive_context": additive_context_cases,
    "recurrent_layer": recurrent_layer_cases,
    "cross_entropy": cross_entropy_cases,
    "decode_linear": decode_linear_cases,
    "decode_qkv": decode_qkv_cases,
    "cache_attention": cache_attention_cases,
    "memory_attention": memory_attention_cases,
    "decode_embedding": decode_embedding_cases,
    "top_k": top_k_cases,
    "top_k_tokens": top_k_tokens_cases,
    "beam_update": beam_update_cases,
}
