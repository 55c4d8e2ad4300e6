"""The sections `generation` and `evaluation`: how outputs are found, and how they are judged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from transduce.recipe.section import Positive, Section


class GenerationRecipe(Section):
    strategy: Literal["beam", "full_beam", "greedy", "sample"] = "beam"
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
    stop: Literal["bound", "length", "full"] = Field(
        "bound", description="full_beam: when nothing better can come; when nothing of this length is better; when full"
    )
    first: int | None = Field(None, ge=0, description="id of the token that every output begins with")
    begun: tuple[int, ...] = Field((), description="ids that every output is given to begin with, at no cost")
    never: tuple[int, ...] = Field((), description="ids of tokens that are never said")
    never_first: tuple[int, ...] = Field((), description="ids of tokens that no output begins with")
    closed: bool = Field(False, description="an output that reaches max_length ends there with </s>")
    max_source: Positive = Field(2048, description="longer sources are cut to this many tokens, counted and flagged")
    batch_tokens: Positive = 4096
    seed: int = 1


class EvaluationRecipe(Section):
    metrics: tuple[str, ...] = ("bleu", "chrf")
    references: Literal["each", "by_source"] = Field(
        "each", description="by_source: lines with an equal source are one line with several right answers"
    )
    resamples: Positive = Field(1000, description="bootstrap resamples for the 95 % intervals")
