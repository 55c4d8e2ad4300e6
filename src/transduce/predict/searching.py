"""Sources that were read and settings in, the hypotheses that a network finds for each out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transduce import build
from transduce.contracts import Rule, Strategy
from transduce.data.batching import ordered
from transduce.data.reading import Reading, Source, TextReading
from transduce.decoding.drafting import speculate
from transduce.decoding.graphs import Graphs
from transduce.decoding.loop import search
from transduce.decoding.refilling import Wanted, plan, refill
from transduce.errors import InputError
from transduce.flow import Batch, Hypothesis, Padded
from transduce.model import Transducer
from transduce.predict.workers import spread
from transduce.recipe import GenerationRecipe
from transduce.shortlist import OutputRows, Shortlist, narrow

Chooser = tuple[Strategy, tuple[Rule, ...]]


class Searcher:
    """A network that is asked, how its sources are read, and where its targets end."""

    def __init__(self, network: Transducer, reading: Reading, reach: int, graphs: Graphs | None) -> None:
        self.network, self.reading, self.reach, self.graphs = network, reading, reach, graphs
        self._choosers: dict[GenerationRecipe, Chooser] = {}
        self._listed: ListedSearcher | None = None

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def refills(self) -> bool:
        """Whether places of a search are filled again: where steps are recorded, rows that are done would go along."""
        return self.graphs is not None and isinstance(self.reading, TextReading)

    def every(
        self,
        sources: Sequence[Source],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
        *,
        workers: int = 1,
        draft: Transducer | None = None,
    ) -> list[list[Hypothesis]]:
        """What is found for each source, in order, best first; sources of like length are searched together."""
        lengths, found = [len(source) for source in sources], dict[int, list[Hypothesis]]()

        def find(rows: list[int]) -> list[list[Hypothesis]]:
            some = [sources[row] for row in rows]
            if draft is not None:
                return self.ahead(draft, some, settings)
            begun = None if prefixes is None else [prefixes[row] for row in rows]
            return self.sources(some, begun, settings, [numbers[row] for row in rows])

        batches = ordered(lengths, settings.batch_tokens)
        if self.refills and draft is None and workers == 1:
            batches = []
            for one in plan(lengths, settings.batch_tokens):
                rows = [row for group in one.groups for row in group]
                if len(rows) <= one.places:
                    batches.append(rows)
                else:
                    wanted = [self.wanted(group, sources, prefixes, settings, numbers) for group in one.groups]
                    found.update(zip(rows, self.refilled(wanted, settings, one.places), strict=True))
        for rows, some in zip(batches, spread(find, batches, workers, self.device), strict=True):
            found.update(zip(rows, some, strict=True))
        return [found[row] for row in range(len(sources))]

    def refilled(self, wanted: Sequence[Wanted], settings: GenerationRecipe, places: int) -> list[list[Hypothesis]]:
        """The same for sources that come one group after the other into so many places."""
        strategy, rules = self._chooser(settings)
        return refill(
            self.network, wanted, strategy, places=places, rules=rules, best=settings.nbest, graphs=self.graphs
        )

    def wanted(
        self,
        rows: list[int],
        sources: Sequence[Source],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
    ) -> Wanted:
        """These rows of all sources, as a group that comes in together."""
        some = [sources[row] for row in rows]
        begun = [prefixes[row] for row in rows] if prefixes is not None else [list(settings.begun)] * len(rows)
        return Wanted(
            self.reading.batch(some),
            self._longest(some, settings),
            Padded.from_rows(begun) if prefixes is not None or settings.begun else None,
            _seeds(settings, [numbers[row] for row in rows]),
        )

    def sources(
        self,
        sources: Sequence[Source],
        prefixes: list[list[int]] | None,
        settings: GenerationRecipe,
        numbers: Sequence[int],
    ) -> list[list[Hypothesis]]:
        """The same for one batch; `numbers` seed the draws of each."""
        return self.batch(settings, self.reading.batch(sources), self._longest(sources, settings), prefixes, numbers)

    def ahead(self, draft: Transducer, sources: Sequence[Source], settings: GenerationRecipe) -> list[list[Hypothesis]]:
        """The same by greedy search, where a quick network proposes."""
        batch, (_, rules) = self.reading.batch(sources).to(self.device), self._chooser(settings)
        found = speculate(self.network, draft, batch, longest=self._longest(sources, settings), rules=rules)
        return [[one] for one in found]

    def batch(
        self,
        settings: GenerationRecipe,
        batch: Batch,
        longest: Tensor,  # B
        prefixes: list[list[int]] | None,
        numbers: Sequence[int],
    ) -> list[list[Hypothesis]]:
        strategy, rules = self._chooser(settings)
        if prefixes is None and settings.begun:
            prefixes = [list(settings.begun)] * batch.size
        return search(
            self.network,
            batch.to(self.device),
            strategy,
            longest=longest,
            rules=rules,
            prefix=None if prefixes is None else Padded.from_rows(prefixes).to(self.device),
            seeds=_seeds(settings, numbers),
            best=settings.nbest,
            graphs=self.graphs,
        )

    def listed(self, shortlist: Shortlist) -> ListedSearcher:
        """The same over a shortlist; the last one is kept, as taking an output layer apart takes a moment."""
        if self._listed is None or self._listed.shortlist is not shortlist:
            self._listed = ListedSearcher(self, shortlist)
        return self._listed

    def _longest(self, sources: Sequence[Source], settings: GenerationRecipe) -> Tensor:
        """B: most tokens of what is said of each."""
        lengths = torch.tensor([len(source) for source in sources])
        return (lengths * settings.max_ratio + 50).clamp(max=min(settings.max_length, self.reach)).long()

    def _chooser(self, settings: GenerationRecipe) -> Chooser:
        """One object for the same settings: a recording is found again by it."""
        if settings not in self._choosers:
            self._choosers[settings] = build.build_strategy(settings), tuple(build.build_rules(settings))
        return self._choosers[settings]


def _seeds(settings: GenerationRecipe, numbers: Sequence[int]) -> list[int]:
    return [(settings.seed * 1_000_003 + number) % 2**63 for number in numbers]


class ListedSearcher(Searcher):
    """The same over the few tokens that a shortlist gives each line. Its steps are not recorded: layers change."""

    def __init__(self, whole: Searcher, shortlist: Shortlist) -> None:
        super().__init__(whole.network, whole.reading, whole.reach, None)
        self.shortlist, self._rows = shortlist, OutputRows(whole.network)

    def batch(
        self,
        settings: GenerationRecipe,
        batch: Batch,
        longest: Tensor,  # B
        prefixes: list[list[int]] | None,
        numbers: Sequence[int],
    ) -> list[list[Hypothesis]]:
        if batch.source is None or batch.source.ids is None or batch.extra:
            raise InputError("a shortlist is for sources that are one text", remedy="leave it out")
        if prefixes is None and settings.begun:
            prefixes = [list(settings.begun)] * batch.size
        allowed = self.shortlist.allowed(batch.source)
        for row, prefix in enumerate(prefixes or []):  # what a line is given to say, it may say
            allowed[row, prefix] = True
        if settings.first is not None:
            allowed[:, settings.first] = True
        network = narrow(self._rows, allowed)
        changes = {name: tuple(network.places(getattr(settings, name))) for name in ("begun", "never", "never_first")}
        first = None if settings.first is None else network.places([settings.first])[0]
        small = settings.model_copy(update={**changes, "first": first})
        begun = None if prefixes is None else [network.places(prefix) for prefix in prefixes]
        found = Searcher(network, self.reading, self.reach, None).batch(small, batch, longest, begun, numbers)
        return [[network.named(one) for one in line] for line in found]
