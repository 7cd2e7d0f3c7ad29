"""megatron-vshape profile: an alias of `rehearse --measure --costs`, for one release."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from megatron_vshape.cli import rehearse
from megatron_vshape.cli.files import check_installed
from megatron_vshape.cli.options import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that can be translated to flags of a training command."""
    parser.description = (
        "Removed in the next release: use megatron-vshape rehearse --measure --costs FILE.json -- "
        "COMMAND with your own training command."
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    for name in ("--devices", "--seq-length"):
        parser.add_argument(name, type=count, required=True)
    for name in ("--microbatch-size", "--tensor-parallel", "--expert-parallel", "--repeats"):
        parser.add_argument(name, type=count, default=1)
    parser.add_argument("--layers", type=count)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    for name in ("--transformer-engine", "--sequence-parallel"):
        parser.add_argument(name, action="store_true")


def run(options: argparse.Namespace) -> int:
    """Print the new command, run it, and return its exit status."""
    check_installed("profile", "megatron", "torch")
    check_installed("profile", "sweep", "pydantic")
    words = ["--measure", "--costs", str(options.output), "--", *_command(options)]
    print(f"profile is now: megatron-vshape rehearse {shlex.join(words)}", flush=True)
    parser = argparse.ArgumentParser()
    rehearse.add_arguments(parser)
    return rehearse.run(parser.parse_args(words))


def _command(options: argparse.Namespace) -> list[str]:
    """Translate the model file and the sizes into a training command."""
    import torch

    from megatron_vshape.tuning.files import ModelFile, load, of_model_file

    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    model = load(options.model, ModelFile)
    half = model.parameter_bytes == 2 and not on_cpu
    local = not options.transformer_engine
    sizes: dict[str, Any] = {
        "num_layers": options.layers or model.layers,
        "seq_length": options.seq_length,
        "max_position_embeddings": options.seq_length,
        "micro_batch_size": options.microbatch_size,
        "pipeline_model_parallel_size": options.devices,
        "tensor_model_parallel_size": options.tensor_parallel,
        "sequence_parallel": options.sequence_parallel or None,
        "bf16": (options.dtype == "bfloat16" if options.dtype else half) or None,
    }
    if model.experts is not None:
        sizes["expert_model_parallel_size"] = options.expert_parallel
    # Megatron's local layers have the same flags on a CPU and on a GPU.
    command = of_model_file(model, local, options.model).command.having(**sizes)
    return [command.script, *command.flags]
