"""Draw a training step as torch's profiler records it: passes, waits, weight jobs, operations.

    python benchmarks/profile_picture.py [FIGURE]

Trains a small GPT with V-Half on two CPU ranks over gloo with Megatron's profiling flags, and draws
the last profiled step of rank 0 from Megatron's trace. FIGURE defaults to docs/figures/profile.svg.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.model.kinds import Kind, find_kind
from megatron_vshape.view.figure import save
from megatron_vshape.view.names import HELD_COLOUR, ink, shade, tint

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
RUN = (
    f"--pipeline-model-parallel-size {RANKS} --pipeline-schedule v-half "
    "--transformer-impl local --distributed-backend gloo --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --num-layers 4 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 6 "
    "--train-iters 5 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --eval-interval 1000 "
    "--log-interval 1000 --num-workers 0"
).split()
PROFILED = (
    "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 4 "
    f"--profile-ranks {' '.join(map(str, range(RANKS)))}"
).split()
PASS = re.compile(r"(F|B|W|BW)(\d+)\.\d+")
ROWS = ("passes and waits", "weight jobs", "torch's operations")
MARGIN = 0.25  # of a W, on each side in the lower picture
LEAST_TEXT = 0.007  # of the picture's width, per character


class Span(NamedTuple):
    """A named stretch of the trace, in ms from the step's first."""

    name: str
    start: float
    end: float
    row: int


def trace(folder: Path) -> list[dict[str, object]]:
    """Train, profiled, and return the events of rank 0's trace."""
    script = [str(ROOT / "scripts" / "pretrain_gpt.py"), *RUN, *PROFILED]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), *script, "--tensorboard-dir", str(folder / "board")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    written = folder / "torch_profile" / "rank-0.json.gz"
    if process.returncode or not written.exists():
        raise SystemExit(f"profile_picture.py: the run failed:\n{process.stderr[-3000:]}")
    with gzip.open(written, "rt") as stream:
        events: list[dict[str, object]] = json.load(stream)["traceEvents"]
    return events


def spans(events: Sequence[dict[str, object]]) -> list[Span]:
    """Return the spans to draw: labels, and the outermost operations."""
    all_spans: list[Span] = []
    for event in events:
        name, kind = str(event["name"]), event.get("cat")
        is_label = PASS.fullmatch(name) or name.startswith(("wait ", "job "))
        if event.get("ph") == "X" and (is_label or kind == "cpu_op"):
            row = 2 if not is_label else 1 if name.startswith("job ") else 0
            start = float(str(event["ts"])) / 1e3
            all_spans.append(Span(name, start, start + float(str(event["dur"])) / 1e3, row))
    labels = [span for span in all_spans if span.row < 2]
    first, last = min(label.start for label in labels), max(label.end for label in labels)
    inside = [span for span in all_spans if first <= span.start and span.end <= last]
    moved = [span._replace(start=span.start - first, end=span.end - first) for span in inside]
    moved.sort(key=lambda span: (span.start, -span.end))
    return [span for span in moved if span.row < 2] + _outermost(moved)


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Return the operations, of spans in order, that are part of no other one."""
    outermost: list[Span] = []
    for span in spans:
        if span.row == 2 and (not outermost or span.start >= outermost[-1].end):
            outermost.append(span)
    return outermost


def colour(span: Span) -> str:
    """Return the colour of a span: a pass has that of its kind and chunk."""
    match = PASS.fullmatch(span.name)
    if match:
        kind = Kind.B if match[1] == "BW" else find_kind(match[1])
        return shade(kind, int(match[2]) // RANKS, 2)
    if span.row == 1:
        return tint(shade(Kind.W, 0, 2), 1, 2)
    return "#e4e2ee" if span.name.startswith("wait ") else HELD_COLOUR


def draw(axes: Axes, shown: Sequence[Span], begin: float, end: float, num_rows: int) -> None:
    """Draw the spans between two times, each with its name where that has room."""
    for span in shown:
        if span.row >= num_rows or span.end <= begin or span.start >= end:
            continue
        begin_ms, end_ms = max(span.start, begin), min(span.end, end)
        fill = colour(span)
        axes.barh(span.row, end_ms - begin_ms, left=begin_ms, height=0.86, color=fill, linewidth=0)
        names = (span.name, span.name.rpartition(".")[2]) if span.row == 1 else (span.name,)
        room = (end_ms - begin_ms) / (end - begin) / LEAST_TEXT
        text = next((name for name in names if len(name) < room), "") if span.row < 2 else ""
        look = {"ha": "center", "va": "center", "clip_on": True, "fontsize": 6}
        axes.text((begin_ms + end_ms) / 2, span.row, text, color=ink(fill), **look)
    axes.set_xlim(begin, end)
    axes.set_ylim(num_rows - 0.5, -0.5)
    axes.set_yticks(range(num_rows), ROWS[:num_rows])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=7)


def picture(shown: Sequence[Span]) -> Figure:
    """Return the figure: the full step, and below it the first W with its surroundings."""
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    full_axes, part = figure.subplots(2, 1, height_ratios=(1, 3))
    draw(full_axes, shown, 0.0, max(span.end for span in shown), 1)
    full_axes.set_xlabel("ms", fontsize=7)
    first = next(span for span in shown if span.row == 0 and span.name.startswith("W"))
    margin = MARGIN * (first.end - first.start)
    draw(part, shown, first.start - margin, first.end + margin, len(ROWS))
    part.set_xlabel("ms from the first pass of the step, rank 0", fontsize=7)
    return figure


def main() -> None:
    """Train, read the trace, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "docs" / "figures" / "profile.svg"
    parser.add_argument("figure", nargs="?", type=Path, default=default)
    path = parser.parse_args().figure
    with tempfile.TemporaryDirectory() as folder:
        events = trace(Path(folder))
    save(picture(spans(events)), path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
