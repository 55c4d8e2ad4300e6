"""Fully sharded data parallel training (FSDP2): each process has a part of the weights, gradients and moments."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.futures import Future

from transduce.flow import Batch
from transduce.kernels.linear import cast_weights, castable_layers
from transduce.layers.transformer import TransformerLayer
from transduce.objectives import Objective
from transduce.storage import WriteError, sync
from transduce.training.distributed import gathered, is_sharded, local_part

LAST_EVENTS = "_last_post_reduce_events"
BY_LAYER_FROM = 2**27  # parameters: half a gigabyte of gathered weights


class TrainingLoss(nn.Module):
    """The loss of a model on a batch, as the root module of FSDP.

    FSDP gathers weights before `forward` of a module. An objective may call any method of the model, therefore the
    root is not the model but what calls the objective. The weights of `cast_layers` are gathered with the root.
    """

    def __init__(self, model: nn.Module, cast_layers: Sequence[nn.Linear] = ()) -> None:
        super().__init__()
        self.model, self.cast_layers = model, cast_layers

    def forward(self, objective: Objective, batch: Batch, factor: Tensor) -> tuple[Tensor, Tensor]:
        """The loss times the factor; the loss and its parts without their graph."""
        with cast_weights(self.cast_layers):
            loss = objective(self.model, batch)
        parts = [loss.total, *(loss.parts[name] for name in objective.parts)]
        return loss.total * factor, torch.stack([part.detach() for part in parts])


# torch 2.13 has new names for both.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PassCollectives:
    """Counts the collectives of one forward and backward pass, and can leave out the first ones.

    A process that runs out of memory within a pass must still take part in the rest of its collectives: the others
    wait for it. It repeats the pass with a small batch and leaves out those that it has done.
    """

    def __init__(self) -> None:
        self.done = 0  # of this pass
        self.left_out = 0  # of the next ones

    def begin_pass(self) -> None:
        self.done = 0

    def repeat_pass(self) -> None:
        self.left_out, self.done = self.done, 0

    def run(self, collective: Callable[[], dist.Work | None]) -> dist.Work | None:
        if self.left_out:
            self.left_out -= 1
            return None
        work = collective()
        self.done += 1
        return work


class _Allocation:
    """Memory for a collective, from the allocator of torch."""

    def __init__(self, collectives: PassCollectives) -> None:
        self.collectives = collectives

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_Allocation, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return self.collectives.run(lambda: _all_gather(output_tensor, input_tensor, group=group, async_op=async_op))


class _CountedReduceScatter(_Allocation, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return self.collectives.run(
            lambda: _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        )


def _separate_layers(model: nn.Module) -> list[TransformerLayer]:
    """The Transformer layers that share no weights with another one."""
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    return [layer for layer in layers if all(names[id(parameter)] == 1 for parameter in layer.parameters())]


def _share_whole(tensor: Tensor) -> None:
    """Lets FSDP take a tensor of one process, which is whole, instead of a copy of it.

    The two functions are torch's protocol for tensors that are gathered in a way of their own.
    """
    whole, nothing = ref(tensor), tensor.new_empty(0)

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, ...], None]:
        return (nothing,), None

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None) -> Any:
        return (whole(), ()) if out is None else None

    before.__signature__ = _BEFORE  # type: ignore[attr-defined]  # asked for in every pass
    tensor.fsdp_pre_all_gather, tensor.fsdp_post_all_gather = before, after  # type: ignore[attr-defined]


_BEFORE = Signature([Parameter(f"_{number}", Parameter.POSITIONAL_ONLY) for number in range(5)])


def _discard(group: Any) -> None:
    """Brings a group of parameters of FSDP to its state between two passes."""
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    for parameter in group.fsdp_params:
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    group._to_sharded()


class ShardedModel:
    """A model whose weights are divided among the processes, and gathered for each pass.

    The weights of a Transformer layer are gathered when the layer runs, all others at the beginning of the pass. In a
    model with fewer parameters than `by_layer_from`, all are gathered at the beginning: each layer would cost the
    host about as much time as a GPU needs for it. Parameters that are single numbers are whole in every process. In
    one process all are, and are not copied.
    """

    def __init__(self, model: nn.Module, device: torch.device, size: int, by_layer_from: int | None = None) -> None:
        # Keys and values of cross-attention are views. Nothing changes them in place, of which torch warns.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        self.model, self.collectives = model, PassCollectives()
        self.mesh = init_device_mesh(device.type, (size,))
        # Checkpoints are written from copies on the CPU, by threads that must not wait for the passes.
        self.save_group = dist.new_group(backend="gloo")
        self.cpu_mesh = self.mesh if device.type == "cpu" else init_device_mesh("cpu", (size,))
        self.scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}  # FSDP shards vectors
        for scalar in self.scalars:
            scalar.data = scalar.data.to(device)
        if by_layer_from is None:  # one process has all weights anyway
            by_layer_from = BY_LAYER_FROM if size > 1 else sys.maxsize
        by_layer = sum(parameter.numel() for parameter in model.parameters()) >= by_layer_from
        for layer in _separate_layers(model) if by_layer else ():
            if layer.cross_attention is not None:
                self._shard(layer.cross_attention, "keys_values")
            self._shard(layer, "run")
        self.root = TrainingLoss(model, () if by_layer else castable_layers(model))
        self._shard(self.root)
        if size == 1:
            for parameter in model.parameters():
                if is_sharded(parameter):
                    _share_whole(local_part(parameter))

    def _shard(self, module: nn.Module, *methods: str) -> None:
        """Shards one module; the methods, like `forward`, gather its weights."""
        fully_shard(module, mesh=self.mesh, ignored_params=self.scalars)
        assert isinstance(module, FSDPModule)
        for method in methods:
            register_fsdp_forward_method(module, method)
        # The loss is divided by the number of tokens of the update: gradients are summed, not averaged.
        if self.mesh.size() > 1:  # else torch would divide by 1, which is a pass over all gradients
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            module.set_reduce_scatter_unused_params(True)
        if self.mesh.size() > 1:
            module.set_custom_all_gather(_CountedAllGather(self.collectives))
            module.set_custom_reduce_scatter(_CountedReduceScatter(self.collectives))

    def reset(self) -> None:
        """Discards the gathered weights and what a pass has left unfinished."""
        root: Any = self.root
        if hasattr(root, "reset_iter_state"):  # torch 2.13
            root.reset_iter_state()
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.discard_pass()

    def discard_pass(self) -> None:
        """Discards an unfinished pass, and waits for none of its kernels: they have ended or, captured, never run."""
        state: Any = self.root._get_fsdp_state()  # type: ignore[operator]
        shared, streams = state._state_ctx, state._comm_ctx
        streams.all_gather_state = None
        for name, nothing in (("reduce_scatter_state", None), ("reduce_scatter_states", []), (LAST_EVENTS, {})):
            if hasattr(streams, name):  # torch 2.13 has lists
                setattr(streams, name, nothing)
        streams.post_forward_order.clear()
        for one in shared.all_states:
            one._training_state = TrainingState.IDLE
            groups = getattr(one, "_fsdp_param_groups", None) or [one._fsdp_param_group]
            for group in filter(None, groups):
                _discard(group)
        shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False

    def begin_pass(self) -> None:
        self.collectives.begin_pass()

    def repeat_failed_pass(self, run: Callable[[], object]) -> None:
        """Takes part in the collectives that a failed pass has left out, with another pass, whose result is void."""
        self.reset()
        self.collectives.repeat_pass()
        run()

    def copy_weights_to(self, other: nn.Module, *, receive: bool) -> None:
        """Copies all weights into an ordinary model of the same shape, in the processes that `receive` them."""
        targets = other.state_dict()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                whole = gathered(tensor)
                if receive:
                    targets[name].copy_(whole)

    def on_cpu(self, tensor: Tensor) -> Tensor:
        """A copy of the part of this process in main memory."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True)
        local = local_part(tensor).to("cpu", copy=True)
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(local, self.cpu_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


class _SyncedWriter(HuggingFaceStorageWriter):
    """The writer of torch, whose files are on the disk when the processes tell each other that they are written.

    The one of torch syncs a file before its buffer is written.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            sync(Path(self.path) / name)
        return written


class ShardedSave:
    """Writes the parts of a sharded checkpoint in a thread of each process, while training goes on.

    The tensors are copies: training changes the originals. The checkpoint exists when `complete`, in the first process,
    has given the folder its name, after all parts are on the disk. Files are safetensors and JSON, no pickle.
    """

    def __init__(
        self, tensors: dict[str, Tensor], part: Path, group: dist.ProcessGroup, complete: Callable[[], None]
    ) -> None:
        self._tensors, self._part, self._group, self._complete = tensors, part, group, complete
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            writer = _SyncedWriter(str(self._part), save_distributed=True)
            save(self._tensors, storage_writer=writer, process_group=self._group)
            self._complete()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Returns when the checkpoint is on the disk; raises a `WriteError` if it cannot be written."""
        self._thread.join()
        error = self._error
        if isinstance(error, CheckpointException):
            error = next((one for one, _ in error.failures.values() if isinstance(one, OSError)), error)
        if isinstance(error, OSError):
            raise WriteError(self._part, error) from error
        if error is not None:
            raise error


def shard_shapes(folder: Path) -> dict[str, torch.Size]:
    """The shapes of the whole tensors of a sharded checkpoint, by `group/name`."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {key: one.size for key, one in metadata.items() if isinstance(one, TensorStorageMetadata)}


def load_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Reads tensors, whole or sharded among any number of processes, from a sharded checkpoint.

    Each process reads what it needs, from the parts of any number of processes.
    """
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
