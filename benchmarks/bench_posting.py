"""Print the gain and the risk of posting receives early if messages are kernels (NCCL).

Three variants: a receive is posted right before its reader (late); early where a wait for the
whole GPU cannot hang (safe: `program.kernels`, the default); one pass before the reader always
(early). A program hangs if it does not end when every rank waits for its GPU in every pass. Step
times are simulated with messages that start when both ranks are ready. `pushed` is the step time
of a transport without receives, such as copies into symmetric memory.
"""

import argparse
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Message,
    Program,
    Receive,
    Release,
    Run,
    Send,
    source_of,
)
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import forward_wave, lower
from megatron_vshape.core.request import AUTO, PlanRequest

CELLS = ((4, 8), (8, 16), (8, 64), (16, 64))


def share_posted_early(program: Program) -> float:
    """Return which share of the receives is posted before the pass before their reader."""
    posted = early = 0
    for row in program.instructions:
        runs, at = 0, {}
        for each in row:
            if isinstance(each, Run):
                runs += 1
            elif isinstance(each, Receive):
                at[each.message] = runs
            elif isinstance(each, Await) and runs:
                posted += 1
                early += at[each.message] < runs
    return early / posted if posted else 0.0


def reposted(program: Program, passes_ahead: int) -> Program:
    """Return the program with every receive so many passes ahead, in the order of its stream.

    None stands before a pass of its own device that its message comes after, which would hang by
    itself.
    """
    after = passes_before(program)
    rows = tuple(tuple(_reposted(row, passes_ahead, after)) for row in program.instructions)
    return Program(program.schedule, rows, passes_ahead, program.planned)


def passes_before(program: Program) -> dict[Message, int]:
    """Return, by message, how many passes of the device that reads it it comes after."""
    rows = program.instructions
    reached = [[0] * len(rows) for _ in rows]  # by device: how many passes of every device
    sent: dict[Message, list[int]] = {}
    at, awake = [0] * len(rows), list(range(len(rows)))
    while awake:
        device = awake.pop()
        for each in rows[device][at[device] :]:
            if isinstance(each, Run):
                reached[device][device] += 1
            elif isinstance(each, Send):
                sent[each.message] = reached[device].copy()
                awake.append(each.message.target)
            elif isinstance(each, Await):
                if each.message not in sent:
                    break
                reached[device] = list(map(max, reached[device], sent[each.message]))
            at[device] += 1
    return {message: passes[message.target] for message, passes in sent.items()}


def _reposted(
    row: Sequence[Instruction], passes_ahead: int, after: Mapping[Message, int]
) -> Iterator[Instruction]:
    rest = [each for each in row if not isinstance(each, Receive | Release)]
    runs, read = 0, {}
    for each in rest:
        runs += isinstance(each, Run)
        if isinstance(each, Await):
            read[each.message] = runs
    posts: dict[int, list[Receive]] = {}
    first: dict[object, int] = {}  # by stream: where the next one of it is posted
    for each in reversed([each for each in row if isinstance(each, Receive)]):
        source, wanted = source_of(each.message), read[each.message] - passes_ahead
        first[source] = max(min(first.get(source, wanted), wanted), after[each.message])
        posts.setdefault(first[source], []).insert(0, each)
    runs = 0
    yield from posts.get(0, ())
    for each in rest:
        yield each
        if isinstance(each, Run):
            runs += 1
            yield from posts.get(runs, ())


def step_us(program: Program, *, is_ideal: bool = False) -> float:
    """Return what a step takes whose messages start once sent and posted, and take `send_us`."""
    planned, rows = program.planned, program.instructions
    took = {
        slot.work: slot.end - slot.start
        for device in range(len(rows))
        for slot in planned.slots(device)
    }
    clock, at = [0.0] * len(rows), [0] * len(rows)
    begun: dict[Message, dict[type, float]] = {}
    awake = list(range(len(rows)))
    while awake:
        device = awake.pop()
        for each in rows[device][at[device] :]:
            if isinstance(each, Run):
                clock[device] += took[each.work]
            elif isinstance(each, Send | Receive):
                time = 0.0 if is_ideal and isinstance(each, Receive) else clock[device]
                begun.setdefault(each.message, {})[type(each)] = time
                awake += [each.message.source, each.message.target]
            elif len(begun.get(each.message, ())) < 2:
                break
            else:
                arrives = max(begun[each.message].values()) + planned.send_us
                clock[device] = max(clock[device], arrives)
            at[device] += 1
    return max(clock)


