"""Attention maps of the studio: explanation of one source, one map, its tiles, all heads, attributions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from fastapi import APIRouter, Depends, Query, Response

from transduce.errors import InputError
from transduce.explain.attention import READ_AT, ReadAt, combine_heads
from transduce.explain.faithfulness import SIGNED, seed_divergences
from transduce.explain.records import attribution_record, explanation_record, short_floats
from transduce.studio.runs import Studio, StudioRun

Kind = Literal["cross", "encoder", "decoder"]
WHOLE = 64 * 64  # cells of the largest map that is sent as JSON; larger ones are sent as tiles
THUMBNAIL = 24  # rows and columns of the picture of a head
Text = Annotated[str, Query(max_length=20_000)]


@dataclass(frozen=True)
class SourceQuery:
    """What every view asks about: a run, a source, a given target or none, and interventions, one a line."""

    run: str = ""
    source: Text = ""
    target: Text = ""
    change: Text = ""

    @property
    def changes(self) -> tuple[str, ...]:
        return tuple(line for line in self.change.splitlines() if line.strip())


@dataclass(frozen=True)
class MapChoice:
    """Which map is shown: attention of a place, layer and head, or an attribution."""

    kind: Kind = "cross"
    layer: str = "mean"
    head: str = "mean"
    method: str = "attention"
    read_at: ReadAt = "output"


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/explanation")
    def explanation(query: Annotated[SourceQuery, Depends()]) -> dict[str, Any]:
        return describe_explanation(studio.run(query.run), query)

    @routes.get("/map")
    def attention_map(
        query: Annotated[SourceQuery, Depends()], choice: Annotated[MapChoice, Depends()]
    ) -> dict[str, Any]:
        return describe_map(studio.run(query.run), query, choice)

    @routes.get("/map/tile")
    def tile(
        query: Annotated[SourceQuery, Depends()],
        choice: Annotated[MapChoice, Depends()],
        top: Annotated[int, Query(ge=0)],
        left: Annotated[int, Query(ge=0)],
        size: Annotated[int, Query(ge=1, le=1024)] = 256,
    ) -> Response:
        part = map_weights(studio.run(query.run), query, choice)[top : top + size, left : left + size]
        return Response(np.ascontiguousarray(part, "<f4").tobytes(), media_type="application/octet-stream")

    @routes.get("/heads")
    def heads(query: Annotated[SourceQuery, Depends()], kind: Kind = "cross") -> dict[str, Any]:
        return describe_heads(studio.run(query.run), query, kind)

    @routes.get("/attribution")
    def attribution(query: Annotated[SourceQuery, Depends()], method: str) -> dict[str, Any]:
        return describe_attribution(studio, query, method)

    return routes


def attention_of(run: StudioRun, query: SourceQuery, kind: Kind) -> np.ndarray | None:
    """L H R C: cross-attention, or the self-attention of the encoder or the decoder; None: there is none."""
    explained = run.explanation(query.source, query.target, changes=query.changes)
    if kind == ("decoder" if run.shape == "language-model" else "cross"):
        return None if run.shape == "encoder-head" else explained.attention
    if kind == "encoder" and explained.self_attention is not None:
        return explained.self_attention
    if run.shape != "encoder-decoder":
        return None
    return run.once(("self-attention", query), lambda: _self_attention(run, query)).get(kind)


@torch.inference_mode()
def _self_attention(run: StudioRun, query: SourceQuery) -> dict[str, np.ndarray]:
    """The self-attention of encoder and decoder, teacher forced, where they have one: L H R C each."""
    network: Any = run.changed(query.changes).network
    batch, read = run.teacher_forcing(query.source, query.target, query.changes)
    memory = network.encoder(batch, with_attention=True)
    step = network.advance(read, network.start(batch), with_attention=True)
    found = {"encoder": memory.attention, "decoder": None if step.attention is None else step.attention.past}
    return {name: one[0].float().cpu().numpy() for name, one in found.items() if one is not None}


def describe_explanation(run: StudioRun, query: SourceQuery) -> dict[str, Any]:
    """Tokens, scores, alternatives, warnings, and the sizes of the attention that can be shown."""
    explained = run.explanation(query.source, query.target, changes=query.changes)
    weights = {kind: attention_of(run, query, kind) for kind in get_args(Kind)}
    kinds = {kind: one for kind, one in weights.items() if one is not None and one.size}
    warnings = () if query.target else run.warnings(query.source, query.changes)
    return explanation_record(explained, warnings, kinds, forced=bool(query.target))


def map_weights(run: StudioRun, query: SourceQuery, choice: MapChoice) -> np.ndarray:
    """R C: the weights of one map."""
    return run.once(("map", query, choice), lambda: _map_weights(run, query, choice))


def _map_weights(run: StudioRun, query: SourceQuery, choice: MapChoice) -> np.ndarray:
    if choice.method != "attention":
        explained = run.explanation(query.source, query.target, (choice.method,), query.changes)
        return explained.attributions[choice.method]
    layer, head = (int(one) if one.isdigit() else one for one in (choice.layer, choice.head))
    if choice.kind == "cross" and run.shape != "encoder-head":
        explained = run.explanation(query.source, query.target, changes=query.changes)
        return replace(explained, read_at=choice.read_at).map(layer, head).weights  # type: ignore[arg-type]
    attention = attention_of(run, query, choice.kind)
    return combine_heads(np.zeros((0, 0, 0, 0)) if attention is None else attention, layer, head)  # type: ignore[arg-type]


def map_labels(run: StudioRun, query: SourceQuery, choice: MapChoice) -> tuple[list[str], list[str]]:
    """The tokens of the rows and of the columns."""
    explained = run.explanation(query.source, query.target, changes=query.changes)
    source, written = list(explained.source_tokens), list(explained.target_tokens)
    if choice.method == "attention" and choice.kind == "encoder":
        return source, source
    if choice.method == "attention" and choice.kind == "decoder":
        return written, ["<s>", *written[:-1]]
    return written, source


def describe_map(run: StudioRun, query: SourceQuery, choice: MapChoice) -> dict[str, Any]:
    """A map with its labels; a large one without its weights, which are sent as tiles."""
    weights = map_weights(run, query, choice)
    rows, columns = map_labels(run, query, choice)
    return {
        "rows": rows,
        "columns": columns,
        "weights": short_floats(weights) if weights.size <= WHOLE else None,
        "largest": float(np.abs(weights).max(initial=0)),
        "signed": choice.method in SIGNED,
        "method": choice.method,
        "reading": READ_AT[choice.read_at],
    }


def describe_heads(run: StudioRun, query: SourceQuery, kind: Kind) -> dict[str, Any]:
    """A small picture of every head: the largest weight of each block of cells."""
    attention = attention_of(run, query, kind)
    if attention is None:
        raise InputError("this model has no such attention", where="kind", remedy="choose another kind of attention")
    return {"kind": kind, "pictures": [[short_floats(thumbnail(one)) for one in layer] for layer in attention]}


def thumbnail(weights: np.ndarray) -> np.ndarray:
    """At most `THUMBNAIL` rows and columns, each cell the maximum of a block."""
    for axis in (0, 1):
        if weights.shape[axis] > THUMBNAIL:
            begins = np.linspace(0, weights.shape[axis], THUMBNAIL, endpoint=False).astype(int)
            weights = np.maximum.reduceat(weights, begins, axis=axis)
    return weights


def describe_attribution(studio: Studio, query: SourceQuery, method: str) -> dict[str, Any]:
    """An attribution with its measures; also how far it differs from those of open runs with other seeds."""
    run = studio.run(query.run)
    explained = run.explanation(query.source, query.target, (method,), query.changes)
    record = attribution_record(explained, method)
    others = [] if query.changes else studio.other_seeds(run)
    if others:
        maps = [one.plain_attribution(query.source, explained.output, method) for one in others]
        divergences = seed_divergences([explained.attributions[method], *maps])  # P T
        record["seeds"] = {
            "runs": [one.name for one in others],
            "mean": divergences.mean(0).tolist(),
            "low": divergences.min(0).tolist(),
            "high": divergences.max(0).tolist(),
        }
        record["measures"]["seed_variance"] = float(divergences.mean())
    return record
