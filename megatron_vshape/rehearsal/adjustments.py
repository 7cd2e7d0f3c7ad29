"""Replacements of Megatron's setup code that reads values or queries the driver or other ranks."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import repeat
from types import FunctionType
from typing import Any

import torch
from torch.nn import Parameter

from megatron_vshape.mcore.refusals import NO_RECOMPUTED_BIAS, RECOMPUTED_BIAS, RefusedError
from megatron_vshape.rehearsal.device import on_host


def skip_driver_and_other_ranks() -> None:
    """Replace the parts of Megatron that query the driver or other ranks; after its import."""
    skip_driver()
    data: Any = importlib.import_module("megatron.core.tensor_parallel.data")
    data._build_key_size_numel_dictionaries = _sizes_of_local_data
    _leave_generators_alone()
    _keep_meshes_real()
    _trust_other_ranks()
    _let_offload_take_fake_tensors()
    _use_one_memory_pool()
    _reject_recomputed_parameters()
    communicator: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    communicator.P2PCommunicator._communicate_shapes = _shapes_of_neighbors


def skip_driver() -> None:
    """Skip Megatron's setup that compiles kernels or queries the driver."""
    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda: None
    utils: Any = importlib.import_module("megatron.core.pipeline_parallel.utils")
    utils.set_ideal_affinity_for_current_gpu = lambda: None


