"""Contracts of all extension points.

    sources     Modality, FrontEnd
    network     Encoder, Decoder, Head
    attention   AttentionScore, Normaliser, Window, PositionEncoding, TokenMixer, ContextMechanism
    search      Strategy, LogitsProcessor
    evaluation  TextMetric, SourceMetric, ScoreMetric, VectorMetric
    training    Objective, Noise, Augmentation, Tracker
    interop     Family

Constructors follow one rule, which lets a recipe reach every part without a settings class: positional parameters
are finished parts and sizes that `recipe/build.py` supplies; keyword-only parameters are the options a user may write
in a recipe, with their types, ranges and defaults stated once, in the signature. docs/extending.md has examples.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.flow import Batch, CacheSlots, Example, Memory, PackedLayout, Padded, State, Step, Tree

if TYPE_CHECKING:
    from transduce.data.tokenizers.tokenizer import Tokenizer
    from transduce.interop.huggingface.family import Config, WeightMap
    from transduce.interop.huggingface.languages import Languages
    from transduce.interop.huggingface.weights import ExportRows
    from transduce.recipe import GenerationRecipe, Recipe

Count = Annotated[int, Gt(0)]
Rate = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class VisualSource:
    """Pixels that display one part of a source, divided into the cells of the memory rows."""

    pixels: np.ndarray  # Y X 3, uint8
    grid: tuple[int, int]  # rows and columns of equal cells, in reading order
    begin: int = 0  # the row of the memory of the first cell
    across: str = ""  # unit of the horizontal axis, such as seconds
    extent: float = 0.0  # length of the horizontal axis in that unit


class Modality(ABC):
    """How a file, named in a part of a source, becomes an array. Built as `Modality()`.

    A file is read once, when the data are prepared; the array is stored and collated into batches many times.
    """

    extensions: tuple[str, ...] = ()  # of the files it reads, in lower case

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one row of a batch B S ... ."""

    @abstractmethod
    def read(self, source: str) -> np.ndarray:
        """The array to store; raises an UnreadableError that says why the source cannot be read."""

    @abstractmethod
    def length(self, array: np.ndarray) -> int:
        """The number of rows S of an array in a batch."""

    @abstractmethod
    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        """Several arrays as one tensor B S ... . With a random generator for each, they may be augmented."""

    @abstractmethod
    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        """A label for each row of the memory; the rows form this grid."""

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource | None:
        """Pixels to display attention over the source; None: the labels suffice."""
        return None


class FrontEnd(nn.Module, ABC):
    """Maps the rows of a modality to vectors. Built as `FrontEnd(width)`; `recipe/build.py` supplies `shape`."""

    width: int  # D
    leading: int = 0  # rows before those of the grid, such as <cls>

    def rows(self, source: Padded) -> Padded:
        """B S ... -> B S' D."""
        entered: Padded = self(source)
        return entered

    def grid(self, length: int) -> tuple[int, ...]:
        """The grid that the rows S' of a source with `length` rows S form, without the leading ones."""
        return (length,)


