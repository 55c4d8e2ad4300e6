"""LoRA adapters (Hu et al. 2021), and frozen parameters, selected by name patterns.

W x becomes W x + alpha / rank * B A x. B starts at 0, so that the first output equals that of the base model. The
state_dict of an adapted network holds only what is trained: the adapters, and the weights that the base does not have.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.errors import InputError, nearest
from transduce.inference.quantisation import whole_weights
from transduce.layers.norm import BatchNorm
from transduce.recipe import AdaptersRecipe, InitRecipe, Recipe, build, registry
from transduce.run import Run, new_run

BASE_FINGERPRINT = "base_fingerprint"  # a buffer of the adapted network, saved with its weights
ADAPTER_NAME = re.compile(r"(.*)\.adapters\.(\w+)\.lora_(a|b)")
Weights = Mapping[str, Tensor]


def match_names(names: Sequence[str], patterns: Iterable[str], where: str) -> list[str]:
    """The names that the patterns select.

    A pattern is a full name or a prefix of one that ends at a dot; both may contain the wildcards * and ?.
    """
    result: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not matches:
            raise InputError(f"no weight is called {pattern!r}", where=where, remedy=_suggest(pattern, names))
        result.update(dict.fromkeys(matches))
    return list(result)


def _suggest(pattern: str, names: Sequence[str]) -> str:
    parts = [name.split(".") for name in names]
    prefixes = {".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}
    close = get_close_matches(pattern, sorted(prefixes), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else nearest(pattern, {".".join(part[:2]) for part in parts})


def frozen_names(network: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The names of the parameters that the patterns freeze. At least one parameter must remain trainable."""
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    result = match_names(names, patterns, "training.freeze")
    trainable = {id(parameter) for parameter in network.parameters() if parameter.requires_grad}
    trainable -= {
        id(parameter) for name, parameter in network.named_parameters(remove_duplicate=False) if name in result
    }
    if not trainable:
        raise InputError(
            "everything is frozen: no parameter is left to train",
            where="training.freeze",
            remedy="name fewer parameters",
        )
    return result


@contextmanager
def freeze(network: nn.Module, patterns: Iterable[str]) -> Iterator[None]:
    """Freezes the selected parameters inside the block: no gradient, and no optimiser state."""
    names = set(frozen_names(network, patterns))
    all_parameters = network.named_parameters(remove_duplicate=False)
    frozen = [parameter for name, parameter in all_parameters if name in names and parameter.requires_grad]
    # The running statistics of batch normalisation change without a gradient: a momentum of 0 keeps them.
    norms = [
        part for name, part in network.named_modules() if isinstance(part, BatchNorm) and f"{name}.weight" in names
    ]
    momenta = [norm.momentum for norm in norms]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


