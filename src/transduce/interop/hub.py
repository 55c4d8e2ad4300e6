"""Upload of a run to the Hugging Face Hub, with its model card."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from transduce.errors import InputError, nearest
from transduce.inference import load
from transduce.interop.export import export
from transduce.interop.model_card import FILE, model_card, with_run
from transduce.run import Run
from transduce.storage import make_folder, replace_file

REPOSITORY_FILES = {"huggingface": "", "bundle": "model.zip"}  # the file in the repository; empty: the folder itself


def upload_run(
    run: str | Path,
    name: str,
    to: str = "huggingface",
    *,
    licence: str | None = None,
    private: bool = False,
    folder: Path | None = None,
) -> str:
    """Exports a run and uploads it; returns the address. With `folder`, the files are written there instead."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"{name!r} is no name of a repository", where="NAME", remedy="write USER/NAME")
    if to not in REPOSITORY_FILES:
        raise InputError(f"a run cannot be pushed as {to!r}", where="--to", remedy=nearest(to, REPOSITORY_FILES))
    api = None if folder is not None else _hub().HfApi()  # a missing library is reported before the export
    if folder is not None:
        return str(_write_files(Path(run), folder, to, licence))
    with tempfile.TemporaryDirectory(prefix="transduce-") as place:
        files = _write_files(Path(run), Path(place) / "files", to, licence)
        return _upload(api, files, name, private)


def _write_files(run: Path, folder: Path, to: str, licence: str | None) -> Path:
    """The files of the repository: the exported model and its card."""
    if REPOSITORY_FILES[to]:
        make_folder(folder)
        export(run, folder / REPOSITORY_FILES[to], to)
        card = model_card(load(run, device="cpu"), to)
    else:
        export(run, folder, to)
        card = (folder / FILE).read_bytes()
    replace_file(folder / FILE, with_run(card, Run(run), licence))
    return folder


def _upload(api: Any, files: Path, name: str, private: bool) -> str:
    try:
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(folder_path=str(files), repo_id=name, commit_message="Upload with Transduce"))
    except Exception as error:  # of the network, of the account, of the repository: the library has many
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the Hub refused the upload: {reason}",
            where=name,
            remedy="log in with `hf auth login`, and check the name",
        ) from None


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise InputError("uploading needs huggingface_hub", remedy="pip install 'transduce[hub]'") from None
    return huggingface_hub
