"""Options outside of the comparison of `advise` with which a command fits, if nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command, Sizes, flag_changes, sizes_of
from megatron_vshape.rehearsal.gpus import Fit
from megatron_vshape.rehearsal.rank_job import LoraConfig
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.ranks import DryRunConfig, rehearse_all
from megatron_vshape.tuning.configurations import FULL, Configuration, Subject

_BF16_STATES: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
"""Adam's moments in bf16: 4 bytes per parameter less."""

_STATES_ON_HOST: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}
"""Optimizer states and step on the CPU."""

_GPU_FACTORS = (2, 4, 8)
"""Numbers of GPUs to try, relative to the present one."""


_LORA_RANK = 16
_LORA_TEXT = f"LoRA adapters of rank {_LORA_RANK} instead of full training (--lora-rank)"


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A command on a number of GPUs, perhaps with adapters; text: what its flags do not show."""

    command: Command
    sizes: Sizes
    text: str = ""
    lora: LoraConfig | None = None


def find_fitting_options(
    subject: Subject, config: Configuration, rank: int, programs: DryRunConfig, headroom: float
) -> list[str]:
    """Estimate the rank that needs the most memory with further options, and list those that fit.

    All are tried with full recomputation. Of several numbers of GPUs, the smallest is listed.

    Args:
        subject: the model with today's command.
        config: today's configuration.
        rank: the pipeline rank with the highest peak.
        programs: programs and GPU of the dry runs.
        headroom: bytes of each GPU to keep free.

    Returns:
        Flags and numbers of GPUs, as text.
    """
    command = replace(config, recompute=FULL).command(subject)
    attempts = {
        str(index): attempt
        for index, attempt in enumerate(_attempts(command, config))
        if attempt.lora is None or programs.lora is None
    }
    jobs = [
        replace(programs, lora=attempt.lora or programs.lora).job(
            attempt.command, attempt.sizes, rank, name
        )
        for name, attempt in attempts.items()
    ]
    fitting = {
        report.name
        for report in rehearse_all(programs.programs, jobs)
        if isinstance(report, RankReport)
        and programs.gpu.fit_of(report.memory.peak_bytes, report.communicators, headroom)
        is Fit.FITS
    }
    texts: list[str] = []
    for attempt in (attempts[name] for name in attempts if name in fitting):
        changes = flag_changes(subject.command, attempt.command)
        texts.append(", ".join(filter(None, (attempt.text, *changes))))
        if attempt.sizes.world > config.num_devices:
            break
    return texts


def _attempts(command: Command, config: Configuration) -> Iterator[_Attempt]:
    """Yield the commands to try; numbers of GPUs that do not divide the batch are left out."""
    gpus = config.num_devices
    for options in (_BF16_STATES, _STATES_ON_HOST):
        changed = command.having(**options)
        yield _Attempt(changed, sizes_of(changed, gpus))
    yield _Attempt(command, sizes_of(command, gpus), _LORA_TEXT, LoraConfig(_LORA_RANK, ()))
    for factor in _GPU_FACTORS:
        changed = command.having(use_distributed_optimizer=True)
        try:
            yield _Attempt(changed, sizes_of(changed, factor * gpus), f"{factor * gpus} GPUs")
        except ScheduleError:
            return
