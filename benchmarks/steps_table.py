"""The part of docs/evidence.md on steps predicted from counted work, beside the published ones.

`scripts/count_runs.py` counted the work, `scripts/fit_rates.py` fitted the rates and wrote what
each system's errors are where it is left out of the fit.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from fit_rates import LEFT_OUT, errors, told, told_pairs
from published_runs import Row, is_counted, key_of, predicted, published

HEAD = """\
## Steps predicted, and measured by others

The work of one microbatch is counted by a rehearsal of the run's own flags
([models.yaml](../benchmarks/evidence/models.yaml); `python scripts/count_runs.py`): products by
shape and format, attention, bytes that other kernels move, kernels, exchanges by group and reach.
Time follows from
what the hardware states and from a dozen shares for each generation of GPU
(`megatron_vshape/rehearsal/step_time.py`), fitted to all of these runs at once by
`python scripts/fit_rates.py`, none for a run or a model. Idle time is the textbook's, (p - 1) / v
microbatches. The runs are NVIDIA's of Megatron-Bridge, MLPerf's of Llama 3.1 405B, and those of
Kwai's ATC '24 paper without offload and recompute.
"""


def table() -> list[str]:
    """Return the lines of the section."""
    rows = [row for row in published() if is_counted(row)]
    return [HEAD, *_summary(rows), "", *_systems(), "", *_rows(rows), "", WRONG]


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield "| set | runs | off by |"
    yield "|---|---:|---|"
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        piped = [row for row in own if row["pp"] > 1]
        yield f"| {name}, with a pipeline | {len(piped)} | {told(errors(piped, None))} |"
        if len(piped) < len(own):
            yield f"| {name}, all | {len(own)} | {told(errors(own, None))} |"
    yield f"| all | {len(rows)} | {told(errors(rows, None))} |"
    yield ""
    yield f"Two configurations of one model on one system: {told_pairs(rows)}."


def _systems() -> Iterator[str]:
    yield "| system | runs | off by | left out of the fit |"
    yield "|---|---:|---|---|"
    for system, (number, own, left) in json.loads(LEFT_OUT.read_text()).items():
        yield f"| {system} | {number} | {own} | {left} |"


def _rows(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each configuration; releases that measured it anew stand in one."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        how = f"{predicted(row)['step_s']:.3g}"
        groups[key_of(row), row["gpu"], str(row["vpp"]), str(row["global_batch"]), how].append(row)
    yield "| model | GPUs | TP PP VPP CP EP | format | measured s | predicted | off by |"
    yield "|---|---|---|---|---:|---:|---:|"
    for (*_, how), own in groups.items():
        row = own[0]
        steps = sorted(each["step_s"] for each in own)
        span = f"{steps[0]:.3g}" if len(own) == 1 else f"{steps[0]:.3g} to {steps[-1]:.3g}"
        middle = steps[len(steps) // 2]
        sizes = " ".join(str(row[name]) for name in ("tp", "pp", "vpp", "cp", "ep"))
        off = 100 * (float(how) / middle - 1)
        gpus = f"{row['gpus']} {row['gpu'].upper()}"
        yield (
            f"| {row['model']} | {gpus} | {sizes} | {row['precision']} | {span} | {how} "
            f"| {off:+.0f} % |"
        )


WRONG = """\
Where it is wrong: Qwen3 on B200 and B300 before 26.04.01 took twice what the same run takes since,
which is the host's time and is not in the counts (no such row of GB200 and GB300, whose hosts are
Grace). 405B on 5,120 GPUs is predicted slower: its gradients cross 80 replicas, and how much of
that hides follows from one share for all runs. Llama3 70B of 26.02.01 names no virtual stages and
takes as long as those with five. Of the pairs in wrong order nearly all are one, 405B on GB300 with
TP 4 in FP8, which was the faster, and with TP 2 and CP 2. What varies from one release to the next,
some 5 %, no configuration tells.
"""
