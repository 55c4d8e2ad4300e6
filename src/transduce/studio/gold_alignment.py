"""Word alignment of the studio against gold links: one pair that is shown, and the files of the command line."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from transduce.errors import InputError
from transduce.explain.alignment import (
    AttentionSelection,
    GoldAlignment,
    align_file,
    alignment_error_rate,
    error_rate,
    parse_pharaoh,
    pharaoh,
    read_gold,
)
from transduce.explain.attention import to_words
from transduce.explain.records import short_floats
from transduce.studio.attention import MapChoice, SourceQuery, Text
from transduce.studio.runs import GoldFiles, Studio, StudioRun


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/gold")
    def gold(
        query: Annotated[SourceQuery, Depends()], choice: Annotated[MapChoice, Depends()], gold: Text = ""
    ) -> dict[str, Any]:
        return describe_pair(studio.run(query.run), query, choice, gold)

    @routes.get("/gold/file")
    def file(choice: Annotated[MapChoice, Depends()], run: str = "") -> dict[str, Any]:
        if studio.gold is None:
            raise InputError("no gold alignments were given", remedy="transduce studio RUN --pairs FILE --gold FILE")
        files, chosen = studio.gold, studio.run(run)
        return chosen.once(("gold", choice), lambda: describe_file(chosen, choice, files))

    return routes


def selection(choice: MapChoice) -> AttentionSelection:
    """The attention that an alignment is read from, between words."""
    layer, head = (int(one) if one.isdigit() else one for one in (choice.layer, choice.head))
    return AttentionSelection(layer, head, "word", choice.read_at)


def describe_pair(run: StudioRun, query: SourceQuery, choice: MapChoice, gold: str) -> dict[str, Any]:
    """The map between words, its links, and their error rate against gold links such as `0-1 1?0`."""
    explained = run.explanation(query.source, query.target)
    chosen = selection(choice)
    words = to_words(explained.map(chosen.layer, chosen.head))
    links, known = chosen.links(explained), parse_pharaoh(gold, "gold")
    _check_range(known, len(words.source_tokens), len(words.target_tokens))
    return {
        "rows": list(words.target_tokens),
        "columns": list(words.source_tokens),
        "weights": short_floats(words.weights),
        "links": [list(link) for link in links],
        "pharaoh": pharaoh(links),
        "sure": sorted(map(list, known.sure)),
        "possible": sorted(map(list, known.possible)),
        "error_rate": alignment_error_rate(links, known.sure, known.possible) if gold.strip() else None,
    }


def _check_range(gold: GoldAlignment, sources: int, targets: int) -> None:
    for source, target in sorted(gold.possible):
        if source >= sources or target >= targets:
            raise InputError(
                f"the link {source}-{target} is outside {sources} source and {targets} output words",
                where="gold",
                remedy="count words from 0",
            )


def describe_file(run: StudioRun, choice: MapChoice, files: GoldFiles) -> dict[str, Any]:
    """The alignment error rate of the files that the command line named, as `transduce align --gold` computes it."""
    gold = read_gold(files.gold)
    found = [
        links for window in align_file(run.model, files.pairs, None, "union", selection(choice)) for links in window
    ]
    rate = error_rate(found, gold, files.gold)
    rows = zip(found, gold, strict=True)
    rates = [alignment_error_rate(links, one.sure, one.possible) for links, one in rows]
    return {"pairs": len(found), "error_rate": rate, "error_rates": rates, "pharaoh": [pharaoh(one) for one in found]}
