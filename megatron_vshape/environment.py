"""Environment variables that a schedule requires of CUDA, torch and NCCL.

A run sets them when a schedule is selected (`mcore.setup.ready`), before CUDA starts: CUDA reads
the number of its queues when it creates the device's context, and NCCL reads its variables when it
connects. CUDA reads the kernel loading mode at the first query for a device. If a trainer queries a
device earlier, kernels load within steps; no proof depends on that. A run configures the allocator
by torch's function instead of its variable, which processes started later would inherit. Programs
that only measure set the variable.
"""

from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Names of the allocator's variable in torch: the first is older, and which of the two takes
precedence depends on the version."""

SEGMENTS = "expandable_segments:True"

LOADING = "CUDA_MODULE_LOADING"

CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Required by Megatron for tensor or context parallelism before Blackwell, with any schedule."""


class Setting(NamedTuple):
    """Value of a variable, with the reason."""

    value: str
    why: str


def settings(
    *, kernels: bool, ordered: bool, graphs: bool = False, registers: bool = False
) -> dict[str, Setting]:
    """Return the settings that a schedule requires, by variable.

    Args:
        kernels: messages are kernels (on GPUs).
        ordered: overlap relies on the launch order.
        graphs: CUDA graphs are captured.
        registers: NCCL registers buffers, which must not be in expandable segments.
    """
    found: dict[str, Setting] = {}
    if kernels:
        why = "loading kernels within a step waits for the GPU, P2P messages included"
        found[LOADING] = Setting("EAGER", why)
    if kernels and not registers:
        why = "memory is rarely returned to the GPU, which would wait for it"
        found |= dict.fromkeys(ALLOCATOR, Setting(SEGMENTS, why))
        if graphs:
            why = "NCCL must not register expandable segments in CUDA graphs"
            found["NCCL_GRAPH_REGISTER"] = Setting("0", why)
    if ordered:
        why = "required by tensor and context parallelism"
        found |= {name: Setting(value, why) for name, value in CONNECTIONS.items()}
    return found


def missing(needed: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the settings missing from `environ`; the user's settings take precedence.

    If the user has set either name of the allocator's variable, neither name is missing, and
    settings for expandable segments are not required.
    """
    found = {name: each for name, each in needed.items() if name not in environ}
    if any(name in environ for name in ALLOCATOR):
        for name in (*ALLOCATOR, "NCCL_GRAPH_REGISTER"):
            found.pop(name, None)
    return found


def complete(environ: MutableMapping[str, str], *, kernels: bool, ordered: bool) -> None:
    """Set the missing variables, for programs that measure passes."""
    lacking = missing(settings(kernels=kernels, ordered=ordered), environ)
    environ.update({name: value for name, (value, _) in lacking.items()})


def told(found: Mapping[str, Setting]) -> str:
    """Format the variables in one line, each with its value and reason."""
    return ", ".join(f"{name}={value} ({why})" for name, (value, why) in found.items())
