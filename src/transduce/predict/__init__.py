"""A run directory in, a model out that reads and writes raw text: generate, score, logits, explain."""

from transduce.predict.model import Model
from transduce.predict.opening import load
from transduce.predict.results import PairScore, Prediction
from transduce.predict.texts import in_chunks

__all__ = ["Model", "PairScore", "Prediction", "in_chunks", "load"]
