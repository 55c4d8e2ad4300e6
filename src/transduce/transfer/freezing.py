"""Frozen parameters, selected by name patterns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from transduce.errors import InputError, nearest
from transduce.layers.norm import BatchNorm


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
