"""The part of benchmarks/evidence.md on rehearsals: evidence/rehearsed.csv, and how far off it is.

`benchmarks/rehearse_rows.py` writes the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

ROWS = Path(__file__).resolve().parents[1] / "benchmarks" / "evidence" / "rehearsed.csv"
KWAI = ROWS.with_name("kwai.csv")
GIB = 2**30
LARGE = GIB
"""Peaks from which on errors are counted: below it, a library's 32 MiB are per cents."""

FAR = 0.04
"""From which error on a reason is told."""

REASONS = {
    "15b_8t_release_sm_gb200": "golden of another configuration: to within a per cent that of "
    "15b_8t_release on A100, step time included; GB200's own is exact",
    "cross_entropy_loss_fusion a100": "older golden: .46 GiB more of logits live in the compiled "
    "loss; H100 and GB200 are exact",
    "deepseekv3_proxy_flex_tp1pp4": "two goldens of the same flags differ by 4.9 GiB, 2.4 logits "
    "in fp32; the rehearsed peak lies between",
    "deepseekv3_proxy_flex_tp2pp2": "older golden: two logits in fp32 of 7.9 GiB fewer live in the "
    "compiled loss",
    "mixtral_8x7b": "routing: fits with 9 % more tokens than the mean; A100's golden is older too, "
    "before one dummy gradient per shape of weight was kept",
    "ep4_etp1_memory_speed": "routing: the golden's peak grows by 4.7 GiB from step 1 to 39, what "
    "is held stays",
    "defer_embedding_wgrad": "older golden, before one dummy gradient per shape of weight was kept",
    "scoped_cudagraph": "the graphs' own pools are not counted",
    "nemotron3_super": "the graphs' own pools are not counted, and two goldens of the same flags "
    "differ by 11 GiB",
    "etp4_nondeterministic_dp_last gb200": "0.8 GiB in all",
    "native_fp8_tp_sp_cp_tp_overlap gb200": "18 MiB of 0.4 GiB",
}
"""Why rows are further off than that, by a part of their names."""

Row = dict[str, str]

HEAD = """\
## Memory rehearsed, and measured by NVIDIA

[`megatron-vshape rehearse`](../docs/memory.md) on the functional tests of Megatron-LM, whose golden
values hold what torch.cuda.memory_stats called allocated on the last rank: the largest peak of the
run, and what is held between steps. Flags and environment are read from the tests' own files, main
of the day; golden values are older, some by half a year. Routing is taken as balanced, attention as
fused unless the flags forbid it; nothing is fitted. The allocator leaves up to a MiB of a block
unused rather than split it, which is not rehearsed: 0 to 16 MiB of what is held. Where nothing says
how many GPUs a run had (\\*), it is the power of two at which what is held fits, so that of those
rows only the peak is a prediction; small cases that do not say it (+) are taken to run on one node.
`python benchmarks/rehearse_rows.py` makes the figures.
"""


def table() -> list[str]:
    """Return the lines of the section, or none where nothing was rehearsed."""
    if not ROWS.is_file():
        return []
    with ROWS.open() as stream:
        rows = list(csv.DictReader(stream))
    ran = [row for row in rows if row["rehearsed_peak"]]
    lines = [HEAD, *_summary(rows, ran), "", *_rows(ran), "", *_far(ran), *_reasons(rows)]
    return [*lines, *_kwai()]


def _off(row: Row, what: str) -> float:
    return int(row[f"rehearsed_{what}"]) / int(row[f"measured_{what}"]) - 1


