"""Generation for encoded sources: batches, workers, search options, shortlists and drafts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from io import TextIOBase
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from transduce.contracts import LogitsProcessor, Strategy
from transduce.data.batching import batch_by_length
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.decoding.continuous_batching import SearchRequest, SearchShape, continuous_search, plan_searches
from transduce.decoding.logits_processors import NEVER_GENERATED
from transduce.decoding.search import SearchStep, observed_search, search, stream_search
from transduce.decoding.speculative import speculative_search
from transduce.decoding.strategies import MinimumBayesRisk
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Example, Hypothesis, Padded
from transduce.inference.long_sources import CHARACTERS_PER_TOKEN
from transduce.inference.native_search import NativeSearch, native_encoder_decoder
from transduce.inference.shortlist import NarrowedModel, OutputRows, Shortlist, ShortlistedModel, apply_shortlists
from transduce.inference.terminology import PhraseIds, constrained_request
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.kernels.native.beam_search import NativeEncoderDecoder
from transduce.modalities.source_encoding import EncodedSource, SourceEncoding, TextSourceEncoding
from transduce.model import Transducer
from transduce.recipe import GenerationRecipe, Recipe, build, explain_error

Work = TypeVar("Work")
Done = TypeVar("Done")


def map_workers(do: Callable[[Work], Done], work: Sequence[Work], workers: int, device: torch.device) -> Iterator[Done]:
    """Results of `do` for each item, computed by worker threads.

    Threads, not processes: torch releases the interpreter lock while it computes, and the weights are in memory once.
    Each worker has one core: two threads that share a small matrix wait for each other more than they compute.
    """
    if workers < 1 or (workers > 1 and device.type != "cpu"):
        raise InputError(f"{workers} workers on {device.type}", remedy="workers are for the CPU; leave them out")
    if workers == 1 or len(work) < 2:
        yield from map(do, work)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(do, work)
    finally:
        torch.set_num_threads(before)


SearchOptions = tuple[Strategy, tuple[LogitsProcessor, ...]]

# Where searches of many lines are native. In processor time beside modules with packed matrices, greedy and beam of 5:
# width 128: 4.4 and 3.7 times the speed with 1 line, 1.4 and 1.1 times with 128; width 512: 1.2 times with 1 line, 0.9
# and 0.8 times with 128.
NARROW, FEW_ROWS = 128, 8


class Searcher:
    """Searches with a network, given the encoding of its sources and the maximal length of its targets."""

    def __init__(
        self, network: Transducer, source_encoding: SourceEncoding, max_target_length: int, graphs: SearchGraphs | None
    ) -> None:
        self.network, self.source_encoding, self.max_target_length, self.graphs = (
            network,
            source_encoding,
            max_target_length,
            graphs,
        )
        self._options_of: dict[GenerationRecipe, SearchOptions] = {}
        self._with_shortlist: ShortlistSearcher | None = None

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def continuous(self) -> bool:
        """Whether searches use continuous batching: captured steps compute finished rows too."""
        return self.graphs is not None and isinstance(self.source_encoding, TextSourceEncoding)

    @cached_property
    def native(self) -> NativeEncoderDecoder | None:
        """The network for searches of texts by the native library; None: it does not have such a network."""
        return native_encoder_decoder(self.network) if isinstance(self.source_encoding, TextSourceEncoding) else None

    def search_all(
        self,
        sources: Sequence[EncodedSource],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
        *,
        workers: int = 1,
        draft: Transducer | None = None,
        phrases: Sequence[PhraseIds] | None = None,
    ) -> list[list[Hypothesis]]:
        """Hypotheses of each source, in order, best first; sources of similar length share a batch.

        Sources without a phrase that they must or must not contain are searched as if no source had one.
        """
        if phrases is not None and any(phrases):
            return self._search_constrained(sources, prefixes, settings, numbers, phrases, workers)
        lengths, found = [len(source) for source in sources], dict[int, list[Hypothesis]]()

        def find(rows: list[int]) -> list[list[Hypothesis]]:
            some = [sources[row] for row in rows]
            if draft is not None:
                return self.search_speculatively(draft, some, settings)
            forced = None if prefixes is None else [prefixes[row] for row in rows]
            return self.search_sources(some, forced, settings, [numbers[row] for row in rows])

        batches = batch_by_length(lengths, settings.batch_tokens)
        covers = self.options(settings)[0].coverage_penalty > 0  # such a search is not captured
        if self.continuous and draft is None and workers == 1 and not covers:
            batches = []
            for one in plan_searches(lengths, settings.batch_tokens):
                rows = [row for group in one.groups for row in group]
                if len(rows) <= one.slots:
                    batches.append(rows)
                else:
                    requests = [self.request(group, sources, prefixes, settings, numbers) for group in one.groups]
                    found.update(zip(rows, self.search_continuously(requests, settings, one.slots), strict=True))
        elif self.native is not None and draft is None and prefixes is None:
            found = self._search_natively(sources, settings, workers)
            batches = [] if len(found) == len(sources) else batches
        for rows, some in zip(batches, map_workers(find, batches, workers, self.device), strict=True):
            found.update(zip(rows, some, strict=True))
        return [found[row] for row in range(len(sources))]

    def _search_natively(
        self, sources: Sequence[EncodedSource], settings: GenerationRecipe, workers: int
    ) -> dict[int, list[Hypothesis]]:
        """Hypotheses by row, found by the native library; of no row where it does not have such a search."""
        (strategy, processors), lengths = self.options(settings), [len(source) + 1 for source in sources]
        max_lengths = self.max_lengths(sources, settings).tolist()

        def find(part: tuple[list[int], int]) -> list[list[Hypothesis]] | None:
            rows, slots = part
            longest, most = (max(some[row] for row in rows) for some in (lengths, max_lengths))
            opened = NativeSearch.open(
                self.native,
                self.network,
                strategy,
                SearchShape(min(slots, len(rows)), longest, 0, most),
                processors=processors,
                nbest=num_hypotheses(strategy, settings),
                interrupt=np.zeros(1, np.int64),
            )
            if opened is None:
                return None
            return opened.search_all([sources[row] for row in rows], [max_lengths[row] for row in rows])

        assert self.native is not None
        rows_together = min(len(sources), settings.batch_tokens // max(lengths, default=1)) * strategy.width
        wide = self.native.width > NARROW and rows_together > FEW_ROWS
        if wide or settings.detected_first or settings.forced_prefix:
            return {}
        parts = list[tuple[list[int], int]]()
        for one in plan_searches(lengths, settings.batch_tokens):
            rows = [row for group in one.groups for row in group]
            parts += [(rows[first::workers], one.slots) for first in range(min(workers, len(rows)))]
        found = dict[int, list[Hypothesis]]()
        for (rows, _), some in zip(parts, map_workers(find, parts, workers, self.device), strict=True):
            if some is None:
                return {}
            found.update(zip(rows, some, strict=True))
        return found

    def _search_constrained(
        self,
        sources: Sequence[EncodedSource],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
        phrases: Sequence[PhraseIds],
        workers: int,
    ) -> list[list[Hypothesis]]:
        """Those with constraints in batches of their own, the others without."""
        found = dict[int, list[Hypothesis]]()
        bound = [row for row, one in enumerate(phrases) if one]

        def some(rows: list[int]) -> dict[str, Any]:
            forced = None if prefixes is None else [prefixes[row] for row in rows]
            numbered = [numbers[row] for row in rows]
            return {"sources": [sources[row] for row in rows], "prefixes": forced, "numbers": numbered}

        def find(group: list[int]) -> list[list[Hypothesis]]:
            rows = [bound[index] for index in group]
            return self.search_sources(**some(rows), settings=settings, phrases=[phrases[row] for row in rows])

        batches = batch_by_length([len(sources[row]) for row in bound], settings.batch_tokens)
        for group, hypotheses in zip(batches, map_workers(find, batches, workers, self.device), strict=True):
            found.update(zip((bound[index] for index in group), hypotheses, strict=True))
        free = [row for row in range(len(sources)) if row not in found]
        found.update(zip(free, self.search_all(**some(free), settings=settings, workers=workers), strict=True))
        return [found[row] for row in range(len(sources))]

    def search_continuously(
        self, requests: Sequence[SearchRequest], settings: GenerationRecipe, slots: int
    ) -> list[list[Hypothesis]]:
        """Hypotheses of requests that enter a search with this number of slots one after the other."""
        strategy, processors = self.options(settings)
        return continuous_search(
            self.network,
            requests,
            strategy,
            slots=slots,
            processors=processors,
            nbest=num_hypotheses(strategy, settings),
            graphs=self.graphs,
        )

    def request(
        self,
        rows: list[int],
        sources: Sequence[EncodedSource],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
    ) -> SearchRequest:
        """These rows of the sources as one request."""
        some = [sources[row] for row in rows]
        forced = None if prefixes is None else [prefixes[row] for row in rows]
        batch, max_lengths = self.source_encoding.batch(some), self.max_lengths(some, settings)
        return _request(settings, batch, max_lengths, forced, [numbers[row] for row in rows])

    def search_sources(
        self,
        sources: Sequence[EncodedSource],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
        phrases: Sequence[PhraseIds] | None = None,
    ) -> list[list[Hypothesis]]:
        """Hypotheses of one batch; `numbers` seed the samples of each source."""
        batch, max_lengths = self.source_encoding.batch(sources), self.max_lengths(sources, settings)
        if settings.detected_first:
            prefixes = self.detect(batch, settings, prefixes)
        request = _request(settings, batch, max_lengths, prefixes, numbers)
        if phrases is not None:
            request = constrained_request(request, phrases, settings, self.max_target_length)
        return self._search(settings, request)

    @torch.inference_mode()
    def detect(
        self, batch: Batch, settings: GenerationRecipe, prefixes: list[list[int]] | None = None
    ) -> list[list[int]]:
        """The prefixes with the most probable of the tokens `detected_first` at their beginning, such as a language."""
        prefixes = prefixes or [list(settings.forced_prefix)] * batch.size
        begin = torch.full((batch.size, 1), BOS, device=self.device)
        logits = self.network.advance(begin, self.network.start(batch.to(self.device))).logits[:, -1]
        best = logits[:, list(settings.detected_first)].argmax(1).tolist()
        return [[settings.detected_first[one], *prefix[1:]] for one, prefix in zip(best, prefixes, strict=True)]

    def search_speculatively(
        self, draft: Transducer, sources: Sequence[EncodedSource], settings: GenerationRecipe
    ) -> list[list[Hypothesis]]:
        """Greedy hypotheses by speculative decoding with a draft network."""
        batch, (_, processors) = self.source_encoding.batch(sources).to(self.device), self.options(settings)
        found = speculative_search(
            self.network, draft, batch, max_lengths=self.max_lengths(sources, settings), processors=processors
        )
        return [[one] for one in found]

    def search_batch(
        self,
        settings: GenerationRecipe,
        batch: Batch,
        max_lengths: Tensor,  # B
        prefixes: list[list[int]] | None,
        numbers: Sequence[int],
    ) -> list[list[Hypothesis]]:
        return self._search(settings, _request(settings, batch, max_lengths, prefixes, numbers))

    def _search(self, settings: GenerationRecipe, request: SearchRequest) -> list[list[Hypothesis]]:
        arguments = self._arguments(settings, request)
        return search(
            self.network,
            **arguments,
            nbest=num_hypotheses(arguments["strategy"], settings),
            graphs=self.graphs,
            constraints=None if request.constraints is None else request.constraints.to(self.device),
        )

    def _arguments(self, settings: GenerationRecipe, request: SearchRequest) -> dict[str, Any]:
        """The arguments that a search and a stream have in common."""
        strategy, processors = self.options(settings)
        return {
            "batch": request.batch.to(self.device),
            "strategy": strategy,
            "max_lengths": request.max_lengths,
            "processors": processors,
            "prefix": None if request.prefix is None else request.prefix.to(self.device),
            "seeds": request.seeds,
        }

    @torch.inference_mode()
    def next_tokens(self, source: EncodedSource, prefix: Sequence[int], k: int) -> list[int]:
        """The k most probable tokens after these, </s> excepted."""
        batch = self.source_encoding.batch([source]).to(self.device)
        read = torch.tensor([[BOS, *prefix]], device=self.device)
        log_probs = self.network.advance(read, self.network.start(batch)).logits[:, -1].log_softmax(-1)
        allowed = NEVER_GENERATED.apply(log_probs, read)[0].index_fill(
            0, torch.tensor(EOS, device=self.device), -torch.inf
        )
        best = allowed.topk(min(k, int((allowed > -torch.inf).sum())))
        return [int(one) for one in best.indices]

    def stream(self, source: EncodedSource, settings: GenerationRecipe, number: int) -> Iterator[tuple[int, float]]:
        """The tokens of the best hypothesis of one source, each as soon as it is certain, with its log-probability."""
        return stream_search(self.network, **self._single(source, settings, number))

    def observe(
        self, source: EncodedSource, settings: GenerationRecipe, number: int
    ) -> Generator[SearchStep, None, list[Hypothesis]]:
        """Every selection of the search of one source, as it is made; returns its hypotheses, best first."""
        return observed_search(self.network, **self._single(source, settings, number))

    def _single(self, source: EncodedSource, settings: GenerationRecipe, number: int) -> dict[str, Any]:
        """The arguments of the search of one source."""
        batch, max_lengths = self.source_encoding.batch([source]), self.max_lengths([source], settings)
        prefixes = self.detect(batch, settings) if settings.detected_first else None
        return self._arguments(settings, _request(settings, batch, max_lengths, prefixes, [number]))

    def with_shortlist(self, shortlist: Shortlist) -> ShortlistSearcher:
        """A searcher over a shortlist; the last one is cached, as unpacking the output layer takes a moment."""
        if self._with_shortlist is None or self._with_shortlist.shortlist is not shortlist:
            self._with_shortlist = ShortlistSearcher(self, shortlist)
        return self._with_shortlist

    def max_lengths(self, sources: Sequence[EncodedSource], settings: GenerationRecipe) -> Tensor:
        """B: maximal number of tokens of each output."""
        lengths = torch.tensor([len(source) for source in sources])
        return (lengths * settings.max_ratio + 50).clamp(max=min(settings.max_length, self.max_target_length)).long()

    def options(self, settings: GenerationRecipe) -> SearchOptions:
        """One object for equal settings: captured graphs are found by its identity."""
        if settings not in self._options_of:
            self._options_of[settings] = build.build_strategy(settings), tuple(build.build_logits_processors(settings))
        return self._options_of[settings]


def num_hypotheses(strategy: Strategy, settings: GenerationRecipe) -> int | None:
    """Hypotheses of each source that a search returns; None: all, which are ranked again."""
    return None if isinstance(strategy, MinimumBayesRisk) else settings.nbest


def _request(
    settings: GenerationRecipe,
    batch: Batch,
    max_lengths: Tensor,  # B
    prefixes: list[list[int]] | None,
    numbers: Sequence[int],
) -> SearchRequest:
    """A batch with its prefixes, or those of the settings, and a seed for each number."""
    if prefixes is None and settings.forced_prefix:
        prefixes = [list(settings.forced_prefix)] * batch.size
    seeds = sample_seeds(settings, numbers)
    return SearchRequest(batch, max_lengths, None if prefixes is None else Padded.from_rows(prefixes), seeds)


def sample_seeds(settings: GenerationRecipe, numbers: Sequence[int]) -> list[int]:
    """A seed for each source by its number."""
    return [(settings.seed * 1_000_003 + number) % 2**63 for number in numbers]


class ShortlistSearcher(Searcher):
    """Searches over the tokens that a shortlist gives each source. Steps are not captured: output layers change."""

    native = None

    def __init__(self, whole: Searcher, shortlist: Shortlist) -> None:
        super().__init__(whole.network, whole.source_encoding, whole.max_target_length, None)
        self.shortlist, self._rows = shortlist, OutputRows(whole.network)

    def _search(self, settings: GenerationRecipe, request: SearchRequest) -> list[list[Hypothesis]]:
        source = request.batch.source
        if source is None or source.ids is None or request.batch.extra:
            raise InputError("a shortlist is for sources that are one text", remedy="leave it out")
        if request.constraints is not None:
            raise InputError("constraints need all tokens of the vocabulary", remedy="leave out the shortlist")
        if settings.logits_processors:  # which know the tokens by their ids, and not by the rows of a shortlist
            raise InputError("logits_processors need the scores of all tokens", remedy="leave out the shortlist")
        allowed, prefix = self.shortlist.allowed(source), request.prefix
        prefixes: list[list[int]] = []
        if prefix is not None:
            prefixes = [row[real].tolist() for row, real in zip(prefix.values, prefix.mask, strict=True)]
        for row, tokens in enumerate(prefixes):  # forced tokens are allowed
            allowed[row, tokens] = True
        if settings.forced_bos is not None:
            allowed[:, settings.forced_bos] = True
        network = apply_shortlists(self._rows, allowed)
        if prefix is not None:
            prefix = Padded.from_rows([network.indices_of(tokens) for tokens in prefixes])
        searcher = Searcher(network, self.source_encoding, self.max_target_length, None)
        found = searcher._search(_in_shortlist(settings, network), replace(request, prefix=prefix))
        return [[network.original_ids(one) for one in line] for line in found]


def _in_shortlist(settings: GenerationRecipe, network: NarrowedModel | ShortlistedModel) -> GenerationRecipe:
    """The settings with the tokens that they name as rows of a shortlist."""
    names = ("forced_prefix", "suppress", "suppress_first")
    changes: dict[str, Any] = {name: tuple(network.indices_of(getattr(settings, name))) for name in names}
    if settings.forced_bos is not None:
        changes["forced_bos"] = network.indices_of([settings.forced_bos])[0]
    return settings.model_copy(update=changes)


def check_texts(what: str, texts: Iterable[str]) -> list[str]:
    """The texts as a list. A single string, which would be read character by character, and other items are refused."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise InputError(f"{what} takes a list of texts, or another iterable", remedy=f'write model.{what}(["..."])')
    given = list(without_line_feeds(texts))
    for number, text in enumerate(given):
        if not isinstance(text, str):
            raise InputError(f"text {number} of {len(given)} is {text!r}", remedy="give strings")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"text {number} of {len(given)} is not valid Unicode", remedy="write it in UTF-8")
    return given


