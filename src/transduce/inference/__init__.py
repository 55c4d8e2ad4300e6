"""Inference with a trained model: load, generate, score, embed, explain."""

from transduce.inference.generation import in_chunks
from transduce.inference.loading import load
from transduce.inference.model import Model, PairScore, Prediction

__all__ = ["Model", "PairScore", "Prediction", "in_chunks", "load"]
