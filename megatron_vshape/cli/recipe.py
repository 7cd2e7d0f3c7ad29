"""megatron-vshape doctor --recipe: what becomes of a configuration, before anything is run."""

import difflib
import json
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.files import parse_object, read_text
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.saved_config import silence

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.recipes import Examined

PUBLISHED = Path(__file__).parents[2] / "tests" / "data" / "bridge_recipes.json"
"""Megatron-Bridge's recipes, in a checkout; an installed package knows no recipe by its name."""

USUAL = "v-half"
"""The schedule, where neither the command nor the recipe names one."""

STARTS, DOES_NOT_START = 0, 1
WIDTH = 100


def show(recipe: str, schedule: str | None) -> int:
    """Print what becomes of the options of a recipe, a name or a file; return 0 if it starts.

    Without `schedule` it is the recipe's own, or else V-Half.

    Raises:
        ScheduleError: there is no such recipe, or it is no pipeline's configuration.
    """
    found = _found(recipe)
    known, missing = _megatron()
    return max(_show(*each, schedule, known, missing) for each in found)


def _found(recipe: str) -> Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Return title, options and defaults of the file, or of every published recipe of that name.

    What a published one leaves out its library knows, by the name of the model.
    """
    from megatron_vshape.mcore.setup.recipes import DEFAULTS

    if recipe.endswith(".json") or Path(recipe).is_file():
        options = parse_object(read_text(recipe, "--recipe"), f"--recipe {recipe}")
        return [(recipe, options, DEFAULTS)]
    if not PUBLISHED.is_file():
        raise ScheduleError(
            f"--recipe {recipe} is no file, and names of published recipes are known in a checkout "
            "of megatron-vshape only: give a JSON file with the configuration's options"
        )
    published = json.loads(PUBLISHED.read_text())["recipes"]
    found: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        (f"{each['recipe']} ({each['file']})", each["options"], {})
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


def _megatron() -> tuple[Collection[str] | None, str | None]:
    """Return the names of all options, or why they are not known."""
    try:
        with silence():
            from megatron_vshape.mcore import cpu
            from megatron_vshape.mcore.setup.recipes import known_names

            if "megatron.core" not in sys.modules:
                cpu.install()
            return known_names(), None
    except ImportError as error:
        why = f"whether megatron-core has these options is not known: {error}"
        return None, why


def _show(
    title: str,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    schedule: str | None,
    known: Collection[str] | None,
    missing: str | None,
) -> int:
    from megatron_vshape.mcore.setup.recipes import DEVICES, examine, flattened, own_options

    flat = flattened(options)
    devices = flat.get(DEVICES, 1)
    if not isinstance(devices, int) or devices < 2:
        raise ScheduleError(f"{title} has {DEVICES} {devices!r:.40}: there is nothing to schedule")
    try:
        own = own_options({"pipeline_schedule": USUAL, **flat}, schedule)
        examined = examine(flat, own, defaults, known)
    except (TypeError, AttributeError) as error:
        raise ScheduleError(f"{title} has a value that no option takes: {error}") from None
    lacks = [each.why for each in examined.missing] + ([] if missing is None else [missing])
    name = str(own.schedule)
    print(f"{title}\n{name}: {devices} devices, {examined.num_stages} stages")
    for section, entries in _sections(examined, known or ()).items():
        if any(entries):
            print("\n".join(["", section, *_wrapped(entries)]))
    print("\n" + "\n".join(_wrapped(_verdict(examined, name, lacks), "")))
    return STARTS if examined.starts and not lacks else DOES_NOT_START


def _sections(examined: "Examined", known: Collection[str]) -> dict[str, list[str]]:
    """Return what is told of the options, by the titles of the sections."""
    unknown = []
    for name in examined.unknown:
        near = difflib.get_close_matches(name, sorted(known), 1)
        unknown.append(
            f"{name}: no option of Megatron or this package has the name"
            + (f"; near is {near[0]}" if near else "")
        )
    return {
        **{
            outcome: [str(each) for each in examined.notices if each.outcome == outcome]
            for outcome in ("translated", "set aside")
        },
        "supported": [", ".join(examined.supported)],
        "slower": list(examined.warnings),
        "refused": [each.why for each in examined.refused],
        "unknown": unknown,
    }


def _verdict(examined: "Examined", schedule: str, lacks: Sequence[str]) -> list[str]:
    """Return whether it starts, and what that waits for."""
    if examined.refused or examined.unknown:
        return [f"does not start with {schedule}"]
    waits = list(lacks)
    if not examined.counts_layers:
        waits.insert(
            0, f"the layers have to fit {examined.num_stages} stages, and num_layers is not given"
        )
    if not waits:
        return [f"starts with {schedule}"]
    return [f"does not start with {schedule} here:", *(f"  {each}" for each in waits)]


def _wrapped(entries: Iterable[str], indent: str = "  ") -> list[str]:
    shape = textwrap.TextWrapper(
        WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
    return [line for entry in entries for line in shape.wrap(entry)]
