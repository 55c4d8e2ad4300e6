"""Shapes: a recipe in, every tensor of its model out, by name, shape in letters, sizes and meaning."""

from transduce.shapes.explain import explain_shapes, shapes_of
from transduce.shapes.letters import Row
from transduce.shapes.table import draw, save

__all__ = ["Row", "draw", "explain_shapes", "save", "shapes_of"]
