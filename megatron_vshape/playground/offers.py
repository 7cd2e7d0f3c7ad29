"""What the page offers to choose from: schedules, costs, files, colours."""

from collections.abc import Sequence

from megatron_vshape.core.paper.catalogue import NAMES, OPTIONS
from megatron_vshape.playground.given import Given
from megatron_vshape.playground.payload import palette
from megatron_vshape.playground.request import PLAN_CHUNKS
from megatron_vshape.view.names import display_name

# F, B, W and communication of one chunk, half of what arXiv 2401.10241 measured per stage; ms.
PRESETS: tuple[dict[str, object], ...] = (
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


def offers(given: Sequence[Given] = ()) -> dict[str, object]:
    """Return everything that the page needs before the first choice."""
    return {
        "schedules": [
            {"name": name, "title": display_name(name), "options": sorted(OPTIONS.get(name, ()))}
            for name in NAMES
        ],
        "presets": PRESETS,
        "files": [
            {
                "key": each.key,
                "sort": each.sort,
                "name": each.file.name,
                "preset": each.preset,
                **each.detail,
            }
            for each in given
        ],
        "palette": palette(),
        "plan_chunks": sorted(PLAN_CHUNKS, reverse=True),
    }
