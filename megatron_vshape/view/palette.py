"""Shades of the kinds' colours, the same in a figure and in its legend."""

from megatron_vshape.core.model.kinds import Kind

HELD_COLOUR = "#6a6699"
"""Colour of the memory of chunk 0: grey, unlike any pass."""

LIGHTEST = 0.62
"""The share of white in the last chunk's shade; dark text reads well on it."""

_WHITE = 255


def shade(kind: Kind, chunk: int, num_chunks: int) -> str:
    """Return the colour `#rrggbb` of a simple pass; later chunks are lighter."""
    return tint(kind.colour, chunk, num_chunks)


def tint(colour: str, chunk: int, num_chunks: int) -> str:
    """Return the colour mixed with more white the later the chunk; chunk 0's is the colour."""
    white = LIGHTEST * chunk / max(num_chunks - 1, 1)
    levels = _levels(colour)
    return "#" + "".join(f"{round(level + (_WHITE - level) * white):02x}" for level in levels)


def ink(colour: str) -> str:
    """Return the text colour, near-black or white, that reads better on `colour`."""
    luminance = _luminance(colour)
    on_white = (1.05) / (luminance + 0.05)  # contrast of white text, as WCAG 2 defines it
    return "#ffffff" if on_white >= 4 else "#1a1a1a"


def _levels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    def linear(level: int) -> float:
        part = level / _WHITE
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    red, green, blue = map(linear, _levels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