class LoRA(nn.Module):
    """Low-rank update of a matrix: scale * B A."""

    def __init__(self, rows: int, columns: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_a = nn.Parameter(torch.empty(rank, columns))
        self.lora_b = nn.Parameter(torch.zeros(rows, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(F.linear(values, self.lora_a), self.lora_b) * self.scale

    def matrix(self) -> Tensor:
        return self.scale * self.lora_b @ self.lora_a


def adapter_targets(
    network: nn.Module, settings: AdaptersRecipe, base_names: Collection[str] | None = None
) -> list[str]:
    """The names of the matrices that get an adapter: weights of linear layers and recurrent cells from the base.

    A tied matrix is left out: merging its adapter would change both of its uses.
    """
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    names = []
    for path, module in network.named_modules():
        if isinstance(module, (nn.Linear, nn.RNNBase)):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                name = f"{path}.{parameter_name}"
                if parameter.ndim == 2 and uses[id(parameter)] == 1 and (base_names is None or name in base_names):
                    names.append(name)
    return match_names(names, settings.targets, "training.adapters.targets")


def add_adapters(network: nn.Module, settings: AdaptersRecipe, base_names: Sequence[str]) -> None:
    """Adds adapters to the target matrices, and removes the weights of the base from the network's state_dict."""
    base = set(base_names)
    targets = adapter_targets(network, settings, base)
    own = network.state_dict()
    network.register_buffer(BASE_FINGERPRINT, fingerprint({name: own[name] for name in base}))
    for name in targets:
        path, _, parameter_name = name.rpartition(".")
        module = network.get_submodule(path)
        adapters = getattr(module, "adapters", None)
        if not isinstance(adapters, nn.ModuleDict):
            adapters = module.adapters = nn.ModuleDict()
            _register_forward_hooks(module)
        rows, columns = own[name].shape
        adapter = LoRA(rows, columns, settings.rank, settings.alpha / settings.rank)
        adapters[parameter_name] = adapter.to(own[name])
    _exclude_base_from_state_dict(network, base)


def _register_forward_hooks(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.register_forward_hook(lambda one, given, result: result + one.adapters["weight"](given[0]))
    else:
        # A recurrent cell passes all its matrices to one kernel: they are replaced for the duration of a call.
        module.register_forward_pre_hook(lambda one, _: _set_flat_weights(one, adapted=True))
        module.register_forward_hook(lambda one, *_: _set_flat_weights(one, adapted=False), always_call=True)


def _set_flat_weights(cell: Any, *, adapted: bool) -> None:
    weights = {name: getattr(cell, name) for name in cell._flat_weights_names}
    updates = {name: adapter.matrix() for name, adapter in cell.adapters.items()} if adapted else {}
    cell._flat_weights = [weight + updates[name] if name in updates else weight for name, weight in weights.items()]


def _exclude_base_from_state_dict(network: nn.Module, base: set[str]) -> None:
    """Saves only what the base does not have; loading a state that belongs to another base is an error."""

    def remove_base(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        for name in base:
            state.pop(prefix + name, None)

    def check_fingerprint(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        given = state.get(prefix + BASE_FINGERPRINT)
        if given is not None and not torch.equal(given.cpu(), module.get_buffer(BASE_FINGERPRINT).cpu()):
            raise _base_changed_error()

    def allow_missing_base(_: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in base]

    network.register_state_dict_post_hook(remove_base)
    network.register_load_state_dict_pre_hook(check_fingerprint)
    network.register_load_state_dict_post_hook(allow_missing_base)


def _base_changed_error(where: str = "init.model") -> InputError:
    return InputError(
        "the base of these adapters has other weights than when they were trained",
        where=where,
        remedy="restore the base run: adapters work only with the weights that they were trained on",
    )


def fingerprint(weights: Weights) -> Tensor:
    """SHA-256 of names, types, shapes and bits, as 32 bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def merge_weights(
    base: Weights, learned: Weights, names: Collection[str], settings: AdaptersRecipe, where: str
) -> dict[str, Tensor]:
    """Weights of a plain network: W + alpha / rank * B A where there is an adapter, else trained or base weights."""
    from_base = [name for name in names if name not in learned]
    unchanged = set(from_base) <= base.keys() and torch.equal(
        fingerprint({name: base[name] for name in from_base}), learned[BASE_FINGERPRINT]
    )
    if not unchanged:
        raise _base_changed_error(where)
    result = {name: learned[name] if name in learned else base[name] for name in names}
    for name in learned:
        if (match := ADAPTER_NAME.fullmatch(name)) and match[3] == "a":
            target = f"{match[1]}.{match[2]}"
            lora_a, lora_b = learned[name], learned[f"{name.removesuffix('lora_a')}lora_b"]
            result[target] = result[target] + settings.alpha / settings.rank * lora_b @ lora_a
    return result


def load_run_weights(
    run: Run, recipe: Recipe, names: Collection[str] | None = None, step: int | None = None
) -> dict[str, Tensor]:
    """The weights that a run predicts with, or those of the checkpoint of one step, adapters merged.

    `names` are the parameter names of its network; by default they are derived from the recipe.
    """
    checkpoints = run.checkpoints
    checkpoint = checkpoints.for_inference() if step is None else checkpoints.load(step, only=("weights", "ema"))
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
            remedy=f"restore that run, or name its new folder: transduce edit-recipe {run.folder} init.model=FOLDER",
        )
    base_weights = load_run_weights(base, base.recipe())
    names = names or _parameter_names(run, recipe)
    return merge_weights(base_weights, checkpoint.weights, names, adapters, str(base.folder))


def _parameter_names(run: Run, recipe: Recipe) -> list[str]:
    if own := registry.user_classes(recipe):
        raise InputError(
            f"this model uses Python code of the user: {', '.join(own)}",
            where=str(run.recipe_file),
            remedy="merge it first: transduce merge RUN NEW_RUN --trust-user-code",
        )
    with torch.device("meta"):  # the names do not depend on the vocabulary sizes
        return list(build.build_model(build.complete_recipe(recipe).model, 8, 8).state_dict())


def merge_adapters(folder: str | Path, new: str | Path, weights: dict[str, Tensor] | None = None) -> Run:
    """Writes a plain run without adapters: the same recipe and tokenizers, the merged weights."""
    run = Run(Path(folder))
    recipe = run.recipe()
    if recipe.training.adapters is None:
        raise InputError("this run has no adapters to merge", where=str(run.folder), remedy="use it as it is")
    checkpoint = run.checkpoints.for_inference()
    merged = weights or load_run_weights(run, recipe)
    assert checkpoint is not None
    training = recipe.training.model_copy(update={"adapters": None})
    # Further training of the new run starts from the merged weights.
    init = InitRecipe(model=str(run.folder.absolute()))
    plain = recipe.model_copy(update={"training": training, "init": init})
    with new_run(new) as target:
        target.save_model(plain, run.tokenizers(), merged, checkpoint.step)
    return Run(Path(new))
