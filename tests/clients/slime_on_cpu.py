"""slime's forward_only and train on a CPU, with its policy loss and variable-length rollouts."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any

import on_cpu

on_cpu.install()

import numpy  # noqa: E402
import slime_policy  # noqa: E402  the example
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forked import run_cases  # noqa: E402

ABSENT = (
    "sglang sglang_router.launch_router sglang_router sglang.srt sglang.srt.server_args "
    "ring_flash_attn sgl_kernel pylatexenc"
)
ROWS = 128  # of the vocabulary

FLAGS = (
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --no-rope-fusion --swiglu "
    "--disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-3 "
    "--lr-decay-style constant --train-iters 3 --use-distributed-optimizer --attention-backend "
    "unfused --distributed-backend gloo --tokenizer-type NullTokenizer --vocab-size 127 "
    "--transformer-impl transformer_engine --variable-seq-lengths --data-path none --eval-iters 0 "
    "--moe-token-dispatcher-type alltoall --load /nonexistent --rollout-batch-size 8 "
    "--num-rollout 3 --n-samples-per-prompt 1"
)


def fill(chunks: list[Any]) -> None:
    """Give weights values that follow from their names: slime seeds by rank."""
    for name, parameter in named_parameters(chunks):
        if parameter.dim() > 1:
            name, _, first = name.partition("@")
            seed = int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)
            generator = torch.Generator().manual_seed(seed)
            rows = slice(int(first or 0), int(first or 0) + len(parameter))
            shape = (ROWS if first else len(parameter), *parameter.shape[1:])
            values = torch.empty(shape).normal_(0, 0.05, generator=generator)[rows]
            parameter.data.copy_(values)


def named_parameters(chunks: list[Any]) -> Any:
    """Yield the parameters by their names in the full model, with the first row of split rows."""
    from megatron_vshape.mcore.features.vocabulary.model import Shards

    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if name.startswith("decoder.layers."):
                parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number)
            group = getattr(chunk.get_submodule(name.rpartition(".")[0]), "tp_group", None)
            first = f"@{group.rank() * len(parameter):04d}" if isinstance(group, Shards) else ""
            yield ".".join(parts) + first, parameter


def main(case: SimpleNamespace) -> dict[str, Any]:
    """Return slime's log, the log-probabilities on the ranks that read them, and the weights."""
    from megatron.core import mpu
    from slime.backends.megatron_utils import initialize, model

    if case.sleeps:
        reload_groups_after_sleep()
    else:
        dist.init_process_group("gloo")

    # slime rejects other numpy versions, although they work here.
    initialize.np = SimpleNamespace(**vars(numpy) | {"__version__": "1.26.0"})
    sizes = ["--pipeline-model-parallel-size", str(case.pipeline)]
    args, trained = slime_policy.set_up([*FLAGS.split(), *sizes])
    chunks, optimizer, _ = trained
    fill(chunks)
    optimizer.reload_model_params()
    record: dict[str, Any] = {"logged": [], "inferred": [], "chunks": len(chunks)}

    def log(args: Any, numbers: dict[str, Any], *arguments: Any, **options: Any) -> None:
        record["logged"].append(
            {name: value for name, value in numbers.items() if isinstance(value, float)}
        )

    model.logging_utils.log = log
    rollouts = slime_policy.rollouts(mpu.get_data_parallel_rank())
    for number in range(3):
        if number and case.sleeps:
            record.setdefault("groups", []).append(sleep_and_wake())
        record["inferred"].append(slime_policy.step(number, args, rollouts, trained))
    weights = {name: parameter.detach().clone() for name, parameter in named_parameters(chunks)}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, weights)
    shards_by_name: dict[str, list[torch.Tensor]] = {}
    parts = {name: value for rank_weights in gathered for name, value in rank_weights.items()}
    for name, value in sorted(parts.items()):
        shards_by_name.setdefault(name.partition("@")[0], []).append(value)
    record["weights"] = {name: torch.cat(rows) for name, rows in shards_by_name.items()}
    return record


def reload_groups_after_sleep() -> None:
    """Initialize torch.distributed as slime's colocated actor does, without a GPU's memory."""
    from slime.utils import distributed_utils, reloadable_process_group

    reloadable_process_group.available_memory = lambda: {"free_GB": 80.0}
    reloadable_process_group.monkey_patch_torch_dist()
    dist.init_process_group("gloo")
    distributed_utils.init_gloo_group()
    reloadable_process_group.register_default_process_group(dist.default_pg_timeout)


def sleep_and_wake() -> int:
    """Destroy and create all process groups as its `sleep` and `wake_up`; count those asleep."""
    from slime.utils import reloadable_process_group

    reloadable_process_group.destroy_process_groups()
    asleep = len(dist.distributed_c10d._world.pg_map)
    dist.barrier()
    reloadable_process_group.reload_process_groups()
    return asleep


def adapt_to_this_megatron() -> None:
    """Drop arguments of slime's calls that this release of Megatron-Core does not support."""
    from slime.backends.megatron_utils import model_provider

    for name in ("get_gpt_layer_with_transformer_engine_spec", "get_gpt_layer_local_spec"):
        real = getattr(model_provider, name)
        parameters = inspect.signature(real).parameters

        def call(
            *args: Any, _real: Any = real, _parameters: Any = parameters, **options: Any
        ) -> Any:
            return _real(
                *args, **{key: option for key, option in options.items() if key in _parameters}
            )

        setattr(model_provider, name, call)


if __name__ == "__main__":
    sys.path.insert(0, os.environ["SLIME"])
    on_cpu.mock_packages(ABSENT)
    on_cpu.replace_attention()

    adapt_to_this_megatron()
    run_cases(main, pipeline=4, sleeps=False)
