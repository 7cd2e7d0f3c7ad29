"""Step 3: redundant idle time is dropped, the order of passes stays."""

from megatron_vshape.core.model.schedule import Schedule, Timeline


def squeeze(timeline: Timeline) -> Schedule:
    """Return the timeline's order without its times.

    An order alone is what every pass starting as early as it can means, for any costs: when that
    is, `simulate` says.
    """
    return timeline.schedule
