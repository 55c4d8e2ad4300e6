"""Beam tree: every token that a search considered, step by step while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from transduce.decoding.search import SearchStep
from transduce.errors import InputError
from transduce.flow import Hypothesis
from transduce.inference import Model
from transduce.kernels.beam_update import BeamState
from transduce.studio.attention import Text
from transduce.studio.runs import Studio, StudioRun

Status = Literal["active", "expanded", "pruned", "finished"]
Path = tuple[int, ...]  # the tokens from the root


@dataclass
class BeamNode:
    """A token after a prefix. The log-probabilities from the root to a leaf add up to the score of its hypothesis."""

    id: int
    parent: int | None  # None: the root
    step: int  # tokens from the root
    token: str
    log_prob: float
    total: float  # the sum from the root
    status: Status  # active: in the beam; expanded: it was; finished: among the best that have ended


class BeamTree:
    """The tree of one search. A node is identified by its path, so that equal samples share it."""

    def __init__(self, model: Model, width: int) -> None:
        self.model, self.width = model, width
        self.nodes: dict[Path, BeamNode] = {(): BeamNode(0, None, 0, "<s>", 0.0, 0.0, "active")}

    def add(self, step: SearchStep) -> list[BeamNode]:
        """The nodes that are new or changed after one selection."""
        before = {path: node.status for path, node in self.nodes.items()}
        rows = _rows(step.before)
        for path, scores in rows.values():
            self._add_path(path, scores)
            self.nodes[path].status = "expanded"
        self._add_candidates(step, rows)
        self._set_statuses(step.after)
        return [node for path, node in self.nodes.items() if before.get(path) != node.status]

    def _add_path(self, path: Path, scores: tuple[float, ...]) -> None:
        """A row of the beam; of a forced prefix the nodes are new."""
        for length in range(1, len(path) + 1):
            if path[:length] not in self.nodes:
                self._add(path[:length], scores[length - 1], "expanded")

    def _add(self, path: Path, log_prob: float, status: Status) -> None:
        if path in self.nodes:
            return
        parent, token = self.nodes[path[:-1]], self.model.target.piece(path[-1])
        total = parent.total + log_prob
        self.nodes[path] = BeamNode(len(self.nodes), parent.id, len(path), token, log_prob, total, status)

    def _add_candidates(self, step: SearchStep, rows: dict[int, tuple[Path, tuple[float, ...]]]) -> None:
        """The N best tokens of each row, and the selected ones."""
        for row, (path, _) in rows.items():
            log_probs = step.log_probs[0, row]
            best = log_probs.topk(min(self.width, len(log_probs)))
            for token, log_prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if log_prob > float("-inf"):
                    self._add((*path, token), log_prob, "pruned")
        chosen = zip(step.selection.parents[0].tolist(), step.selection.tokens[0].tolist(), strict=True)
        for (row, token), total in zip(chosen, step.selection.totals[0].tolist(), strict=True):
            if row in rows and total > float("-inf"):
                self._add((*rows[row][0], token), float(step.log_probs[0, row, token]), "pruned")

    def _set_statuses(self, beams: BeamState) -> None:
        """Which nodes are in the beam now, and which are among the best finished ones."""
        active = {path for path, _ in _rows(beams).values()}
        finished = set(_finished(beams))
        for path, node in self.nodes.items():
            if path in finished:
                node.status = "finished"
            elif path in active:
                node.status = "active"
            elif node.status in ("finished", "active"):  # finished ones of a better rank have displaced it
                node.status = "pruned"

    def describe(self, hypotheses: list[Hypothesis], text: str) -> list[dict[str, Any]]:
        """The hypotheses, best first, each with its leaf."""
        unknown = self.model.source_encoding.oov_words(text)
        return [
            {
                "leaf": self.nodes[one.ids].id,
                "text": self.model.target.decode(one.text_ids, unknown),
                "score": one.score,
                "rank": one.rank,
                "complete": one.complete,
            }
            for one in hypotheses
        ]


def _rows(beams: BeamState) -> dict[int, tuple[Path, tuple[float, ...]]]:
    """The active rows of the only source: their tokens and log-probabilities."""
    length, found = int(beams.lengths[0]), {}
    for row, total in enumerate(beams.totals[0].tolist()):
        if total > float("-inf"):
            kept = slice(beams.history.size(2) - length, None)
            found[row] = tuple(beams.history[0, row, kept].tolist()), tuple(beams.token_scores[0, row, kept].tolist())
    return found


def _finished(beams: BeamState) -> Iterator[Path]:
    finished = beams.finished
    entries = zip(finished.ids[0], finished.ranks[0].tolist(), finished.lengths[0].tolist(), strict=True)
    for ids, rank, length in entries:
        if rank > float("-inf"):
            yield tuple(ids[len(ids) - length :].tolist())


def beam_events(model: Model, text: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """The search of one text as events: its start, the nodes that are new or changed at each step, its end.

    Settings are those of the recipe's `generation` section.
    """
    chosen = model.settings(**settings)
    if model.sourceless or not text.strip() or chosen.strategy_kind == "mbr":
        raise InputError(
            "the tree is that of the search for one source", remedy="give a text, and another strategy than mbr"
        )
    _, sources, _ = model.source_parts([text], chosen.model_copy(update={"long_sources": "truncate"}))
    search = model.searcher.observe(sources[0], chosen, 0)
    tree: BeamTree | None = None
    while True:
        try:
            step = next(search)
        except StopIteration as end:
            assert tree is not None
            yield {"kind": "end", "hypotheses": tree.describe(end.value, text)}
            return
        if tree is None:
            width = step.after.totals.size(1)
            tree = BeamTree(model, width)
            yield {"kind": "start", "width": width, "nodes": [asdict(tree.nodes[()])]}
        yield {"kind": "step", "nodes": [asdict(node) for node in tree.add(step)]}


Width = Annotated[int, Query(ge=1, le=16)]
SearchStrategy = Literal["beam", "huggingface_beam", "diverse_beam", "greedy"]


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/beam")
    def beam(run: str = "", source: Text = "", beam: Width = 4, strategy: SearchStrategy = "beam") -> dict[str, Any]:
        chosen = studio.run(run)
        with chosen.lock:
            return {"events": list(beam_events(chosen.model, source, **_settings(beam, strategy)))}

    @routes.get("/beam/events")
    def events(
        run: str = "", source: Text = "", beam: Width = 4, strategy: SearchStrategy = "beam"
    ) -> StreamingResponse:
        found = live_events(studio.run(run), source, **_settings(beam, strategy))
        lines = (f"data: {json.dumps(event, allow_nan=False)}\n\n" for event in found)
        return StreamingResponse(lines, media_type="text/event-stream")

    return routes


def _settings(beam: int, strategy: SearchStrategy) -> dict[str, Any]:
    """A width that the strategy can have: groups of two."""
    if strategy == "diverse_beam":
        return {"strategy": {"kind": strategy, "groups": 2}, "beam": beam + beam % 2}
    return {"strategy": strategy} if strategy == "greedy" else {"strategy": strategy, "beam": beam}


def live_events(run: StudioRun, source: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """The events of a search as they happen. It runs in one thread, which holds the lock of the run."""
    queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def search() -> None:
        try:
            with run.lock:
                for event in beam_events(run.model, source, **settings):
                    queue.put(event)
        except InputError as error:
            queue.put({"kind": "error", "problem": error.problem, "remedy": error.remedy})
        finally:
            queue.put(None)

    Thread(target=search, name="beam search", daemon=True).start()
    while (event := queue.get()) is not None:
        yield event
