"""Claim about attention heads: what each attends to, and what its removal costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHeadAttention
from transduce.claims.claim import Budget, Check, Claim, ClaimTable, Measurement, Panel, Series, encode_pairs
from transduce.claims.context import PRONOUN, PronounSentence, pronoun_resolver, pronoun_sentences, transformer_encoder
from transduce.flow import Batch, Example
from transduce.inference import Model
from transduce.layers.transformer import TransformerStack

PATTERNS = ("previous word", "next word", "itself", "end", "rare words", "it to its noun", "it to the deciding word")


@torch.no_grad()
def encoder_attention(model: Model, batch: Batch) -> np.ndarray:
    """The self-attention of the encoder: B L H S S."""
    weights = transformer_encoder(model)(batch, with_attention=True).attention
    assert isinstance(weights, Tensor)
    return weights.float().cpu().numpy()


def patterns(weights: np.ndarray, words: Sequence[str], one: PronounSentence, rare: set[str]) -> dict[str, np.ndarray]:
    """The attention of each layer and head (L H) in one sentence, by pattern; `words` end with </s>."""
    size = len(words)
    rows = np.arange(size)
    square = weights[:, :, :size, :size]
    it = words.index(PRONOUN)
    uncommon = [column for column, word in enumerate(words) if word in rare]
    return {
        "previous word": square[:, :, rows[1:], rows[:-1]].mean(-1),
        "next word": square[:, :, rows[:-1], rows[1:]].mean(-1),
        "itself": square[:, :, rows, rows].mean(-1),
        "end": square[:, :, :-1, -1].mean(-1),
        "rare words": square[:, :, :, uncommon].sum(-1).mean(-1),
        "it to its noun": square[:, :, it, words.index(one.referent)],
        "it to the deciding word": square[:, :, it, words.index(one.word)],
    }


def uniform(words: Sequence[str], rare: set[str]) -> dict[str, float]:
    """The same shares for a head that attends to everything alike."""
    share = 1 / len(words)
    return {name: share * (sum(word in rare for word in words) if name == "rare words" else 1) for name in PATTERNS}


def mean_patterns(model: Model, chosen: Sequence[PronounSentence]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The patterns of every head, and those of a uniform one: means over the sentences."""
    texts = [one.text.split() for one in chosen]
    counts = Counter(word for words in texts for word in words)
    rare = {word for word, count in counts.items() if count < 0.15 * len(texts)}
    batch = encode_pairs(model, [Example(one.text, one.referent) for one in chosen])
    found = [
        (patterns(weights, [*words, "</s>"], one, rare), uniform([*words, "</s>"], rare))
        for weights, words, one in zip(encoder_attention(model, batch), texts, chosen, strict=True)
    ]
    heads = {name: np.mean([one[name] for one, _ in found], 0) for name in PATTERNS}
    return heads, {name: float(np.mean([base[name] for _, base in found])) for name in PATTERNS}


@contextmanager
def pruned(attention: MultiHeadAttention, head: int) -> Iterator[None]:
    """Inside, the output of one head is zero."""
    assert isinstance(attention.out_proj, nn.Linear)
    weight, width = attention.out_proj.weight, attention.head_width
    columns = slice(head * width, (head + 1) * width)
    kept = weight.detach()[:, columns].clone()
    with torch.no_grad():
        weight[:, columns] = 0
        try:
            yield
        finally:
            weight[:, columns] = kept


def attentions(model: Model) -> dict[str, MultiHeadAttention]:
    """Every attention layer of an encoder-decoder Transformer, by name."""
    decoder = getattr(model.network, "decoder", None)
    stacks = {"encoder": transformer_encoder(model)} | ({"decoder": decoder} if decoder is not None else {})
    found: dict[str, MultiHeadAttention] = {}
    for side, stack in stacks.items():
        assert isinstance(stack, TransformerStack)
        for number, layer in enumerate(stack.layers):
            parts = {"self": layer.self_attention, "cross": layer.cross_attention}
            named = {f"{side} {number} {name}": part for name, part in parts.items()}
            found |= {name: part for name, part in named.items() if isinstance(part, MultiHeadAttention)}
    return found


