"""LoRA in a dry run: frozen weights, and adapters as the libraries build them.

An adapter is Megatron-Bridge's `ParallelLinearAdapter` (peft/utils.py): two of Megatron's linear
layers, sharded like the adapted layer. Adapters per expert are ms-swift's: grouped linear layers.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from megatron_vshape.mcore.refusals import RefusedError
from megatron_vshape.rehearsal.adjustments import wrap
from megatron_vshape.rehearsal.rank_job import DEFAULT_TARGETS, LoraConfig

_SCALE = 2.0  # alpha / rank; any value takes the same time and memory
_COLUMN = (
    "ColumnParallelLinear TEColumnParallelLinear TELayerNormColumnParallelLinear "
    "TEColumnParallelGroupedLinear"
)
_ROW = "RowParallelLinear TERowParallelLinear TERowParallelGroupedLinear"


def adapt_built_chunks(config: LoraConfig) -> None:
    """Add adapters to every model chunk that Megatron builds, before DDP wraps the chunk."""
    from megatron.training import training

    def build(call: Callable[..., Any], provider: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        @functools.wraps(provider)  # Megatron inspects its parameters
        def build_chunk(*args: Any, **kwargs: Any) -> Any:
            return add_adapters(provider(*args, **kwargs), config)

        return call(build_chunk, *args, **kw)

    wrap(training, "get_model", build)
    with suppress(ImportError):  # since 0.18, for models that are built from a configuration
        models = importlib.import_module("megatron.training.models.dist_utils")
        wrap(
            models,
            "build_virtual_pipeline_stages",
            lambda call, *args, **kw: [add_adapters(chunk, config) for chunk in call(*args, **kw)],
        )


def add_adapters(chunk: Any, config: LoraConfig) -> Any:
    """Freeze the weights of a chunk, and wrap its target layers.

    Raises:
        RefusedError: a target matches no linear layer, or the rank cannot be divided.
    """
    kinds = _classes(f"{_COLUMN} {_ROW} TELinear")
    linears = {
        name: module
        for name, module in chunk.named_modules()
        if isinstance(module, kinds) and name.rpartition(".")[2] != "output_layer"
    }
    names_by_target = {
        target: [
            name
            for name in linears
            if target in (name.rpartition(".")[2], "all-linear") or fnmatchcase(name, target)
        ]
        for target in config.targets or DEFAULT_TARGETS
    }
    unmatched = [target for target, names in names_by_target.items() if not names]
    # A stage of a hybrid model may lack the layers of another, and a model the default targets.
    is_partial = not config.targets or hasattr(chunk, "hybrid_layer_pattern")
    if linears and unmatched and not (is_partial and len(unmatched) < len(names_by_target)):
        known_names = sorted({name.rpartition(".")[2] for name in linears})
        raise RefusedError(
            f"--lora-targets {','.join(unmatched)} matches no linear layer of this model: use "
            f"names among {', '.join(known_names)}, or all-linear"
        )
    chunk.requires_grad_(False)
    for name in dict.fromkeys(name for names in names_by_target.values() for name in names):
        parent, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(parent), attribute, _Adapted(name, linears[name], config))
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None and getattr(chunk.config, "recompute_method", None):
        # A checkpoint runs its backward only if an input requires a gradient (as Megatron-Bridge).
        embedding.register_forward_hook(lambda module, args, out: out.detach().requires_grad_())
    return chunk


def _classes(names: str) -> tuple[type, ...]:
    modules = [importlib.import_module("megatron.core.tensor_parallel.layers")]
    with suppress(ImportError):  # without Transformer Engine
        modules.append(importlib.import_module("megatron.core.extensions.transformer_engine"))
    classes = (getattr(module, name, None) for module in modules for name in names.split())
    return tuple(kind for kind in classes if isinstance(kind, type))


class _Adapted(nn.Module):
    """A frozen linear layer, and the two layers of its adapter with `rank` features between."""

    def __init__(self, name: str, base: Any, config: LoraConfig) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.to_wrap = base
        is_expert, rank = ".experts." in name, config.rank
        group = "expert_tensor" if is_expert else "tensor_model"
        tp = getattr(parallel_state, f"get_{group}_parallel_world_size")()
        self.is_grouped = config.per_expert and hasattr(base, "num_gemms")
        if rank % tp or (self.is_grouped and tp > 1):
            flag = f"--{group.replace('_', '-')}-parallel-size {tp}"
            raise RefusedError(
                f"the adapters of {name} cannot be sharded by {flag}: --lora-rank {rank} has to be "
                "a multiple, and --lora-per-expert needs a size of 1"
            )
        weight = base.weight if getattr(base, "weight", None) is not None else base.weight0
        rows, columns = weight.shape[-2:]  # of this rank; experts may share one tensor
        is_row, is_column = (isinstance(base, _classes(names)) for names in (_ROW, _COLUMN))
        # Without a mode, the layers around it gather and scatter, as for shared experts.
        has_mode = getattr(base, "parallel_mode", "") is not None
        is_sharded = base.config.sequence_parallel and has_mode and not is_expert
        self.gathers, self.scatters = is_column and is_sharded, is_row and is_sharded
        if hasattr(base, "return_layernorm_output"):
            base.return_layernorm_output = True
            if self.gathers and not getattr(base, "ub_overlap_ag_fprop", False):
                base.return_layernorm_output_gathered, self.gathers = True, False
        options = {"init_method": nn.init.zeros_, "is_expert": is_expert, "bias": False}
        if self.is_grouped:
            options |= {"config": base.config, "skip_bias_add": False, "parallel_mode": None}
            (grouped,) = _classes("TEGroupedLinear")
            self.linear_in: Any = grouped(base.num_gemms, columns, rank, **options)
            self.linear_out: Any = grouped(base.num_gemms, rank, rows, **options)
            return
        options["config"] = adapter_config = copy.copy(base.config)
        adapter_config.sequence_parallel = False  # `forward` gathers and scatters
        column, row = _classes("ColumnParallelLinear")[0], _classes("RowParallelLinear")[0]
        if is_row:
            row_options = {"input_is_parallel": True, "skip_bias_add": True}
            self.linear_in = row(columns * tp, rank, **row_options, **options)
        else:
            is_reduced = base.config.sequence_parallel  # as Megatron-Bridge
            self.linear_in = column(
                columns, rank, gather_output=True, disable_grad_reduce=is_reduced, **options
            )
        out_features = rows * tp if is_column else rows
        self.linear_out = column(rank, out_features, gather_output=not is_column, **options)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the sum of both outputs, and the bias; the arguments are the layer's."""
        from megatron.core.tensor_parallel import mappings

        output, bias, *normed = self.to_wrap(x, *args, **kwargs)
        if isinstance(output, tuple):  # a layer without bias returns ((output, normed), None)
            output, *normed = output
        x = (normed[0] if normed else x).contiguous()
        if self.gathers:
            x = mappings.gather_from_sequence_parallel_region(x)
        splits = args if self.is_grouped else ()  # tokens per expert
        update = self.linear_out(self.linear_in(x, *splits)[0], *splits)[0]
        if self.scatters:
            update = mappings.scatter_to_sequence_parallel_region(update)
        return output + (update * _SCALE).reshape(output.shape), bias
