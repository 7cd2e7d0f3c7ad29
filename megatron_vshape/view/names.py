"""Display names of schedules."""

from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import EVERY_NAME

_WORDS = {"1f1b": "1F1B", "gpipe": "GPipe", "zb": "ZB", "h1": "H1", "h2": "H2"}
_WORDS["dualpipev"] = "DualPipeV"
_LONGEST = 60


def display_name(name: str) -> str:
    """Return the paper's spelling of a catalogue name; another name is only made printable."""
    own, colon, chunks = name.partition(":")
    bare = own.rstrip("+")
    if bare not in EVERY_NAME:
        return plain(name)
    words = "-".join(_WORDS.get(word, word.capitalize()) for word in bare.split("-"))
    return words + plain(own[len(bare) :] + colon + chunks)


def plain(name: str) -> str:
    """Make a name safe for a terminal and a figure: printable, one line, short."""
    text = "".join(each if each.isprintable() else "?" for each in name)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def placement_text(schedule: Schedule) -> str:
    """Format the number of stages per rank and the placement."""
    chunks = schedule.num_chunks
    each = "chunk" if chunks == 1 else "chunks"
    return f"{chunks} {each} per rank, {shape_text(schedule)}"


def shape_text(schedule: Schedule) -> str:
    """Format the placement of the stages."""
    devices, chunks = schedule.num_devices, schedule.num_chunks
    shapes = {
        linear(devices): "linear",
        looping(devices, max(chunks, 2)): "looping",
        v_shape(devices): "V-shaped",
    }
    return shapes.get(schedule.placement, "custom placement")