@torch.no_grad()
def loss_and_accuracy(model: Model, batch: Batch) -> tuple[float, float]:
    """Negative log-probability and share of right first words: the referents."""
    logits = model.network(batch).logits[:, 0].float()
    labels = batch.labels.values[:, 0]
    loss = nn.functional.cross_entropy(logits, labels)
    return float(loss), float((logits.argmax(-1) == labels).float().mean())


def pruning_costs(model: Model, batch: Batch) -> dict[str, tuple[float, float]]:
    """For each head, how much the loss grows and the accuracy falls without it."""
    loss, right = loss_and_accuracy(model, batch)
    costs = {}
    for name, attention in attentions(model).items():
        for head in range(attention.heads):
            with pruned(attention, head):
                changed = loss_and_accuracy(model, batch)
            costs[f"{name}.{head}"] = (changed[0] - loss, right - changed[1])
    return costs


def measure_heads(budget: Budget) -> Measurement:
    model = pronoun_resolver(budget)
    chosen = list(islice(pronoun_sentences(9, held_out=True), budget.pick(200, 500)))
    found, base = mean_patterns(model, chosen)
    batch = encode_pairs(model, [Example(one.text, one.referent) for one in chosen])
    costs = pruning_costs(model, batch)
    losses = sorted((cost for cost, _ in costs.values()), reverse=True)
    lift = {name: float(values.max() / base[name]) for name, values in found.items()}
    strongest = max(lift, key=lambda name: lift[name])
    checks = [
        Check(
            "some heads specialise: one attends to a pattern at least three times as much as a uniform head",
            lift[strongest] > 3,
            {f"{name}, times uniform": value for name, value in lift.items()},
        ),
        Check(
            "heads are not equally important: the costliest head costs ten times the median head",
            losses[0] > 10 * max(float(np.median(losses)), 1e-6),
            {"costliest": losses[0], "median": float(np.median(losses)), "cheapest": losses[-1]},
        ),
    ]
    return Measurement(_tables(found, base, costs), _panels(found, costs), checks)


def _tables(
    found: dict[str, np.ndarray], base: dict[str, float], costs: dict[str, tuple[float, float]]
) -> list[ClaimTable]:
    layers, heads = found["itself"].shape
    rows: list[tuple[str | float, ...]] = [("uniform", *(base[name] for name in PATTERNS), "")]
    for layer in range(layers):
        for head in range(heads):
            values = [float(found[name][layer, head]) for name in PATTERNS]
            best = max(range(len(PATTERNS)), key=lambda k: values[k] / base[PATTERNS[k]])
            rows.append((f"encoder {layer} self.{head}", *values, PATTERNS[best]))
    pruning = [(name, *cost) for name, cost in costs.items()]
    return [
        ClaimTable("Mean attention of the heads of the encoder", ["head", *PATTERNS, "most unlike uniform"], rows),
        ClaimTable("Without one head", ["head", "growth of the loss", "loss of accuracy"], pruning),
    ]


def _panels(found: dict[str, np.ndarray], costs: dict[str, tuple[float, float]]) -> list[Panel]:
    layers, heads = found["itself"].shape
    series = [
        Series(f"{layer}.{head}", list(PATTERNS), [float(found[name][layer, head]) for name in PATTERNS])
        for layer in range(layers)
        for head in range(heads)
    ]
    bars = Series("", list(costs), [cost for cost, _ in costs.values()])
    return [
        Panel("Where the heads of the encoder look", "", "layer.head", series, "heat"),
        Panel("Without one head", "", "growth of the loss", [bars], "bar"),
    ]


HEADS = Claim(
    "heads",
    "Attention heads specialise (in positions, in syntactic relations, in rare words), and most can be removed at "
    "little cost.",
    "Voita et al. 2019, Analyzing Multi-Head Self-Attention; Michel et al. 2019, Are Sixteen Heads Really Better than "
    "One?",
    "The Transformer of the claim `context`, which names the noun that `it` refers to. For each head of its encoder: "
    "the mean weight on the previous word, the next word, the word itself, the end of the sentence, rare words, and "
    "from `it` on its noun and on the word that decides. Then each head of the model is set to zero, and the loss "
    "measured again.",
    measure_heads,
)
