"""A path or a name of the Hugging Face hub (`Helsinki-NLP/opus-mt-en-de`) in; the folder with its files out.

Only weights in safetensors, JSON and vocabularies are fetched, once, into the user's cache. Whatever was fetched is
checked like any folder from elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from transduce.errors import InputError

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
OURS = "runs"  # where runs of our own are written: never the name of an owner
WANTED = ["*.json", "model.safetensors", "model-*.safetensors", "*/model.safetensors", "*.spm", "*.model", "*.txt"]
UNWANTED = ["onnx/*", "openvino/*", "tf/*", "flax/*"]  # the same model for others
LAYOUT = "a folder with config.json, model.safetensors and tokenizer.json can be given instead"


def located(path: str | Path) -> Path:
    """What lies on this machine as it is; a name of the hub as the folder it was fetched to."""
    name = str(path)
    owner = name.partition("/")[0]
    if Path(path).exists() or not NAME.fullmatch(name) or owner == OURS or Path(owner).exists():
        return Path(path)
    folder = _cache() / name.replace("/", "--")
    if not folder.is_dir():
        _fetch(name, folder)
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "transduce" / "hub"


def _fetch(name: str, folder: Path) -> None:
    """Under its own name once it is complete: a fetch that was broken off is never taken for a model."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            f"there is no {name} here, and fetching models by name needs huggingface_hub",
            where=name,
            remedy=f"pip install 'transduce[hub]'; or {LAYOUT}",
        ) from None
    begun = folder.with_name(f"{folder.name}.part")
    begun.mkdir(parents=True, exist_ok=True)
    try:
        # Into a folder of its own, as files: in the library's cache they are links, which no import follows.
        snapshot_download(name, local_dir=str(begun), allow_patterns=WANTED, ignore_patterns=UNWANTED)
    except Exception as error:  # the library raises its own, those of its transport, and OSError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"there is no {name} here, and it could not be fetched: {reason}", where=name, remedy=LAYOUT
        ) from None
    shutil.rmtree(begun / ".cache", ignore_errors=True)  # the library's notes
    os.replace(begun, folder)
