"""The section `training`: how long, how fast, towards what, and what is kept."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from transduce.recipe.section import Fraction, Names, Positive, Section


class AdaptersRecipe(Section):
    """Low-rank adapters: W x + alpha / rank * B A x, with A and B trained and W as it was (Hu 2021)."""

    rank: Positive = Field(8, description="rows of A, columns of B")
    alpha: float = Field(16.0, gt=0)
    targets: Names = Field(("*",), description="which matrices: by the beginning of their name, or with *")


class OptimiserRecipe(Section):
    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: Fraction = Field(0.9, description="sgd only")


class ScheduleRecipe(Section):
    kind: Literal["constant", "inverse_sqrt", "cosine", "linear", "plateau"] = "inverse_sqrt"
    warmup: int = Field(400, ge=0, description="updates of linear growth")
    floor: Fraction = Field(0.0, description="lowest share of the learning rate (cosine, linear, plateau)")
    factor: float = Field(0.5, gt=0, lt=1, description="plateau: what the rate is multiplied with")
    patience: int = Field(2, ge=0, description="plateau: validations without progress before it is")


class TrainingRecipe(Section):
    steps: Positive = Field(10_000, description="most updates")
    minutes: float | None = Field(None, gt=0, description="most minutes; whichever of the two ends first")
    batch_tokens: Positive | Literal["auto"] = Field(
        4096, description="source + target tokens in one update, over all processes; auto: as many as fit the GPU"
    )
    accumulate: Positive = Field(
        1, description="micro-batches that one update is computed in; the gradient is the same"
    )
    pool: Positive = Field(100, description="batches whose examples are sorted by length together")
    packed: bool | Literal["auto"] = Field(
        "auto",
        description="several pairs in a row of a batch, so that little is padding; auto: where passes are recorded",
    )
    objective: dict[str, Any] = Field(
        {"kind": "cross_entropy"}, description="what is made small: `{kind: ..., option: ...}`"
    )
    freeze: Names = Field(
        (), description="weights that are not trained, by the beginning of their name (encoder, decoder.embedding) or *"
    )
    unfreeze: Positive | None = Field(
        None,
        description="updates after which the next layer from the top begins to train; left out: all from the first",
    )
    layer_decay: float = Field(1.0, gt=0, le=1, description="rate of each layer relative to the one above it")
    adapters: AdaptersRecipe | None = Field(
        None, description="train these beside the weights of `init.model`, which stay as they are"
    )
    optimiser: OptimiserRecipe = OptimiserRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm")
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    record: bool = Field(True, description="replay the passes over batches as recorded graphs, on a GPU")
    checkpoint_layers: bool = Field(
        False, description="keep only what enters each Transformer block, and compute the rest again: less memory"
    )
    ema: Fraction = Field(0.0, description="decay of the moving average of the weights; 0: off")
    average: Positive = Field(1, description="mean of the weights at the last n checkpoints")
    checkpoint_every: Positive = 500
    keep: Positive = Field(3, description="checkpoints kept besides the best one")
    validate_every: Positive = 500
    validate_examples: Positive = Field(500, description="most development pairs generated for at each validation")
    monitor: str = Field("loss", description="what is watched on the development set: loss, or a metric by name")
    patience: Positive | None = Field(5, description="validations without progress before training stops")
    log_every: Positive = 10
    bad_updates: Positive = Field(5, description="non-finite updates in a row after which training stops")
    seed: int = 1
    deterministic: bool = Field(False, description="refuse operations whose result may differ between runs")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    tensorboard: bool = False

    @property
    def budget(self) -> int:
        """`batch_tokens`, once it is a number: see experiment/budget.py."""
        assert self.batch_tokens != "auto", "how many fit was not found out yet"
        return self.batch_tokens
