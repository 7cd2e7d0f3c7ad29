"""The section of benchmarks/evidence.md on estimated and published step times.

count_runs.py counted the work; fit_rates.py fitted the rates and wrote the errors of the runs that
were left out of the fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fit_rates import ratios_of, summary
from fit_rates import told as told_errors
from published_runs import Row, is_counted, key_of, predicted, published

from megatron_vshape.rehearsal.fitted import LEFT_OUT, PAIRS

HEAD = """\
## Step times: published, and estimated

The work of one microbatch is counted by a dry run of the run's own flags
([models.yaml](evidence/models.yaml); `python benchmarks/count_runs.py`): matrix products
by shape and format, attention, bytes that other kernels move, kernels, collectives by group.
Dispatcher, overlaps, CUDA graphs and recomputation of a run are those of its recipe, in the tag of
its release (column `settings` of [runs.csv](evidence/runs.csv)). The time of a collective follows
from its bytes per hop: NVLink and network transfer at the same time, DeepEP and HybridEP send a
token once to each node, a plain all-to-all once to each rank
(`megatron_vshape/rehearsal/step_time.py`). All else follows from the data sheet, six shares per
generation of GPU and twelve constants shared by all (`megatron_vshape/rehearsal/fitted.py`), fitted
to all runs at once by `python benchmarks/fit_rates.py`. No constant belongs to a run, a model or a
release. Idle time is the textbook's, (p - 1) / v microbatches. The runs are NVIDIA's of
Megatron-Bridge and those of its model verification cards, MLPerf's of Llama 3.1 405B (5.1 and 6.0)
and DeepSeek-V3 (6.0, natural routing), and those of Kwai's ATC '24 paper without offload and
recompute.

**The error of an estimate is the one of runs that were left out of the fit**: all runs of one model
on one system at a time. `advise` prints the row of the user's case.
"""


def table() -> list[str]:
    """Return the lines of the section."""
    rows = [row for row in published() if is_counted(row)]
    return [HEAD, *_left_out(), "", *_notes(rows), "", *_rows(rows), "", WRONG]


def _left_out() -> Iterator[str]:
    yield "| left out of the fit | runs | median | 90% within | worst |"
    yield "|---|---:|---:|---:|---:|"
    for name, errors in LEFT_OUT.items():
        runs, median, ninth, worst = errors
        yield f"| {name} | {runs} | {median:g}% | {ninth:g}% | {worst:g}x |"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        f"Ratio of two configurations of one model on one system in one release, left out of the "
        f"fit: {PAIRS.pairs} pairs, median error {PAIRS.median_percent:g}%, "
        f"{PAIRS.right_percent:g}% in the right order."
    )
    yield ""
    yield (
        f"In the table below the runs are part of the fit ({told_errors(summary(ratios_of(rows)))})"
        ", so their errors are smaller than those of a new run."
    )


def _rows(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each configuration; releases that measured it again share one line."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        how = f"{predicted(row)['step_s']:.3g}"
        groups[key_of(row), row["gpu"], str(row["vpp"]), str(row["global_batch"]), how].append(row)
    yield "| model | GPUs | TP PP VPP CP EP | format | measured s | predicted | error |"
    yield "|---|---|---|---|---:|---:|---:|"
    for (*_, how), group in groups.items():
        row = group[0]
        steps = sorted(member["step_s"] for member in group)
        span = f"{steps[0]:.3g}" if len(group) == 1 else f"{steps[0]:.3g} to {steps[-1]:.3g}"
        middle = steps[len(steps) // 2]
        sizes = " ".join(str(row[name]) for name in ("tp", "pp", "vpp", "cp", "ep"))
        off = 100 * (float(how) / middle - 1)
        gpus = f"{row['gpus']} {row['gpu'].upper()}"
        yield (
            f"| {row['model']} | {gpus} | {sizes} | {row['precision']} | {span} | {how} "
            f"| {off:+.0f}% |"
        )


WRONG = """\
Where it is wrong, and as far as known why:

* Qwen3 30B on H100 in 25.11 (FP8, PP 2, 24 virtual stages) is estimated 1.9x too fast, and Qwen3
  235B on B300 in 26.02 1.4x. Both overlap expert communication without CUDA graphs, on x86. Until
  November 2026, 16 ms per virtual stage were added for such runs; runs of other images do not need
  them.
* GPT OSS on GB200 needed 4.48 s in 26.06.01, and 2.8 s with the same recipe in the releases before
  and after it.
* GPT OSS on B200 in 25.11 needs 1.1 s per step beyond its two microbatches, which no count
  explains.
* Llama3 70B of 26.02.01 names no virtual stages and is as fast as with five.
* DeepSeek-V3 on 2,048 GB200 has natural routing and 60 microbatches; on 512 GB200 it is 10% off.
"""
