"""What the process of a rank needs in its environment, and how it comes to have it.

`megatron_vshape.mcore`, which every rank imports, completes its own process's before it imports
torch. Whoever starts a script of somebody else's, which may import torch first, completes what that
inherits.
"""

from collections.abc import Mapping

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""How torch spells the allocator's variable: at first the one way, later the other too, and which
of the two wins has changed between versions."""

SEGMENTS = "expandable_segments:True"
"""Less is lost to fragmentation, and memory is seldom given back, which waits for the device."""

WITH_SEGMENTS = {"NCCL_GRAPH_REGISTER": "0"}
"""NCCL would register such segments where a CUDA graph is captured, and read where nothing is;
Megatron captures none without this."""

OTHERS = {
    # A kernel's first launch may load it, which waits for the whole device: for a receive that
    # waits for its sender, too. Read when CUDA starts.
    "CUDA_MODULE_LOADING": "EAGER",
    # Tensor parallelism needs this order of launches on a GPU before Blackwell.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def missing(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what `environ` lacks; what is there is the user's choice and stays.

    So does the allocator's variable in both spellings where it is there in one.
    """
    found = {name: value for name, value in OTHERS.items() if name not in environ}
    if not any(name in environ for name in ALLOCATOR):
        found |= dict.fromkeys(ALLOCATOR, SEGMENTS)
        found |= {name: value for name, value in WITH_SEGMENTS.items() if name not in environ}
    return found
