"""Layers of a Megatron GPT in one process without a pipeline, for benchmarks of single passes."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape import environment
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore import cpu
from megatron_vshape.runtime.measure import PassTimer

WARM_UP = 2
"""Microbatches before the timed ones."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a GPT, and its device, such as cuda or cpu."""

    hidden_size: int
    attention_heads: int
    sequence_length: int
    device: str
    dtype: str
    use_te: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of the layers."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of an activation, [s, b, h]."""
        return self.sequence_length, 1, self.hidden_size


def choose_device(device: str) -> None:
    """Set the device for Megatron; call it before Megatron is imported.

    Raises:
        ScheduleError: there is no such device, or torch has already initialized a GPU.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read at the first use of a GPU by torch
        if not cpu.install():
            raise ScheduleError(
                "--device cpu: this process has looked for a GPU and found one; start it with "
                "CUDA_VISIBLE_DEVICES= in its environment"
            )
    elif not torch.cuda.is_available():
        raise ScheduleError("torch sees no GPU: run this where there is one, or with --device cpu")


def prepare(device: str) -> Any:
    """Initialize this process as a world of one rank; return the state of its linear layers.

    Raises:
        ScheduleError: as `choose` does.
    """
    environment.set_missing(os.environ, kernels=device == "cuda", ordered=False)
    choose_device(device)
    if not dist.is_initialized():
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        backend = "nccl" if device == "cuda" else "gloo"
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        parallel_state.initialize_model_parallel()
        random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return _split_state()


def _split_state() -> Any:
    """Make Megatron's linear layers defer their weight gradients to a state."""
    from megatron.core.tensor_parallel import layers

    from megatron_vshape.mcore.split.linear_layers import make_split_linear
    from megatron_vshape.mcore.step_state import StepState

    state = StepState(has_own_schedule=True)
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    upstream = getattr(layers, "_upstream", None) or getattr(layers, name)
    layers._upstream = upstream
    setattr(layers, name, make_split_linear(state, layers, upstream))
    return state


class SdpaAttention(nn.Module):
    """Megatron's core attention with torch's kernel, which does not store the s x s scores."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        """Compute causal attention of [s, b, heads, size], as [s, b, heads * size]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def build(model: Model, state: Any, num_layers: int) -> nn.Module:
    """Build layers without embedding and output layer, wrapped in DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import TransformerConfig

    from megatron_vshape.mcore.split import te_layers

    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.attention_heads,
        bf16=model.dtype == "bfloat16",
        params_dtype=model.torch_dtype,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=layers._grad_accum_fusion_available,
        masked_softmax_fusion=False,
        transformer_impl="transformer_engine" if model.use_te else "local",
    )
    if model.use_te:
        spec = specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = specs.get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    no_embedding_or_output = {
        "pre_process": False,
        "post_process": False,
        "position_embedding_type": "rope",
    }
    chunk: nn.Module = GPTModel(config, spec, 512, model.sequence_length, **no_embedding_or_output)
    chunk = chunk.to(model.device, model.torch_dtype)
    te_layers.use_job_stores(state, [chunk])
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config, options, chunk)
    return chunk


def zero_gradients(chunks: Sequence[nn.Module]) -> None:
    """Zero the gradients, as at the start of a step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]


def run_layers(chunk: Any, received: Tensor) -> Tensor:
    """Run the forward pass of a chunk."""
    chunk.module.set_input_tensor(received)
    output: Tensor = chunk(None, None, None)
    return output


def random_activation(model: Model) -> Tensor:
    """Make a random activation; zeros would run faster."""
    return torch.randn(model.shape, device=model.device, dtype=model.torch_dtype)


@contextmanager
def timed_pass(timer: PassTimer | None, kind: Kind, microbatch: int = 0) -> Iterator[None]:
    """Time a pass, if there is a timer."""
    work = Pass(kind, 0, microbatch)
    if timer is not None:
        timer.begins(work)
    yield
    if timer is not None:
        timer.ends(work)
