"""Transfer learning: initialisation from trained runs, frozen parameters, LoRA adapters."""

from transduce.transfer.init import (
    InitReport,
    LoadReport,
    PretrainedRun,
    check_pretrained,
    choose_tokenizers,
    load_pretrained,
    load_word_vectors,
    open_pretrained,
    vocabulary_weights,
)
from transduce.transfer.lora import (
    adapter_targets,
    add_adapters,
    freeze,
    frozen_names,
    load_run_weights,
    merge_adapters,
)

__all__ = [
    "InitReport",
    "LoadReport",
    "PretrainedRun",
    "adapter_targets",
    "add_adapters",
    "check_pretrained",
    "choose_tokenizers",
    "freeze",
    "frozen_names",
    "load_pretrained",
    "load_run_weights",
    "load_word_vectors",
    "merge_adapters",
    "open_pretrained",
    "vocabulary_weights",
]
