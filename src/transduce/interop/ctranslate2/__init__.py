"""CTranslate2: export of Transformers, and import of folders with a `model.bin`, of which nothing runs."""

from __future__ import annotations

from pathlib import Path

from transduce.errors import InputError
from transduce.interop.ctranslate2.exporter import Precision, piece_names, specification, write_model
from transduce.interop.ctranslate2.importer import read_transformer
from transduce.interop.ctranslate2.model_file import FILE, WHISPER, read_variables
from transduce.interop.ctranslate2.whisper import read_whisper
from transduce.interop.huggingface.family import ImportedModel
from transduce.interop.huggingface.folder import inside
from transduce.interop.huggingface.languages import Languages
from transduce.interop.legacy.unpack import MARIAN_BINARY


def find_folder(path: Path) -> Path | None:
    """The folder with model.bin: the path itself, or `model` in the folder of an Argos package.

    Marian has files of this name too, which legacy/ reads.
    """
    found = (folder for folder in (path, path / "model") if (folder / FILE).is_file())
    folder = next(found, None) if path.is_dir() else None
    if folder is None:
        return None
    with open(folder / FILE, "rb") as file:
        return None if file.read(len(MARIAN_BINARY)) == MARIAN_BINARY else folder


def read(folder: Path, languages: Languages | None = None) -> ImportedModel:
    """Imports a folder with model.bin."""
    variables = read_variables(inside(folder, FILE))
    if variables.specification == WHISPER:
        return read_whisper(folder, variables, languages)
    if languages is not None:
        remedy = "leave out --source-language and --target-language"
        raise InputError("this model has no language codes", where=str(folder), remedy=remedy)
    return read_transformer(folder, variables)


__all__ = ["Precision", "find_folder", "piece_names", "read", "specification", "write_model"]
