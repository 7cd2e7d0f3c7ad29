"""Functions of libraries that number the stages by chunk, then rank, or know one chunk.

Router replay, weights and hybrid models of verl, ROLL and Megatron-Bridge; NeMo-RL's worker.

verl (mode R2) appends the choices of every forward call of a chunk, sorts them by Megatron's
schedule table, and gathers the layers of all ranks in `pp_gather`, which expects chunk c of rank r
to be stage c * ranks + r. In a V it is not. ROLL has a copy of these functions.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import Tensor, nn

from megatron_vshape.mcore.hook import Function, Replaced, Session, replaces
from megatron_vshape.mcore.layout.built_layers import has_experts
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.setup.run_config import RunConfig
from megatron_vshape.mcore.step.forward_backward import PipelineRunner

GATHER_PARAMETERS = ("local_layers_router_map", "tf_config")
"""First parameters of verl's and ROLL's `pp_gather`."""


def schedule_table(
    session: Session, num_microbatches: int, num_chunks: int
) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) of every forward call of the last step.

    Raises:
        UnsupportedError: that step had other calls, or its microbatches were reordered; or a stage
            has no layers, and so no records.
    """
    layers = session.pipeline.stage_map.layers if session.pipeline is not None else ()
    empty = [str(stage) for stage, count in enumerate(layers) if not count]
    if empty:
        raise UnsupportedError(
            f"recorded router replay needs expert choices of every stage, and stages "
            f"{', '.join(empty)} of layer split {','.join(map(str, layers))} have no layers: give "
            "--pipeline-layer-split with at least one layer per stage"
        )
    runner = session.steps.runner
    calls = runner.calls if isinstance(runner, PipelineRunner) else None
    if calls is None or len(calls.ended) != num_microbatches * num_chunks:
        raise UnsupportedError(
            f"get_schedule_table is asked for {num_microbatches} microbatches and {num_chunks} "
            f"chunks, and the last step had {len(calls.ended) if calls else 0} forward calls: it "
            "is known for the last step alone. Sort recorded expert choices after each step"
        )
    if calls.order is not None:
        raise UnsupportedError(
            "recorded router replay does not support reordered microbatches, as libraries take "
            "records for ascending ones. Add --pipeline-keep-order"
        )
    return calls.ended


def gather_by_placement(session: Session) -> None:
    """Make loaded libraries gather recorded choices by the placement of the schedule.

    verl, ROLL and their forks have this function in modules of different names.
    """
    for module in list(sys.modules.values()):
        function = vars(module).get("pp_gather") if inspect.ismodule(module) else None
        if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
            continue
        if tuple(inspect.signature(function).parameters)[:2] == GATHER_PARAMETERS:
            session.process.replaced.put(module, "pp_gather", _gathers(session, function))


