"""Tiny model and batches for the tests of training, and training runs in processes of their own.

`python training_fixtures.py` reads requests from standard input, one JSON list a line; see `act` and `main`.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce import cli
from transduce.contracts import Forward
from transduce.data.batching import DataPosition
from transduce.flow import BOS, EOS, Batch, Padded, State, Step
from transduce.layers.transformer import TransformerLayer
from transduce.objectives import CrossEntropy, Loss, Objective
from transduce.recipe import TrainingRecipe, parse, registry
from transduce.recipe.build import build_model, complete_recipe
from transduce.training import distributed, experiment
from transduce.training.checkpoint import CheckpointManager
from transduce.training.distributed import Processes, pick_device
from transduce.training.optimisers import build_optimiser
from transduce.training.report import LogEntry, RunReport, SilentReport, read_log
from transduce.training.trainer import Outcome, train
from transduce.training.update import Update, UpdateBatch, shortest_row, split_batch

WORDS = 24  # V


class TinyModel(nn.Module):
    """Predicts the next token from a token and the mean of the source; with dropout and tied weights."""

    def __init__(self, dropout: float = 0.0, width: int = 12, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, width)
        self.mix = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, batch: Batch) -> Step:
        assert batch.source is not None
        words = self.embedding(batch.source.values) * batch.source.mask[..., None]  # B S D
        mean = words.sum(1) / batch.source.mask.sum(1, keepdim=True)  # B D
        seen = self.embedding(batch.decoder_inputs.values)  # B T D
        both = torch.cat([seen, mean[:, None].expand_as(seen)], -1)
        return Step(self.output(self.dropout(self.norm(self.mix(both)).tanh())), State({}, {}))


class TinyBatches:
    """The target is the reversed source; a pure function of the position, like real batches."""

    def __init__(self, rows: int = 6, per_epoch: int = 9, seed: int = 0) -> None:
        self.rows, self.per_epoch, self.seed = rows, per_epoch, seed

    def at(self, position: DataPosition) -> Batch:
        draw = random.Random(f"{self.seed}/{position.epoch}/{position.index}")
        sources = [[draw.randrange(4, WORDS) for _ in range(draw.randint(1, 7))] for _ in range(self.rows)]
        first = position.index * self.rows
        return Batch(
            Padded.from_rows([[*source, EOS] for source in sources]),
            Padded.from_rows([[BOS, *reversed(source), EOS] for source in sources]),
            rows=tuple(range(first, first + self.rows)),
        )

    def after(self, position: DataPosition) -> DataPosition:
        if position.index + 1 < self.per_epoch:
            return DataPosition(position.epoch, position.index + 1)
        return DataPosition(position.epoch + 1, 0)


def loss_on(batches: TinyBatches) -> Callable[[nn.Module], dict[str, float]]:
    """A validation function: the loss on one fixed batch, and a metric that is better when higher."""

    def validate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        objective, batch = CrossEntropy(), batches.at(DataPosition(99, 0))
        value = objective(model, batch).total.item() / objective.count(batch)
        torch.rand(3)  # random numbers drawn in validation must not affect training
        return {"loss": value, "accuracy": -value}

    return validate


class FailingObjective(CrossEntropy):
    """Example 7 never fits into memory; example 20 has the loss NaN."""

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        if 7 in batch.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss = super().__call__(model, batch)
        return replace(loss, total=loss.total * float("nan")) if 20 in batch.rows else loss


class SmallMemory(CrossEntropy):
    """Runs out of memory with more than `rows` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        if batch.size > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(model, batch)


def settings(**changes: Any) -> TrainingRecipe:
    small = {
        "steps": 12,
        "checkpoint_every": 5,
        "validate_every": 4,
        "log_every": 1,
        "patience": None,
        "optimiser": {"learning_rate": 0.01},
        "schedule": {"warmup": 4},
    }
    return TrainingRecipe.model_validate(small | changes)


# Dropout aside, everything that a checkpoint has to restore.
FULL_SETTINGS: dict[str, Any] = {
    "steps": 20,
    "checkpoint_every": 3,
    "validate_every": 4,
    "accumulate": 2,
    "ema": 0.9,
    "log_every": 2,
}


