"""The typed description of a whole run: load, override, reject, save. Every default of a run lives here, except
the options of parts (of the model, the objective), which live in the signatures of those parts (see contracts.py)."""

from transduce.recipe.data import Corpora, Corpus, DataRecipe
from transduce.recipe.model import CopyingRecipe, InitRecipe, ModelRecipe
from transduce.recipe.overrides import override
from transduce.recipe.results import EvaluationRecipe, GenerationRecipe
from transduce.recipe.tokens import TextRecipe, TokensRecipe
from transduce.recipe.training import AdaptersRecipe, OptimiserRecipe, ScheduleRecipe, TrainingRecipe
from transduce.recipe.whole import Recipe, dump, explain_error, load, parse

__all__ = [
    "AdaptersRecipe",
    "CopyingRecipe",
    "Corpora",
    "Corpus",
    "DataRecipe",
    "EvaluationRecipe",
    "GenerationRecipe",
    "InitRecipe",
    "ModelRecipe",
    "OptimiserRecipe",
    "Recipe",
    "ScheduleRecipe",
    "TextRecipe",
    "TokensRecipe",
    "TrainingRecipe",
    "dump",
    "explain_error",
    "load",
    "override",
    "parse",
]
