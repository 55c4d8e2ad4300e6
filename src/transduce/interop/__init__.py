"""Models of other libraries as runs: detection, download from the Hugging Face hub, caching.

Nothing in a model runs as code. From the hub only safetensors (pytorch_model.bin or model.bin where there are none),
JSON and vocabulary files are downloaded, once, and checked like any other folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from transduce.contracts import Family
from transduce.errors import InputError
from transduce.interop import bundle, ctranslate2, g2p_en, legacy
from transduce.interop.huggingface import FAMILIES, exported_as, user_family
from transduce.interop.huggingface import importer as huggingface
from transduce.interop.huggingface.family import ImportedModel
from transduce.interop.huggingface.languages import Languages
from transduce.run import Run, new_run
from transduce.storage import DISK_ERRORS, WriteError, cache, cache_directory, make_folder, replace_file

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
RUNS = "runs"  # the folder where runs are written, never the name of a hub user
HUB_FILES = ["*.json", "model.safetensors", "model-*.safetensors", "*/model.safetensors", "*.spm", "*.model", "*.txt"]
# Where there are no safetensors: pickled weights, or those of CTranslate2.
HUB_OTHER = ["pytorch_model.bin", "pytorch_model-*.bin", "model.bin"]
HUB_IGNORED = ["onnx/*", "openvino/*", "tf/*", "flax/*"]  # the same model for other libraries
# Models that are no Hugging Face architecture: name, shape, sources, whether they can be exported to Hugging Face.
WHERE_ONE_FITS = "where an architecture fits"
OTHER_MODELS = (
    ("sentence-transformers folder", "encoder, vectors", "text", "yes"),
    *((f"{toolkit} checkpoint", "encoder-decoder", "text", WHERE_ONE_FITS) for toolkit in legacy.TOOLKITS),
    ("CTranslate2 TransformerSpec", "encoder-decoder", "text", WHERE_ONE_FITS),
    ("CTranslate2 WhisperSpec", "encoder-decoder", "audio", "as WhisperForConditionalGeneration"),
    ("g2p_en arrays", "encoder-decoder", "text", "no"),
)
LAYOUT = "give a folder with config.json, model.safetensors and tokenizer.json instead"
__all__ = [
    "FAMILIES",
    "OTHER_MODELS",
    "Family",
    "ImportedModel",
    "Languages",
    "as_run",
    "convert",
    "exported_as",
    "locate",
    "read",
    "recognises",
    "user_family",
]


def recognises(path: Path) -> bool:
    """Whether this is a model of another library rather than a run."""
    foreign = huggingface.recognises(path) or g2p_en.find_file(path) is not None or legacy.recognises(path)
    foreign = foreign or ctranslate2.find_folder(path) is not None
    return foreign and not Run(path).exists


def read(path: str | Path, languages: Languages | None = None, family: Family | None = None) -> ImportedModel:
    """Imports a Hugging Face or CTranslate2 folder, a checkpoint of a legacy toolkit, or the arrays of g2p_en.

    `family`: the architecture of a Hugging Face folder, where it is not one of FAMILIES.
    """
    path = Path(path)
    if family is not None:
        return huggingface.read_folder(path, languages, family)
    if (arrays := g2p_en.find_file(path)) is not None:
        return g2p_en.read(arrays)
    if (folder := ctranslate2.find_folder(path)) is not None:
        return ctranslate2.read(folder, languages)
    if legacy.recognises(path) and not huggingface.recognises(path):
        return legacy.read(path)
    return huggingface.read_folder(path, languages)


def convert(
    source: str | Path, new: str | Path, languages: Languages | None = None, family: Family | None = None
) -> Run:
    """Writes a model of another library, or a bundle, as a run."""
    source = locate(source)
    if bundle.recognises(source):
        return bundle.unpack(source, new)
    with new_run(new) as run:
        imported = read(source, languages, family)
        run.save_model(imported.recipe, imported.tokenizers, imported.weights)
    return Run(Path(new))


def as_run(path: str | Path) -> Path:
    """The folder of a run: the path itself, or the cached conversion of a bundle or of another library's model.

    A path that is neither is returned unchanged, and fails where it is opened.
    """
    found = locate(path)
    if not bundle.recognises(found) and not recognises(found):
        return Path(path)
    cached = cache_directory("imported") / _fingerprint(found)
    if not cached.is_dir():
        convert(found, cached)
        replace_file(cached / cache.ORIGIN, f"{found.absolute()}\n")
        cache.entry_added(cached)
    cache.mark_used(cached)
    return cached


def _fingerprint(path: Path) -> str:
    """A hash of file names, sizes and times of modification."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = [(str(one.absolute()), one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.is_file()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def locate(path: str | Path) -> Path:
    """A local path as it is; a name of the hub (`Helsinki-NLP/opus-mt-en-de`) as the folder it was downloaded to."""
    name = str(path)
    owner = name.partition("/")[0]
    if Path(path).exists() or not HUB_NAME.fullmatch(name) or owner == RUNS or Path(owner).exists():
        return Path(path)
    folder = cache_directory("hub") / name.replace("/", "--")
    if not folder.is_dir():
        _download(name, folder)
        cache.entry_added(folder)
    cache.mark_used(folder)
    return folder


def _download(name: str, folder: Path) -> None:
    """The folder gets its final name once it is complete: an interrupted download is never taken for a model."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            f"{name} does not exist here, and downloading models by name needs huggingface_hub",
            where=name,
            remedy=f"pip install 'transduce[hub]'; or {LAYOUT}",
        ) from None
    part = folder.with_name(f"{folder.name}.part")
    make_folder(part)
    try:
        # As files in a folder: the cache of the library consists of symbolic links, which the importer refuses.
        snapshot_download(name, local_dir=str(part), allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED)
        if not any(part.rglob("*.safetensors")):
            snapshot_download(name, local_dir=str(part), allow_patterns=HUB_OTHER)
    except Exception as error:  # the library raises its own errors, those of its transport, and OSError
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            shutil.rmtree(part, ignore_errors=True)
            raise WriteError(folder, error) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name} does not exist here, and it could not be downloaded: {reason}", where=name, remedy=LAYOUT
        ) from None
    shutil.rmtree(part / ".cache", ignore_errors=True)  # metadata of the library
    os.replace(part, folder)
