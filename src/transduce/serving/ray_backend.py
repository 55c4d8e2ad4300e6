"""Ray Serve: the application of the server in replicas on a cluster, which Ray restarts, updates and scales."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transduce.data.sharded_work import cluster
from transduce.errors import InputError
from transduce.serving.application import ServerSettings, create_app
from transduce.serving.metrics import Metrics, forget_dead_processes
from transduce.serving.model_service import EngineOptions, ModelService
from transduce.serving.models import ModelSpec
from transduce.serving.telemetry import tracing
from transduce.serving.workers import Address

APPLICATION = "transduce"
LOGGING = {"log_level": "WARNING", "enable_access_log": False}  # the application logs requests, without their texts
PROXY_SECONDS = "50"  # in which the HTTP proxy of Ray must be ready; Ray gives up after a minute in all
REQUEST_SECONDS = 5.0  # beyond the deadline of a request, after which Ray gives up on a replica


@dataclass(frozen=True)
class ReplicaScale:
    """How many replicas there are, and what each takes of the cluster."""

    replicas: int = 1
    most: int | None = None  # None: their number stays; else Ray adds and removes some with the load
    gpus: float = 0.0

    def options(self, target: int) -> dict[str, Any]:
        """The options of a deployment whose replicas should have `target` requests each."""
        resources = {"ray_actor_options": {"num_cpus": 1, "num_gpus": self.gpus}}
        if self.most is None:
            return {"num_replicas": self.replicas, **resources}
        bounds = {"min_replicas": self.replicas, "max_replicas": max(self.replicas, self.most)}
        return {"autoscaling_config": {**bounds, "target_ongoing_requests": target}, **resources}


@dataclass(frozen=True)
class RayPlan:
    """What each replica serves."""

    specs: Sequence[ModelSpec]
    options: dict[str, Any]  # of `load`
    settings: ServerSettings
    address: Address
    scale: ReplicaScale
    max_batch: int = 64
    cache_entries: int = 0
    drain_seconds: float = 30.0  # in which a replica that is stopped answers what it has accepted
    otlp_endpoint: str | None = None
    metrics_folder: str = ""  # in which the replicas of a machine add up their metrics

    def deployment(self) -> dict[str, Any]:
        """The options of the deployment. A replica itself refuses what is beyond its queue, with 429."""
        found = self.scale.options(self.max_batch)
        environment = {"env_vars": {"PROMETHEUS_MULTIPROC_DIR": self.metrics_folder}}
        found["ray_actor_options"]["runtime_env"] = environment
        most = 2 * self.settings.limits.queued
        return {**found, "max_ongoing_requests": most, "graceful_shutdown_timeout_s": self.drain_seconds}


def build_application(plan: RayPlan) -> Any:
    """The application of a replica, after its first decode."""
    from transduce.inference import load

    forget_dead_processes(Path(plan.metrics_folder))
    metrics = Metrics()
    models = [(load(spec.path, **plan.options), spec) for spec in plan.specs]
    options = EngineOptions(plan.max_batch, plan.cache_entries)
    service = ModelService(models, plan.settings.limits, metrics=metrics, options=options)
    warming = threading.Thread(target=lambda: asyncio.run(service.warm_up()))  # the loop of this thread is Ray's
    warming.start()
    warming.join()
    settings = replace(plan.settings, tracing=tracing(plan.otlp_endpoint))
    return create_app(service, settings, metrics=metrics)


@contextmanager
def deployed(plan: RayPlan) -> Iterator[None]:
    """The replicas, on the cluster of RAY_ADDRESS or on this machine, until the end of the block."""
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", PROXY_SECONDS)  # 5 are too few on a busy machine
    most = max(plan.scale.replicas, plan.scale.most or 0)
    with cluster("ray", most), tempfile.TemporaryDirectory(prefix="transduce-metrics-") as folder:
        try:
            from ray import serve
        except ImportError:
            raise InputError("--backend ray needs Ray Serve", remedy="pip install 'transduce[serve,ray]'") from None
        shared = replace(plan, metrics_folder=folder)

        def build() -> Any:
            return build_application(shared)

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        seconds = plan.settings.limits.request_seconds + REQUEST_SECONDS
        http = {"host": plan.address.host, "port": plan.address.port, "request_timeout_s": seconds}
        serve.start(http_options=http, logging_config=LOGGING)
        deployment = serve.deployment(serve.ingress(build)(), name=APPLICATION).options(**shared.deployment())
        serve.run(deployment.bind(), name=APPLICATION, route_prefix="/", logging_config=LOGGING)
        try:
            yield
        finally:
            serve.shutdown()


def run(plan: RayPlan, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT."""
    stop = threading.Event()
    with deployed(plan):
        for number in (signal.SIGTERM, signal.SIGINT):  # now: Ray has set handlers of its own
            signal.signal(number, lambda *_: stop.set())
        announce(f"http://{plan.address.host}:{plan.address.port}")
        stop.wait()
