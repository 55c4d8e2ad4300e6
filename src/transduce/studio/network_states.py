"""Query-key products of attention, gates and states of recurrent layers, and nearest states in the training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from fastapi import APIRouter, Query
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from transduce.attention.multihead import Attend
from transduce.attention.scores import MLP, Bilinear, Dot
from transduce.data.batching import batch_by_length
from transduce.data.readers.corpus import read_corpus
from transduce.data.tokenizers.tokenizer import encode_targets
from transduce.errors import InputError
from transduce.explain.attention import Explanation
from transduce.flow import BOS, EOS, Padded
from transduce.inference import Model
from transduce.modalities.source_encoding import EncodedSource
from transduce.model import EncoderDecoder
from transduce.studio.attention import Text
from transduce.studio.runs import Studio

Side = Literal["encoder", "decoder"]
GATES = {"GRU": ("reset", "update"), "LSTM": ("input", "forget", "output"), "RNN": ()}


@dataclass(frozen=True)
class ForcedPass:
    """A text, its output, and what some modules were called with while the output was decoded again."""

    explanation: Explanation
    calls: Mapping[str, list[tuple[Any, ...]]]  # by module: (positional arguments, named arguments, output) of a call


@contextmanager
def _recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[tuple[Any, ...]]]]:
    """Records the calls of modules."""
    calls: dict[str, list[tuple[Any, ...]]] = {name: [] for name in modules}

    def hook(name: str) -> Any:
        return lambda _, args, kwargs, output: calls[name].append((args, kwargs, output))

    handles = [part.register_forward_hook(hook(name), with_kwargs=True) for name, part in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def forced_pass(model: Model, text: str, target: str | None, kind: type | tuple[type, ...]) -> ForcedPass:
    """Decodes a given or generated target once more, and records the calls of all modules of a kind."""
    check_decoder(model)
    if target is None:
        prediction = model.generate([text], long_sources="truncate")[0]
        if prediction.decoded is None or prediction.explanation is None:
            raise InputError("the line is empty", remedy="give a source text")
        explained, source, ids = prediction.explanation, prediction.decoded.source, prediction.decoded.hypothesis.ids
    else:
        explained = model.explain(text, target)
        (source,) = encode_sources(model, [text])
        ids = (*encode_targets(model.target, [target], [text])[0], EOS)
    modules = {name: part for name, part in model.network.named_modules() if isinstance(cast(Any, part), kind)}
    batch = model.source_encoding.batch([source]).to(model.device)
    tokens = torch.tensor([[BOS, *ids[:-1]]], device=model.device)
    with _recorded(modules) as calls:
        model.network.advance(tokens, model.network.start(batch), with_attention=True)
    return ForcedPass(explained, {name: made for name, made in calls.items() if made})


def encode_sources(model: Model, texts: Sequence[str]) -> list[EncodedSource]:
    """Sources as the model reads them, long ones cut."""
    most = model.max_source_tokens()
    return [model.source_encoding.truncate(one, most) for one in model.source_encoding.encode(texts)]


def check_decoder(model: Model) -> None:
    if not isinstance(model.network, EncoderDecoder):
        raise InputError("this view is of an encoder and a decoder", remedy="give a run that has both")


def attention_modules(model: Model) -> list[dict[str, Any]]:
    """The attention of every layer whose scores are sums over dimensions: its name, sides and heads."""
    found = []
    for name, part in model.network.named_modules():
        if isinstance(part, Attend) and not part.stateful and isinstance(part.score, (Dot, Bilinear, MLP)):
            owner = model.network.get_submodule(name.rpartition(".")[0])
            heads = int(getattr(owner, "heads", 1))
            rows = "source" if name.startswith("encoder.") else "target"
            columns = rows if "self_attention" in name else "source"
            found.append({"name": name, "rows": rows, "columns": columns, "heads": heads})
    return found


@dataclass(frozen=True)
class QueryKeyProducts:
    """The attention of one query row, dimension by dimension."""

    query: np.ndarray  # K
    keys: np.ndarray  # S K
    products: np.ndarray  # S K: their sum over K, times the scale, is the score of a column
    scale: float
    bias: np.ndarray  # S: added to the scores, by a position encoding
    logits: np.ndarray  # S: -inf where the row may not attend
    weights: np.ndarray  # S


def query_key_products(call: tuple[Any, ...], attend: Attend, row: int, head: int = 0) -> QueryKeyProducts:
    """One query row of a recorded call of `Attend`."""
    (query, keys, *rest), named, _ = call
    mask, bias = (rest[index] if len(rest) > index else named.get(name) for index, name in ((1, "mask"), (2, "bias")))
    query, keys = (x[0, head] if x.dim() == 4 else x[0] for x in (query, keys))  # T K, S K
    score: Any = attend.score
    scale = float(score.scale or getattr(score, "factor", 1.0))
    if isinstance(score, MLP):
        products = score.energy_proj.weight[0] * torch.tanh(score.q_proj(query[row]) + keys)  # S K
        query_row = score.q_proj(query[row])
    else:
        query_row, products = query[row], query[row] * keys
    logits, added = products.sum(-1) * scale, _at(bias, head, row, len(keys))
    logits = score(query[row][None], keys)[0] if getattr(score, "cap", None) is not None else logits
    logits = logits + (0 if added is None else added)
    visible = _at(mask, head, row, len(keys))
    if named.get("causal"):
        visible = torch.arange(len(keys)) <= row
    weights = attend.normaliser(logits[None], None if visible is None else visible[None])[0]
    logits = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
    bias_row = torch.zeros(len(keys)) if added is None else added
    parts = (query_row, keys, products, bias_row, logits, weights)
    q, k, p, b, e, w = (part.float().cpu().numpy() for part in parts)
    return QueryKeyProducts(q, k, p, scale, b, e, w)


def _at(values: Tensor | None, head: int, row: int, columns: int) -> Tensor | None:
    """One row (S) of a tensor that broadcasts to 1 H T S or 1 T S."""
    if values is None:
        return None
    values = values[0, min(head, values.size(1) - 1)] if values.dim() == 4 else values[0]
    return values[min(row, values.size(0) - 1)].expand(columns)


@torch.inference_mode()
def neurons(model: Model, text: str, name: str, row: int, head: int, target: str | None = None) -> dict[str, Any]:
    """The query of one row, the keys of all columns and their products, in one attention module."""
    known = {one["name"]: one for one in attention_modules(model)}
    if name not in known:
        raise InputError(f"no attention {name!r}", remedy=f"choose one of {', '.join(known) or 'another model'}")
    found = forced_pass(model, text, target, Attend)
    calls, explained = found.calls[name], found.explanation
    attend = cast(Attend, model.network.get_submodule(name))
    stepwise = len(calls) > 1  # a recurrent decoder: one call for each step
    labels = {"source": list(explained.source_tokens), "target": ["<s>", *explained.target_tokens[:-1]]}
    rows, columns = labels[known[name]["rows"]], labels[known[name]["columns"]]
    if not (0 <= row < len(rows) and 0 <= head < known[name]["heads"]):
        raise InputError(f"no row {row} or head {head}", remedy=f"there are {len(rows)} rows")
    one = query_key_products(calls[row if stepwise else 0], attend, 0 if stepwise else row, head)
    return {
        "rows": rows,
        "columns": columns,
        "row": row,
        "scale": one.scale,
        "query": one.query.tolist(),
        "keys": one.keys.tolist(),
        "products": one.products.tolist(),
        "bias": one.bias.tolist(),
        "logits": [float(x) if np.isfinite(x) else None for x in one.logits],
        "weights": one.weights.tolist(),
        "additive": isinstance(attend.score, MLP),
    }


@dataclass(frozen=True)
class CellTrace:
    """The gates and states of one direction of a recurrent layer at every step."""

    name: str
    cell: str  # RNN, GRU or LSTM
    gates: Mapping[str, np.ndarray]  # T W, within [0, 1]
    states: Mapping[str, np.ndarray]  # T W: hidden, and the cell of an LSTM


def trace_cell(name: str, layer: nn.RNNBase, inputs: Tensor, begin: Sequence[Tensor], suffix: str = "") -> CellTrace:
    """Gates and states of a layer of torch over inputs (T D), from the states (W) that it begins with."""
    w_ih, w_hh, b_ih, b_hh = (getattr(layer, f"{kind}_l0{suffix}") for kind in _WEIGHTS)
    names, kind = GATES[type(layer).__name__], type(layer).__name__
    hidden, cell = begin[0], begin[-1]
    rows: dict[str, list[Tensor]] = {one: [] for one in (*names, "hidden", *(["cell"] if kind == "LSTM" else []))}
    for x in inputs:
        own, past = w_ih @ x + b_ih, w_hh @ hidden + b_hh
        if kind == "GRU":
            (r, z, n), (r_h, z_h, n_h) = own.chunk(3), past.chunk(3)
            gates = {"reset": torch.sigmoid(r + r_h), "update": torch.sigmoid(z + z_h)}
            hidden = torch.lerp(torch.tanh(n + gates["reset"] * n_h), hidden, gates["update"])
        elif kind == "LSTM":
            i, f, g, o = (own + past).chunk(4)
            gates = {"input": torch.sigmoid(i), "forget": torch.sigmoid(f), "output": torch.sigmoid(o)}
            cell = gates["forget"] * cell + gates["input"] * torch.tanh(g)
            hidden = gates["output"] * torch.tanh(cell)
        else:
            gates, hidden = {}, torch.tanh(own + past)
        for key, value in {**gates, "hidden": hidden, "cell": cell}.items():
            if key in rows:
                rows[key].append(value)
    arrays = {key: torch.stack(values).float().cpu().numpy() for key, values in rows.items()}
    states = {key: values for key, values in arrays.items() if key not in names}
    return CellTrace(name, kind, {key: arrays[key] for key in names}, states)


_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _traces(name: str, layer: nn.RNNBase, calls: Sequence[tuple[Any, ...]]) -> Iterator[CellTrace]:
    """The traces of a layer, one for each direction; of a decoder, over all of its calls."""
    inputs = torch.cat([_rows(args[0]) for args, _, _ in calls])
    begin = calls[0][0][1]
    begin = begin if isinstance(begin, tuple) else (begin,)
    for direction in range(2 if layer.bidirectional else 1):
        backward = direction == 1
        states = [part[direction, 0] for part in begin]
        rows = inputs.flip(0) if backward else inputs
        trace = trace_cell(f"{name} backward" if backward else name, layer, rows, states, "_reverse" * backward)
        yield _flipped(trace) if backward else trace


def _rows(values: Tensor | PackedSequence) -> Tensor:
    """T D of the only sequence of a batch."""
    return values.data if isinstance(values, PackedSequence) else values[0]


def _flipped(trace: CellTrace) -> CellTrace:
    """The steps in the order of the tokens."""
    gates, states = ({key: x[::-1] for key, x in part.items()} for part in (trace.gates, trace.states))
    return CellTrace(trace.name, trace.cell, gates, states)


@torch.inference_mode()
def cell_traces(model: Model, text: str, target: str | None = None) -> tuple[ForcedPass, list[CellTrace]]:
    """The gates and states of every recurrent layer."""
    found = forced_pass(model, text, target, nn.RNNBase)
    layers = [(name, cast(nn.RNNBase, model.network.get_submodule(name))) for name in found.calls]
    return found, [one for name, layer in layers for one in _traces(name, layer, found.calls[name])]


def gates(model: Model, text: str, target: str | None = None) -> dict[str, Any]:
    """The gates and states of every recurrent layer, with the token of each step."""
    found, traces = cell_traces(model, text, target)
    explained = found.explanation
    source, fed = list(explained.source_tokens), ["<s>", *explained.target_tokens[:-1]]
    if getattr(model.network.get_submodule("encoder"), "reverse", False):
        source = source[::-1]
    return {
        "output": explained.output,
        "layers": [
            {
                "name": one.name,
                "cell": one.cell,
                "tokens": source if one.name.startswith("encoder") else fed,
                "gates": {name: values.tolist() for name, values in one.gates.items()},
                "states": {name: values.tolist() for name, values in one.states.items()},
            }
            for one in traces
        ],
    }


@dataclass(frozen=True)
class StateIndex:
    """The states of the tokens of training pairs; the search among them is exact."""

    pairs: Sequence[tuple[str, str]]
    vectors: Mapping[Side, np.ndarray]  # n D
    places: Mapping[Side, np.ndarray]  # n 2: the pair, and the position of the token in it

    def nearest(self, query: np.ndarray, side: Side, k: int) -> list[tuple[int, int, float]]:
        """The k nearest pairs, each by its nearest token: pair, position, Euclidean distance."""
        distances = np.sqrt(((self.vectors[side] - query) ** 2).sum(1))
        found: dict[int, tuple[int, int, float]] = {}
        for row in np.argsort(distances, kind="stable"):
            pair, position = (int(x) for x in self.places[side][row])
            found.setdefault(pair, (pair, position, float(distances[row])))
            if len(found) == k:
                break
        return list(found.values())


def index_states(model: Model, limit: int = 2000) -> StateIndex:
    """The states of the first training pairs, without repeated ones."""
    check_decoder(model)
    data = model.recipe.data
    examples = (one for corpus in data.train for one in read_corpus(corpus, "drop"))
    pairs = list(dict.fromkeys((one.source, one.target or "") for one in islice(examples, limit)))
    if not pairs:
        raise InputError("the training data are not here", remedy="train with a file of pairs, and leave it in place")
    vectors: dict[Side, list[np.ndarray]] = {"encoder": [], "decoder": []}
    places: dict[Side, list[tuple[int, int]]] = {"encoder": [], "decoder": []}
    lengths = [len(source) + len(target) for source, target in pairs]
    for rows in batch_by_length(lengths, model.recipe.generation.batch_tokens):
        for row, states in zip(rows, token_states(model, [pairs[row] for row in rows]), strict=True):
            for side in ("encoder", "decoder"):
                vectors[side].append(states[side])
                places[side] += [(row, position) for position in range(len(states[side]))]
    return StateIndex(
        pairs,
        {side: np.concatenate(some) for side, some in vectors.items()},
        {side: np.array(some) for side, some in places.items()},
    )


@torch.inference_mode()
def token_states(model: Model, pairs: Sequence[tuple[str, str]]) -> list[dict[Side, np.ndarray]]:
    """The encoder states (S D) and the decoder states (T D) of pairs, </s> included."""
    texts = [source for source, _ in pairs]
    sources = encode_sources(model, texts)
    targets = encode_targets(model.target, [target for _, target in pairs], texts)
    batch = model.source_encoding.batch(sources, targets).to(model.device)
    fed = Padded.from_rows([[BOS, *target] for target in targets]).to(model.device)
    network: Any = model.network
    memory = network.encoder(batch)
    hidden = network.advance(fed.values, network.start(batch)).hidden
    assert hidden is not None
    found: list[dict[Side, np.ndarray]] = []
    for row in range(len(pairs)):
        values, steps = memory.values[row, : int(memory.mask[row].sum())], hidden[row, : len(targets[row]) + 1]
        found.append({"encoder": values.float().cpu().numpy(), "decoder": steps.float().cpu().numpy()})
    return found


def neighbours(
    model: Model, index: StateIndex, text: str, side: Side, position: int, k: int = 8, target: str | None = None
) -> dict[str, Any]:
    """The k training pairs whose states are nearest to that of one token of a text or of its output."""
    output = model.generate([text])[0].text if target is None else target
    (states,) = token_states(model, [(text, output)])
    if not 0 <= position < len(states[side]):
        raise InputError(f"no position {position}", remedy=f"there are {len(states[side])}")
    own, columns = _tokens(model, text, output), {"encoder": 0, "decoder": 1}
    hits = index.nearest(states[side][position], side, k)
    return {
        "text": text,
        "output": output,
        "tokens": {name: own[column] for name, column in columns.items()},
        "position": position,
        "pairs": len(index.pairs),
        "neighbours": [
            {
                "source": index.pairs[pair][0],
                "target": index.pairs[pair][1],
                "tokens": _tokens(model, *index.pairs[pair])[columns[side]],
                "position": place,
                "distance": distance,
            }
            for pair, place, distance in hits
        ],
    }


def _tokens(model: Model, source: str, target: str) -> tuple[list[str], list[str]]:
    (encoded,) = encode_sources(model, [source])
    labels = model.source_encoding.describe(source, encoded, getattr(model.network, "encoder", None))
    ids = encode_targets(model.target, [target], [source])[0]
    return list(labels.tokens), [model.target.piece(one) for one in (*ids, EOS)]


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/attentions")
    def attentions(run: str = "") -> dict[str, Any]:
        return {"modules": attention_modules(studio.run(run).model)}

    @routes.get("/neurons")
    def products(
        module: str, run: str = "", source: Text = "", target: Text = "", row: int = 0, head: int = 0
    ) -> dict[str, Any]:
        chosen = studio.run(run)
        with chosen.lock:
            return neurons(chosen.model, source, module, row, head, target or None)

    @routes.get("/gates")
    def cells(run: str = "", source: Text = "", target: Text = "") -> dict[str, Any]:
        chosen = studio.run(run)
        return chosen.once(("gates", source, target), lambda: gates(chosen.model, source, target or None))

    @routes.get("/neighbours")
    def nearest(
        run: str = "",
        source: Text = "",
        target: Text = "",
        side: Side = "encoder",
        position: int = 0,
        k: Annotated[int, Query(ge=1, le=50)] = 8,
    ) -> dict[str, Any]:
        chosen = studio.run(run)
        index = chosen.once("states", lambda: index_states(chosen.model))
        with chosen.lock:
            return neighbours(chosen.model, index, source, side, position, k, target or None)

    return routes
