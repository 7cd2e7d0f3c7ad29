"""verl's Megatron engine on a CPU: log-probs, entropy, values, PPO steps, checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import on_cpu

on_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import verl_ppo  # noqa: E402  the example
from forked import run_cases  # noqa: E402
from live_bytes import LiveBytes, held_by_package  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402


def engine_of(case: SimpleNamespace) -> Any:
    """Create the engine of the example, with the options that a CPU needs."""
    from megatron.core.transformer.enums import AttnBackend

    fusions = "gradient_accumulation masked_softmax bias_activation bias_dropout apply_rope"
    overrides = {f"{fusion}_fusion": False for fusion in fusions.split()}
    overrides |= {"cross_entropy_loss_fusion": False, "persist_layer_norm": False}
    overrides |= {"batch_p2p_comm": False, "attention_backend": AttnBackend.unfused}
    engine = verl_ppo.make_engine(
        case.model,
        case.pipeline,
        packed=not case.padded,
        critic=case.critic,
        dtype="float32",  # verl's configuration allows 16 bits only
        overrides=overrides,
    )
    if case.critic:
        fill_value_head(engine)
    return engine


def fill_value_head(engine: Any) -> None:
    """Give the value head the same weights under every schedule: verl draws them by rank."""
    for chunk in engine.module:
        for name, parameter in chunk.named_parameters():
            if "output_layer" in name:
                generator = torch.Generator().manual_seed(9)
                values = torch.empty(parameter.shape).normal_(0, 0.05, generator=generator)
                parameter.data.copy_(values)
    engine.optimizer.reload_model_params()


def train(engine: Any, case: SimpleNamespace, record: dict[str, Any]) -> None:
    """Have the engine infer and learn, as verl's trainer does in a step of PPO."""
    from megatron.core import mpu
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    replica = mpu.get_data_parallel_rank()
    rollouts = verl_ppo.Rollouts(on_cpu.VOCABULARY, replica, packed=not case.padded)
    old_inferred: dict[str, torch.Tensor] | None = None
    config = CriticConfig if case.critic else ActorConfig
    settings = config(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    loss = partial(value_loss if case.critic else ppo_loss, config=settings)
    for _ in range(case.steps):
        inferred = verl_ppo.infer(engine, rollouts, critic=case.critic)
        record["inferred"].append(inferred)
        old_inferred = old_inferred or inferred
        torch.manual_seed(5)
        noise = torch.rand(verl_ppo.ROWS, verl_ppo.LENGTH // 2)
        if case.critic:
            targets = {"values": old_inferred["values"], "returns": noise}
        else:
            log_probs = old_inferred["log_probs"]
            targets = {"old_log_probs": log_probs, "advantages": noise, "ref_log_prob": log_probs}
        record["losses"].append(verl_ppo.train_step(engine, rollouts, targets, loss))
        if case.live is not None:
            record["left"].append(bytes_left(engine, case.live))
            record["held"] += held_by_package()


def bytes_left(engine: Any, live: LiveBytes) -> int:
    """Count the bytes of all ranks between phases, when verl has offloaded model and optimizer."""
    with _disable_current_modes():  # verl's copies to the host are not counted
        engine.to("cpu")
        num_bytes = torch.tensor(live.count())
        dist.all_reduce(num_bytes)
        engine.to("cuda")
    return int(num_bytes)


def main(case: SimpleNamespace) -> dict[str, Any]:
    """Return the weights, and the results on the ranks where verl collects them."""
    dist.init_process_group("gloo")
    case.live = LiveBytes() if case.offloads else None
    with case.live or nullcontext():
        return run(case)


def run(case: SimpleNamespace) -> dict[str, Any]:
    """Train, and return the results; see `main`."""
    engine = engine_of(case)
    if case.example:
        return {"steps": verl_ppo.run(engine, on_cpu.VOCABULARY, case.steps)}
    if case.resumes:
        with torch.no_grad():  # in 32 bits the optimizer's copies are views of parameters
            engine.load_checkpoint(case.resumes, del_local_after_load=False)
    record: dict[str, Any] = {"inferred": [], "losses": [], "left": [], "held": []}
    record["chunks"] = len(engine.module)
    train(engine, case, record)
    if case.saves_in:
        engine.save_checkpoint(case.saves_in, global_step=case.steps)
    if not case.critic:
        with torch.no_grad():
            pairs, _ = engine.get_per_tensor_param()
            record["weights"] = {name: value.detach().clone() for name, value in pairs}
    dist.barrier()
    return record


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
        example=False,
        offloads=False,  # counts the bytes that stay allocated between phases
    )
