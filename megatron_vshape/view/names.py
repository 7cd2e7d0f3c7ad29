"""Display names of schedules, and the colors of passes."""

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.placement import linear, looping, v_shape, zigzag
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import EVERY_NAME

_WORDS = {"1f1b": "1F1B", "gpipe": "GPipe", "zb": "ZB", "h1": "H1", "h2": "H2"}
_WORDS["dualpipev"] = "DualPipeV"
_LONGEST = 60


def display_name(name: str) -> str:
    """Return the paper's spelling of a catalogue name; another name is only made printable."""
    base_name, colon, chunks = name.partition(":")
    plain_name = base_name.rstrip("+")
    if plain_name not in EVERY_NAME:
        return plain(name)
    words = "-".join(_WORDS.get(word, word.capitalize()) for word in plain_name.split("-"))
    return words + plain(base_name[len(plain_name) :] + colon + chunks)


def plain(name: str) -> str:
    """Make a name safe for a terminal and a figure: printable, one line, short."""
    text = "".join(character if character.isprintable() else "?" for character in name)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def placement_text(schedule: Schedule) -> str:
    """Format the number of stages per rank and the placement."""
    chunks = schedule.num_chunks
    unit = "chunk" if chunks == 1 else "chunks"
    return f"{chunks} {unit} per rank, {shape_text(schedule)}"


def shape_text(schedule: Schedule) -> str:
    """Format the placement of the stages."""
    devices, chunks = schedule.num_devices, schedule.num_chunks
    shapes = {
        linear(devices): "linear",
        looping(devices, max(chunks, 2)): "looping",
        zigzag(devices, max(chunks, 3)): "zigzag",
        v_shape(devices): "V-shaped",
    }
    return shapes.get(schedule.placement, "custom placement")


HELD_COLOUR = "#6a6699"
"""Memory color of chunk 0: grey, as no pass has it."""

_PALEST, _PALEST_ON_DARK = 0.62, 0.46
"""Share of the background in the shade of the last chunk; text is readable on it."""

_WHITE, _DARK_BACKGROUND = "#ffffff", "#111315"

_LIFT = 0.22
"""Share of white in all shades on a dark background."""


def shade(kind: Kind, chunk: int, num_chunks: int, *, is_dark: bool = False) -> str:
    """Return the color `#rrggbb` of a simple pass; later chunks are closer to the background."""
    if not is_dark:
        return tint(kind.colour, chunk, num_chunks)
    share = _PALEST_ON_DARK * chunk / max(num_chunks - 1, 1)
    return mix(mix(kind.colour, _WHITE, _LIFT), _DARK_BACKGROUND, share)


def tint(colour: str, chunk: int, num_chunks: int) -> str:
    """Return the color mixed with white, more for later chunks; chunk 0 has the color itself."""
    return mix(colour, _WHITE, _PALEST * chunk / max(num_chunks - 1, 1))


def mix(colour: str, second_colour: str, share: float) -> str:
    """Return the color with this share of another one."""
    pairs = zip(_levels(colour), _levels(second_colour), strict=True)
    return "#" + "".join(f"{round(level + (goal - level) * share):02x}" for level, goal in pairs)


def ink(colour: str) -> str:
    """Return the text color, near-black or white, with better contrast on `colour`."""
    return _WHITE if contrast(colour, _WHITE) >= 4 else "#1a1a1a"


def contrast(colour: str, second_colour: str) -> float:
    """Return the contrast of two colors according to WCAG 2, 1 to 21."""
    low, high = sorted((_luminance(colour), _luminance(second_colour)))
    return (high + 0.05) / (low + 0.05)


def _levels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    def linear(level: int) -> float:
        part = level / 255
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    red, green, blue = map(linear, _levels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
