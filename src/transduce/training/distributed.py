"""Devices, processes, seeds: the environment of a training run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from transduce.errors import InputError
from transduce.kernels.dispatch import native_kernels, training_pass

BUCKET_SIZE = 2**23  # gradient elements in one all-reduce
BUCKETS_IN_FLIGHT = 2
Value = TypeVar("Value")
TIMEOUT = timedelta(hours=1)  # the other processes wait while the first one validates


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

        FSDP needs a group also for one process.
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
        # A restarted group must not read the keys that the previous one left in the store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt{attempt}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), in_group=True)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients over all processes, in buckets of many parameters.

        A bucket is communicated while the next one is collected and the one before it is distributed.
        A parameter without a gradient gets zeros, also in a single process: otherwise weight decay would apply to it
        or not depending on the number of processes.
        """
        bucket: list[Tensor] = []
        running: deque[_RunningBucket] = deque()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.size == 1:
                continue
            if bucket and (bucket[0].dtype != parameter.grad.dtype or sum(map(Tensor.numel, bucket)) >= BUCKET_SIZE):
                running.append(_RunningBucket(bucket))
                bucket = []
                if len(running) == BUCKETS_IN_FLIGHT:
                    running.popleft().finish()
            bucket.append(parameter.grad)
        if bucket:
            running.append(_RunningBucket(bucket))
        for one in running:
            one.finish()

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        """The element-wise sum over all processes."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

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
    return hasattr(tensor, "device_mesh")


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor. All processes must call this for a sharded one."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_sharded(tensor) else detached


def local_part(tensor: Tensor) -> Tensor:
    """The part of this process, which shares its memory with the tensor."""
    detached: Any = tensor.detach() if is_sharded(tensor) else None
    return tensor if detached is None else detached.to_local()


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
    """Whether a GPU multiplies matrices in bf16, not only stores them."""
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
