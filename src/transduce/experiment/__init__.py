"""A recipe in, a run directory out: prepared data, a trained model, its scores."""

from transduce.experiment.results import Trained
from transduce.experiment.settling import settle
from transduce.experiment.training import train

__all__ = ["Trained", "settle", "train"]
