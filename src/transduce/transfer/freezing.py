"""A network and patterns of names enter; inside a block, the weights they name stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from transduce.errors import InputError, nearest
from transduce.layers.norm import BatchNorm


def named(names: Sequence[str], patterns: Iterable[str], where: str) -> list[str]:
    """The names that patterns mean: a name, the beginning of one up to a dot, or either with * and ?."""
    result: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not found:
            raise InputError(f"no weight is called {pattern!r}", where=where, remedy=_nearest(pattern, names))
        result.update(dict.fromkeys(found))
    return list(result)


def frozen_names(network: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The parameters that patterns name; freezing all that could be trained is refused."""
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    result = named(names, patterns, "training.freeze")
    left = {id(parameter) for parameter in network.parameters() if parameter.requires_grad}
    left -= {id(parameter) for name, parameter in network.named_parameters(remove_duplicate=False) if name in result}
    if not left:
        raise InputError(
            "everything is frozen: nothing is left to train", where="training.freeze", remedy="free a part"
        )
    return result


def _nearest(pattern: str, names: Sequence[str]) -> str:
    parts = [name.split(".") for name in names]
    known = {".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}
    close = get_close_matches(pattern, sorted(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else nearest(pattern, {".".join(part[:2]) for part in parts})


@contextmanager
def frozen(network: nn.Module, patterns: Iterable[str]) -> Iterator[None]:
    """Inside, these weights are not trained: they get no gradient, and the optimiser does not know them."""
    names = set(frozen_names(network, patterns))
    every = network.named_parameters(remove_duplicate=False)
    still = [parameter for name, parameter in every if name in names and parameter.requires_grad]
    # Running means move without a gradient.
    norms = [
        part for name, part in network.named_modules() if isinstance(part, BatchNorm) and f"{name}.weight" in names
    ]
    momenta = [norm.momentum for norm in norms]
    for parameter in still:
        parameter.requires_grad_(False)
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for parameter in still:
            parameter.requires_grad_(True)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
