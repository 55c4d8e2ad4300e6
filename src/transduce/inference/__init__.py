"""Inference with a trained model: load, generate, score, embed, explain."""

from transduce.inference.loading import load
from transduce.inference.model import Model, PairScore, Prediction

__all__ = ["Model", "PairScore", "Prediction", "load"]
