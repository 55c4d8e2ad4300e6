"""Export to ONNX: one graph for the encoder, one for a decoder step, and an example to check them with.

The graphs are `start` and `advance` of the decoder contract. A state is a tree of tensors; each tensor is named by its
path in the tree: `fixed.mask`, `past.layers.0.1`.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.flow import BOS, EOS, SPECIALS, Batch, Padded, State, Tree
from transduce.inference import Model
from transduce.interop.model_card import FILE, model_card
from transduce.model import DecoderModel, Transducer
from transduce.storage import staged_folder, write_file, write_tensors

FORMAT = 1
STEP, META, CHECK = "step.onnx", "meta.json", "check.safetensors"
# Batch size, source length and number of steps of two examples: axes that differ between them are dynamic.
EXAMPLES = ((2, 5, 3), (3, 7, 4))
TOLERANCE = 1e-4


class StartGraph(nn.Module):
    """source and mask (B S) -> tensors of the initial state; without a source, B 1 with any values"""

    def __init__(self, network: Transducer, sourceless: bool) -> None:
        super().__init__()
        self.network, self.sourceless = network, sourceless

    def forward(self, source: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        given = Padded(source, mask)
        state = self.network.start(Batch(target=given) if self.sourceless else Batch(given))
        return tuple(tensor.clone() for tensor in named_tensors(state).values())  # so that no output is an input


class StepGraph(nn.Module):
    """tokens (R 1) and tensors of a state -> logits (R V) and tensors of the next past"""

    def __init__(self, network: Transducer, structure: State) -> None:
        super().__init__()
        self.network, self.structure = network, structure

    def forward(self, tokens: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        filled = _unflatten({"fixed": self.structure.fixed, "past": self.structure.past}, iter(tensors))
        step = self.network.advance(tokens, State(filled["fixed"], filled["past"]))
        return (step.logits[:, -1], *_flatten(step.state.past, "past").values())


def _flatten(tree: Tree, name: str) -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {name: tree}
    branches = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {one: tensor for key, branch in branches for one, tensor in _flatten(branch, f"{name}.{key}").items()}


def _unflatten(tree: Tree, tensors: Iterator[Tensor]) -> Tree:
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, Mapping):
        return {key: _unflatten(branch, tensors) for key, branch in tree.items()}
    return tuple(_unflatten(branch, tensors) for branch in tree)


def named_tensors(state: State) -> dict[str, Tensor]:
    """Every tensor of a state by its path."""
    return {**_flatten(state.fixed, "fixed"), **_flatten(state.past, "past")}


@dataclass(frozen=True)
class CheckExample:
    """A batch, its initial state, its state after a few steps, and the logits of the steps."""

    source: Padded
    initial: State
    final: State
    tokens: Tensor  # B T
    logits: Tensor  # B T V


def write_model(model: Model, out: Path, where: str) -> Path:
    """Writes a whole folder or nothing; the folder holds no code."""
    _library()
    network = model.network.eval()
    if not isinstance(network, DecoderModel):
        raise InputError("ONNX export supports models with a decoder", where=where, remedy="use --to bundle")
    if model.recipe.data.sources:
        kinds = ", ".join(model.recipe.data.sources)
        raise InputError(f"ONNX export supports texts as sources, not {kinds}", where=where, remedy="use --to bundle")
    examples = [_example(model, *sizes) for sizes in EXAMPLES]
    start = "start.onnx" if model.sourceless else "encoder.onnx"
    with staged_folder(out) as part:
        try:
            _write_graphs(network, examples, part, start, model.sourceless)
        except OSError:
            raise  # of the disk, not of the model
        except Exception as error:  # the exporter raises many types
            reason = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
            raise InputError(
                f"torch.onnx cannot export this model: {reason}", where=where, remedy="use --to bundle"
            ) from error
        last = examples[-1]
        check = {"source": last.source.values, "mask": last.source.mask, "tokens": last.tokens, "logits": last.logits}
        write_tensors(part / CHECK, {name: tensor.contiguous() for name, tensor in check.items()})
        specials = {name: number for number, name in enumerate(SPECIALS)}
        content = {
            "format": FORMAT,
            "start": start,
            "step": STEP,
            "specials": specials,
            "max_length": model.recipe.generation.max_length,
            "state": {name: list(tensor.shape[1:]) for name, tensor in named_tensors(last.initial).items()},
        }
        write_file(part / META, (json.dumps(content, indent=2) + "\n").encode())
        write_file(part / FILE, model_card(model, "onnx"))
        model.source.save(part / "tokenizer.source.json")
        model.target.save(part / "tokenizer.target.json")
    return out


def _library() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise InputError(f"{missing.name} is not installed", remedy="pip install 'transduce[onnx]'") from None
    return onnxruntime


@torch.no_grad()
def _example(model: Model, size: int, length: int, steps: int) -> CheckExample:
    """Random ids, in rows of different lengths."""
    network, generator = model.network, torch.Generator().manual_seed(size)
    mask = torch.arange(length) < torch.arange(length, length - size, -1)[:, None]
    values = torch.randint(len(SPECIALS), model.source.size, (size, length), generator=generator)
    values[torch.arange(size), mask.sum(1) - 1] = EOS
    source = Padded(values * mask, mask)
    if model.sourceless:
        source = Padded(torch.full((size, 1), BOS), torch.ones(size, 1, dtype=torch.bool))
    tokens = torch.randint(len(SPECIALS), model.target.size, (size, steps), generator=generator)
    tokens[:, 0] = BOS
    initial = state = network.start(Batch(target=source) if model.sourceless else Batch(source))
    logits = []
    for step in range(steps):
        output = network.advance(tokens[:, step : step + 1], state)
        state = output.state
        logits.append(output.logits)
    return CheckExample(source, initial, state, tokens, torch.cat(logits, 1))


@torch.no_grad()
def _write_graphs(
    network: Transducer, examples: list[CheckExample], folder: Path, start: str, sourceless: bool
) -> None:
    one, other = examples
    dynamic = torch.export.Dim.DYNAMIC
    before, after = named_tensors(one.initial), named_tensors(one.final)
    if list(before) != list(after):
        raise ValueError("the state has other tensors after the first step than before it")
    shapes = tuple(
        {axis: dynamic for axis in range(tensor.dim()) if tensor.shape[axis] != longer.shape[axis]}
        for tensor, longer in zip(after.values(), named_tensors(other.final).values(), strict=True)
    )
    past = [f"next.{name}" for name in after if name.startswith("past")]
    source_axes = {0: dynamic} if sourceless else {0: dynamic, 1: dynamic}
    source = (one.source.values, one.source.mask)
    step = (one.tokens[:, :1], tuple(after.values()))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it logs optional libraries that are not installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module, given, axes, names, file in (
            (
                StartGraph(network, sourceless),
                source,
                (source_axes, source_axes),
                (["source", "mask"], list(before)),
                start,
            ),
            (
                StepGraph(network, one.final),
                step,
                ({0: dynamic}, shapes),
                (["tokens", *after], ["logits", *past]),
                STEP,
            ),
        ):
            program = torch.onnx.export(
                module,
                given,
                dynamo=True,
                dynamic_shapes=axes,
                input_names=names[0],
                output_names=names[1],
                verbose=False,
            )
            assert program is not None
            for value in (value for node in program.model.graph for value in node.outputs):
                value.shape = None  # for some layers it states lengths of the example, which are dynamic
            program.save(folder / file)


def check_model(folder: str | Path) -> float:
    """Runs the example of the folder step by step and returns the largest difference of the logits.

    The difference is relative to the largest logit where that is above one. A large difference is an error.
    """
    folder = Path(folder)
    runtime = _library()
    meta = json.loads((folder / META).read_bytes())
    start, step = (runtime.InferenceSession(folder / meta[name]) for name in ("start", "step"))
    given = {name: tensor.numpy() for name, tensor in load_file(folder / CHECK).items()}
    read = {one.name: given[one.name] for one in start.get_inputs()}
    state = dict(zip([one.name for one in start.get_outputs()], start.run(None, read), strict=True))
    worst = 0.0
    for position in range(given["tokens"].shape[1]):
        state["tokens"] = given["tokens"][:, position : position + 1]
        logits, *past = step.run(None, {one.name: state[one.name] for one in step.get_inputs()})
        expected = given["logits"][:, position]
        worst = max(worst, float(abs(logits - expected).max() / max(1.0, abs(expected).max())))
        names = [one.name.removeprefix("next.") for one in step.get_outputs()[1:]]
        state |= dict(zip(names, past, strict=True))
    if worst > TOLERANCE:
        raise InputError(
            f"logits differ by up to {worst:.1e} from those of the run", where=str(folder), remedy="export it again"
        )
    return worst
