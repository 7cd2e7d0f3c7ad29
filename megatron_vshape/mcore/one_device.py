"""Chunks of a Megatron GPT, without a pipeline: to measure what their passes take.

On one device, or on the ranks of a stage, each with its share.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from megatron_vshape import environment
from megatron_vshape.core.model.costs import Piece
from megatron_vshape.core.model.kinds import (
    COPY_BACK,
    COPY_OUT,
    KINDS,
    PARTS,
    RELEASE,
    RELOAD,
    Kind,
    ScheduleError,
)
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.mcore import cpu
from megatron_vshape.mcore.replaced import Replaced
from megatron_vshape.runtime.copies import Copies
from megatron_vshape.runtime.measure import PassTimer
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program

WARM_UP = 2
"""Microbatches before those that count."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that take the place of every layer's MLP."""

    count: int
    per_token: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int | None = None

    def shard(self, ranks: int) -> Experts:
        """Return those of one of so many ranks, which compute as much for each of its tokens.

        As many products as tokens bring there on average: of fewer experts than a token goes to,
        all, and wider.

        Raises:
            ScheduleError: they do not divide.
        """
        if self.count % ranks:
            raise ScheduleError(
                f"{self.count} experts do not divide among {ranks} expert-parallel ranks"
            )
        count = self.count // ranks
        each = min(self.per_token, count)
        return replace(
            self,
            count=count,
            per_token=each,
            ffn_hidden_size=self.ffn_hidden_size * self.per_token // each,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured: a GPT, its microbatches and where they run."""

    layers: int
    hidden_size: int
    attention_heads: int
    vocabulary_size: int
    sequence_length: int
    microbatch_size: int
    device: str  # cuda or cpu
    dtype: str  # of the layers
    use_te: bool = False
    ffn_hidden_size: int | None = None  # None: four times the hidden size
    query_groups: int | None = None  # None: one per head
    head_size: int | None = None  # None: the hidden size divided by the heads
    gated: bool = False  # two matrices into the MLP, as SwiGLU has
    dropout: float = 0.0  # of hidden states
    flash_attention: bool = True  # without it the scores are kept
    experts: Experts | None = None  # in place of the MLP
    # Ranks that each have a share of what is given here: of all but the experts, and of these.
    tensor_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False  # the tensor-parallel ranks share the tokens of the rest

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype as torch's."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of an activation on a rank, [s, b, h]."""
        share = self.tensor_parallel if self.sequence_parallel else 1
        return self.sequence_length // share, self.microbatch_size, self.hidden_size

    @property
    def message_bytes(self) -> int:
        """Return the size of an activation, which is that of a message between stages."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def ranks(self) -> int:
        """Return how many ranks a stage has at least, for both ways to share."""
        return max(self.tensor_parallel, self.expert_parallel)

    def alone(self) -> Model:
        """Return what one of its ranks computes, communication left out.

        Raises:
            ScheduleError: heads, groups, the MLP, the vocabulary, the tokens or the experts do not
                divide.
        """
        ranks = self.tensor_parallel
        ffn = self.ffn_hidden_size or 4 * self.hidden_size
        groups = self.query_groups or self.attention_heads
        sizes = {
            "attention_heads": self.attention_heads,
            "query_groups": groups,
            "ffn_hidden_size": ffn,
            "vocabulary_size": self.vocabulary_size,
        }
        tokens = {"the sequence of": self.sequence_length} if self.sequence_parallel else {}
        for name, size in (sizes | tokens).items():
            if size % ranks:
                raise ScheduleError(
                    f"{name} {size} does not divide among {ranks} tensor-parallel ranks"
                )
        head_size = self.head_size or self.hidden_size // self.attention_heads
        parts: dict[str, Any] = {name: size // ranks for name, size in sizes.items()}
        experts = self.experts and self.experts.shard(self.expert_parallel)
        apart: dict[str, Any] = {"tensor_parallel": 1, "expert_parallel": 1}
        return replace(
            self, head_size=head_size, experts=experts, sequence_parallel=False, **apart, **parts
        )


def choose(device: str) -> None:
    """Have Megatron, which is to be imported after this, compute on this device.

    Raises:
        ScheduleError: there is no such device, or too late to leave the GPU alone.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first asks for a GPU
        if not cpu.install():
            raise ScheduleError(
                "--device cpu: this process has looked for a GPU and found one; start it with "
                "CUDA_VISIBLE_DEVICES= in its environment"
            )
    elif not torch.cuda.is_available():
        raise ScheduleError("torch sees no GPU: run this where there is one, or with --device cpu")


def prepare(device: str) -> Any:
    """Make this process a world of one rank, or join a launcher's; return its linears' state.

    Raises:
        ScheduleError: as `choose` does.
    """
    # What a schedule's ranks have, before CUDA starts.
    environment.complete(os.environ, kernels=device == "cuda", ordered="WORLD_SIZE" in os.environ)
    choose(device)
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        if device == "cuda" and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            folder = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            store = f"file://{folder}/store"
            dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        form_groups()
    return split_state()


def form_groups(tensor_parallel: int = 1, expert_parallel: int = 1) -> None:
    """Have so many neighbouring ranks share every layer, and its experts, from now on."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
    )
    random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def split_state() -> Any:
    """Return the state of Megatron's linears, which leave their weight gradients to it."""
    from megatron.core.tensor_parallel import layers

    from megatron_vshape.mcore.split.local_layers import TorchFusedKernels, make_split_linear
    from megatron_vshape.mcore.step_state import StepState

    state = StepState(splits_backward=True)
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    upstream = getattr(layers, "_one_device_upstream", None) or getattr(layers, name)
    layers._one_device_upstream = upstream
    setattr(layers, name, make_split_linear(state, layers, upstream))
    layers._grad_accum_fusion_available = True
    if not hasattr(layers, "fused_weight_gradient_mlp_cuda"):
        layers.fused_weight_gradient_mlp_cuda = TorchFusedKernels
    return state


class SdpaAttention(nn.Module):
    """Megatron's core attention by torch's kernel, which does not keep the s x s scores."""

    takes_slices = True

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        """Return causal attention of [s, b, heads, size], as [s, b, heads * size].

        Of fewer queries than keys the last ones are at the end, as a slice's are.
        """
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        queries, keys = query.shape[2], key.shape[2]
        mask = causal_lower_right(queries, keys) if queries < keys else None
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.LayerNorm):
    """The norm of Megatron's own layers, which without apex refuse a part of the sequence.

    Nobody here adds up its gradients over the ranks, all of which the refusal is for.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps)


def build(model: Model, state: Any, num_layers: int, is_first: bool, is_last: bool) -> nn.Module:
    """Return so many layers with the embedding and the loss where asked for, wrapped in DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel

    from megatron_vshape.mcore.split import te_layers

    config = _config(model, num_layers)
    chunk: nn.Module = GPTModel(
        config,
        _layers_spec(model, num_layers),
        model.vocabulary_size,
        model.sequence_length,
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    chunk = chunk.to(model.device, model.torch_dtype)
    te_layers.install(state, [chunk])
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config, options, chunk)
    return chunk


