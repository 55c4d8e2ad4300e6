"""The section `tokens`: how each side of a pair becomes tokens."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from transduce.recipe.section import Fraction, Positive, Section


class TextRecipe(Section):
    """How one side becomes tokens."""

    kind: Literal["chars", "words", "bytes", "bpe", "unigram", "labels", "given"] = Field(
        "bpe", description="given: those of the imported run that this one begins from"
    )
    size: Positive = Field(8000, description="vocabulary size asked for, the four special tokens included")
    min_count: Positive = Field(1, description="rarer characters or words become <unk>")
    dropout: Fraction = Field(0.0, description="BPE dropout while training")

    @model_validator(mode="after")
    def _merges_to_drop(self) -> Self:
        if self.dropout and self.kind != "bpe":
            raise ValueError(f"`dropout` leaves out merges, which only bpe has, not {self.kind}")
        return self


class TokensRecipe(Section):
    source: TextRecipe = TextRecipe()
    target: TextRecipe = TextRecipe()
    shared: bool = Field(False, description="one vocabulary for both sides, trained on both")
    numbered: int = Field(
        0, ge=0, le=1000, description="unknown words of a source that are told apart, as <unk1> .. <unkN>; 0: none"
    )

    @model_validator(mode="after")
    def _shared_alike(self) -> Self:
        if self.shared and self.source != self.target:
            raise ValueError("a shared vocabulary needs equal `tokens.source` and `tokens.target`")
        if self.numbered and not (self.shared and self.source.kind == "words"):
            raise ValueError("`numbered` unknowns need one vocabulary of words: set `shared: true` and `kind: words`")
        return self
