"""Offloading and recomputation of a plan, in words."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from megatron_vshape.core.check.simulate import peak_in_host
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import FROM_HOST, NO_RECOMPUTE, TO_HOST
from megatron_vshape.core.model.placement import Placement, chunks_of
from megatron_vshape.core.model.schedule import Timeline, Way
from megatron_vshape.view.numbers import percent


def way_text(way: Way, placement: Placement) -> str:
    """Return a way to hold less, such as `copies, recompute mlp in chunk 0`."""
    words = []
    if way.copies:
        words.append("offload all of chunk 0" if way.throughout else "offload")
    settings = settings_text(way.settings, placement)
    if settings:
        words.append(f"recompute {settings}")
    return ", ".join(words) or "schedule only"


def settings_text(settings: Sequence[str], placement: Placement) -> str:
    """Return the settings of recompute by chunk, empty if there is none."""
    used = dict.fromkeys(each for each in settings if each != NO_RECOMPUTE)
    if len(set(settings)) == 1:
        return "".join(used)
    chunks = chunks_of(placement)
    told = []
    for setting in used:
        stages = [stage for stage, own in enumerate(settings) if own == setting]
        of = sorted({chunks[stage] for stage in stages})
        if all(settings[stage] == setting for stage, chunk in enumerate(chunks) if chunk in of):
            noun = "chunk" if len(of) == 1 else "chunks"
            told.append(f"{setting} in {noun} {', '.join(map(str, of))}")
        else:
            told.append(f"{setting} in stages {', '.join(map(str, stages))}")
    return ", ".join(told)


def trades_told(
    timeline: Timeline, costs: Costs, held: Callable[[float], str]
) -> Iterator[tuple[str, str]]:
    """Yield a label and a line for each: what is copied to the host, and what is computed again.

    Nothing where the costs offer neither. `held` writes an amount of memory.
    """
    schedule = timeline.schedule
    if costs.copies:
        copied = Counter(work.stage for work in schedule.copied())
        share = sum(copied.values()) / (schedule.num_stages * schedule.num_microbatches)
        chunks = chunks_of(schedule.placement)
        by_chunk = Counter[int]()
        for stage, count in copied.items():
            by_chunk[chunks[stage]] += count
        of_chunk = schedule.num_devices * schedule.num_microbatches
        each = ", ".join(
            f"{percent(by_chunk[c] / of_chunk)} of chunk {c}" for c in sorted(by_chunk)
        )
        busy = percent(link_share(timeline))
        most = held(max(peak_in_host(schedule, costs)))
        line = f"{percent(share)} of the activations ({each}); at most {most} of host memory per "
        line += f"rank; host link busy {busy}"
        yield "offloading", line if copied else "none (no gain)"
    if costs.recompute:
        yield "recompute", settings_text(schedule.recompute, schedule.placement) or NO_RECOMPUTE


def link_share(timeline: Timeline) -> float:
    """Return the share of the step in which the busiest link to a host copies."""
    busiest = 0.0
    for lane in timeline.schedule.lanes():
        if any(work.kind.resource in (TO_HOST, FROM_HOST) for work in lane.passes):
            starts, ends = timeline.starts[lane.device], timeline.ends[lane.device]
            busiest = max(busiest, sum(ends[at] - starts[at] for at in lane.places))
    return busiest / timeline.makespan
