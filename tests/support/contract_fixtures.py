"""The models that the laws are tested on: built from the registries, so a new part is tested at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from transduce.attention.multihead import WINDOWS
from transduce.attention.positions import POSITIONS
from transduce.attention.scores import NORMALISERS, SCORES
from transduce.attention.self_attention import TOKEN_MIXERS
from transduce.decoders import DECODERS
from transduce.decoders.recurrent import CONTEXT_MECHANISMS
from transduce.encoders import ENCODERS
from transduce.flow import BOS, EOS, Batch, Padded, State, Step
from transduce.kernels.cuda_graph import copy_tensors, tensors_of
from transduce.layers.recurrent import CELLS
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe

Choice = TypeVar("Choice")
SIZE = 11  # of both vocabularies
WIDTH = 16
SMALL = {
    "elmo": {"kind": "elmo", "width": WIDTH, "layers": 2, "dropout": 0.3},
    "character_aware": {"kind": "character_aware", "width": WIDTH, "kernel": 3, "word_buckets": 50, "dropout": 0.3},
    "recurrent": {"kind": "recurrent", "width": WIDTH, "layers": 2, "dropout": 0.3},
    "convolutional": {"kind": "convolutional", "width": WIDTH, "layers": 2, "dropout": 0.3},
    "transformer": {"kind": "transformer", "width": WIDTH, "layers": 2, "heads": 2, "ff_width": 24, "dropout": 0.3},
    "prefix": {"kind": "prefix", "width": WIDTH, "layers": 2, "heads": 2, "ff_width": 24, "dropout": 0.3},
    "hard_attention": {"kind": "hard_attention", "width": WIDTH, "layers": 2, "dropout": 0.3},
    "edit_transducer": {"kind": "edit_transducer", "width": WIDTH, "layers": 2, "dropout": 0.3},
    "identity": {"kind": "identity", "width": WIDTH, "dropout": 0.3},
    "conformer": {
        "kind": "conformer",
        "width": WIDTH,
        "layers": 2,
        "heads": 2,
        "ff_width": 24,
        "kernel": 3,
        "dropout": 0.3,
    },
}
# Without sources of their names every part reads the one source: two readers of one text.
SMALL["multi_source"] = {
    "kind": "multi_source",
    "width": WIDTH,
    "parts": {"one": SMALL["recurrent"], "two": {**SMALL["transformer"], "width": 12}},
}
WITHOUT_CROSS_ATTENTION = ("prefix",)  # decoders whose weights over memory and tokens have one sum
# Options of the Transformer's blocks, together where they might disturb each other.
BLOCKS = (
    {"kv_heads": 1},
    {"heads": 4, "kv_heads": 2, "position": "rotary", "norm_kind": "rms", "gated": True, "activation": "silu"},
    {"window": 1},
    {"window": 2, "position": "relative", "norm": "post"},
    {"window": 1, "normaliser": "sparsemax", "kv_heads": 1},
    {"norm_kind": "rms", "norm": "post", "bias": False},
    {"norm_kind": "batch"},
    {"norm_kind": "batch", "norm": "post", "bias": False},
    {"gated": True, "activation": "gelu_tanh", "bias": False},
    {"projections": "none", "score": "dot", "heads": 1},
    {"projections": "none", "window": 1},
    {"experts": 3, "experts_per_token": 2, "experts_first": 1, "gated": True},
    {"norm": "parallel", "position": "rotary"},
    {
        "norm": "sandwich",
        "norm_kind": "rms",
        "window": 1,
        "global_every": 2,
        "global_first": 1,
        "head_width": 6,
        "position": "rotary",
        "kv_heads": 1,
        "score": {"kind": "capped_dot", "cap": 1.5, "divisor": 5.0},
    },
    {"embedding_width": 6, "embedding_norm": True, "position": "learned"},
    {"embedding_width": 20, "position": "rotary"},
    *({"token_mixer": mixer} for mixer in TOKEN_MIXERS if mixer != "attention"),  # which is the default
    {"token_mixer": {"kind": "disentangled", "buckets": 4, "max_distance": 6}, "kv_heads": 1, "norm": "post"},
    {"token_mixer": {"kind": "disentangled", "buckets": 3, "max_distance": None, "terms": "key"}, "position": "none"},
    {"token_mixer": {"kind": "transformer_xl"}, "kv_heads": 1, "norm": "post", "position": "none", "tie_layers": True},
    {"tie_layers": True, "position": "shaw"},
    {"token_mixer": "ssru", "norm": "post", "position": "none"},
    {"token_mixer": "average", "norm": "post", "position": "learned", "bias": False},
    {"position": {"kind": "sinusoidal", "join": "concatenate"}},
    {"position": {"kind": "learned", "join": "concatenate"}},
)
CONVOLUTIONS = (
    {"kernel": 1},
    {"kernel": 5, "position": "sinusoidal"},
    {"kernel": 2, "dilation": 2, "causal": True},  # a tree; the encoder's alone is causal
    {"heads": 2, "score": "mlp", "normaliser": "sparsemax"},  # the decoder's alone
)
SCORED_READERS = ("bahdanau", "luong")
READERS_ONLY = [name for name, part in NORMALISERS.items() if part.stateful or part.stochastic]


def _cases() -> dict[str, dict]:
    cases: dict[str, dict] = {}

    def add(encoder: dict | None, decoder: dict, tie: str = "none", **more: object) -> None:
        name = f"{_name(encoder)}>{_name(decoder)}" + ("" if tie == "none" else f"+tie-{tie}")
        name += "".join(f"+{key}" + (f"-{value}" if value != {} else "") for key, value in more.items())
        copies = decoder["kind"] == "edit_transducer" and decoder.get("copy_action", True)
        shared = tie == "all" or encoder is None or bool(more) or copies
        cases[name] = {
            "tokens": {"shared": shared},
            "model": {"encoder": encoder, "decoder": decoder, "tie": tie, **more},
            "training": {
                "objective": {
                    "kind": "reinforce" if "sampled" in name else "joint_ctc" if "ctc" in more else "cross_entropy"
                }
            },
        }

    base_encoder, base_decoder = SMALL["recurrent"], SMALL["recurrent"]
    # Every encoder with every decoder, and every decoder alone. Shared embeddings and copying are no part of the pair:
    # each encoder and each decoder has both ways of sharing, and copies, in one of its pairs.
    for row, encoder in enumerate(ENCODERS):
        for column, decoder in enumerate(DECODERS):
            add(SMALL[encoder], SMALL[decoder])
            turn = (row + column) % min(len(ENCODERS), len(DECODERS))
            if turn < 2:
                add(SMALL[encoder], SMALL[decoder], ("target", "all")[turn])
            elif turn == 2 and decoder not in WITHOUT_CROSS_ATTENTION:
                add(SMALL[encoder], SMALL[decoder], copy={})
    for decoder in DECODERS:
        add(None, SMALL[decoder])
    for cell in CELLS:
        for reader in CONTEXT_MECHANISMS:
            add({**base_encoder, "cell": cell}, {**base_decoder, "cell": cell, "context": reader})
        add(None, {**base_decoder, "cell": cell, "residual": True})
    # Every score and every normaliser in every place; their pairs are in test_pairwise_compatibility.py.
    for shift, reader in enumerate(SCORED_READERS):
        for score, normaliser in _turns(list(SCORES), list(NORMALISERS), shift):
            part = {"score": score, "normaliser": normaliser}
            add(base_encoder, {**base_decoder, "context": {"kind": reader, **part}})
    stateless = [name for name in SCORES if not SCORES[name].stateful]
    placed = [name for name in NORMALISERS if name not in READERS_ONLY]
    for score, normaliser in _turns(stateless, placed, 2):
        add(base_encoder, {**SMALL["transformer"], "score": score, "normaliser": normaliser})
    for score, normaliser in _turns(stateless, placed, 1):
        add({**SMALL["transformer"], "score": score, "normaliser": normaliser}, base_decoder)
    unfed = {"kind": "luong", "input_feeding": False}
    add(base_encoder, {**base_decoder, "context": unfed})
    add(base_encoder, {**base_decoder, "context": {**unfed, "score": "location"}})
    # Far from 0, an untrained walk stays at the first row or runs to the last; these go on row by row.
    for reader, score, offset in (("bahdanau", "dot", 0.1), ("bahdanau", "coverage", 0.0), ("luong", "coverage", 0.1)):
        walk = {"score": score, "normaliser": {"kind": "monotonic", "offset": offset}}
        add(base_encoder, {**base_decoder, "context": {"kind": reader, **walk}})
    for window in WINDOWS:
        for normaliser in NORMALISERS:
            part = {"normaliser": normaliser, "window": {"kind": window, "radius": 2}}
            add(base_encoder, {**base_decoder, "context": {"kind": "luong", **part}})
        part = {"window": {"kind": window, "radius": 1}}
        add(base_encoder, {**base_decoder, "context": {**unfed, **part}})
        add(base_encoder, {**base_decoder, "context": {"kind": "bahdanau", "score": "coverage", **part}})
    for options in ({"bidirectional": False}, {"bidirectional": False, "reverse": True}, {"residual": True}):
        add({**base_encoder, **options}, base_decoder)
    # As other toolkits have it: a decoder that starts from the states of all layers, sources without their </s>.
    for cell in ("gru", "lstm"):
        deep = {"cell": cell, "layers": 2}
        add({**base_encoder, **deep, "summary": "states"}, {**base_decoder, **deep, "bridge": "states"})
    deep = {"layers": 2, "cell": "lstm"}
    unbounded = {"kind": "luong", "score": "mlp", "bias": True, "activation": "none"}
    encoder, decoder = {"summary": "states"}, {"bridge": "relu", "context": unbounded}
    add({**base_encoder, **deep, **encoder}, {**base_decoder, **deep, **decoder})
    fed = {"kind": "luong", "bias": True}
    add(base_encoder, {**base_decoder, "cell": "lstm", "bridge": "tanh", "context": fed}, source_eos=False)
    waves = {"position": {"kind": "sinusoidal", "halves": True, "inclusive": True, "offset": 2}}
    add({**SMALL["transformer"], **waves}, {**SMALL["transformer"], **waves}, source_eos=False)
    for number, position in enumerate(POSITIONS):
        part = {"position": position, "norm": ("pre", "post")[number % 2]}
        add({**SMALL["transformer"], **part}, {**SMALL["transformer"], **part})
        if position != "sinusoidal":  # the default
            add(None, {**SMALL["transformer"], "position": position})
    for part in BLOCKS:
        add({**SMALL["transformer"], **part}, {**SMALL["transformer"], **part})
        add(None, {**SMALL["transformer"], **part})
    add({**SMALL["transformer"], "layers": 4}, {**SMALL["transformer"], "layers": 1})  # deep, shallow
    add(SMALL["transformer"], SMALL["transformer"], logit_cap=1.5)
    local = {"window": 1, "global_every": 2, "position": "rotary", "local_position": "alibi", "first_norm": False}
    add({**SMALL["transformer"], "layers": 3, "embedding_norm": True, **local}, SMALL["transformer"])
    add({**base_encoder, "bidirectional": False, "reverse": True}, base_decoder, "all", copy={})
    one_way = {**base_encoder, "bidirectional": False}
    for one, other, tie in (
        (one_way, {**base_decoder, "context": "initial"}, "none"),
        (one_way, base_decoder, "target"),
        (SMALL["transformer"], SMALL["transformer"], "all"),
        (SMALL["convolutional"], SMALL["convolutional"], "none"),
    ):
        for share in ("layers", "all"):
            add(one, other, tie, share=share)
    add(SMALL["transformer"], SMALL["transformer"], share="all", copy={})
    add(base_encoder, {**base_decoder, "context": {**unfed, "normaliser": "sparsemax"}}, copy={})
    add(base_encoder, {**base_decoder, "context": {"kind": "luong", "score": "coverage"}}, "target", copy={})
    add(SMALL["transformer"], {**SMALL["transformer"], "kv_heads": 1}, copy={"layer": 0, "head": 1})
    for decoder in DECODERS:  # rows that spell beside every decoder
        add(SMALL["conformer"], SMALL[decoder], ctc={"weight": 0.4})
    add({**SMALL["conformer"], "norm_kind": "batch", "position": "rotary"}, base_decoder)
    product = {"order": 0, "emission": "product", "initial": "zero"}
    for part in ({"order": 0}, {"monotonic": False}, {"score": "mlp", "cell": "gru", "max_jump": 1}, product):
        add(base_encoder, {**SMALL["hard_attention"], **part})
    edits = {"copy_action": False}, {"substitute_action": False}, {"score": "mlp", "cell": "gru"}
    for part in (*edits, {"condition_input": True}):
        add(base_encoder, {**SMALL["edit_transducer"], **part})
    for part in CONVOLUTIONS:
        both = {} if "heads" in part else part
        decoder = {**SMALL["convolutional"], **{name: value for name, value in part.items() if name != "causal"}}
        add({**SMALL["convolutional"], **both}, decoder)
        add(None, decoder if both else SMALL["convolutional"])
    narrow = {**SMALL["convolutional"], "embedding_width": 12, "widths": (8, WIDTH), "kernels": (3, 1)}  # Gehring 2017
    add({**narrow, "separate_keys": True}, {**narrow, "score": "dot", "scale_context": True}, "target")
    add({**SMALL["transformer"], "causal": True, "position": "relative", "window": 2}, SMALL["transformer"])
    return cases


def _turns(ones: list[str], others: list[str], shift: int) -> list[tuple[str, str]]:
    """Few pairs with each of both."""
    return [
        (ones[number % len(ones)], others[(number + shift) % len(others)])
        for number in range(max(len(ones), len(others)))
    ]


def _name(spec: dict | None) -> str:
    if spec is None:
        return "alone"
    parts = [spec["kind"]]
    for key, value in spec.items():
        if value == SMALL[spec["kind"]].get(key):
            continue
        parts.append(f"{key}={'-'.join(map(str, value.values())) if isinstance(value, dict) else value}")
    return ",".join(parts)


CASES = _cases()
ORDER = {name: number for number, name in enumerate(CASES)}


def take_turns(case: str, choices: Sequence[Choice], shift: int = 0) -> Choice:
    """The choice of a case where model and choice are independent: neighbouring cases have different ones.

    The second term moves the sequence on, since parts alternate within the cases of one kind.
    """
    number = ORDER[case]
    return choices[(number + number // len(choices) + shift) % len(choices)]


def shared(name: str) -> torch.nn.Module:
    """The model of a case, for laws that only read it; the random state after it is the same every time."""
    model, random_state = _made(name)
    torch.set_rng_state(random_state)
    return model


def make(name: str) -> torch.nn.Module:
    """A copy of the model of a case, for a law that trains or changes it. A copy takes as long as a short search."""
    return copy.deepcopy(shared(name))


@cache
def _made(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Built once a process: checking a recipe takes longer than most laws."""
    torch.manual_seed(1)
    recipe = complete_recipe(parse(CASES[name]))
    model = build_model(recipe.model, SIZE, SIZE).eval()
    return model, torch.get_rng_state()


