"""Shades of the passes' colors, the same in a figure and in its legend."""

from megatron_vshape.core.model.kinds import Kind

HELD_COLOUR = "#6a6699"
"""Memory color of chunk 0: grey, as no pass has it."""

LIGHTEST = 0.62
"""Share of white in the shade of the last chunk; dark text is readable on it."""

_WHITE = 255


def shade(kind: Kind, chunk: int, num_chunks: int) -> str:
    """Return the color `#rrggbb` of a simple pass; later chunks are lighter."""
    return tint(kind.colour, chunk, num_chunks)


def tint(colour: str, chunk: int, num_chunks: int) -> str:
    """Return the color mixed with white, more for later chunks; chunk 0 has the color itself."""
    white = LIGHTEST * chunk / max(num_chunks - 1, 1)
    levels = _levels(colour)
    return "#" + "".join(f"{round(level + (_WHITE - level) * white):02x}" for level in levels)


def ink(colour: str) -> str:
    """Return the text color, near-black or white, with better contrast on `colour`."""
    luminance = _luminance(colour)
    on_white = (1.05) / (luminance + 0.05)  # contrast of white text according to WCAG 2
    return "#ffffff" if on_white >= 4 else "#1a1a1a"


def _levels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    def linear(level: int) -> float:
        part = level / _WHITE
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    red, green, blue = map(linear, _levels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
