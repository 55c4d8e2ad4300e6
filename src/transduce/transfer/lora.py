"""A network with the weights of a base enters; it leaves with low-rank adapters beside them, and learns only those.

W x becomes W x + alpha / rank * B A x (Hu et al. 2021, "LoRA"). B begins as 0, so the first output is the base's. The
state of such a network is what it learned: adapters, and weights that the base did not have. `joined` puts the base
and what was learned together again, as plain weights.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce import build
from transduce.errors import InputError
from transduce.inference.quantisation import whole_weights
from transduce.recipe import AdaptersRecipe, InitRecipe, Recipe
from transduce.recipe import registry as shelves
from transduce.run import Run
from transduce.transfer.freezing import named

BASE = "adapter_base"  # the fingerprint of the base, kept among the weights
PLACE = re.compile(r"(.*)\.adapters\.(\w+)\.(down|up)")
Weights = Mapping[str, Tensor]


class LowRank(nn.Module):
    """scale * B A, for a matrix of this shape."""

    def __init__(self, rows: int, columns: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(torch.empty(rank, columns))  # A
        self.up = nn.Parameter(torch.zeros(rows, rank))  # B
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(F.linear(values, self.down), self.up) * self.scale

    def matrix(self) -> Tensor:
        return self.scale * self.up @ self.down


def targets(network: nn.Module, settings: AdaptersRecipe, taken: Collection[str] | None = None) -> list[str]:
    """The matrices that get an adapter: of dense layers and recurrent cells, taken from the base, in one place only.

    One that two places share (a tied output layer) is left out: merged, it would change in both.
    """
    places = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    names = []
    for path, module in network.named_modules():
        if isinstance(module, (nn.Linear, nn.RNNBase)):
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{path}.{name}"
                if parameter.ndim == 2 and places[id(parameter)] == 1 and (taken is None or full in taken):
                    names.append(full)
    return named(names, settings.targets, "training.adapters.targets")


def attach(network: nn.Module, settings: AdaptersRecipe, taken: Sequence[str]) -> None:
    """Adapters beside what was taken from the base, which the network's state then no longer holds."""
    base = set(taken)
    chosen = targets(network, settings, base)
    own = network.state_dict()
    network.register_buffer(BASE, fingerprint({name: own[name] for name in base}))
    for full in chosen:
        path, _, name = full.rpartition(".")
        module = network.get_submodule(path)
        held = getattr(module, "adapters", None)
        if not isinstance(held, nn.ModuleDict):
            held = module.adapters = nn.ModuleDict()
            _hook(module)
        rows, columns = own[full].shape
        adapter = LowRank(rows, columns, settings.rank, settings.alpha / settings.rank)
        held[name] = adapter.to(own[full])
    _keep_apart(network, base)


def _hook(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.register_forward_hook(lambda one, given, result: result + one.adapters["weight"](given[0]))
    else:
        # A cell hands all its matrices to one kernel: for the length of a call they are the adapted ones.
        module.register_forward_pre_hook(lambda one, _: _mount(one, adapted=True))
        module.register_forward_hook(lambda one, *_: _mount(one, adapted=False), always_call=True)


def _mount(cell: Any, *, adapted: bool) -> None:
    weights = {name: getattr(cell, name) for name in cell._flat_weights_names}
    added = {name: adapter.matrix() for name, adapter in cell.adapters.items()} if adapted else {}
    cell._flat_weights = [weight + added[name] if name in added else weight for name, weight in weights.items()]


def _keep_apart(network: nn.Module, base: set[str]) -> None:
    """The state of the network is what is not in the base; a state that stands on another base is refused."""

    def leave_out(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        for name in base:
            state.pop(prefix + name, None)

    def compare(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        given = state.get(prefix + BASE)
        if given is not None and not torch.equal(given.cpu(), module.get_buffer(BASE).cpu()):
            raise changed()

    def expect_less(_: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in base]

    network.register_state_dict_post_hook(leave_out)
    network.register_load_state_dict_pre_hook(compare)
    network.register_load_state_dict_post_hook(expect_less)


def changed(where: str = "init.model") -> InputError:
    return InputError(
        "the base of these adapters has other weights than when they were trained",
        where=where,
        remedy="restore the base as it was; adapters say nothing without it",
    )


def fingerprint(weights: Weights) -> Tensor:
    """32 bytes that name these weights, to the bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def joined(
    base: Weights, learned: Weights, names: Collection[str], settings: AdaptersRecipe, where: str
) -> dict[str, Tensor]:
    """Plain weights of these names: the base's, those learned, and W + alpha / rank * B A where there is an adapter."""
    kept = [name for name in names if name not in learned]
    if not set(kept) <= base.keys() or not torch.equal(fingerprint({n: base[n] for n in kept}), learned[BASE]):
        raise changed(where)
    result = {name: learned[name] if name in learned else base[name] for name in names}
    for name in learned:
        if (found := PLACE.fullmatch(name)) and found[3] == "down":
            full = f"{found[1]}.{found[2]}"
            up, down = learned[f"{name.removesuffix('down')}up"], learned[name]
            result[full] = result[full] + settings.alpha / settings.rank * up @ down
    return result


def weights_of(run: Run, recipe: Recipe, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """What a run predicts with. `names` are those of its network; left out, they are found from its recipe."""
    checkpoint = run.checkpoints.chosen()
    if checkpoint is None:
        raise InputError("this run has no checkpoint yet", where=str(run.folder), remedy="train it with --resume")
    adapters = recipe.training.adapters
    if adapters is None:
        return whole_weights(checkpoint.weights)
    assert recipe.init.model is not None, "a recipe with adapters has a base"
    base = Run(Path(recipe.init.model))
    if not base.exists:
        raise InputError(
            f"the base of these adapters is gone: {base.folder}",
            where=str(run.recipe_file),
            remedy="put the run back there, or set init.model in this file to where it is now",
        )
    given = weights_of(base, base.recipe())
    return joined(given, checkpoint.weights, names or _names(run, recipe), adapters, str(base.folder))


def _names(run: Run, recipe: Recipe) -> list[str]:
    if own := shelves.own_parts(recipe):
        raise InputError(
            f"this model needs code of its own: {', '.join(own)}",
            where=str(run.recipe_file),
            remedy="merge it first: transduce merge RUN NEW_RUN --own-parts",
        )
    with torch.device("meta"):  # the names are those of any vocabulary
        return list(build.build_model(build.complete_recipe(recipe).model, 8, 8).state_dict())


def merge(folder: str | Path, new: str | Path, weights: dict[str, Tensor] | None = None) -> Run:
    """Writes a plain run that needs no base: the same recipe without adapters, the same tokens, the merged weights."""
    run, target = Run(Path(folder)), Run(Path(new))
    recipe = run.recipe()
    if recipe.training.adapters is None:
        raise InputError("this run has no adapters to merge", where=str(run.folder), remedy="it is a plain run already")
    if target.exists or target.checkpoints.steps():
        raise InputError("there is a run here already", where=str(target.folder), remedy="give another folder")
    checkpoint = run.checkpoints.chosen()
    plain = weights or weights_of(run, recipe)
    assert checkpoint is not None
    tokenizers = run.tokenizers()
    target.folder.mkdir(parents=True, exist_ok=True)
    target.save_tokenizers(*tokenizers)
    target.checkpoints.save_final(checkpoint.step, plain, {})
    training = recipe.training.model_copy(update={"adapters": None})
    # Whoever trains the new run further begins from what was merged.
    init = InitRecipe(model=str(run.folder.absolute()))
    target.save_recipe(recipe.model_copy(update={"training": training, "init": init}))
    return target
