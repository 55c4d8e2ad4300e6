"""Metrics of a server for Prometheus: counters, gauges and histograms, of one process or of all workers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one application. Labels are routes, models and reasons: never keys, clients or texts."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"transduce_{name}", text, labels, registry=own, multiprocess_mode="livesum")

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"transduce_{name}", text, labels, registry=own)

        self.requests = counter("requests", "Answered requests.", ("route", "method", "status"))
        self.refusals = counter("refusals", "Refused requests by reason.", ("reason",))
        self.disconnects = counter("disconnects", "Requests whose client left before the answer.")
        self.in_flight = gauge("requests_in_flight", "Requests that are being served.")
        self.latency = Histogram(
            "transduce_request_seconds", "Time from a request to its answer.", ("route",), registry=own, buckets=SECONDS
        )
        self.queued = gauge("queue_depth", "Sources that wait.", ("model",))
        self.active = gauge("active_sources", "Sources that are being searched.", ("model",))
        self.batch_size = Histogram(
            "transduce_batch_size", "Sources in a decoding step.", ("model",), registry=own, buckets=BATCHES
        )
        self.sources = counter("sources", "Sources whose outputs were generated.", ("model",))
        self.source_tokens = counter("source_tokens", "Tokens of these sources.", ("model",))
        self.tokens = counter("generated_tokens", "Tokens of their best outputs.", ("model",))
        self.cancelled = counter("cancelled_sources", "Sources whose client left or whose deadline passed.", ("model",))
        self.cache_hits = counter("cache_hits", "Sources whose outputs were in the cache.", ("model",))
        self.cache_misses = counter("cache_misses", "Sources whose outputs were not in the cache.", ("model",))
        self.reloads = counter("reloads", "Models that were loaded again.", ("model",))

    def exposition(self) -> bytes:
        """The metrics in the text format, of all workers where there are several."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
            return generate_latest(registry)
        return generate_latest(self.registry)


def forget_dead_processes(folder: Path) -> None:
    """Removes the gauges of processes that have ended from a folder that processes share; their counters stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("gauge_live*.db"):
        process = int(re.findall(r"\d+", path.name)[-1])
        if not Path(f"/proc/{process}").exists():
            mark_process_dead(process, path=str(folder))
