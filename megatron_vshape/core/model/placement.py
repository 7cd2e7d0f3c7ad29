"""Placements: a tuple with the device of every stage, in model order."""

from collections import Counter
from collections.abc import Sequence

from megatron_vshape.core.model.kinds import ScheduleError

Placement = tuple[int, ...]


def linear(num_devices: int) -> Placement:
    """One stage per device, in order: 1F1B, GPipe, ZB-H1."""
    return tuple(range(num_devices))


def looping(num_devices: int, num_chunks: int) -> Placement:
    """`num_chunks` rounds over the devices: interleaved 1F1B."""
    return tuple(range(num_devices)) * num_chunks


def v_shape(num_devices: int) -> Placement:
    """There and back, which pairs long with short lifespans (arXiv 2405.15362, section 3)."""
    return zigzag(num_devices, 2)


def zigzag(num_devices: int, num_chunks: int) -> Placement:
    """`num_chunks` rounds over the devices in alternating directions; two are the V.

    As in the V, the lifespans of a device's chunks add up to about the same on every device, but
    warm-up and cool-down are shorter, because a chunk is smaller.
    """
    devices = range(num_devices)
    return tuple(
        device
        for chunk in range(num_chunks)
        for device in (reversed(devices) if chunk % 2 else devices)
    )


def default_placements(num_devices: int, num_stages: int, trades: bool = False) -> list[Placement]:
    """Return the placements to plan for with costs of `num_stages` stages.

    With `trades` (copies may reduce memory), they include the loop of two chunks: the first chunk
    of each device has the longest lifespan, so copies of it are worth most.

    Raises:
        ScheduleError: the stages cannot be distributed over the devices.
    """
    if not 1 <= num_devices <= num_stages or num_stages % num_devices:
        raise ScheduleError(f"{num_stages} stages cannot be distributed over {num_devices} devices")
    chunks = num_stages // num_devices
    if chunks == 1:
        return [linear(num_devices)]
    loop = looping(num_devices, chunks)
    # Smaller chunks than those of a V allow shorter warm-up and cool-down in the same memory.
    zigzags = [zigzag(num_devices, chunks)] if chunks > 2 and not trades else []
    if chunks % 2:
        return [loop, *zigzags]
    loop_of_two = [looping(num_devices, 2)] if trades and chunks > 2 else []
    return [v_shape(num_devices), *loop_of_two, *zigzags, loop]


def with_loss_last(placement: Placement) -> tuple[int, ...]:
    """Return new device numbers that put the last stage on the last device, where losses are read.

    A V, which starts and ends on the first device, is reversed, so that neighbors stay neighbors.
    Other placements swap two devices.
    """
    last_device, loss_device = max(placement), placement[-1]
    if loss_device == 0:
        return tuple(reversed(range(last_device + 1)))
    numbers = list(range(last_device + 1))
    numbers[loss_device], numbers[last_device] = last_device, loss_device
    return tuple(numbers)


def stages_of(placement: Placement, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every device, in model order; a stage's index there is its chunk."""
    stages_by_device: list[list[int]] = [[] for _ in range(num_devices)]
    for stage, device in enumerate(placement):
        stages_by_device[device].append(stage)
    return tuple(map(tuple, stages_by_device))


def chunks_of(placement: Placement) -> tuple[int, ...]:
    """Return the chunk of every stage: the number of earlier stages on its device."""
    chunk_counts: dict[int, int] = {}
    chunks = []
    for device in placement:
        chunks.append(chunk_counts.get(device, 0))
        chunk_counts[device] = chunks[-1] + 1
    return tuple(chunks)


def check_placement(placement: Placement, num_devices: int) -> None:
    """Raise ScheduleError unless each of `num_devices` devices has the same number of stages."""
    for stage, device in enumerate(placement):
        if not 0 <= device < num_devices:
            raise ScheduleError(
                f"the placement puts stage {stage} on device {device}; "
                f"there are {num_devices} devices, counted from 0"
            )
    stages_per_device, remainder = divmod(len(placement), num_devices)
    if remainder or not stages_per_device:
        raise ScheduleError(
            f"the placement has {len(placement)} stages for {num_devices} devices; "
            "all devices need the same number"
        )
    for device, count in Counter(placement).items():
        if count != stages_per_device:
            raise ScheduleError(
                f"the placement puts {count} of {len(placement)} stages on device {device}; "
                f"every one of the {num_devices} devices need {stages_per_device}"
            )


def message_us(
    send_us: float, more_send_us: Sequence[float], stage: int, other_stage: int
) -> float:
    """Return the time of a message between stages on two devices, in either direction.

    `more_send_us` is added to `send_us` at the boundary behind each stage; it may be empty.
    """
    if not more_send_us or abs(stage - other_stage) != 1:
        return send_us
    return send_us + more_send_us[min(stage, other_stage)]
