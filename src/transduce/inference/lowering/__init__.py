"""A trained network in, the same network for generation in another precision out."""

from transduce.inference.lowering.network import Precision, for_generation

__all__ = ["Precision", "for_generation"]
