"""The code of docs/extending.md: parts in files of the user, trained, searched with, evaluated and converted."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_fixtures import GPT2, hf_ids, write_tokenizer
from run_fixtures import colour_pairs
from torch.testing import assert_close
from typer.testing import CliRunner

import transduce
from transduce import contracts
from transduce.cli import app
from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.recipe.registry import REGISTRIES, user_classes

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"complete file `(\w+\.py)`.*?```python\n(.*?)```", PAGE, re.DOTALL))
RECIPES = [yaml.safe_load(text) for text in re.findall(r"```yml\n(.*?)```", PAGE, re.DOTALL)]
WORDS = {"source": {"kind": "words"}, "target": {"kind": "words"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files of the page."""
    monkeypatch.chdir(tmp_path)
    for name, code in FILES.items():
        Path(name).write_text(code, encoding="utf-8")
    return tmp_path


def recipe_with(name: str) -> dict[str, Any]:
    (recipe,) = [recipe for recipe in RECIPES if name in str(recipe)]
    return recipe


def train(recipe: dict[str, Any], pairs: list[tuple[str, str]]) -> Any:
    """Trains a recipe of the page for a few updates, and loads the run."""
    Path("pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    recipe["data"] = {"train": "pairs.tsv", "dev": "pairs.tsv", "cache": "cache", **recipe.get("data", {})}
    recipe["tokens"] = WORDS
    every = {"steps": 4, "validate_every": 2, "checkpoint_every": 2}
    recipe["training"] = {**every, **recipe.get("training", {})}
    result = transduce.train(recipe, "run")
    with pytest.raises(InputError, match="trust_user_code"):
        transduce.load("run")
    return result, transduce.load("run", trust_user_code=True)


def test_parts_of_the_user_are_trained_searched_with_and_evaluated(folder: Path) -> None:
    recipe = recipe_with("Cosine")
    assert len(user_classes(parse(recipe))) == 4
    result, model = train(recipe, colour_pairs(60))
    assert set(result.scores["dev"].scores) == {"exact", "first_word"}
    assert type(model.network.decoder.context.attend.score).__name__ == "Cosine"
    assert len(model.generate(["red green"])) == 1


def test_objective_of_the_user_trains(folder: Path) -> None:
    _, model = train(recipe_with("Focal"), colour_pairs(60))
    assert len(model.generate(["red green"])) == 1


def test_modality_of_the_user_is_read(folder: Path) -> None:
    for number in range(20):
        Path(f"{number}.txt").write_text(" ".join(["0.5", "-1.25", "3"][: 1 + number % 3]))
    _, model = train(recipe_with("TimeSeries"), [(f"{number}.txt", "up down") for number in range(20)])
    assert len(model.generate(["2.txt"])) == 1


@pytest.mark.parametrize("name", ["Ngram", "MovingAverage"])
def test_network_of_the_user_fulfils_the_laws(name: str, folder: Path) -> None:
    """Whole = stepwise, causality, and independence of padding."""
    recipe = complete_recipe(parse({"tokens": WORDS, **recipe_with(name)}))
    torch.manual_seed(1)
    model = build_model(recipe.model, 11, 11).eval()
    assert any(type(part).__name__ == name for part in model.modules())
    source = Padded.from_rows([[4, 5, 6, 2], [7, 2]])
    tokens = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 4]])
    with torch.no_grad():
        whole = model.advance(tokens, model.start(Batch(source))).logits
        state, steps = model.start(Batch(source)), []
        for step in range(tokens.size(1)):
            one = model.advance(tokens[:, step : step + 1], state)
            state, steps = one.state, [*steps, one.logits]
        assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
        changed = tokens.clone()
        changed[:, 2] = 10
        assert_close(model.advance(changed, model.start(Batch(source))).logits[:, :2], whole[:, :2])
        alone = model.advance(tokens[1:], model.start(Batch(Padded.from_rows([[7, 2]])))).logits
        assert_close(alone, whole[1:], rtol=1e-4, atol=1e-5)
        mask = torch.tensor([[True, True, False, False], [True] * 4])  # right padding leaves the state as it was
        padded = model.advance(tokens, model.start(Batch(source)), mask).state
        following = torch.full((2, 1), 6)
        short = model.advance(tokens[:, :2], model.start(Batch(source))).state
        found, expected = (model.advance(following, state).logits[0] for state in (padded, short))
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_family_of_the_user_equals_the_transformers_library(folder: Path) -> None:
    library = pytest.importorskip("transformers")
    config = library.OPTConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24,
        max_position_embeddings=40, word_embed_proj_dim=16, pad_token_id=22, **GPT2,
    )  # fmt: skip
    torch.manual_seed(3)
    opt = library.OPTForCausalLM(config).eval()
    opt.save_pretrained(folder / "given")
    write_tokenizer(folder / "given", "gpt2")
    result = CliRunner().invoke(app, ["convert", "given", "run", "--family", "my_family:OPT"])
    assert result.exit_code == 0, result.output
    model = transduce.load("run", device="cpu")
    ids = torch.tensor([[1, 5, 9, 7], [1, 20, 11, 4]])
    rows = model.target.vocabulary.backend_ids
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = opt(input_ids=torch.tensor([hf_ids(model, row) for row in ids.tolist()])).logits
    known = torch.tensor([n for n, row in enumerate(rows) if row >= 0 and n > 1])
    found = model.logits(target=ids).log_softmax(-1)[..., known]
    assert_close(found, expected.log_softmax(-1)[..., torch.tensor(rows)[known]], rtol=1e-4, atol=1e-4)


def test_the_page_names_every_contract_and_registry() -> None:
    source = Path(transduce.__file__).parent
    for contract in REGISTRIES:
        name = contract.__name__
        assert f"`{name}(" in PAGE or any(f"`{one.__name__}(" in PAGE for one in contract.__subclasses__()), name
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py|[a-z_]+\.py)` \|\n", PAGE):
        assert (source / path).is_file(), path


def test_every_extension_point_is_in_the_module_of_contracts() -> None:
    listed = set(re.findall(r"\b[A-Z]\w+", (contracts.__doc__ or "").partition("Constructors")[0])) - {"Contracts"}
    roots = tuple(REGISTRIES)
    classes = [one for one in vars(contracts).values() if isinstance(one, type) and issubclass(one, roots)]
    points = {one.__name__ for one in classes if one.__module__ == contracts.__name__} - {"Metric"}
    assert {contract.__module__ for contract in REGISTRIES} == {contracts.__name__}
    assert listed == points | {"Family"}
