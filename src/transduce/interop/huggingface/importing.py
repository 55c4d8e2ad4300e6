"""A Hugging Face folder in; a recipe, tokenizers and weights of one of our models out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transduce import build
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN
from transduce.errors import InputError, nearest
from transduce.interop import bundle
from transduce.interop import g2p_en as g2p
from transduce.interop import legacy as orphans
from transduce.interop.huggingface import bart, bert, gpt2, t5, vit, whisper
from transduce.interop.huggingface import vision_encoder_decoder as vision
from transduce.interop.huggingface.family import Family, Imported, Settings
from transduce.interop.huggingface.folder import Stored, list_weights, read_json
from transduce.interop.huggingface.generation_config import read_generation
from transduce.interop.huggingface.hub import located
from transduce.interop.huggingface.labels import read_labels
from transduce.interop.huggingface.languages import Languages
from transduce.interop.huggingface.sentence_transformers import MODULES, read_sentences
from transduce.interop.huggingface.tokenizers import Reading, Specials, read_tokenizers
from transduce.interop.huggingface.weights import check, fill
from transduce.layers.meta_init import outlined
from transduce.recipe import Recipe, parse
from transduce.run import Run

FAMILIES: dict[str, Family] = {**bart.FAMILIES, **gpt2.FAMILIES, **bert.FAMILIES, **whisper.FAMILIES}
KNOWN = (*FAMILIES, *t5.ARCHITECTURES, *vit.FAMILIES, vision.ARCHITECTURE)
CONFIG = "config.json"
RECORDINGS = 8  # in a batch, where all have one length
LONGEST = 512  # tokens of a text in training, where positions go further


def recognises(folder: Path) -> bool:
    """Whether this looks like a folder from elsewhere rather than like a run."""
    known = _hugging_face(folder) or g2p.file_in(folder) is not None or orphans.recognises(folder)
    return known and not Run(folder).exists


def _hugging_face(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, MODULES))


def read(folder: str | Path, languages: Languages | None = None) -> Imported:
    """Everything is checked by name and shape before any number is read."""
    if (arrays := g2p.file_in(Path(folder))) is not None:
        return g2p.read(arrays)
    if orphans.recognises(Path(folder)) and not _hugging_face(Path(folder)):
        return orphans.read(Path(folder))
    sentences = read_sentences(Path(folder))
    folder = Path(folder) if sentences is None else sentences.folder
    config = read_json(folder, CONFIG, needed=True)
    settings = Settings(config, str(folder / CONFIG))
    architecture = _architecture(settings, sentences is not None)
    stored = list_weights(folder)
    if max(_layers(config)) > len(stored):
        raise InputError("more layers than weights", where=settings.where, remedy="fetch the folder again")
    if (seen := vit.FAMILIES.get(architecture)) is not None:
        return vit.read(folder, settings, seen, _named(seen, stored, str(folder)))
    if architecture == vision.ARCHITECTURE:
        settings = vision.flattened(settings)
        config = dict(settings.content)
    family = FAMILIES.get(architecture) or _made(architecture, settings, stored)
    stored = _named(family, stored, str(folder))
    search = {**config, **read_json(folder, "generation_config.json")}
    specials = _specials(family, search, settings)
    prompt = None
    if family.prompt is not None:
        prompt, languages = family.prompt(search, languages, settings.where), None
    languages = _languages(family, languages, search, settings)
    reading = Reading(
        closes=family.closes,
        masked="noise" in family.data,
        lowered=sentences is not None and sentences.lowered,
        languages=languages,
        coded=family.languages == "must",
        trails=family.languages == "may",
        writes=family.sources is not None,
        prompt=prompt,
        hidden=family.hidden,
    )
    (source, target), rows = read_tokenizers(folder, specials, settings.count("vocab_size"), reading)
    if family.labels:
        target = read_labels(settings, family.labels)
    model, generation = family.model(settings, stored), dict[str, Any]()
    model |= {"source_eos": False} if source.tail else {}  # which has a </s> of its own
    if "decoder" in model:
        where = str(folder / "generation_config.json")
        generation = read_generation(search, rows.ours, not family.closes, where)
        generation |= {"forced_bos": target.lead[0]} if languages is not None and target.lead else {}
        generation |= {} if prompt is None else _begun(search, target, settings)
    if sentences is not None:
        model["head"] = sentences.head
        generation |= {"max_source_length": sentences.longest - 1} if sentences.longest else {}
    data = dict(family.data) if family.sources is None else {"sources": family.sources(folder, settings)}
    recipe = _recipe(settings, data, model, generation, (source, target))
    with outlined():
        network = build.build_model(recipe.model, source.size, target.size)
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check(family, stored, wanted, rows, str(folder))
    return Imported(recipe, (source, target), fill(family, stored, rows, wanted))


def _made(architecture: str, settings: Settings, stored: Mapping[str, Stored]) -> Family:
    """A family that depends on what the settings say."""
    makes = vision.family if architecture == vision.ARCHITECTURE else t5.family
    return makes(settings, stored)


def _languages(
    family: Family, given: Languages | None, search: Mapping[str, Any], settings: Settings
) -> Languages | None:
    if given is not None and family.languages == "none":
        raise InputError(
            "this model has no codes of languages",
            where=settings.where,
            remedy="leave out --source-language and --target-language",
        )
    if given is None and family.languages != "must":
        return None
    forced = search.get("forced_bos_token_id")
    return replace(given or Languages(), forced=forced if isinstance(forced, int) else None)


def _named(family: Family, stored: Mapping[str, Stored], where: str) -> dict[str, Stored]:
    """Under the names of the family's table; which of the tied ones a folder keeps is its own affair."""
    found = {name.removeprefix(family.prefix): one for name, one in stored.items()}
    if len(found) < len(stored):
        raise InputError(f"weights stand there twice, with {family.prefix} and without", where=where)
    for copy, original in family.copies.items():
        if copy in found and original not in found:
            found[original] = found.pop(copy)
    return found


