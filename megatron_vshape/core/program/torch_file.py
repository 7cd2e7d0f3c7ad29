"""Schedule files of torch.distributed.pipelining, torchtitan and NeMo Automodel."""

import csv
import io

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, looping, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.torch_csv import TORCH_LETTERS, step_to_cell


def find_torch_name(placement: Placement, num_devices: int) -> str | None:
    """Return torch's schedule with this placement; None if it has none.

    torchtitan 0.3.0 (distributed/pipeline_parallel.py:552) and NeMo Automodel 0.7.0
    (components/distributed/pipelining/functional.py:823) derive the stages of a rank from the name.

    >>> find_torch_name((0, 1, 1, 0), 2)
    'ZBVZeroBubble'
    """
    num_chunks = len(placement) // num_devices
    if placement == looping(num_devices, num_chunks):
        return "1F1B" if num_chunks == 1 else "Interleaved1F1B"
    return "ZBVZeroBubble" if placement == v_shape(num_devices) else None


def to_torch_csv(schedule: Schedule) -> str:
    """Return one line per rank; torch adds the messages when it loads the file.

    >>> from megatron_vshape import make
    >>> print(to_torch_csv(make("1f1b", 2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

    Raises:
        ScheduleError: the schedule has sequence slices, or passes that torch does not have.
    """
    if schedule.slices > 1:
        raise ScheduleError(
            f"--format torch does not support {schedule.slices} slices per microbatch, because "
            "torch.distributed.pipelining has no slices: use a schedule without slices"
        )
    other_kinds = sorted(schedule.kinds - TORCH_LETTERS.keys())
    if other_kinds:
        labels = ", ".join(f"{kind} ({kind.label})" for kind in other_kinds)
        raise ScheduleError(
            f"--format torch does not support the passes {labels}, because "
            "torch.distributed.pipelining has only F, B, W and BW: plan without offloading and "
            "vocabulary parallelism"
        )
    text = io.StringIO()
    rows = [map(step_to_cell, schedule.steps(device)) for device in range(schedule.num_devices)]
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
