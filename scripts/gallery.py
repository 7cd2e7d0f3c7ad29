"""Draw all published schedules and write a Markdown page of them, or the figures of the README.

    python scripts/gallery.py [FOLDER] [--devices D] [--microbatches M]
    python scripts/gallery.py --readme

The page (docs/gallery/README.md unless FOLDER is given) has the building
block, the passes and the memory per device of every schedule, after a table of all and the paper's
theory table. Everything is computed. A new folder gets a .gitignore, because
one command creates it again. `--readme` writes docs/figures, which is committed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import theory_table
from matplotlib.figure import Figure
from theory import THEORY

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.paper.catalogue import NAMES, make, make_block
from megatron_vshape.view.figure import Limit, comparison_figure, save, schedule_figure
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import base_peak, comparison_rows, note, numbers_of

ROOT = Path(__file__).resolve().parent.parent
README_NAMES = ("1f1b", "v-min", "v-half", "v-zb")
README_SIZE = (4, 8)

PAGE = """# Gallery

Every schedule of the catalogue for {devices} ranks and {microbatches} microbatches, drawn by
`scripts/gallery.sh`. Forward, input gradient and weight gradient of a chunk need one unit of time
each, messages none. A chunk is 1/{chunks} of the model; the peak of 1F1B is {base:g} chunks.

{table}

## Theory

Memory in units of M, the peak of 1F1B; bubble in passes of one chunk, for d ranks. Without a
barrier between steps, the next step's passes fill a step's bubble.

{theory}

## On one time axis

![All schedules, one above the other](all.svg)
"""

SECTION = """
## {title}

{note}

![The building block of {title}, its schedule and the memory of every rank]({name}.svg)
"""


def write_page(folder: Path, num_devices: int, num_microbatches: int) -> None:
    """Write the figures of all published schedules and the page that shows them into `folder`."""
    timelines = [simulate(make(name, num_devices, num_microbatches)) for name in NAMES]
    numbers = [numbers_of(timeline) for timeline in timelines]
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n")
    sections = []
    for timeline, timeline_numbers in zip(timelines, numbers, strict=True):
        name = timeline.schedule.name
        draw(timeline, folder / f"{name}.svg")
        sections.append(
            SECTION.format(title=display_name(name), note=note(timeline_numbers), name=name)
        )
    save(compare(timelines), folder / "all.svg")
    page = PAGE.format(
        devices=num_devices,
        microbatches=num_microbatches,
        chunks=2 * num_devices,
        base=base_peak(num_devices),
        table=theory_table.markdown(comparison_rows(numbers)),
        theory=theory_table.table(THEORY, theory_table.DEVICES),
    )
    (folder / "README.md").write_text(page + "".join(sections), encoding="utf-8")


def write_readme_figures(folder: Path) -> None:
    """Write the figures of the README: its schedules, and all of them on one time axis."""
    folder.mkdir(parents=True, exist_ok=True)
    timelines = [simulate(make(name, *README_SIZE)) for name in README_NAMES]
    for timeline in timelines:
        draw(timeline, folder / f"{timeline.schedule.name}.svg")
    save(compare(timelines), folder / "schedules.svg")


def draw(timeline: Timeline, path: Path) -> None:
    """Draw a schedule with its block, and 1F1B's memory as the limit."""
    schedule = timeline.schedule
    sizes = (schedule.num_devices, schedule.num_microbatches)
    block = make_block(schedule.name, *sizes)
    is_full_schedule = block.num_microbatches == schedule.num_microbatches
    figure = schedule_figure(
        timeline,
        note=f"{sizes[0]} ranks, {sizes[1]} microbatches · {note(numbers_of(timeline))}",
        block=None if is_full_schedule else block,
        limit=Limit(base_peak(schedule.num_devices), "peak of 1F1B"),
    )
    save(figure, path)


def compare(timelines: Sequence[Timeline]) -> Figure:
    """Return the figure of all timelines on one axis."""
    names = [timeline.schedule.name for timeline in timelines]
    return comparison_figure(
        timelines, names, [note(numbers_of(timeline)) for timeline in timelines]
    )


def main() -> int:
    """Write the requested files; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "gallery")
    parser.add_argument("--devices", type=int, metavar="D", default=8)
    parser.add_argument("--microbatches", type=int, metavar="M", default=16)
    parser.add_argument("--readme", action="store_true", help="write docs/figures instead")
    options = parser.parse_args()
    try:
        if options.readme:
            write_readme_figures(ROOT / "docs" / "figures")
        else:
            write_page(options.folder, options.devices, options.microbatches)
    except (ScheduleError, OSError) as error:
        print(f"gallery.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
