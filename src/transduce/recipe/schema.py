"""What the sections of a recipe are made of: unknown keys are refused, values have types and ranges."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# `copy` was a method of pydantic 1; nothing here calls it.
warnings.filterwarnings("ignore", 'Field name "copy" in "ModelRecipe" shadows', UserWarning)

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]


def _as_names(value: Any) -> Any:
    """One name may stand for a list of it."""
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


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
    oov_placeholders: int = Field(
        0, ge=0, le=1000, description="unknown words of a source that are told apart, as <unk1> .. <unkN>; 0: none"
    )

    @model_validator(mode="after")
    def _shared_alike(self) -> Self:
        if self.shared and self.source != self.target:
            raise ValueError("a shared vocabulary needs equal `tokens.source` and `tokens.target`")
        if self.oov_placeholders and not (self.shared and self.source.kind == "words"):
            raise ValueError("`oov_placeholders` need one vocabulary of words: set `shared: true` and `kind: words`")
        return self


class CopyRecipe(Section):
    """Which attention is copied along: decoders/copy.py."""

    layer: int = Field(-1, description="of the decoder; -1: the last")
    head: int | None = Field(None, description="one head of it; left out: the mean of all")


class CtcRecipe(Section):
    """How much is listened to what the rows of the memory spell: decoders/joint.py."""

    weight: float = Field(0.3, ge=0, le=1, description="their share in every step of a search; 0: none")


class ModelRecipe(Section):
    """Parts by name: `{kind: ..., option: ...}`. The registry checks the options against the signature of the part."""

    encoder: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    head: dict[str, Any] | None = None
    tie: Literal["none", "target", "all"] = Field(
        "none", description="output layer = target embedding; `all`: = source embedding too"
    )
    share: Literal["none", "layers", "all"] = Field(
        "none", description="one set of weights in encoder and decoder where they are alike; `all`: the embedding too"
    )
    scale_embedding: bool = Field(True, description="multiply embeddings by the square root of the width")
    output: Literal["plain", "deep"] = Field(
        "plain", description="deep: a layer and a norm of it come before the scores of the tokens (BERT)"
    )
    source_eos: bool = Field(True, description="false: the </s> that closes every source is not read (OpenNMT-py)")
    weight_dtype: Literal["fp32", "int8"] = Field(
        "fp32", description="int8: the run holds its matrices in 8 bits, and learns no more; `transduce quantise`"
    )
    copy: CopyRecipe | None = Field(  # type: ignore[assignment]
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


class GenerationRecipe(Section):
    strategy: str | dict[str, Any] = Field(
        "beam",
        description="search strategy: a name, or `{kind: ..., option: ...}`; options left out are the keys below",
    )
    beam: Positive = Field(5, description="beam width; samples a line when sampling")
    nbest: Positive = 1
    length_penalty: float = Field(1.0, ge=0, description="finished hypotheses are ranked by score / length ** penalty")
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="sample from the k best tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set with this probability")
    min_length: int = Field(0, ge=0, description="fewest tokens")
    max_length: Positive = Field(256, description="most tokens")
    max_ratio: float = Field(3.0, gt=0, description="most tokens also: ratio * source tokens + 50")
    no_repeat_ngram: int = Field(0, ge=0, description="no n-gram of this size twice; 0: off")
    repetition_penalty: float = Field(1.0, ge=1)
    stop: Literal["bound", "length", "full"] = Field(
        "bound",
        description="huggingface_beam: when nothing better can come; when nothing of this length is better; when full",
    )
    forced_bos: int | None = Field(None, ge=0, description="id of the token that every output begins with")
    forced_prefix: tuple[int, ...] = Field((), description="ids that every output is given to begin with, at no cost")
    suppress: tuple[int, ...] = Field((), description="ids of tokens that are never said")
    suppress_first: tuple[int, ...] = Field((), description="ids of tokens that no output begins with")
    forced_eos: bool = Field(False, description="an output that reaches max_length ends there with </s>")
    max_source_length: Positive = Field(2048, description="longer sources are truncated to this length and flagged")
    logits_processors: tuple[str | dict[str, Any], ...] = Field(
        (), description="further logits processors, applied in order: `[{kind: ..., option: ...}]`"
    )
    batch_tokens: Positive = 4096
    seed: int = 1

    @property
    def strategy_kind(self) -> str:
        """The name of the search strategy."""
        return self.strategy if isinstance(self.strategy, str) else str(self.strategy.get("kind"))

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # options of parts are mappings, which have no hash


class EvaluationRecipe(Section):
    metrics: tuple[str, ...] = ("bleu", "chrf")
    references: Literal["each", "by_source"] = Field(
        "each", description="by_source: lines with an equal source are one line with several right answers"
    )
    resamples: Positive = Field(1000, description="bootstrap resamples for the 95 % intervals")


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
    bucket_batches: Positive = Field(100, description="batches whose examples are sorted by length together")
    packing: bool | Literal["auto"] = Field(
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
    cuda_graphs: bool = Field(True, description="replay the passes over batches as recorded graphs, on a GPU")
    gradient_checkpointing: bool = Field(
        False, description="keep only what enters each Transformer block, and compute the rest again: less memory"
    )
    ema: Fraction = Field(0.0, description="decay of the moving average of the weights; 0: off")
    average_checkpoints: Positive = Field(1, description="mean of the weights at the last n checkpoints")
    checkpoint_every: Positive = 500
    keep: Positive = Field(3, description="checkpoints kept besides the best one")
    validate_every: Positive = 500
    validate_examples: Positive = Field(500, description="most development pairs generated for at each validation")
    monitor: str = Field("loss", description="what is watched on the development set: loss, or a metric by name")
    patience: Positive | None = Field(5, description="validations without progress before training stops")
    log_every: Positive = 10
    max_nonfinite: Positive = Field(5, description="non-finite updates in a row after which training stops")
    seed: int = 1
    deterministic: bool = Field(False, description="refuse operations whose result may differ between runs")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    tensorboard: bool = False

    @property
    def budget(self) -> int:
        """`batch_tokens`, once it is a number: see experiment/budget.py."""
        assert self.batch_tokens != "auto", "how many fit was not found out yet"
        return self.batch_tokens
