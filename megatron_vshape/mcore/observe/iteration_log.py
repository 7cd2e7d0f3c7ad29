"""Megatron's iteration log: bubble and MFU in its line, TensorBoard and W&B; losses per layer."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megatron_vshape.figures import tell
from megatron_vshape.mcore.observe.bubble import BubbleMeter, Figures

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
    def iteration(self, meter: BubbleMeter, number: int) -> Iterator[None]:
        """Provide this package's metrics while Megatron logs an iteration in this context."""
        args = get_args()
        if number % args.log_interval == 0:
            group = parallel_state.get_pipeline_model_parallel_group()
            self.figures = meter.figures(number, group)
        try:
            yield
        finally:
            self.figures = None

    def complete(self, line: str) -> str:
        """Append the metrics to Megatron's line, and write them to TensorBoard and W&B."""
        step_time = _STEP_TIME.search(line)
        if self.figures is None or step_time is None:
            return line
        step_s = float(step_time[1]) / 1e3
        figures = replace(self.figures, mfu=_mfu(get_args(), step_s))
        self.figures = None
        tell(step_s=step_s, bubble=figures.bubble)
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


def _mfu(args: Namespace, step_s: float) -> float | None:
    """Return the model FLOPs utilization: the model's FLOPs relative to the peak of all devices."""
    peak = _peak_flops(args)
    if peak is None or step_s <= 0:
        return None
    flops: float = training.num_floating_point_operations(args, get_current_global_batch_size())
    most: float = step_s * peak * args.world_size
    return flops / most


def _peak_flops(args: Namespace) -> float | None:
    if getattr(args, "fp8", None) or getattr(args, "fp4", None):
        return None  # only some GEMMs run at the lower-precision peak
    return peak_flops(torch.cuda.get_device_name(), args.params_dtype)


def why_no_mfu() -> str | None:
    """Return the reason why the log has no MFU, or None if it has one."""
    args = get_args()
    if _peak_flops(args) is not None:
        return None
    precision = "fp8" if getattr(args, "fp8", None) else str(args.params_dtype)[len("torch.") :]
    return (
        f"no MFU in the log: the peak FLOP/s of {torch.cuda.get_device_name()} in {precision} is "
        "not known"
    )


# Dense 16-bit peaks in TFLOP/s, from the vendors' data sheets. The first entry whose words occur in
# the device name applies, so variants come before their base model.
_TERAFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 150.0),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("V100-SXM2", 125.0),
    ("V100-PCIE", 112.0),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the device's peak in FLOP/s, or None if unknown.

    Only GPUs of the table with 16-bit dtypes are known. The peak of a CPU, or in fp32, depends on
    too many factors.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    for name, teraflops in _TERAFLOPS:
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            return teraflops * 1e12
    return None


EXPERT_LOSSES = {
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
    import torch
    from megatron.core.transformer.moe import moe_utils

    kinds = args.moe_router_load_balancing_type
    names = [EXPERT_LOSSES[kind] for kind in EXPERT_LOSSES if kind in kinds]
    if args.moe_z_loss_coeff is not None:
        names.append("z_loss")
    size = args.num_layers + (args.mtp_num_layers or 0)
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # up to 0.17 the tracker is a dictionary
        kept = moe_utils.get_moe_layer_wise_logging_tracker()
        groups = {"reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
        for name in names:
            values = torch.zeros(size, device=torch.cuda.current_device())
            kept.setdefault(name, {"values": values, **groups})
        return
    for name in names:
        get_moe_metrics_tracker().ensure_initialized(name, size)


def _size_indexer_losses(args: Namespace) -> None:
    """Allocate the losses of DeepSeek's sparse attention; ranks without them skip the sum."""
    import torch
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper,
    )

    tracker = DSAIndexerLossLoggingHelper.tracker
    if "values" not in tracker:
        tracker["values"] = torch.zeros(args.num_layers, device=torch.cuda.current_device())
