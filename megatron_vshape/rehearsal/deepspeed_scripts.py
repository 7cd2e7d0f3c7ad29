"""Translate flags of Megatron-DeepSpeed, whose engine shards the optimizer, to those of Megatron.

Sources: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed; runtime/engine.py of DeepSpeed,
whose BF16_Optimizer shards its state with stage 0, too.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import ENDS_ARE_LAYERS, Command, words_by_flag

_MARKS = ("--deepspeed", "--deepspeed-config", "--deepspeed_config", "--zero-stage")
_REJECTED = {
    "--cpu-optimizer": "keeps the optimizer in host memory",
    "--mlp-type": "adds a dense layer to experts",
}
_TRANSLATED = frozenset(
    """
    --zero-stage --ds-sequence-parallel-size --num-key-value-heads --moe-expert-parallel-size
    --no-pipeline-parallel --pp-partition-method
    """.split()
)
_LOCAL = {"transformer_impl": "local", "no_persist_layer_norm": True, "no_rope_fusion": True}
_NORMALIZATIONS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def with_deepspeed_flags(command: Command) -> Command:
    """Replace flags by Megatron's with the same memory.

    Raises:
        ScheduleError: DeepSpeed shards more than the optimizer, or trains its own experts.
    """
    if not any(map(command.has, _MARKS)):
        return command
    stage = command.value("--zero-stage", "1") or ""
    reasons = {f"{flag} {reason}" for flag, reason in _REJECTED.items() if command.has(flag)}
    if stage.partition(".")[0] not in ("0", "1"):
        reasons.add(f"--zero-stage {stage} is none of the stages 0 and 1")
    if any(number != "1" for number in words_by_flag(command.flags).get("--num-experts", ())):
        reasons.add("--num-experts are DeepSpeed's experts")
    if reasons:
        raise ScheduleError(
            f"the command trains with DeepSpeed: {' and '.join(sorted(reasons))}. Only Megatron is "
            "estimated, and DeepSpeed if it shards no more than the optimizer. Replace these flags "
            "by those of Megatron-LM"
        )
    note = "DeepSpeed is estimated as Megatron's optimizer, sharded as by its ZeRO stage."
    command = replace(command, notes=(*command.notes, note))
    return command.without(_TRANSLATED.__contains__).having(**_changes(command, stage))


def _changes(command: Command, stage: str) -> dict[str, object]:
    """Return options of Megatron for those of DeepSpeed and for its defaults."""
    changes: dict[str, object] = {"num_experts": None}  # 1: the model has no experts
    if stage[0] == "1" or command.has("--bf16"):
        changes["use_distributed_optimizer"] = True
    if groups := command.number("--num-key-value-heads", 0):
        is_grouped = groups != command.number("--num-attention-heads", groups)
        changes |= {"group_query_attention": is_grouped, "num_query_groups": groups}
    if (shards := command.number("--ds-sequence-parallel-size", 1)) > 1:
        changes |= {"context_parallel_size": shards, "cp_comm_type": "a2a"}
    if (normalization := command.value("--normalization", "")) in _NORMALIZATIONS:
        changes["normalization"] = _NORMALIZATIONS[normalization]
    has_flash = any(word.startswith("--use-flash-attn") for word in command.flags)
    if not has_flash and shards == 1:
        changes |= _LOCAL  # the default, in which attention keeps its scores
    if "embedding" in (command.value("--pp-partition-method") or ""):  # type:transformer|embedding
        changes |= dict.fromkeys(ENDS_ARE_LAYERS, True)
    return changes