def convert(source: str | Path, new: str | Path, languages: Languages | None = None) -> Run:
    """Writes what a folder or a bundle holds as a run, like any that was trained here."""
    source = located(source)
    if bundle.recognises(source):
        return bundle.unpack(source, new)
    run = Run(Path(new))
    if run.exists or run.checkpoints.steps():
        raise InputError("there is a run here already", where=str(run.folder), remedy="give another folder")
    imported = read(source, languages)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.save_tokenizers(*imported.tokenizers)
    run.checkpoints.save_final(0, imported.weights, {})
    run.save_recipe(imported.recipe)
    return run


def _architecture(settings: Settings, vectors: bool) -> str:
    """`vectors`: the encoder alone is meant, whatever was trained around it."""
    content = settings.content
    if content.get("auto_map") or content.get("trust_remote_code"):
        raise InputError(
            "this model asks for code of its own (auto_map), and none is ever run from a folder",
            where=settings.where,
            remedy=f"only known architectures are imported: {', '.join(KNOWN)}",
        )
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    base = f"{name.partition('For')[0]}Model"
    name = base if vectors and base in KNOWN else name
    if name not in KNOWN:
        raise InputError(f"the architecture {name!r} is not known here", where=settings.where, remedy=_likely(name))
    return name


def _likely(name: str) -> str:
    close, every = nearest(name, KNOWN), f"known: {', '.join(KNOWN)}"
    return every if close.startswith("known") else f"{close} {every}"


def _layers(config: Mapping[str, Any]) -> list[int]:
    names = (
        "encoder_layers",
        "decoder_layers",
        "num_layers",
        "num_decoder_layers",
        "n_layer",
        "n_layers",
        "num_hidden_layers",
    )
    parts = [config, *(config[side] for side in ("encoder", "decoder") if isinstance(config.get(side), dict))]
    return [part[name] for part in parts for name in names if isinstance(part.get(name), int)] or [0]


def _specials(family: Family, search: Mapping[str, Any], settings: Settings) -> Specials:
    def number(name: str, fallback: str = "") -> int | None:
        value = search.get(name)
        value = search.get(fallback) if value is None else value
        if isinstance(value, list):
            if len(value) > 1:
                raise InputError(f"{name}: one token, not {value}", where=settings.where, remedy="keep the first")
            value = value[0] if value else None
        if value is not None and (not isinstance(value, int) or value < 0):
            raise InputError(f"{name}: {value!r} is no token", where=settings.where, remedy="fetch the folder again")
        return value

    if not family.starts:
        return Specials(None, number("sep_token_id"), number("pad_token_id"))
    start = number(family.starts, "pad_token_id" if family.starts.startswith("decoder") else "eos_token_id")
    return Specials(start, number("eos_token_id"), number("pad_token_id"))


def _begun(search: Mapping[str, Any], target: Tokenizer, settings: Settings) -> dict[str, Any]:
    """Outputs that are begun with a prompt; their greatest length does not count it, but for where places end."""
    prompt, places = len(target.lead), settings.count("max_target_positions", 448)
    new = search.get("max_new_tokens")
    most = places if search.get("max_length") is None else min(search["max_length"] + prompt + 1, places)
    longest = most - 1 if new is None else min(new + prompt, places - 1)
    several = RECORDINGS * 2 * settings.count("max_source_positions", 1500)  # two frames a row
    return {"forced_prefix": target.lead, "max_length": longest, "batch_tokens": several}


def _recipe(
    settings: Settings,
    data: dict[str, Any],
    model: dict[str, Any],
    generation: Mapping[str, Any],
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> Recipe:
    ends = [part["position"]["longest"] for part in model.values() if _has_end(part)]
    source, target = ({"kind": one.kind, "size": one.size} for one in tokenizers)
    content: dict[str, Any] = {
        "data": {**data, "max_length": min([LONGEST, *(end - 1 for end in ends)])},
        "tokens": {"source": source, "target": target, "shared": target["kind"] == GIVEN},
        "model": model,
        "generation": generation,
    }
    if "head" in model and model["head"]["kind"] == "embedder":
        content["training"] = {"objective": {"kind": "contrastive"}}
        content["evaluation"] = {"metrics": ("recall@1",)}
    elif "head" in model:
        content["evaluation"] = {"metrics": ("accuracy",)}
    return build.complete_recipe(parse(content, settings.where), settings.where)


def _has_end(part: Any) -> bool:
    return isinstance(part, Mapping) and "longest" in (part.get("position") or {})
