"""Megatron-Bridge from a model of Hugging Face and back to one, on a CPU: pretraining and SFT."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_cpu

on_cpu.install()

from forked import run_cases  # noqa: E402

LENGTH = 128


def dataset_of(case: SimpleNamespace) -> Any:
    """Return the training data: random tokens, or dialogues in the format of Bridge's SFT."""
    from megatron.bridge.training import config as c

    if not case.pretrained:
        plain = dict.fromkeys(
            ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False
        )
        workers = {"num_workers": 0, "persistent_workers": False, "pin_memory": False}
        sizes = {"seq_length": LENGTH, "random_seed": 1234, "dataloader_type": "single"}
        return c.MockGPTDatasetConfig(**plain, **workers, **sizes)
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig

    folder = Path(case.folder) / "data"
    folder.mkdir(exist_ok=True)
    lines = [json.loads(line)["messages"] for line in Path(case.dialogues).read_text().splitlines()]
    for name in ("training", "validation", "test"):
        pairs = [{"input": ask["content"], "output": say["content"]} for ask, say in lines]
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        partial = folder / f"{name}.{os.environ['RANK']}"
        partial.write_text(text)
        partial.replace(folder / f"{name}.jsonl")  # every rank writes the same
    return GPTSFTDatasetConfig(
        seq_length=LENGTH,
        dataset_root=folder,
        do_test=False,
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
    )


def configuration(case: SimpleNamespace, bridge: Any) -> Any:
    """Return Bridge's configuration, with the provider that AutoBridge creates for the model."""
    import torch
    from megatron.bridge.training import config as c

    fusions = "gradient_accumulation masked_softmax bias_activation bias_dropout apply_rope"
    model = bridge.to_megatron_provider(load_weights=not case.pretrained)
    settings = {f"{fusion}_fusion": False for fusion in fusions.split()} | {
        "pipeline_model_parallel_size": case.pipeline,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "seq_length": LENGTH,
        "bf16": False,
        "fp16": False,
    }
    for name, value in settings.items():
        setattr(model, name, value)
    rates = {"lr": 1e-3, "min_lr": 1e-3, "weight_decay": 0.0, "clip_grad": 1.0}
    constant = {"start_weight_decay": 0.0, "end_weight_decay": 0.0}
    sharded = {"use_distributed_optimizer": True}
    return c.ConfigContainer(
        model=model,
        train=c.TrainingConfig(train_iters=3, global_batch_size=8, micro_batch_size=1),
        validation=c.ValidationConfig(eval_interval=3, eval_iters=1),
        optimizer=c.OptimizerConfig(optimizer="adam", **rates, **sharded),
        scheduler=c.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=3,
            weight_decay_incr_style="constant",
            **constant,
        ),
        ddp=c.DistributedDataParallelConfig(
            overlap_grad_reduce=False, overlap_param_gather=False, **sharded
        ),
        dist=c.DistributedInitConfig(distributed_backend="gloo"),
        dataset=dataset_of(case),
        tokenizer=c.TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=case.model
        ),
        logger=c.LoggerConfig(log_interval=1, tensorboard_dir=None),
        checkpoint=c.CheckpointConfig(
            save=case.saves_in, save_interval=3, pretrained_checkpoint=case.pretrained
        ),
        rng=c.RNGConfig(seed=1234),
    )


def main(case: SimpleNamespace) -> dict[str, Any]:
    """Return the losses and evaluations that this rank reads, and the exported weights."""
    import torch.distributed as dist
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from safetensors.torch import load_file

    bridge = AutoBridge.from_hf_pretrained(case.model)
    record: dict[str, Any] = {"logged": [], "evaluations": [], "chunks": 0}
    exported = Path(case.folder) / "exported"

    def step_ended(context: Any) -> None:
        if context.loss_dict:
            norm = float(context.grad_norm)
            record["logged"].append([context.loss_dict["lm loss"].item(), norm])
        record["chunks"] = len(context.model)

    def evaluation_ended(context: Any) -> None:
        if context.total_loss_dict:
            record["evaluations"].append(float(context.total_loss_dict["lm loss"]))

    def training_ended(context: Any) -> None:
        bridge.save_hf_pretrained(context.model, exported, show_progress=False)

    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", step_ended)
    callbacks.register("on_eval_end", evaluation_ended)
    callbacks.register("on_train_end", training_ended)
    start = finetune if case.pretrained else pretrain
    dist.init_process_group("gloo")
    start(configuration(case, bridge), forward_step, callbacks=callbacks)
    if int(os.environ["RANK"]) == 0:
        files = sorted(exported.glob("*.safetensors"))
        record["exported"] = {
            key: weight for file in files for key, weight in load_file(file).items()
        }
    return record


if __name__ == "__main__":
    on_cpu.stand_in_for("nvidia_resiliency_ext", "megatron.energon", "modelopt")
    on_cpu.replace_attention()
    import megatron.core.datasets.utils
    from megatron.bridge import AutoBridge  # noqa: F401  all its models, once

    megatron.core.datasets.utils.compile_helpers = lambda: None  # the wheel has them
    run_cases(main, pipeline=4, saves_in=None, pretrained=None)
