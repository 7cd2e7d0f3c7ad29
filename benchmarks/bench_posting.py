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
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

CELLS = ((4, 8), (8, 16), (8, 64), (16, 64))


def share_posted_early(program: Program) -> float:
    """Return which share of the receives is posted before the pass before their reader."""
    posted = num_early = 0
    for row in program.instructions:
        runs, runs_at_post = 0, {}
        for instruction in row:
            if isinstance(instruction, Run):
                runs += 1
            elif isinstance(instruction, Receive):
                runs_at_post[instruction.message] = runs
            elif isinstance(instruction, Await) and runs:
                posted += 1
                num_early += runs_at_post[instruction.message] < runs
    return num_early / posted if posted else 0.0


def reposted(program: Program, passes_ahead: int) -> Program:
    """Return the program with every receive a number of passes earlier, in stream order.

    A receive is never moved before a pass of its device on which its message depends, because that
    would hang in any case.
    """
    num_passes_before = passes_before(program)
    rows = tuple(
        tuple(_reposted(row, passes_ahead, num_passes_before)) for row in program.instructions
    )
    return Program(program.schedule, rows, passes_ahead, program.planned)


def passes_before(program: Program) -> dict[Message, int]:
    """Return, by message, how many passes of the device that reads it it comes after."""
    rows = program.instructions
    passes_of_device = [[0] * len(rows) for _ in rows]  # by device: how many passes of every device
    passes_at_send: dict[Message, list[int]] = {}
    position, awake = [0] * len(rows), list(range(len(rows)))
    while awake:
        device = awake.pop()
        for instruction in rows[device][position[device] :]:
            if isinstance(instruction, Run):
                passes_of_device[device][device] += 1
            elif isinstance(instruction, Send):
                passes_at_send[instruction.message] = passes_of_device[device].copy()
                awake.append(instruction.message.target)
            elif isinstance(instruction, Await):
                if instruction.message not in passes_at_send:
                    break
                passes_of_device[device] = list(
                    map(max, passes_of_device[device], passes_at_send[instruction.message])
                )
            position[device] += 1
    return {message: passes[message.target] for message, passes in passes_at_send.items()}


def _reposted(
    row: Sequence[Instruction], passes_ahead: int, num_passes_before: Mapping[Message, int]
) -> Iterator[Instruction]:
    remaining = [
        instruction for instruction in row if not isinstance(instruction, Receive | Release)
    ]
    runs, read = 0, {}
    for instruction in remaining:
        runs += isinstance(instruction, Run)
        if isinstance(instruction, Await):
            read[instruction.message] = runs
    posts: dict[int, list[Receive]] = {}
    first: dict[object, int] = {}  # by stream: where the next one of it is posted
    for instruction in reversed(
        [instruction for instruction in row if isinstance(instruction, Receive)]
    ):
        source, target = source_of(instruction.message), read[instruction.message] - passes_ahead
        first[source] = max(
            min(first.get(source, target), target), num_passes_before[instruction.message]
        )
        posts.setdefault(first[source], []).insert(0, instruction)
    runs = 0
    yield from posts.get(0, ())
    for instruction in remaining:
        yield instruction
        if isinstance(instruction, Run):
            runs += 1
            yield from posts.get(runs, ())


def step_us(program: Program, *, is_ideal: bool = False) -> float:
    """Return the step time if messages start once sent and posted, and need `send_us`."""
    planned, rows = program.planned, program.instructions
    duration_us = {
        slot.work: slot.end - slot.start
        for device in range(len(rows))
        for slot in planned.slots(device)
    }
    clock, position = [0.0] * len(rows), [0] * len(rows)
    start_us: dict[Message, dict[type, float]] = {}
    awake = list(range(len(rows)))
    while awake:
        device = awake.pop()
        for instruction in rows[device][position[device] :]:
            if isinstance(instruction, Run):
                clock[device] += duration_us[instruction.work]
            elif isinstance(instruction, Send | Receive):
                time = 0.0 if is_ideal and isinstance(instruction, Receive) else clock[device]
                start_us.setdefault(instruction.message, {})[type(instruction)] = time
                awake += [instruction.message.source, instruction.message.target]
            elif len(start_us.get(instruction.message, ())) < 2:
                break
            else:
                arrives = max(start_us[instruction.message].values()) + planned.send_us
                clock[device] = max(clock[device], arrives)
            position[device] += 1
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
            early_program = reposted(safe, 1)
            times = [step_us(reposted(safe, 0)), step_us(safe), step_us(early_program)]
            times.append(step_us(safe, is_ideal=True))
            ratio = times[1] / times[-1]
            counts = (safe.peak_posted, safe.peak_unreleased)
            posted, max_kept = (max(map(count, range(devices))) for count in counts)
            hangs = ", ".join(
                "yes" if deadlocks_under_device_sync(candidate) else "no"
                for candidate in (safe, early_program)
            )
            print(
                f"{name:26}{devices:>3}{microbatches:>4} "
                + " ".join(f"{step_time:8.2f}" for step_time in times)
                + f" {ratio:12.4f} {100 * share_posted_early(safe):11.0f} % "
                f"{posted:>7} {max_kept:>5}"
                f"  {hangs}"
            )


def count_hangs(num_plans: int) -> None:
    """Print how many programs can hang: of the catalogue, of evaluations, and of drawn plans."""
    hangs_by_posting: dict[str, list[bool]] = {"safe": [], "early": []}
    for schedule, costs in itertools.chain(catalogue_programs(), drawn_plans(num_plans)):
        timeline = None if costs is None else simulate(schedule, costs)
        program = lower(schedule, timeline, kernels=True)
        for how, candidate in (("safe", program), ("early", reposted(program, 1))):
            hangs_by_posting[how].append(bool(deadlocks_under_device_sync(candidate)))
    for how, hangs in hangs_by_posting.items():
        print(f"{how}: {sum(hangs)} of {len(hangs)} programs can hang")


def catalogue_programs() -> Iterator[tuple[Schedule, Costs | None]]:
    """Yield schedules with their costs; evaluations without."""
    for name, devices, rounds in itertools.product(NAMES, (2, 3, 4, 6, 8, 12, 16), (1, 2, 4)):
        schedule = make(name, devices, devices * rounds)
        for send in (0.0, 0.3):
            yield schedule, Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, send)
        yield forward_wave(schedule.placement, devices, devices * rounds), None


def drawn_plans(number: int) -> Iterator[tuple[Schedule, Costs]]:
    """Yield plans for random costs of different stages and random memory limits."""
    draw = random.Random(1)
    for _ in range(number):
        devices = draw.randint(2, 16)
        times = [tuple(draw.uniform(0.5, 2) for _ in range(2 * devices)) for _ in range(3)]
        activation_memory = (1.0,) * (2 * devices)
        costs = Costs.of(
            *times, draw.choice((0.0, 0.05, 0.3)), activation_memory, activation_memory
        )
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
