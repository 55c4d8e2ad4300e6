"""Shape letters of every tensor: correct for each kind of model, and unambiguous."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from run_fixtures import Command

from transduce.explain.shape_recorder import ShapeEntry, ShapeRow, merge_repeated
from transduce.explain.tensor_shapes import explain_shapes
from transduce.recipe import load, parse
from transduce.recipe.build import build_model, complete_recipe, count_parameters

GRU = {"kind": "recurrent", "cell": "gru", "width": 24}
BLOCKS = {"kind": "transformer", "layers": 4, "width": 24, "heads": 4, "ff_width": 40}
GATED = {"kind": "convolutional", "layers": 2, "width": 24, "kernel": 3}
LABELS = {"target": {"kind": "labels"}}
RECIPES: dict[str, dict[str, Any]] = {
    "bahdanau": {"model": {"encoder": GRU, "decoder": {**GRU, "layers": 2, "context": "bahdanau"}}},
    "bottleneck": {"model": {"encoder": GRU, "decoder": {**GRU, "cell": "lstm", "context": "initial"}}},
    "transformer": {"model": {"encoder": BLOCKS, "decoder": BLOCKS}},
    "few key heads": {"model": {"encoder": BLOCKS, "decoder": {**BLOCKS, "kv_heads": 2}}},
    "average": {"model": {"encoder": BLOCKS, "decoder": {**BLOCKS, "token_mixer": "average"}}},
    "convolutional": {"model": {"encoder": GATED, "decoder": GATED}},
    "hybrid": {"model": {"encoder": {**BLOCKS, "width": 32, "heads": 2}, "decoder": GRU}},
    "decoder alone": {"tokens": {"shared": True}, "model": {"decoder": BLOCKS}},
    "classifier": {"tokens": LABELS, "model": {"encoder": GRU, "head": {"kind": "classifier"}}},
    "tagger": {
        "tokens": {"source": {"kind": "words"}, "target": {"kind": "words"}},
        "model": {"encoder": BLOCKS, "head": {"kind": "tagger"}},
    },
}


def test_embedding_model_has_no_generation_step() -> None:
    recipe = {
        "tokens": {"shared": True},
        "model": {"encoder": BLOCKS, "head": {"kind": "embedder", "projection": 20}},
        "training": {"objective": {"kind": "contrastive"}},
    }
    rows = explain_shapes(parse(recipe))
    assert not [row for row in rows if row.section.startswith("generation")]
    vectors = [row for row in rows if row.section == "training: vectors"]
    assert [(row.name, row.sizes[-1]) for row in vectors] == [("source", 20), ("target", 20)]
    assert letters(rows, "training: memory")["values"] == "B S D"


def rows_of(name: str) -> list[ShapeRow]:
    return explain_shapes(parse(RECIPES[name]))


def letters(rows: list[ShapeRow], section: str) -> dict[str, str]:
    return {row.name: row.letters for row in rows if row.section == section}


def check_letters(rows: list[ShapeRow]) -> None:
    """Each axis is a letter of the stage's key with that size, or the size itself; no two free letters are alike."""
    for stage in ("training", "generation"):
        key = {row.name: row.sizes[0] for row in rows if row.section == f"{stage}: letters"}
        for row in (row for row in rows if row.section.startswith(stage)):
            axes = row.letters.split()
            assert len(axes) == len(row.sizes), row
            assert [key.get(axis, axis) for axis in axes] == [
                size if axis in key else str(size) for axis, size in zip(axes, row.sizes, strict=True)
            ], row
        chosen = [size for letter, size in key.items() if letter in "BNRSTV" or letter[0] == "D"]
        assert len(set(chosen)) == len(chosen), key
        assert stage != "generation" or key["T"] == 1
        assert stage != "generation" or key["R"] == key["B"] * key["N"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_axis_has_the_size_of_its_letter(name: str) -> None:
    check_letters(rows_of(name))


@profile(max_examples=15, deadline=None)
@given(
    heads=st.integers(1, 5),
    head_width=st.sampled_from([2, 4, 6]),
    layers=st.integers(1, 3),
    kernel=st.integers(2, 4),
    decoder=st.sampled_from(["recurrent", "transformer", "convolutional"]),
)
def test_letters_are_unambiguous_for_any_recipe(
    heads: int, head_width: int, layers: int, kernel: int, decoder: str
) -> None:
    width = heads * head_width
    kinds = {
        "recurrent": {"kind": "recurrent", "width": width, "layers": layers},
        "transformer": {"kind": "transformer", "width": width, "layers": layers, "heads": heads, "ff_width": 2 * width},
        "convolutional": {"kind": "convolutional", "width": width, "layers": layers, "kernel": kernel},
    }
    rows = explain_shapes(parse({"model": {"encoder": kinds["recurrent"], "decoder": kinds[decoder]}}))
    check_letters(rows)
    assert letters(rows, "training: memory")["values"] == "B S D"
    assert letters(rows, "generation: step")["attention.cross"] == "R L H T S"


@pytest.mark.parametrize("name", ["bahdanau", "transformer", "convolutional"])
def test_shapes_of_encoder_decoder_models(name: str) -> None:
    rows = rows_of(name)
    assert letters(rows, "training: batch")["source.values"] == "B S"
    memory = letters(rows, "training: memory")
    assert (memory["values"], memory["mask"], memory["summary"]) == ("B S D", "B S", "B D")
    for stage, lead in (("training", "B"), ("generation", "R")):
        step = letters(rows, f"{stage}: step")
        assert step["logits"] == f"{lead} T V"
        assert step["attention.cross"] == f"{lead} L H T S"
        assert letters(rows, f"{stage}: state")["fixed.mask"] == "B S"
        inside = letters(rows, f"{stage}: modules")
        assert inside["decoder.embedding"] == f"{lead} T D"
        assert inside["decoder.output"] == f"{lead} T V"
    assert letters(rows, "training: modules")["encoder:values"] == "B S D"
    assert not any(name.startswith("encoder") for name in letters(rows, "generation: modules"))  # it read once


def test_shapes_of_decoder_states() -> None:
    cells = letters(rows_of("bahdanau"), "generation: state")
    assert cells["past.cells.0.0"] == "R D"
    assert cells["fixed.keys"] == cells["fixed.values"] == "B S D"
    cache = letters(rows_of("transformer"), "generation: state")
    assert cache["fixed.memory.0.0"] == cache["fixed.memory.0.1"] == "B H S K"
    assert cache["past.layers.0.0"] == cache["past.layers.0.1"] == "R H U K"
    assert letters(rows_of("few key heads"), "generation: state")["past.layers.0.0"] == "R G U K"
    assert letters(rows_of("convolutional"), "generation: state")["past.layers.0"] == "R 2 D"  # kernel - 1 rows
    assert "attention.cross" not in letters(rows_of("bottleneck"), "training: step")


def test_an_axis_of_one_gets_a_letter_only_by_its_position() -> None:
    inside = letters(rows_of("bottleneck"), "generation: modules")
    assert inside["decoder.rnn.layers.0:0"] == "R T D"
    assert inside["decoder.rnn.layers.0:1.0"] == "1 R D"  # one direction, not one token
    assert letters(rows_of("average"), "generation: state")["past.layers.0.1"] == "R 1"  # a count


def test_decoder_only_model_has_the_prompt_in_its_past() -> None:
    rows = rows_of("decoder alone")
    assert not letters(rows, "training: memory")
    assert letters(rows, "generation: state")["past.layers.0.0"] == "R H U K"
    assert letters(rows, "training: step") == {"logits": "B T V", "attention.past": "B L H T U"}
    key = {row.name: row.sizes[0] for row in rows if row.section == "training: letters"}
    assert key["U"] == key["S"] + key["T"]


def test_shapes_of_classification_heads() -> None:
    rows = rows_of("classifier")
    assert letters(rows, "training: memory")["values"] == "B S D"
    assert letters(rows, "training: modules")["head"] == "B V"
    assert letters(rows, "training: state")["fixed.logits"] == "B 1 V"
    assert letters(rows, "training: step") == {"logits": "B T V"}
    assert letters(rows_of("tagger"), "training: modules")["head"] == "B S V"


def test_different_encoder_sizes_get_primed_letters() -> None:
    rows = rows_of("hybrid")
    assert letters(rows, "training: memory") == {
        "values": "B S D'",
        "mask": "B S",
        "summary": "B D'",
        "attention": "B L' H' S S",
    }
    assert letters(rows, "training: step")["attention.cross"] == "B L H T S"


def test_a_vocabulary_as_large_as_the_width_is_not_guessed() -> None:
    rows = explain_shapes(parse(RECIPES["transformer"]), (24, 24))
    assert letters(rows, "training: step")["logits"] == "B T V"  # told by the contract
    assert letters(rows, "training: modules")["decoder.output"] == "B T 24"


def test_modules_are_in_call_order_and_equal_layers_merged() -> None:
    rows = [row for row in rows_of("transformer") if row.section == "training: modules"]
    names = [row.name.partition(":")[0] for row in rows]
    assert names.index("encoder") < names.index("encoder.embedding") < names.index("encoder.layers.0")
    assert names.index("encoder.layers.0") < names.index("encoder.final_norm") < names.index("decoder")
    assert names[-2:] == ["decoder.output", "decoder.output.projection"]
    assert not any(".blocks.1" in name for name in names)
    assert next(row for row in rows if row.name == "decoder.layers.0").meaning.startswith("x 4: ")
    assert all(row.meaning for row in rows if ":" not in row.name)


def test_different_layers_are_not_merged() -> None:
    looks = [(2, 3), (2, 4), (2, 4), (2, 3), (2, 4)]
    entries = [ShapeEntry(f"blocks.{number}", "a", (("", look),)) for number, look in enumerate(looks)]
    assert merge_repeated(entries[:2]) == entries[:2]
    assert [(entry.path, entry.meaning) for entry in merge_repeated(entries)] == [
        ("blocks.0", "x 2: a"),
        ("blocks.1", "x 3: a"),
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_parameter_counts_equal_those_of_the_model(name: str) -> None:
    recipe = complete_recipe(parse(RECIPES[name]))
    rows = explain_shapes(recipe)
    vocabulary = next(row.sizes[0] for row in rows if row.section == "training: letters" and row.name == "V")
    counted = {row.name: row.sizes[0] for row in rows if row.section == "parameters"}
    assert counted.pop("model") == sum(counted.values())
    model = build_model(recipe.model, vocabulary, vocabulary)
    assert sum(counted.values()) == count_parameters(model)


def test_explain_shapes_prints_and_writes_json(command: Command, tmp_path: Path) -> None:
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "shapes.json"
    recipe.write_text(yaml.safe_dump(RECIPES["transformer"]))
    called = command("explain-shapes", recipe, "model.decoder.layers=3", "--json", output)
    assert called.code == 0, called.err
    for told in ("training: memory", "B S D", "R L H T S", "past.layers.0.0", "x 3:", "parameters"):
        assert told in called.out
    written = [ShapeRow(**{**row, "sizes": tuple(row["sizes"])}) for row in json.loads(output.read_text())]
    content = {"model": {"encoder": BLOCKS, "decoder": {**BLOCKS, "layers": 3}}}
    assert written == explain_shapes(parse(content))


def test_explain_shapes_of_a_run_uses_its_vocabulary(command: Command, bottleneck_run: Path, tmp_path: Path) -> None:
    called = command("explain-shapes", bottleneck_run, "--json", tmp_path / "shapes.json")
    assert called.code == 0, called.err
    rows = json.loads((tmp_path / "shapes.json").read_text())
    logits = next(row for row in rows if row["section"] == "training: step" and row["name"] == "logits")
    pieces = json.loads((bottleneck_run / "tokenizer.target.json").read_text())["pieces"]
    assert logits["letters"] == "B T V"
    assert logits["sizes"][-1] == len(pieces)


def test_explain_shapes_rejects_missing_recipes_and_overrides_of_runs(
    command: Command, bottleneck_run: Path, tmp_path: Path
) -> None:
    missing = command("explain-shapes", tmp_path / "nothing.yaml")
    assert missing.code == 2
    assert "no such recipe" in missing.err
    assert "nothing.yaml" in missing.err
    empty = command("explain-shapes", tmp_path)
    assert empty.code == 2
    assert "not a run directory" in empty.err
    changed = command("explain-shapes", bottleneck_run, "model.decoder.layers=2")
    assert changed.code == 2
    assert "recipe.yaml" in changed.err


KEPT = Path(__file__).parents[2] / "recipes"
FILE_RECIPES = sorted(
    path for path in KEPT.rglob("*.yaml") if re.search("kind: (image|audio|features)", path.read_text())
)


@pytest.mark.parametrize("path", FILE_RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_sources_that_are_files_have_shapes_too(path: Path) -> None:
    recipe = load(str(path))
    rows = {(row.section, row.name): row for row in explain_shapes(recipe)}
    name = next(iter(recipe.data.sources)) if len(recipe.data.sources) > 1 else "source"
    source, memory = rows["training: batch", f"{name}.values"], rows["training: memory", "values"]
    assert len(source.sizes) > 2
    assert memory.letters.split()[:2] == ["B", "S"]
    assert memory.sizes[1] == rows["training: memory", "mask"].sizes[1]


def test_each_of_several_sources_has_its_shape() -> None:
    parts = {
        "picture": {"kind": "identity", "front": {"kind": "patches", "patch_size": 8}},
        "question": {"kind": "recurrent"},
    }
    sources = {"picture": {"kind": "image", "size": 16}, "question": {"kind": "text"}}
    encoder = {"kind": "multi_source", "width": 12, "parts": parts}
    recipe = parse({"data": {"sources": sources}, "model": {"encoder": encoder, "decoder": {**GRU, "width": 12}}})
    rows = {(row.section, row.name): row for row in explain_shapes(recipe)}
    patches, words = (rows["training: batch", f"{name}.values"] for name in parts)
    assert patches.sizes[1:] == (16, 16, 3)
    assert rows["training: memory", "values"].sizes[1] == 4 + words.sizes[1]
