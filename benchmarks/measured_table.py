"""The part of benchmarks/evidence.md on what was measured on a GPU: benchmarks/evidence/h200.json.

`scripts/measure_ranks.py` writes the file, on a GPU, and adds to it what was rehearsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "evidence" / "h200.json"
GIB, MIB = 2**30, 2**20
KINDS = ("F", "B", "W", "BW")

HEAD = """\
## Ranks measured on an H200

One GPU, lent for a quarter of an hour: Megatron-Core's own trainer with Transformer Engine, run as
one rank of a job whose other ranks are not there (`python scripts/measure_ranks.py measure`), and
the same flags rehearsed without a GPU, with the same version of torch: by torch 2.15 the peaks of
four ranks come out 75 or 143 MB lower, since its autograd lets go of a gradient earlier. Sizes: 7B
is GPT-3-like with 8,192 tokens and PP 4, 70B Llama's with 4,096 tokens, TP 8 and PP 8, 8 experts a
Mixtral of 16 layers with PP 4; the optimizer's state is not sharded among replicas. *Held* is
between steps; both are what torch.cuda.memory_stats calls allocated. NCCL's buffers and waits for
other ranks are not in it. What torch's sums and the embedding's gradient hold meanwhile is counted
as its source has it since the allocator's trace pointed there; before, nine peaks were equal.
"""

PASSES = """
### Their passes

Milliseconds of a pass, median of the last step, and in brackets what the rehearsal counts for it,
at rates that others' whole runs have shown; one rank alone, for two seconds, is faster. Exchanges
took nothing there and are left out of both. B + W by BW says what splitting costs, where a schedule
has both. At TP 8 the 70B's forward waits for Python, which launches it slower than the GPU runs it:
its F takes nearly twice what is counted, and a microbatch's passes are longer under V-Half, whose
chunks give the host less of a lead, than under 1F1B. Ranks that ran beside other programs are left
out.
"""

Rank = Mapping[str, Any]


def table() -> list[str]:
    """Return the lines of the section."""
    found = json.loads(FILE.read_text())
    ranks = found["ranks"]
    lines = [HEAD, f"{found['about']['versions']}.", "", *_summary(ranks), ""]
    return [*lines, *_memory(ranks), PASSES, *_passes(ranks)]


def _off(rank: Rank, what: str) -> float:
    return float(rank["rehearsed"][what] / rank[what] - 1)


def _summary(ranks: Sequence[Rank]) -> Iterator[str]:
    peaks, held = ([_off(each, f"{what}_bytes") for each in ranks] for what in ("peak", "held"))
    adds = [_added(each) for each in ranks]
    passes = sum(number for number, _ in adds)
    others = f", and the others' within {max(map(abs, peaks)):.2%}" if any(peaks) else ""
    yield (
        f"{len(ranks)} ranks. What is held between steps is rehearsed to the byte in "
        f"{held.count(0.0)}, the peak in {peaks.count(0.0)}{others}. What a pass leaves behind is "
        f"the rehearsed number of bytes in {passes - sum(wrong for _, wrong in adds)} of {passes} "
        "kinds of pass and chunk."
    )


def _added(rank: Rank) -> tuple[int, int]:
    """Return how many kinds of pass were measured and rehearsed, and how many differ."""
    pairs = list(_pairs(rank))
    return len(pairs), sum(mine["adds_bytes"] != other["adds_bytes"] for mine, other in pairs)


def _pairs(rank: Rank) -> Iterator[tuple[Rank, Rank]]:
    """Yield measured and rehearsed kinds; a rehearsal calls Megatron's whole backward B."""
    measured = {(each["kind"], each["chunk"]): each for each in rank["kinds"]}
    splits = any(kind == "B" for kind, _ in measured)
    for each in rank["rehearsed"]["kinds"]:
        kind = "BW" if each["kind"] == "B" and not splits else each["kind"]
        if (kind, each["chunk"]) in measured:
            yield measured[kind, each["chunk"]], each


def _memory(ranks: Sequence[Rank]) -> Iterator[str]:
    yield "| case | rank | peak GiB, measured | rehearsed | off | held GiB | off, bytes |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for each in ranks:
        sizes = (each["peak_bytes"], each["rehearsed"]["peak_bytes"])
        peak, rehearsed = (f"{size / GIB:.3f}" for size in sizes)
        bytes_off = each["rehearsed"]["held_bytes"] - each["held_bytes"]
        yield (
            f"| {each['name']} | {each['rank']} | {peak} | {rehearsed} | "
            f"{_off(each, 'peak_bytes'):+.2%} | {each['held_bytes'] / GIB:.3f} | {bytes_off} |"
        )


def _passes(ranks: Sequence[Rank]) -> Iterator[str]:
    yield f"| case | rank | chunk | {' | '.join(KINDS)} | (B + W) / BW |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    ratios: dict[str, list[float]] = {}
    for rank in ranks:
        if not rank["timed"]:
            continue
        pairs = {(mine["chunk"], mine["kind"]): (mine, other) for mine, other in _pairs(rank)}
        for chunk in sorted({chunk for chunk, _ in pairs}):
            times = {kind: pairs[chunk, kind] for kind in KINDS if (chunk, kind) in pairs}
            cells = [
                f"{times[kind][0]['ms']:.1f} ({times[kind][1]['ms']:.1f})" if kind in times else ""
                for kind in KINDS
            ]
            ratio = ""
            if len(times) == len(KINDS):
                ms = {kind: float(mine["ms"]) for kind, (mine, _) in times.items()}
                ratio = f"{(ms['B'] + ms['W']) / ms['BW']:.3f}"
            for kind, (mine, other) in times.items():
                ratios.setdefault(kind, []).append(other["ms"] / mine["ms"])
            yield f"| {rank['name']} | {rank['rank']} | {chunk} | {' | '.join(cells)} | {ratio} |"
    told = ", ".join(f"{kind} {median(ratios[kind]):.2f}" for kind in KINDS)
    first, ours = (_microbatch_ms(ranks, f"70B {name}") for name in ("1f1b", "v-half"))
    yield ""
    yield (
        f"Counted by measured, median: {told}. A microbatch of the 70B on rank 0: {first:.1f} ms "
        f"under 1F1B, {ours:.1f} under V-Half."
    )


def _microbatch_ms(ranks: Sequence[Rank], name: str) -> float:
    """Return what the passes of a microbatch take on rank 0, all chunks together."""
    (kinds,) = (each["kinds"] for each in ranks if each["name"] == name and not each["rank"])
    forwards = sum(each["number"] for each in kinds if each["kind"] == "F")
    chunks = len({each["chunk"] for each in kinds})
    return float(sum(each["number"] * each["ms"] for each in kinds) * chunks / forwards)
