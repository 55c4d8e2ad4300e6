"""A newcomer's session: the commands of the README, in their order, in an empty folder with small data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from run_fixtures import Command, colour_pairs

import transduce
from transduce.cli.train import TASKS
from transduce.recipe import override
from transduce.synthetic.dates import split

ROOT = Path(__file__).parents[2]
# Commands that are not run here, and where they are.
ELSEWHERE = {
    "transduce train captions.tsv": "tests/modalities/image/test_image_commands.py",
    "transduce explain runs/captions": "tests/modalities/image/test_image_commands.py",
    "transduce train pairs.tsv --effort best": "tests/training/test_portfolio_search.py",
    "transduce train pairs.tsv --ensemble": "tests/training/test_ensemble_run.py",
    "transduce evaluate runs/five": "tests/training/test_ensemble_run.py",
    "transduce train train.en,train.de": "tests/cli/test_commands.py",
    "transduce train opus.jsonl": "tests/data/readers/test_formats.py",
    "transduce train recipe.yaml": "tests/transfer/test_init_and_freezing.py",
    "transduce serve": "tests/serving/test_server_processes.py",
    "transduce explain-shapes": "tests/explain/test_tensor_shapes.py",
    "transduce export runs/pairs": "tests/interop/test_onnx.py",
    "transduce search runs/vectors": "tests/cli/test_embed_commands.py",
    "transduce merge runs/adapted": "tests/transfer/test_lora.py",
    "transduce compare a.yaml b.yaml": "tests/evaluation/test_comparison.py",
    "transduce claims": "tests/claims",
    "transduce convert marian-folder": "tests/interop/legacy/test_marian.py",
    "transduce demo --task pronounce": "tests/synthetic/test_pronunciation.py",
}
TINY = (
    "training.steps=4",
    "training.validate_every=4",
    "training.checkpoint_every=4",
    "training.batch_tokens=512",
    "model.encoder.width=16",
    "evaluation.resamples=2",
    "data.dev_size=8",
)


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if "transduce " in line.partition("  #")[0]]


def smaller(line: str) -> str:
    """The same command with settings for seconds of training."""
    line = line.replace("...", "red green")
    return f"{line} {' '.join(TINY)}" if line.startswith("transduce train") else line


def write_files(folder: Path) -> None:
    """What the README calls the files of a user."""
    pairs = colour_pairs(120)
    table = "".join(f"{source}\t{target}\n" for source, target in pairs)
    contents = {
        "pairs.tsv": table,
        "test.tsv": "".join(f"{source}\t{target}\n" for source, target in colour_pairs(5, seed=7)),
        "reviews.tsv": "".join(f"{source} {number}\t{'ab'[number % 2]}\n" for number, (source, _) in enumerate(pairs)),
        "links.txt": "0-0\n" * len(pairs),
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")


def train_demo(folder: Path) -> None:
    """runs/demo as `make demo` leaves it, hardly trained on a few dates."""
    data = dict(zip(("train", "dev", "test"), split(200, 10, 10), strict=True))
    for name, examples in data.items():
        text = "".join(f"{one.source}\t{one.target}\n" for one in examples)
        (folder / f"dates.{name}.tsv").write_text(text, encoding="utf-8")
    content = {**TASKS["dates"].recipe, "data": {name: f"dates.{name}.tsv" for name in data}}
    transduce.train(override(content, TINY[:4]), "runs/demo")


def test_every_command_of_the_readme_is_run_somewhere() -> None:
    lines = readme_commands()
    assert len(lines) > 20
    for begin, place in ELSEWHERE.items():
        assert any(line.startswith(begin) for line in lines), f"{begin}: the README has no such command"
        assert (ROOT / place).exists()


@pytest.mark.slow
def test_the_commands_of_the_readme_work_in_their_order(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served: list[object] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: served.append(server))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    write_files(tmp_path)
    train_demo(tmp_path)
    for line in readme_commands():
        if any(line.startswith(begin) for begin in ELSEWHERE):
            continue
        before, pipe, after = smaller(line).partition(" | ")
        words = shlex.split(after if pipe else before)
        stdin = f"{shlex.split(before)[1]}\n".encode() if pipe else b""
        called = command(*words[1:], stdin=stdin)
        assert called.code == 0, f"{line}\n{called.err}"
    assert len(served) == 1  # the studio


def test_completion_is_offered_for_every_shell(command: Command) -> None:
    shown = command("--help").out
    assert "--install-completion" in shown
    assert "--show-completion" in shown
