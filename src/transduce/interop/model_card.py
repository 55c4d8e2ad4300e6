"""Model card: README.md of an exported folder, with what the model is, how it is loaded, and how it searches."""

from __future__ import annotations

from transduce.inference import Model
from transduce.recipe import GenerationRecipe

FILE = "README.md"
LOADING = {
    "huggingface": "`{kind}.from_pretrained` of transformers, or `transduce.load`",
    "onnx": "ONNX Runtime; with Optimum too, where `config.json` names an architecture of transformers",
    "ctranslate2": "the CTranslate2 library; the tokenizers are those of the run",
}
LIBRARIES = {"huggingface": "transformers", "onnx": "onnx", "ctranslate2": "ctranslate2"}


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


def _described(part: dict[str, object]) -> str:
    sizes = [f"{name} {part[name]}" for name in ("layers", "width", "heads") if part.get(name)]
    return ", ".join([str(part["kind"]), *sizes])


def _search(settings: GenerationRecipe, to: str) -> str:
    kind, beam = settings.strategy_kind, settings.beam
    own = f"The run generates with `strategy: {kind}`" + (f", `beam: {beam}`." if beam > 1 else ".")
    if to == "ctranslate2":
        return f"{own} This folder holds no search: the caller chooses one."
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
