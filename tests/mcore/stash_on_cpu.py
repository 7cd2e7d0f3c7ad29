"""A plugin of the farm: Megatron's local experts with the calls that its paged stash records.

Only TE's fused experts make these calls, and kernels write their saved tensors into pages. The
stash's required schedule of every step, and the runner that retries a step, are Megatron's.
"""

import json
from typing import Any

PRINTED = "stashed in the order "


def start(rank: int, argument: Any) -> None:
    """Have this rank's experts use the stash; with `argument`, every step overflows at first."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import paged_stash
    from megatron.core.transformer.moe.experts import SequentialMLP

    validate, forward = TransformerConfig.__post_init__, SequentialMLP.forward
    names = ("moe_paged_stash", "moe_expert_rank_capacity_factor")

    def validated(config: Any) -> None:
        original_values = [
            getattr(config, name) for name in names
        ]  # of a dispatcher that needs a GPU
        for name, value in zip(names, (False, None), strict=True):
            setattr(config, name, value)
        validate(config)
        for name, value in zip(names, original_values, strict=True):
            setattr(config, name, value)

    def stashing(experts: Any, tokens: Any, *args: Any) -> Any:
        if not experts.config.moe_paged_stash:
            return forward(experts, tokens, *args)
        output, bias = forward(experts, paged_stash.paged_stash_group_start(tokens), *args)
        return paged_stash.paged_stash_group_commit(output), bias

    TransformerConfig.__post_init__, SequentialMLP.forward = validated, stashing
    tries = [0]

    def overflows(runner: Any) -> tuple[int, int, int]:
        stash = paged_stash.PagedStashManager.get_instance()
        if stash.status == "captured":
            print(PRINTED + json.dumps(stash._pp_schedule), flush=True)
        tries[0] += 1
        return (tries[0] % 2 if argument else 0, 0, 0)

    paged_stash.PagedStashRunner.check_moe_overflow = overflows
