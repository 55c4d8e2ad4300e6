"""Command that serves models over HTTP: serve."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transduce.cli.options import LOADING, Device, TrustUserCode
from transduce.errors import InputError

if TYPE_CHECKING:
    from transduce.serving.service import Limits

LIMITS, OPERATION = "Limits", "Operation"


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]RUN[@SOURCE-TARGET]",
            help="Runs, bundles or Hub models, with a name and languages where they matter: german=runs/de@en-de. "
            "The first is the default; RUN1,RUN2 is an ensemble.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default can be reached from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the port.", rich_help_panel=OPERATION)] = 1,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Sources that a model searches at the same time.", rich_help_panel=OPERATION)
    ] = 64,
    cache: Annotated[
        int, typer.Option(min=0, help="Outputs to remember for equal requests.", rich_help_panel=OPERATION)
    ] = 0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one a line; every route but probes needs one of them.")
    ] = None,
    backend: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Processes of this machine, or replicas of Ray Serve.", rich_help_panel=OPERATION),
    ] = "local",
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of --backend ray.", rich_help_panel=OPERATION)] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ray adds replicas up to this number under load, and removes them. [default: --replicas]",
            rich_help_panel=OPERATION,
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="OpenTelemetry collector that receives the times of requests. [default: OTEL_EXPORTER_OTLP_ENDPOINT]",
            rich_help_panel=OPERATION,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may read answers; may be repeated.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time for accepted requests to end after SIGTERM.", rich_help_panel=OPERATION)
    ] = 30.0,
    jobs_folder: Annotated[
        Path | None, typer.Option(help="Folder of jobs. [default: a temporary one]", rich_help_panel=OPERATION)
    ] = None,
    suggestions: Annotated[
        Path | None, typer.Option(help="File that collects the suggestions of clients.", rich_help_panel=OPERATION)
    ] = None,
    log_text: Annotated[
        bool, typer.Option("--log-text", help="Log the beginning of every request.", rich_help_panel=OPERATION)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log nothing.", rich_help_panel=OPERATION)] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="A limit of requests, such as characters=5000; may be repeated. Names: body_bytes, upload_bytes, "
            "characters, items, job_items, beam_size, n_best, output_tokens, queued, requests_per_minute, "
            "body_seconds, request_seconds.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    device: Device = "auto",
    precision: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|int8", help="Precision of the weights.", rich_help_panel=LOADING)
    ] = None,
    trust_user_code: TrustUserCode = False,
    worker_of: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Serve models over HTTP, with the interfaces of LibreTranslate, OpenAI, DeepL, Hugging Face, OpenNMT and TGI.

    Requests share decoding steps (continuous batching). SIGTERM answers what was accepted and stops; SIGHUP loads the
    models again.

    Examples:

        transduce serve runs/demo

        transduce serve german=runs/de@en-de french=runs/fr@en-fr --port 9000 --workers 2 --api-key-file keys.txt
    """
    processes = _serving("workers")
    address = processes.Address(host, port, shared=worker_of > 0)
    if backend == "ray" and workers > 1:
        raise InputError("Ray starts replicas, not workers", where="--workers", remedy="give --replicas")
    if backend == "local" and (replicas > 1 or max_replicas is not None):
        raise InputError("replicas are of Ray", where="--replicas", remedy="give --workers, or --backend ray")
    if backend == "ray" and port == 0:
        raise InputError("the proxies of Ray take no free port by themselves", where="--port", remedy="give a number")
    if workers > 1 and not worker_of:
        arguments = _without(sys.argv[1:], "--workers", "--port")
        with tempfile.TemporaryDirectory(prefix="transduce-jobs-") as folder:
            jobs = [] if jobs_folder else ["--jobs-folder", folder]  # every worker answers for the jobs of all
            command = [sys.executable, "-m", "transduce", *arguments, *jobs, "--worker-of", str(os.getpid())]
            raise typer.Exit(processes.Workers(command, address, workers).run())
    server = _serving("server")
    from transduce.inference import load
    from transduce.serving.application import ServerSettings
    from transduce.serving.models import ModelSpec
    from transduce.serving.telemetry import tracing

    keys = _keys(api_key_file)
    if not keys and host not in ("127.0.0.1", "::1", "localhost"):
        print("warning: everybody who reaches this address may use it: give --api-key-file", file=sys.stderr)
    settings = ServerSettings(
        keys,
        _limits(limit or []),
        tuple(cors_origin or ()),
        None if quiet else processes.log_json,
        log_text,
        jobs_folder,
        suggestions,
    )
    specs = [ModelSpec.parse(one) for one in models]
    options: dict[str, Any] = {"device": device, "precision": precision, "trust_user_code": trust_user_code}
    if backend == "ray":
        on_ray = _serving("ray_backend")
        gpus = 1.0 if device.startswith("cuda") else 0.0
        scale = on_ray.ReplicaScale(replicas, max_replicas, gpus)
        plan = on_ray.RayPlan(specs, options, settings, address, scale, max_batch, cache, drain_seconds, otlp_endpoint)
        on_ray.run(plan, _announce)
        return
    with tempfile.TemporaryDirectory(prefix="transduce-jobs-") as folder:
        settings = replace(settings, jobs_folder=jobs_folder or Path(folder), tracing=tracing(otlp_endpoint))
        plan = server.ServerPlan(
            specs,
            lambda spec: load(spec.path, **options),
            settings,
            address,
            max_batch,
            cache,
            drain_seconds,
            worker_of,
            _announce,
        )
        server.ServerProcess(plan).run()


def _serving(name: str) -> Any:
    try:
        return import_module(f"transduce.serving.{name}")
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed", remedy="pip install 'transduce[serve]'") from None


def _announce(address: str) -> None:
    print(f"serving on {address}", flush=True)


def _without(arguments: list[str], *options: str) -> list[str]:
    """The arguments without these options and their values."""
    kept, skip = list[str](), False
    for one in arguments:
        if skip:
            skip = False
        elif one in options:
            skip = True
        elif not one.startswith(tuple(f"{option}=" for option in options)):
            kept.append(one)
    return kept


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise InputError("the file has no keys", where=str(path), remedy="write one key a line")
    return keys


def _limits(given: list[str]) -> Limits:
    from transduce.errors import nearest
    from transduce.serving.service import Limits

    kinds: dict[str, Any] = {name: type(value) for name, value in vars(Limits()).items()}
    changes: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in kinds:
            raise InputError(f"no limit {name!r}", where="--limit", remedy=nearest(name, kinds))
        least = 0 if name == "requests_per_minute" else 1 if kinds[name] is int else 0.001
        try:
            changes[name] = kinds[name](value)
        except ValueError:
            what = "a whole number" if kinds[name] is int else "a number"
            raise InputError(f"{value!r} is not {what}", where=f"--limit {name}", remedy="write NAME=NUMBER") from None
        if not least <= changes[name] < float("inf"):
            raise InputError(f"{value} is out of range", where=f"--limit {name}", remedy=f"at least {least}")
    return replace(Limits(), **changes)