def _tenth(values: Sequence[float]) -> float:
    """Return what nine in ten are below."""
    return sorted(values)[max(0, -(-9 * len(values) // 10) - 1)]


def _summary(rows: Sequence[Row], ran: Sequence[Row]) -> Iterator[str]:
    large = [row for row in ran if int(row["measured_peak"]) >= LARGE]
    peaks = [abs(_off(row, "peak")) for row in large]
    held = [abs(_off(row, "held")) for row in large if row["gpus_from"] != "fitted"]
    times = [float(row["process_s"]) for row in ran]
    yield (
        f"{len(ran)} of {len(rows)} rows run. Of the {len(large)} with a peak of 1 GiB or more the "
        f"median error of the peak is {median(peaks):.2%}, nine in ten are within "
        f"{_tenth(peaks):.1%}; of what is held between steps, GPUs not fitted, {median(held):.2%} "
        f"and {_tenth(held):.1%}. A rank took {median(times):.0f} s (median, on a crowded machine) "
        f"and at most {max(int(row['host_mib']) for row in ran) / 1024:.1f} GiB of host memory."
    )


def _rows(ran: Sequence[Row]) -> Iterator[str]:
    both = "measured | rehearsed | off"
    yield f"| case | GPU | GPUs | peak, {both} | held, {both} |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    marks = {"given": "", "fitted": " \\*", "assumed": " +"}
    for row in ran:
        cells = [row["case"], row["platform"], row["gpus"] + marks[row["gpus_from"]]]
        for what in ("peak", "held"):
            sizes = (int(row[f"{by}_{what}"]) / GIB for by in ("measured", "rehearsed"))
            cells += [*(f"{size:.3f}" for size in sizes), f"{_off(row, what):+.2%}"]
        yield f"| {' | '.join(cells)} |"


def _far(ran: Sequence[Row]) -> Iterator[str]:
    """Yield why rows are far off, and fail where nothing says so."""
    found: dict[str, list[str]] = {}
    for row in ran:
        errors = {what: _off(row, what) for what in ("peak", "held")}
        if max(map(abs, errors.values())) < FAR:
            continue
        name = f"{row['case']} {row['platform']}"
        (reason,) = {why for part, why in REASONS.items() if part in name} or {"not known"}
        told = ", ".join(f"{what} {error:+.1%}" for what, error in errors.items())
        found.setdefault(reason, []).append(
            f"{row['case'].split('/')[1]} ({row['platform']}; {told})"
        )
    yield f"Rows that are off by {FAR:.0%} or more, and why:"
    yield ""
    for reason, names in found.items():
        yield f"* {', '.join(names)}: {reason}."
    yield ""


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row["rehearsed_peak"]:
            reasons.setdefault(row["error"], []).append(f"{row['case']} ({row['platform']})")
    if reasons:
        yield "Rows that did not run:"
        yield ""
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
        yield f"* {len(names)}: {reason.replace('|', ' ')}: {shown}"


KWAI_HEAD = """
### Activations in host memory, measured by Kwai

LLaMA 65B on 256 H800, PP 8 interleaved with chunks of two layers, TP 2, CP 2, 8,192 tokens
(USENIX ATC '24): the largest peak by the share of activations that waits in host memory, without
recompute. There a share of every chunk is copied, by a Megatron of January 2024; rehearsed is
today's, with this package's copies of whole chunks, that share of them: Megatron's own flags can
copy no MLP. Kwai's activation function that is computed again has no flag either, so that half of
the figures is not compared (`python benchmarks/rehearse_kwai.py`).
"""


def _kwai() -> Iterator[str]:
    if not KWAI.is_file():
        return
    with KWAI.open() as stream:
        rows = [
            {name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)
        ]
    yield KWAI_HEAD
    yield "| share in host memory | peak, measured | rehearsed | off |"
    yield "|---:|---:|---:|---:|"
    for row in rows:
        measured, rehearsed = row["measured_peak"], row["rehearsed_peak"]
        sizes = f"{measured / GIB:.2f} | {rehearsed / GIB:.2f}"
        yield f"| {row['share']:.1f} | {sizes} | {rehearsed / measured - 1:+.1%} |"
    first, last = rows[0], rows[-1]
    falls = [
        (first[name] - last[name]) / (last["share"] - first["share"]) / GIB
        for name in ("measured_peak", "rehearsed_peak")
    ]
    yield ""
    yield (
        f"It falls by {falls[0]:.1f} GiB per whole share, measured, by {falls[1]:.1f}, rehearsed "
        f"({falls[1] / falls[0] - 1:+.1%}). Asked for were 5 % and 3 %. A layer keeps of a "
        "microbatch 514 MiB here, and a device holds 94 of them at most; the measured fall over "
        f"as many is {falls[0] * 1024 / 94:.0f} MiB, which one hidden state (32 MiB) more in the "
        "older code would explain; that has not been looked up there."
    )
