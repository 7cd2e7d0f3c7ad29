"""ms-swift's Megatron trainers on a CPU: SFT, LoRA and DPO, started as by its command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_cpu

on_cpu.install()

import ms_swift_sft  # noqa: E402  the example
import torch  # noqa: E402
from forked import run_cases  # noqa: E402

DEFAULT_SEARCH = (
    "--model_type qwen3 --template qwen3 --check_model false --torch_dtype float32 --fp16 false "
    "--bf16 false --ddp_backend gloo --use_hf true --micro_batch_size 2 --global_batch_size 16 "
    "--lr 1e-3 --min_lr 1e-3 --lr_warmup_fraction 0 --logging_steps 1 --max_length 128 "
    "--add_version false --gradient_accumulation_fusion false --attention_backend unfused "
    "--masked_softmax_fusion false --dataloader_num_workers 0 --dataset_num_proc 1 --seed 1 "
    "--split_dataset_ratio 0.125 --eval_iters 2 --dist_ckpt_optim_fully_reshardable true"
)
"""Options of all cases; the last one is required to resume under another schedule."""

UNLIKE = ("time", "memory", "speed", "elapsed", "remaining", "tflops", "tokens_per")


def logged(folder: Path) -> list[dict[str, float]]:
    """Return the metrics in ms-swift's log that do not depend on time."""
    lines = map(json.loads, (folder / "logging.jsonl").read_text().splitlines())
    return [
        {
            name: value
            for name, value in line.items()
            if isinstance(value, int | float) and not any(part in name for part in UNLIKE)
        }
        for line in lines
        if any("loss" in name for name in line)
    ]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint, as Hugging Face names them."""
    from safetensors.torch import load_file

    last = max(
        folder.glob("checkpoint-*"), key=lambda checkpoint: int(checkpoint.name.split("-")[1])
    )
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(last.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def main(case: SimpleNamespace) -> dict[str, Any]:
    """Return ms-swift's log and checkpoint, on the rank that writes them."""
    from swift.megatron import megatron_rlhf_main, megatron_sft_main

    start = megatron_rlhf_main if case.prefers else megatron_sft_main
    start = ms_swift_sft.main if case.example else start
    folder = Path(case.folder) / "run"
    sizes = [f"--pipeline_model_parallel_size={case.pipeline}", f"--train_iters={case.steps}"]
    sizes += [f"--save_steps={case.steps}", f"--eval_steps={case.steps}"]
    data = case.preferences if case.prefers else case.dialogues
    where = [f"--model={case.model}", f"--dataset={data}", f"--output_dir={folder}"]
    padding = [] if case.example else ["--padding_free=false"]
    start([*DEFAULT_SEARCH.split(), *padding, *sizes, *where, *case.options])
    if int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) - 1:
        return {}
    return {"logged": logged(folder), "weights": saved(folder)}  # which the last rank writes


def adapt_to_this_transformers() -> None:
    """Restore behavior that ms-swift needs and newer versions of transformers have changed."""
    import transformers
    from transformers import hf_argparser

    transformers.Qwen3Config.rope_theta = 10000.0
    parse = hf_argparser.HfArgumentParser._parse_dataclass_field

    def parse_field(parser: Any, field: Any) -> None:
        if field.name == "cp_comm_type":
            field.type = str | None
        parse(parser, field)

    hf_argparser.HfArgumentParser._parse_dataclass_field = staticmethod(parse_field)


if __name__ == "__main__":
    os.environ["MODELSCOPE_CACHE"] = os.environ["HF_DATASETS_CACHE"] = f"{sys.argv[1]}/cache"
    on_cpu.replace_attention()
    from swift.megatron import megatron_rlhf_main, megatron_sft_main  # noqa: F401  imported once

    adapt_to_this_transformers()
    run_cases(main, pipeline=4, steps=3, prefers=False, options=[], example=False)
