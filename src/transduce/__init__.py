"""Encoder-decoder models: pairs in, a trained, scored, explained model out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transduce.errors import InputError
    from transduce.inference import Model, Prediction, load
    from transduce.recipe import Recipe
    from transduce.training.experiment import TrainingResult, train

__all__ = ["InputError", "Model", "Prediction", "Recipe", "TrainingResult", "load", "train"]

_HOMES = {
    "InputError": "errors",
    "Model": "inference",
    "Prediction": "inference",
    "Recipe": "recipe",
    "TrainingResult": "training.experiment",
    "load": "inference",
    "train": "training.experiment",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is asked for: importing the package stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
