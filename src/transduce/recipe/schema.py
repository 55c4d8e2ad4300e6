"""Sections of a recipe: tokens, model, init, training, generation, evaluation. Unknown keys are refused."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from transduce.data.tokenizers.normalisation import ONE_WAY

# `copy` is also a deprecated method of pydantic's BaseModel; nothing here calls it.
warnings.filterwarnings("ignore", 'Field name "copy" in "ModelRecipe" shadows', UserWarning)

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]

MAX_INTEGER = 2**62


def _as_names(value: Any) -> Any:
    """A single name stands for a list of one."""
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]


class Section(BaseModel):
    """A mapping of a recipe. Every field has a description: docs/recipe-reference.md is generated from them."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _integers_fit_a_tensor(self) -> Self:
        for name, value in self:
            numbers = value if isinstance(value, tuple) else (value,)
            if name != "seed" and any(isinstance(number, int) and abs(number) > MAX_INTEGER for number in numbers):
                raise ValueError(f"`{name}` has an integer of more than 62 bits")
        return self


class TextRecipe(Section):
    """Tokenizer of one side."""

    kind: Literal["chars", "words", "bytes", "bpe", "unigram", "labels", "given"] = Field(
        "bpe", description="Kind of tokens; `labels`: one token per line; `given`: the tokenizer of the run in `init`."
    )
    size: Positive = Field(8000, description="Vocabulary size, the four special tokens included.")
    min_count: Positive = Field(1, description="Characters or words with a lower count become <unk>.")
    dropout: Fraction = Field(0.0, description="BPE dropout in training (Provilkov 2020).")
    cls: bool = Field(
        False,
        description="<s> before every text: the <cls> that a head with `pooling: first` reads (Devlin 2019); before "
        "the sources of a decoder it shows relative positions where the source begins (Csordás 2021).",
    )
    normalisation: tuple[
        Literal["canonical", "nfkc", "quotes", "dashes", "spaces", "lower", "nfd", "nfc", "case", "case_words"], ...
    ] = Field(
        (),
        description="Steps before tokenisation. One-way: `canonical` (NFC), `nfkc`, `quotes`, `dashes`, `spaces`, "
        "`lower`. Undone in the output: `nfd`: Hangul as jamo, accents as marks; `nfc`: "
        "composed letters, for data in NFD; `case`: capitals as a mark and a small letter; "
        "`case_words`: words in small letters after a mark of their case, for pieces and words.",
    )

    @model_validator(mode="after")
    def _normalised_kinds(self) -> Self:
        if self.normalisation and self.kind in ("labels", "given"):
            raise ValueError(f"`normalisation` is not for `kind: {self.kind}`")
        if len(set(self.normalisation)) < len(self.normalisation) or {"nfd", "nfc"} <= set(self.normalisation):
            raise ValueError("`normalisation` has a step twice, or `nfd` and `nfc`, which undo each other")
        one_way = [step in ONE_WAY for step in self.normalisation]
        if one_way != sorted(one_way, reverse=True):
            raise ValueError(f"one-way steps of `normalisation` ({', '.join(ONE_WAY)}) stand first")
        return self

    @model_validator(mode="after")
    def _texts_have_a_cls(self) -> Self:
        if self.cls and self.kind in ("labels", "given"):
            raise ValueError(
                f"`cls` is not for `kind: {self.kind}`: labels have none, and an imported tokenizer its own"
            )
        return self

    @model_validator(mode="after")
    def _dropout_needs_bpe(self) -> Self:
        if self.dropout and self.kind != "bpe":
            raise ValueError(f"`dropout` omits BPE merges, and {self.kind} has none: set `kind: bpe`, or `dropout: 0`")
        return self


class TokensRecipe(Section):
    """Tokenizers of source and target."""

    source: TextRecipe = Field(TextRecipe(), description="Tokenizer of the source.")
    target: TextRecipe = Field(TextRecipe(), description="Tokenizer of the target.")
    shared: bool = Field(False, description="Train one vocabulary on both sides.")
    oov_placeholders: int = Field(
        0,
        ge=0,
        le=1000,
        description="Number of placeholders <unk1> .. <unkN> that tell the unknown words of a source apart; 0: none.",
    )

    @model_validator(mode="after")
    def _shared_settings_agree(self) -> Self:
        if self.shared and self.source != self.target:
            raise ValueError("a shared vocabulary needs equal `tokens.source` and `tokens.target`")
        if self.oov_placeholders and self.source.normalisation:
            raise ValueError("`oov_placeholders` stand for words as they are: leave out `normalisation`")
        if self.oov_placeholders and not (self.shared and self.source.kind == "words"):
            raise ValueError("`oov_placeholders` need one vocabulary of words: set `shared: true` and `kind: words`")
        return self


