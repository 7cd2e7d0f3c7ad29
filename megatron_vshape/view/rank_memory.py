"""Figure of an estimated step: memory of each rank over time."""

from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.view.names import HELD_COLOUR, tint

Point = tuple[float, float, Mapping[str, float]]
"""Memory curve of a rank: (seconds, bytes, bytes by category)."""

CATEGORIES = {
    "state": ("weights, gradients, optimizer", tint(HELD_COLOUR, 1, 2)),
    "F": ("activations allocated in F", Kind.F.colour),
    "B": ("allocated in B or W", Kind.B.colour),
    "logits": ("logits and their gradients", Kind.W.colour),
    "rest": ("workspaces, message buffers, other", HELD_COLOUR),
}
"""Label and color of each category."""


def memory_figure(curves: Mapping[str, Sequence[Point]], limit_bytes: float) -> Figure:
    """Draw a panel per rank: memory by category over time, and the memory of the GPU."""
    figure = Figure(figsize=(7.2, 1.4 + 1.3 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (rank, curve) in zip(panels, curves.items(), strict=True):
        times = [point[0] for point in curve]
        layers_gib = [[point[2].get(name, 0) / GIB for point in curve] for name in CATEGORIES]
        labels, colours = zip(*CATEGORIES.values(), strict=True)
        layers = axes.stackplot(times, layers_gib, labels=labels, colors=colours, linewidth=0)
        axes.axhline(limit_bytes / GIB, color=Kind.B.colour, linewidth=0.8, linestyle="--")
        axes.set_ylabel(f"{rank}\nGiB", fontsize=8)
        axes.set_ylim(0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("estimated time of the rank's passes, s", fontsize=8)
    figure.legend(handles=layers, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.suptitle("Estimated memory during a step; dashed line: memory of the GPU", fontsize=9)
    return figure