def _gathers(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a library's function that gathers [b, s, local layers, topk] from all ranks."""

    @functools.wraps(original)
    def pp_gather(local_layers_router_map: Tensor, tf_config: Any, *args: Any) -> Any:
        pipeline = session.pipeline
        if pipeline is None or pipeline.stage_map.num_chunks == 1:
            return original(local_layers_router_map, tf_config, *args)
        return gathered(local_layers_router_map, tf_config, pipeline.stage_map)

    return pp_gather


def gathered(local_tensor: Tensor, config: Any, stage_map: StageMap) -> Tensor:
    """Gather the expert choices of all layers on the CPU, in the order of the layers.

    `own` has those of this rank's MoE layers, [b, s, layers, topk] or nested, chunk after chunk.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, local_tensor.cpu(), group=group)
    counts = moe_layers_of_stages(config, stage_map.layers)
    by_stage: dict[int, Tensor] = {}
    for rank, rank_tensor in enumerate(everyones):
        stages = stage_map.stages(rank)
        ends = [0, *accumulate(counts[stage] for stage in stages)]
        for stage, (begin, end) in zip(stages, pairwise(ends), strict=True):
            by_stage[stage] = _layers(rank_tensor, begin, end)
    return torch.cat([by_stage[stage] for stage in sorted(by_stage)], dim=2)


def moe_layers_of_stages(config: Any, layers: Sequence[int]) -> list[int]:
    """Count the MoE layers of every stage by Megatron's `moe_layer_freq`."""
    ends = [0, *accumulate(layers)]
    by_layer = has_experts(config, ends[-1])
    return [sum(by_layer[begin:end]) for begin, end in pairwise(ends)]


def _layers(choices: Tensor, begin: int, end: int) -> Tensor:
    if not choices.is_nested:
        return choices[:, :, begin:end]
    rows = [row[:, begin:end] for row in choices.unbind()]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


_ROWS = "embedding.word_embeddings.weight"


_CONVERTER = "mcore_adapter.models.converter.dist_converter"


def patch_roll_converter(session: Session, pipeline: RunConfig) -> None:
    """Make ROLL's mcore_adapter load the weights of the stages of this rank.

    The converter numbers stages by chunk, then rank, and treats a tied output layer as a separate
    weight. The patch applies only if mcore_adapter builds the model.
    """
    converter = getattr(sys.modules.get(_CONVERTER), "DistConverter", None)
    if converter is None or session.process.replaced.has(converter, "_get_layer_info"):
        return
    stage_map, is_here = pipeline.stage_map, converter.is_on_this_rank

    def layer_info(self: Any, layer: int) -> tuple[int, int, int]:
        stage = next(
            stage_index
            for stage_index, end in enumerate(accumulate(stage_map.layers))
            if layer < end
        )
        local = layer - sum(stage_map.layers[:stage])
        return local, stage_map.placement[stage], stage_map.chunk(stage)

    def is_first(self: Any, vp_stage: int) -> bool:
        return pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[0]

    def is_last(self: Any, vp_stage: int) -> bool:
        return pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[1]

    def is_on_this_rank(self: Any, weight_name: str, vp_stage: int | None = None) -> bool:
        # A tied output layer is the embedding itself, so only the chunk of the first stage loads
        # it.
        is_twice = stage_map.ends_meet and weight_name == _ROWS and not self.revert
        elsewhere = is_twice and not is_first(self, vp_stage or 0)
        return not elsewhere and bool(is_here(self, weight_name, vp_stage))

    session.process.replaced.put(converter, "_get_layer_info", layer_info)
    session.process.replaced.put(converter, "is_pipeline_first_stage", is_first)
    session.process.replaced.put(converter, "is_pipeline_last_stage", is_last)
    session.process.replaced.put(converter, "is_on_this_rank", is_on_this_rank)


def have_chunks_provided(session: Session, config: Any) -> None:
    """Patch a library's provider of models, which is its config, to build several chunks."""
    owner: Any = next((base for base in type(config).__mro__ if "provide" in vars(base)), None)
    if owner is not None and "vp_stage" in inspect.signature(owner.provide).parameters:
        session.patch_once(owner, lambda: {"provide": provide_chunk(session, owner.provide)})


@replaces
def provide_chunk(
    session: Session,
    original: Function,
    config: Any,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
) -> Any:
    """Build one of several chunks, with the ends of the model that its stage has.

    Megatron-Bridge derives the ends from the position of the rank, and a model with an encoder
    builds the encoder by them. `model_init` and `block_init` pass the chunk to constructors that
    get no vp_stage (Qwen3-VL, Qwen-Omni, Qwen3-ASR, hybrid models).
    """
    if session.pipeline is None or vp_stage is None:
        return original(config, pre_process, post_process, vp_stage)
    ends = session.pipeline.ends(parallel_state.get_pipeline_model_parallel_rank(), vp_stage)
    with session.build.providing(vp_stage), Replaced() as replaced:
        if not getattr(config, "is_hybrid_model", False):
            return original(config, *ends, vp_stage)
        # The provider of hybrid models rejects virtual stages, although its model supports them.
        replaced.put(config, "virtual_pipeline_model_parallel_size", None)
        return original(config, *ends)


_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
_VALUE_WORKER = "nemo_rl.models.value.workers.megatron_value_worker"
_SETUP = "nemo_rl.models.megatron.setup"
_LISTS = {
    _WORKER: ("megatron_forward_backward", "save_checkpoint"),
    _SETUP: ("_update_model_config_funcs",),
}
"""Functions by module that need the list of chunks."""

_EXPORTS = (
    "export_hf_weights",
    "export_hf_weights_quant",
    "export_adapter_weights",
    "get_conversion_tasks",
)
"""Methods of Megatron-Bridge's AutoBridge that the worker calls with its model."""


class ModelChunks(nn.Module):
    """All model chunks of a rank as one module, for NeMo-RL's Megatron policy worker.

    The worker keeps `model[0]` of the list that Megatron-Bridge builds, and uses it as one module
    in some 90 places. This class has the methods of Megatron's DistributedDataParallel for all
    chunks. Functions that run, save or export a model get the list.

    Names of parameters and keys of the state dict start with the number of the chunk. `module`
    holds the chunks without their wrappers, so that no caller takes the first chunk for the model.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        nn.Module.__init__(self)  # not that of DistributedDataParallel, which makes buffers
        self.chunks = nn.ModuleList(chunks)
        self.config = get_attr_wrapped_model(chunks[0], "config")
        self.pg_collection = get_attr_wrapped_model(chunks[0], "pg_collection")

    @property
    def module(self) -> nn.ModuleList:
        return nn.ModuleList(unwrap_model(list(self.chunks)))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        raise RuntimeError(
            "a rank with several model chunks is run by Megatron's forward_backward_func, not by "
            "calling the model. Choose a schedule with one chunk per rank, such as zb-h1"
        )

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        values: dict[str, Any] = {}
        for number, chunk in enumerate(self.chunks):
            chunk_values = chunk.state_dict(*args, **options)
            values |= {f"{number}.{name}": value for name, value in chunk_values.items()}
        return values

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        for number, chunk in enumerate(self.chunks):
            start = f"{number}."
            chunk_values = {
                name: value for name, value in state_dict.items() if name.startswith(start)
            }
            chunk.load_state_dict(
                {name.removeprefix(start): value for name, value in chunk_values.items()},
                strict=strict,
            )


class ParallelChunks(ModelChunks, DistributedDataParallel):  # type: ignore[misc]
    """Chunks that Megatron's DistributedDataParallel wraps, with its methods for all of them."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        super().__init__(chunks)
        self.ddp_config = chunks[0].ddp_config
        # Lists under the names that DistributedDataParallel gives them; the worker offloads these.
        for name in ("buffers", "expert_parallel_buffers"):
            setattr(self, name, [buffer for chunk in chunks for buffer in getattr(chunk, name)])

    @property
    def remove_forward_pre_hook_handles(self) -> dict[nn.Module, Any]:
        handles: dict[nn.Module, Any] = {}
        for chunk in chunks_of(self):
            handles |= chunk.remove_forward_pre_hook_handles
        return handles

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in chunks_of(self):
                stack.enter_context(chunk.no_sync())
            yield


def _for_all_chunks(name: str) -> Function:
    """Create the method that calls `name` of each chunk."""

    @functools.wraps(getattr(DistributedDataParallel, name))
    def call(self: ParallelChunks, *args: Any, **options: Any) -> None:
        for chunk in chunks_of(self):
            getattr(chunk, name)(*args, **options)

    return call


for _name in (
    "broadcast_params",
    "disable_forward_pre_hook",
    "enable_forward_pre_hook",
    "finish_grad_sync",
    "scale_gradients",
    "start_grad_sync",
    "start_param_sync",
    "zero_grad_buffer",
):
    setattr(ParallelChunks, _name, _for_all_chunks(_name))


def chunks_of(value: Any) -> Any:
    """Replace a ModelChunks, also within a list, by its chunks; return other values unchanged."""
    if isinstance(value, ModelChunks):
        return list(value.chunks)
    if isinstance(value, list) and any(isinstance(item, ModelChunks) for item in value):
        return [chunk for item in value for chunk in _listed(chunks_of(item))]
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def with_chunks(original: Function) -> Function:
    """Call `original` with lists of chunks in place of each ModelChunks."""

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        converted = {name: chunks_of(value) for name, value in options.items()}
        return original(*map(chunks_of, args), **converted)

    return call


def keep_all_chunks(session: Session) -> None:
    """Make NeMo-RL's policy worker use all chunks; without effect in other programs.

    Called before the worker builds a model. If a function is missing in another version of NeMo-RL,
    nothing is replaced, and the first step rejects the single chunk.

    Raises:
        RefusedError: This process has NeMo-RL's value worker, which supports one chunk.
    """
    _check_value_worker(session)
    worker, setup = sys.modules.get(_WORKER), sys.modules.get(_SETUP)
    bridge: Any = getattr(setup, "AutoBridge", None)
    if worker is None or setup is None or bridge is None:
        return
    if session.process.replaced.has(setup, "get_model"):  # set by the last lines of this function
        return
    if not all(hasattr(worker, name) for name in (*_LISTS[_WORKER], "setup_model_and_optimizer")):
        return
    owners = {worker: _LISTS[_WORKER], setup: _LISTS[_SETUP], bridge: _EXPORTS}
    for owner, names in owners.items():
        for name in names:
            session.process.replaced.put(owner, name, with_chunks(getattr(owner, name)))
    _keep_built_chunks(session, worker, setup)


def _keep_built_chunks(session: Session, worker: ModuleType, setup: ModuleType) -> None:
    """Replace the worker's functions that build its model and its reference model."""
    built: list[list[nn.Module]] = []
    get_model = setup.get_model
    make, make_reference = worker.setup_model_and_optimizer, worker.setup_reference_model_state

    @functools.wraps(get_model)
    def get_and_record(*args: Any, **options: Any) -> Any:
        built[:] = [get_model(*args, **options)]
        return built[0]

    @functools.wraps(make)
    def setup_model(policy: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        with refusing():
            _check(policy)
        setup = make(policy, *args, **options)
        chunks = built.pop()
        if isinstance(chunks[0], DistributedDataParallel):
            return setup._replace(model=ParallelChunks(chunks))
        return setup._replace(model=ModelChunks(chunks))

    @functools.wraps(make_reference)
    def setup_reference(*args: Any, **options: Any) -> dict[str, Any]:
        of_first_chunk, chunks = make_reference(*args, **options), built.pop()
        if not of_first_chunk:
            return {}  # no reference model has been loaded
        return {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in ModelChunks(chunks).state_dict().items()
        }

    session.process.replaced.put(setup, "get_model", get_and_record)
    session.process.replaced.put(worker, "setup_model_and_optimizer", setup_model)
    session.process.replaced.put(worker, "setup_reference_model_state", setup_reference)


def _check_value_worker(session: Session) -> None:
    """Raise RefusedError in a process of NeMo-RL's value worker.

    Each worker has its own process. The value worker would name Megatron's virtual pipeline, which
    its user has not set.
    """
    if _VALUE_WORKER not in sys.modules or _WORKER in sys.modules or session.pipeline is None:
        return
    choice = session.pipeline.choice
    with refusing():
        raise UnsupportedError(
            f"schedule={choice.name} has several model chunks per rank, and NeMo-RL's value worker "
            "supports one. Set MEGATRON_VSHAPE: schedule=zb-h1 in value.megatron_cfg.env_vars, or "
            "set the variable only in policy.megatron_cfg.env_vars"
        )


def _check(policy: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if the policy uses a feature that reads a single module."""
    generation = policy.get("generation") or {}
    cache = str((generation.get("vllm_cfg") or {}).get("kv_cache_dtype") or "auto")
    used = {
        "policy.draft.enabled": bool((policy.get("draft") or {}).get("enabled")),
        "policy.router_replay.enabled": bool((policy.get("router_replay") or {}).get("enabled")),
        "policy.generation.backend=megatron": generation.get("backend") == "megatron",
        f"policy.generation.vllm_cfg.kv_cache_dtype={cache}": cache.startswith("fp8"),
    }
    names = [name for name, is_used in used.items() if is_used]
    if names:
        raise UnsupportedError(
            f"{', '.join(names)}: NeMo-RL does not support it with several model chunks per rank. "
            "Choose a schedule with one chunk, such as schedule=zb-h1"
        )