class RecordingReport(SilentReport):
    """Stores everything that is reported."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.events: list[tuple[str, int, str]] = []
        self.scores: dict[int, dict[str, float]] = {}

    def log(self, entry: LogEntry) -> None:
        self.entries.append(entry)

    def validation(self, step: int, scores: Any) -> None:
        self.scores[step] = dict(scores)

    def event(self, kind: str, step: int, text: str) -> None:
        self.events.append((kind, step, text))


def run_training(
    folder: Path, *, model: nn.Module | None = None, report: RecordingReport | None = None, **changes: Any
) -> Outcome:
    batches = changes.pop("batches", TinyBatches())
    validate = changes.pop("validate", loss_on(batches))
    perfect = changes.pop("perfect", None)
    return train(
        model or TinyModel(0.1),
        batches,
        settings(**changes),
        checkpoints=CheckpointManager(folder),
        report=report or SilentReport(),
        validate=validate,
        perfect=perfect,
    )


def latest_tensors(folder: Path, group: str = "weights") -> dict[str, Tensor]:
    checkpoint = CheckpointManager(folder).latest()
    assert checkpoint is not None
    return checkpoint.tensors[group]


def assert_same_checkpoints(first: Path, second: Path) -> None:
    """The newest checkpoints are of the same step and equal bit for bit."""
    one, two = CheckpointManager(first).latest(), CheckpointManager(second).latest()
    assert one is not None
    assert two is not None
    assert one.step == two.step
    assert one.tensors.keys() == two.tensors.keys()
    for group, tensors in one.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, two.tensors[group][name]), f"{group} {name}"


def logged_losses(folder: Path) -> dict[int, float]:
    entries = [entry for entry in read_log(folder / "log.jsonl") if entry["kind"] == "update"]
    assert len({entry["step"] for entry in entries}) == len(entries), "a step is logged twice"
    return {entry["step"]: entry["loss"] for entry in entries}


@cache
def fork_server() -> subprocess.Popen[str]:
    """A process that forks for every training run, so that torch is imported once. It ends with its parent."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def run_processes(*requests: dict[str, Any]) -> list[Any]:
    """Carries out the requests one after the other (see `act`), in processes of their own."""
    server = fork_server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(requests) + "\n")
    server.stdin.flush()
    ready, _, _ = select.select([server.stdout], [], [], 300)
    assert ready, "no answer of the training processes within 300 seconds"
    result: list[Any] = json.loads(server.stdout.readline())
    return result


class ForkedCommand:
    """A `transduce` command in a process of its own, which starts in milliseconds instead of seconds.

    `options`: when to die (see `main`).
    """

    def __init__(self, arguments: list[str], **options: int) -> None:
        (self.pid,) = run_processes({"do": "begin", "options": {"command": arguments, **options}})
        self.code: int | None = None

    def running(self) -> bool:
        if self.code is None:
            (self.code,) = run_processes({"do": "poll", "child": self.pid})
        return self.code is None

    def wait(self) -> int:
        if self.running():
            (self.code,) = run_processes({"do": "wait", "child": self.pid})
        assert self.code is not None
        return self.code


def main(options: dict[str, Any]) -> None:
    """Trains in `folder`; options: `settings`, `dropout`, `rows`, `failing`, when to die (`die_at_batch`); or `recipe`.

    Or the command line, with the arguments `command`. Each may die during a save (`die_at`).
    """
    if "die_at" in options:
        die_at(options["die_at"], os, "fsync", "replace", "chmod", "unlink", "rmdir")
    if "die_at_batch" in options:
        die_at(options["die_at_batch"], TinyBatches, "at")
    if "command" in options:
        sys.argv = ["transduce", *options["command"]]
        cli.main()
        sys.exit(0)
    folder = Path(options["folder"])
    if "shapes" in options:
        compare_shapes(options["shapes"], folder)
        sys.exit(0)
    if "recipe" in options:
        outcome = experiment.train(options["recipe"], folder, resume=True).outcome
        sys.exit(128 + outcome.signal if outcome.signal else 0)
    device = pick_device("cpu")
    parallel = "ddp" if options.get("alone") else options["settings"].get("parallel", "ddp")  # alone: without a group
    with Processes.start(device, parallel) as processes:
        batches = TinyBatches(options.get("rows", 6))
        outcome = train(
            TinyModel(options.get("dropout", 0.0), seed=processes.rank),
            batches,
            settings(**options["settings"]),
            checkpoints=CheckpointManager(folder / "checkpoints", options.get("keep", 3)),
            report=RunReport(folder) if processes.is_main else SilentReport(),
            processes=processes,
            device=device,
            validate=loss_on(batches),
            objective=FailingObjective() if options.get("failing") else SmallMemory(options.get("memory", 1000)),
            largest_batch=TinyBatches(8).at(DataPosition()) if "memory" in options else None,
        )
        sys.exit(128 + outcome.signal if outcome.signal else 0)


def compare_shapes(shapes: dict[str, dict[str, Any]], folder: Path) -> None:
    """The losses of three updates of each model: sharded in two ways, whole in all processes, and in one; losses.json.

    One process has as many micro-batches as there are processes, and so the same random numbers.
    """
    distributed.BUCKET_SIZE = 64  # several buckets
    with Processes.start(pick_device("cpu"), "fsdp") as processes:
        found = {}
        for name, content in shapes.items():
            found[name] = {kind: losses_of_shape(content, processes, kind) for kind in ("fsdp", "fsdp by layer", "ddp")}
            if processes.is_main:
                found[name]["one process"] = losses_of_shape(content, Processes(), "ddp", processes.size)
        if processes.is_main:
            (folder / "losses.json").write_text(json.dumps(found))


