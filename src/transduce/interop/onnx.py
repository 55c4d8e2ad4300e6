"""Export to ONNX in the layout of Optimum: graphs, config.json, tokenizer.json, and an example to check them with.

An encoder-decoder has `encoder_model.onnx`, `decoder_model.onnx` for the first call of the decoder and
`decoder_with_past_model.onnx` for every further token; a decoder alone and an encoder with a head have `model.onnx`.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from transduce.contracts import Decoder, Encoder, Head
from transduce.data.tokenizers.vocabulary import GIVEN
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, Memory, State
from transduce.inference import Model
from transduce.interop.huggingface.exporter import choose_family, special_ids
from transduce.interop.huggingface.generation_config import write_generation
from transduce.interop.huggingface.heads import write_labels
from transduce.interop.huggingface.tokenizers import write_tokenizer
from transduce.interop.huggingface.weights import ExportRows, export_rows
from transduce.interop.model_card import FILE, model_card
from transduce.interop.onnx_graphs import (
    MASK,
    MEMORY_NAMES,
    EncoderGraph,
    FirstGraph,
    Graph,
    HeadGraph,
    NextGraph,
    Precision,
    TokenIds,
    graph_inputs,
    has_kv_cache,
    memory_fields,
    state_names,
    state_tensors,
)
from transduce.model import DecoderModel, DecoderOnly, EncoderDecoder
from transduce.storage import staged_folder, write_file, write_tensors

FORMAT = 2
ENCODER, FIRST, NEXT, WHOLE = (
    f"{name}.onnx" for name in ("encoder_model", "decoder_model", "decoder_with_past_model", "model")
)
GRAPHS = (ENCODER, FIRST, NEXT, WHOLE)
CHECK, CONFIG, GENERATION, TARGET_TOKENIZER = (
    "check.safetensors", "config.json", "generation_config.json", "target_tokenizer",
)  # fmt: skip
# Batch size, source length and number of tokens of two examples: axes that differ between them are dynamic.
EXAMPLES = ((2, 5, 3), (3, 7, 4))
TOLERANCE = {"fp32": 1e-4, "int8": 0.25}  # of the logits, relative to the largest


@dataclass(frozen=True)
class Vocabularies:
    """Exported ids of both sides."""

    source: ExportRows
    target: ExportRows

    @classmethod
    def of(cls, model: Model) -> Vocabularies:
        weights = model.network.state_dict()
        return cls(export_rows(model.source, weights), export_rows(model.target, weights))


@dataclass(frozen=True)
class CheckExample:
    """Random inputs, the memory of the encoder, and tokens with the logits that follow each of them."""

    inputs: dict[str, Tensor]
    memory: Memory | None
    tokens: Tensor  # B T, exported ids
    logits: Tensor  # B T V, or those of a head
    states: Sequence[State] = ()  # before the first token and after each

    def tensors(self) -> dict[str, Tensor]:
        named = {**self.inputs, "tokens": self.tokens, "logits": self.logits}
        return {name: tensor.contiguous() for name, tensor in named.items() if tensor.numel()}


def write_model(model: Model, out: Path, where: str, precision: Precision = "fp32") -> Path:
    """Writes a whole folder or nothing; the folder holds no code."""
    _library()
    if precision not in TOLERANCE:
        raise InputError(f"ONNX export has no precision {precision}", where="--precision", remedy="fp32 or int8")
    model.network.eval()
    vocabularies = Vocabularies.of(model)
    with staged_folder(out) as part:
        try:
            graphs, example = make_graphs(model, vocabularies, where)
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it logs optional libraries that are missing
            for graph in graphs:
                graph.write(part, precision)
        except (OSError, InputError):
            raise  # of the disk, or with a message of its own
        except Exception as error:  # the exporter raises many types
            reason = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
            raise InputError(
                f"torch.onnx cannot export {_kinds(model)}: {reason}", where=where, remedy="use --to bundle"
            ) from error
        write_tensors(part / CHECK, example.tensors())
        for name, content in _settings(model, vocabularies, precision, where).items():
            write_file(part / name, (json.dumps(content, indent=2) + "\n").encode())
        write_file(part / FILE, model_card(model, "onnx"))
        _write_tokenizers(model, vocabularies, part)
    return out


def _kinds(model: Model) -> str:
    recipe = model.recipe.model
    parts = {"encoder": recipe.encoder, "decoder": recipe.decoder, "head": recipe.head}
    return " and ".join(f"the {side} {part['kind']}" for side, part in parts.items() if part is not None)


def _library() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise InputError(f"{missing.name} is not installed", remedy="pip install 'transduce[onnx]'") from None
    return onnxruntime


def make_graphs(model: Model, vocabularies: Vocabularies, where: str) -> tuple[list[Graph], CheckExample]:
    """The graphs of a model, and an example that checks them."""
    network = model.network
    source, target = TokenIds(vocabularies.source), TokenIds(vocabularies.target)
    if isinstance(network, DecoderOnly):
        return _decoder_only(network.decoder, target, model.target.size)
    if isinstance(network, EncoderDecoder):
        inputs = graph_inputs(model.source_encoding)
        return _encoder_decoder(network, EncoderGraph(network.encoder, source, inputs), target, model)
    encoder, head = getattr(network, "encoder", None), getattr(network, "head", None)
    if not isinstance(encoder, Encoder) or not isinstance(head, Head):
        raise InputError("ONNX export writes one network, not several", where=where, remedy="export each of them")
    graph = EncoderGraph(encoder, source, graph_inputs(model.source_encoding))
    kind = (model.recipe.model.head or {})["kind"]
    order = {"mlm": source, "bilm": source, "ctc": target}.get(kind)
    return _head(HeadGraph(graph, head, order, has_specials=kind == "embedder"), model)


@torch.no_grad()
def _head(graph: HeadGraph, model: Model) -> tuple[list[Graph], CheckExample]:
    found = []
    for size, length, _ in EXAMPLES:
        inputs = _source_example(graph.encoder, size, length, model)
        found.append(CheckExample(inputs, None, torch.zeros(0), graph(tuple(inputs.values()))[0]))
    one, other = ((tuple(example.inputs.values()),) for example in found)
    output = "sentence_embedding" if graph.head.is_embedding else "logits"
    return [Graph(WHOLE, graph, (one, other), list(found[0].inputs), [output])], found[-1]


def _source_example(graph: EncoderGraph, size: int, length: int, model: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    found: dict[str, Tensor] = {}
    for one in graph.inputs.values():
        found |= one.tensors(one.example(size, length, model.source.size, generator), graph.ids)
    return found


@torch.no_grad()
def _decoded(decoder: Decoder, ids: TokenIds, vocabulary: int, memory: Memory, steps: int) -> CheckExample:
    """Random tokens, decoded one by one."""
    size, generator = memory.mask.size(0), torch.Generator().manual_seed(steps)
    native = torch.randint(len(SPECIALS), vocabulary, (size, steps), generator=generator)
    native[:, 0] = BOS
    tokens = ids.foreign(native)
    states, logits = [decoder.start(memory)], []
    for step in range(steps):
        made = decoder.advance(ids.read(tokens[:, step : step + 1], "target"), states[-1])
        states.append(made.state)
        logits.append(ids.order(made.logits))
    return CheckExample({}, memory, tokens, torch.cat(logits, 1), states)


def _encoder_decoder(
    network: EncoderDecoder, encoder: EncoderGraph, ids: TokenIds, model: Model
) -> tuple[list[Graph], CheckExample]:
    decoder, examples = network.decoder, []
    for size, length, steps in EXAMPLES:
        inputs = _source_example(encoder, size, length, model)
        with torch.no_grad():
            memory = encoder.memory(tuple(inputs.values()))
        decoded = _decoded(decoder, ids, model.target.size, memory, steps)
        examples.append(CheckExample(inputs, memory, decoded.tokens, decoded.logits, decoded.states))
    last = examples[-1]
    assert last.memory is not None
    fields = memory_fields(decoder, last.memory)
    names = state_names(decoder, last.states[-1], last.memory)
    if has_kv_cache(decoder) and all(one.mask_name is None for one in encoder.inputs.values()):
        fields.remove("mask")  # every row is real
    given = last.inputs.get("attention_mask")
    shared = given is not None and torch.equal(given.bool(), last.memory.mask) and len(encoder.inputs) == 1
    encoder.fields = [field for field in fields if field != "mask" or not shared]
    one, other = ((tuple(example.inputs.values()),) for example in examples)
    outputs = ["last_hidden_state", *(MEMORY_NAMES[field] for field in encoder.fields[1:])]
    graph = Graph(ENCODER, encoder, (one, other), list(last.inputs), outputs)
    return [graph, *_decoder_graphs(decoder, ids, examples, fields, names)], last


def _decoder_graphs(
    decoder: Decoder, ids: TokenIds, examples: Sequence[CheckExample], fields: Sequence[str], names: Mapping[str, str]
) -> list[Graph]:
    """The first call, with any number of tokens where the decoder takes them, and the calls for one token each."""
    inputs = [path for path in names if path != MASK or "mask" in fields]
    first, following = [], []
    for example in examples:
        tokens = example.tokens if has_kv_cache(decoder) else example.tokens[:, :1]
        memory = tuple(_integers(getattr(example.memory, field)) for field in fields)
        first.append((tokens, memory))
        state = state_tensors(example.states[-1])
        following.append((example.tokens[:, :1], tuple(_integers(state[path]) for path in inputs)))
    kept = [path for path in names if names[path] != MEMORY_NAMES["mask"]]
    present = [f"present.{names[path]}" for path in kept]
    past = [f"present.{names[path]}" for path in kept if path.startswith("past.")]
    given = [
        names[path] if names[path] == MEMORY_NAMES["mask"] else f"past_key_values.{names[path]}" for path in inputs
    ]
    begin = FirstGraph(decoder, ids, fields, names)
    step = NextGraph(decoder, ids, examples[0].states[-1], inputs)
    memory_names = [MEMORY_NAMES[field] for field in fields]
    return [
        Graph(FIRST, begin, (first[0], first[1]), ["input_ids", *memory_names], ["logits", *present]),
        Graph(NEXT, step, (following[0], following[1]), ["input_ids", *given], ["logits", *past]),
    ]


def _integers(tensor: Tensor) -> Tensor:
    """Masks as Optimum gives them."""
    return tensor.long() if tensor.dtype == torch.bool else tensor


def _decoder_only(decoder: Decoder, ids: TokenIds, vocabulary: int) -> tuple[list[Graph], CheckExample]:
    examples = [_decoded(decoder, ids, vocabulary, Memory.empty(size), steps) for size, _, steps in EXAMPLES]
    last = examples[-1]
    names = {path: name for path, name in state_names(decoder, last.states[-1], None).items() if path != MASK}
    if not has_kv_cache(decoder):
        return _decoder_graphs(decoder, ids, examples, (), names), last
    rows = []
    for example in examples:
        state = state_tensors(example.states[-1])
        rows.append((example.tokens, tuple(state[path] for path in names)))
    graph = NextGraph(decoder, ids, examples[0].states[-1], list(names))
    inputs = ["input_ids", *(f"past_key_values.{name}" for name in names.values())]
    outputs = ["logits", *(f"present.{name}" for name in names.values())]
    return [Graph(WHOLE, graph, (rows[0], rows[1]), inputs, outputs)], last


def _settings(model: Model, vocabularies: Vocabularies, precision: Precision, where: str) -> dict[str, Any]:
    """config.json, that of a Hugging Face architecture where one fits, and generation_config.json."""
    recipe = model.recipe
    rows = vocabularies.target
    try:
        export = choose_family(recipe, where, vocabularies.source.special_id(PAD))
        config: dict[str, Any] = {**export.config, **special_ids(export.family, rows)}
    except InputError:  # no architecture of the transformers library; other runtimes read the graphs all the same
        ids = {f"{name}_token_id": rows.special_id(one) for name, one in (("pad", PAD), ("bos", BOS), ("eos", EOS))}
        config = {"model_type": "transduce", "vocab_size": rows.size, **ids}
        config |= {"decoder_start_token_id": rows.special_id(BOS)} if recipe.model.decoder else {}
    config["is_encoder_decoder"] = isinstance(model.network, EncoderDecoder)
    head = recipe.model.head
    config |= write_labels(model.target) if head is not None and head["kind"] in ("classifier", "tagger") else {}
    sources = {name: dict(one) if isinstance(one, Mapping) else one for name, one in recipe.data.sources.items()}
    config["transduce"] = {"format": FORMAT, "precision": precision, "sources": sources}
    files = {CONFIG: config}
    if isinstance(model.network, DecoderModel):
        decoder_only = isinstance(model.network, DecoderOnly)
        files[GENERATION] = write_generation(recipe.generation, rows, decoder_only=decoder_only)
    return files


def _write_tokenizers(model: Model, vocabularies: Vocabularies, folder: Path) -> None:
    """tokenizer.json, that of the source where both sides are texts, and the tokenizers of the run where they have its
    ids."""
    alone = bool(model.recipe.data.sources) or model.recipe.model.encoder is None
    sides = [(folder, model.target, vocabularies.target)]
    if not alone:
        sides = [(folder, model.source, vocabularies.source)]
        if model.target.fingerprint != model.source.fingerprint and model.recipe.model.decoder is not None:
            sides.append((folder / TARGET_TOKENIZER, model.target, vocabularies.target))
    limit = model.recipe.generation.max_source_length
    for place, tokenizer, rows in sides:
        place.mkdir(exist_ok=True)
        try:
            write_tokenizer(place, tokenizer, rows, source_eos=not alone, max_length=limit)
        except InputError as error:
            warnings.warn(f"tokenizer.json is not written: {error.problem}", stacklevel=4)
    if GIVEN not in (model.source.kind, model.target.kind):
        model.source.save(folder / "tokenizer.source.json")
        model.target.save(folder / "tokenizer.target.json")


def run_graphs(folder: Path, given: Mapping[str, Any], tokens: Any = None) -> Any:
    """The output of a head, or the logits (B T V) after each of the tokens (B T), fed one by one."""
    runtime = _library()
    sessions = {file: runtime.InferenceSession(folder / file) for file in GRAPHS if (folder / file).exists()}
    state = dict(given)

    def run(file: str) -> dict[str, Any]:
        read = {one.name: state[one.name] for one in sessions[file].get_inputs()}
        return dict(
            zip([one.name for one in sessions[file].get_outputs()], sessions[file].run(None, read), strict=True)
        )

    if tokens is None:
        return next(iter(run(WHOLE).values()))
    if ENCODER in sessions:
        found = run(ENCODER)
        state |= {"encoder_attention_mask": state.get("attention_mask"), **found}
        state["encoder_hidden_states"] = found["last_hidden_state"]
    elif WHOLE in sessions:
        state |= _empty_past(sessions[WHOLE], len(tokens))
    logits = []
    for position in range(tokens.shape[1]):
        state["input_ids"] = tokens[:, position : position + 1]
        begins = FIRST in sessions and position == 0
        found = run(FIRST if begins else WHOLE if WHOLE in sessions else NEXT)
        logits.append(torch.from_numpy(found.pop("logits")))
        state |= {name.replace("present", "past_key_values", 1): value for name, value in found.items()}
    return torch.cat(logits, 1).numpy()


def _empty_past(session: Any, size: int) -> dict[str, Any]:
    """Keys and values of no tokens."""
    shapes = {one.name: one.shape[1:] for one in session.get_inputs() if one.name != "input_ids"}
    widths = {name: [axis if isinstance(axis, int) else 0 for axis in shape] for name, shape in shapes.items()}
    return {name: torch.zeros(size, *shape).numpy() for name, shape in widths.items()}


def check_model(folder: str | Path) -> float:
    """Runs the example of the folder token by token and returns the largest difference of the logits.

    The difference is relative to the largest logit where that is above one. A large difference is an error.
    """
    folder = Path(folder)
    precision = json.loads((folder / CONFIG).read_bytes())["transduce"]["precision"]
    given = {name: tensor.numpy() for name, tensor in load_file(folder / CHECK).items()}
    tokens, expected = given.pop("tokens", None), given.pop("logits")
    made = run_graphs(folder, given, tokens)
    worst = float(abs(made - expected).max() / max(1.0, abs(expected).max()))
    if worst > TOLERANCE[precision]:
        raise InputError(
            f"logits differ by up to {worst:.1e} from those of the run", where=str(folder), remedy="export it again"
        )
    return worst
