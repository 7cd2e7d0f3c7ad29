"""megatron-vshape doctor --recipe: what becomes of a configuration, before anything is run."""

import difflib
import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.files import parse_object, read_text
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.recipes import Examined

PUBLISHED = Path(__file__).parents[2] / "tests" / "data" / "bridge_recipes.json"
"""Megatron-Bridge's recipes, in a checkout; an installed package knows no recipe by its name."""

STARTS, DOES_NOT_START = 0, 1
WIDTH = 100


def show(recipe: str, schedule: str) -> int:
    """Print what becomes of the options of a recipe, a name or a file; return 0 if it starts.

    Raises:
        ScheduleError: there is no such recipe, or it is no pipeline's configuration.
    """
    statuses = [_show(title, options, schedule) for title, options in _found(recipe)]
    return max(statuses)


def _found(recipe: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Return the options of the file, or of every published recipe of that name."""
    if recipe.endswith(".json") or Path(recipe).is_file():
        return [(recipe, parse_object(read_text(recipe, "--recipe"), f"--recipe {recipe}"))]
    if not PUBLISHED.is_file():
        raise ScheduleError(
            f"--recipe {recipe} is no file, and names of published recipes are known in a checkout "
            "of megatron-vshape only: give a JSON file with the configuration's options"
        )
    published = json.loads(PUBLISHED.read_text())["recipes"]
    found = [
        (f"{each['recipe']} ({each['file']})", each["options"])
        for each in published
        if each["recipe"] == recipe
    ]
    if not found:
        near = difflib.get_close_matches(recipe, [each["recipe"] for each in published], 3, 0.0)
        raise ScheduleError(
            f"--recipe {recipe} is neither a file nor a published recipe; near are "
            f"{', '.join(near)}"
        )
    return found


def _show(title: str, options: Mapping[str, Any], schedule: str) -> int:
    from megatron_vshape.mcore.setup.recipes import DEVICES, examine, flattened, placement_of

    flat = flattened(options)
    devices = flat.get(DEVICES, 1)
    if not isinstance(devices, int) or devices < 2:
        raise ScheduleError(f"{title} has {DEVICES} {devices!r:.40}: there is nothing to schedule")
    placement = placement_of(schedule, devices)
    try:
        examined = examine(flat, placement)
    except (TypeError, AttributeError) as error:
        raise ScheduleError(f"{title} has a value that no option takes: {error}") from None
    print(_told(title, examined, schedule, placement))
    return STARTS if examined.starts else DOES_NOT_START


def _told(title: str, examined: "Examined", schedule: str, placement: Placement) -> str:
    """Return the sections, and the verdict."""
    devices = max(placement) + 1
    notices = {
        outcome: [str(each) for each in examined.notices if each.outcome == outcome]
        for outcome in ("translated", "set aside")
    }
    sections = {
        **notices,
        "supported": [", ".join(examined.supported)],
        "refused": [f"{each.told}: {each.why}" for each in examined.refused],
    }
    lines = [title, f"{schedule}: {devices} devices, {len(placement)} stages"]
    for name, entries in sections.items():
        if any(entries):
            lines += ["", name, *_wrapped(entries)]
    verdict = f"starts with {schedule}" if examined.starts else f"does not start with {schedule}"
    return "\n".join([*lines, "", verdict])


def _wrapped(entries: Iterable[str]) -> list[str]:
    shape = textwrap.TextWrapper(
        WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
    return [line for entry in entries for line in shape.wrap(entry)]
