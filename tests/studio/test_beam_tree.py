"""The beam tree against the search that it shows, and against a forced decoding of every path."""

from typing import Any

import pytest
import torch

from transduce import Model
from transduce.flow import BOS
from transduce.studio.beam_tree import beam_events


def tree_of(model: Model, text: str, **settings: Any) -> tuple[dict[int, Any], list[dict[str, Any]], list[Any]]:
    """The nodes as a browser has them after all events, the hypotheses, and the events."""
    nodes: dict[int, Any] = {}
    events = list(beam_events(model, text, **settings))
    for event in events[:-1]:
        nodes |= {node["id"]: node for node in event["nodes"]}
    return nodes, events[-1]["hypotheses"], events


def path_to(nodes: dict[int, Any], leaf: int) -> list[Any]:
    path = [nodes[leaf]]
    while path[0]["parent"] is not None:
        path.insert(0, nodes[path[0]["parent"]])
    return path


@pytest.mark.parametrize("strategy", ["beam", "huggingface_beam", "diverse_beam"])
def test_the_sum_of_a_path_is_the_score_of_its_hypothesis(model: Model, strategy: str) -> None:
    nodes, hypotheses, _ = tree_of(model, "red blue green", beam=3, strategy=strategy)
    searched = model.generate(["red blue green"], beam=3, nbest=3, strategy=strategy)[0]
    assert [one["text"] for one in hypotheses] == [one.text for one in searched.nbest]
    leaves = [one["id"] for one in nodes.values() if one["status"] == "finished"]
    assert set(leaves) == {one["leaf"] for one in hypotheses}
    assert len(leaves) == 3 or strategy == "diverse_beam"  # one for each beam, but groups may find the same output
    for one, same in zip(hypotheses, searched.nbest, strict=True):
        path = path_to(nodes, one["leaf"])
        assert sum(node["log_prob"] for node in path) == pytest.approx(same.score, abs=1e-4)
        assert path[-1]["total"] == pytest.approx(one["score"], abs=1e-4)
        assert tuple(node["token"] for node in path[1:]) == same.tokens


def test_every_log_probability_is_that_of_forced_decoding(model: Model) -> None:
    nodes, _, _ = tree_of(model, "red blue", beam=2)
    batch = model.source_encoding.batch(model.source_encoding.encode(["red blue"]))
    pieces = {model.target.piece(number): number for number in range(model.target.size)}
    for node in nodes.values():
        if node["parent"] is not None:
            *prefix, last = [pieces[one["token"]] for one in path_to(nodes, node["id"])[1:]]
            with torch.inference_mode():
                step = model.network.advance(torch.tensor([[BOS, *prefix]]), model.network.start(batch))
            expected = step.logits[0, -1].log_softmax(-1)[last]
            assert node["log_prob"] == pytest.approx(float(expected), abs=1e-4)


def test_pruned_nodes_are_those_that_no_hypothesis_uses(model: Model) -> None:
    nodes, hypotheses, events = tree_of(model, "red blue green", beam=2)
    used = {node["id"] for one in hypotheses for node in path_to(nodes, one["leaf"])}
    parents = {node["parent"] for node in nodes.values()}
    leaves = [node for node in nodes.values() if node["id"] not in parents]
    assert {node["status"] for node in leaves} <= {"finished", "pruned"}
    assert {node["id"] for node in leaves if node["status"] == "pruned"}.isdisjoint(used)
    assert any(node["status"] == "pruned" for node in leaves)
    assert [event["kind"] for event in events] == ["start", *["step"] * (len(events) - 2), "end"]


def test_a_forced_prefix_is_part_of_the_tree(model: Model) -> None:
    forced = model.target.encode("GREEN").ids[:1]
    nodes, hypotheses, _ = tree_of(model, "red blue", beam=2, forced_prefix=tuple(forced))
    firsts = {path_to(nodes, one["leaf"])[1]["token"] for one in hypotheses}
    assert firsts == {model.target.piece(forced[0])}
    total = sum(node["log_prob"] for node in path_to(nodes, hypotheses[0]["leaf"]))
    assert total == pytest.approx(hypotheses[0]["score"], abs=1e-4)