def _config(model: Model, num_layers: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    gated = {"gated_linear_unit": True, "activation_func": nn.functional.silu}
    return TransformerConfig(
        num_layers=max(num_layers, 1),  # a stage at an end may have none: Megatron divides by it
        tensor_model_parallel_size=model.tensor_parallel,
        sequence_parallel=model.sequence_parallel,
        hidden_size=model.hidden_size,
        num_attention_heads=model.attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn_hidden_size,
        bf16=model.dtype == "bfloat16",
        params_dtype=model.torch_dtype,
        pipeline_dtype=model.torch_dtype,
        attention_dropout=0.0,
        hidden_dropout=model.dropout,
        add_bias_linear=model.experts is None,
        gradient_accumulation_fusion=True,
        masked_softmax_fusion=False,
        deallocate_pipeline_outputs=True,
        transformer_impl="transformer_engine" if model.use_te else "local",
        **(gated if model.gated else {}),
        **_of_experts(model),
    )


def _of_experts(model: Model) -> dict[str, Any]:
    if model.experts is None:
        return {}
    return {
        "num_moe_experts": model.experts.count,
        "moe_router_topk": model.experts.per_token,
        "moe_ffn_hidden_size": model.experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.experts.shared_ffn_hidden_size,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": model.use_te,
        "expert_model_parallel_size": model.expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def _layers_spec(model: Model, num_layers: int) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    count = None if model.experts is None else model.experts.count
    if model.use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        norm: Any = TENorm
        spec = specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=count, moe_grouped_gemm=count is not None
        )
    else:
        spec = specs.get_gpt_layer_local_spec(num_experts=count)
        own = spec.submodules
        if model.flash_attention:
            own.self_attention.submodules.core_attention = SdpaAttention
        if own.pre_mlp_layernorm is WrappedTorchNorm:
            own.input_layernorm = own.pre_mlp_layernorm = Norm
        norm = own.pre_mlp_layernorm
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)


