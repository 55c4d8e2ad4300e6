"""Exchange of models with other libraries: import here, export in `transduce.interop.export`."""

from transduce.contracts import Family
from transduce.interop.conversion import as_run, convert, locate, read, recognises
from transduce.interop.huggingface import FAMILIES, user_family
from transduce.interop.huggingface.family import ImportedModel
from transduce.interop.huggingface.languages import Languages

__all__ = [
    "FAMILIES",
    "Family",
    "ImportedModel",
    "Languages",
    "as_run",
    "convert",
    "locate",
    "read",
    "recognises",
    "user_family",
]
