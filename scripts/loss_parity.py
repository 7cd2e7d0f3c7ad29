"""Train the same GPT on real text under Megatron's 1F1B and this package's schedules; compare.

    python scripts/loss_parity.py [--steps 2000] [--folder runs/loss-parity] [--keep]

Every run is Megatron's trainer (scripts/pretrain_gpt.py) on four pipeline ranks over gloo, on
the documentation that ships with Python (scripts/prepare_text.py), from one set of weights: the
baseline, which has no flag of this package, saves them after a first step and every run loads
them. Loss and gradient norm of each step, in float32, are read from
the TensorBoard files. `auto` measures its costs in steps 10 to 13 and continues with its plan.

| settings | difference |
|---|---|
| fp32 | |
| bf16 | `--bf16`: weights and activations in bfloat16, gradients summed in float32 |
| fp32-unclipped | `--clip-grad 0`, a tenth of the steps: the gradient norm affects no weight |
| bf16-unclipped | both |
| bf16-sliced | bf16, at most 300 steps, compared with V-ZB with microbatches in 4 slices |

It writes benchmarks/figures/loss-parity-SETTINGS.svg and benchmarks/evidence/loss_parity.csv, which
benchmarks/evidence.py shows. `--keep` reuses finished runs; the folder must then
be of the same version of the code. On two idle cores the runs need about an hour.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from prepare_text import prepare
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_vshape.view.figure import save

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "figures"
TABLE = ROOT / "benchmarks" / "evidence" / "loss_parity.csv"
BASELINE = "Megatron's 1F1B"
SCHEDULES: Mapping[str, str] = {
    BASELINE: "",
    "V-Half": "--pipeline-schedule v-half",
    "V-ZB": "--pipeline-schedule v-zb",
    "auto": "--pipeline-schedule auto --pipeline-profile-iterations 10:13",
}
SLICED: Mapping[str, str] = {
    BASELINE: "",
    "V-ZB in slices": "--pipeline-schedule v-zb --pipeline-slices 4",
}
LOSS, NORM = "lm loss", "grad-norm"  # names in the trainer's TensorBoard files
MAX_SLICED_STEPS = 300
RANKS = 4
VOCABULARY = 512
# One layer for each of the eight stages of a V, and one microbatch per rank: the smallest
# step that fills the pipeline. The comparison does not depend on the size.
FLAGS = (
    f"--pipeline-model-parallel-size {RANKS} --num-layers {2 * RANKS} --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    f"--micro-batch-size 1 --global-batch-size {RANKS} --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
    "--split 100,0,0 --num-workers 0 --tokenizer-type SentencePieceTokenizer "
    "--lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.025 --weight-decay 0.1 "
    "--adam-beta2 0.95 --eval-interval 1000000 --eval-iters 0 --log-interval 100 "
    "--tensorboard-log-interval 1 --ckpt-format torch_dist --distributed-backend gloo "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion"
).split()


@dataclass(frozen=True, slots=True)
class Settings:
    """Common settings of all runs of a comparison."""

    name: str
    flags: tuple[str, ...]
    steps: int
    schedules: Mapping[str, str] = field(default_factory=lambda: SCHEDULES)
    ranks: int = RANKS


@dataclass(frozen=True, slots=True)
class Logged:
    """Loss and gradient norm of a run per step, as float32."""

    loss: np.ndarray
    norm: np.ndarray


def train(settings: Settings, schedule: str, folder: Path, *flags: str) -> None:
    """Train into `folder`, which is created again; raises SystemExit if the trainer fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = prepare(None, ROOT / ".cache" / "text", VOCABULARY)
    data = ("--data-path", str(text), "--tokenizer-model", f"{text}.model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(settings.ranks)]
    command += [str(ROOT / "scripts" / "pretrain_gpt.py"), *FLAGS]
    command += [*data, *settings.flags, *settings.schedules[schedule].split(), *flags]
    command += ["--tensorboard-dir", str(folder)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # more threads may change the order of sums
        "PYTHONWARNINGS": "ignore",
    }
    log = folder / "log"
    with log.open("w") as stream:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT
        ).returncode
    if code:
        raise SystemExit(f"loss_parity.py: {folder.name} failed:\n{log.read_text()[-3000:]}")


def read_logged(folder: Path) -> Logged:
    """Read the log of the run in `folder`; without steps if it has not started."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    if folder.exists():
        events.Reload()
    if LOSS not in events.Tags()["scalars"]:
        return Logged(np.empty(0), np.empty(0))
    loss, norm = (
        np.array([event.value for event in events.Scalars(name)], np.float32)
        for name in (LOSS, NORM)
    )
    return Logged(loss, norm)


def compare(settings: Settings, folder: Path, keep: bool) -> dict[str, Logged]:
    """Return the logged values of every schedule's run; train runs that are missing or not kept."""
    weights = folder / f"{settings.name}-weights"
    if not (keep and (weights / "saved" / "latest_checkpointed_iteration.txt").exists()):
        saving = ("--train-iters", "1", "--save", str(weights / "saved"), "--save-interval", "1")
        train(settings, BASELINE, weights, *saving)
    logged_runs: dict[str, Logged] = {}
    for schedule in settings.schedules:
        run = folder / f"{settings.name}-{schedule.rpartition(' ')[2].lower()}"
        if not keep or len(read_logged(run).loss) != settings.steps:
            print(f"{settings.name}: {schedule}, {settings.steps} steps", file=sys.stderr)
            # --finetune loads only the weights: the step counts from 0, over the same data.
            loading = ("--load", str(weights / "saved"), "--finetune")
            train(settings, schedule, run, *loading, "--train-iters", str(settings.steps))
        logged_runs[schedule] = read_logged(run)
        if len(logged_runs[schedule].loss) != settings.steps:
            raise SystemExit(
                f"loss_parity.py: {run} has {len(logged_runs[schedule].loss)} steps, "
                f"not {settings.steps}: see its log"
            )
    return logged_runs


