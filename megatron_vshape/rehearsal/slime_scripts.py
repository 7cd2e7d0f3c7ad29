"""Translate commands of slime and miles, which use Megatron's flags and set other sizes.

Source: `_set_default_megatron_args` in slime/backends/megatron_utils/arguments.py, and
slime/utils/arguments.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

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
    number, has_flag = command.number, command.has
    if not has_flag(_BATCH):
        return command
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
