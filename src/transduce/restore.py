"""A model of damaged text and held-out texts enter; what it was asked for and what it said leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transduce import build
from transduce.contracts import Scored
from transduce.data.batching import collate, ordered
from transduce.data.noise import damage
from transduce.data.text import MASK, Tokenizer
from transduce.decoding.scoring import score
from transduce.evaluation import Asked, Outputs
from transduce.flow import SPECIALS, UNK, Batch
from transduce.predict import Model
from transduce.recipe import GenerationRecipe


@dataclass(frozen=True)
class Restored:
    """One text."""

    source: str  # damaged, for the eye
    output: str
    reference: str
    scored: Scored


def restore(model: Model, texts: Sequence[str], **settings: Any) -> Outputs:
    """Each text damaged as the run's noise does, in the same way every time, and restored.

    Where only some tokens are asked for, they alone are answered and judged: an output is their pieces with spaces
    between them, each the likeliest at its place. Else the whole text is written, by search.
    """
    noise = build.build_noise(model.recipe.data.noise, model.target)
    assert noise is not None, "this run damages nothing"
    ids, found = model.target.encode_batch(texts), dict[int, Restored]()
    chosen = model.settings(**settings)
    for rows in ordered([len(one) for one in ids], chosen.batch_tokens):
        clean = collate([(ids[row], ids[row]) for row in rows], rows)
        batch = damage(clean, noise, model.recipe.training.seed).to(model.device)
        part = [texts[row] for row in rows]
        restored = _whole(model, batch, part, chosen) if batch.asked is None else _some(model, batch)
        found.update(zip(rows, restored, strict=True))
    lines = [found[row] for row in range(len(texts))]
    return Outputs(
        [line.output for line in lines],
        [line.scored for line in lines],
        asked=Asked([line.source for line in lines], [[line.reference] for line in lines]),
    )


@torch.inference_mode()
def _some(model: Model, batch: Batch) -> list[Restored]:
    best, gold = model.network(batch).logits.argmax(-1), batch.gold
    result = []
    for row, scores in enumerate(score(model.network, batch)):
        asked = gold.mask[row]
        said, right = (pieces(model.target, part[row][asked].tolist()) for part in (best, gold.values))
        scored = Scored(sum(scores), len(scores), len(scores), sum(map(len, right)))
        result.append(Restored(_damaged(model.source, batch, row), " ".join(said), " ".join(right), scored))
    return result


def _whole(model: Model, batch: Batch, texts: Sequence[str], settings: GenerationRecipe) -> list[Restored]:
    assert batch.source is not None
    sources = [row[real][:-1].tolist() for row, real in zip(batch.source.values, batch.source.mask, strict=True)]
    found = model.searcher.sources(sources, None, settings, batch.rows)
    result = []
    for row, (text, scores) in enumerate(zip(texts, score(model.network, batch), strict=True)):
        output = model.target.decode(found[row][0].words)
        scored = Scored(sum(scores), len(scores), len(text.split()) + 1, len(text) + 1)
        result.append(Restored(_damaged(model.source, batch, row), output, text, scored))
    return result


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Tokens as words: no white space within them."""
    return ["".join("▁" if letter.isspace() else letter for letter in tokenizer.piece(one)) for one in ids]


def _damaged(tokenizer: Tokenizer, batch: Batch, row: int) -> str:
    assert batch.source is not None
    ids = batch.source.values[row][batch.source.mask[row]].tolist()[:-1]
    return tokenizer.decode(ids).replace(SPECIALS[UNK], MASK)
