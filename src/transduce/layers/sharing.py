"""Two parts of a model in; out, the same two with one set of weights wherever a name and a shape are in both."""

from __future__ import annotations

from torch import nn

from transduce.errors import InputError

APART = "embedding."  # its rows stand for tokens: whoever builds the parts decides whether they are the same


def share_weights(one: nn.Module, other: nn.Module) -> list[str]:
    """`other` takes over the parameters of `one`; gives their names.

    A list of another length stands for other things on the other side (the norms of a decoder's block have one more
    among them), so nothing in it is compared.
    """
    unlike = [name for name, length in _lists(one).items() if _lists(other).get(name) != length]
    theirs = dict(other.named_parameters(remove_duplicate=False))
    shared = []
    for name, parameter in one.named_parameters(remove_duplicate=False):
        fits = name in theirs and theirs[name].shape == parameter.shape and not name.startswith(APART)
        if fits and not any(name.startswith(f"{place}.") for place in unlike):
            place, _, last = name.rpartition(".")
            setattr(other.get_submodule(place), last, parameter)
            shared.append(name)
    if not shared:
        raise InputError(
            "encoder and decoder have no weights of equal name and shape to share",
            remedy="give both one kind, width and number of layers, and a recurrent encoder bidirectional: false",
        )
    return shared


def _lists(part: nn.Module) -> dict[str, int]:
    return {name: len(inner) for name, inner in part.named_modules() if isinstance(inner, nn.ModuleList)}
