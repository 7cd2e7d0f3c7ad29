"""Choices that the playground offers: schedules, costs and colors."""

from megatron_vshape.core.paper.catalogue import OPTIONS
from megatron_vshape.core.request import PLUS_NAMES, SCHEDULE_NAMES
from megatron_vshape.playground.picture import palette
from megatron_vshape.view.names import display_name

# F, B, W and communication of one chunk, half of what arXiv 2401.10241 measured per stage; ms.
_PRESETS: tuple[dict[str, object], ...] = (
    {"key": "unit", "title": "Unit: F = B = W = 1", "unit": "", "cost": [1, 1, 1, 0]},
    {
        "key": "zb-1.5b",
        "title": "Zero Bubble paper, 1.5B",
        "unit": "ms",
        "cost": [9.25, 9.05, 4.65, 0.6],
    },
    {
        "key": "zb-28.3b",
        "title": "Zero Bubble paper, 28.3B",
        "unit": "ms",
        "cost": [5.2, 5.1, 3.85, 0.41],
    },
)


def offers() -> dict[str, object]:
    """Return all data that the playground needs before the first choice."""
    return {
        "schedules": [
            {
                "name": name,
                "title": display_name(name),
                "has_chunks": name in OPTIONS,
                "planned": name in PLUS_NAMES,
            }
            for name in SCHEDULE_NAMES
        ],
        "presets": _PRESETS,
        "palette": palette(),
    }
