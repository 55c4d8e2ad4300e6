"""Every extension point on one page: what a new part takes and gives.

Constructors follow one rule, which lets a recipe reach every part without a settings class: positional parameters
are finished parts and sizes that `build.py` supplies; keyword-only parameters are the options a user may write in
a recipe, with their types, ranges and defaults stated once, in the signature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from transduce.flow import Batch, Memory, PackedLayout, Padded, State, Step, TopK, Tree

Count = Annotated[int, Gt(0)]
Rate = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class VisualSource:
    """An image of one part of a source, divided into the cells of the memory rows."""

    pixels: np.ndarray  # Y X 3, uint8
    grid: tuple[int, int]  # rows and columns of equal cells, in reading order
    begin: int = 0  # the row of the memory of the first cell
    across: str = ""  # unit of the horizontal axis, such as seconds
    extent: float = 0.0  # length of the horizontal axis in that unit


class Modality(ABC):
    """How a part of a source becomes an array. Built as `Modality()`; its keyword parameters are recipe options.

    A file is read once, when the data are prepared; the array is stored and collated into batches many times.
    """

    names_files: bool = True  # False: the source is the content itself
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
        """An image of the source, to display attention; None: the labels suffice."""
        return None


class FrontEnd(nn.Module, ABC):
    """Maps the rows of a modality to vectors. Built as `FrontEnd(width)`; build.py supplies the option `shape`."""

    width: int  # D
    leading: int = 0  # rows before those of the grid, which stand for no place in it, such as <cls>

    def rows(self, source: Padded) -> Padded:
        """B S ... -> B S' D."""
        entered: Padded = self(source)
        return entered

    def grid(self, length: int) -> tuple[int, ...]:
        """How the rows S' of a source of so many rows S lie, but the leading ones; their number is its product."""
        return (length,)