def without_line_feeds(texts: Iterable[str]) -> Iterable[str]:
    """The lines of an open file without their line feeds; other texts as they are."""
    return (line.removesuffix("\n") for line in texts) if isinstance(texts, TextIOBase) else texts


def check_pairs(what: str, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs of a source and a target as a list; anything else is refused."""
    remedy = f'write model.{what}([("source", "target")])'
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise InputError(f"{what} takes pairs of a source and a target", remedy=remedy)
    given = list(pairs)
    for number, pair in enumerate(given):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InputError(f"pair {number} of {len(given)} is {pair!r}", remedy=remedy)
    sides = [check_texts(what, [pair[side] for pair in given]) for side in (0, 1)]
    return list(zip(*sides, strict=True))


def encode_truncated(
    encoding: SourceEncoding, texts: Sequence[str], most: int
) -> tuple[list[EncodedSource], list[bool]]:
    """Sources of at most `most` tokens, and which of them were cut. A source of a modality has its length by itself."""
    begins = texts
    if encoding.reads_text:
        begins = [text[: most * CHARACTERS_PER_TOKEN] for text in texts]
    whole = encoding.encode(begins)
    sources = [encoding.truncate(source, most) for source in whole]
    parts = zip(texts, begins, whole, sources, strict=True)
    return sources, [len(text) > len(begin) or len(all_) > len(kept) for text, begin, all_, kept in parts]


def warn_of_cuts(texts: Sequence[str], cuts: Sequence[bool], most: int) -> None:
    """Nothing is cut silently."""
    if any(cuts):
        first = next(text for text, cut in zip(texts, cuts, strict=True) if cut)
        limit = f"{most:,} tokens (`max_source_length`)"
        warnings.warn(f"{sum(cuts):,} texts were cut to {limit}, the first: {beginning(first)!r}", stacklevel=4)


def warn_of_parts(most: int) -> None:
    """One text for all calls, which is shown once."""
    warnings.warn(f"texts of more than {most:,} tokens (`max_source_length`) were split into parts", stacklevel=5)


def beginning(text: str, size: int = 40) -> str:
    """The first characters of a text, for a message."""
    return text if len(text) <= size else text[: size - 1] + "…"


class TargetLengthError(InputError):
    """A target that is longer than the model scores."""

    def __init__(self, text: str, length: str, most: int) -> None:
        self.text = text
        problem = f"a target of {length}, and at most {most:,} tokens are scored: {beginning(text)!r}"
        super().__init__(problem, remedy="split it; the limit is `max_source_length`, and the positions of the model")


def check_target_characters(targets: Sequence[str], most: int) -> None:
    """Refuses a target with more characters than its tokens could have."""
    for text in targets:
        if len(text) > most * CHARACTERS_PER_TOKEN:
            raise TargetLengthError(text, f"{len(text):,} characters", most)


def check_target_lengths(targets: Sequence[str], ids: Sequence[Sequence[int]], most: int) -> None:
    """Refuses a target that is too long: the score of its beginning would be that of another text."""
    for text, tokens in zip(targets, ids, strict=True):
        if len(tokens) > most:
            raise TargetLengthError(text, f"{len(tokens):,} tokens", most)


@contextmanager
def located_errors(examples: Sequence[Example]) -> Iterator[None]:
    """Adds file and line to the error of a target that is too long."""
    try:
        yield
    except TargetLengthError as error:
        locations = (f"{one.file}:{one.line}" for one in examples if error.text in (one.source, one.target))
        raise InputError(error.problem, where=next(locations, ""), remedy=error.remedy) from None


MBR_SAMPLES = 32  # candidates of minimum Bayes risk where no number is given


def change_settings(settings: GenerationRecipe, changes: Mapping[str, Any]) -> GenerationRecipe:
    """The settings with all changes but None; a wrong name or value is an InputError."""
    known = settings.model_dump()
    changes = {name: value for name, value in changes.items() if value is not None}
    try:
        chosen = GenerationRecipe.model_validate({**known, **changes})
    except ValidationError as error:
        raise explain_error(error, "generation settings", known) from None
    if changes.get("strategy") == "sample" and "beam" not in changes:
        # One sample for each requested hypothesis: the most probable of several would be biased.
        return chosen.model_copy(update={"beam": 1})
    if chosen.strategy_kind == "mbr" and "beam" not in changes and chosen.strategy_kind != settings.strategy_kind:
        return chosen.model_copy(update={"beam": MBR_SAMPLES})
    several = chosen.nbest > 1 or ("beam" in changes and chosen.beam > 1)
    if chosen.strategy_kind == "greedy" and several and "strategy" not in changes:
        return chosen.model_copy(update={"strategy": "beam"})
    return chosen


def check_draft(
    recipe: Recipe, draft: Sequence[Tokenizer], model: Sequence[Tokenizer], chosen: GenerationRecipe, prefixes: Any
) -> None:
    """A draft has the tokens of the model, and is for greedy search without a prefix."""
    if [one.fingerprint for one in draft] != [one.fingerprint for one in model] or recipe.data.format == "text":
        raise InputError(
            "the draft model has another vocabulary", remedy="train both from the same data with the same `tokens`"
        )
    if (chosen.strategy_kind != "greedy" and chosen.beam != 1) or chosen.strategy_kind == "sample" or chosen.nbest != 1:
        raise InputError("speculative decoding needs greedy search", remedy="add --set strategy=greedy")
    if prefixes is not None:
        raise InputError("speculative decoding does not support prefixes", remedy="leave out one of them")


def check_shortlist(
    shortlist: Shortlist, tokenizers: tuple[Tokenizer, Tokenizer], *, drafted: bool, alone: bool
) -> None:
    """A shortlist has the tokens of the model and needs a source; a draft is not restricted by it."""
    if drafted:
        raise InputError("speculative decoding does not support shortlists", remedy="leave out one of them")
    if alone:
        raise InputError("a shortlist needs a source, and a language model has none", remedy="leave the shortlist out")
    shortlist.check(tokenizers)


def length_limits(network: nn.Module, *, alone: bool, sourceless: bool) -> tuple[int, int]:
    """Most tokens of a source and of a target: learned positions end somewhere. `alone`: there is no encoder."""
    ends: dict[bool, list[int]] = {True: [2**31], False: [2**31]}  # of the decoder, of the rest
    for name, part in network.named_modules():
        if isinstance(end := getattr(part, "max_positions", None), int):
            ends["decoder" in name.split(".")].append(end)  # of a member, where it is an ensemble
    target = min(ends[True])
    if sourceless:
        return 0, target
    # One position is for </s>; a decoder-only model keeps half of its positions for the target.
    return (target // 2 - 1, target // 2) if alone else (min(ends[False]) - 1, target)