def unwrap(chunk: nn.Module) -> Any:
    """Return the model inside DDP."""
    return chunk.module


def zero_gradients(chunks: Sequence[nn.Module]) -> None:
    """Zero the gradients, as at the start of a step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]


class NoReduction:
    """What a stage tells of its weight passes, where nobody reduces gradients."""

    def splits(self, chunk: int) -> bool:
        """Return that whole backwards stay whole."""
        return False

    def weights_begin(self, chunk: int) -> None:
        """Do nothing."""

    def weights_done(self, chunk: int) -> None:
        """Do nothing."""


def batches(model: Model) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random tokens and their positions."""
    shape = (model.microbatch_size, model.sequence_length)
    positions = torch.arange(model.sequence_length, device=model.device).expand(shape)
    while True:
        yield torch.randint(model.vocabulary_size, shape, device=model.device), positions


def forward_step(
    data: Iterator[tuple[Tensor, Tensor]], chunk: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run a chunk on the next batch, or plan it, as a training script's forward step does."""
    tokens, positions = next(data)
    labels = tokens if getattr(chunk, "module", chunk).post_process else None
    call = chunk.build_schedule_plan if return_schedule_plan else chunk
    output = call(tokens, positions, None, labels=labels)

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = output.float().mean()
        return mean, {"lm loss": mean.detach()}

    return output, loss


def start_step(chunk: nn.Module, num_microbatches: int, by_layers: bool = False) -> Any:
    """Return the step that stages of this device run in, gradients zeroed elsewhere."""
    from megatron.core.utils import get_model_config

    from megatron_vshape.mcore.step.stage import Step, zero_tokens

    return Step(
        config=get_model_config(chunk),
        forward_step_func=forward_step,
        num_microbatches=num_microbatches,
        context_parallel_size=1,
        forward_only=False,
        collect_non_loss_data=False,
        first_val_step=None,
        gradient_sync=NoReduction(),  # type: ignore[arg-type]
        num_tokens=zero_tokens(next(chunk.parameters()).device),
        by_layers=by_layers,
    )


def made_up(model: Model) -> Tensor:
    """Return a tensor as a neighbour would send it; zeros would run faster."""
    return torch.randn(model.shape, device=model.device, dtype=model.torch_dtype)


# --- what the stages of a pipeline take ---------------------------------------------------------


def profile_stages(
    model: Model,
    layers: Sequence[int],
    repeats: int,
    tell: Callable[[str, Piece], None] = lambda *_: None,
) -> dict[str, Piece]:
    """Return what stages with so many layers each take, by `names_of` them.

    Only the first stage, the last and one inner stage of every size are built and run, one after
    the other; `tell` hears of each.
    """
    state = split_state()
    last = len(layers) - 1
    found: dict[str, Piece] = {}
    for stage, (count, name) in enumerate(zip(layers, names_of(layers), strict=True)):
        if name not in found:
            found[name] = _profile_stage(model, state, count, stage == 0, stage == last, repeats)
            tell(name, found[name])
    return found


def names_of(layers: Sequence[int]) -> list[str]:
    """Return what every stage is called; stages that take the same are called the same."""
    last = len(layers) - 1
    return [_described(count, at == 0, at == last) for at, count in enumerate(layers)]


def _described(num_layers: int, is_first: bool, is_last: bool) -> str:
    place = "first" if is_first else "last" if is_last else "inner"
    return f"{place} stage, {num_layers} layer{'s' * (num_layers != 1)}"


def _profile_stage(
    model: Model, state: Any, num_layers: int, is_first: bool, is_last: bool, repeats: int
) -> Piece:
    """Run F, B and W of one microbatch after another, then F and BW of as many.

    The first one's memory is counted.
    """
    chunk = build(model, state, num_layers, is_first, is_last)
    zero_gradients([chunk])
    total = 1 + 2 * (WARM_UP + repeats)
    stage = alone(model, state, chunk, total)
    with counted(state, chunk) as census:
        run_microbatch(model, stage, 0)
    times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    microbatches = iter(range(1, total))
    for splits in (True, False):
        for microbatch in islice(microbatches, WARM_UP):
            run_microbatch(model, stage, microbatch, splits=splits)
        timer = PassTimer(torch.device(model.device))
        for microbatch in islice(microbatches, repeats):
            run_microbatch(model, stage, microbatch, timer, splits)
        for work, start, end in timer.slots():
            # A forward is the same before either; as many are enough.
            if splits or work.kind is Kind.BW:
                times[work.kind].append(end - start)
    forward, backward, weight, whole = (median(times[kind]) for kind in (*PARTS, Kind.BW))
    saved = max(backward + weight - whole, 0.0)  # below 0 is noise: it may do both in turn
    after_forward, after_backward = census.held_bytes(0)
    return Piece(forward, backward, weight, after_forward, after_backward, saved)


def profile_copies(model: Model, layers: Sequence[int], repeats: int) -> dict[str, Copies]:
    """Return what copies to and from the host take, as `profile_stages` does of the passes."""
    state = split_state()
    last = len(layers) - 1
    found: dict[str, Copies] = {}
    for stage, (count, name) in enumerate(zip(layers, names_of(layers), strict=True)):
        if name not in found:
            chunk = build(model, state, count, stage == 0, stage == last)
            found[name] = _profile_copies(model, state, chunk, repeats)
    return found


def _profile_copies(model: Model, state: Any, chunk: nn.Module, repeats: int) -> Copies:
    """Run pairs of microbatches of which one is copied back while the other is copied out."""
    from megatron_vshape.mcore.observe.report import persistent
    from megatron_vshape.mcore.step.waiting import Waiting
    from megatron_vshape.runtime.offload import Offload

    zero_gradients([chunk])
    offload = Offload(torch.device(model.device))
    offload.keep(persistent([chunk]))
    pairs = WARM_UP + repeats
    stage = alone(model, state, chunk, 2 * pairs)
    stage.step.parts.append(Waiting(state, offload))
    row = tuple(work for pair in range(pairs) for work in _pair_of_copies(2 * pair))
    program = lower(Schedule("alone", 1, 2 * pairs, (0,), (row,)))
    timer = PassTimer(torch.device(model.device))
    ranks = [[rank] for rank in range(dist.get_world_size())]
    transport = Transport(ranks, model.shape, model.torch_dtype, model.device)
    transport.prepare(program)
    handlers = stage.step.handlers()
    run_program(program, 0, {0: _Fed(model, stage)}, transport, timer, handlers=handlers)
    transport.close()
    times: dict[tuple[Kind, bool], list[float]] = {}
    for work, start, end in timer.slots():
        if work.microbatch >= 2 * WARM_UP:
            times.setdefault((work.kind, work.microbatch % 2 == 1), []).append(end - start)
    offload.clear()
    out_us, back_us, out_beside_us, back_beside_us = (
        median(times[kind, is_second])
        for kind, is_second in (
            (COPY_OUT, False),
            (COPY_BACK, True),
            (COPY_OUT, True),
            (COPY_BACK, False),
        )
    )
    moved = float(offload.bytes_by_stage[0])
    return Copies(moved, out_us, back_us, out_beside_us, back_beside_us)


def _pair_of_copies(first: int) -> list[Pass]:
    """Return the passes of two microbatches: the first is copied out alone, the second back."""
    second = first + 1
    turns = [
        *((Kind.F, first), (Kind.F, second), (COPY_OUT, first), (RELEASE, first), (RELOAD, first)),
        *((COPY_BACK, first), (COPY_OUT, second), (RELEASE, second), (Kind.B, first)),
        *((Kind.W, first), (RELOAD, second), (COPY_BACK, second), (Kind.B, second)),
        (Kind.W, second),
    ]
    return [Pass(kind, 0, microbatch) for kind, microbatch in turns]


class _Fed:
    """A stage that is given what neighbours would send it."""

    def __init__(self, model: Model, stage: Any) -> None:
        self._model, self._stage = model, stage
        chunk = unwrap(stage.model)
        self._receives = not chunk.pre_process, not chunk.post_process

    def forward(self, microbatch: int, received: Tensor | None) -> None:
        """Run F."""
        self._stage.forward(microbatch, made_up(self._model) if self._receives[0] else None)

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> None:
        """Run B."""
        gradient = made_up(self._model) if self._receives[1] else None
        self._stage.backward_inputs(microbatch, gradient)

    def __getattr__(self, name: str) -> Any:
        """Return the stage's own method for a pass that receives nothing."""
        return getattr(self._stage, name)


def alone(model: Model, state: Any, chunk: nn.Module, num_microbatches: int) -> Any:
    """Return a chunk as the one stage of a step."""
    from megatron_vshape.mcore.step.stage import MegatronStage

    is_last = unwrap(chunk).post_process
    step = start_step(chunk, num_microbatches)
    return MegatronStage(state, step, chunk, batches(model), 0, 0, is_last, has_chunks=False)


@contextmanager
def counted(state: Any, chunk: nn.Module) -> Iterator[Any]:
    """Count meanwhile what activation memory the chunk holds."""
    from megatron_vshape.mcore.observe.report import persistent
    from megatron_vshape.runtime.held_bytes import Census

    census = Census(persistent([chunk]))
    with state.counting(census):
        yield census


def run_microbatch(
    model: Model, stage: Any, microbatch: int, observer: Any = None, splits: bool = True
) -> None:
    """Run the passes; what is handed to one is held by nobody else, as in a pipeline."""
    chunk = unwrap(stage.model)
    backward = stage.backward_inputs if splits else stage.backward
    runs = [
        (Kind.F, not chunk.pre_process, stage.forward),
        (Kind.B if splits else Kind.BW, not chunk.post_process, backward),
    ]
    for kind, receives, run in runs:
        handed = [made_up(model) if receives else None]
        with answering_for(stage), observed(observer, kind, microbatch):
            run(microbatch, handed.pop())
    if splits:
        with observed(observer, Kind.W, microbatch):
            stage.backward_weights(microbatch)


@contextmanager
def answering_for(stage: Any) -> Iterator[None]:
    """Have Megatron's layer plans hear whether this stage is the last, without a pipeline."""
    from megatron.core import parallel_state

    with Replaced() as replaced:
        replaced.put(parallel_state, "is_pipeline_last_stage", lambda **_: stage.is_last)
        yield


@contextmanager
def observed(observer: Any, kind: Kind, microbatch: int = 0) -> Iterator[None]:
    """Tell an observer, if there is one, of a pass that runs inside."""
    work = Pass(kind, 0, microbatch)
    if observer is not None:
        observer.begins(work)
    yield
    if observer is not None:
        observer.ends(work)