class Encoder(nn.Module, ABC):
    """Reads the sources of a batch into a memory."""

    width: int  # D of the memory it gives
    capturable: bool = False  # True: what it does follows from the shapes of a batch alone, so it can be recorded
    separate_directions: bool = (
        False  # True: the first half of a row knows nothing of what follows it, the second of what precedes
    )
    embedding: FrontEnd  # what makes vectors of the source

    @abstractmethod
    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory: ...

    @property
    def supports_packing(self) -> bool:
        """Whether several sequences may share a row of a batch, and none knows of the others."""
        return False

    def grids(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """How the rows of the memory lie, for each part of a source whose parts have so many rows."""
        return [self.embedding.grid(length) for length in lengths]

    def leading(self) -> list[int]:
        """For each part of a source, the rows of the memory before those of its grid."""
        return [self.embedding.leading]


@dataclass(frozen=True)
class Shortlists:
    """What each source may be answered with: nothing else has a chance, nor counts in the probabilities."""

    tokens: Tensor  # int32: the lists one after the other, each in order
    begins: Tensor  # of each list, and where the last one ends
    which: Tensor  # B: the list of each source


@dataclass(frozen=True)
class TopKRequest:
    """What a search asks of one step."""

    k: int  # M: how many of the best next tokens
    suppressed: tuple[int, ...]  # what may not be among them; it counts in the probabilities all the same
    active: Tensor  # R: the rows that go on; of the others nothing is told
    shortlists: Shortlists | None = None  # None: every token may be said


class Decoder(nn.Module, ABC):
    """Turns a memory into scores for target tokens, one call for all tokens or one call a token."""

    constant_state: bool = (
        False  # True: its state neither grows nor counts places, so it can go on over any length of text
    )
    supports_shortlists: bool = False  # True: where it proposes, it can be asked for the best of each source's own list

    @property
    def attention_shape(self) -> tuple[int, int]:
        """Layers and heads of the attention over the memory that a step can tell; (0, 0): there is none."""
        return 0, 0

    @abstractmethod
    def start(self, memory: Memory) -> State:
        """The state before the first token. Everything that depends on the memory alone is computed here, once."""

    @abstractmethod
    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        """Reads `tokens` (R T) after `state`.

        `mask` (R T) marks the real tokens of right-padded rows: a padded token leaves no trace in the next state.
        Every row has at least one real token.
        """

    @property
    def supports_packing(self) -> bool:
        """Whether it can be asked to `share`."""
        return False

    def pack(self, state: State, rows: PackedLayout) -> State:
        """The state from `start`, before rows that several sequences share: each reads its own part of the memory.

        Asked in training, where all tokens come in one call.
        """
        raise NotImplementedError("ask `packs` first")

    @property
    def proposes(self) -> bool:
        """Whether it finds the best next tokens of a row without writing the scores of all down: see `propose`."""
        return False

    def propose(self, tokens: Tensor, state: State, asked: TopKRequest) -> TopK:
        """As `advance` over one token a row (R 1), after `reserve`; only the best next tokens come back."""
        raise NotImplementedError("ask `proposes` first")

    def reserve(self, state: State, more: int, beams: int) -> State:
        """The same state with room for so many more tokens and beams: what would grow is then filled in place.

        Asked before a search, of a state with one row a source, and again when that room is used up. From there on
        tokens come one at a time.
        """
        return state


class Head(nn.Module, ABC):
    """Turns an encoder alone into a classifier or tagger. Built as `Head(width, labels)`."""

    label_unit: Literal["line", "word", "token", "path"] = (
        "line"  # what has a label: all of the source, each of its parts,
    )
    # or as many of its rows as a text needs
    input_noise: str = "mask_tokens"  # per token: the noise of the text that it reads
    needs_separate_directions: bool = False  # True: it needs an encoder that keeps the two directions apart
    is_embedding: bool = False  # True: no labels at all but one vector for the source, B D

    @abstractmethod
    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """values (B S D), mask (B S) -> logits (B V) or (B S V)."""


class AttentionPart(nn.Module, ABC):
    """What scores, normalisers and windows share: a part may remember what was looked at in earlier steps.

    What it remembers is kept in the state, one row a hypothesis, and comes back to it as `past`. Only the readers of
    a recurrent decoder carry it; Attend refuses such a part everywhere else.
    """

    stateful: bool = False

    def start(self, mask: Tensor) -> Tree:
        """What is remembered before the first step: mask (B S) of the memory -> tensors with B rows."""
        return {}

    def update(self, past: Tree, weights: Tensor) -> Tree:
        """What is remembered after a step whose weights (R S) are these."""
        return past


class AttentionScore(AttentionPart):
    """How well a query fits each key. Built as `Score(query_width, memory_width)`."""

    scale: float | None = None  # set where the score is just scale * query . key, which fused kernels can compute

    def keys(self, values: Tensor) -> Tensor:
        """What can be computed from the memory alone: (... S D) -> (... S K)."""
        return values

    @abstractmethod
    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """query (... T Q), keys (... S K) -> scores (... T S)."""

    def stateful_forward(self, query: Tensor, keys: Tensor, past: Tree) -> Tensor:
        """The same for one step of hypotheses that have a past each: query (B N Q), keys (B S K), past (B N ...)."""
        return self.forward(query, keys)

    def contexts(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor | None:
        """softmax(scores) @ values (... T D) where that can be had at once; None: not of these."""
        return None


class Normaliser(AttentionPart):
    """Scores to weights that sum to 1 over the visible rows. Built as `Normaliser()`."""

    fusible: bool = False  # True for softmax, which fused kernels compute
    stochastic: bool = False  # True: reading passes no gradient on; the weights told carry one of their own (see Drawn)

    @abstractmethod
    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """scores (... T S), mask broadcastable to it -> weights (... T S), 0 where the mask is False."""

    def stateful_forward(self, scores: Tensor, mask: Tensor | None, past: Tree) -> Tensor:
        """The same for one step of hypotheses that have a past each: scores (B N S), past (B N ...)."""
        return self.forward(scores, mask)

    def entropy(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """Of what rows are drawn from, which the weights do not tell: ... T, in nats; None: nothing is drawn."""
        return None


@dataclass(frozen=True)
class WindowMask:
    """The part of the memory that a window leaves in sight."""

    mask: Tensor  # broadcastable to B T S
    bias: Tensor | None = None  # B T S: added to the scores


class Window(AttentionPart):
    """Which neighbourhood of the memory a query may see. Built as `Window(query_width)`."""

    @abstractmethod
    def forward(self, query: Tensor, mask: Tensor, past: Tree) -> WindowMask:
        """query (B T Q), mask (B 1 S) of the memory, past (B T ...) -> at least one row in sight of each query."""


class PositionEncoding(nn.Module):
    """Where a token stands. A kind overrides the one place where it speaks.

    Built as `Position(width, heads, causal)`. Positions are whole numbers of shape (1 T) or (R T).
    """

    longest: int | None = None  # how many there are; None: no end

    def add(self, values: Tensor, positions: Tensor) -> Tensor:
        """Into the embeddings (R T D)."""
        return values

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Into queries and keys (R H T K)."""
        return heads

    def bias(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Into the scores: query heads (R H T K), positions (. T) and (. S) -> (. H T S)."""
        return None


@dataclass(frozen=True)
class ContextOutput:
    """What a reader makes of the memory and the hidden states of T steps."""

    output: Tensor  # R T O
    past: dict[str, Tree]  # one row a hypothesis: what the next step needs
    weights: Tensor | None = None  # R T S, when asked for
    entropy: Tensor | None = None  # R T, with them: of what was drawn from, where they were drawn


class ContextMechanism(nn.Module, ABC):
    """How a recurrent decoder reads the memory. Built as `Reader(width, memory_width)`.

    `before` gives what is fed into the network beside the token, `after` makes the output of the hidden states.
    """

    feed_width: int = 0
    output_width: int
    has_attention: bool = False  # True: `Read.weights` are there when asked for
    stepwise: bool = False  # True: what is fed depends on the step before, so tokens go one at a time

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """(fixed, past): what depends on the memory alone, and the reader's own first past."""
        return {}, {}

    def step_input(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> ContextOutput | None:
        """hidden (R D) before these steps -> what to feed (R T F), or None for nothing."""
        return None

    @abstractmethod
    def step_output(
        self, hidden: Tensor, fed: ContextOutput | None, state: State, with_attention: bool
    ) -> ContextOutput:
        """hidden (R T D) of these steps -> output (R T O)."""


@dataclass(frozen=True)
class Selection:
    """What a strategy continues with: for each source N rows, by parent beam and token."""

    parents: Tensor  # B N; or more than N: of those that do not end, the N best go on
    tokens: Tensor  # B N
    totals: Tensor  # B N: running rank scores, -inf for a row that is dead
    indices: Tensor | None = None  # B N: index among the N*M candidates, where only those were given


class Strategy(ABC):
    """Chooses the next tokens. `width` is N, the rows kept for each source."""

    width: int
    random: bool = False  # True: `select` needs noise
    prefer_complete: bool = True  # False: a hypothesis truncated at the maximal length ranks like one that ended
    candidates: int = 0  # M: the top M tokens of each row suffice to select from; 0: all are needed
    # True: `bound` is never too low, so a row that cannot come among the requested best is pruned at once.
    # False: a source stops when none of its rows can come among the N best.
    exact: bool = True

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


class Metric(ABC):
    """A corpus score made of per-line statistics that add up, so any resample of the lines is one sum away.

    What the statistics are made from tells the kinds apart: texts, log-probabilities, vectors.
    """

    name: str
    higher_is_better: bool = True

    @abstractmethod
    def value(self, totals: np.ndarray) -> float:
        """Summed statistics (last axis) -> the corpus score, on the scale people publish (0 to 100 for rates)."""

    @property
    def signature(self) -> str:
        """What must be stated beside the number for others to reproduce it."""
        return self.name


class TextMetric(Metric):
    """Reads what a model wrote: an evaluation with one of these generates."""

    @abstractmethod
    def statistics(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
        """One row of numbers for each line; each line may have several references."""


@dataclass(frozen=True)
class ScoredText:
    """How probable a model holds a given text, and how much text that is.

    Words are runs of other characters than white space, each counted where it begins. The closing </s> is a token
    that the model had to foretell, so it counts as one word and as one character: where a line ends is part of it.
    """

    log_probability: float  # natural logarithm
    tokens: int
    words: int
    characters: int


class ScoreMetric(Metric):
    """Reads how probable the right text is to a model: an evaluation with one of these scores, teacher forced."""

    @abstractmethod
    def statistics(self, scored: Sequence[ScoredText]) -> np.ndarray:
        """One row of numbers for each line, or for each passage of a running text."""


@dataclass(frozen=True)
class EmbeddedCorpus:
    """The vectors of queries and documents, and which documents answer which query: at least one."""

    queries: np.ndarray  # Q D
    documents: np.ndarray  # M D, each text once
    relevant: Sequence[Sequence[int]]  # for each query, rows of documents


class VectorMetric(Metric):
    """Reads vectors, those of sources and of targets: an evaluation with one of these embeds."""

    @abstractmethod
    def statistics(self, embedded: EmbeddedCorpus) -> np.ndarray:
        """One row of numbers for each query."""
