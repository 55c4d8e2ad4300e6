"""A model that writes in; two graphs out, one that reads a source and one that makes a step, with an example to check.

The contract does the work: `start` gives a state, `advance` a step and the next one. A state is a tree of tensors, and
each gets the name of its place in it: `fixed.mask`, `past.layers.0.1`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.flow import BOS, EOS, SPECIALS, Batch, Padded, State, Tree
from transduce.inference import Model
from transduce.model import DecoderModel, Transducer
from transduce.storage import TEMPORARY, write_file

FORMAT = 1
STEP, META, CHECK = "step.onnx", "meta.json", "check.safetensors"
# Two batches whose sizes and lengths all differ, and after how many steps: what differs then is free in the graph.
EXAMPLES = ((2, 5, 3), (3, 7, 4))
CLOSE = 1e-4


class Start(nn.Module):
    """source and mask (B S) -> the tensors of the state before the first token; without a source, B 1 of anything"""

    def __init__(self, network: Transducer, sourceless: bool) -> None:
        super().__init__()
        self.network, self.sourceless = network, sourceless

    def forward(self, source: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        given = Padded(source, mask)
        state = self.network.start(Batch(target=given) if self.sourceless else Batch(given))
        return tuple(tensor.clone() for tensor in named(state).values())  # none of them is an input again


class Next(nn.Module):
    """tokens (R 1) and the tensors of a state -> scores (R V), and the tensors of its past after them"""

    def __init__(self, network: Transducer, like: State) -> None:
        super().__init__()
        self.network, self.like = network, like

    def forward(self, tokens: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        filled = _fill({"fixed": self.like.fixed, "past": self.like.past}, iter(tensors))
        step = self.network.advance(tokens, State(filled["fixed"], filled["past"]))
        return (step.logits[:, -1], *_flat(step.state.past, "past").values())


def _flat(tree: Tree, name: str) -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {name: tree}
    branches = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {one: tensor for key, branch in branches for one, tensor in _flat(branch, f"{name}.{key}").items()}


def _fill(tree: Tree, tensors: Iterator[Tensor]) -> Tree:
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, Mapping):
        return {key: _fill(branch, tensors) for key, branch in tree.items()}
    return tuple(_fill(branch, tensors) for branch in tree)


def named(state: State) -> dict[str, Tensor]:
    """Every tensor of a state by its place in it."""
    return {**_flat(state.fixed, "fixed"), **_flat(state.past, "past")}


@dataclass(frozen=True)
class Example:
    """A batch, its state at first and after a few steps, and the scores on the way."""

    source: Padded
    first: State
    later: State
    tokens: Tensor  # B T
    logits: Tensor  # B T V


def write_model(model: Model, out: Path, where: str) -> Path:
    """The folder is whole or absent; no code lies in it."""
    _library()
    network = model.network.eval()
    if not isinstance(network, DecoderModel):
        raise InputError("it carries models that write: those with a decoder", where=where, remedy="use --to bundle")
    examples = [_example(model, *sizes) for sizes in EXAMPLES]
    start = "start.onnx" if model.sourceless else "encoder.onnx"
    part = out.with_name(TEMPORARY + out.name)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        try:
            _write_graphs(network, examples, part, start, model.sourceless)
        except Exception as error:  # the exporter has many of its own
            reason = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
            raise InputError(
                f"the exporter cannot follow this model: {reason}", where=where, remedy="use --to bundle"
            ) from error
        last = examples[-1]
        check = {"source": last.source.values, "mask": last.source.mask, "tokens": last.tokens, "logits": last.logits}
        save_file({name: tensor.contiguous() for name, tensor in check.items()}, part / CHECK)
        os.chmod(part / CHECK, 0o644)
        specials = {name: number for number, name in enumerate(SPECIALS)}
        content = {
            "format": FORMAT,
            "start": start,
            "step": STEP,
            "specials": specials,
            "max_length": model.recipe.generation.max_length,
            "state": {name: list(tensor.shape[1:]) for name, tensor in named(last.first).items()},
        }
        write_file(part / META, (json.dumps(content, indent=2) + "\n").encode())
        model.source.save(part / "tokenizer.source.json")
        model.target.save(part / "tokenizer.target.json")
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _library() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise InputError(f"{missing.name} is not installed", remedy="pip install 'transduce[onnx]'") from None
    return onnxruntime


@torch.no_grad()
def _example(model: Model, size: int, length: int, steps: int) -> Example:
    """Rows of different lengths, ids that the vocabularies have."""
    network, generator = model.network, torch.Generator().manual_seed(size)
    mask = torch.arange(length) < torch.arange(length, length - size, -1)[:, None]
    values = torch.randint(len(SPECIALS), model.source.size, (size, length), generator=generator)
    values[torch.arange(size), mask.sum(1) - 1] = EOS
    source = Padded(values * mask, mask)
    if model.sourceless:
        source = Padded(torch.full((size, 1), BOS), torch.ones(size, 1, dtype=torch.bool))
    tokens = torch.randint(len(SPECIALS), model.target.size, (size, steps), generator=generator)
    tokens[:, 0] = BOS
    first = state = network.start(Batch(target=source) if model.sourceless else Batch(source))
    logits = []
    for step in range(steps):
        made = network.advance(tokens[:, step : step + 1], state)
        state = made.state
        logits.append(made.logits)
    return Example(source, first, state, tokens, torch.cat(logits, 1))


@torch.no_grad()
def _write_graphs(network: Transducer, examples: list[Example], folder: Path, start: str, sourceless: bool) -> None:
    one, other = examples
    free = torch.export.Dim.DYNAMIC
    before, after = named(one.first), named(one.later)
    if list(before) != list(after):
        raise ValueError("its state has other parts after the first step than before it")
    shapes = tuple(
        {axis: free for axis in range(tensor.dim()) if tensor.shape[axis] != longer.shape[axis]}
        for tensor, longer in zip(after.values(), named(other.later).values(), strict=True)
    )
    past = [f"next.{name}" for name in after if name.startswith("past")]
    reads = {0: free} if sourceless else {0: free, 1: free}
    source = (one.source.values, one.source.mask)
    step = (one.tokens[:, :1], tuple(after.values()))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of libraries that nobody asked for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module, given, axes, names, file in (
            (Start(network, sourceless), source, (reads, reads), (["source", "mask"], list(before)), start),
            (Next(network, one.later), step, ({0: free}, shapes), (["tokens", *after], ["logits", *past]), STEP),
        ):
            made = torch.onnx.export(
                module,
                given,
                dynamo=True,
                dynamic_shapes=axes,
                input_names=names[0],
                output_names=names[1],
                verbose=False,
            )
            assert made is not None
            for value in (value for node in made.model.graph for value in node.outputs):
                value.shape = None  # of some layers it tells the lengths of the example, which are free
            made.save(folder / file)


def check_model(folder: str | Path) -> float:
    """Runs the example that lies in the folder, step by step; gives the greatest difference, or an error.

    It is told in parts of the greatest score, where that is more than one: large scores have fewer digits.
    """
    folder = Path(folder)
    runtime = _library()
    meta = json.loads((folder / META).read_bytes())
    start, step = (runtime.InferenceSession(folder / meta[name]) for name in ("start", "step"))
    given = {name: tensor.numpy() for name, tensor in load_file(folder / CHECK).items()}
    read = {one.name: given[one.name] for one in start.get_inputs()}
    state = dict(zip([one.name for one in start.get_outputs()], start.run(None, read), strict=True))
    worst = 0.0
    for place in range(given["tokens"].shape[1]):
        state["tokens"] = given["tokens"][:, place : place + 1]
        logits, *past = step.run(None, {one.name: state[one.name] for one in step.get_inputs()})
        wanted = given["logits"][:, place]
        worst = max(worst, float(abs(logits - wanted).max() / max(1.0, abs(wanted).max())))
        names = [one.name.removeprefix("next.") for one in step.get_outputs()[1:]]
        state |= dict(zip(names, past, strict=True))
    if worst > CLOSE:
        raise InputError(f"scores differ by up to {worst:.1e} from ours", where=str(folder), remedy="export it again")
    return worst
