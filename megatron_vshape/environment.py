"""Environment variables that a schedule needs on its ranks, read when CUDA, torch and NCCL start.

A run sets them when its schedule is chosen (`mcore.setup.environment`). This is early enough until
CUDA starts: CUDA reads the number of its queues when it creates the device's context, and NCCL
reads its variables when it connects. CUDA reads the kernel loading mode at the first device query.
If a trainer has queried before, kernels load within steps; the proof of freedom from deadlocks does
not depend on this. A run sets the allocator through torch's function, because processes started
later would inherit its variable. Programs that only measure set the variable.
"""

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Names of the allocator's variable in torch. Old versions have only the first; the precedence
of the two has changed between versions."""

SEGMENTS = "expandable_segments:True"

LOADING = "CUDA_MODULE_LOADING"

CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Required by Megatron before Blackwell with tensor or context parallelism, for any schedule."""


def is_first_rank() -> bool:
    """Return whether the launcher has started this process as rank 0, which logs for all ranks."""
    return os.environ.get("RANK", "0") == "0"


class Setting(NamedTuple):
    """The value of a variable, with the reason."""

    value: str
    why: str


def required_settings(
    *, kernels: bool, ordered: bool, graphs: bool = False, registers: bool = False
) -> dict[str, Setting]:
    """Return the settings that a schedule needs, by variable.

    Args:
        kernels: Whether P2P messages are GPU kernels.
        ordered: Whether overlap relies on the launch order.
        graphs: Whether CUDA graphs are captured.
        registers: Whether NCCL registers buffers, which must not be in expandable segments.
    """
    settings_by_name: dict[str, Setting] = {}
    if kernels:
        reason = "loading kernels within a step waits for the GPU, P2P messages included"
        settings_by_name[LOADING] = Setting("EAGER", reason)
    if kernels and not registers:
        reason = "memory is rarely returned to the GPU, which would wait for it"
        settings_by_name |= dict.fromkeys(ALLOCATOR, Setting(SEGMENTS, reason))
        if graphs:
            reason = "NCCL must not register expandable segments in CUDA graphs"
            settings_by_name["NCCL_GRAPH_REGISTER"] = Setting("0", reason)
    if ordered:
        reason = "required by tensor and context parallelism"
        settings_by_name |= {name: Setting(value, reason) for name, value in CONNECTIONS.items()}
    return settings_by_name


def missing_settings(
    required: Mapping[str, Setting], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return the needed settings that `environ` lacks; existing values are the user's choice.

    If one of the allocator's variables exists, both are omitted, together with the setting that
    expandable segments require.
    """
    missing_settings = {name: setting for name, setting in required.items() if name not in environ}
    if any(name in environ for name in ALLOCATOR):
        for name in (*ALLOCATOR, "NCCL_GRAPH_REGISTER"):
            missing_settings.pop(name, None)
    return missing_settings


def set_missing(environ: MutableMapping[str, str], *, kernels: bool, ordered: bool) -> None:
    """Set the missing variables for a measurement of passes."""
    lacking = missing_settings(required_settings(kernels=kernels, ordered=ordered), environ)
    environ.update({name: value for name, (value, _) in lacking.items()})


def format_settings(settings_by_name: Mapping[str, Setting]) -> str:
    """Format variables with values and reasons in one line."""
    return ", ".join(
        f"{name}={value} ({reason})" for name, (value, reason) in settings_by_name.items()
    )