class Encoder(nn.Module, ABC):
    """Encodes the sources of a batch as a memory. Built as `Encoder(front_end)`."""

    width: int  # D of the memory
    capturable: bool = False  # True: its operations depend on shapes alone, so a CUDA graph can capture them
    # True: the first half of a row depends on the tokens up to it alone, the second half on those from it on.
    separate_directions: bool = False
    independent_rows: bool = False  # True: a row depends on its own token alone
    embedding: FrontEnd  # maps the source to vectors

    @abstractmethod
    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory: ...

    @property
    def supports_packing(self) -> bool:
        """Whether several sequences may be packed into one row of a batch without attending to each other."""
        return False

    def grids(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """The grid of the memory rows of each part of a source, given the lengths of the parts."""
        return [self.embedding.grid(length) for length in lengths]

    def leading(self) -> list[int]:
        """For each part of a source, the number of memory rows before those of its grid."""
        return [self.embedding.leading]


class Decoder(nn.Module, ABC):
    """Maps a memory to logits of target tokens, in one call for all tokens or in one call per token."""

    constant_state: bool = False  # True: its state neither grows nor counts positions, so texts may be of any length

    @property
    def attention_shape(self) -> tuple[int, int]:
        """Layers and heads of the cross-attention weights of a step; (0, 0): none."""
        return 0, 0

    @abstractmethod
    def start(self, memory: Memory) -> State:
        """The state before the first token. Whatever depends on the memory alone is computed here, once."""

    @abstractmethod
    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        """Reads `tokens` (R T) after `state`.

        `mask` (R T) marks the real tokens of right-padded rows: a padded token does not change the next state.
        Every row has at least one real token.
        """

    def memory_mask(self, state: State) -> Tensor | None:
        """B S: the memory rows that cross-attention may attend to; None: there is no cross-attention."""
        return state.fixed.get("mask") if self.attention_shape[0] else None

    def posterior(self, tokens: Tensor, state: State, outputs: Tensor) -> Tensor | None:
        """R T S: p(a_t = s | y_t) of the row that each output token (R T) was written from; None: there is none."""
        return None

    @property
    def supports_packing(self) -> bool:
        """Whether `pack` is implemented."""
        return False

    def pack(self, state: State, rows: PackedLayout) -> State:
        """The state from `start` for rows of packed sequences: each attends to its own part of the memory.

        Used in training alone, where all tokens come in one call.
        """
        raise NotImplementedError("check `supports_packing` first")

    def reserve(self, state: State, more: int, beams: int) -> State:
        """The same state with a preallocated cache for `more` tokens and `beams`, which later steps fill in place.

        Called before a search with a state of one row per source, and again when the cache is full. From then on
        tokens come one at a time.
        """
        return state


class Head(nn.Module, ABC):
    """The output layer of an encoder-only model. Built as `Head(width, labels)`."""

    # What has a label: the whole source, each word, each token; `path`: the alignment paths of CTC.
    label_unit: Literal["line", "word", "token", "path"] = "line"
    input_noise: str = "mask_tokens"  # where `label_unit` is "token": the noise of the input
    needs_separate_directions: bool = False  # True: it needs an encoder with `separate_directions`
    needs_independent_rows: bool = False  # True: it needs an encoder with `independent_rows`
    is_embedding: bool = False  # True: the output is one vector per source, B D

    @abstractmethod
    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """values (B S D), mask (B S) -> logits (B V) or (B S V)."""


class AttentionPart(nn.Module, ABC):
    """Base of scores, normalisers and windows, which may depend on the attention weights of earlier steps.

    The history of a stateful part is in the decoder state, one row per hypothesis, and is passed to it as `past`.
    Only the context mechanisms of a recurrent decoder keep it; Attend refuses stateful parts elsewhere.
    """

    stateful: bool = False

    def start(self, mask: Tensor) -> Tree:
        """The history before the first step: mask (B S) of the memory -> tensors with B rows."""
        return {}

    def update(self, past: Tree, weights: Tensor) -> Tree:
        """The history after a step with these weights (R S)."""
        return past


class AttentionScore(AttentionPart):
    """The score of a query and a key. Built as `AttentionScore(query_width, memory_width)`."""

    scale: float | None = None  # set where the score is scale * (query . key), which fused kernels compute

    def keys(self, values: Tensor) -> Tensor:
        """The part of the score that depends on the memory alone: (... S D) -> (... S K)."""
        return values

    @abstractmethod
    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """query (... T Q), keys (... S K) -> scores (... T S)."""

    def stateful_forward(self, query: Tensor, keys: Tensor, past: Tree) -> Tensor:
        """The scores of one step, given the history: query (B N Q), keys (B S K), past (B N ...)."""
        return self.forward(query, keys)

    def contexts(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor | None:
        """softmax(scores) @ values (... T D) where that can be had at once; None: not of these."""
        return None


class Normaliser(AttentionPart):
    """Maps scores to weights that sum to 1 over the unmasked rows. Built as `Normaliser()`."""

    # True for softmax, which fused kernels compute. A subclass with another `forward` sets it to False.
    fusible: bool = False
    # True: rows are sampled. The context has no gradient; the weights carry the score-function gradient instead.
    stochastic: bool = False

    @abstractmethod
    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """scores (... T S), mask broadcastable to it -> weights (... T S), 0 where the mask is False."""

    def stateful_forward(self, scores: Tensor, mask: Tensor | None, past: Tree) -> Tensor:
        """The weights of one step, given the history: scores (B N S), past (B N ...)."""
        return self.forward(scores, mask)

    def entropy(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """The entropy of the sampling distribution (... T), in nats; None: not stochastic."""
        return None


@dataclass(frozen=True)
class WindowMask:
    """The memory rows inside the window of each query."""

    mask: Tensor  # broadcastable to B T S
    bias: Tensor | None = None  # B T S: added to the scores


class Window(AttentionPart):
    """Local attention: the neighbourhood of the memory that a query attends to. Built as `Window(query_width)`."""

    @abstractmethod
    def forward(self, query: Tensor, mask: Tensor, past: Tree) -> WindowMask:
        """query (B T Q), mask (B 1 S) of the memory, past (B T ...) -> the window, at least one row per query."""


class PositionEncoding(nn.Module):
    """Position information, added to embeddings, queries and keys, or scores; a subclass overrides one of the three.

    Built as `PositionEncoding(width, heads, causal)`. Positions are integers of shape (1 T) or (R T).
    """

    max_positions: int | None = None  # the number of positions; None: unlimited

    def add(self, values: Tensor, positions: Tensor) -> Tensor:
        """The embeddings (R T D) with positions."""
        return values

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (R H T K) with positions."""
        return heads

    def bias(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
        """A bias of the scores: queries (R H T K), positions (. T) and (. S) -> (. H T S)."""
        return None

    def of_layer(self, number: int) -> PositionEncoding:
        """The encoding in the attention of one layer."""
        return self


@dataclass(frozen=True)
class SequenceContext:
    """Masks, positions and cache slots of one call, shared by all layers."""

    position: PositionEncoding
    queries: Tensor  # 1 T or R T: positions of the new rows
    keys: Tensor  # 1 U or R U: positions of all rows so far, including the new ones
    mask: Tensor | None = None  # broadcastable to R H T U
    causal: bool = False  # causal mask without padding: no mask tensor needed
    real: Tensor | None = None  # R T: the new rows that are not padding
    padded: bool = False  # True: padding must not enter the state
    with_attention: bool = False
    slots: CacheSlots | None = None  # of a preallocated cache, which new rows are written into
    source: Tensor | None = None  # B 1 1 S: the memory mask as a bias, 0 or -inf
    global_mask: Tensor | None = None  # as `mask`, of layers without the window that others have
    # Keys and values B G P K of rows before the sequence, one row per source. `mask` has columns for them first; with
    # `slots` it is theirs alone.
    prefix: tuple[Tensor, Tensor] | None = None


class TokenMixer(nn.Module, ABC):
    """The sub-layer of a Transformer layer that mixes the rows of one sequence: self-attention, or what replaces it.

    Built as `TokenMixer(width, options)`, with the SublayerOptions of the layer (layers/option_groups.py). A decoder
    needs a causal one: a row depends on earlier rows alone, and the state has one row per hypothesis.
    """

    # True: the state is a cache of keys and values; the mask, window and positions of the context apply.
    # False: they do not, and the context has no mask in a decoder.
    has_kv_cache: bool = False

    @abstractmethod
    def start(self, rows: int, like: Tensor) -> Tree:
        """The state before the first row, with dtype and device of `like`."""

    @abstractmethod
    def forward(self, rows: Tensor, past: Tree, sequence: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        """rows (R T D) -> rows (R T D), the next state, attention weights (R H T U) where requested and defined."""


@dataclass(frozen=True)
class ContextOutput:
    """The output of a context mechanism for T steps."""

    output: Tensor  # R T O
    past: dict[str, Tree]  # one row per hypothesis: the history that the next step needs
    weights: Tensor | None = None  # R T S, where requested
    entropy: Tensor | None = None  # R T, with the weights: of the sampling distribution, where they are sampled


class ContextMechanism(nn.Module, ABC):
    """How a recurrent decoder uses the memory. Built as `ContextMechanism(width, memory_width)`.

    `step_input` gives a vector that is concatenated with the token embedding; `step_output` combines the hidden
    states with the context.
    """

    feed_width: int = 0
    output_width: int
    has_attention: bool = False  # True: `ContextOutput.weights` are set where requested
    stepwise: bool = False  # True: the input depends on the previous step, so tokens are processed one by one

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """(fixed, past): tensors that depend on the memory alone, and the initial history."""
        return {}, {}

    def step_input(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> ContextOutput | None:
        """hidden (R D) before these steps -> additional input (R T F); None: no additional input."""
        return None

    @abstractmethod
    def step_output(
        self, hidden: Tensor, fed: ContextOutput | None, state: State, with_attention: bool
    ) -> ContextOutput:
        """hidden (R T D) of these steps -> output (R T O)."""


@dataclass(frozen=True)
class Selection:
    """The continuations that a strategy selected: N rows per source, by parent beam and token."""

    parents: Tensor  # B N; or more than N: the N best of those that do not end continue
    tokens: Tensor  # B N
    totals: Tensor  # B N: cumulative scores, -inf for an inactive row
    indices: Tensor | None = None  # B N: index among the N*M candidates, where only those were given


class Strategy(ABC):
    """Selects the next tokens. `width` is N, the number of rows per source."""

    width: int
    random: bool = False  # True: `select` needs noise
    prefer_complete: bool = True  # False: a hypothesis truncated at the maximal length ranks like one that ended
    candidates: int = 0  # M: the top M tokens of each row suffice to select from; 0: all are needed
    # True: `bound` is never too low, so a row that cannot come among the requested best is pruned at once.
    # False: a source stops when none of its rows can come among the N best.
    exact: bool = True
    coverage_penalty: float = 0.0  # beta (Wu 2016); not 0: the search needs the attention of every step

    @abstractmethod
    def initial_totals(self, sources: int, device: torch.device) -> Tensor:
        """Totals (B N) before the first token; -inf for an inactive row."""

    @abstractmethod
    def select(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
        """totals (B N) of the rows so far, scores (B N V) of every next token (log-probabilities after the processors),
        noise (B N) uniform in [0, 1), sampled per source so that a batch never changes a sample."""

    def select_top_k(self, totals: Tensor, best: Tensor, tokens: Tensor) -> Selection:
        """The same from the top M of each row: scores and tokens (B N M), where M is `candidates`."""
        raise NotImplementedError("this strategy needs the scores of all tokens")

    def rank(self, totals: Tensor, lengths: Tensor) -> Tensor:
        """What finished hypotheses are sorted by: totals (B N), lengths (B N) -> ranks (B N)."""
        return totals

    def bound_lengths(self, lengths: Tensor, max_lengths: Tensor) -> Tensor:
        """B: the length for which `bound` is computed, given present and maximal lengths."""
        return max_lengths

    def bound(self, totals: Tensor, lengths: Tensor) -> Tensor:
        """The best rank an active row can still reach: a source stops when its finished hypotheses are all above it."""
        return totals


class LogitsProcessor(ABC):
    """Changes the log-probabilities of the next token, such as suppressing tokens."""

    @abstractmethod
    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        """scores (R V) log-probabilities, history (R U) the ids so far without <s> -> changed scores (R V).

        Suppressed tokens may be set to -inf in place; any other change must go into a copy.
        """

    def suppressed(self, length: int) -> Sequence[int] | None:
        """Tokens suppressed in every row after `length` tokens; None: the processor does more than suppress tokens."""
        return None


class Tracker(ABC):
    """Receives the numbers of a training run, for an experiment tracking service. Built as `Tracker(folder, recipe)`.

    `folder` is the run directory, `recipe` the completed recipe as JSON. Only the first process has trackers. A tracker
    that raises an error is left out for the rest of the training, with a warning.
    """

    @abstractmethod
    def track(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of an update (group `training`) or of a validation (group `development`)."""

    def close(self) -> None:
        """The end of the training, or of the process."""
        return


class Metric(ABC):
    """A corpus score computed from additive statistics per line, so that any resample of the lines needs one sum.

    There are three kinds, by the input of the statistics: texts, log-probabilities, embeddings.
    """

    name: str
    higher_is_better: bool = True
    perfect: float | None = None  # the best possible score, which ends training; None: there is none

    @abstractmethod
    def value(self, totals: np.ndarray) -> float:
        """Summed statistics (last axis) -> the corpus score, on the usual scale (0 to 100 for rates)."""

    @property
    def signature(self) -> str:
        """The settings to report with the score, for others to reproduce it."""
        return self.name

    def check(self) -> None:
        """Raises an InputError if a library or a file that the metric needs is missing: before any output is made."""
        return


class TextMetric(Metric):
    """A metric of generated texts."""

    @abstractmethod
    def statistics(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
        """One row of statistics per line; each line may have several references."""


class SourceMetric(TextMetric):
    """A metric of generated texts that reads their sources too."""

    @abstractmethod
    def source_statistics(
        self, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[Sequence[str]]
    ) -> np.ndarray:
        """One row of statistics per line."""

    def statistics(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
        raise InputError(f"{self.name} reads the sources too", remedy="give them with --sources FILE")


@dataclass(frozen=True)
class ScoredText:
    """The log-probability of a text under a model, and the length of the text.

    Words are separated by white space, and each is counted at its first character. The final </s> is a predicted
    token, so it counts as one word and one character: the end of a line is part of the text.
    """

    log_probability: float  # natural logarithm
    tokens: int
    words: int
    characters: int


class ScoreMetric(Metric):
    """A metric of the log-probabilities of references, teacher forced."""

    @abstractmethod
    def statistics(self, scored: Sequence[ScoredText]) -> np.ndarray:
        """One row of statistics per line, or per block of a running text."""


@dataclass(frozen=True)
class EmbeddedCorpus:
    """Embeddings of queries and documents, and the relevant documents of each query (at least one)."""

    queries: np.ndarray  # Q D
    documents: np.ndarray  # M D, each text once
    relevant: Sequence[Sequence[int]]  # for each query, rows of documents
    # For each query, the gold similarity of its only relevant document; None: the data have none.
    similarities: Sequence[float] | None = None


class VectorMetric(Metric):
    """A metric of embeddings of sources and targets."""

    @abstractmethod
    def statistics(self, embedded: EmbeddedCorpus) -> np.ndarray:
        """One row of statistics per query."""


Forward = Callable[[Batch], Step]  # the model, as an objective calls it


@dataclass(frozen=True)
class Loss:
    """Sums, not means: the sums of several micro-batches are added and divided once, by the count of the update."""

    total: Tensor  # scalar, with gradient: a sum over the items that the objective counts
    parts: dict[str, Tensor]  # scalars without gradient, sums over the same items; `nll` gives the perplexity


class Objective(ABC):
    """A training loss."""

    parts: tuple[str, ...] = ("nll",)  # the names in Loss.parts, known before the first batch
    capturable: bool = False  # True: its operations depend on shapes alone, so a CUDA graph can capture them
    supports_packing: bool = False  # True: it accepts packed batches, whose rows hold several pairs
    uses_embeddings: bool = False  # True: the model returns model.PairEmbeddings, not a Step
    uses_similarities: bool = False  # True: `batch.extra["similarity"]` has the gold similarity of each pair (B 1 1)

    @abstractmethod
    def __call__(self, model: Forward, batch: Batch) -> Loss: ...

    def check(self, model: nn.Module) -> None:
        """Raises an InputError for a model that it cannot train. Called before any data are read."""
        if any(isinstance(part, Normaliser) and part.stochastic for part in model.modules()):
            raise InputError(
                "sampled attention is trained by reinforce alone",
                remedy="set training.objective: {kind: reinforce}, or another normaliser",
            )

    def auxiliary_module(self, width: int) -> nn.Module | None:
        """A module that is trained with the model, on rows of this width, and dropped when training ends."""
        return None

    def at_step(self, step: int, steps: int) -> Objective:
        """The objective of update `step` (from 1) of `steps`, for objectives that change during training."""
        return self

    def count(self, batch: Batch) -> int:
        """The number of items that the total sums over; it depends on the batch alone."""
        return int(batch.labels.mask.sum())


@dataclass(frozen=True)
class NoisedText:
    """The source that a model reads in place of the clean ids."""

    ids: list[int]
    loss_mask: list[bool] | None = None  # for each clean id, whether it counts in the loss; None: all count


class Noise(ABC):
    """A random corruption of a text that never makes it longer. Built as `Noise(tokenizer)`.

    <unk> is the mask token. It never occurs in texts of `bytes`, `bpe` and `unigram`, and is rare in others.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def __call__(self, ids: Sequence[int], rng: random.Random) -> NoisedText: ...

    def apply(self, ids: Sequence[int], seed: int, epoch: int, row: int) -> NoisedText:
        """The noised ids of a row in an epoch; they do not depend on the rest of the batch."""
        return self(ids, random.Random(f"noise {seed} {epoch} {row}"))


class Augmentation(ABC):
    """Artificial training examples, made from those that are given. Built as `Augmentation()`."""

    @abstractmethod
    def __call__(self, examples: Sequence[Example], rng: random.Random) -> Iterator[Example]:
        """Artificial examples for the pairs that are trained on; tabs separate the parts of a source."""


Names = tuple[str, ...]
JSON = dict[str, Any]  # the content of a JSON file


@dataclass(frozen=True)
class Family:
    """One architecture of the transformers library, as config.json names it, in both directions.

    Without `to_config` it is only imported. A family of the user is a subclass that is built as `Family()`:
    `transduce convert FOLDER RUN --family my_file.py:MyFamily`.
    """

    to_recipe: Callable[[Config, Collection[str]], JSON]  # config and weight names -> model section of a recipe
    weights: WeightMap | Callable[[Config, Collection[str]], WeightMap]  # foreign and native names
    # Recipe and the foreign id of <pad> -> config.json, or None: a model of another shape. An export reads the result
    # with `to_recipe` and compares the recipes.
    to_config: Callable[[Recipe, int | None], JSON | None] | None = None
    flatten: Callable[[Config], Config] = field(default=lambda config: config)  # nested config -> that of the decoder

    # Import: data and tokenizers
    data: Mapping[str, Any] = field(default_factory=lambda: {"format": "pairs"})  # the data section of the recipe
    read_sources: Callable[[Path, Config], JSON] | None = None  # data.sources of a model that reads no text
    modality: str = "text"  # what its sources are, for `convert --list`
    source_eos: bool = True  # whether </s> ends every source
    start_token: str = "decoder_start_token_id"  # config key of the first output token; empty: no decoder
    end_token: str = "eos_token_id"  # config key of the last output token
    start_replaces_first: bool = False  # True: the start token takes the place of the first token of the tokenizer
    start_is_output: bool = False  # True: the start token is generated too, as any other
    languages: Literal["none", "optional", "required"] = "none"  # language codes around texts
    prompt: Callable[[Config, Languages | None], list[int]] | None = None  # forced first output ids
    # Ids of which one is chosen for each source as the first of the prompt.
    detected: Callable[[Config, Languages | None], list[int]] | None = None
    hidden_tokens: re.Pattern[str] | None = None  # special tokens that the tokenizer does not mark as special
    # Tokenizer kind of the labels, `labels` or `words`; `paths`: tokens of CTC paths; empty: outputs are tokens.
    label_kind: str = ""

    # Export
    required_names: Callable[[Mapping[str, Any]], Names] = field(default=lambda config: ())  # for `to_recipe`
    constant_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]] = field(default=lambda config: {})  # not native
    # Exported weights that the library has a second time, under another name.
    copied_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]] = field(default=lambda weights: {})
    extra_files: Callable[[Recipe], JSON] = field(default=lambda recipe: {})  # JSON files by name
    nest: Callable[[JSON], JSON] = field(default=lambda config: config)  # inverse of `flatten`
    # The weights with values that the architecture can hold, where others change no output.
    simplify: Callable[[dict[str, Tensor]], dict[str, Tensor]] = field(default=lambda weights: weights)
    # Values of generation_config.json that describe the prompt; None: a key is left out.
    write_prompt: Callable[[GenerationRecipe, ExportRows, Tokenizer], JSON] = field(
        default=lambda settings, rows, tokenizer: {}
    )

    @property
    def shape(self) -> str:
        """Encoder-decoder, decoder-only, or an encoder with what its outputs are."""
        if self.start_token:
            return "encoder-decoder" if self.source_eos else "decoder-only"
        outputs = {"labels": "one label", "words": "one label per word", "paths": "CTC"}.get(self.label_kind, "vectors")
        return f"encoder, {'masked tokens' if self.masked_lm else outputs}"

    @property
    def masked_lm(self) -> bool:
        return "noise" in self.data

    @property
    def has_head(self) -> bool:
        """Whether the checkpoint has a head beside the encoder, whose names then have a prefix."""
        return bool(self.label_kind) or self.masked_lm

    def weight_map(self, config: Config, names: Collection[str]) -> WeightMap:
        return self.weights(config, names) if callable(self.weights) else self.weights
