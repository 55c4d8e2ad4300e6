"""A file of pairs in, the recipe that fits it out: tokens, size, schedule and metrics by looking at the data."""

from transduce.autoconfig.select import choose, recipe_for

__all__ = ["choose", "recipe_for"]
