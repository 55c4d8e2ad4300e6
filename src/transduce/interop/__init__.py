"""Exchange of models with other libraries: import here, export in `transduce.interop.export`."""

from transduce.interop.conversion import as_run, convert, locate, read, recognises
from transduce.interop.huggingface import FAMILIES
from transduce.interop.huggingface.family import ImportedModel
from transduce.interop.huggingface.languages import Languages

__all__ = ["FAMILIES", "ImportedModel", "Languages", "as_run", "convert", "locate", "read", "recognises"]
