"""Recipe selection from data statistics."""

from transduce.autoconfig.select import Plan, choose, continued_recipe, plan_for, recipe_for

__all__ = ["Plan", "choose", "continued_recipe", "plan_for", "recipe_for"]
