"""NeMo-RL: its Megatron policy worker uses the first chunk of a model; here it uses all of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import nn

from megatron_vshape.mcore.frameworks import Framework
from megatron_vshape.mcore.hook import Function, Session
from megatron_vshape.mcore.refusals import UnsupportedError, refusing

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
        by_chunk = enumerate(chunks_of(self))
        values = ((number, chunk.state_dict(*args, **options)) for number, chunk in by_chunk)
        return {f"{number}.{name}": state[name] for number, state in values for name in state}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        for number, chunk in enumerate(self.chunks):
            names = [name for name in state_dict if name.startswith(f"{number}.")]
            values = {name.partition(".")[2]: state_dict[name] for name in names}
            chunk.load_state_dict(values, strict=strict)


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
        by_chunk: Any = [chunk.remove_forward_pre_hook_handles.items() for chunk in chunks_of(self)]
        return dict(chain.from_iterable(by_chunk))

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
        items = (item.chunks if isinstance(item, ModelChunks) else [item] for item in value)
        return list(chain.from_iterable(items))
    return value


def with_chunks(original: Function) -> Function:
    """Call `original` with lists of chunks in place of each ModelChunks."""

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        converted = {name: chunks_of(value) for name, value in options.items()}
        return original(*map(chunks_of, args), **converted)

    return call


class NemoRl(Framework):
    """Makes the policy worker use all chunks, and rejects the value worker, which supports one."""

    def adapt(self, session: Session, config: Any) -> None:
        """Replace the worker's functions before it builds a model with several chunks.

        If a function is missing in another version of NeMo-RL, nothing is replaced, and the first
        step rejects the single chunk.
        """
        if session.pipeline.stage_map.num_chunks == 1:
            return
        worker, setup = sys.modules.get(_WORKER), sys.modules.get(_SETUP)
        if worker is None and _VALUE_WORKER in sys.modules:
            _reject_value_worker(session.pipeline.choice.name)
        bridge: Any = getattr(setup, "AutoBridge", None)
        if worker is None or setup is None or bridge is None:
            return
        replaced = session.process.replaced
        if replaced.has(setup, "get_model"):  # set by the last lines of this function
            return
        names = (*_LISTS[_WORKER], "setup_model_and_optimizer")
        if not all(hasattr(worker, name) for name in names):
            return
        owners = {worker: _LISTS[_WORKER], setup: _LISTS[_SETUP], bridge: _EXPORTS}
        for owner, names in owners.items():
            for name in names:
                replaced.put(owner, name, with_chunks(getattr(owner, name)))
        _keep_built_chunks(session, worker, setup)


FRAMEWORK = NemoRl()


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


def _reject_value_worker(schedule: str) -> None:
    """Raise RefusedError in a process of the value worker, as each worker has its own process."""
    with refusing():
        # The value worker would name Megatron's virtual pipeline, which its user has not set.
        raise UnsupportedError(
            f"schedule={schedule} has several model chunks per rank, and NeMo-RL's value worker "
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