class CopyRecipe(Section):
    """Pointer-generator copying of source tokens (See 2017)."""

    layer: int = Field(-1, description="Decoder layer whose cross-attention is the copy distribution; -1: the last.")
    head: int | None = Field(None, description="Attention head of that layer; null: the mean of all heads.")
    source: str | None = Field(None, description="Name of the one of several sources to copy from; null: all.")


class CtcRecipe(Section):
    """CTC scores of the encoder output beside the decoder (Watanabe 2017)."""

    weight: float = Field(0.3, ge=0, le=1, description="Weight of the CTC prefix score in the search; 0: none.")


class ModelRecipe(Section):
    """Network: an encoder and a decoder, a decoder alone, or an encoder and a head."""

    encoder: dict[str, Any] | None = Field(
        None, description="Encoder, `{kind: ..., option: ...}`; null: a language model."
    )
    decoder: dict[str, Any] | None = Field(None, description="Decoder, `{kind: ..., option: ...}`.")
    head: dict[str, Any] | None = Field(
        None, description="Head of an encoder without a decoder, `{kind: ..., option: ...}`."
    )
    target_encoder: dict[str, Any] | None = Field(
        None, description="Encoder of the targets, for `embedder`, with a head of its own; null: that of the sources."
    )
    tie: Literal["none", "target", "all"] = Field(
        "none",
        description="Weight tying: `target`: output layer and target embedding; `all`: source embedding too.",
    )
    share: Literal["none", "layers", "all"] = Field(
        "none",
        description="Weights shared by encoder and decoder: `layers`: those of equal name and shape; `all`: the "
        "embedding too.",
    )
    scale_embedding: bool = Field(True, description="Multiply embeddings by the square root of the width.")
    output: Literal["plain", "deep"] = Field(
        "plain", description="`deep`: a dense layer, GELU and a norm precede the output projection (BERT)."
    )
    logit_cap: float | None = Field(
        None, gt=0, le=1e6, description="Logits of a decoder are c tanh(logits / c); null: as they are."
    )
    source_eos: bool = Field(True, description="Read the </s> at the end of the source; false as in OpenNMT-py.")
    weight_dtype: Literal["fp32", "int8"] = Field(
        "fp32",
        description="`int8`: matrices are stored in 8 bits; such a run cannot be trained (`transduce quantise`).",
    )
    copy: CopyRecipe | None = Field(  # type: ignore[assignment]
        None, description="Pointer-generator copying of source tokens; {} for the defaults."
    )
    ctc: CtcRecipe | None = Field(
        None, description="CTC output layer over the encoder output beside the decoder; {} for the defaults."
    )


class InitRecipe(Section):
    """Pretrained runs: weights are taken over where name, shape and tokens agree."""

    model: str | None = Field(None, description="Run from which all weights are initialised.")
    encoder: str | None = Field(None, description="Run from which the encoder is initialised.")
    decoder: str | None = Field(None, description="Run from which the decoder is initialised.")
    tokens: str | None = Field(
        None, description="Run whose tokenizers are used, instead of new ones; the `tokens` sections must agree."
    )
    source_vectors: str | None = Field(
        None, description="Word vectors of the source embedding: a text file of word2vec or GloVe."
    )
    target_vectors: str | None = Field(None, description="The same for the target embedding.")

    @property
    def has_vectors(self) -> bool:
        return self.source_vectors is not None or self.target_vectors is not None


