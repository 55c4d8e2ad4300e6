"""Claims about self-attention: order and asymmetry, the causal mask, and what heads attend to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHeadAttention
from transduce.attention.positions import POSITIONS
from transduce.attention.self_attention import SelfAttention
from transduce.decoders import DECODERS
from transduce.encoders.transformer import TransformerEncoder
from transduce.evaluation.claims.claim import (
    LAYERS,
    TRANSFORMER,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    encode_pairs,
    exact_match,
    letters,
    random_batch,
    recipe,
    teacher_forced,
    untrained,
)
from transduce.evaluation.claims.context import (
    PRONOUN,
    PronounSentence,
    pronoun_resolver,
    pronoun_sentences,
    transformer_encoder,
)
from transduce.flow import Batch, Example, Padded
from transduce.inference import Model
from transduce.layers.transformer import TransformerStack
from transduce.model import EncoderDecoder, Transducer

LENGTH, SOURCES = 12, 4
EXACT = 1e-10  # in double precision
TARGET = 12
SMALL: dict[str, Any] = {"dropout": 0.0, "width": 32}
UNMASKED = {**TRANSFORMER, "decoder": {**LAYERS, "kind": f"{Path(__file__).parent / 'unmasked.py'}:UnmaskedDecoder"}}
PATTERNS = ("previous word", "next word", "itself", "end", "rare words", "it to its noun", "it to the deciding word")


def shuffle_error(position: str, seed: int) -> float:
    """The largest change when a shuffled source is encoded and its memory put back in order, relative to the memory.

    0: shuffled input gives shuffled output.
    """
    model = untrained({**TRANSFORMER, "encoder": {**LAYERS, "position": position}}, seed)
    assert isinstance(model, EncoderDecoder)
    encoder = model.encoder.double()
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 30, (SOURCES, LENGTH), generator=chance)
    order = torch.randperm(LENGTH, generator=chance)
    with torch.no_grad():
        memory, shuffled = (encoder(Batch(Padded(rows, rows > 0))).values for rows in (ids, ids[:, order]))
    return float((shuffled - memory[:, order]).abs().max() / memory.abs().max())


def measure_order(budget: Budget) -> Measurement:
    errors = {name: shuffle_error(name, budget.seed) for name in POSITIONS}
    rows = [(name, error, error <= EXACT) for name, error in errors.items()]
    others = {name: error for name, error in errors.items() if name != "none"}
    least = min(others.values())
    checks = [
        Check(
            "without positions, shuffled input gives shuffled output exactly",
            errors["none"] <= EXACT,
            {"largest difference": errors["none"], "limit": EXACT},
        ),
        Check(
            "with every position encoding it does not", least > 1e-4, {"smallest of the differences": least} | others
        ),
    ]
    shown = [max(error, 1e-17) for error in errors.values()]
    panel = Panel(
        "Encoding a shuffled source", "position encoding", "difference", [Series("", list(errors), shown)], "bar"
    )
    table = ClaimTable("", ["position encoding", "relative difference", "order is invisible"], rows)
    return Measurement([table], [Panel(**{**vars(panel), "log_y": True})], checks)


def relevance(projections: str, seed: int, *, tied: bool = False) -> Tensor:
    """The scores e_ij of a self-attention layer for random rows, T T; `tied`: the query projection is that of keys."""
    model = untrained({**TRANSFORMER, "encoder": {**LAYERS, "heads": 1, "projections": projections}}, seed)
    assert isinstance(model, EncoderDecoder)
    assert isinstance(model.encoder, TransformerEncoder)
    attention = model.encoder.layers[0].self_attention.double()
    assert isinstance(attention, SelfAttention)
    if tied:
        attention.q_proj = attention.k_proj
    rows = torch.randn(1, LENGTH, LAYERS["width"], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        query, keys, _ = attention.queries_keys_values(rows)
        scores: Tensor = attention.attend.score(query, keys)
    return scores[0, 0]


def asymmetry(scores: Tensor) -> float:
    """|E - E'| / |E|: 0 for a symmetric matrix, about 1.4 for one without any symmetry."""
    return float((scores - scores.T).norm() / scores.norm())


def measure_asymmetry(budget: Budget) -> Measurement:
    variants = {
        "no projections": relevance("none", budget.seed),
        "one projection for queries and keys": relevance("all", budget.seed, tied=True),
        "query and key projections": relevance("all", budget.seed),
    }
    found = {name: asymmetry(scores) for name, scores in variants.items()}
    bare, tied, separate = found.values()
    checks = [
        Check("without projections relevance is symmetric", bare <= EXACT, {"asymmetry": bare, "limit": EXACT}),
        Check("with one shared projection it is symmetric too", tied <= EXACT, {"asymmetry": tied, "limit": EXACT}),
        Check("with separate projections it is not", separate > 0.5, {"asymmetry": separate, "limit": 0.5}),
    ]
    places = [str(place) for place in range(1, LENGTH + 1)]
    panels = [
        Panel(name, "key", "query", _matrix(scores, places), "heat")
        for name, scores in variants.items()
        if name != "one projection for queries and keys"
    ]
    table = ClaimTable("", ["self-attention", "asymmetry |E - E'| / |E|"], list(found.items()))
    return Measurement([table], panels, checks)


def _matrix(scores: Tensor, places: list[str]) -> list[Series]:
    shifted = scores - scores.min()  # the scale of a heat map begins at 0
    return [Series(place, places, row.tolist()) for place, row in zip(places, shifted, strict=True)]