def losses_of_shape(content: dict[str, Any], processes: Processes, parallel: str, accumulate: int = 1) -> list[float]:
    from contract_fixtures import SIZE, example_batch
    from torch.distributed.fsdp import FSDPModule

    from transduce.training.fsdp import BY_LAYER_FROM, ShardedModel

    recipe = complete_recipe(
        parse({key: value for key, value in content.items() if key not in ("out_of_memory", "old_torch")})
    )
    training = recipe.training.model_copy(update={"accumulate": accumulate})
    torch.manual_seed(1)
    model, device = build_model(recipe.model, SIZE, SIZE).train(), pick_device("cpu")
    by_layer_from = 0 if parallel == "fsdp by layer" else BY_LAYER_FROM
    sharded = None if parallel == "ddp" else ShardedModel(model, device, processes.size, by_layer_from)
    if "old_torch" in content and hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
    if "out_of_memory" in content and processes.rank == 1:
        run_out_of_memory(model, content["out_of_memory"])
    optimiser = build_optimiser(training.optimiser, model)
    objective: Objective = registry.factory(Objective, training.objective)()
    update = Update(model, optimiser, objective, training, processes, device, sharded)
    losses, splits = [], 0
    for step in range(1, 4):
        lengths = [(3, 4), (5, 2), (1, 6), (4, 4), (2, 3)]
        batch = example_batch([(source, source) for source, _ in lengths] if recipe.model.head else lengths, step)
        micro_batches = split_batch(batch, processes, accumulate)
        content_of_update = UpdateBatch(micro_batches, objective.count(batch), shortest_row(batch))
        result = update(content_of_update, step, 0.01)
        assert not result.nonfinite, result.nonfinite
        losses.append(result.loss / result.count)
        splits += result.splits
    assert splits == ("out_of_memory" in content and processes.size > 1), "in one process, once"
    return losses


def run_out_of_memory(model: nn.Module, where: str) -> None:
    """Once, in the last Transformer layer with more than one row, in the `forward` or the `backward` pass."""
    layer = [module for module in model.modules() if isinstance(module, TransformerLayer)][-1]
    left = [1]

    def fail(*_: Any) -> None:
        if left[0]:
            left[0] = 0
            raise torch.OutOfMemoryError("CUDA out of memory")

    def after(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if inputs[0].size(0) > 1:
            fail() if where == "forward" else output.register_hook(fail)

    layer.feed_forward.register_forward_hook(after)


def die_at(count: int, owner: Any, *names: str) -> None:
    """SIGKILL before or after a call of these functions, such as the file operations of a save."""
    remaining = [count]

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in names:
        setattr(owner, name, mortal(getattr(owner, name)))


def fork(options: dict[str, Any], environment: dict[str, str] | None = None) -> int:
    """A child process that trains. It starts quickly: its parent has imported torch without using it."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.dup2(2, 1)  # standard output belongs to the answers
        os.environ.update(environment or {})
        main(options)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def start_together(options: dict[str, Any], size: int) -> list[int]:
    """`size` processes with the environment variables of torchrun."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [fork(options, shared | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(size)]


def await_line(options: dict[str, Any]) -> None:
    """Waits until the log grows, i.e. until training is under way."""
    log = Path(options["folder"]) / "log.jsonl"
    before, end = log.stat().st_mtime_ns if log.exists() else 0, time.monotonic() + 240
    while time.monotonic() < end and (not log.exists() or log.stat().st_mtime_ns == before):
        time.sleep(0.001)


def kill(options: dict[str, Any], kills: int, seed: int) -> int:
    """Kills a training process, now with a batch, now during a save; how often it died."""
    draw = random.Random(seed)
    died = 0
    for number in range(kills):
        how = {"die_at": draw.randint(1, 60)} if number % 2 else {"die_at_batch": draw.randint(1, 24)}
        died += wait(fork(options | how)) == -signal.SIGKILL
    return died


def act(request: dict[str, Any]) -> Any:
    do, options = request["do"], request.get("options", {})
    if do == "begin":
        return fork(options)
    if do == "poll":
        child, status = os.waitpid(request["child"], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if child else None
    if do == "wait":
        return wait(request["child"])
    if do == "train":
        return wait(fork(options))
    if do == "together":
        return [wait(child) for child in start_together(options, request["size"])]
    if do == "interrupt":  # only the first of them gets the signal
        children = start_together(options, request["size"])
        await_line(options)
        time.sleep(0.1)
        os.kill(children[0], request["signal"])
        return [wait(child) for child in children]
    return kill(options, request["kills"], request["seed"])


if __name__ == "__main__":
    # Imported before the forks, not in each of them; torch imports this with its first optimiser.
    import torch._dynamo

    for line in sys.stdin:
        print(json.dumps([act(request) for request in json.loads(line)]), flush=True)
