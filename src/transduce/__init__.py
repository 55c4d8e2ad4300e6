"""Encoder-decoder models: pairs in, a trained, scored, explained model out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transduce.errors import InputError
    from transduce.experiment import Trained, train
    from transduce.predict import Model, Prediction, load
    from transduce.recipe import Recipe

__all__ = ["InputError", "Model", "Prediction", "Recipe", "Trained", "load", "train"]

_HOMES = {
    "InputError": "errors",
    "Model": "predict",
    "Prediction": "predict",
    "Recipe": "recipe",
    "Trained": "experiment",
    "load": "predict",
    "train": "experiment",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is asked for: importing the package stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