def rows(settings: Settings, runs: Mapping[str, Logged]) -> list[list[str]]:
    """Return a row for each schedule: last losses, largest differences, number of equal steps."""
    baseline = runs[BASELINE]
    lines = []
    for schedule, run in runs.items():
        distance = np.abs(run.loss - baseline.loss)
        num_equal = int(np.sum((run.loss == baseline.loss) & (run.norm == baseline.norm)))
        tail = slice(-max(settings.steps // 20, 1), None)
        lines.append(
            [
                settings.name,
                schedule,
                str(settings.steps),
                f"{baseline.loss[0]:.3f}",
                f"{run.loss[tail].mean():.6f}",
                f"{distance.max():.1e}" if distance.any() else "0",
                str(int(distance.argmax()) + 1) if distance.any() else "-",
                f"{run.loss[tail].mean() - baseline.loss[tail].mean():+.1e}",
                str(int(np.sum(run.loss == baseline.loss))),
                str(num_equal),
            ]
        )
    return lines


HEAD = (
    "settings,schedule,steps,first loss,last loss,largest difference,at step,"
    "difference of the last loss,steps of equal loss,of equal norm too"
).split(",")


def picture(name: str, runs: Mapping[str, Logged]) -> Figure:
    """Return the figure: losses above, their difference from the baseline below."""
    figure = Figure(figsize=(4.5, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, distances = figure.subplots(2, sharex="col")
    steps = len(runs[BASELINE].loss)
    width = max(steps // 200, 1)
    window_ends = width * (1 + np.arange(steps // width))
    for number, (schedule, run) in enumerate(runs.items()):
        colour, style = f"C{number}", (0, (3, len(runs) - 1)) if number else "-"
        means = run.loss[: len(window_ends) * width].reshape(-1, width).mean(axis=1)
        line_options = {"color": colour, "label": schedule, "linewidth": 1.2}
        losses.plot(window_ends, means, linestyle=style, **line_options)
        distance = np.abs(run.loss - runs[BASELINE].loss)[: len(window_ends) * width]
        if number and distance.any():
            max_distance = distance.reshape(-1, width).max(axis=1)
            distances.plot(
                window_ends, np.where(max_distance > 0, max_distance, np.nan), **line_options
            )
    losses.set_title(name, fontsize=9)
    losses.set_ylabel("loss", fontsize=8)
    losses.legend(fontsize=7, frameon=False)
    distances.set_yscale("log")
    distances.set_xlabel("step", fontsize=8)
    distances.set_ylabel("largest distance\nfrom Megatron's 1F1B", fontsize=8)
    for axes in (losses, distances):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def existing_lines(table: Path) -> list[list[str]]:
    """Return the rows of the existing table without its heading."""
    if not table.exists():
        return []
    with table.open(newline="") as stream:
        return list(csv.reader(stream))[1:]


def settings(steps: int) -> tuple[Settings, ...]:
    """Return the comparisons of at most `steps` steps."""
    few = max(steps // 10, 1)
    return (
        Settings("fp32-unclipped", ("--clip-grad", "0"), few),
        Settings("fp32", (), steps),
        Settings("bf16-unclipped", ("--bf16", "--clip-grad", "0"), few),
        Settings("bf16", ("--bf16",), steps),
        Settings("bf16-sliced", ("--bf16",), min(steps, MAX_SLICED_STEPS), SLICED),
    )


def main() -> int:
    """Train, compare, write the figure and the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "loss-parity")
    parser.add_argument("--keep", action="store_true", help="take over the runs that have ended")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument(
        "--settings",
        nargs="+",
        metavar="NAME",
        help="of the table above; what others have left stays; default: all of them",
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    comparisons = settings(options.steps)
    lines: dict[str, list[list[str]]] = {comparison.name: [] for comparison in comparisons}
    for line in existing_lines(options.table):
        lines[line[0]].append(line)
    for comparison in comparisons:
        if options.settings and comparison.name not in options.settings:
            continue
        logged_runs = compare(comparison, folder, options.keep)
        lines[comparison.name] = rows(comparison, logged_runs)
        # After each comparison, so that an interruption keeps the finished ones.
        options.table.parent.mkdir(parents=True, exist_ok=True)
        with options.table.open("w", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows([HEAD, *chain(*lines.values())])
        if comparison.steps == options.steps and comparison.schedules == SCHEDULES:
            save(
                picture(comparison.name, logged_runs),
                options.figures / f"loss-parity-{comparison.name}.svg",
            )
    print(table([HEAD, *chain(*lines.values())]))
    return 0


def table(lines: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table; the first one is its heading."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---|---|" + "---:|" * (len(lines[0]) - 2), *body])


if __name__ == "__main__":
    sys.exit(main())
