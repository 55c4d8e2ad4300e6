"""Trained runs -> the first weights and tokenizers of a new one; which weights stay as they are; adapters."""

from transduce.inference.quantisation import check_learns, quantise
from transduce.transfer.freezing import frozen, frozen_names
from transduce.transfer.init import (
    Load,
    Origin,
    Transfer,
    check_origins,
    choose_tokenizers,
    open_origins,
    take_weights,
    vocabulary_weights,
)
from transduce.transfer.lora import attach, merge, targets, weights_of

__all__ = [
    "Load",
    "Origin",
    "Transfer",
    "attach",
    "check_learns",
    "check_origins",
    "choose_tokenizers",
    "frozen",
    "frozen_names",
    "merge",
    "open_origins",
    "quantise",
    "take_weights",
    "targets",
    "vocabulary_weights",
    "weights_of",
]