class GenerationRecipe(Section):
    """Search settings."""

    strategy: str | dict[str, Any] = Field(
        "beam",
        description="Search strategy: a name, or `{kind: ..., option: ...}`. Options that are left out are the keys of "
        "this section with the same name; the option `width` is `beam`.",
    )
    beam: Positive = Field(5, description="Beam width; number of samples per line when sampling.")
    nbest: Positive = Field(1, description="Number of hypotheses returned per line.")
    length_penalty: float = Field(
        1.0, ge=0, description="Finished hypotheses are ranked by score / length ** length_penalty."
    )
    coverage_penalty: float = Field(
        0.0, ge=0, description="Factor of the coverage penalty (Wu 2016) in the rank of finished hypotheses; 0: none."
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_k: int = Field(0, ge=0, description="Sample from the k most probable tokens; 0: from all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the smallest set of tokens with this probability.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Sample from tokens with at least this share of the probability of the best one."
    )
    groups: Positive = Field(3, description="Groups of `diverse_beam`; the beam is a multiple of them.")
    diversity: float = Field(
        0.5, ge=0, description="What a token costs in `diverse_beam` for each earlier group that selected it."
    )
    utility: Literal["chrf", "bleu"] = Field("chrf", description="Utility of `mbr`.")
    stop: Literal["bound", "length", "full"] = Field(
        "bound",
        description="When `huggingface_beam` stops: `bound`: no live hypothesis can still win; `length`: none wins at "
        "its present length; `full`: as many hypotheses are finished as the beam is wide.",
    )
    min_length: int = Field(0, ge=0, description="Minimal number of output tokens.")
    max_length: Positive = Field(256, description="Maximal number of output tokens.")
    max_ratio: float = Field(3.0, gt=0, description="Output tokens are also limited to max_ratio * source tokens + 50.")
    no_repeat_ngram: int = Field(0, ge=0, description="No n-gram of this size is generated twice; 0: off.")
    repetition_penalty: float = Field(
        1.0, ge=1, description="Factor on the log-probability of tokens that were generated before."
    )
    forced_bos: int | None = Field(None, ge=0, description="Id of the token that every output begins with.")
    forced_prefix: tuple[int, ...] = Field((), description="Ids that every output begins with, not scored.")
    detected_first: tuple[int, ...] = Field(
        (), description="Ids of which the most probable one after <s> replaces the first of forced_prefix: a language."
    )
    timestamps: dict[str, Any] | None = Field(
        None,
        description="Ids of the timestamps of a recogniser, as options of the logits processor `timestamps`: "
        "long recordings are transcribed in windows, and segments have times.",
    )
    suppress: tuple[int, ...] = Field((), description="Ids of tokens that are never generated.")
    suppress_first: tuple[int, ...] = Field((), description="Ids of tokens that no output begins with.")
    forced_eos: bool = Field(False, description="End an output that reaches max_length with </s>.")
    logits_processors: tuple[str | dict[str, Any], ...] = Field(
        (), description="Further logits processors, applied in order: `[{kind: ..., option: ...}]`."
    )
    max_source_length: Positive = Field(2048, description="Longer sources are split, or truncated and flagged.")
    long_sources: Literal["split", "truncate"] = Field(
        "split",
        description="`split`: a longer text is split at sentences, clauses or white space, and the outputs are joined.",
    )
    protect: tuple[Literal["markup", "url", "email", "placeholder", "number", "emoji"], ...] = Field(
        (), description="Spans of a source that its output contains as often, unchanged. Documents: all kinds."
    )
    batch_tokens: Positive = Field(4096, description="Tokens per batch.")
    seed: int = Field(1, description="Seed of sampling.")

    @property
    def strategy_kind(self) -> str:
        """The name of the search strategy."""
        return self.strategy if isinstance(self.strategy, str) else str(self.strategy.get("kind"))

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # options of parts are mappings, which have no hash


class EvaluationRecipe(Section):
    """Metrics on development and test data."""

    metrics: tuple[str | dict[str, Any], ...] = Field(
        ("bleu", "chrf"), description="Metrics: a name, `file:Class`, or `{kind: name, option: value}`."
    )
    references: Literal["each", "by_source"] = Field(
        "each", description="`by_source`: lines with an equal source are one line with several references."
    )
    resamples: Positive = Field(1000, description="Bootstrap resamples for the 95 % confidence intervals.")


class AdaptersRecipe(Section):
    """Low-rank adapters: W x + alpha / rank * B A x, where A and B are trained and W is frozen (LoRA, Hu 2021)."""

    rank: Positive = Field(8, description="Rank of B A.")
    alpha: float = Field(16.0, gt=0, description="Scale of B A, divided by the rank.")
    targets: Names = Field(("*",), description="Matrices that get an adapter, by prefix of their name, or with *.")


class OptimiserRecipe(Section):
    """Optimiser."""

    kind: Literal["adamw", "adam", "sgd"] = Field("adamw", description="Optimiser.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.98), description="Decay of Adam's moment estimates.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    momentum: Fraction = Field(0.9, description="Momentum of sgd.")


class ScheduleRecipe(Section):
    """Learning rate schedule."""

    kind: Literal["constant", "inverse_sqrt", "cosine", "linear", "plateau", "warmup_stable_decay"] = Field(
        "inverse_sqrt",
        description="Shape of the schedule after the warm-up; `warmup_stable_decay`: constant until the development "
        "score has stopped improving or the last updates come, then a decay (Hu 2024, Hägele 2024).",
    )
    warmup: int = Field(400, ge=0, description="Updates of linear warm-up.")
    floor: Fraction = Field(
        0.0, description="Lowest share of the learning rate (cosine, linear, plateau, warmup_stable_decay)."
    )
    decay: Fraction = Field(0.2, description="warmup_stable_decay: share of all updates that are the decay.")
    factor: float = Field(0.5, gt=0, lt=1, description="plateau: factor on the learning rate.")
    patience: int = Field(2, ge=0, description="plateau: validations without improvement before the rate is reduced.")


class TrainingRecipe(Section):
    """Training loop."""

    steps: Positive = Field(10_000, description="Maximal number of updates.")
    minutes: float | None = Field(
        None, gt=0, description="Time budget of training: the schedule is shortened to the updates that it allows."
    )
    batch_tokens: Positive | Literal["auto"] = Field(
        4096,
        description="Source and target tokens per update, over all processes; `auto`: as many as fit the GPU.",
    )
    accumulate: Positive = Field(1, description="Micro-batches per update; the gradient is that of the whole batch.")
    bucket_batches: Positive = Field(100, description="Number of batches whose examples are sorted by length together.")
    packing: bool | Literal["auto"] = Field(
        "auto",
        description="Pack several pairs into a row of a batch, with little padding; `auto`: on a GPU with CUDA graphs.",
    )
    objective: dict[str, Any] = Field(
        {"kind": "cross_entropy"}, description="Training objective, `{kind: ..., option: ...}`."
    )
    freeze: Names = Field(
        (), description="Weights that are not trained, by prefix of their name (encoder, decoder.embedding), or with *."
    )
    unfreeze: Positive | None = Field(
        None,
        description="Updates between the unfreezing of one layer and the next, from the top; null: all train at once.",
    )
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="Factor on the learning rate from each layer to the one below it."
    )
    adapters: AdaptersRecipe | None = Field(
        None, description="Train low-rank adapters of `init.model`, whose weights stay frozen."
    )
    optimiser: OptimiserRecipe = Field(OptimiserRecipe(), description="Optimiser.")
    schedule: ScheduleRecipe = Field(ScheduleRecipe(), description="Learning rate schedule.")
    clip: float | None = Field(1.0, gt=0, description="Maximal gradient norm; null: no clipping.")
    precision: Literal["fp32", "bf16", "auto"] = Field(
        "fp32",
        description="Precision of the forward and backward pass; `auto`: bf16 on a device that computes with it, else "
        "fp32.",
    )
    compile: bool = Field(False, description="Compile the model with torch.compile.")
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="Several processes: `ddp` has all weights in each of them, `fsdp` divides weights, gradients and "
        "optimiser state among them.",
    )
    cuda_graphs: bool = Field(True, description="Capture forward and backward passes as CUDA graphs on a GPU.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute the activations of Transformer layers in the backward pass to save memory."
    )
    ema: Fraction = Field(0.0, description="Decay of the exponential moving average of the weights; 0: off.")
    average_checkpoints: Positive = Field(
        1, description="Final weights are the mean of the last n checkpoints, where it scores as well as the best."
    )
    checkpoint_every: Positive = Field(500, description="Updates between checkpoints.")
    keep: Positive = Field(3, description="Number of checkpoints kept besides the best one.")
    validate_every: Positive = Field(500, description="Updates between validations.")
    validate_examples: Positive = Field(500, description="Maximal number of development pairs decoded per validation.")
    monitor: str = Field("loss", description="Development score for early stopping: loss, or the name of a metric.")
    patience: Positive | None = Field(
        5,
        description="Validations without improvement before training stops, or, with `warmup_stable_decay`, before the "
        "decay begins. A perfect score stops training at once. null: no early stopping.",
    )
    min_epochs: int = Field(0, ge=0, description="Epochs before early stopping.")
    log_every: Positive = Field(10, description="Updates between log entries.")
    max_nonfinite: Positive = Field(
        5, description="After this number of non-finite updates in a row, training returns to the newest checkpoint."
    )
    max_rollbacks: int = Field(
        2, ge=0, description="Returns to a checkpoint, each with half the learning rate, before training stops."
    )
    seed: int = Field(1, description="Seed of initialisation, data order and dropout.")
    deterministic: bool = Field(
        False,
        description="Refuse operations whose result may differ between runs; on a CPU, one thread and no C kernels, so "
        "that the bits do not depend on either.",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1 or mps.")
    trackers: tuple[str | dict[str, Any], ...] = Field(
        (), description="Experiment trackers that get losses and scores: tensorboard, wandb, mlflow, with options."
    )

    @property
    def budget(self) -> int:
        """`batch_tokens` once it is a number: training/resolve.py replaces `auto`."""
        assert self.batch_tokens != "auto", "batch_tokens: auto was not resolved yet"
        return self.batch_tokens
