"""Installation of the original toolkits: `python install.py FOLDER`, into a virtual environment of their own.

None of them names the Python and PyTorch of today, so they come without dependencies, and what they need comes beside
them. fairseq 0.12.2 has no wheel for Python 3.11: its source is patched, and its three extensions are compiled.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

TOOLKITS = ("joeynmt==2.3.0", "OpenNMT-py==3.5.1", "pymarian==1.12.42")
NEEDED = (
    "torch", "numpy", "setuptools", "packaging", "pyyaml", "tqdm", "regex", "requests", "sacrebleu", "sentencepiece",
    "subword-nmt", "configargparse", "six", "ctranslate2", "pyonmttok", "rapidfuzz", "pyahocorasick", "tensorboard",
    "matplotlib", "datasets", "omegaconf", "hydra-core", "bitarray", "cython", "waitress", "flask", "cffi",
    "importlib_metadata",
)  # fmt: skip
ABSENT = ("spacy", "fasttext")  # OpenNMT-py imports them for transforms that are not used here
STAND_IN = "class Absent:\n    pass\n\n\ndef __getattr__(name):\n    return Absent\n"
FAIRSEQ = "0.12.2"
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


def patch(source: Path) -> None:
    """Defaults of dataclasses that Python 3.11 refuses, and names that numpy has dropped."""
    for file in source.rglob("*.py"):
        text = old = file.read_text(encoding="utf-8")
        text = re.sub(r"^(    \w+: \w+) = (\w+Config)\(\)$", r"\1 = field(default_factory=\2)", text, flags=re.M)
        text = re.sub(r"field\(default=(\w+Config)\(\)\)", r"field(default_factory=\1)", text)
        text = re.sub(r"\bnp\.(float|int)([,)])", r"\1\2", text)
        if text != old:
            file.write_text(text, encoding="utf-8")
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
    patch(place / "fairseq")
    (place / "extensions.py").write_text(EXTENSIONS)
    subprocess.run([sys.executable, "extensions.py", "build_ext", "--inplace"], cwd=place, check=True)
    (packages() / "fairseq.pth").write_text(f"{place}\n")


def packages() -> Path:
    import sysconfig

    return Path(sysconfig.get_paths()["purelib"])


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    pip("install", "--quiet", *NEEDED)
    pip("install", "--quiet", "--no-deps", *TOOLKITS)
    for name in ABSENT:
        (packages() / f"{name}.py").write_text(STAND_IN)
    install_fairseq(target)
