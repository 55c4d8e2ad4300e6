"""Import of a Hugging Face folder: recipe, tokenizers and weights of a native model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transduce.contracts import Family
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN
from transduce.errors import InputError
from transduce.flow import SPECIALS
from transduce.interop.huggingface import FAMILIES
from transduce.interop.huggingface.closest_family import describe_closest
from transduce.interop.huggingface.family import TARGET_TOKENIZER, Config, Content, ImportedModel
from transduce.interop.huggingface.folder import StoredTensor, list_weights, pickled_files, read_json
from transduce.interop.huggingface.generation_config import read_generation
from transduce.interop.huggingface.heads import MODULES, SentenceTransformer, read_labels, read_sentence_transformer
from transduce.interop.huggingface.languages import Languages
from transduce.interop.huggingface.tokenizers import SpecialIds, TextFormat, read_ctc_tokenizer, read_tokenizers
from transduce.interop.huggingface.weights import ImportRows, check_weights, read_weights
from transduce.interop.legacy.checkpoint_process import open_checkpoint
from transduce.recipe import Recipe, build, parse
from transduce.recipe.build import meta_device

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
RECORDINGS = 8  # per batch, where all are padded to one length
PATHS = "paths"  # the label kind of a CTC model
MAX_PATH = 4096  # tokens of an output of a CTC model
MAX_LENGTH = 512  # tokens of a training text, where the positions allow more
REASONS = {  # why no native model computes an architecture
    "ProphetNet": ": its logits come from a second stream of states beside that of the tokens",
}
LAYER_COUNTS = (
    "encoder_layers",
    "decoder_layers",
    "num_layers",
    "num_decoder_layers",
    "n_layer",
    "n_layers",
    "num_hidden_layers",
)


def recognises(folder: Path) -> bool:
    """Whether this is a folder of the transformers or the sentence-transformers library."""
    return any((folder / name).is_file() for name in (CONFIG, MODULES))


def read_folder(folder: Path, languages: Languages | None = None, family: Family | None = None) -> ImportedModel:
    """Imports a folder. All names and shapes are checked before any tensor is read.

    `family`: one that is not in the registry, for an architecture of the user's own.
    """
    sentence = read_sentence_transformer(folder)
    folder = folder if sentence is None else sentence.folder
    config = Config(read_json(folder, CONFIG, needed=True), str(folder / CONFIG))
    _refuse_remote_code(config)
    family = family or FAMILIES[_architecture(folder, config, encoder_only=sentence is not None)]
    with _open_weights(folder) as stored:
        return import_model(folder, config, family, stored, languages, sentence)


@contextmanager
def _open_weights(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """Every tensor by name. Pickled files are read opcode by opcode in a process of their own, and run no code."""
    with ExitStack() as opened:
        files = pickled_files(folder)
        parts = [opened.enter_context(open_checkpoint(file)).weights for file in files]
        yield {name: stored for part in parts for name, stored in part.items()} if files else list_weights(folder)


def import_model(
    folder: Path,
    config: Config,
    family: Family,
    stored: dict[str, StoredTensor],
    languages: Languages | None,
    sentence: SentenceTransformer | None = None,
) -> ImportedModel:
    """Imports weights of a family, with the tokenizer and the other files of the folder."""
    if max(_layer_counts(config.content)) > len(stored):
        raise InputError("more layers than weights", where=config.where, remedy="fetch the folder again")
    config = family.flatten(config)
    weight_map = family.weight_map(config, stored)
    stored = _table_names(weight_map.prefix, weight_map.tied, stored, str(folder))
    model = family.to_recipe(config, stored)
    if family.label_kind == PATHS:
        recipe, tokenizers, rows = _ctc_model(folder, config, family, model)
    elif family.read_sources is not None and family.label_kind:
        recipe, tokenizers, rows = _image_classifier(folder, config, family, model)
    else:
        recipe, tokenizers, rows = _text_model(folder, config, family, model, languages, sentence)
    with meta_device():
        network = build.build_model(recipe.model, tokenizers[0].size, tokenizers[1].size)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check_weights(weight_map, stored, shapes, rows, str(folder))
    return ImportedModel(recipe, tokenizers, read_weights(weight_map, stored, rows, shapes))


Parts = tuple[Recipe, tuple[Tokenizer, Tokenizer], ImportRows]


def _image_classifier(folder: Path, config: Config, family: Family, model: Content) -> Parts:
    labels = read_labels(config, family.label_kind)
    assert family.read_sources is not None
    content = {
        "data": {"sources": family.read_sources(folder, config)},
        "tokens": {"source": {"kind": "labels"}, "target": {"kind": "labels", "size": labels.size}},
        "model": model,
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ("accuracy",)},
    }
    recipe = build.complete_recipe(parse(content, config.where), config.where)
    return recipe, (labels, labels), ImportRows((), 0)  # there are no tokens but the labels


def _ctc_model(folder: Path, config: Config, family: Family, model: Content) -> Parts:
    """The token of each row is that of a CTC path, and outputs are decoded from the best one."""
    assert family.read_sources is not None
    size = config.count("vocab_size")
    blank = config.token("pad_token_id", size)
    target, rows = read_ctc_tokenizer(folder, 0 if blank is None else blank, size)
    sources = family.read_sources(folder, config)
    longest = max(one["rate"] * one["seconds"] for one in sources.values())
    tokens = {"kind": target.kind, "size": target.size}
    content = {
        "data": {"sources": sources},
        "tokens": {"source": tokens, "target": tokens, "shared": True},
        "model": model,
        "training": {"objective": {"kind": "ctc"}},
        "generation": {"strategy": "best_path", "batch_tokens": RECORDINGS * longest, "max_length": MAX_PATH},
        "evaluation": {"metrics": ("wer", "cer")},
    }
    recipe = build.complete_recipe(parse(content, config.where), config.where)
    return recipe, (target, target), rows


def _text_model(
    folder: Path,
    config: Config,
    family: Family,
    model: Content,
    languages: Languages | None,
    sentence: SentenceTransformer | None,
) -> Parts:
    search = _search_options(folder, config)
    prompt, detected = None, [] if family.detected is None else family.detected(search, languages)
    if family.prompt is not None:
        prompt, languages = family.prompt(search, languages), None
    languages = _check_languages(family, languages, search, config)
    if config.content.get(TARGET_TOKENIZER):
        raise InputError(
            "this export has a vocabulary for each side, which a folder of the transformers library has not",
            where=config.where,
            remedy="import the model that it was exported from",
        )
    source_eos = family.source_eos and config.flag("source_eos", True)  # an export may say that sources have none
    text_format = TextFormat(
        source_eos=source_eos,
        masked_lm=family.masked_lm,
        lowercase=sentence is not None and sentence.lowercase,
        word_labels=family.label_kind == "words",
        start_is_output=family.start_is_output,
        languages=languages,
        codes_required=family.languages == "required",
        codes_after_source=family.languages == "optional",
        target_only=family.read_sources is not None,
        start_replaces_first=family.start_replaces_first,
        prompt=prompt,
        hidden_tokens=family.hidden_tokens,
    )
    specials = _special_ids(family, search, config)
    (source, target), rows = read_tokenizers(
        folder, specials, config.count("vocab_size"), text_format, config.integer("src_vocab_size", 1)
    )
    if family.label_kind:
        source, target = source.with_word_marks(text_format.word_labels), read_labels(config, family.label_kind)
    # The source ends with a </s> of its own, or with none.
    model |= {"source_eos": False} if source.suffix or (family.source_eos and not source_eos) else {}
    generation: Content = {}
    if "decoder" in model:
        decoder_only = not family.source_eos
        generation = read_generation(search, rows, decoder_only=decoder_only)
        generation |= {"forced_bos": target.prefix[0]} if languages is not None and target.prefix else {}
        generation |= {} if prompt is None else _prompted_generation(search, target, config)
        generation |= {} if prompt is None else _timestamps(search, rows)
        generation |= {"detected_first": tuple(map(rows.native_id, detected))} if detected else {}
    if sentence is not None:
        model["head"] = sentence.head
        generation |= {"max_source_length": sentence.max_length - 1} if sentence.max_length else {}
    data = {"sources": family.read_sources(folder, config)} if family.read_sources is not None else dict(family.data)
    return _recipe(config, data, model, generation, (source, target)), (source, target), rows


def _search_options(folder: Path, config: Config) -> Config:
    """The options of generation_config.json, and those of config.json, where older folders have them."""
    own, where = read_json(folder, GENERATION_CONFIG), str(folder / GENERATION_CONFIG)
    return Config({**config.content, **own}, config.where, dict.fromkeys(own, where))


def _check_languages(family: Family, given: Languages | None, search: Config, config: Config) -> Languages | None:
    if given is not None and family.languages == "none":
        raise InputError(
            "this model has no language codes",
            where=config.where,
            remedy="leave out --source-language and --target-language",
        )
    if given is None and family.languages != "required":
        return None
    forced = search.token("forced_bos_token_id", config.count("vocab_size"))
    return replace(given or Languages(), forced=forced)


def _table_names(
    prefix: str, tied: Mapping[str, str], stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Tensors under the names of the weight map: without the prefix, and tied ones under the name of the original."""
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    if len(found) < len(stored):
        raise InputError(f"weights occur twice, with {prefix} and without", where=where)
    for copy, original in tied.items():
        if copy in found and original not in found:
            found[original] = found.pop(copy)
    return found


