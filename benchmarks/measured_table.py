"""The section of benchmarks/evidence.md on ranks measured on a GPU: evidence/h200.json.

`scripts/measure_ranks.py` writes the file on a GPU, and adds the estimates to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent / "evidence"
FILE, EXPERTS = FOLDER / "h200.json", FOLDER / "h200-experts.json"
GIB, MIB = 2**30, 2**20
KINDS = ("F", "B", "W", "BW")
AGREED_FIRST = 9
"""Peaks that agreed before temporary memory of reductions and of the embedding was counted."""

LATER_RANKS, LATER_EXACT = 5, 2
"""Ranks that were measured later (one with unfused attention, four with experts); exact ones."""

HEAD = """\
## Ranks measured on an H200

One GPU, for 15 minutes. Megatron-Core's trainer with Transformer Engine ran as one rank of a job
without the other ranks (`python scripts/measure_ranks.py measure`). The same flags were estimated
with `rehearse` and the same version of torch. With torch 2.15, peaks of four ranks are 75 or 143
MB lower, because autograd frees a gradient earlier. 7B: GPT-3-like, 8,192 tokens, PP 4. 70B:
Llama, 4,096 tokens, TP 8, PP 8. 8 experts: Mixtral with 16 layers, PP 4. The optimizer state is
not sharded over replicas. *States* is the memory between steps. All values are allocated bytes of
torch.cuda.memory_stats; NCCL buffers are not included. Temporary memory of torch's reductions and
of the embedding gradient was added to the estimate after these measurements; before, nine peaks
agreed. *Reserved* is the memory of torch's allocator with `expandable_segments:True`, estimated by
[a replay](allocator.md).

One more rank, measured on 2026-11-27: *70B v-half* with `--init-model-with-meta-device` and unfused
attention. Its peak of 43.242 GiB, its states and the memory of all eight kinds of pass are equal to
the estimate to the byte, and 43.79 GiB were reserved (estimated: 43.78).
"""

PASSES = """
### Their passes

Milliseconds per pass: median of the last step, and in parentheses the estimate, which uses rates
of full runs of other groups. One rank alone is faster than a rank of a full run. Collectives are
not included in either. (B + W) / BW is the cost of the split backward. With TP 8, Python launches
the kernels of the 70B model more slowly than the GPU runs them: F needs almost twice the estimated
time. V-Half needs more time per microbatch than 1F1B there, because its shorter passes leave less
work queued on the GPU. Ranks that ran next to other programs are omitted.
"""

LATER = """
### Experts on eight ranks

Measured a day later, and estimated without changes, with torch 2.15: 32 experts, EP 8,
`--moe-token-dispatcher-type alltoall`. The other ranks do not exist, so this rank gets eight times
the tokens that its own router sends to its four experts, which is not the mean. With a limited
capacity, all experts get equally many tokens, and the peak is exact. The other peaks are larger
because the load is unequal: the peak of 1F1B is that of `--imbalance 1.23`.

