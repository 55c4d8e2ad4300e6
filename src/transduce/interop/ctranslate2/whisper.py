"""Whisper folders of CTranslate2 and faster-whisper, imported as the Hugging Face family of the same name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transduce.errors import InputError
from transduce.interop.ctranslate2.importer import (
    ACTIVATION_NUMBERS,
    CONFIG,
    MODULES,
    SIDES,
    attention_tensors,
    count_layers,
    read_pieces,
    stored_weights,
)
from transduce.interop.ctranslate2.model_file import FILE, REMEDY, Variables
from transduce.interop.huggingface import FAMILIES
from transduce.interop.huggingface.family import Config, Content, ImportedModel, TensorMap, WeightMap
from transduce.interop.huggingface.folder import read_json
from transduce.interop.huggingface.importer import import_model
from transduce.interop.huggingface.languages import Languages
from transduce.interop.huggingface.whisper import SINUSOIDS

FAMILY = FAMILIES["WhisperForConditionalGeneration"]
EMBEDDINGS, PROJECTION = "decoder.embeddings.weight", "decoder.projection.weight"
POSITIONS = {side: f"{side}.position_encodings.encodings" for side in SIDES}
CONVOLUTIONS = {
    "encoder.conv1": "encoder.embedding.layers.0",
    "encoder.conv2": "encoder.embedding.layers.1",
}
START, END, NO_TIMESTAMPS = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
TASKS = ("transcribe", "translate")
ENGLISH_ONLY = 51_864  # tokens of the published models that have no languages
SEARCH: Content = {"num_beams": 5, "early_stopping": True, "max_new_tokens": 224}  # defaults of the library


def read_whisper(folder: Path, variables: Variables, languages: Languages | None) -> ImportedModel:
    where = str(folder / FILE)
    sizes = _sizes(variables, where)
    content = {**_tokens(folder, sizes["vocab_size"]), **sizes, **SEARCH}
    family = replace(FAMILY, weights=_weight_map(variables))
    with stored_weights(variables.weights) as stored:
        return import_model(folder, Config(content, where), family, stored, languages)


def _sizes(variables: Variables, where: str) -> Content:
    """The options of config.json in Hugging Face folders, from the shapes of the weights."""
    needed = [EMBEDDINGS, "encoder.conv1.weight", *POSITIONS.values()]
    needed += [f"{side}.layer.0.ffn.linear_0.weight" for side in SIDES]
    if missing := [name for name in needed if name not in variables.weights]:
        raise InputError(f"{missing[0]} is missing", where=where, remedy=REMEDY)
    if variables.number("decoder.activation", 3) != ACTIVATION_NUMBERS.index("gelu"):
        raise InputError("decoder.activation is not gelu", where=where, remedy="import the original model")
    shapes = {name: tuple(tensor.shape) for name, tensor in variables.weights.items()}
    vocabulary, width = (*shapes[EMBEDDINGS], 0)[:2]
    content = {"vocab_size": vocabulary, "d_model": width, "num_mel_bins": (*shapes["encoder.conv1.weight"], 0)[1]}
    for side, name in zip(SIDES, ("source", "target"), strict=True):
        content[f"{side}_layers"] = count_layers(variables.weights, side)
        content[f"{side}_attention_heads"] = int(variables.number(f"{side}.num_heads", 8))
        content[f"{side}_ffn_dim"] = shapes[f"{side}.layer.0.ffn.linear_0.weight"][0]
        content[f"max_{name}_positions"] = shapes[POSITIONS[side]][0]
    return content


def _tokens(folder: Path, size: int) -> Content:
    """Ids of the special tokens, by their names in the vocabulary, and the lists of config.json."""
    given = Config(read_json(folder, CONFIG), str(folder / CONFIG))
    pieces = read_pieces(folder, ("vocabulary",))
    if len(pieces) != size:
        problem = f"the vocabulary has {len(pieces):,} tokens, but the model {size:,}"
        raise InputError(problem, where=str(folder), remedy=REMEDY)
    ids = {piece: number for number, piece in enumerate(pieces)}
    for name in (START, END):
        if name not in ids:
            raise InputError(f"no token is {name}", where=str(folder), remedy=REMEDY)
    tasks = {task: ids[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in ids}
    # The tokens of languages stand between the start token and those of the tasks.
    languages = given.tokens("lang_ids", size) or list(range(ids[START] + 1, min(tasks.values(), default=0)))
    named = {} if size == ENGLISH_ONLY else {pieces[one]: one for one in languages}
    return {
        "decoder_start_token_id": ids[START],
        "eos_token_id": ids[END],
        "pad_token_id": ids[END],
        "no_timestamps_token_id": ids.get(NO_TIMESTAMPS),
        "suppress_tokens": given.tokens("suppress_ids", size),
        "begin_suppress_tokens": given.tokens("suppress_ids_begin", size),
        "is_multilingual": bool(named),
        "lang_to_id": named,
        "task_to_id": tasks,
    }


def _weight_map(variables: Variables) -> WeightMap:
    assert isinstance(FAMILY.weights, WeightMap)
    modules = {foreign: native for foreign, native in MODULES.items() if not PROJECTION.startswith(foreign)}
    tensors = {
        **attention_tensors(variables),
        EMBEDDINGS: TensorMap(("decoder.embedding.weight", "decoder.output.projection.weight")),
        POSITIONS["encoder"]: TensorMap((SINUSOIDS,)),
        POSITIONS["decoder"]: TensorMap(("decoder.position.embed_positions.weight",)),
    }
    return replace(FAMILY.weights, modules={**modules, **CONVOLUTIONS}, tensors=tensors, tied={PROJECTION: EMBEDDINGS})
