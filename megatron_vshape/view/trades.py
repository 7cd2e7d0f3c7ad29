"""Description of a plan's offloading."""

from collections import Counter
from collections.abc import Callable, Iterator

from megatron_vshape.core.check.simulate import peak_in_host
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import FROM_HOST, TO_HOST
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import MemoryStrategy, Timeline
from megatron_vshape.view.numbers import percent


def way_text(way: MemoryStrategy) -> str:
    """Describe a strategy to save memory, such as `offload all of chunk 0`."""
    if way.copies:
        return "offload all of chunk 0" if way.throughout else "offload"
    return "schedule only"


def trades_told(
    timeline: Timeline, costs: Costs, held: Callable[[float], str]
) -> Iterator[tuple[str, str]]:
    """Yield a label and a line about offloading, if the costs have it; `held` formats memory."""
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


def link_share(timeline: Timeline) -> float:
    """Return the share of the step in which the busiest host link copies."""
    busiest = 0.0
    for lane in timeline.schedule.lanes():
        if any(work.kind.resource in (TO_HOST, FROM_HOST) for work in lane.passes):
            starts, ends = timeline.starts[lane.device], timeline.ends[lane.device]
            busiest = max(busiest, sum(ends[at] - starts[at] for at in lane.places))
    return busiest / timeline.makespan
