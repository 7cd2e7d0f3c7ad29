"""ROLL's actor on a CPU: its Megatron strategy infers and trains with its policy loss.

The model is mcore_adapter's, from a model of Hugging Face. Of the worker, only the part that Ray
would start is missing.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import on_cpu

on_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forked import run_cases  # noqa: E402

ROWS, LENGTH, TOGETHER = 16, 32, 2
ABSENT = (
    "transfer_queue opentelemetry.exporter.otlp.proto.grpc "
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter pybase64"
)


def configurations(case: SimpleNamespace) -> tuple[Any, Any]:
    """Return the role's configuration and the pipeline's, as ROLL reads them of its YAML."""
    from roll.configs import GeneratingArguments, ModelArguments, TrainingArguments
    from roll.configs.worker_config import StrategyArguments, WorkerConfig
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    strategy = {
        "pipeline_model_parallel_size": case.pipeline,
        "use_distributed_optimizer": True,
        "transformer_impl": "transformer_engine",
        "additional_configs": {
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            "persist_layer_norm": False,
        },
    } | case.strategy
    role = WorkerConfig(
        model_args=ModelArguments(model_name_or_path=case.model, dtype="fp32"),
        training_args=TrainingArguments(
            output_dir=case.folder,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_steps=100,
            per_device_train_batch_size=TOGETHER,
            gradient_accumulation_steps=ROWS // TOGETHER,
        ),
        strategy_args=StrategyArguments(strategy_name="megatron_train", strategy_config=strategy),
        infer_batch_size=TOGETHER,
        device_mapping="list(range(4))",
    )
    pipeline = RLVRConfig(
        pretrain=case.model,
        sequence_length=LENGTH,
        prompt_length=LENGTH // 2,
        rollout_batch_size=ROWS * 4 // case.pipeline,
        actor_train=role,
        actor_infer=WorkerConfig(generating_args=GeneratingArguments()),
        rewards={},
        use_kl_loss=True,
        output_dir=case.folder,
        logging_dir=case.folder,
        seed=1,
    )
    return role, pipeline


def worker_of(case: SimpleNamespace) -> Any:
    """Return ROLL's actor with its strategy, with the values that Ray's environment would give."""
    from roll.distributed.executor.worker import RankInfo
    from roll.distributed.strategy.factory import create_strategy
    from roll.models import model_providers
    from roll.pipeline import base_worker

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Its __init__ queries Ray for the other ranks, and measures GPU memory.
    worker = base_worker.ActorWorker.__new__(base_worker.ActorWorker)
    base_worker.state_offload_manger = lambda **_: nullcontext()
    worker.worker_config, worker.pipeline_config = configurations(case)
    worker.worker_name = worker.cluster_name = "actor_train"
    worker.rank, worker.world_size = rank, size
    worker.rank_info = RankInfo(world_size=size, rank=rank, dp_rank=rank, dp_size=size)
    worker._logger, worker._logprobs_cache = None, {}
    model_providers.download_model = lambda path: path  # it looks in a store of Ray's
    worker.strategy = create_strategy(worker=worker)
    worker.strategy.initialize(model_provider=model_providers.default_actor_model_provider)
    worker.strategy.load_states = lambda **_: None  # all is on the one device that there is
    return worker


def rollouts(replica: int) -> Any:
    """Return variable-length prompts and answers, different for every replica."""
    from roll.distributed.scheduler.protocol import DataProto

    generator = torch.Generator().manual_seed(3 + replica)
    ends = torch.randint(LENGTH // 2 + 1, LENGTH, (ROWS, 1), generator=generator)
    places = torch.arange(LENGTH)[None]
    mask = (places < ends).long()
    ids = torch.randint(3, on_cpu.VOCABULARY, (ROWS, LENGTH), generator=generator) * mask
    noise = torch.randn(ROWS, 1, generator=generator).expand(ROWS, LENGTH - 1).contiguous()
    meta_info = {"loss_mask_keys": ["response_mask"], "is_offload_states": False}
    meta_info["is_offload_optimizer_states_in_train_step"] = False
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": places.expand(ROWS, LENGTH).contiguous(),
            "response_mask": mask * (places >= LENGTH // 4),
            "advantages": noise,
        },
        meta_info=meta_info,
    )


def of_collecting_rank(worker: Any, result: Any) -> Any:
    """Return the result of the rank of this replica from which ROLL's cluster collects results."""
    info = worker.rank_info
    everyones: list[Any] = [None] * info.world_size
    dist.all_gather_object(everyones, (info.is_pipeline_last_stage, info.dp_rank, result))
    (collected_result,) = [
        collected
        for collects, replica, collected in everyones
        if collects and replica == info.dp_rank
    ]
    return collected_result


def main(case: SimpleNamespace) -> dict[str, Any]:
    """Return log-probabilities, entropy and metrics where ROLL collects them, and weights."""
    os.environ["HUGGINGFACE_AUTOMAP_CACHE"] = f"{case.folder}/automap"
    dist.init_process_group("gloo")
    worker = worker_of(case)
    strategy = worker.strategy
    record: dict[str, Any] = {"inferred": [], "logged": [], "chunks": len(strategy.model)}
    first: Any = None
    for _ in range(3):
        data = rollouts(worker.rank_info.dp_rank)
        log_probs = worker.compute_log_probs(data)
        results = None if log_probs.batch is None else dict(log_probs.batch.items())
        collected = of_collecting_rank(worker, results)
        record["inferred"].append(collected)
        first = first or collected
        data.batch["old_log_probs"] = data.batch["ref_log_probs"] = first["log_probs"]
        metrics = worker.train_step(data).meta_info["metrics"]
        record["logged"].append(of_collecting_rank(worker, metrics))
    folder = f"{case.folder}/exported"
    strategy.model.models = strategy.models_unwrapped
    strategy.model.save_pretrained_as_hf(folder)
    dist.barrier()
    record["weights"] = exported(folder)
    return record


def exported(folder: str) -> dict[str, torch.Tensor]:
    """Return the weights that mcore_adapter has written, as Hugging Face names them."""
    from pathlib import Path

    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def adapt_to_newer_transformers() -> None:
    """Drop ROLL's training arguments that newer versions of transformers have removed."""
    from dataclasses import fields

    from roll.distributed.strategy import megatron_strategy

    real = megatron_strategy.TrainingArguments
    known_fields = {field.name for field in fields(real)}
    megatron_strategy.TrainingArguments = lambda **options: real(
        **{name: value for name, value in options.items() if name in known_fields}
    )


if __name__ == "__main__":
    root = os.environ["ROLL"]
    sys.path[:0] = [root, f"{root}/mcore_adapter/src"]
    os.environ["ROLL_LOG_DIR"] = sys.argv[1]
    on_cpu.mock_packages(ABSENT)
    on_cpu.replace_attention()
    adapt_to_newer_transformers()
    import roll.pipeline.base_worker  # noqa: F401  imported once

    run_cases(main, pipeline=4, strategy={})
