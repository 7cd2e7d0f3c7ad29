"""Translate commands of slime and miles, which use Megatron's flags and set other sizes.

Source: `_set_default_megatron_args` in slime/backends/megatron_utils/arguments.py, and
slime/utils/arguments.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from pathlib import Path

from megatron_vshape.rehearsal.command import Command, launched_gpus

_BATCH = "--rollout-batch-size"
_RESPONSE, _TOKENS = "--rollout-max-response-len", "--max-tokens-per-gpu"
SLIME_SIZES = {_RESPONSE, _TOKENS, _BATCH}
"""Flags of slime whose values change memory and time of a step."""


def with_slime_settings(command: Command) -> Command:
    """Add slime's defaults, the sizes of its packed microbatches, and a note for the user.

    With --use-dynamic-batch-size a microbatch is packed: at most --max-tokens-per-gpu tokens on
    each context-parallel rank. All responses are assumed to have the maximum length, and a packed
    microbatch becomes one sequence.
    """
    if not command.has(_BATCH):
        return command
    command = _with_layers_of_plugin(command)
    number, has_flag = command.number, command.has
    gpus, _ = launched_gpus(command)
    context = number("--context-parallel-size", 1)
    stage_ranks = number("--tensor-model-parallel-size", 1) * context
    replicas = (gpus or 0) // (stage_ranks * number("--pipeline-model-parallel-size", 1)) or 1
    response = number(_RESPONSE, 4096)
    tokens = number("--seq-length", response)
    samples = number("--global-batch-size", number(_BATCH, 1))
    if has_flag("--use-dynamic-batch-size") and has_flag(_TOKENS):
        tokens = number(_TOKENS, tokens) * context
        microbatches = ceil(samples * min(response, tokens) / tokens / replicas)
        samples = microbatches * replicas
    flags = ["--seq-length", str(tokens), "--global-batch-size", str(samples)]
    defaults = {
        "--max-position-embeddings": [str(tokens)],
        "--micro-batch-size": ["1"],
        "--use-distributed-optimizer": [],
    } | ({} if has_flag("--fp16") else {"--bf16": []})
    for name, values in defaults.items():
        flags += [] if has_flag(name) else [name, *values]
    script = "pretrain_hybrid.py" if command.pattern else "pretrain_gpt.py"
    note = (
        f"{command.script} is estimated as {script}: slime's or miles' microbatches are estimated "
        f"as sequences of {tokens:,} tokens, its responses with {response:,} tokens; the rollout "
        "engine, the reference model and encoders of images are not included"
    )
    return replace(
        command, script=script, flags=(*command.flags, *flags), notes=(*command.notes, note)
    )


_GATED_DELTA_NETS = re.compile(r"(slime|miles)_plugins\.models\.qwen3_(5|next)")
_WITHOUT_EFFECT = re.compile(r"(slime|miles)_plugins\.models\.(minimax_m2|glm4)")
"""Plugins whose layers have the sizes of the flags: only their norms differ."""


def _with_layers_of_plugin(command: Command) -> Command:
    """Replace the layers of a plugin, which needs another Megatron, by Megatron's own."""
    spec, checkpoint = command.value("--spec") or "", command.value("--hf-checkpoint") or ""
    note = "The layers of the plugin are estimated as Megatron's"
    if _WITHOUT_EFFECT.match(spec):
        return replace(
            command.having(spec=None), notes=(*command.notes, f"{note} own, with its norms.")
        )
    if not checkpoint or not _GATED_DELTA_NETS.match(spec):
        return command
    note += " gated delta net, which tensor parallelism shards."
    # Without layers of its own, the command gets those of the model that it names.
    command = command.having(spec=None, use_gated_attention=None, num_layers=None)
    return replace(command, model_name=Path(checkpoint).name, notes=(*command.notes, note))
