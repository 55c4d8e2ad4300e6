"""The sections `generation` and `evaluation`: how outputs are found, and how they are judged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from transduce.recipe.section import Positive, Section


class GenerationRecipe(Section):
    strategy: Literal["beam", "greedy", "sample"] = "beam"
    beam: Positive = Field(5, description="beam width; samples a line when sampling")
    nbest: Positive = 1
    length_penalty: float = Field(1.0, ge=0, description="finished hypotheses are ranked by score / length ** penalty")
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="sample from the k best tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set with this probability")
    min_length: int = Field(0, ge=0, description="fewest tokens")
    max_length: Positive = Field(256, description="most tokens")
    max_ratio: float = Field(3.0, gt=0, description="most tokens also: ratio * source tokens + 50")
    no_repeat: int = Field(0, ge=0, description="no n-gram of this size twice; 0: off")
    repetition_penalty: float = Field(1.0, ge=1)
    max_source: Positive = Field(2048, description="longer sources are cut to this many tokens, counted and flagged")
    batch_tokens: Positive = 4096
    seed: int = 1


class EvaluationRecipe(Section):
    metrics: tuple[str, ...] = ("bleu", "chrf")
    references: Literal["each", "by_source"] = Field(
        "each", description="by_source: lines with an equal source are one line with several right answers"
    )
    resamples: Positive = Field(1000, description="bootstrap resamples for the 95 % intervals")
