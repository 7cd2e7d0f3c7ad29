"""verl's own Megatron engine on a CPU: log-probs, entropy, values, PPO steps, checkpoints."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import on_cpu

on_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forked import run_cases  # noqa: E402

ROWS, LENGTH = 8, 32


def engine_of(given: SimpleNamespace) -> Any:
    """Return verl's engine as its workers make it."""
    from megatron.core.transformer.enums import AttnBackend
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron import transformer_impl as engines

    fusions = "gradient_accumulation masked_softmax bias_activation bias_dropout apply_rope"
    override = {f"{each}_fusion": False for each in fusions.split()}
    override |= {"cross_entropy_loss_fusion": False, "persist_layer_norm": False}
    override |= {"batch_p2p_comm": False, "attention_backend": AttnBackend.unfused}
    config = McoreEngineConfig(
        forward_only=False,
        use_mbridge=True,
        pipeline_model_parallel_size=given.pipeline,
        use_dynamic_bsz=not given.padded,
        use_remove_padding=not given.padded,
        max_token_len_per_gpu=64,
        infer_max_token_len_per_gpu=96,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        override_transformer_config=override,
        sequence_parallel=False,
        dist_ckpt_optim_fully_reshardable=True,  # what resuming under another schedule takes
        param_offload=False,
        optimizer_offload=False,
    )
    object.__setattr__(config, "dtype", "float32")  # verl allows 16 bits alone
    kind = engines.MegatronEngineWithLMHead
    if given.critic:
        kind = engines.MegatronEngineWithValueHead
    made = kind(
        model_config=HFModelConfig(
            path=given.model,
            use_remove_padding=not given.padded,
            model_type="value_model" if given.critic else "language_model",
        ),
        engine_config=config,
        optimizer_config=McoreOptimizerConfig(lr_decay_steps=10, lr=1e-3),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    if given.critic:
        fill_value_head(made)
    return made


def fill_value_head(engine: Any) -> None:
    """Give the value head the same weights under every schedule: verl draws them by rank."""
    for chunk in engine.module:
        for name, parameter in chunk.named_parameters():
            if "output_layer" in name:
                generator = torch.Generator().manual_seed(9)
                values = torch.empty(parameter.shape).normal_(0, 0.05, generator=generator)
                parameter.data.copy_(values)
    engine.optimizer.reload_model_params()


class Batch:
    """Prompts and answers of unlike lengths, each replica's own."""

    def __init__(self, given: SimpleNamespace, replica: int) -> None:
        from verl.utils.model import compute_position_id_with_mask, create_random_mask

        torch.manual_seed(1 + replica)
        self.given, half = given, LENGTH // 2
        ids = torch.randint(0, on_cpu.VOCABULARY, (ROWS, LENGTH))
        self.mask = create_random_mask(ids, 0.8, 0.2, 0.6)
        self.tensors = {
            "input_ids": ids,
            "prompts": ids[:, :half],
            "attention_mask": self.mask,
            "position_ids": compute_position_id_with_mask(self.mask),
            "responses": ids[:, half:],
            "response_mask": self.mask[:, half:],
        }

    def to_verl(self, others: dict[str, torch.Tensor], **options: Any) -> Any:
        """Return it as verl's workers get it."""
        from verl import DataProto
        from verl.utils import tensordict_utils
        from verl.workers.utils.padding import left_right_2_no_padding

        told = {"temperature": 1.0, "global_token_num": self.mask.sum(-1).tolist()}
        made = DataProto.from_single_dict({**self.tensors, **others}, meta_info=told)
        data = left_right_2_no_padding(made.to_tensordict())
        tensordict_utils.assign_non_tensor(
            data,
            use_remove_padding=not self.given.padded,
            use_dynamic_bsz=not self.given.padded,
            use_fused_kernels=False,
            micro_batch_size_per_gpu=1,
            **options,
        )
        return data


def of_collecting_rank(engine: Any, own: Any) -> Any:
    """Return what the replica's rank has from which verl's controller takes results."""
    from megatron.core import mpu

    replica, everyones = mpu.get_data_parallel_rank(), [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (engine.is_mp_src_rank_with_outputs(), replica, own))
    (found,) = [what for collects, of, what in everyones if collects and of == replica]
    return found


def train(engine: Any, given: SimpleNamespace, kept: dict[str, Any]) -> None:
    """Have the engine infer and learn, as verl's trainer has it do in a step of PPO."""
    from megatron.core import mpu
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss
    from verl.workers.utils.padding import no_padding_2_padding

    batch = Batch(given, mpu.get_data_parallel_rank())
    names = ("values",) if given.critic else ("log_probs", "entropy")
    old: dict[str, torch.Tensor] | None = None
    for _ in range(given.steps):
        asked = {"compute_loss": False, "calculate_entropy": not given.critic}
        data = batch.to_verl({}, max_token_len_per_gpu=96, **asked)
        with engine.eval_mode():
            output = engine.infer_batch(data, loss_function=None)
        made = output.get("model_output", {}) if output else {}
        own = {name: no_padding_2_padding(made[name], data) for name in names if name in made}
        found = of_collecting_rank(engine, own)
        kept["inferred"].append(found)
        old = old or found
        torch.manual_seed(5)
        noise = torch.rand(ROWS, LENGTH // 2)
        if given.critic:
            others = {"values": old["values"], "returns": noise}
            config = CriticConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
            loss = partial(value_loss, config=config)
        else:
            before = old["log_probs"]
            others = {"old_log_probs": before, "advantages": noise, "ref_log_prob": before}
            config = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
            loss = partial(ppo_loss, config=config)
        data = batch.to_verl(others, max_token_len_per_gpu=64, global_batch_size=ROWS)
        with engine.train_mode():
            output = engine.train_batch(data, loss_function=loss)
        learnt = None
        if output:
            norm = float(output["metrics"]["grad_norm"])
            # As a sum: with chunks verl makes a number of microbatches that the ranks divide.
            learnt = [sum(map(float, output["loss"])), norm]
        kept["losses"].append(of_collecting_rank(engine, learnt))
        engine.lr_scheduler_step()


def main(given: SimpleNamespace) -> dict[str, Any]:
    """Return what this rank has of a case: results where verl collects them, and weights."""
    dist.init_process_group("gloo")
    engine = engine_of(given)
    if given.resumes:
        with torch.no_grad():  # in 32 bits the optimizer's own copies are views of parameters
            engine.load_checkpoint(given.resumes, del_local_after_load=False)
    kept: dict[str, Any] = {"inferred": [], "losses": [], "chunks": len(engine.module)}
    train(engine, given, kept)
    if given.saves_in:
        engine.save_checkpoint(given.saves_in, global_step=given.steps)
    if not given.critic:
        with torch.no_grad():
            pairs, _ = engine.get_per_tensor_param()
            kept["weights"] = {name: value.detach().clone() for name, value in pairs}
    dist.barrier()
    return kept


if __name__ == "__main__":
    on_cpu.stand_in_for("nvidia_resiliency_ext", "megatron.energon", "modelopt")
    on_cpu.replace_attention()
    import verl.utils.device
    import verl.workers.engine.megatron.transformer_impl
    from megatron.bridge import AutoBridge  # noqa: F401  all its models, once

    verl.utils.device.get_device_id = lambda: "cpu"
    run_cases(
        main,
        pipeline=4,
        padded=False,  # packed sequences
        critic=False,  # a value head
        steps=3,
        saves_in=None,
        resumes=None,
    )
