"""Equal size on all ranks for losses that Megatron logs per layer and sums over the pipeline.

Layers allocate these values at their first loss. A rank without such layers (possible with a hybrid
model or a custom layer split) would join the all-reduce with a tensor of another size, or not join.
"""

from __future__ import annotations

from argparse import Namespace

EXPERT_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names in Megatron's log for the losses of `--moe-router-load-balancing-type`."""


def size_layer_losses(args: Namespace) -> None:
    """Allocate the logged losses of all layers on a rank that has none of these layers."""
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
