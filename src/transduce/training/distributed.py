"""Devices, processes, seeds: the environment of a training run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from transduce.errors import InputError
from transduce.kernels.dispatch import native_kernels, training_pass

BUCKET_SIZE = 2**23  # gradient elements in one all-reduce
Value = TypeVar("Value")
TIMEOUT = timedelta(hours=1)  # the other processes wait while the first one validates
START_TIMEOUT = timedelta(minutes=10)  # until all processes have started
POLL_SECONDS = 0.02


def pick_device(name: str = "auto") -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU; under torchrun each process takes the GPU of its local rank."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps and "WORLD_SIZE" not in os.environ else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}", remedy="use auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if cuda else 0
        index = device.index if device.index is not None else local
        if index >= count:
            raise InputError(f"there is no device cuda:{index}: {count} CUDA devices found", remedy="use device=auto")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if device.type == "mps" and not mps:
        raise InputError("there is no MPS device on this machine", remedy="use device=auto")
    if device.type not in ("cpu", "mps"):
        raise InputError(f"device {name!r} is not supported", remedy="use auto, cpu, cuda, cuda:1 or mps")
    return device


@dataclass(frozen=True)
class Processes:
    """The processes of one data-parallel training run, as torchrun starts them. One process communicates nothing.

    The model is not wrapped (no DistributedDataParallel): the gradient is the sum over the processes, divided by the
    number of tokens of the whole update, so any number of processes computes the same update.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    in_group: bool = False  # whether there is a process group

    @classmethod
    def start(cls, device: torch.device, parallel: str = "ddp") -> Self:
        """Joins the process group of torchrun's environment variables: gloo for the CPU, and also NCCL for CUDA.

        With `parallel="fsdp"` one process has a group, too, and is wrapped by FSDP: for tests, and to measure its cost.
        """
        size = int(os.environ.get("WORLD_SIZE", 1))
        # Scalars and flags are exchanged between CPUs, so that this never waits for the GPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if size == 1:
            if parallel == "ddp":
                return cls()
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            return cls(in_group=True)
        store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        while isinstance(store, PrefixStore):  # old versions of torch prefix the keys by TORCHELASTIC_RESTART_COUNT
            store = store.underlying_store
        # A restarted group must not read the keys that the previous one left in the store.
        store = PrefixStore(agree_on_attempt(store, rank, size), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), in_group=True)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        """The element-wise sum over all processes."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def norm_over_processes(self, norm: Tensor) -> Tensor:
        """The norm of all parts of a vector, of which each process has the norm of its part."""
        if self.size == 1:
            return norm
        squared = norm.square()
        dist.all_reduce(squared)
        return squared.sqrt()

    def maximum(self, number: int) -> int:
        """The largest number of all processes."""
        if self.size == 1:
            return number
        largest = torch.tensor([number])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of process `source`, which must be JSON, in every process."""
        if self.size == 1:
            return value
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([content.numel()])
        dist.broadcast(length, source)
        if self.rank != source:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, source)
        return json.loads(content.numpy().tobytes())

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the first process, on the CPU, in every process; the argument of the others is ignored."""
        if self.size == 1:
            return dict(tensors)
        shapes = {name: [str(x.dtype).removeprefix("torch."), *x.shape] for name, x in tensors.items()}
        result = {}
        for name, (dtype, *shape) in self.broadcast(shapes).items():
            content = torch.empty(shape, dtype=getattr(torch, dtype))
            if self.is_main:
                content.copy_(tensors[name].detach())
            dist.broadcast(content, 0)
            result[name] = content
        return result

    def on_main(self, action: Callable[[], Value]) -> Value:
        """The result (JSON) of the action in the first process, or its `InputError`, in every process.

        Raising everywhere keeps the other processes from waiting for one that has given up.
        """
        answer: dict[str, Any] = {}
        if self.is_main:
            try:
                answer = {"value": action()}
            except InputError as error:
                answer = {"error": error.problem, "where": error.where, "remedy": error.remedy}
        answer = self.broadcast(answer)
        if "error" in answer:
            raise InputError(answer["error"], where=answer["where"], remedy=answer["remedy"])
        value: Value = answer["value"]
        return value

    def close(self) -> None:
        if self.in_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def agree_on_attempt(store: Store, rank: int, size: int, timeout: timedelta = START_TIMEOUT) -> str:
    """A name of this start of a group, the same in all processes, that no earlier start with this store had.

    The restart count of torchrun is no such name: an agent counts the failures of its own processes, so two machines
    may have different counts, and wait for each other under different keys. The first process draws a name and
    publishes it. Every other process signs it, and takes it when the list of signatures has its own: the name and the
    signatures of processes that are dead may still be in the store.
    """
    own = uuid4().hex
    if rank == 0:
        store.set("first process", own)
        signed = [f"{own}/{other}" for other in range(1, size)]
        store.wait(signed, timeout)
        store.set(f"{own}/signatures", json.dumps([store.get(key).decode() for key in signed]))
        return own
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        if store.check(["first process"]):
            name = store.get("first process").decode()
            store.set(f"{name}/{rank}", own)
            done = f"{name}/signatures"
            if store.check([done]) and json.loads(store.get(done))[rank - 1] == own:
                return name
        time.sleep(POLL_SECONDS)
    raise InputError(
        f"process {rank} of {size}: the first process did not answer within {timeout.total_seconds():.0f} seconds",
        remedy="start all processes of the group, with the same MASTER_ADDR and MASTER_PORT",
    )


def fill_missing_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Gives zeros to the parameters without a gradient.

    Otherwise weight decay would apply to them or not depending on the number of processes.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class GradientBuckets:
    """Sums gradients over all processes, in buckets of many parameters.

    After `begin`, a bucket is sent as soon as the backward pass has its gradients, while the pass goes on. All of them
    send the same buckets in the same order, from the last parameters, whose gradients come first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buckets: list[list[nn.Parameter]] = []
        for parameter in reversed(parameters):
            last = self._buckets[-1] if self._buckets else []
            full = sum(map(Tensor.numel, last)) >= BUCKET_SIZE
            if not last or full or last[0].dtype != parameter.dtype:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
        self._number = {parameter: number for number, bucket in enumerate(self._buckets) for parameter in bucket}
        self._waiting: list[set[nn.Parameter]] = []  # after `begin`: those of each bucket whose gradients are not final
        self._running: list[_RunningBucket] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self) -> None:
        """The next backward pass is the last of the update: what it leaves in a gradient is final."""
        self._waiting = [set(bucket) for bucket in self._buckets]

    def _ready(self, parameter: Tensor) -> None:
        if not self._waiting:
            return
        assert isinstance(parameter, nn.Parameter)
        number = self._number[parameter]
        assert number >= len(self._running), "a gradient has changed after it was sent"
        self._waiting[number].discard(parameter)
        while len(self._running) < len(self._buckets) and not self._waiting[len(self._running)]:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._running)]
        fill_missing_gradients(bucket)
        self._running.append(_RunningBucket([parameter.grad for parameter in bucket if parameter.grad is not None]))

    def finish(self) -> None:
        """Sends the buckets that are left, and waits until all gradients are those of all processes."""
        self._waiting = []
        while len(self._running) < len(self._buckets):
            self._send()
        for one in self._running:
            one.finish()
        self._running = []


