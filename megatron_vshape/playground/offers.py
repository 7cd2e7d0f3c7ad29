"""Choices that the playground offers: tabs, schedules, costs and colors."""

from collections.abc import Collection

from megatron_vshape.core.paper.catalogue import OPTIONS
from megatron_vshape.core.schedule_names import PLUS_NAMES, SCHEDULE_NAMES
from megatron_vshape.playground.picture import palette
from megatron_vshape.view.names import display_name

_TABS = {
    "compare": (
        "Compare",
        "Schedules on one time axis: a shorter timeline is a faster step, a lower purple curve is "
        "less memory.",
    ),
    "timeline": (
        "Timeline",
        "Each row is a rank with its forward (F), input-gradient (B) and weight-gradient (W) "
        "passes; hatched time is idle. The curves below show its activation memory.",
    ),
    "steps": (
        "Four steps",
        "The four steps of the paper: a building block, repeated for every microbatch, squeezed, "
        "and reordered to fill idle time.",
    ),
    "estimate": (
        "Estimate",
        "Peak memory per rank and step time of a training command, estimated by megatron-vshape "
        "rehearse on this machine, without a GPU. The script of the command is not executed, and "
        "no file that the command names is read.",
    ),
}
"""Title and explanation of each tab, in their order; the first one is the start page."""

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


def offers(tabs: Collection[str] = tuple(_TABS)) -> dict[str, object]:
    """Return all data that the playground needs before the first choice.

    Args:
        tabs: Tabs to show; a page without a server has only those whose answers it contains.
    """
    return {
        "tabs": [
            {"name": name, "title": title, "about": about}
            for name, (title, about) in _TABS.items()
            if name in tabs
        ],
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
        "palettes": {"light": palette(), "dark": palette(is_dark=True)},
    }
