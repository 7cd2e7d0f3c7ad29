"""The section of benchmarks/evidence.md on estimated peaks and their errors: rehearsed.csv.

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
"""Smallest peak in the error statistics: below, the 32 MiB of a library are several percent."""

FAR = 0.04
"""Smallest error for which the page gives a reason."""

REASONS = {
    "15b_8t_release_sm_gb200": "golden value of another configuration (equal to 15b_8t_release on "
    "A100 within 1%, step time included); GB200's own is exact",
    "cross_entropy_loss_fusion a100": "older golden value: 0.46 GiB more logits in the compiled "
    "loss; H100 and GB200 are exact",
    "deepseekv3_proxy_flex_tp1pp4": "two golden values of the same flags differ by 4.9 GiB, 2.4 "
    "logits in fp32; the estimated peak is between them",
    "deepseekv3_proxy_flex_tp2pp2": "older golden value: two logits in fp32 of 7.9 GiB fewer in "
    "the compiled loss",
    "mixtral_8x7b": "routing: agrees with 9% more tokens than the mean; A100's golden value is "
    "also older than the one dummy gradient per weight shape",
    "ep4_etp1_memory_speed": "routing: the golden peak grows by 4.7 GiB from step 1 to 39, the "
    "states do not",
    "defer_embedding_wgrad": "golden value older than the one dummy gradient per weight shape",
    "scoped_cudagraph": "memory pools of the graphs are not counted",
    "nemotron3_super": "memory pools of the graphs are not counted, and two golden values of the "
    "same flags differ by 11 GiB",
    "etp4_nondeterministic_dp_last gb200": "0.8 GiB in total",
    "native_fp8_tp_sp_cp_tp_overlap gb200": "18 MiB of 0.4 GiB",
}
"""Reasons of larger errors, by a part of the row's name."""

NAMES = {"peak": "peak", "held": "states"}
"""Names on the page, by the columns of the file."""

Row = dict[str, str]

HEAD = """\
## Peak memory measured by NVIDIA

[`megatron-vshape rehearse`](../docs/memory.md) with the functional tests of Megatron-LM. Their
golden values contain the allocated memory of the last rank (torch.cuda.memory_stats): the largest
peak, and the memory between steps (*states*). Flags and environment are those of the tests on
main; golden values are up to half a year older. Assumptions: balanced routing, and fused attention
unless the flags exclude it. Nothing is fitted. The allocator can leave up to 1 MiB of a block
unused, which is estimated (0 to 16 MiB of the states). \\*: the number of GPUs is not published and
was chosen so that the states agree; only the peak is a prediction. +: assumed to run on one node.
`python benchmarks/rehearse_rows.py` computes the estimates.
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


def errors_of_peaks(smallest_bytes: int = LARGE) -> tuple[int, float, float]:
    """Return the number of larger peaks, their median error, and the error that 90% are within."""
    with ROWS.open() as stream:
        ran = [row for row in csv.DictReader(stream) if row["rehearsed_peak"]]
    errors = [abs(_off(row, "peak")) for row in ran if int(row["measured_peak"]) >= smallest_bytes]
    return len(errors), median(errors), _tenth(errors)


def _off(row: Row, what: str) -> float:
    return int(row[f"rehearsed_{what}"]) / int(row[f"measured_{what}"]) - 1


def _tenth(values: Sequence[float]) -> float:
    """Return the 90th percentile."""
    return sorted(values)[max(0, -(-9 * len(values) // 10) - 1)]


def _summary(rows: Sequence[Row], ran: Sequence[Row]) -> Iterator[str]:
    large = [row for row in ran if int(row["measured_peak"]) >= LARGE]
    peaks = [abs(_off(row, "peak")) for row in large]
    state_errors = [abs(_off(row, "held")) for row in large if row["gpus_from"] != "fitted"]
    times = [float(row["process_s"]) for row in ran]
    yield (
        f"{len(ran)} of {len(rows)} rows run. For the {len(large)} rows with a peak of at least "
        f"1 GiB, the median error of the peak is {median(peaks):.2%}, and 90% are within "
        f"{_tenth(peaks):.1%}. For the states, with a published number of GPUs: "
        f"{median(state_errors):.2%} and {_tenth(state_errors):.1%}. "
        f"A rank needed {median(times):.0f} s (median, on a busy machine) "
        f"and at most {max(int(row['host_mib']) for row in ran) / 1024:.1f} GiB of host memory."
    )


def _rows(ran: Sequence[Row]) -> Iterator[str]:
    columns = "measured | estimated | error"
    yield f"| case | GPU | GPUs | peak GiB, {columns} | states GiB, {columns} |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    marks = {"given": "", "fitted": " \\*", "assumed": " +"}
    for row in ran:
        cells = [row["case"], row["platform"], row["gpus"] + marks[row["gpus_from"]]]
        for what in ("peak", "held"):
            sizes = (int(row[f"{by}_{what}"]) / GIB for by in ("measured", "rehearsed"))
            cells += [*(f"{size:.3f}" for size in sizes), f"{_off(row, what):+.2%}"]
        yield f"| {' | '.join(cells)} |"


def _far(ran: Sequence[Row]) -> Iterator[str]:
    """Yield the rows with large errors and their reasons; fail if a reason is missing."""
    cases_by_reason: dict[str, list[str]] = {}
    for row in ran:
        errors = {what: _off(row, what) for what in ("peak", "held")}
        if max(map(abs, errors.values())) < FAR:
            continue
        name = f"{row['case']} {row['platform']}"
        (reason,) = {why for part, why in REASONS.items() if part in name} or {"not known"}
        errors_text = ", ".join(f"{NAMES[what]} {error:+.1%}" for what, error in errors.items())
        cases_by_reason.setdefault(reason, []).append(
            f"{row['case'].split('/')[1]} ({row['platform']}; {errors_text})"
        )
    yield f"Rows with an error of at least {FAR:.0%}, and the reason:"
    yield ""
    for reason, names in cases_by_reason.items():
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
### Offloaded activations measured by Kwai

LLaMA 65B on 256 H800, interleaved PP 8 with chunks of two layers, TP 2, CP 2, 8,192 tokens (USENIX
ATC '24): largest peak by share of offloaded activations, without recomputation. Kwai offloads a
share of every chunk, with a Megatron of January 2024. The estimate uses today's Megatron and
offloads whole chunks, because Megatron's flags cannot offload an MLP. Kwai's recomputed activation
function has no flag either, so half of its figures are not compared (`python
benchmarks/rehearse_kwai.py`).
"""


def _kwai() -> Iterator[str]:
    if not KWAI.is_file():
        return
    with KWAI.open() as stream:
        rows = [
            {name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)
        ]
    yield KWAI_HEAD
    yield "| offloaded share | peak GiB, measured | estimated | error |"
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
        f"From share 0 to 1, the peak falls by {falls[0]:.1f} GiB (measured) and {falls[1]:.1f} "
        f"GiB (estimated, {falls[1] / falls[0] - 1:+.1%}). A layer stores 514 MiB of a microbatch "
        "here, and a rank at most 94 of them. The measured difference divided by 94 is "
        f"{falls[0] * 1024 / 94:.0f} MiB. One more hidden state (32 MiB) in the older code would "
        "explain it; this was not verified."
    )