def _refuse_remote_code(config: Config) -> None:
    if config.content.get("auto_map") or config.content.get("trust_remote_code"):
        raise InputError(
            "this model needs its own code (auto_map), which is never run",
            where=config.where,
            remedy=f"supported architectures: {', '.join(FAMILIES)}",
        )


def _architecture(folder: Path, config: Config, *, encoder_only: bool) -> str:
    """`encoder_only`: only the encoder is imported, whatever head it was trained with."""
    names = config.content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not names:  # some configs of encoders name none
        plain = f"{config.content.get('model_type')}model".replace("-", "").lower()
        name = next((known for known in FAMILIES if known.lower() == plain), "")
    base = f"{name.partition('For')[0]}Model"
    name = base if encoder_only and base in FAMILIES else name
    if name not in FAMILIES:
        every = "`transduce convert --list` shows what can be imported"
        reason = REASONS.get(name.partition("For")[0], "")
        close = "" if reason else describe_closest(folder, config, name)
        remedy = f"{close}. {every}" if close else every
        raise InputError(f"the architecture {name!r} is not supported{reason}", where=config.where, remedy=remedy)
    return name


def _layer_counts(config: Mapping[str, Any]) -> list[int]:
    parts = [config, *(config[side] for side in ("encoder", "decoder") if isinstance(config.get(side), dict))]
    return [part[name] for part in parts for name in LAYER_COUNTS if isinstance(part.get(name), int)] or [0]


