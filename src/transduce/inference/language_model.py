"""Language models: continuations of texts, and the probability of running text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from transduce.contracts import ScoredText
from transduce.data.batching import batch_by_length
from transduce.data.tokenizers.tokenizer import CountedText, Tokenizer
from transduce.flow import BOS, Batch, Hypothesis, Padded
from transduce.inference.long_sources import CHARACTERS_PER_TOKEN
from transduce.model import Transducer
from transduce.recipe import GenerationRecipe


@dataclass(frozen=True)
class Continuation:
    """A prefix and its continuations, best first; hypotheses include the prefix."""

    prefix: list[int]
    hypotheses: list[Hypothesis]
    truncated: bool  # True: the prefix was longer than the model allows, and only its end was read


# (batch, maximal lengths, forced prefixes, numbers that seed the samples) -> hypotheses of each row, best first
Find = Callable[[Batch, Tensor, list[list[int]] | None, Sequence[int]], list[list[Hypothesis]]]


def continue_texts(
    find: Find,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    settings: GenerationRecipe,
    max_length: int,
    first_number: int = 0,
) -> list[Continuation]:
    """Each text is a forced prefix, followed by at most `settings.max_length` tokens. A text may be empty."""
    most = min(settings.max_source_length, max_length - 1)
    ends = [text[-most * CHARACTERS_PER_TOKEN :] for text in texts]
    encoded = tokenizer.encode_batch(ends)
    prefix_ids = [ids[-most:] for ids in encoded]
    results: dict[int, Continuation] = {}
    for rows in batch_by_length([len(ids) + 1 for ids in prefix_ids], settings.batch_tokens):
        first = Padded.from_rows([[BOS] for _ in rows])
        prefixes = [prefix_ids[row] for row in rows]
        longest = torch.tensor([min(len(ids) + settings.max_length, max_length) for ids in prefixes])
        # Only the size of the batch matters: a language model has no source.
        numbers = [first_number + row for row in rows]
        found = find(Batch(target=first), longest, prefixes if any(prefixes) else None, numbers)
        for row, hypotheses in zip(rows, found, strict=True):
            truncated = len(encoded[row]) > most or len(texts[row]) > len(ends[row])
            results[row] = Continuation(prefix_ids[row], hypotheses, truncated)
    return [results[row] for row in range(len(texts))]


def score_running(network: Transducer, text: CountedText, block_size: int, batch_tokens: int) -> list[ScoredText]:
    """Log-probabilities of a text, block by block.

    A network with a state of constant size reads the whole text; any other network starts again with every block, and
    sees only the last token of the block before.
    """
    count = len(text.ids) - 1
    edges = list(pairwise([*range(0, count, block_size), count]))
    logs = (
        _carried(network, text.ids, edges) if network.constant_state else _apart(network, text.ids, edges, batch_tokens)
    )
    words, characters = text.words, text.characters
    return [
        ScoredText(
            float(logs[begin:end].sum()), end - begin, int(words[begin:end].sum()), int(characters[begin:end].sum())
        )
        for begin, end in edges
    ]


Edges = Sequence[tuple[int, int]]


@torch.inference_mode()
def _carried(network: Transducer, ids: np.ndarray, edges: Edges) -> np.ndarray:
    """log p of every id after the first; the state is carried from block to block."""
    row = torch.from_numpy(ids)[None].to(_device(network))
    state = network.start(Batch(target=Padded(row, torch.ones_like(row, dtype=torch.bool))))
    logs = []
    for begin, end in edges:
        step = network.advance(row[:, begin:end], state)
        state = step.state
        logs.append(_chosen(step.logits, row[:, begin + 1 : end + 1])[0].cpu().double().numpy())
    return np.concatenate(logs)


@torch.inference_mode()
def _apart(network: Transducer, ids: np.ndarray, edges: Edges, batch_tokens: int) -> np.ndarray:
    """log p of every id after the first; each block is read by itself."""
    logs = np.zeros(len(ids) - 1)
    for rows in batch_by_length([end - begin for begin, end in edges], batch_tokens):
        batch = Batch(target=Padded.from_rows([ids[edges[row][0] : edges[row][1] + 1].tolist() for row in rows]))
        batch = batch.to(_device(network))
        chosen = _chosen(network(batch).logits, batch.labels.values).cpu().double().numpy()
        for row, found in zip(rows, chosen, strict=True):
            begin, end = edges[row]
            logs[begin:end] = found[: end - begin]
    return logs


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)  # B T


def _device(network: Transducer) -> torch.device:
    return next(network.parameters()).device
