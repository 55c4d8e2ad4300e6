"""The tree of modules against the modules of the network, their files and a forward pass."""

import inspect
from pathlib import Path

import pytest
from torch import nn

import transduce
from transduce.attention.multihead import CrossAttention
from transduce.recipe.build import count_parameters
from transduce.studio.network_shapes import describe_part, module_tree, network_shapes, papers, source_place


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s . h / sqrt(d) (Vaswani 2017)", ["Vaswani 2017"]),
        (
            "(Elman 1990, Hochreiter & Schmidhuber 1997, Cho 2014)",
            ["Elman 1990", "Hochreiter & Schmidhuber 1997", "Cho 2014"],
        ),
        ("p_t = t (Luong 2015, local-m)", ["Luong 2015"]),
        (
            "grouped-query attention, (grouped-query attention, Ainslie 2023; one head: x, Shazeer 2019)",
            ["Ainslie 2023", "Shazeer 2019"],
        ),
        ("no paper (of 2 parts)", []),
    ],
)
def test_papers_are_read_from_docstrings(text: str, expected: list[str]) -> None:
    assert papers(text) == expected


def test_a_class_is_found_in_its_file() -> None:
    file, line = source_place(CrossAttention)
    root = Path(transduce.__file__).parents[1]
    assert file == "transduce/attention/multihead.py"
    assert (root / file).read_text(encoding="utf-8").splitlines()[line - 1].startswith("class CrossAttention")
    assert source_place(nn.Linear)[0] == "torch.nn.modules.linear"


def test_every_module_has_its_shape_equation_and_file(transformer_run: Path) -> None:
    model = transduce.load(transformer_run)
    sections = {one["name"]: one["rows"] for one in network_shapes(model)["sections"]}
    rows = sections["training: modules"]
    tree = module_tree(rows)
    assert [one["path"] for one in tree] == ["encoder", "decoder"]
    walked = []
    queue = list(tree)
    while queue:
        node = queue.pop()
        walked.append(node["path"])
        queue += node["children"]
        assert all(child["path"].startswith(f"{node['path']}.") for child in node["children"])
    assert sorted(walked) == sorted({row["path"] for row in rows})
    attention = next(row for row in rows if row["class"] == "SelfAttention")
    assert attention["file"] == "transduce/attention/self_attention.py"
    assert "Vaswani 2017" in attention["papers"]
    letters = {row["name"]: row["sizes"][0] for row in sections["training: letters"]}
    for row in rows:
        assert row["parameters"] == count_parameters(model.network.get_submodule(row["path"]))
        for letter, size in zip(row["letters"].split(), row["sizes"], strict=True):
            assert (letter.isdigit() and int(letter) == size) or letters[letter] == size
    (logits,) = [row for row in sections["training: step"] if row["name"] == "logits"]
    assert logits["letters"] == "B T V"
    assert logits["sizes"][-1] == model.target.size


def test_the_text_of_a_part_is_its_docstring() -> None:
    part = describe_part(nn.Linear(2, 3))
    assert (part["class"], part["text"], part["parameters"]) == ("Linear", "", 9)
    assert inspect.cleandoc(CrossAttention.__doc__ or "").startswith("Multi-head attention")
