"""Lowering: a trained network as a program for inference, in a precision and on a backend."""

from transduce.inference.lowering.lower import Precision, lower_network, weight_versions

__all__ = ["Precision", "lower_network", "weight_versions"]
