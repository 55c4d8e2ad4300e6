"""Recipes: typed description of a run, overrides, registry of parts, compatibility checks, reference.

The defaults of a run are in the schema; the defaults of parts are in the signatures of their classes.
"""

from transduce.recipe.data import Corpora, Corpus, CurriculumRecipe, DataRecipe
from transduce.recipe.recipe import Recipe, changed_keys, describe_changes, dump, explain_error, load, override, parse
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
    "CurriculumRecipe",
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
    "changed_keys",
    "describe_changes",
    "dump",
    "explain_error",
    "load",
    "override",
    "parse",
]