class _RunningBucket:
    """Gradients that are being summed over all processes, in a copy."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._work = dist.all_reduce(self._flat, async_op=True)

    def finish(self) -> None:
        assert self._work is not None
        self._work.wait()
        sizes = [tensor.numel() for tensor in self._tensors]
        for tensor, summed in zip(self._tensors, self._flat.split(sizes), strict=True):
            tensor.copy_(summed.view_as(tensor))


# torch.distributed.tensor takes a second to import: without FSDP there are no sharded tensors, and it is not imported.


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a tensor of FSDP, of which each process has a part."""
    return hasattr(tensor, "_local_tensor")  # no property, as all others are: an update asks two thousand times


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor. All processes must call this for a sharded one."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_sharded(tensor) else detached


def local_part(tensor: Tensor) -> Tensor:
    """The part of this process, which shares its memory with the tensor."""
    # Not `to_local`, which records or copies parameters: an update asks for a thousand parts.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def sharded_like(tensor: Tensor, reference: Tensor | None) -> Tensor:
    """The part of this process of a whole tensor, if the reference is sharded and has the same shape."""
    if reference is None or not is_sharded(reference) or tensor.shape != reference.shape or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(reference, DTensor)
    mesh = reference.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, reference.placements, src_data_rank=None)


def all_sharded_like(tensors: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`sharded_like` by name."""
    return {name: sharded_like(tensor, references.get(name)) for name, tensor in tensors.items()}


def seed_everything(seed: int, step: int = 0, first_row: int = 0) -> None:
    """Seeds every generator from (seed, update, micro-batch), so that no generator state has to be saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{first_row}".encode()).digest()
    number = int.from_bytes(digest[:8], "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    # Not torch.manual_seed: without a GPU it formats a stack trace each time, a millisecond an update.
    torch.default_generator.manual_seed(number % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number % 2**63)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(number % 2**63)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Inside, results depend on the machine, its device and torch alone.

    torch refuses operations that may differ between two runs. The CPU computes with one thread and without the C
    kernels: a sum over several threads is rounded in another order than over one, and kernels differ in the last bits.
    """
    if not on:
        yield
        return
    # cuBLAS reads this when it is first used; without it torch refuses matrix products on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
    try:
        with training_pass(native=False):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.set_num_threads(threads)


def environment(device: torch.device, micro_batches: int) -> dict[str, Any]:
    """What the last bits of an update depend on, besides the recipe and the data."""
    cpu = device.type == "cpu"
    name = torch.backends.cpu.get_cpu_capability() if cpu else ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "torch": torch.__version__,
        "device": f"{device.type} {name}".strip(),
        "threads": torch.get_num_threads() if cpu else None,
        "native kernels": native_kernels() is not None if cpu else None,
        "micro-batches of an update": micro_batches,  # dropout draws its numbers for each of them
    }


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def computes_in_bf16(device: torch.device) -> bool:
    """Whether a device multiplies matrices in bf16, not only stores them: most GPUs, CPUs with AVX-512 BF16 or AMX."""
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no such counter
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
