"""A network enters; how far below its output each of its weights lies leaves: 0 on top, embeddings last."""

from __future__ import annotations

from torch import nn

from transduce.contracts import Position
from transduce.layers.embedding import Embedding

TOP, DECODER, ENCODER, BOTTOM = range(4)
Level = tuple[int, int]  # which of these, and the layers of the same part above it


def depths(model: nn.Module) -> dict[str, int]:
    """Parameter -> its layer, counted from the top over the layers that hold something to train.

    On top is what stands outside the stacks of an encoder and a decoder: the head; the output layer, reader and last
    norm of a decoder. Then come the decoder's layers from last to first, those of the encoder (what it has outside
    them goes with its last one), and at the bottom embeddings and positions. A weight that two places share lies
    where the lower one does.
    """
    parts = dict(model.named_modules(remove_duplicate=False))
    first: dict[str, str] = {}  # a shared parameter goes by its first name, as named_parameters gives it
    found: dict[str, Level] = {}
    by_identity: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            first[name] = by_identity.setdefault(id(parameter), name)
            found[first[name]] = max(found.get(first[name], (TOP, 0)), _level(name, parts))
    order = {level: number for number, level in enumerate(sorted(set(found.values())))}
    return {name: order[level] for name, level in found.items()}


def _level(name: str, parts: dict[str, nn.Module]) -> Level:
    words = name.split(".")
    above = [".".join(words[:count]) for count in range(1, len(words))]
    if any(isinstance(parts[path], (Embedding, nn.Embedding, Position)) for path in above):
        return (BOTTOM, 0)
    if words[0] not in ("encoder", "decoder"):
        return (TOP, 0)
    for path, number in zip(above, words[1:], strict=False):
        stack = parts[path]
        if isinstance(stack, nn.ModuleList):
            return (DECODER if words[0] == "decoder" else ENCODER, len(stack) - 1 - int(number))
    return (TOP, 0) if words[0] == "decoder" else (ENCODER, 0)
