"""Installation of the original toolkits: `python install.py FOLDER`, into a virtual environment of their own.

None of them names the Python and PyTorch of today, so they come without dependencies, and what they need comes beside
them. fairseq 0.12.2 has no wheel for Python 3.11: its source is patched, and its three extensions are compiled. Older
versions of OpenNMT-py and fairseq have a folder of their own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

TOOLKITS = ("joeynmt==2.3.0", "OpenNMT-py==3.5.1", "pymarian==1.12.42")
OLDER = ("1.2.0", "2.3.0")  # versions of OpenNMT-py, each in a folder of its own with its torchtext
TORCHTEXT = "torchtext==0.5.0"
NEEDED = (
    "torch", "numpy", "setuptools", "packaging", "pyyaml", "tqdm", "regex", "requests", "sacrebleu", "sentencepiece",
    "subword-nmt", "configargparse", "six", "ctranslate2", "pyonmttok", "rapidfuzz", "pyahocorasick", "tensorboard",
    "matplotlib", "datasets", "omegaconf", "hydra-core", "bitarray", "cython", "waitress", "flask", "cffi",
    "importlib_metadata",
)  # fmt: skip
ABSENT = ("spacy", "fasttext")  # OpenNMT-py imports them for transforms that are not used here
STAND_IN = "class Absent:\n    pass\n\n\ndef __getattr__(name):\n    return Absent\n"
FAIRSEQ, OLDER_FAIRSEQ = "0.12.2", "0.10.2"
# Batches of a fixed number of sentences, in place of an extension that the wheel has for Python 3.8 only.
BATCHES = """
def batch_by_size_fast(indices, num_tokens_fn, max_tokens, max_sentences, bsz_mult):
    count = max_sentences if max_sentences > 0 else 32
    return [indices[start : start + count] for start in range(0, len(indices), count)]


batch_fixed_shapes_fast = None
"""
EXTENSIONS = """
import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

fast = [
    Extension(f"fairseq.data.{name}", [f"fairseq/data/{name}.pyx"], language="c++", include_dirs=[numpy.get_include()])
    for name in ("data_utils_fast", "token_block_utils_fast")
]
bleu = [f"fairseq/clib/libbleu/{name}.cpp" for name in ("libbleu", "module")]
setup(name="fairseq-extensions", ext_modules=[Extension("fairseq.libbleu", bleu), *cythonize(fast)])
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def patch_sources(source: Path) -> None:
    """Defaults of dataclasses that Python 3.11 refuses, and names that numpy has dropped."""
    for file in source.rglob("*.py"):
        text = old = file.read_text(encoding="utf-8")
        text = re.sub(
            r"^(    \w+: \w+) = (\w+(?:Config|Params))\(\)$", r"\1 = field(default_factory=\2)", text, flags=re.M
        )
        text = re.sub(r"field\(default=(\w+Config)\(\)\)", r"field(default_factory=\1)", text)
        text = re.sub(r"\bnp\.(float|int)([,):(])", r"\1\2", text)
        if text != old:
            file.write_text(text, encoding="utf-8")


def patch_initialisation(source: Path) -> None:
    hydra = source / "dataclass" / "initialize.py"
    default = "FairseqConfig.__dataclass_fields__[k].default"
    made = "(lambda f: f.default if f.default_factory.__class__.__name__ == '_MISSING_TYPE' else f.default_factory())"
    text = hydra.read_text(encoding="utf-8")
    hydra.write_text(text.replace(default, f"{made}({default.removesuffix('.default')})"), encoding="utf-8")


def install_fairseq(folder: Path) -> None:
    """Unpacks, patches and compiles it; the folder is then found through a .pth file."""
    source = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:")
    pip("download", *source, "-d", str(folder), f"fairseq=={FAIRSEQ}")
    with tarfile.open(folder / f"fairseq-{FAIRSEQ}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    place = folder / f"fairseq-{FAIRSEQ}"
    patch_sources(place / "fairseq")
    patch_initialisation(place / "fairseq")
    (place / "extensions.py").write_text(EXTENSIONS)
    subprocess.run([sys.executable, "extensions.py", "build_ext", "--inplace"], cwd=place, check=True)
    (packages() / "fairseq.pth").write_text(f"{place}\n")


def install_older_fairseq(folder: Path) -> None:
    """Version 0.10.2 from a wheel of Python 3.8: its sources, with two patches, and without what it compiled."""
    wheel = ("--only-binary", ":all:", "--python-version", "3.8", "--platform", "manylinux1_x86_64")
    pip("download", "--quiet", "--no-deps", *wheel, "-d", str(folder), f"fairseq=={OLDER_FAIRSEQ}")
    place = folder / f"fairseq-{OLDER_FAIRSEQ}"
    with zipfile.ZipFile(next(folder.glob(f"fairseq-{OLDER_FAIRSEQ}-*.whl"))) as archive:
        archive.extractall(place)
    for compiled in place.rglob("*.so"):
        compiled.unlink()
    patch_sources(place / "fairseq")
    options = place / "fairseq" / "dataclass" / "utils.py"
    union = 'if re.match(r"(typing.|^)Union'
    text = options.read_text(encoding="utf-8")
    options.write_text(text.replace(union, f'if "Optional[" in typestring or {union[3:]}'), encoding="utf-8")
    (place / "fairseq" / "data" / "data_utils_fast.py").write_text(BATCHES)
    newer = folder / f"fairseq-{FAIRSEQ}"
    for name in ("libbleu", "token_block_utils_fast"):  # the same in both versions
        for compiled in (newer / "fairseq").rglob(f"{name}*.so"):
            shutil.copy(compiled, place / compiled.relative_to(newer))


def packages() -> Path:
    import sysconfig

    return Path(sysconfig.get_paths()["purelib"])


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    pip("install", "--quiet", *NEEDED)
    pip("install", "--quiet", "--no-deps", *TOOLKITS)
    for name in ABSENT:
        (packages() / f"{name}.py").write_text(STAND_IN)
    for version in OLDER:
        place = target / f"OpenNMT-py-{version}"
        pip("install", "--quiet", "--no-deps", "--target", str(place), f"OpenNMT-py=={version}", TORCHTEXT)
    install_fairseq(target)
    install_older_fairseq(target)
