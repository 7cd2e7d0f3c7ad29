"""PPO steps of verl's Megatron engine with V-Half.

    export MEGATRON_VSHAPE="schedule=v-half"
    torchrun --nproc-per-node 4 examples/verl_ppo.py --model Qwen/Qwen3-8B

`python3 -m verl.trainer.main_ppo model_engine=megatron` makes the same engine in its Ray workers,
with rollouts of vLLM or SGLang. Here the rollouts are random, so that the example needs no Ray and
no inference engine.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

ROWS, LENGTH = 8, 32


def make_engine(
    model: str,
    pipeline: int,
    *,
    packed: bool = True,
    critic: bool = False,
    dtype: str = "bfloat16",
    overrides: dict[str, Any] | None = None,
) -> Any:
    """Create and initialize verl's engine for a policy, or for a critic.

    `overrides` are fields of Megatron's TransformerConfig.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron import transformer_impl as engines

    config = McoreEngineConfig(
        forward_only=False,
        use_mbridge=True,
        pipeline_model_parallel_size=pipeline,
        use_dynamic_bsz=packed,
        use_remove_padding=packed,
        max_token_len_per_gpu=2 * LENGTH,
        infer_max_token_len_per_gpu=3 * LENGTH,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        override_transformer_config=overrides or {},
        sequence_parallel=False,
        dist_ckpt_optim_fully_reshardable=True,  # to resume under another schedule
        param_offload=False,
        optimizer_offload=False,
    )
    object.__setattr__(config, "dtype", dtype)
    kind = engines.MegatronEngineWithValueHead if critic else engines.MegatronEngineWithLMHead
    engine = kind(
        model_config=HFModelConfig(
            path=model,
            use_remove_padding=packed,
            model_type="value_model" if critic else "language_model",
        ),
        engine_config=config,
        optimizer_config=McoreOptimizerConfig(lr_decay_steps=10, lr=1e-3),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


class Rollouts:
    """Random prompts and responses of different lengths, for one data-parallel rank."""

    def __init__(self, vocabulary: int, replica: int, *, packed: bool = True) -> None:
        from verl.utils.model import compute_position_id_with_mask, create_random_mask

        torch.manual_seed(1 + replica)
        self.packed, half = packed, LENGTH // 2
        ids = torch.randint(0, vocabulary, (ROWS, LENGTH))
        self.mask = create_random_mask(ids, 0.8, 0.2, 0.6)
        self.tensors = {
            "input_ids": ids,
            "prompts": ids[:, :half],
            "attention_mask": self.mask,
            "position_ids": compute_position_id_with_mask(self.mask),
            "responses": ids[:, half:],
            "response_mask": self.mask[:, half:],
        }

    def to_verl(self, further_tensors: dict[str, torch.Tensor], **options: Any) -> Any:
        """Return the batch in the form that verl's workers receive, with further tensors."""
        from verl import DataProto
        from verl.utils import tensordict_utils
        from verl.workers.utils.padding import left_right_2_no_padding

        meta = {"temperature": 1.0, "global_token_num": self.mask.sum(-1).tolist()}
        batch = DataProto.from_single_dict({**self.tensors, **further_tensors}, meta_info=meta)
        data = left_right_2_no_padding(batch.to_tensordict())
        tensordict_utils.assign_non_tensor(
            data,
            use_remove_padding=self.packed,
            use_dynamic_bsz=self.packed,
            use_fused_kernels=False,
            micro_batch_size_per_gpu=1,
            **options,
        )
        return data


def collected(engine: Any, local_result: Any) -> Any:
    """Return the result of the rank from which verl's controller collects, on every rank."""
    from megatron.core import mpu

    replica = mpu.get_data_parallel_rank()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (engine.is_mp_src_rank_with_outputs(), replica, local_result))
    (collected_result,) = [
        result
        for collects, source_replica, result in gathered
        if collects and source_replica == replica
    ]
    return collected_result


def infer(engine: Any, rollouts: Rollouts, *, critic: bool = False) -> dict[str, torch.Tensor]:
    """Compute log-probabilities and entropy, or a critic's values, with the current weights."""
    from verl.workers.utils.padding import no_padding_2_padding

    options = {"compute_loss": False, "calculate_entropy": not critic}
    data = rollouts.to_verl({}, max_token_len_per_gpu=3 * LENGTH, **options)
    with engine.eval_mode():
        output = engine.infer_batch(data, loss_function=None)
    outputs = output.get("model_output", {}) if output else {}
    names = [name for name in ("log_probs", "entropy", "values") if name in outputs]
    return collected(engine, {name: no_padding_2_padding(outputs[name], data) for name in names})


def train_step(
    engine: Any, rollouts: Rollouts, further_tensors: dict[str, torch.Tensor], loss: Any
) -> Any:
    """Train one step; return the sum of the losses and the gradient norm."""
    data = rollouts.to_verl(
        further_tensors, max_token_len_per_gpu=2 * LENGTH, global_batch_size=ROWS
    )
    with engine.train_mode():
        output = engine.train_batch(data, loss_function=loss)
    local_result = None
    if output:
        # The sum, because with chunks verl makes a number of microbatches that PP divides.
        local_result = [sum(map(float, output["loss"])), float(output["metrics"]["grad_norm"])]
    engine.lr_scheduler_step()
    return collected(engine, local_result)


def run(engine: Any, vocabulary: int, steps: int) -> list[list[float]]:
    """Run PPO steps on the same rollouts; return loss and gradient norm of each step."""
    from megatron.core import mpu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    rollouts = Rollouts(vocabulary, mpu.get_data_parallel_rank())
    config = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    old_log_probs = infer(engine, rollouts)["log_probs"]
    advantages = torch.rand(ROWS, LENGTH // 2, generator=torch.Generator().manual_seed(5))
    further_tensors = {
        "old_log_probs": old_log_probs,
        "ref_log_prob": old_log_probs,
        "advantages": advantages,
    }
    loss = partial(ppo_loss, config=config)
    return [train_step(engine, rollouts, further_tensors, loss) for _ in range(steps)]


def main() -> None:
    """Train and print the result of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model of Hugging Face, or its folder")
    parser.add_argument("--pipeline", type=int, default=4, help="pipeline ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=3, help="steps (default: 3)")
    args = parser.parse_args()
    dist.init_process_group()
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    engine = make_engine(args.model, args.pipeline)
    for step, (loss, norm) in enumerate(run(engine, 32_000, args.steps)):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.5f}, gradient norm {norm:.5f}")


if __name__ == "__main__":
    main()
