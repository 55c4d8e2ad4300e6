"""Recipe selection from data statistics."""

from transduce.autoconfig.select import Plan, choose, plan_for, recipe_for

__all__ = ["Plan", "choose", "plan_for", "recipe_for"]
