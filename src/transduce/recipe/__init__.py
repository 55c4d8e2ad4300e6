"""The typed description of a whole run: load, override, reject, save. Every default of a run lives here, except
the options of parts (of the model, the objective), which live in the signatures of those parts (see contracts.py)."""

from transduce.recipe.data import Corpora, Corpus, DataRecipe
from transduce.recipe.overrides import override
from transduce.recipe.recipe import Recipe, dump, explain_error, load, parse
from transduce.recipe.schema import (
    AdaptersRecipe,
    CopyRecipe,
    EvaluationRecipe,
    GenerationRecipe,
    InitRecipe,
    ModelRecipe,
    OptimiserRecipe,
    ScheduleRecipe,
    TextRecipe,
    TokensRecipe,
    TrainingRecipe,
)

__all__ = [
    "AdaptersRecipe",
    "CopyRecipe",
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
