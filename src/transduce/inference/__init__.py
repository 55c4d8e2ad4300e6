"""Inference with a trained model: load, generate, score, embed, explain."""

from transduce.inference.loading import load
from transduce.inference.model import Model
from transduce.inference.prediction import PairScore, Prediction
from transduce.inference.terminology import Constraints

__all__ = ["Constraints", "Model", "PairScore", "Prediction", "load"]
