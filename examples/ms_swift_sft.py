"""Supervised fine-tuning with ms-swift and V-Half.

    export MEGATRON_VSHAPE="schedule=v-half"
    torchrun --nproc-per-node 4 examples/ms_swift_sft.py --model Qwen/Qwen3-8B --dataset train.jsonl

Equal to `NPROC_PER_NODE=4 megatron sft` with these options. Further options follow on the command
line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

OPTIONS = [
    "--pipeline_model_parallel_size=4",
    "--padding_free=true",  # packed sequences, whose lengths differ between microbatches
    "--micro_batch_size=2",
    "--global_batch_size=16",
    # To resume under another schedule:
    "--dist_ckpt_optim_fully_reshardable=true",
]


def main(options: Sequence[str]) -> None:
    """Train as `megatron sft` does."""
    from swift.megatron import megatron_sft_main

    megatron_sft_main([*OPTIONS, *options])


if __name__ == "__main__":
    main(sys.argv[1:])
