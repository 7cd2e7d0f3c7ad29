"""Step 3 (squeeze): remove redundant idle time, and keep the pass order."""

from megatron_vshape.core.model.schedule import Schedule, Timeline


def squeeze(timeline: Timeline) -> Schedule:
    """Return the timeline's pass order without its times.

    In a schedule without times, every pass starts as early as it can, for any costs; `simulate`
    computes the times.
    """
    return timeline.schedule
