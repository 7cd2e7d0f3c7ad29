"""Policy updates with slime's Megatron backend and V-Half.

    export SLIME=PATH/slime MEGATRON_VSHAPE="schedule=v-half"
    PYTHONPATH=$SLIME:PATH/Megatron-LM torchrun --nproc-per-node 4 examples/slime_policy.py \\
        --pipeline-model-parallel-size 4 MEGATRON FLAGS

slime's `train.py` calls the same functions in its Ray actors, with rollouts of SGLang. Here the
rollouts are random, so that the example needs no Ray and no inference engine. The flags are those
of Megatron-LM and slime; set the model's sizes as in slime's `scripts/models`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

LENGTHS = [20, 13, 31, 9, 27, 16, 22, 11]
PROMPT = 5
MICROBATCHES = [[0, 3], [1, 5], [2], [6, 7], [4]]
"""Samples of each microbatch, as slime's dynamic batching balances them."""

DERIVED = {
    "num_rollout": 3,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 1,
    "loss_type": "policy_loss",
    "data_pad_size_multiplier": 8,
    "use_dynamic_batch_size": True,
    "use_rollout_entropy": True,
    "variable_seq_lengths": True,
    "padded_vocab_size": 128,
    "enable_gloo_process_groups": True,
    "moe_use_legacy_grouped_gemm": False,
    "eps_clip_high": 0.2,
}
"""Values that slime derives; its own command line would require an inference engine."""


def arguments(flags: Sequence[str]) -> Any:
    """Parse and validate the flags as slime's trainer does."""
    from megatron.training.arguments import parse_args, validate_args
    from slime.utils.arguments import get_slime_extra_args_provider

    sys.argv = ["train.py", *flags]
    args = parse_args(get_slime_extra_args_provider(), ignore_unknown_args=True)
    vars(args).update(DERIVED)
    validate_args(args)
    vars(args).update(DERIVED, rank=int(os.environ["RANK"]))
    return args


def rollouts(replica: int) -> dict[str, Any]:
    """Make random responses with advantages, for one data-parallel rank."""
    generator = torch.Generator().manual_seed(3 + replica)
    responses = [length - PROMPT for length in LENGTHS]

    def numbers(scale: float) -> list[torch.Tensor]:
        return [torch.randn(length, generator=generator) * scale for length in responses]

    return {
        "tokens": [torch.randint(0, 127, (length,), generator=generator) for length in LENGTHS],
        "total_lengths": LENGTHS,
        "response_lengths": responses,
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in responses],
        "rollout_mask_sums": [torch.tensor(float(length)) for length in responses],
        "advantages": numbers(1.0),
        "returns": numbers(1.0),
        "micro_batch_indices": MICROBATCHES,
    }


def step(number: int, args: Any, rollout: dict[str, Any], trained: Any) -> dict[str, Any]:
    """Compute log-probabilities, then train one step; return slime's data of the last stage."""
    from megatron.core import mpu
    from slime.backends.megatron_utils import data, loss, model

    chunks, optimizer, scheduler = trained
    iterators, counts = data.get_data_iterator(rollout), [len(MICROBATCHES)]
    outputs = model.forward_only(loss.get_log_probs_and_entropy, args, chunks, iterators, counts)
    if outputs and "log_probs" not in rollout:
        rollout["log_probs"] = [log_probs.clone() for log_probs in outputs["log_probs"]]
    replica, gathered = mpu.get_data_parallel_rank(), [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (replica, rollout.get("log_probs")))
    rollout["log_probs"] = next(
        log_probs
        for source_replica, log_probs in gathered
        if source_replica == replica and log_probs
    )
    iterators = data.get_data_iterator(rollout)
    model.train(number, chunks, optimizer, scheduler, iterators, counts, [len(LENGTHS)])
    return outputs


def set_up(flags: Sequence[str]) -> tuple[Any, Any]:
    """Initialize slime and build the model; return the arguments and the trained parts."""
    args = arguments(flags)
    from slime.backends.megatron_utils import initialize, model

    initialize._build_tokenizer = lambda args: None  # the rollouts are numbers already
    initialize.init(args)
    args.padded_vocab_size = DERIVED["padded_vocab_size"]
    return args, model.setup_model_and_optimizer(args, "actor")


def main() -> None:
    """Train three steps; slime logs each one."""
    dist.init_process_group()
    args, trained = set_up(sys.argv[1:])
    from megatron.core import mpu

    rollout = rollouts(mpu.get_data_parallel_rank())
    for number in range(3):
        step(number, args, rollout, trained)


if __name__ == "__main__":
    sys.path.insert(0, os.environ["SLIME"])
    main()
