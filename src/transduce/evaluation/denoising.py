"""Evaluation of denoising models: noised texts and their restoration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transduce import build
from transduce.contracts import ScoredText
from transduce.data.batching import batch_by_length, collate
from transduce.data.noise import add_noise
from transduce.data.tokenizers.tokenizer import MASK, Tokenizer
from transduce.decoding.scoring import score
from transduce.evaluation.evaluate import NoisedInput, SystemOutput
from transduce.flow import SPECIALS, UNK, Batch
from transduce.inference import Model
from transduce.recipe import GenerationRecipe


@dataclass(frozen=True)
class RestoredText:
    """The restoration of one noised text."""

    source: str  # noised, for display
    output: str
    reference: str
    scored: ScoredText


def denoise(model: Model, texts: Sequence[str], **settings: Any) -> SystemOutput:
    """Adds the noise of the run to each text, the same at every call, and restores the text with the model.

    Where the loss covers only some tokens (masked language models), only these are predicted and scored: the output
    is the most probable token of each position, separated by spaces. Otherwise the whole text is generated.
    """
    noise = build.build_noise(model.recipe.data.noise, model.target)
    assert noise is not None, "this run has no noise"
    ids, restored = model.target.encode_batch(texts), dict[int, RestoredText]()
    generation = model.settings(**settings)
    for rows in batch_by_length([len(one) for one in ids], generation.batch_tokens):
        clean = collate([(ids[row], ids[row]) for row in rows], rows)
        batch = add_noise(clean, noise, model.recipe.training.seed).to(model.device)
        if batch.loss_mask is None:
            part = _generate_texts(model, batch, [texts[row] for row in rows], generation)
        else:
            part = _predict_masked_tokens(model, batch)
        restored.update(zip(rows, part, strict=True))
    lines = [restored[row] for row in range(len(texts))]
    return SystemOutput(
        [line.output for line in lines],
        [line.scored for line in lines],
        noised=NoisedInput([line.source for line in lines], [[line.reference] for line in lines]),
    )


@torch.inference_mode()
def _predict_masked_tokens(model: Model, batch: Batch) -> list[RestoredText]:
    best, labels = model.network(batch).logits.argmax(-1), batch.labels
    result = []
    for row, scores in enumerate(score(model.network, batch)):
        predicted = labels.mask[row]
        output, reference = (
            token_pieces(model.target, part[row][predicted].tolist()) for part in (best, labels.values)
        )
        scored = ScoredText(sum(scores), len(scores), len(scores), sum(map(len, reference)))
        source = _noised_text(model.source, batch, row)
        result.append(RestoredText(source, " ".join(output), " ".join(reference), scored))
    return result


def _generate_texts(
    model: Model, batch: Batch, texts: Sequence[str], generation: GenerationRecipe
) -> list[RestoredText]:
    assert batch.source is not None
    sources = [row[real][:-1].tolist() for row, real in zip(batch.source.values, batch.source.mask, strict=True)]
    hypotheses = model.searcher.search_sources(sources, None, generation, batch.rows)
    result = []
    for row, (text, scores) in enumerate(zip(texts, score(model.network, batch), strict=True)):
        output = model.target.decode(hypotheses[row][0].text_ids)
        scored = ScoredText(sum(scores), len(scores), len(text.split()) + 1, len(text) + 1)
        result.append(RestoredText(_noised_text(model.source, batch, row), output, text, scored))
    return result


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The tokens as strings, with white space replaced by `▁`."""
    return ["".join("▁" if letter.isspace() else letter for letter in tokenizer.piece(one)) for one in ids]


def _noised_text(tokenizer: Tokenizer, batch: Batch, row: int) -> str:
    assert batch.source is not None
    ids = batch.source.values[row][batch.source.mask[row]].tolist()[:-1]
    return tokenizer.decode(ids).replace(SPECIALS[UNK], MASK)
