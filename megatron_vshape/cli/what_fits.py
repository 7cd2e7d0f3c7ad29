"""Whether the stages that `profile` builds fit into memory, told before the system ends it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.view.numbers import GIB

if TYPE_CHECKING:
    from megatron_vshape.mcore.one_device import Model

GRADIENT_BYTES = 4
"""Of a parameter's gradient in the buffer of Megatron's DDP, as profile has it."""

TRIED = 10
"""So often a size is doubled, or halved, to find one that fits."""


def check_memory(
    model: "Model",
    layers: Sequence[int],
    devices: int,
    split: Callable[[int], Sequence[int]],
) -> None:
    """Check that the largest stage may fit into this machine; `split` deals layers to devices.

    On a GPU torch says so itself; a process that asks the system for too much is killed by it.

    Raises:
        ScheduleError: it cannot; says what it takes at least, what there is, and what would fit.
    """
    from megatron_vshape.runtime.host_memory import free_host_bytes

    free = free_host_bytes()
    need = least_bytes(model, layers)
    if free is None or need <= free:
        return
    ways = _that_fit(model, layers, devices, split, free)
    smaller = " or ".join(ways) if ways else "a smaller model, a shorter sequence"
    raise ScheduleError(
        f"a stage of {max(layers)} layers needs at least {need / GIB:,.1f} GiB, and "
        f"{free / GIB:,.1f} GiB are free per rank: try {smaller}"
    )


def least_bytes(model: "Model", layers: Sequence[int]) -> int:
    """Return what the largest stage takes at least to run one microbatch.

    Parameters, their gradients, and of activations what any layer keeps: more is kept, too.
    """
    own, last = model.alone(), len(layers) - 1
    size = own.torch_dtype.itemsize
    tokens = own.sequence_length * own.microbatch_size
    ends = own.vocabulary_size * own.hidden_size * (size + GRADIENT_BYTES)
    layer = _layer_parameters(own) * (size + GRADIENT_BYTES) + _layer_kept(own) * size
    logits = tokens * own.vocabulary_size * (size + 4)  # and their gradient in fp32
    return max(
        count * layer + ends * ((at == 0) + (at == last)) + logits * (at == last)
        for at, count in enumerate(layers)
    )


def _layer_parameters(own: "Model") -> int:
    width = own.hidden_size
    heads = (own.head_size or 0) * (2 * own.attention_heads + 2 * (own.query_groups or 0))
    matrices = 3 if own.gated else 2
    if own.experts is None:
        return width * (heads + matrices * (own.ffn_hidden_size or 4 * width))
    experts = own.experts
    wide = experts.count * experts.ffn_hidden_size + (experts.shared_ffn_hidden_size or 0)
    return width * (heads + matrices * wide + experts.count)


def _layer_kept(own: "Model") -> int:
    """Return how many numbers a layer keeps of a microbatch for its backward, at least."""
    tokens = own.sequence_length * own.microbatch_size
    heads = (own.head_size or 0) * (2 * own.attention_heads + 2 * (own.query_groups or 0))
    in_mlp = 2 * (own.ffn_hidden_size or 4 * own.hidden_size)
    if own.experts is not None:
        in_mlp = own.experts.per_token * (2 * own.experts.ffn_hidden_size + own.hidden_size)
        in_mlp += 2 * (own.experts.shared_ffn_hidden_size or 0)
    scores = 0 if own.flash_attention else own.attention_heads * own.sequence_length
    # What both norms read, queries, keys and values and what comes of them, and what stands before
    # and after the function in an MLP, of experts beside the tokens that go to them.
    return tokens * (2 * own.hidden_size + heads + in_mlp + scores)


def _that_fit(
    model: "Model",
    layers: Sequence[int],
    devices: int,
    split: Callable[[int], Sequence[int]],
    free: float,
) -> list[str]:
    """Return options in place of those given, of each the smallest change that may fit."""
    double = [2**times for times in range(1, TRIED)]
    lengths = [2**power for power in range(model.sequence_length.bit_length() - 1, 5, -1)]
    ways: dict[str, list[tuple[int, Model, Sequence[int] | None]]] = {
        "devices": [(devices * each, model, None) for each in double],
        "seq-length": [(each, replace(model, sequence_length=each), layers) for each in lengths],
    }
    for name in ("expert_parallel", "tensor_parallel"):
        sizes = [getattr(model, name) * each for each in double]
        if name == "tensor_parallel" or model.experts is not None:
            ways[name.replace("_", "-")] = [
                (each, replace(model, **{name: each}), layers) for each in sizes
            ]
    found: dict[str, int] = {}
    for name, tried in ways.items():
        for size, smaller, dealt in tried:
            with suppress(ScheduleError):  # what does not divide
                need = least_bytes(smaller, split(size) if dealt is None else dealt)
                if need <= free:
                    found.setdefault(name, size)
    return [f"--{name} {size}" for name, size in found.items()]
