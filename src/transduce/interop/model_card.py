"""Model card: README.md of an exported folder, with what the model is, how it is loaded, and how it searches."""

from __future__ import annotations

from pathlib import Path

from transduce.inference import Model
from transduce.recipe import Corpus, GenerationRecipe, Recipe, dump
from transduce.run import Run

FILE = "README.md"
LIMITS = (
    "The scores hold for data like the training data. Outputs for other languages, domains or lengths were not "
    "measured. A model can repeat what its training data say, errors and prejudice included."
)
LOADING = {
    "huggingface": "`{kind}.from_pretrained` of transformers, or `transduce.load`",
    "onnx": "ONNX Runtime; with Optimum too, where `config.json` names an architecture of transformers",
    "ctranslate2": "the CTranslate2 library; the tokenizers are those of the run",
    "bundle": "`transduce.load`, or any command of Transduce",
}
LIBRARIES = {"huggingface": "transformers", "onnx": "onnx", "ctranslate2": "ctranslate2", "bundle": "transduce"}


def model_card(model: Model, to: str, architecture: str = "AutoModel") -> bytes:
    """The text of the card; nothing is said about data, which a run does not hold."""
    recipe = model.recipe.model
    parts = {"encoder": recipe.encoder, "decoder": recipe.decoder, "head": recipe.head}
    rows = [f"| {side} | {_described(part)} |" for side, part in parts.items() if part is not None]
    sources = ", ".join(model.recipe.data.sources) or "text"
    lines = [
        "---", f"library_name: {LIBRARIES[to]}", "tags: [transduce]", "---", "", "# Exported model", "",
        "| | |", "|---|---|", *rows,
        f"| parameters | {model.parameters:,} |", f"| source | {sources} |",
        f"| tokens | {model.source.size:,} in, {model.target.size:,} out |", "",
        f"Written by Transduce. It is opened with {LOADING[to].format(kind=architecture)}.",
    ]  # fmt: skip
    if recipe.decoder is not None:
        lines += ["", "## Search", "", _search(model.recipe.generation, to)]
    return ("\n".join(lines) + "\n").encode()


def with_run(card: bytes, run: Run, licence: str | None = None) -> bytes:
    """The card with what the run directory records: data, scores with their signatures, recipe; and licence, limits."""
    recipe, metrics = run.recorded_recipe(), run.metrics()
    text = card.decode()
    if licence is not None:
        text = text.replace("---\n", f"---\nlicense: {licence}\n", 1)
    names = [Path(one.path or one.source or "").name for one in recipe.data.train]
    kept = metrics.get("data", {}).get("kept")
    count = "" if kept is None else f", {kept:,} pairs"
    lines = ["", "## Training data", "", f"{', '.join(names)}{count}. The files are not part of this repository."]
    rows = [
        f"| {name} | {metric} | {one['value']:.2f} | {one['low']:.2f} to {one['high']:.2f} | {one['signature']} |"
        for name in ("dev", "test")
        for metric, one in metrics.get(name, {}).get("scores", {}).items()
    ]
    if rows:
        head = ["| set | metric | score | 95 % interval | signature |", "|---|---|---|---|---|"]
        lines += ["", "## Scores", "", *head, *rows]
    lines += [
        "",
        "## Limits",
        "",
        LIMITS,
        "",
        "## Recipe",
        "",
        "```yaml",
        dump(_without_folders(recipe)).rstrip(),
        "```",
    ]
    return (text.rstrip("\n") + "\n" + "\n".join(lines) + "\n").encode()


def _without_folders(recipe: Recipe) -> Recipe:
    """The recipe with file names instead of paths, which say more about a machine than about a model."""
    names = ("path", "source", "target", "alignment")

    def plain(corpus: Corpus) -> Corpus:
        given = {name: getattr(corpus, name) for name in names}
        return corpus.model_copy(update={name: Path(file).name for name, file in given.items() if file is not None})

    sets = {name: tuple(map(plain, getattr(recipe.data, name))) for name in ("train", "dev", "test")}
    data = recipe.data.model_copy(update={**sets, "cache": None})
    return recipe.model_copy(update={"data": data})


def _described(part: dict[str, object]) -> str:
    sizes = [f"{name} {part[name]}" for name in ("layers", "width", "heads") if part.get(name)]
    return ", ".join([str(part["kind"]), *sizes])


def _search(settings: GenerationRecipe, to: str) -> str:
    kind, beam = settings.strategy_kind, settings.beam
    own = f"The run generates with `strategy: {kind}`" + (f", `beam: {beam}`." if beam > 1 else ".")
    if to == "ctranslate2":
        return f"{own} This folder holds no search: the caller chooses one."
    if to == "bundle":
        return f"{own} This is the default of the bundle."
    if same_search(settings):
        return f"{own} `generation_config.json` states the same search, and `generate` gives the same outputs."
    return (
        f"{own} `generate` of transformers has no such search: `generation_config.json` states the closest one, whose "
        "outputs can differ. `transduce generate --set strategy=huggingface_beam` gives those of transformers."
    )


def same_search(settings: GenerationRecipe) -> bool:
    """Whether generation_config.json describes the search of the run exactly."""
    kind = settings.strategy_kind
    exact = kind == "greedy" or (kind == "huggingface_beam") or (kind == "beam" and settings.beam == 1)
    return exact and not settings.logits_processors and settings.repetition_penalty <= 1