def _special_ids(family: Family, search: Config, config: Config) -> SpecialIds:
    size = config.count("vocab_size")

    def number(name: str, fallback: str = "") -> int | None:
        name = fallback if search.content.get(name) is None and fallback else name
        if not isinstance(search.content.get(name), list):
            return search.token(name, size)
        listed = search.tokens(name, size)
        if len(listed) > 1:
            warnings.warn(f"{search.where}: of the tokens {name} {listed} only the first ends a text", stacklevel=2)
        return listed[0] if listed else None

    if not family.start_token:
        return SpecialIds(number("pad_token_id"), None, number("sep_token_id"))
    fallback = "pad_token_id" if family.start_token.startswith("decoder") else "eos_token_id"
    return SpecialIds(number("pad_token_id"), number(family.start_token, fallback), number(family.end_token))


def _prompted_generation(search: Config, target: Tokenizer, config: Config) -> Content:
    """Generation with a prompt: max_length does not count it, but the positions of the decoder do."""
    prompt, positions = len(target.prefix), config.count("max_target_positions", 448)
    new, total = search.integer("max_new_tokens", 1), search.integer("max_length", 0)
    limit = positions if total is None else min(total + prompt + 1, positions)
    max_length = limit - 1 if new is None else min(new + prompt, positions - 1)
    batch_tokens = RECORDINGS * 2 * config.count("max_source_positions", 1500)  # two frames per encoder position
    return {"forced_prefix": target.prefix, "max_length": max_length, "batch_tokens": batch_tokens}


def _timestamps(search: Config, rows: ImportRows) -> Content:
    """Ids of the timestamps, which are the last of the vocabulary."""
    size = rows.foreign_size
    none, end = search.token("no_timestamps_token_id", size), search.token("eos_token_id", size)
    if none is None or end is None or none + 1 >= size:
        return {}
    first, pieces = rows.native_id(none + 1), rows.rows[len(SPECIALS) :]
    text_end = len(SPECIALS) + sum(number < end for number in pieces)
    ids = {"first": first, "text_end": text_end, "none": rows.native_id(none)}
    last = search.integer("max_initial_timestamp_index", 0)
    return {"timestamps": ids if last is None else {**ids, "max_initial": last}}


def _recipe(
    config: Config,
    data: Content,
    model: Content,
    generation: Content,
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> Recipe:
    limits = [part["position"]["max_positions"] for part in model.values() if _has_last_position(part)]
    source, target = ({"kind": one.kind, "size": one.size} for one in tokenizers)
    shared = target["kind"] == GIVEN and tokenizers[0].vocabulary.pieces == tokenizers[1].vocabulary.pieces
    content: Content = {
        "data": {**data, "max_length": min([MAX_LENGTH, *(limit - 1 for limit in limits)])},
        "tokens": {"source": source, "target": target, "shared": shared},
        "model": model,
        "generation": generation,
    }
    if "head" in model and model["head"]["kind"] == "embedder":
        content["training"] = {"objective": {"kind": "contrastive"}}
        content["evaluation"] = {"metrics": ("recall@1",)}
    elif "head" in model:
        content["evaluation"] = {"metrics": ("accuracy",)}
    return build.complete_recipe(parse(content, config.where), config.where)


def _has_last_position(part: Any) -> bool:
    return isinstance(part, Mapping) and "max_positions" in (part.get("position") or {})
