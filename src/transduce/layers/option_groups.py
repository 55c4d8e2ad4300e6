"""Option groups of encoders and decoders: attention, feed-forward, norm, sub-layers.

A constructor takes a few of these small values; a recipe gives their fields flat, beside the other options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt
from torch import nn

from transduce.attention.scores import ScaledDot, Softmax
from transduce.contracts import AttentionScore, Count, Normaliser, Rate
from transduce.layers.feed_forward import Activation, FeedForward, MixtureOfExperts
from transduce.layers.norm import Normalisation, NormPlacement, make_norm

Init = Callable[..., None]


@dataclass(frozen=True)
class AttentionOptions:
    """The options that all attention layers of a model have in common."""

    heads: Count = 4
    kv_heads: Count | None = None  # heads of keys and values, each shared by a group of query heads; None: heads
    head_width: Count | None = None  # None: the width of the model, divided by the heads
    score: type[AttentionScore] = ScaledDot
    normaliser: type[Normaliser] = Softmax
    projections: Literal["all", "none"] = "all"
    attention_dropout: Rate = 0.0

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads


@dataclass(frozen=True)
class FeedForwardOptions:
    """The options of the feed-forward networks of a model."""

    ff_width: Count = 1024
    activation: Activation = "relu"
    gated: bool = False
    activation_dropout: Rate = 0.0
    experts: Count | None = None  # networks in each layer, of which a router chooses; None: one, without a router
    experts_per_token: Count = 1
    experts_every: Count = 1  # every nth layer has experts
    experts_first: Annotated[int, Ge(0)] = 0  # the first layer that has them

    def make(self, width: int, bias: bool = True) -> FeedForward:
        return FeedForward(width, self.ff_width, self.activation, self.activation_dropout, gated=self.gated, bias=bias)

    def make_layer(self, number: int, width: int, bias: bool = True) -> FeedForward | MixtureOfExperts:
        """The network of a layer: one, or a mixture of experts."""
        after = number - self.experts_first
        if self.experts is None or after < 0 or after % self.experts_every:
            return self.make(width, bias)
        return MixtureOfExperts(width, [self.make(width, bias) for _ in range(self.experts)], self.experts_per_token)


@dataclass(frozen=True)
class NormOptions:
    """The options of the norms of a Transformer stack."""

    norm: NormPlacement = "pre"
    norm_kind: Normalisation = "layer"
    norm_eps: Annotated[float, Gt(0)] | None = None
    embedding_norm: bool = False  # a norm over the sum of embeddings and positions (Devlin 2019)
    first_norm: bool = True  # False: the first sub-layer of a pre-norm stack has no norm (Warner 2024)

    def make(self, width: int, bias: bool = True) -> nn.Module:
        return make_norm(self.norm_kind, width, bias, self.norm_eps)


@dataclass(frozen=True)
class SublayerOptions:
    """The options of the sub-layers of a Transformer layer, which every token mixer is built with."""

    attention: AttentionOptions = AttentionOptions()
    feed_forward: FeedForwardOptions = FeedForwardOptions()
    bias: bool = True  # of the linear layers and norms


def flat_options(init: Init) -> Init:
    """An `__init__` whose keyword-only dataclass parameters are given as their fields, which may be groups again.

    With `norm: NormOptions` in the signature, callers and recipes write `norm_kind=..., norm_eps=...`. The signature
    and the annotations of the result are flat, so the registry finds the type and default of every option.
    """
    hints = get_type_hints(init, include_extras=True)
    parameters = inspect.signature(init).parameters.values()
    groups = {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY and is_dataclass(hints[p.name])}
    flat: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            flat += _field_parameters(groups[parameter.name])
        else:
            flat.append(parameter.replace(annotation=hints.get(parameter.name, parameter.annotation)))

    @wraps(init)
    def construct(self: Any, *given: Any, **options: Any) -> None:
        grouped = {name: _take(group, options) for name, group in groups.items()}
        init(self, *given, **grouped, **options)

    construct.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    construct.__annotations__ = {p.name: p.annotation for p in flat if p.name != "self"}
    return construct


def _take(group: Any, options: dict[str, Any]) -> Any:
    """The group, made of those of the flat options that are its fields; they are removed from the options."""
    inner = _groups_of(group)
    taken = {name: _take(one, options) for name, one in inner.items()}
    given = {field.name for field in fields(group)} & options.keys() - inner.keys()
    return group(**taken, **{name: options.pop(name) for name in given})


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    hints, inner = get_type_hints(group, include_extras=True), _groups_of(group)
    flat: list[inspect.Parameter] = []
    for field in fields(group):
        if field.name in inner:
            flat += _field_parameters(inner[field.name])
        else:
            kind, default, hint = inspect.Parameter.KEYWORD_ONLY, _default(field), hints[field.name]
            flat.append(inspect.Parameter(field.name, kind, default=default, annotation=hint))
    return flat


@cache
def _groups_of(group: Any) -> Mapping[str, Any]:
    return {name: hint for name, hint in get_type_hints(group).items() if is_dataclass(hint)}


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
