"""Generation with a trained model that decides where lines end, against its CTranslate2 export, in fp32 and int8.

`python -m benchmarks.natural_lengths RUN SOURCE REFERENCE` prints a table with BLEU and exact matches and writes JSON
to benchmarks/results. Both sides share our tokenizer. On a GPU: see continuous_batching.py.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import continuous_batching
from benchmarks.harness import CLOCKS, OURS, Implementation, Measurement, measure, show, write
from transduce.evaluation.evaluate import METRICS
from transduce.inference import Model, load
from transduce.interop.ctranslate2 import piece_names

Translate = Callable[[list[str]], list[str]]


def peer(run: Path, model: Model, precision: str, workers: int, settings: dict[str, Any]) -> Translate:
    """CTranslate2 with the run exported by `transduce export`."""
    if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")  # its default is AVX2 on other processors than Intel's
    import ctranslate2

    from transduce.interop.export import export

    with tempfile.TemporaryDirectory() as folder:
        export(run, Path(folder) / "model", "ctranslate2")
        inner = ctranslate2.Translator(
            str(Path(folder) / "model"), compute_type=precision, inter_threads=workers, intra_threads=1
        )
    says, reads = piece_names(model.source), piece_names(model.target)
    numbers = {piece: number for number, piece in enumerate(reads)}

    def translate(texts: list[str]) -> list[str]:
        pieces = [[says[one] for one in ids] for ids in model.source.encode_batch(texts)]
        found = inner.translate_batch(pieces, max_batch_size=4096, batch_type="tokens", **settings)
        return [model.target.decode([numbers[piece] for piece in one.hypotheses[0]]) for one in found]

    return translate


def run(
    folder: Path, sources: list[str], references: list[str], beam: int, workers: int, repeats: int, clock: str
) -> list[Measurement]:
    torch.set_num_threads(1)
    rows: list[Measurement] = []
    outputs: dict[str, list[str]] = {}
    for precision, theirs in (("fp32", "float32"), ("int8", "int8")):
        model = load(folder, device="cpu", precision=precision)  # type: ignore[arg-type]
        chosen = {"strategy": "beam" if beam > 1 else "greedy", "beam": beam}
        longest = {"beam_size": beam, "length_penalty": model.recipe.generation.length_penalty}
        other = peer(folder, model, theirs, workers, longest)

        def ours(texts: list[str], model: Model = model, chosen: dict[str, Any] = chosen) -> list[str]:
            return [one.text for one in model.generate(texts, workers=workers, **chosen)]

        def timed(name: str, translate: Translate, model: Model = model) -> int:
            outputs[name] = translate(sources)
            return sum(map(len, model.target.encode_batch(outputs[name]))) + len(sources)

        names = {OURS: f"{OURS} {precision}", "theirs": f"CTranslate2 {theirs}"}
        both = [
            Implementation(OURS, partial(timed, names[OURS], ours)),
            Implementation(names["theirs"], partial(timed, names["theirs"], other)),
        ]
        rows += measure(
            f"natural {len(sources)} lines beam {beam} {precision}", both, torch.device("cpu"), repeats, clock
        )
        same = sum(a == b for a, b in zip(outputs[names[OURS]], outputs[names["theirs"]], strict=True))
        print(f"beam {beam} {precision}: {same} of {len(sources)} lines are those of the peer", flush=True)
    for name, lines in outputs.items():
        print(f"beam {beam} {name}: {quality(lines, references)}", flush=True)
    return rows


def quality(lines: list[str], references: list[str]) -> str:
    found = []
    for name in ("bleu", "exact"):
        metric: Any = METRICS[name]()
        found.append(f"{name} {metric.value(metric.statistics(lines, [[one] for one in references]).sum(0)):.2f}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.natural_lengths", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cpu", help="cuda: continuous batching, static batches, and transformers")
    parser.add_argument("--slots", type=int, default=256, help="slots of a search, or rows of a batch, on a GPU")
    parser.add_argument("--tiny", action="store_true", help="the GPU benchmark on the first 40 lines, on any device")
    args = parser.parse_args()
    sources, references = (file.read_text(encoding="utf-8").splitlines() for file in (args.source, args.reference))
    rows: list[Measurement] = []
    device = torch.device(args.device)
    if args.tiny:
        sources, references, args.slots, args.repeats = sources[:40], references[:40], 8, 1
    for beam in args.beams:
        if device.type == "cpu" and not args.tiny:
            rows += run(args.run, sources, references, beam, args.workers, args.repeats, args.clock)
            continue
        found, written = continuous_batching.run(args.run, sources, beam, args.slots, args.repeats, device, args.clock)
        rows += found
        for name, lines in written.items():
            print(f"beam {beam} {name}: {quality(lines, references)}", flush=True)
    title = f"natural-{args.device}" + ("-tiny" if args.tiny else "")
    show(title, rows, Console(width=140))
    write(args.output / f"{title}.json", title, rows, device, args.clock)


if __name__ == "__main__":
    main()
