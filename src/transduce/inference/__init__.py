"""A run directory in, a model out that reads and writes raw text: generate, score, logits, explain."""

from transduce.inference.generation import in_chunks
from transduce.inference.loading import load
from transduce.inference.model import Model, PairScore, Prediction

__all__ = ["Model", "PairScore", "Prediction", "in_chunks", "load"]
