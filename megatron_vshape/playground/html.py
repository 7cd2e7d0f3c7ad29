"""Files and choices of the playground, and the playground as one HTML file to share.

The HTML file is self-contained: it needs no server and fetches nothing.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterator
from importlib import resources
from pathlib import Path

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.catalogue import OPTIONS, make_block
from megatron_vshape.core.schedule_names import PLUS_NAMES, SCHEDULE_NAMES
from megatron_vshape.playground.picture import (
    Facts,
    Picture,
    catalogue_name,
    encode,
    palette,
    size_note,
    step_pictures,
    trace_text,
)
from megatron_vshape.view.names import display_name

_MAX_TRACED_PASSES = 30_000
"""Maximum passes for an embedded Perfetto trace, which is ten times larger than all else."""

_MAX_PASSES_WITH_STEPS = 30_000
"""Maximum passes for which the four steps are embedded."""

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_IMPORT = re.compile(r'^import (?:\{[^}]*\} from )?"\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const)", re.MULTILINE)
_TOP = re.compile(r"^(?:async )?(?:function\*? |class |const |let )(\w+)", re.MULTILINE)


def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the served files by name, with their media types; no other file is ever served."""
    files = {}
    for resource in resources.files("megatron_vshape.playground").joinpath("static").iterdir():
        suffix = "." + resource.name.rpartition(".")[2]
        if resource.is_file() and suffix in _MEDIA_TYPES:
            files[resource.name] = (resource.read_bytes(), _MEDIA_TYPES[suffix])
    return files


def write_html(path: Path, timeline: Timeline, costs: Costs, facts: Facts) -> None:
    """Write the playground with this timeline to `path`.

    `facts` specifies the unit of the costs, and may add a limit and a lower bound (see
    `plain_facts`).
    """
    path.write_text(html_text(timeline, costs, facts), encoding="utf-8")


def plain_facts(
    timeline: Timeline, *, in_bytes: bool = False, base_peak: float | None = None
) -> Facts:
    """Return the context of any timeline; the arguments are those of `Facts`."""
    schedule = timeline.schedule
    return Facts(
        in_bytes=in_bytes,
        base_peak=base_peak,
        title=display_name(schedule.name),
        note=size_note(schedule),
        train=catalogue_name(schedule),
    )


def html_text(timeline: Timeline, costs: Costs, facts: Facts) -> str:
    """Return the content of `write_html`."""
    schedule = timeline.schedule
    picture = Picture(timeline, costs, facts)
    answers = {"timeline": encode([picture])}
    if _size(schedule) <= _MAX_PASSES_WITH_STEPS and catalogue_name(schedule):
        block = make_block(schedule.name, schedule.num_devices, schedule.num_microbatches)
        answers["steps"] = encode(list(step_pictures(block, schedule)))
    texts = {"schedule-file": schedule.to_json().encode()}
    if _size(schedule) <= _MAX_TRACED_PASSES:
        texts["trace-file"] = trace_text(picture).encode()
    data = {
        "offers": offers(answers),
        "state": {
            "devices": schedule.num_devices,
            "microbatches": schedule.num_microbatches,
            "name": schedule.name,
        },
        "answers": {kind: _packed(answer) for kind, answer in answers.items()},
        "texts": {kind: _packed(text) for kind, text in texts.items()},
    }
    return _page(data)


def _size(schedule: Schedule) -> int:
    return sum(map(len, schedule.order))


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _page(data: dict[str, object]) -> str:
    """Return index.html with embedded style, modules and data, and a policy for these only."""
    files = {name: content.decode() for name, (content, _) in static_files().items()}
    script = _bundle(files)
    style = files["style.css"]
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    icon = "data:image/svg+xml;base64," + base64.b64encode(files["icon.svg"].encode()).decode()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    replacements = {
        '<link rel="icon" href="/static/icon.svg">': f'<link rel="icon" href="{icon}">',
        '<link rel="stylesheet" href="/static/style.css">': f"<style>{style}</style>",
        '<script type="module" src="/static/app.js"></script>': (
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        ),
        "</body>": (
            f'<script type="application/json" id="embedded">{embedded}</script>\n'
            f'<script type="module">{script}</script>\n</body>'
        ),
    }
    page = files["index.html"]
    for old, new in replacements.items():
        if page.count(old) != 1:
            raise ScheduleError(f"the page's index.html has not one {old}; reinstall the package")
        page = page.replace(old, new)
    return page


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _bundle(files: dict[str, str]) -> str:
    """Concatenate the modules in import order.

    They import by name without renaming, so imports and exports can be removed if all top-level
    names are unique.
    """
    parts, owner = [], dict[str, str]()
    for name in _ordered("app", files, {}):
        text = _EXPORT.sub("", _IMPORT.sub("", files[f"{name}.js"]))
        for top_level_name in _TOP.findall(text):
            owner_name = owner.setdefault(top_level_name, name)
            if owner_name != name:
                raise ScheduleError(
                    f"{top_level_name} stands in {owner_name}.js and in {name}.js; rename one"
                )
        parts.append(text)
    script = "\n".join(parts)
    if "</script" in script:
        raise ScheduleError("a module of the page contains </script, which would end it")
    return script


def _ordered(name: str, files: dict[str, str], visited: dict[str, bool]) -> Iterator[str]:
    if name in visited:
        return
    visited[name] = True
    for imported in _IMPORT.findall(files[f"{name}.js"]):
        yield from _ordered(imported, files, visited)
    yield name


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