ORDER = Claim(
    "order",
    "Self-attention without position encodings does not see the order of its input.",
    "Vaswani et al. 2017, Attention Is All You Need, section 3.5",
    "A Transformer encoder of two layers, untrained, in double precision, encodes a source and a shuffled copy of it. "
    "The memory of the copy is put back in order and compared with the memory of the source, for every position "
    "encoding of the registry.",
    measure_order,
)
ASYMMETRY = Claim(
    "asymmetry",
    "Separate projections of queries and keys make relevance asymmetric: a word may need one that does not need it.",
    "Vaswani et al. 2017, Attention Is All You Need, section 3.2.1",
    "The matrix E of scores between the rows of one self-attention layer, untrained, in double precision, is compared "
    "with its transpose: without projections (e = x_i . x_j), with one projection for queries and keys, and with two.",
    measure_asymmetry,
)


def models() -> dict[str, dict[str, Any]]:
    """A model for every decoder of the registry, and a Transformer without the mask."""
    every = {kind: {"encoder": {"kind": "recurrent", **SMALL}, "decoder": {"kind": kind, **SMALL}} for kind in DECODERS}
    return {**every, "transformer without the mask": UNMASKED}


@torch.no_grad()
def changes(model: Transducer, batch: Batch) -> list[float]:
    """The largest change of the probabilities of the first token, while 1, 2, ... later tokens are added."""
    tokens = batch.decoder_inputs.values
    first = torch.softmax(model.advance(tokens[:, :1], model.start(batch)).logits[:, 0], -1)
    grown = (model.advance(tokens[:, :length], model.start(batch)) for length in range(2, tokens.size(1) + 1))
    return [float((torch.softmax(step.logits[:, 0], -1) - first).abs().max()) for step in grown]


def largest_changes(seed: int) -> dict[str, list[float]]:
    batch = random_batch(4, 8, TARGET, seed)
    return {name: changes(untrained(spec, seed).double(), batch) for name, spec in models().items()}


def measure_causality(budget: Budget) -> Measurement:
    found = largest_changes(budget.seed)
    masked = {name: max(values) for name, values in found.items() if name in DECODERS}
    unmasked = max(found["transformer without the mask"])
    data, test = letters(budget, length=(3, 8), symbols=tuple("abcdefghij"))
    forced, exact = {}, {}
    for name, model in (("with the mask", TRANSFORMER), ("without the mask", UNMASKED)):
        steps = budget.pick(250, 600)
        trained = budget.train(f"causality-{name.replace(' ', '-')}", recipe(data, model, steps, batch_tokens=1024))
        batch = encode_pairs(trained, test)
        forced[name] = float(teacher_forced(trained, batch)[batch.labels.mask].float().mean())
        exact[name] = exact_match(trained, test)
    with_mask, without = exact.values()
    checks = [
        Check(
            "no decoder of the registry changes an emitted output when later tokens are added",
            max(masked.values()) <= EXACT,
            {"largest change of a probability": max(masked.values()), "limit": EXACT},
        ),
        Check("without the mask it changes", unmasked > 1e-3, {"largest change of a probability": unmasked}),
        Check(
            "a model that is trained without the mask predicts the next token after reference prefixes, which it sees",
            forced["without the mask"] > 0.7,
            {"share of right tokens": forced["without the mask"]},
        ),
        Check(
            "and collapses in generation",
            without < 0.5 * with_mask,
            {"exact match with the mask": with_mask, "without": without},
        ),
    ]
    return Measurement(_causality_tables(found, forced, exact), _causality_panels(found, forced, exact), checks)


def _causality_tables(
    found: dict[str, list[float]], forced: dict[str, float], exact: dict[str, float]
) -> list[ClaimTable]:
    rows = [(name, max(values)) for name, values in found.items()]
    trained = [(name, forced[name], exact[name]) for name in forced]
    columns = ["Transformer trained", "tokens right after reference prefixes", "exact match in generation"]
    return [
        ClaimTable("Untrained networks", ["decoder", "largest change of a probability of the first output"], rows),
        ClaimTable("Trained on reversed letters", columns, trained),
    ]


def _causality_panels(found: dict[str, list[float]], forced: dict[str, float], exact: dict[str, float]) -> list[Panel]:
    curves = [
        Series(name, list(range(1, len(values) + 1)), [max(value, 1e-18) for value in values])
        for name, values in found.items()
    ]
    bars = [Series("after reference prefixes", list(forced), list(forced.values()))]
    bars.append(Series("exact match in generation", list(exact), list(exact.values())))
    return [
        Panel("Change of the first output", "tokens added", "change of a probability", curves, log_y=True),
        Panel("Training with and without the mask", "", "share right", bars, "bar"),
    ]


CAUSALITY = Claim(
    "causality",
    "An emitted output never changes when later ones are added, because the decoder is masked; without the mask it "
    "does, and a model trained without it cannot generate.",
    "Vaswani et al. 2017, Attention Is All You Need, section 3.1",
    "For every decoder of the registry, untrained and in double precision: the distribution of the first token, while "
    "later tokens are appended. Then two Transformers learn to reverse letters, one with and one without the mask: the "
    "second sees the token that it has to predict, learns to copy it, and has nothing to copy in generation.",
    measure_causality,
)


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
    return Measurement(_head_tables(found, base, costs), _head_panels(found, costs), checks)


def _head_tables(
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


def _head_panels(found: dict[str, np.ndarray], costs: dict[str, tuple[float, float]]) -> list[Panel]:
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
