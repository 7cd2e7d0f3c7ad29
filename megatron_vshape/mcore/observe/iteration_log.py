"""Megatron's iteration log: bubble in its line, TensorBoard and W&B; losses per layer."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

from megatron_vshape.figures import write_figures
from megatron_vshape.mcore.observe.profiling import BubbleMeter, Figures

# The printed line is the only place where Megatron exposes its step time.
_STEP_TIME = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+) \|")


@dataclass(slots=True)
class IterationLog:
    """Metrics of the iteration that Megatron is logging, if any."""

    figures: Figures | None = None

    def has(self, ahead: int = 0) -> bool:
        """Return whether Megatron will log the step that is `ahead` steps after the current one."""
        args = get_args()
        iteration = args.curr_iteration + 1 + ahead
        return bool(iteration % args.log_interval == 0)

    @contextmanager
    def iteration(self, meter: BubbleMeter | None, number: int) -> Iterator[None]:
        """Provide this package's metrics while Megatron logs an iteration in this context.

        Under a schedule of Megatron, without a meter, there are none.
        """
        args = get_args()
        if number % args.log_interval == 0:
            group = parallel_state.get_pipeline_model_parallel_group()
            self.figures = Figures(number) if meter is None else meter.figures(number, group)
        try:
            yield
        finally:
            self.figures = None

    def complete(self, line: str) -> str:
        """Append the metrics to Megatron's line, and write them to TensorBoard and W&B."""
        step_time = _STEP_TIME.search(line)
        if self.figures is None or step_time is None:
            return line
        figures, self.figures = self.figures, None
        write_figures(step_s=float(step_time[1]) / 1e3, bubble=figures.bubble)
        _write(figures)
        return line + figures.text()


def _write(figures: Figures) -> None:
    """Write the metrics to Megatron's writers, which exist on the last rank if enabled."""
    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    for name, value in figures.scalars().items():
        if writer:
            writer.add_scalar(name, value, figures.iteration)
        if wandb_writer:
            wandb_writer.log({name: value}, figures.iteration)


_EXPERT_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names in Megatron's log for the losses of `--moe-router-load-balancing-type`."""


def size_layer_losses(args: Namespace) -> None:
    """Allocate the losses that Megatron logs per layer and sums over the pipeline.

    Layers allocate these values at their first loss. A rank without such layers (possible with a
    hybrid model or a custom layer split) would join the all-reduce with a tensor of another size,
    or not join.
    """
    if getattr(args, "hybrid_layer_pattern", None) is not None and args.num_experts is not None:
        _size_expert_losses(args)
    if getattr(args, "dsa_indexer_loss_coeff", None):
        _size_indexer_losses(args)


def _size_expert_losses(args: Namespace) -> None:
    """Allocate one value per layer, including those of multi-token prediction, as routers do.

    Megatron itself allocates one value per expert layer of a hybrid model. With different sizes,
    gloo aborts, and the result on NCCL is undefined.
    """
    from megatron.core.transformer.moe import moe_utils

    kinds = args.moe_router_load_balancing_type
    names = [_EXPERT_LOSSES[kind] for kind in _EXPERT_LOSSES if kind in kinds]
    if args.moe_z_loss_coeff is not None:
        names.append("z_loss")
    size = args.num_layers + (args.mtp_num_layers or 0)
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # up to 0.17 the tracker is a dictionary
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        groups = {"reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
        for name in names:
            values = torch.zeros(size, device=torch.cuda.current_device())
            tracker.setdefault(name, {"values": values, **groups})
        return
    for name in names:
        get_moe_metrics_tracker().ensure_initialized(name, size)


def _size_indexer_losses(args: Namespace) -> None:
    """Allocate the losses of DeepSeek's sparse attention; ranks without them skip the sum."""
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper,
    )

    tracker = DSAIndexerLossLoggingHelper.tracker
    if "values" not in tracker:
        tracker["values"] = torch.zeros(args.num_layers, device=torch.cuda.current_device())
