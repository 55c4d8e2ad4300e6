"""Recipe selection from data statistics."""

from transduce.autoconfig.select import choose, recipe_for

__all__ = ["choose", "recipe_for"]