def fingerprint(model: torch.nn.Module) -> object:
    """Equal as long as nobody trains the model, writes into its tensors or puts other tensors in their place."""
    tensors = [*model.parameters(), *model.buffers()]
    return model.training, [(id(one), one._version, one.grad is None) for one in tensors]


def example_batch(lengths: list[tuple[int, int]], seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def row(length: int) -> list[int]:
        return torch.randint(4, SIZE, (length,), generator=generator).tolist()

    sources = [[*row(source), EOS] for source, _ in lengths]
    targets = [[BOS, *row(target), EOS] for _, target in lengths]
    return Batch(Padded.from_rows(sources), Padded.from_rows(targets))


@dataclass(frozen=True)
class Reading:
    """What a model makes of a batch: several laws compare with it."""

    start: State
    whole: Step  # all tokens at once, with attention
    forward: Step  # as in training


def read(model: torch.nn.Module, batch: Batch) -> Reading:
    start = model.start(batch)
    return Reading(start, model.advance(batch.decoder_inputs.values, start, with_attention=True), model(batch))


class CPUSearchGraph:
    """A SearchGraph without a GPU: initial state and steps read and write the same buffers, in the same shapes."""

    def __init__(self, begin: Any, given: Any, *, capturable: bool) -> None:
        self.given, self.begin = tensors_of(given), partial(begin, given)
        self.values = self.begin()
        self.buffers, self.steps = tensors_of(self.values), {}

    def capture_steps(self, step: Any, length: Any, count: int, kind: Any) -> None:
        def replay() -> None:
            for _ in range(count):
                self._write(step(self.values, length))

        step(self.values, length)  # the warm-up run, which is not captured
        self.steps[kind] = SimpleNamespace(replay=replay)

    def reset(self, begin: Any, given: Any) -> None:
        copy_tensors(self.given, tensors_of(given))
        self._write(self.begin())

    def _write(self, made: Any) -> None:
        assert [one.shape for one in tensors_of(made)] == [one.shape for one in self.buffers]
        copy_tensors(self.buffers, tensors_of(made))
