"""Environment variables and allocator settings of a rank, set once its schedule is chosen.

A trainer's process may start others, such as an inference engine with its own allocator settings,
and these inherit its environment variables. So expandable segments are set only in torch's
allocator.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vshape.environment import (
    ALLOCATOR,
    LOADING,
    SEGMENTS,
    Setting,
    format_settings,
    is_first_rank,
    missing_settings,
    required_settings,
)
from megatron_vshape.mcore.refusals import OVERLAP_OPTION, captures_graphs
from megatron_vshape.mcore.setup.run_config import RunConfig

logger = logging.getLogger(__name__)

REGISTERS = "NCCL_GRAPH_REGISTER"


@dataclass(slots=True)
class Environment:
    """The settings that schedules have made in this process."""

    # Names of variables, without those that the user has set.
    set_names: frozenset[str] = frozenset()
    registers_buffers: bool = False  # NCCL registers buffers (nccl_ub of the data-parallel config)

    def set_variables(self, options: Any, pipeline: RunConfig) -> None:
        """Set the variables and the allocator for a schedule, and log them in one line.

        `options` are Megatron's arguments or a config. Variables that the user has set stay
        unchanged, and so does the allocator if its variable is set. CUDA reads variables only when
        it starts. If it has started, a warning names them instead.
        """
        self.set_names |= _complete(options, pipeline, self.registers_buffers, self.set_names)

    def withdraw_loading_mode(self) -> None:
        """Remove CUDA_MODULE_LOADING once CUDA has read it, so that children do not inherit it.

        A trainer with rollouts may start an inference engine from this process, which would load
        all its kernels. The other variables stay: Megatron reads CUDA_DEVICE_MAX_CONNECTIONS in
        every step and requires its users to set it, and NCCL reads its variable when graphs are
        captured.
        """
        if LOADING in self.set_names and torch.cuda.is_initialized():
            os.environ.pop(LOADING, None)

    def register_buffers(self) -> None:
        """Undo the allocator settings, because NCCL registers buffers."""
        self.registers_buffers = True
        undone = frozenset({*ALLOCATOR, REGISTERS}.intersection(self.set_names))
        self.set_names -= undone
        if undone:
            _set_allocator(SEGMENTS.replace("True", "False"))
            if REGISTERS in undone:
                os.environ.pop(REGISTERS, None)
            if is_first_rank():
                logger.info("expandable segments are off again, as NCCL registers buffers")


def _complete(
    options: Any, pipeline: RunConfig, registers: bool, already: Collection[str]
) -> frozenset[str]:
    """Make the settings that are not made already, and return their names."""
    sizes = options.tensor_model_parallel_size, options.context_parallel_size
    required = required_settings(
        kernels=pipeline.choice.kernels,
        # This kernel order prevents overlapped passes; with these, Megatron leaves the setting to
        # the user.
        ordered=max(sizes) > 1 and not getattr(options, OVERLAP_OPTION, False),
        graphs=captures_graphs(options),
        registers=registers or bool(getattr(options, "nccl_ub", False)),
    )
    lacking = {
        name: setting
        for name, setting in missing_settings(required, os.environ).items()
        if name not in already
    }
    is_late = torch.cuda.is_initialized()
    new_settings = {name: lacking.pop(name) for name in ALLOCATOR if name in lacking}
    if is_late and REGISTERS in lacking:  # NCCL would register these segments in CUDA graphs
        lacking, new_settings = new_settings | lacking, {}
    if new_settings:
        _set_allocator(SEGMENTS)
    if lacking and not is_late:
        os.environ.update({name: value for name, (value, _) in lacking.items()})
        new_settings |= lacking
    if is_first_rank():
        _log(pipeline.choice.name, new_settings, lacking if is_late else {})
    return frozenset(new_settings)


def _log(
    schedule: str, new_settings: dict[str, Setting], missed_settings: dict[str, Setting]
) -> None:
    # Both names of the allocator's variable are one setting, for which no variable was set.
    shown = {name: setting for name, setting in new_settings.items() if name not in ALLOCATOR}
    if ALLOCATOR[0] in new_settings:
        shown = {"torch's allocator": new_settings[ALLOCATOR[0]], **shown}
    if shown:
        logger.info("set in this process for schedule %s: %s", schedule, format_settings(shown))
    if missed_settings:
        logger.warning(
            "CUDA had started when schedule %s was chosen, too late to set here what it needs; "
            "start the ranks with %s",
            *(schedule, format_settings(missed_settings)),
        )


def _set_allocator(setting: str) -> None:
    """Change torch's CUDA allocator settings; works before and after CUDA has started."""
    current = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (current or torch.cuda.memory._set_allocator_settings)(setting)
