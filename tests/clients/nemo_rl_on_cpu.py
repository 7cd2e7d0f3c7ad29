"""NeMo-RL's policy worker on a CPU: log-probabilities and steps of its clipped loss.

Everything runs except Ray, which would start the worker, and the inference engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_cpu

on_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forked import run_cases  # noqa: E402

ROWS, LENGTH = 8, 32
POLICY_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
ABSENT = (
    "zmq pynvml fastapi mlflow swanlab prometheus_client prometheus_client.parser "
    "prometheus_client.samples"
)


def configuration(case: SimpleNamespace) -> dict[str, Any]:
    """Return the policy of NeMo-RL's example: small, in 32 bits and without generation."""
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    example = f"{os.environ['NEMO_RL']}/examples/configs/grpo_math_1B_megatron.yaml"
    policy = OmegaConf.create(OmegaConf.to_container(load_config(example))).policy
    base = OmegaConf.create({"policy": policy})
    sizes = {
        "model_name": case.model,
        "precision": "float32",
        "train_global_batch_size": ROWS * 4 // case.pipeline,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": LENGTH,
        "generation": None,
        "draft": {"enabled": case.draft},
        "megatron_cfg": {
            "pipeline_model_parallel_size": case.pipeline,
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "train_iters": 3,
            "attention_backend": "unfused",
            "checkpoint": {"async_save": False},
            "optimizer": {
                "lr": 1e-3,
                "min_lr": 1e-3,
                "bf16": False,
                "use_precision_aware_optimizer": False,
            },
            "scheduler": {"lr_warmup_iters": 0, "lr_warmup_init": 1e-3},
        },
        "sequence_packing": {"enabled": case.packed},
    }
    merged = OmegaConf.merge(base, {"policy": sizes})
    container = OmegaConf.to_container(merged, resolve=True)
    return container["policy"]


def worker_of(case: SimpleNamespace) -> Any:
    """Return the policy's or the value worker as NeMo-RL's actor is made, on this rank."""
    import numpy
    from megatron.bridge.training import initialize
    from nemo_rl.distributed.named_sharding import NamedSharding
    from transformers import AutoTokenizer

    if case.value:
        del sys.modules[POLICY_WORKER]  # an actor imports one worker only
        from nemo_rl.models.value.workers import megatron_value_worker as workers

        kind, options = workers.MegatronValueWorkerImpl, {}
    else:
        kind = sys.modules[POLICY_WORKER].MegatronPolicyWorkerImpl
        options = {"init_reference_model": True}

    initialize.compile_helpers = lambda: None  # the wheel has them
    ranks = numpy.arange(int(os.environ["WORLD_SIZE"])).reshape(case.pipeline, -1, 1, 1)
    names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    return kind(
        configuration(case),
        AutoTokenizer.from_pretrained(case.model),
        weights_path=case.resumes,
        optimizer_path=case.resumes,
        **options,
        worker_sharding_annotations=NamedSharding(layout=ranks, names=names),
    )


