"""What a schedule's ranks need in their environment, by which CUDA, torch and NCCL start.

A run sets it when a schedule is chosen (`mcore.setup.ready`), which is early enough until CUDA
starts: CUDA reads the number of its queues with the device's context, and NCCL its variables when
it connects. CUDA reads how to load kernels as soon as it is asked for a device. If a trainer has
done that before, kernels load within steps; no proof depends on it. A run sets the allocator by
torch's function and not by its variable, which processes started later would inherit. Programs that
only measure set the variable.
"""

from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""How torch spells the allocator's variable: at first the one way, later the other too, and which
of the two wins has changed between versions."""

SEGMENTS = "expandable_segments:True"

LOADING = "CUDA_MODULE_LOADING"

CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Before Blackwell Megatron demands it where tensor or context parallelism has more than one rank,
whatever the schedule."""


class Setting(NamedTuple):
    """The value of a variable, and why it has it."""

    value: str
    why: str


def settings(
    *, kernels: bool, ordered: bool, graphs: bool = False, registers: bool = False
) -> dict[str, Setting]:
    """Return what a schedule needs, by variable.

    `kernels` says that messages are (on GPUs), `ordered` that what overlaps relies on the order of
    launches, `graphs` that CUDA graphs are captured, and `registers` that NCCL registers buffers,
    which no segment that can grow may hold.
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
    """Return what `environ` lacks of it; what is there is the user's choice and stays.

    So does the allocator's variable in both spellings where it is there in one, and with it what
    is needed beside such segments.
    """
    found = {name: each for name, each in needed.items() if name not in environ}
    if any(name in environ for name in ALLOCATOR):
        for name in (*ALLOCATOR, "NCCL_GRAPH_REGISTER"):
            found.pop(name, None)
    return found


def complete(environ: MutableMapping[str, str], *, kernels: bool, ordered: bool) -> None:
    """Set what a schedule needs and `environ` lacks, where its passes are to be measured."""
    lacking = missing(settings(kernels=kernels, ordered=ordered), environ)
    environ.update({name: value for name, (value, _) in lacking.items()})


def told(found: Mapping[str, Setting]) -> str:
    """Return the variables, each with its value and why, in a line."""
    return ", ".join(f"{name}={value} ({why})" for name, (value, why) in found.items())
