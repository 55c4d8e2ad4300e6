"""Export of models to the formats of other libraries, and upload to the Hugging Face Hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transduce.data.readers.word_vectors import WordVectors, write_word_vectors
from transduce.errors import InputError, check_path, nearest
from transduce.flow import SPECIALS
from transduce.inference import Model, load
from transduce.interop import bundle, convert, ctranslate2, onnx, recognises
from transduce.interop.huggingface import exporter as huggingface
from transduce.interop.model_card import FILE, model_card, with_run
from transduce.interop.onnx_graphs import Precision
from transduce.layers.embedding import Embedding
from transduce.run import Run
from transduce.storage import make_folder, replace_file, write_file

REPOSITORY_FILES = {"huggingface": "", "bundle": "model.zip"}  # the file in the repository; empty: the folder itself


def write_bundle(source: Path, out: Path) -> Path:
    """One file that holds a run."""
    if bundle.recognises(source):
        raise InputError("this is already a bundle", where=str(source), remedy="copy the file")
    if not recognises(source):
        return _pack(Run(source), out)
    with tempfile.TemporaryDirectory(prefix="transduce-") as folder:
        return _pack(convert(source, Path(folder) / "run"), out)


def _pack(run: Run, out: Path) -> Path:
    return bundle.pack(run, out, lambda: model_card(load(run.folder, device="cpu"), "bundle"))


def write_huggingface(source: Path, out: Path) -> Path:
    """A folder of the transformers library."""
    return huggingface.write_folder(_load(source, out), out, str(source))


def write_ctranslate2(source: Path, out: Path, precision: ctranslate2.Precision = "fp32") -> Path:
    """A folder of the CTranslate2 library."""
    model = _load(source, out)
    ctranslate2.write_model(model.network, model.recipe.model, (model.source, model.target), out, precision)
    write_file(out / FILE, model_card(model, "ctranslate2"))
    return out


def write_onnx(source: Path, out: Path, precision: Precision = "fp32") -> Path:
    """Graphs for ONNX runtimes."""
    return onnx.write_model(_load(source, out), out, str(source), precision)


def _load(source: Path, out: Path) -> Model:
    if out.exists():
        raise InputError("the path already exists", where=str(out), remedy="give another name")
    return load(source, device="cpu")


def write_vectors(source: Path, out: Path) -> Path:
    """The embeddings of words as text, in the format of word2vec."""
    write_word_vectors(out, word_vectors_of(_load(source, out)))
    return out


def word_vectors_of(model: Model) -> WordVectors:
    """The embeddings of the source words of a model, or of the words of a language model."""
    part = getattr(model.network, "encoder", None) or getattr(model.network, "decoder", None)
    table, tokenizer = getattr(part, "embedding", None), model.source
    if not isinstance(table, Embedding) or tokenizer.kind != "words":
        raise InputError(
            "only a model that reads words has word vectors", remedy="train with tokens.source.kind: words"
        )
    pieces = tokenizer.vocabulary.pieces
    rows = [row for row in range(len(SPECIALS), len(pieces)) if not pieces[row].isspace()]
    weights = table.weight.detach().float().cpu().numpy()[rows] * table.scale
    return WordVectors([pieces[row] for row in rows], weights)


FORMATS: dict[str, Callable[..., Path]] = {
    "huggingface": write_huggingface,
    "ctranslate2": write_ctranslate2,
    "onnx": write_onnx,
    "bundle": write_bundle,
    "vectors": write_vectors,
}


def export(source: str | Path, out: str | Path, to: str, **options: Any) -> Path:
    """Writes the model to `out`, which must not exist, and returns the path."""
    for path in (source, out):
        check_path("export", path)
    if to not in FORMATS:
        raise InputError(f"there is no format {to!r}", where="--to", remedy=nearest(to, FORMATS))
    return FORMATS[to](Path(source), Path(out), **options)


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