def batch_of(case: SimpleNamespace, replica: int) -> Any:
    """Return variable-length rollouts of a replica, sharded and packed as by NeMo-RL's policy."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    replicas = int(os.environ["WORLD_SIZE"]) // case.pipeline
    rows, generator = ROWS * replicas, torch.Generator().manual_seed(3)
    lengths = torch.randint(LENGTH // 2, LENGTH, (rows,), generator=generator)
    places = torch.arange(LENGTH)[None]
    mask = ((places >= LENGTH // 4) & (places < lengths[:, None])).float()
    ids = torch.randint(3, on_cpu.VOCABULARY, (rows, LENGTH), generator=generator)
    ids[places >= lengths[:, None]] = 0
    noise = torch.randn(rows, 1, generator=generator).expand(rows, LENGTH).contiguous()
    data = BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.ones(rows),
        advantages=noise,
    )
    packing = {
        "max_tokens_per_microbatch": 2 * LENGTH,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
        "microbatch_order": "packer",
    }
    if not case.packed:
        return data.shard_by_batch_size(replicas, batch_size=rows)[replica]
    shards, _ = data.shard_by_batch_size(replicas, rows, sequence_packing_args=packing)
    return shards[replica]


def main(case: SimpleNamespace) -> dict[str, Any]:
    """Return results as every rank gets them (log-probabilities, losses, norms) and weights."""
    from megatron.core import mpu
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn

    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(Path(case.folder).parent / "imported")
    worker = worker_of(case)
    if case.value:
        return learn_values(worker, case)
    loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.1))
    record: dict[str, Any] = {"inferred": [], "logged": [], "evaluated": []}
    record["chunks"] = len(getattr(worker.model, "chunks", [worker.model]))
    for _ in range(case.steps):
        data = batch_of(case, mpu.get_data_parallel_rank())
        log_probs = worker.get_logprobs(data=data)["logprobs"]
        # Of the weights before the first step, which NeMo-RL swaps into the model.
        reference = worker.get_reference_policy_logprobs(data=data)["reference_logprobs"]
        record["inferred"].append([log_probs, reference])
        data["prev_logprobs"] = data["generation_logprobs"] = log_probs
        data["reference_policy_logprobs"] = reference
        record["evaluated"].append(worker.train(data, loss, eval_mode=True)["global_loss"])
        record["logged"].append(learn(worker, data, loss, case.streams))
    if case.saves_in:
        worker.save_checkpoint(case.saves_in, case.saves_in)
    if worker.should_disable_forward_pre_hook:
        worker.disable_forward_pre_hook()  # gathers the parameters of the last step
    exported = worker.megatron_bridge.export_hf_weights([worker.model], show_progress=False)
    record["weights"] = {name: value.detach().clone() for name, value in exported}
    dist.barrier()
    return record


def learn_values(worker: Any, case: SimpleNamespace) -> dict[str, Any]:
    """Return values, losses and norms of a value worker's steps."""
    from megatron.core import mpu
    from nemo_rl.algorithms.loss.loss_functions import MseValueLossConfig, MseValueLossFn

    loss = MseValueLossFn(MseValueLossConfig())
    record: dict[str, Any] = {"inferred": [], "logged": [], "chunks": 1}
    for _ in range(case.steps):
        data = batch_of(case, mpu.get_data_parallel_rank())
        record["inferred"].append(worker.get_values(data)["values"])
        data["returns"] = data["advantages"]
        metrics = worker.train(data, loss)
        record["logged"].append([metrics["global_loss"], metrics["grad_norm"]])
    return record


def learn(worker: Any, data: Any, loss: Any, streams: bool) -> list[Any]:
    """Train one step, also as NeMo-RL does while rollouts arrive; return its loss and norm."""
    if streams:
        worker.begin_train_step(loss)
        worker.train_microbatch(data)
        metrics = worker.finish_train_step()
    else:
        metrics = worker.train(data, loss)
    of_microbatches = {name: metrics["all_mb_metrics"][name] for name in ("loss", "kl_penalty")}
    return [metrics["global_loss"], metrics["grad_norm"], of_microbatches]


def without_ray() -> None:
    """Replace Ray, NVIDIA's tools and hardware queries that a worker uses at its start."""
    on_cpu.mock_packages(ABSENT)
    import ray
    import transformers

    ray.get_gpu_ids = lambda: [0]
    # NeMo-RL rejects newer versions, because it patches the tokenizer class of one model.
    newer, transformers.__version__ = transformers.__version__, "5.11.0"
    import nemo_rl.models.policy  # noqa: F401

    transformers.__version__ = newer
    begin = dist.init_process_group
    dist.init_process_group = torch.distributed.init_process_group = lambda *_: begin("gloo")
    os.environ["NRL_DISABLE_NUMA_BINDING"] = "1"


def adapt_to_this_megatron() -> None:
    """Add attributes of a newer Megatron-Core that a worker reads but does not use here."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as fsdp
    from megatron.core.optimizer import MegatronOptimizer

    fsdp.FullyShardedDataParallelV1 = fsdp.FullyShardedDataParallel
    fsdp.FullyShardedDataParallelV2 = fsdp.FullyShardedDataParallel
    MegatronOptimizer.grad_norms_by_group = {}


if __name__ == "__main__":
    sys.path.insert(0, os.environ["NEMO_RL"])
    on_cpu.stand_in_for("nvidia_resiliency_ext", "megatron.energon", "modelopt")
    on_cpu.replace_attention()
    without_ray()
    adapt_to_this_megatron()
    import nemo_rl.models.policy.workers.megatron_policy_worker  # noqa: F401  imported once

    run_cases(
        main,
        pipeline=4,
        steps=3,
        packed=True,
        streams=False,
        draft=False,
        value=False,
        saves_in="",
        resumes=None,
    )
