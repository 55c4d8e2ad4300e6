"""Loading of a run directory, a bundle, or a model of another toolkit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from transduce import interop
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, check_path
from transduce.evaluation.calibration import Calibration
from transduce.inference.ensemble import Combination, build_ensemble
from transduce.inference.lowering import Precision, lower_network
from transduce.inference.model import Model
from transduce.interop import bundle
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.model import Transducer
from transduce.recipe import Recipe, build, registry
from transduce.recipe.build import meta_device
from transduce.run import Run
from transduce.training.distributed import pick_device
from transduce.transfer.lora import load_run_weights


def load(
    path: str | Path | Sequence[str | Path],
    *,
    device: str = "auto",
    precision: Precision | None = None,
    trust_user_code: bool = False,
    combination: Combination | None = None,
    weights: Sequence[float] | None = None,
    step: int | None = None,
) -> Model:
    """Opens a run. No code of the run is executed: parts of the user's own (`file:Class`) must be allowed.

    On a CPU a copy of the network generates, lowered in fp32: the outputs are the same, several times faster, and the
    weights take up to twice the memory. With a precision, the network is one for generation: its weights are packed,
    and learn no more. Several runs, as a list or as "RUN1,RUN2", and the folder of `train --ensemble` are an ensemble:
    `combination` is `mean` (of the probabilities) or `log_linear`, `weights` are those of the runs (None: equal ones).
    All generate the same tokens; their sources may have different ones. `step`: the weights of the checkpoint of that
    update instead of those that the run predicts with.
    """
    members, weights = _expanded(_members(path), weights)
    if step is not None and (len(members) > 1 or step not in Run(Path(members[0])).checkpoints.steps()):
        raise InputError(
            f"no checkpoint of step {step}", where=str(path), remedy="name a step in RUN/checkpoints of one run"
        )
    if len(members) > 1 or weights is not None:
        models = [load(one, device=device, precision=precision, trust_user_code=trust_user_code) for one in members]
        ensemble = build_ensemble(models, [str(one) for one in members], combination or "mean", weights)
        if isinstance(path, str | Path) and combination is None and weights is None:  # as it was calibrated
            ensemble.calibration = Calibration.load(Path(path))
        return ensemble
    path = interop.locate(members[0])
    if bundle.recognises(path):
        with bundle.unpacked(path) as folder:
            return load(folder, device=device, precision=precision)
    run = Run(path)
    if interop.recognises(run.folder):
        imported = interop.read(run.folder)
        source, target = imported.tokenizers
        network = build.build_model(imported.recipe.model, source.size, target.size, source.word_starts)
        network.load_state_dict(check_weights(network.state_dict(), imported.weights, str(run.folder)))
        return _placed(network, (source, target), imported.recipe, device, precision)
    recipe = run.recipe()
    registry.check_user_code(recipe, str(run.recipe_file), trusted=trust_user_code)
    recipe = build.complete_recipe(recipe, str(run.recipe_file))
    source, target = run.tokenizers()
    with meta_device():  # no memory is allocated before the weights are known to fit
        expected = build.build_model(recipe.model, source.size, target.size).state_dict()
    tensors = check_weights(expected, load_run_weights(run, recipe, list(expected), step), str(run.folder))
    network = build.build_model(recipe.model, source.size, target.size, source.word_starts)
    network.load_state_dict(tensors)
    model = _placed(network, (source, target), recipe, device, precision)
    model.calibration = Calibration.load(run.folder)
    return model


def _members(path: str | Path | Sequence[str | Path]) -> list[str | Path]:
    """The runs that a path names: several where they are listed, or separated by commas and no file has that name."""
    if not isinstance(path, str | Path):
        given = [check_path("load", one) for one in (path if isinstance(path, Iterable) else [path])]
        if not given:
            raise InputError("no run was given", remedy="give at least one")
        return given
    several = "," in str(path) and not Path(path).exists()
    return [one for one in str(path).split(",") if one] if several else [path]


def _expanded(
    paths: Sequence[str | Path], weights: Sequence[float] | None
) -> tuple[list[str | Path], Sequence[float] | None]:
    """The runs of ensemble directories instead of these, which share the weight of their directory equally."""
    each: list[list[str | Path]] = [[*Run(Path(path)).members()] or [path] for path in paths]
    runs = [run for some in each for run in some]
    if weights is None and len(paths) > 1 and len(runs) > len(paths):
        weights = [1.0] * len(paths)
    if weights is not None and len(weights) == len(paths):  # a wrong number is reported with the runs
        weights = [weight / len(some) for weight, some in zip(weights, each, strict=True) for _ in some]
    return runs, weights


def _placed(
    network: Transducer,
    tokenizers: tuple[Tokenizer, Tokenizer],
    recipe: Recipe,
    device: str,
    precision: Precision | None,
) -> Model:
    network = network.to(pick_device(device))
    parameters = build.count_parameters(network)
    if precision is not None:
        network = lower_network(network, precision, weight_dtype=recipe.model.weight_dtype)
    graphs = SearchGraphs() if next(network.parameters()).is_cuda else None
    return Model(network, *tokenizers, recipe, parameters=parameters, graphs=graphs, lowers=precision is None)


def check_weights(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The weights of a network, without auxiliary ones. A name, shape or value that does not fit is an error."""
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("auxiliary.")}
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or extra:
        raise InputError(
            f"weights do not fit the recipe: missing {missing[:3]}, not used {extra[:3]}",
            where=where,
            remedy="the recipe is not the one it was trained with",
        )
    for name, tensor in expected.items():
        if tensor.shape != weights[name].shape:
            changed = "tokenizers are" if "embedding" in name or "output" in name else "recipe is"
            raise InputError(
                f"{name} is {tuple(weights[name].shape)} in the weights, {tuple(tensor.shape)} in the recipe",
                where=where,
                remedy=f"the {changed} not what it was trained with: restore the run directory",
            )
        if not torch.isfinite(weights[name]).all():
            raise InputError(
                f"{name} has values that are not finite",
                where=where,
                remedy="use an earlier checkpoint, or train again with a lower learning rate",
            )
    return weights
