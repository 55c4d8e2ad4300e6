"""Transduce: a PyTorch toolkit for encoder-decoder models. The public names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transduce.api import TransduceEstimator, evaluate, plan, train
    from transduce.errors import InputError
    from transduce.evaluation.comparison import compare
    from transduce.explain.alignment import align
    from transduce.inference import Constraints, Model, Prediction, load
    from transduce.interop.export import export
    from transduce.recipe import Recipe
    from transduce.training.experiment import TrainingResult
    from transduce.training.report import Callback

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Constraints",
    "InputError",
    "Model",
    "Prediction",
    "Recipe",
    "TrainingResult",
    "TransduceEstimator",
    "align",
    "compare",
    "evaluate",
    "export",
    "load",
    "plan",
    "train",
]

_MODULES = {
    "Callback": "training.report",
    "Constraints": "inference",
    "InputError": "errors",
    "Model": "inference",
    "Prediction": "inference",
    "Recipe": "recipe",
    "TrainingResult": "training.experiment",
    "TransduceEstimator": "api",
    "align": "explain.alignment",
    "compare": "evaluation.comparison",
    "evaluate": "api",
    "export": "interop.export",
    "load": "inference",
    "plan": "api",
    "train": "api",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import transduce` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
