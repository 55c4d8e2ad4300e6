"""Images on the command line: chosen recipes, one image, a folder, explanations."""

import json
import subprocess
from pathlib import Path

import pytest
from PIL import Image as Pillow
from typer.testing import CliRunner

import transduce
from transduce.autoconfig import recipe_for
from transduce.cli import app
from transduce.cli.display import _relative, _shell_quote
from transduce.recipe.build import complete_recipe
from transduce.synthetic import write_files
from transduce.training.experiment import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    write_files("shapes", place / "shapes", 30, 1)
    return place


@pytest.fixture(scope="module", params=["grid", "patches"])
def run(request, folder) -> Path:
    """Three updates: enough to be asked."""
    fronts = {
        "grid": {"kind": "cnn_grid", "channels": 8, "stages": 3},
        "patches": {"kind": "patches", "patch_size": 8, "leading": 1},
    }
    recipe = {
        "data": {
            "train": str(folder / "shapes" / "pairs.tsv"),
            "sources": {"picture": {"kind": "image", "size": 32, "flip": 0.5}},
            "cache": str(folder / "cache"),
            "dev_size": 5,
        },
        "tokens": {"target": {"kind": "words"}},
        "model": {
            "encoder": {"kind": "identity", "width": 16, "front": fronts[request.param]},
            "decoder": {"kind": "recurrent", "width": 16, "context": "bahdanau"},
        },
        "training": {
            "steps": 3,
            "batch_tokens": 400,
            "validate_every": 3,
            "checkpoint_every": 3,
            "validate_examples": 2,
        },
        "generation": {"beam": 2, "max_length": 5},
        "evaluation": {"metrics": ["bleu1", "cider"], "references": "by_source", "resamples": 5},
    }
    train(recipe, folder / request.param)
    return folder / request.param


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_generate_reads_one_image_and_a_folder(run, folder):
    pictures = sorted((folder / "shapes" / "files").iterdir())
    alone = call("generate", run, pictures[0])
    every = call("generate", run, folder / "shapes" / "files").splitlines()
    assert alone.count("\n") == 1
    assert len(every) == len(pictures)
    assert every[0] == alone.strip("\n")
    listed = folder / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in pictures))
    assert call("generate", run, listed).splitlines() == every
    pairs = call("generate", run, folder / "shapes" / "files", "--pairs").splitlines()
    assert pairs[1] == f"{pictures[1]}\t{every[1]}"


def test_image_is_explained_with_png_and_html(run, folder, tmp_path):
    picture = next((folder / "shapes" / "files").iterdir())
    message = call("explain", run, picture, "--html", tmp_path / "x.html", "--png", tmp_path / "x.png")
    assert "x.html" in message
    assert "x.png" in message
    assert Pillow.open(tmp_path / "x.png").width > 300
    page = (tmp_path / "x.html").read_text()
    data = json.loads(page.partition('id="page">')[2].partition("</script>")[0])["explanations"][0]
    (scene,) = data["pictures"]
    tokens = data["explanation"]["source_tokens"]
    cells = scene["grid"][0] * scene["grid"][1]
    assert cells == 16
    assert scene["begin"] + cells == len(tokens)  # <cls> stands before the grid
    assert tokens[scene["begin"]] == "1,1"
    explained = transduce.load(run).explain(str(picture))
    assert explained.visual_sources[0].pixels.shape == (32, 32, 3)


def test_folder_is_explained_on_one_page(run, folder, tmp_path):
    some = tmp_path / "some"
    some.mkdir()
    for path in sorted((folder / "shapes" / "files").iterdir())[:2]:
        (some / path.name).write_bytes(path.read_bytes())
    call("explain", run, some, "--html", tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text().count('"pictures":[{') == 2
    refused = CliRunner().invoke(app, ["explain", str(run), str(some), "--png", str(tmp_path / "x.png")])
    assert refused.exit_code != 0


def test_folder_without_images_is_reported(run, tmp_path):
    (tmp_path / "notes.txt").write_text("no")
    done = CliRunner().invoke(app, ["generate", str(run), str(tmp_path)])
    assert done.exit_code != 0
    assert "no file that the model can read" in str(done.exception)


def test_suggested_commands_use_relative_paths_and_escape_tabs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    near = _relative(f"{tmp_path}/a/x.png\twhat's it ?\t/other/y.png")
    assert near == "a/x.png\twhat's it ?\t/other/y.png"
    for line in (near, "plain 'text'", "a\\b\tc $HOME `d`\t!"):
        finished = subprocess.run(
            ["bash", "-c", f"printf %s {_shell_quote(line)}"], capture_output=True, text=True, check=True
        )
        assert finished.stdout == line
        assert "\t" not in _shell_quote(line)


def test_unreadable_image_is_reported(run, tmp_path):
    (tmp_path / "x.png").write_text("no")
    for name in (tmp_path / "x.png", tmp_path / "away.png"):
        done = CliRunner().invoke(app, ["explain", str(run), str(name)])
        assert done.exit_code != 0
        assert "Traceback" not in done.output


def test_recipe_is_chosen_for_captions_and_for_labels(folder, tmp_path):
    captions = recipe_for(str(folder / "shapes" / "pairs.tsv"), ["data.sources.picture.size=32"], "caption")
    filled = complete_recipe(captions)
    assert filled.data.sources["picture"]["size"] == 32
    assert filled.data.sources["picture"]["kind"] == "image"
    assert filled.evaluation.references == "by_source"
    for label, path in zip("abab", sorted((folder / "shapes" / "files").iterdir()), strict=False):
        (tmp_path / label).mkdir(exist_ok=True)
        (tmp_path / label / path.name).write_bytes(path.read_bytes())
    labels = complete_recipe(recipe_for(str(tmp_path), [], "classify-images"))
    assert labels.model.head["kind"] == "classifier"
    assert labels.tokens.target.kind == "labels"
