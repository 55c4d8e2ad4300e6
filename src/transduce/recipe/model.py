"""The sections `model` and `init`: parts by name, and trained runs that their weights begin with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from transduce.recipe.section import Section


class CopyingRecipe(Section):
    """Which attention is copied along: decoders/copying.py."""

    layer: int = Field(-1, description="of the decoder; -1: the last")
    head: int | None = Field(None, description="one head of it; left out: the mean of all")


class CtcRecipe(Section):
    """How much is listened to what the rows of the memory spell: decoders/joint.py."""

    weight: float = Field(0.3, ge=0, le=1, description="their share in every step of a search; 0: none")


class ModelRecipe(Section):
    """Parts by name: `{kind: ..., option: ...}`. shelves.py checks the options against the part's signature."""

    encoder: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    head: dict[str, Any] | None = None
    tie: Literal["none", "target", "all"] = Field(
        "none", description="output layer = target embedding; `all`: = source embedding too"
    )
    share: Literal["none", "layers", "all"] = Field(
        "none", description="one set of weights in encoder and decoder where they are alike; `all`: the embedding too"
    )
    scaled: bool = Field(True, description="embeddings are multiplied by the root of the width as they are read")
    output: Literal["plain", "deep"] = Field(
        "plain", description="deep: a layer and a norm of it come before the scores of the tokens (BERT)"
    )
    closed: bool = Field(True, description="false: the </s> that closes every source is not read (OpenNMT-py)")
    stored: Literal["fp32", "int8"] = Field(
        "fp32", description="int8: the run holds its matrices in 8 bits, and learns no more; `transduce quantise`"
    )
    copying: CopyingRecipe | None = Field(
        None, description="words of the source may be said by looking at them; {} for the usual options"
    )
    ctc: CtcRecipe | None = Field(
        None, description="the rows of the memory spell the target too, beside the decoder; {} for the usual options"
    )


class InitRecipe(Section):
    """Trained runs whose weights a new one begins with, where name, shape and tokens agree."""

    model: str | None = Field(None, description="a run to take everything from that fits")
    encoder: str | None = Field(None, description="a run to take the encoder from")
    decoder: str | None = Field(None, description="a run to take the decoder from")
