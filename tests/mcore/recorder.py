"""Makes runs comparable and records their results at full precision.

Weights are a function of their name in the full model, since Megatron seeds every pipeline rank
differently. The recorder wraps names of Megatron's trainer in a forked rank.
"""

from __future__ import annotations

import functools
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import megatron.training.training as training
import torch
from live_bytes import LiveAfterPasses, LiveBytes
from megatron.core import parallel_state
from megatron.training import get_tensorboard_writer
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megatron_vshape.mcore.features.vocabulary.model import Shards
from megatron_vshape.mcore.step import forward_backward
from megatron_vshape.mcore.step.stage import MegatronStage
from megatron_vshape.runtime.host_memory import HostMemory

try:
    import megatron.training.models.dist_utils as dist_utils
except ModuleNotFoundError:  # before 0.18
    dist_utils = None

more_records: dict[str, Any] = {}
"""Values of plugins, which are saved with the record of the rank."""


class Records:
    """The record of one rank of a run."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._model: list[nn.Module] = []
        self._optimizer: Any = None
        self._running: str | None = None
        self.kept: dict[str, Any] = {
            "losses": [],
            "grad_norms": [],
            "evaluations": [],
            "wandb": [],  # (step, values) of every call of wandb.log
            "reductions": [],  # (step, running pass, bytes) of each that starts
            "gradients": {},
            "parameters": {},
            "moments": {},  # Adam's, by the names of the parameters
            "parts": {},  # of parameters that tensor-parallel ranks share: which dimension
            "rows": {},  # of those that pipeline ranks share too: the number of the first
        }

    def save(self) -> None:
        """Write everything to the rank's file, with the parameters as they are now."""
        self.kept["parameters"] = {
            name: parameter.detach().clone() for name, parameter in named_parameters(self._model)
        }
        shared = shards_of(self._model)
        for name, parameter in named_parameters(self._model):
            if getattr(parameter, "tensor_model_parallel", False):
                self.kept["parts"][name] = parameter.partition_dim
            shards = shared.get(parameter)
            if shards is not None:
                self.kept["rows"][name] = shards.rank() * len(parameter)
            for key, value in _adams_state(self._optimizer, parameter).items():
                self.kept["moments"][f"{name} {key}"] = value
        self.kept["tensor_rank"] = parallel_state.get_tensor_model_parallel_rank()
        self.kept["place"] = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        torch.save(self.kept | more_records, self._path)
        writer = get_tensorboard_writer()
        if writer:  # a forked rank ends without Python's cleanup at exit
            writer.flush()

    def keep_step(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        loss, grad_norm = result[0], result[5]
        if grad_norm is not None:  # else Megatron gives the step up and ends the run
            self.kept["losses"].append({key: float(value) for key, value in loss.items()})
            self.kept["grad_norms"].append(float(grad_norm))
        return result

    def keep_model(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        self._model, self._optimizer = result[:2]
        return result

    def keep_gradients(
        self, original: Callable[..., Any], model: list[nn.Module], *args: Any, **options: Any
    ) -> Any:
        result = original(model, *args, **options)
        if not self.kept["gradients"]:
            for name, parameter in named_parameters(self._model):
                if parameter.requires_grad:
                    self.kept["gradients"][name] = parameter.main_grad.detach().clone()
        return result

    def keep_reduction(
        self, original: Callable[..., Any], group: Any, *args: Any, **options: Any
    ) -> Any:
        size = sum(bucket.grad_data.nbytes for bucket in group.buckets)
        self.kept["reductions"].append((len(self.kept["losses"]), self._running, size))
        return original(group, *args, **options)

    def note_pass(
        self, kind: str, original: Callable[..., Any], stage: Any, microbatch: int, *args: Any
    ) -> Any:
        outer, self._running = self._running, f"{kind}{stage.stage}.{microbatch}"
        try:
            return original(stage, microbatch, *args)
        finally:
            self._running = outer

    def count_live_bytes(self) -> None:
        """Record live bytes and waiting receives after each pass of the second step."""
        records, grow = self, HostMemory._grow

        def grow_unseen(host: HostMemory, count: int) -> bool:
            with _disable_current_modes():  # it is no device's memory
                return grow(host, count)

        class Counted(forward_backward.ProgramRun):
            def __init__(self, *, program: Any, device: int, **options: Any) -> None:
                self._live = LiveBytes()
                self._after = LiveAfterPasses(self._live)
                self._most_posted = program.peak_posted(device)
                counts = len(records.kept["losses"]) == 1
                options["observer"] = self._after if counts else None
                super().__init__(program=program, device=device, **options)

            def finish(self) -> None:
                if len(records.kept["losses"]) != 1:
                    super().finish()
                    return
                with self._live:
                    super().finish()
                records.kept["live_bytes"] = self._after.peak_bytes
                records.kept["left_bytes"] = self._live.count()
                records.kept["most_posted"] = self._most_posted

        forward_backward.ProgramRun = Counted
        HostMemory._grow = grow_unseen

    def fake_wandb(self) -> types.ModuleType:
        """Return a fake wandb, because the real one needs a network or leaves a daemon."""
        module = types.ModuleType("wandb")
        module.__spec__ = ModuleSpec("wandb", None)  # other modules test whether it is installed

        def log(values: dict[str, Any], step: int | None = None) -> None:
            logged = {key: float(value) for key, value in values.items() if value is not None}
            self.kept["wandb"].append((step, logged))

        for name in ("init", "finish"):
            setattr(module, name, lambda *args, **options: None)
        module.log = log  # type: ignore[attr-defined]
        module.run = None  # type: ignore[attr-defined]
        module.config = types.SimpleNamespace(  # type: ignore[attr-defined]
            update=lambda *args, **options: None
        )
        return module

    def keep_evaluation(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        losses = result[0] or {}
        losses_by_name = {key: [float(loss) for loss in losses[key].view(-1)] for key in losses}
        self.kept["evaluations"].append(losses_by_name)
        return result


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function; `wrapper` gets the original before the arguments of a call."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    setattr(owner, name, replacement)


def start(path: str) -> Records:
    """Wrap the trainer in this process and return the object that will contain the records."""
    records = Records(path)
    if "--wandb-project" in sys.argv:
        sys.modules["wandb"] = records.fake_wandb()
    wrap(training, "train_step", records.keep_step)
    wrap(training, "setup_model_and_optimizer", records.keep_model)
    wrap(training, "evaluate", records.keep_evaluation)
    wrap(training, "finalize_model_grads", records.keep_gradients)
    wrap(buffers._ParamAndGradBucketGroup, "start_grad_sync", records.keep_reduction)
    for kind, name in (("B", "backward_inputs"), ("W", "backward_weights"), ("BW", "backward")):
        wrap(MegatronStage, name, functools.partial(records.note_pass, kind))
    wrap(training, "get_model", _fill_provided)
    if dist_utils is not None:
        wrap(dist_utils, "build_virtual_pipeline_stages", _fill_built)
    return records


def named_parameters(model: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter with its name in the full model: layers counted from its start.

    Stock Megatron's second copy of a tied embedding has the embedding's name.
    """
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                if getattr(chunk, "mtp_process", False):
                    continue  # unused: Megatron reads the embedding of this stage instead
                parts = ["embedding", "word_embeddings", "weight"]
            yield ".".join(parts), parameter


def _adams_state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the moments of a parameter, and its copy in fp32 where it has one."""
    main = getattr(parameter, "main_param", None)
    state = {} if main is None else {"main": main.detach().clone()}
    optimizers = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    for part in optimizers:
        if hasattr(part, "model_param_group_index_map"):
            state.update(_sharded_state(part, parameter))
            continue
        for key, value in part.optimizer.state.get(parameter if main is None else main, {}).items():
            state[key] = torch.as_tensor(value).detach().clone()
    return state


def _sharded_state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the distributed optimizer's state of a parameter, NaN where another rank has it."""
    if parameter not in optimizer.model_param_group_index_map:
        return {}
    group, place = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][place]
    local_range = optimizer._get_model_param_range_map(parameter)["param"]
    state = {}
    for key, value in ("main", main), *optimizer.optimizer.state.get(main, {}).items():
        state[key] = torch.full((parameter.numel(),), torch.nan)
        state[key][local_range.start : local_range.end] = value.detach().float().flatten()
    return state


def _fill_built(original: Callable[..., Any], *args: Any, **options: Any) -> list[nn.Module]:
    chunks = original(*args, **options)
    _fill_all(chunks)
    return chunks


def _fill_provided(
    original: Callable[..., Any], provider: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Do the same before 0.19, where the trainer calls a function for every chunk."""

    @functools.wraps(provider)
    def provide(*sizes: Any, **flags: Any) -> nn.Module:
        chunk: nn.Module = provider(*sizes, **flags)
        _fill_all([chunk])
        return chunk

    return original(provide, *args, **options)


DRAWN_VECTORS = ("mixer.A_log", "mixer.dt_bias", "mixer.conv1d_bias", "mixer.conv1d.bias")
"""The parameters of one dimension that Megatron draws at random; the others are ones or zeros."""


def shards_of(chunks: list[nn.Module]) -> dict[nn.Parameter, Shards]:
    """Return the parameters whose rows pipeline ranks share, and how."""
    return {
        module.weight: module.tp_group
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(getattr(module, "tp_group", None), Shards) and module.weight is not None
    }


def _fill_all(chunks: list[nn.Module]) -> None:
    shards = shards_of(chunks)
    for name, parameter in named_parameters(chunks):
        if parameter.dim() > 1 or name.endswith(DRAWN_VECTORS):
            _fill(name, parameter.data, shards.get(parameter))


def _fill(name: str, data: Tensor, shards: Shards | None) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if shards is None:
        data.copy_(torch.randn(data.shape, generator=generator) * 0.02)
        return
    tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    count = len(data) * shards.size() // tensor_ranks  # that each of them would draw
    drawn = torch.randn((count, *data.shape[1:]), generator=generator) * 0.02
    first = shards.rank() * len(data)
    data.copy_(drawn.repeat(tensor_ranks, 1)[first : first + len(data)])