The initial router does not explain this number. It was sampled on a CPU: the same sizes, four
layers, random tokens, two seeds, two microbatches each. The hidden states of all tokens become
similar (3% of their power is common in the first layer, 58% in the second, 87% in the fourth). The
experts of this rank get 0.7 to 1.2 times the mean in the first layer and 0 to 2.1 times in the
others, 0.65 to 0.95 over all layers; the most loaded rank gets 1.1 to 4.0 times the mean. So the
load of an untrained router depends on the seed, and the estimate assumes balanced experts.
"""

Rank = Mapping[str, Any]


def table() -> list[str]:
    """Return the lines of the section."""
    measurements = json.loads(FILE.read_text())
    ranks = measurements["ranks"]
    lines = [HEAD, f"{measurements['about']['versions']}.", "", *_summary(ranks), ""]
    experts = json.loads(EXPERTS.read_text())["ranks"]
    later = [LATER, *_memory(experts), "", _permutation(experts)]
    return [*lines, *_memory(ranks), PASSES, *_passes(ranks), *later]


def _permutation(ranks: Sequence[Rank]) -> str:
    """Compare the full backward with and without --moe-permute-fusion."""
    plain, fused = (
        next(pair for pair in _pairs(rank) if pair[0]["kind"] == "BW") for rank in ranks[:2]
    )
    measured, estimated = (plain[index]["ms"] / fused[index]["ms"] - 1 for index in (0, 1))
    return (
        f"Without `--moe-permute-fusion`, a whole backward takes {plain[0]['ms']:.1f} ms, "
        f"{measured:.1%} more than with it (estimated: {plain[1]['ms']:.1f} ms and "
        f"{estimated:.1%}). Forward passes need two to three times the estimate, because Python "
        "reads the number of tokens of every expert from the GPU."
    )


def _off(rank: Rank, what: str) -> float:
    return float(rank["rehearsed"][what] / rank[what] - 1)


def _summary(ranks: Sequence[Rank]) -> Iterator[str]:
    peaks, state_errors = (
        [_off(rank, f"{what}_bytes") for rank in ranks] for what in ("peak", "held")
    )
    adds = [_added(rank) for rank in ranks]
    passes = sum(number for number, _ in adds)
    suffix = f"; the others are within {max(map(abs, peaks)):.2%}" if any(peaks) else ""
    yield (
        f"Of {len(ranks)} ranks, the estimate equals the measured memory between steps to the byte "
        f"in {state_errors.count(0.0)}, and the peak in {peaks.count(0.0)}{suffix}. "
        f"The memory that a pass adds is equal in {passes - sum(wrong for _, wrong in adds)} "
        f"of {passes} kinds of pass and chunk. Before the correction above, {AGREED_FIRST} peaks "
        f"agreed; of all {len(ranks) + LATER_RANKS} measured ranks, "
        f"{peaks.count(0.0) + LATER_EXACT} do now."
    )


def _added(rank: Rank) -> tuple[int, int]:
    """Return how many kinds of pass were measured and rehearsed, and how many differ."""
    pairs = list(_pairs(rank))
    return len(pairs), sum(
        mine["adds_bytes"] != estimated["adds_bytes"] for mine, estimated in pairs
    )


def _pairs(rank: Rank) -> Iterator[tuple[Rank, Rank]]:
    """Yield measured and estimated kinds; an estimate names Megatron's full backward B."""
    measured = {
        (measured_kind["kind"], measured_kind["chunk"]): measured_kind
        for measured_kind in rank["kinds"]
    }
    splits = any(kind == "B" for kind, _ in measured)
    for rehearsed in rank["rehearsed"]["kinds"]:
        kind = "BW" if rehearsed["kind"] == "B" and not splits else rehearsed["kind"]
        if (kind, rehearsed["chunk"]) in measured:
            yield measured[kind, rehearsed["chunk"]], rehearsed


def _memory(ranks: Sequence[Rank]) -> Iterator[str]:
    yield (
        "| case | rank | peak GiB, measured | estimated | error | states GiB | error, bytes | "
        "reserved GiB, measured | estimated | error |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for rank in ranks:
        sizes = (rank["peak_bytes"], rank["rehearsed"]["peak_bytes"])
        peak, rehearsed = (f"{size / GIB:.3f}" for size in sizes)
        bytes_off = rank["rehearsed"]["held_bytes"] - rank["held_bytes"]
        sizes = (rank["reserved_bytes"], rank["rehearsed"]["reserved_bytes"])
        reserved, replayed = (f"{size / GIB:.3f}" for size in sizes)
        yield (
            f"| {rank['name']} | {rank['rank']} | {peak} | {rehearsed} | "
            f"{_off(rank, 'peak_bytes'):+.2%} | {rank['held_bytes'] / GIB:.3f} | {bytes_off} | "
            f"{reserved} | {replayed} | {_off(rank, 'reserved_bytes'):+.2%} |"
        )


def _passes(ranks: Sequence[Rank]) -> Iterator[str]:
    yield f"| case | rank | chunk | {' | '.join(KINDS)} | (B + W) / BW |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    ratios: dict[str, list[float]] = {}
    for rank in ranks:
        if not rank["timed"]:
            continue
        pairs = {
            (mine["chunk"], mine["kind"]): (mine, estimated) for mine, estimated in _pairs(rank)
        }
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
            for kind, (mine, estimated) in times.items():
                ratios.setdefault(kind, []).append(estimated["ms"] / mine["ms"])
            yield f"| {rank['name']} | {rank['rank']} | {chunk} | {' | '.join(cells)} | {ratio} |"
    median_ratios = ", ".join(f"{kind} {median(ratios[kind]):.2f}" for kind in KINDS)
    first, v_half_ms = (_microbatch_ms(ranks, f"70B {name}") for name in ("1f1b", "v-half"))
    yield ""
    yield (
        f"Estimated / measured, median: {median_ratios}. "
        "All passes of a microbatch on rank 0 of the 70B "
        f"model: {first:.1f} ms with 1F1B, {v_half_ms:.1f} ms with V-Half."
    )


def _microbatch_ms(ranks: Sequence[Rank], name: str) -> float:
    """Return the time of the passes of a microbatch on rank 0, all chunks together."""
    (kinds,) = (rank["kinds"] for rank in ranks if rank["name"] == name and not rank["rank"])
    forwards = sum(kind["number"] for kind in kinds if kind["kind"] == "F")
    chunks = len({kind["chunk"] for kind in kinds})
    return float(sum(kind["number"] * kind["ms"] for kind in kinds) * chunks / forwards)
