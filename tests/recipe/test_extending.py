"""The code of docs/extending.md: parts in a file of the user, trained, searched with and evaluated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from run_fixtures import colour_pairs

import transduce
from transduce.errors import InputError
from transduce.recipe import parse
from transduce.recipe.registry import user_classes

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (content,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(content)


def test_parts_of_the_user_are_trained_searched_with_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_parts.py").write_text(block("python"), encoding="utf-8")
    Path("pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(60)))
    recipe = yaml.safe_load(block("yml"))
    recipe["data"] = {"train": "pairs.tsv", "dev": "pairs.tsv", "cache": "cache"}
    recipe["tokens"] = {"source": {"kind": "words"}, "target": {"kind": "words"}}
    recipe["training"] |= {"validate_every": 2, "checkpoint_every": 2}
    assert len(user_classes(parse(recipe))) == 4
    result = transduce.train(recipe, "run")
    assert set(result.scores["dev"].scores) == {"exact", "first_word"}
    with pytest.raises(InputError, match="trust_user_code"):
        transduce.load("run")
    model = transduce.load("run", trust_user_code=True)
    assert type(model.network.decoder.context.attend.score).__name__ == "Cosine"
    assert len(model.generate(["red green"])) == 1


def test_the_page_names_every_contract_and_registry() -> None:
    from transduce.recipe.registry import REGISTRIES

    source = Path(transduce.__file__).parent
    for contract in REGISTRIES:
        name = contract.__name__
        assert f"`{name}(" in PAGE or any(f"`{one.__name__}(" in PAGE for one in contract.__subclasses__()), name
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py|[a-z_]+\.py)` \|\n", PAGE):
        assert (source / path).is_file(), path