def table(send: float) -> None:
    """Print a line per schedule and size."""
    print(f"\nF, B, W take 1, 1.15, .85 and a message {send:g}; step times, and how often it hangs")
    print(
        f"{'schedule':26}{'d':>3}{'m':>4} {'late':>8} {'safe':>8} {'early':>8} {'pushed':>8} "
        f"{'safe/pushed':>12} {'posted early':>13} {'posted':>7} {'kept':>5}  hangs: safe, early"
    )
    for name in NAMES:
        for devices, microbatches in CELLS:
            schedule = make(name, devices, microbatches)
            costs = Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, send)
            safe = lower(schedule, simulate(schedule, costs), kernels=True)
            early = reposted(safe, 1)
            times = [step_us(reposted(safe, 0)), step_us(safe), step_us(early)]
            times.append(step_us(safe, is_ideal=True))
            ratio = times[1] / times[-1]
            counts = (safe.peak_posted, safe.peak_unreleased)
            posted, kept = (max(map(count, range(devices))) for count in counts)
            hangs = ", ".join(
                "yes" if deadlocks_under_device_sync(each) else "no" for each in (safe, early)
            )
            print(
                f"{name:26}{devices:>3}{microbatches:>4} "
                + " ".join(f"{each:8.2f}" for each in times)
                + f" {ratio:12.4f} {100 * share_posted_early(safe):11.0f} % {posted:>7} {kept:>5}"
                f"  {hangs}"
            )


def count_hangs(num_plans: int) -> None:
    """Print how many programs can hang: of the catalogue, of evaluations, and of drawn plans."""
    found: dict[str, list[bool]] = {"safe": [], "early": []}
    for schedule, costs in itertools.chain(catalogue_programs(), drawn_plans(num_plans)):
        timeline = None if costs is None else simulate(schedule, costs)
        program = lower(schedule, timeline, kernels=True)
        for how, each in (("safe", program), ("early", reposted(program, 1))):
            found[how].append(bool(deadlocks_under_device_sync(each)))
    for how, hangs in found.items():
        print(f"{how}: {sum(hangs)} of {len(hangs)} programs can hang")


def catalogue_programs() -> Iterator[tuple[Schedule, Costs | None]]:
    """Yield schedules with their costs; evaluations without."""
    for name, devices, rounds in itertools.product(NAMES, (2, 3, 4, 6, 8, 12, 16), (1, 2, 4)):
        schedule = make(name, devices, devices * rounds)
        for send in (0.0, 0.3):
            yield schedule, Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, send)
        yield forward_wave(schedule.placement, devices, devices * rounds), None


def drawn_plans(number: int) -> Iterator[tuple[Schedule, Costs]]:
    """Yield plans for drawn costs of unlike stages and drawn limits."""
    draw = random.Random(1)
    for _ in range(number):
        devices = draw.randint(2, 16)
        times = [tuple(draw.uniform(0.5, 2) for _ in range(2 * devices)) for _ in range(3)]
        held = (1.0,) * (2 * devices)
        costs = Costs(*times, draw.choice((0.0, 0.05, 0.3)), held, held)
        microbatches = draw.randint(devices, 3 * devices)
        limit = draw.uniform(devices + 2, 2 * devices)
        placements = (v_shape(devices),)
        question = PlanRequest(
            AUTO, devices, microbatches, costs, limit=limit, placements=placements
        )
        yield plan_request(question).schedule, costs


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--send", type=float, nargs="+", default=[0.05, 0.3, 1.0])
    parser.add_argument("--plans", type=int, default=200, help="adaptive plans to count hangs of")
    arguments = parser.parse_args()
    for send in arguments.send:
        table(send)
    count_hangs(arguments.plans)


if __name__ == "__main__":
    main()
