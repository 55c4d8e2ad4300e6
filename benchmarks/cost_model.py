"""Cost model of data parallel training on many GPUs, from the measured speed of one: `python -m benchmarks.cost_model`.

It reads benchmarks/results/train-*-cuda-bfloat16.json and, for FSDP, whose passes are not captured on several GPUs,
sharding-*-cuda-1.json. It writes benchmarks/results/cost-model.json for docs/scale.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NODE = 8  # GPUs of a machine
NVLINK = 450e9  # bytes a second of a GPU in each direction: H200 data sheet, 900 GB/s in both
NETWORK = 50e9  # bytes a second of a GPU between machines: DGX H200 data sheet, one 400 Gb/s adapter for each GPU
NVLINK_LATENCY, NETWORK_LATENCY = 5e-6, 10e-6  # seconds of one message: assumptions
BYTES = 4  # of a gradient and of a gathered weight: fp32
TOKENS = 32_768  # of an update on one GPU, as measured
BATCH = 1_048_576  # tokens of an update that does not grow with the number of GPUs
GPUS = (8, 64, 1024)
# Layers and sizes as in benchmarks/marian.py, whose models were measured: parameters of encoder, decoder, embedding.
SIZES = {"base": (512, 6, 2048, 32_000), "big": (1024, 6, 4096, 32_000)}
VOLUME = {"ddp": 1.0, "fsdp": 1.5}  # of all-reduces: fsdp gathers weights twice and scatters gradients once


def parameters(size: str) -> int:
    """Matrices alone: 4 of each attention, 2 of each feed-forward layer, and the embedding."""
    width, layers, inner, vocabulary = SIZES[size]
    encoder = 4 * width**2 + 2 * width * inner
    decoder = 8 * width**2 + 2 * width * inner
    return layers * (encoder + decoder) + vocabulary * width


def communication(count: int, size: str, parallel: str) -> float:
    """Seconds of the collectives of one update: a ring in each machine, then rings between machines."""
    volume, machines = BYTES * parameters(size) * VOLUME[parallel], -(-count // NODE)
    within = min(count, NODE)
    seconds = 2 * (within - 1) / within * volume / NVLINK + 2 * (within - 1) * NVLINK_LATENCY
    return seconds + 2 * (machines - 1) / machines * volume / within / NETWORK + 2 * (machines - 1) * NETWORK_LATENCY


def speed_of_one(size: str) -> float:
    """Measured tokens per second of one GPU, with CUDA graphs."""
    record = json.loads((RESULTS / f"train-{size}-cuda-bfloat16.json").read_text(encoding="utf-8"))
    return float(next(row["tokens_per_second"] for row in record["rows"] if row["name"] == "transduce"))


def computation(tokens: float, size: str, parallel: str) -> float:
    """Seconds of the passes of one GPU.

    Those of FSDP are launched one kernel at a time: smaller batches take as long as the measured one.
    """
    if parallel == "ddp":
        return tokens / speed_of_one(size)
    record = json.loads(_wrapped_record(size).read_text(encoding="utf-8"))
    return float(record["fsdp"]) * max(1.0, tokens / TOKENS)


def _wrapped_record(size: str) -> Path:
    """What benchmarks.sharding measured of a model that is wrapped by FSDP on one GPU."""
    return RESULTS / f"sharding-{size}-cuda-1.json"


def rows() -> list[dict[str, Any]]:
    """Efficiency by model, form of parallelism and number of GPUs, with a growing and with a fixed batch."""
    found = []
    for size in SIZES:
        speed = speed_of_one(size)
        for parallel in VOLUME:
            if parallel == "fsdp" and not _wrapped_record(size).exists():
                continue
            for count in GPUS:
                seconds = communication(count, size, parallel)
                grown, fixed = (computation(tokens, size, parallel) + seconds for tokens in (TOKENS, BATCH / count))
                found.append(
                    {
                        "model": size,
                        "parallel": parallel,
                        "gpus": count,
                        "message_megabytes": round(BYTES * parameters(size) / 1e6),
                        "compute_ms": round(1e3 * computation(TOKENS, size, parallel), 1),
                        "communication_ms": round(1e3 * seconds, 2),
                        "efficiency": round(TOKENS / speed / grown, 3),
                        "tokens_per_second": round(count * TOKENS / grown),
                        "efficiency_fixed_batch": round(BATCH / count / speed / fixed, 3),
                    }
                )
    return found


def main() -> None:
    found = rows()
    path = RESULTS / "cost-model.json"
    path.write_text(json.dumps({"machine": "model of H200 machines", "rows": found}, indent=1) + "\n", encoding="utf-8")
    for row in found:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