def training_iterators(args: Any, batches: Iterator[Any]) -> tuple[Any, None, None]:
    """Return Megatron's data iterators of a run that trains on these batches, and only trains."""
    rerun: Any = importlib.import_module("megatron.core.rerun_state_machine")
    args.do_train, args.do_valid, args.do_test = True, False, False
    return rerun.RerunDataIterator(batches), None, None


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around(original, ...)`."""
    call = getattr(owner, name)

    @functools.wraps(call)  # keeps the signature for inspection
    def run(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    setattr(owner, name, run)


def _sizes_of_local_data(keys: list[str], data: Any, *unused: Any, **options: Any) -> Any:
    """Return sizes, element counts and their sum, which tensor-parallel rank 0 would send."""
    sizes = {key: data[key].size() for key in keys}
    numbers = {key: size.numel() for key, size in sizes.items()}
    return sizes, numbers, sum(numbers.values())


def _leave_generators_alone() -> None:
    trackers: list[Any] = [importlib.import_module("megatron.core.tensor_parallel.random")]
    with suppress(ImportError):
        trackers.append(importlib.import_module("transformer_engine.pytorch.distributed"))
    for module in trackers:
        module.CudaRNGStatesTracker.add = lambda self, *_, **__: None
        module.CudaRNGStatesTracker.fork = _null_context
    with suppress(ImportError):  # its dependencies may be missing
        fsdp: Any = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
        # The state is that of another rank.
        fsdp.FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda self: None


def _null_context(*unused: Any, **options: Any) -> nullcontext[None]:
    """Return a context without effect, for any arguments."""
    return nullcontext()


def _with_real_values(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute with real values: meshes of ranks are numbers on the host, not tensors of the run."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), on_host():
        return call(*args, **kwargs)


def _keep_meshes_real() -> None:
    """Compute Megatron-FSDP's meshes of ranks with real values."""
    from torch.distributed.device_mesh import DeviceMesh

    for name, member in list(vars(DeviceMesh).items()):
        if isinstance(member, FunctionType):
            wrap(DeviceMesh, name, _with_real_values)
        elif isinstance(member, property) and member.fget is not None:
            setattr(DeviceMesh, name, property(functools.partial(_with_real_values, member.fget)))
        elif isinstance(member, staticmethod):
            replacement = functools.partial(_with_real_values, member.__func__)
            setattr(DeviceMesh, name, staticmethod(replacement))
    with suppress(ImportError):
        adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
        for kind in list(vars(adapter).values()):
            if isinstance(kind, type) and "_init_dist_index" in vars(kind):
                wrap(kind, "_init_dist_index", _with_real_values)


def _trust_other_ranks() -> None:
    """Disable comparisons of Megatron-FSDP with data of other ranks."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.distributed.fsdp.src"):
            if hasattr(module, "validate_uneven_dtensor"):
                module.validate_uneven_dtensor = lambda *_, **__: None  # type: ignore[attr-defined]


def _let_offload_take_fake_tensors() -> None:
    """Enable activation offloading of fake tensors, which Megatron skips."""
    with suppress(ImportError):  # 0.17 has none
        name = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
        handler = getattr(importlib.import_module(name), "ChunkOffloadHandler", None)
        if hasattr(handler, "_can_manage_tensor_for_offload"):
            kind: Any = handler
            kind._can_manage_tensor_for_offload = staticmethod(
                lambda tensor: not isinstance(tensor, torch.nn.Parameter)
            )


def _use_one_memory_pool() -> None:
    """Allocate --use-nccl-ub's buffers as others: their pool is an extension, built on a GPU."""
    with suppress(ImportError):
        allocator = importlib.import_module("megatron.core.nccl_allocator")
        for name in (
            "init",
            "create_nccl_mem_pool",
            "register_mem_pool",
            "nccl_mem",
            "MultiGroupMemPoolAllocator",
            "MemPoolAllocatorWithoutRegistration",
        ):
            setattr(allocator, name, _null_context)


def _reject_recomputed_parameters() -> None:
    """Reject a checkpoint that returns a parameter: autograd makes it an output of itself."""

    def forward(call: Callable[..., Any], *args: Any) -> Any:
        outputs = call(*args)
        if isinstance(outputs, tuple) and any(isinstance(output, Parameter) for output in outputs):
            raise RefusedError(f"this run never ends: {RECOMPUTED_BIAS}. {NO_RECOMPUTED_BIAS}")
        return outputs

    for module, name in (
        ("megatron.core.tensor_parallel.random", "CheckpointFunction"),
        ("transformer_engine.pytorch.distributed", "_CheckpointFunction"),
    ):
        with suppress(ImportError):
            wrap(getattr(importlib.import_module(module), name), "forward", forward)


def _shapes_of_neighbors(
    self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool
) -> list[list[int]]:
    """Return the shapes that the neighbors would send if their number of tokens can vary.

    Stages after multi-token prediction receive its outputs, too, one after the other.
    """
    from megatron.training import get_args

    args = get_args()
    layout = getattr(self.config, "pipeline_model_parallel_layout", None)
    layers = layout.layout if layout else [[[]]] * self.pp_group.size()
    stages = [rank_stages[chunk] for chunk in range(len(layers[0])) for rank_stages in layers]
    if not hasattr(self, "received_chunks"):  # a step has its own communicator
        self.received_chunks = _received_chunks(self, len(layers[0]))
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    length = args.seq_length // (shards * args.context_parallel_size)
    shapes = []
    for direction, is_received in enumerate((recv_prev, recv_next)):
        chunk = next(self.received_chunks[direction]) if is_received else 0
        # An activation has the outputs of all stages before, its gradient also this stage's.
        end = chunk * len(layers) + self.pp_group.rank() + direction
        predicting = sum(layer.name == "mtp" for stage in stages[:end] for layer in stage)
        shapes.append([length * (1 + predicting), args.micro_batch_size, args.hidden_size])
    return shapes


def _received_chunks(self: Any, chunks: int) -> tuple[Iterator[int], Iterator[int]]:
    """Return the chunks of a step's received activations and gradients, in their order."""
    if chunks == 1:
        return repeat(0), repeat(0)
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.training import training

    group = self.config.microbatch_group_size_per_vp_stage
    table = get_schedule_table(training.get_num_microbatches(), chunks, group)
    order, rank = [chunk for _, chunk in table], self.pp_group.rank()
    # The first stage receives no activations, and the last no gradients.
    activations = (chunk for chunk in order if rank or chunk)
    is_last = rank == self.pp_group.size() - 1
    gradients = (chunks - 1 - chunk for chunk in order if chunk or not is_last)
    return activations, gradients
