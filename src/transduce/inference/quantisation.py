"""Int8 quantisation of stored weights: one scale per row, and runs of a quarter of the size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from transduce.errors import InputError
from transduce.kernels.linear import QuantisedRows, quantise_rows
from transduce.recipe import Recipe
from transduce.run import Run, new_run

SCALES = "scales."  # before the name of a rounded matrix: the name of its scales


def rounded_weights(network: nn.Module) -> dict[str, Tensor]:
    """The weights of a network, those of linear layers, embeddings and recurrent cells in whole numbers with scales."""
    kinds = (nn.Linear, nn.Embedding, nn.RNNBase)
    matrices = {
        parameter
        for part in network.modules()
        if isinstance(part, kinds)
        for parameter in part.parameters(recurse=False)
        if parameter.dim() == 2
    }
    addresses = {parameter.data_ptr() for parameter in matrices}
    found: dict[str, Tensor] = {}
    made: dict[int, QuantisedRows] = {}  # what is tied is rounded once, and stays tied
    for name, tensor in network.state_dict().items():
        if tensor.dim() == 2 and tensor.data_ptr() in addresses:
            if tensor.data_ptr() not in made:
                made[tensor.data_ptr()] = quantise_rows(tensor)
            found[name], found[SCALES + name] = made[tensor.data_ptr()]
        else:
            found[name] = tensor
    return found


def whole_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the same names, every matrix in fp32."""
    found = {name: tensor for name, tensor in weights.items() if not name.startswith(SCALES)}
    for name, scales in weights.items():
        if name.startswith(SCALES):
            matrix = name.removeprefix(SCALES)
            found[matrix] = weights[matrix].float() * scales[:, None]
    return found


def quantise(folder: str | Path, new: str | Path, network: nn.Module) -> Run:
    """Writes a run with the same tokens and `model.weight_dtype: int8`; `network` is the run's own, in fp32."""
    run = Run(Path(folder))
    recipe = run.recipe()
    if recipe.model.weight_dtype == "int8":
        raise InputError("this run is already quantised to int8", where=str(run.folder), remedy="copy the folder")
    checkpoint = run.checkpoints.for_inference()
    if checkpoint is None:
        raise InputError("this run has no checkpoint yet", where=str(run.folder), remedy="train it with --resume")
    changes = {
        "model": recipe.model.model_copy(update={"weight_dtype": "int8"}),
        # Adapters are in the matrices by now, and what the run began from is behind it.
        "training": recipe.training.model_copy(update={"adapters": None}),
        "init": type(recipe.init)(),
    }
    with new_run(new) as target:
        rounded = recipe.model_copy(update=changes)
        target.save_model(rounded, run.tokenizers(), rounded_weights(network), checkpoint.step)
    return Run(Path(new))


def check_learns(recipe: Recipe, where: str) -> None:
    """Refuses a run whose weights were rounded where it would have to learn."""
    if recipe.model.weight_dtype == "int8":
        raise InputError(
            "this run is quantised to int8 for inference and cannot be trained",
            where=where,
            remedy="train the run that it was made from, or initialise from that one",
        )
