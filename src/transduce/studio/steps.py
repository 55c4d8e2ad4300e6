"""Steps of the studio: the most probable tokens of each step; outputs with and without interventions."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, Query

from transduce.errors import InputError
from transduce.explain.records import finite
from transduce.flow import SPECIALS
from transduce.studio.attention import SourceQuery, Text, describe_explanation
from transduce.studio.runs import Studio, StudioRun
from transduce.studio.training_history import token_diff


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/steps")
    def steps(
        query: Annotated[SourceQuery, Depends()], k: Annotated[int, Query(ge=1, le=50)] = 8, probe: Text = ""
    ) -> dict[str, Any]:
        return describe_steps(studio.run(query.run), query, k, probe)

    @routes.get("/what-if")
    def what_if(query: Annotated[SourceQuery, Depends()], edited: Text = "") -> dict[str, Any]:
        return describe_change(studio.run(query.run), query, edited)

    return routes


@torch.inference_mode()
def step_log_probabilities(run: StudioRun, query: SourceQuery) -> torch.Tensor:
    """T V: log p of every token at every step of the target, given the tokens before it."""
    network = run.changed(query.changes).network
    batch, read = run.teacher_forcing(query.source, query.target, query.changes)
    return network.advance(read, network.start(batch)).logits[0].float().log_softmax(-1).cpu()


def describe_steps(run: StudioRun, query: SourceQuery, k: int, probe: str = "") -> dict[str, Any]:
    """For each step the top k tokens, the entropy, and rank and probability of the reference and of another token."""
    if not run.describe()["generates"]:
        raise InputError("this model writes no text step by step", remedy="choose a run with a decoder")
    with run.lock:
        scores = run.once(("steps", query), lambda: step_log_probabilities(run, query))
        ids = run.decoded(query.source, query.target, query.changes).hypothesis.ids
        tokens = run.explanation(query.source, query.target, changes=query.changes).target_tokens
    probed = None if not probe else find_token(run, probe)
    return {
        "tokens": list(tokens),
        "probe": probe,
        "vocabulary": scores.size(1),
        "steps": [_step(run, row, id_, k, probed) for row, id_ in zip(scores, ids, strict=True)],
    }


def _step(run: StudioRun, scores: torch.Tensor, reference: int, k: int, probed: int | None) -> dict[str, Any]:
    best = scores.topk(min(k, scores.numel()))
    probabilities = scores.exp()
    pieces = [run.model.target.piece(id_) for id_ in best.indices.tolist()]
    entropy = -(probabilities * scores.clamp(min=-1e9)).sum().item()
    return {
        "top": [
            {"token": piece, "probability": value}
            for piece, value in zip(pieces, best.values.exp().tolist(), strict=True)
        ],
        "entropy": finite(entropy),
        "reference": _place(run, scores, reference),
        "probe": None if probed is None else _place(run, scores, probed),
    }


def _place(run: StudioRun, scores: torch.Tensor, id_: int) -> dict[str, Any]:
    """Rank and probability of one token; the most probable one has rank 1."""
    own = scores[id_]
    return {
        "token": run.model.target.piece(id_),
        "probability": own.exp().item(),
        "rank": int((scores > own).sum()) + 1,
    }


def find_token(run: StudioRun, text: str) -> int:
    """The number of a target token, given as the vocabulary or as a text has it."""
    target = run.model.target
    ids = [SPECIALS.index(text)] if text in SPECIALS else target.encode_batch([text])[0]
    named = [id_ for id_ in range(target.size) if target.piece(id_) == text]
    if not named and len(ids) != 1:
        raise InputError(f"{text!r} is not one token of the target", where="probe", remedy="give one token")
    return named[0] if named else int(ids[0])


def describe_change(run: StudioRun, query: SourceQuery, edited: str) -> dict[str, Any]:
    """The output of the model, its output for an edited source or with interventions, and the difference of the two."""
    before = describe_explanation(run, SourceQuery(query.run, query.source))
    after = describe_explanation(run, SourceQuery(query.run, edited or query.source, change=query.change))
    diff = token_diff(before["target_tokens"], after["target_tokens"])
    return {"before": before, "after": after, "diff": diff, "changes": list(query.changes)}
