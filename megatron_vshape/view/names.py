"""How schedules are called in pictures."""

from megatron_vshape.core.catalogue import NAMES

_WORDS = {"1f1b": "1F1B", "gpipe": "GPipe", "zb": "ZB", "h1": "H1", "h2": "H2"}
_LONGEST = 60


def display_name(name: str) -> str:
    """Return the paper's spelling of a catalogue name; another name as it is, made plain."""
    if name.rstrip("+") not in NAMES:
        return plain(name)
    plus = "+" if name.endswith("+") else ""
    words = name.rstrip("+").split("-")
    return "-".join(_WORDS.get(word, word.capitalize()) for word in words) + plus


def plain(name: str) -> str:
    """Return a name that is safe on a terminal and in a figure: printable, one line, short."""
    text = "".join(each if each.isprintable() else "?" for each in name)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
