"""Measure the cost of a barrier between iterations, with and without post-validation.

    python benchmarks/bench_post_validation.py [--ranks 8] [--microbatches 32] [--iterations 20]

Every pass sleeps, so that 8 ranks fit on any machine. After each iteration, all ranks reduce one
number, as for a gradient norm. In one variant they wait for the result. In the other, they run the
first forwards of the next iteration and wait before its first backward. Both are compared with a
simulation of all iterations that includes the measured message time. A message between sleeping
processes needs about 0.5 ms, which is 2% of a pass of 20 ms, so the passes here last 40 ms. On
GPUs, a message needs microseconds.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import torch
import torch.distributed as dist
from bench_runtime import SleepingStage, on_ranks

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.early_start import forward_stop_point
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import ProgramRun

GOAL = 1.02


def in_a_row(schedule: Schedule, iterations: int) -> Schedule:
    """Return the schedule of a number of iterations without barriers between them."""
    size = schedule.num_microbatches
    rows = (
        tuple(
            Pass(kind, stage, microbatch + number * size)
            for number in range(iterations)
            for kind, stage, microbatch in row
        )
        for row in schedule.order
    )
    return replace(schedule, num_microbatches=size * iterations, order=tuple(rows))


def iterate(
    program: Program, transport: Transport, costs: Costs, iterations: int, goes_ahead: bool
) -> float:
    """Return the seconds of the slowest rank for all iterations."""
    rank = dist.get_rank()
    local_stages = stages_of(program.schedule.placement, dist.get_world_size())[rank]
    stages = {stage: SleepingStage(costs, stage) for stage in local_stages}
    ends = forward_stop_point(program)
    number = torch.ones(1)
    dist.barrier()
    start = time.perf_counter()
    run = ProgramRun(program, rank, stages, transport)
    for iteration in range(1, iterations + 1):
        run.finish()
        work = dist.all_reduce(number, async_op=True)
        run = ProgramRun(program, rank, stages, transport)
        if goes_ahead and iteration < iterations:
            run.advance(ends[rank])
        work.wait()
    step_s = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(step_s, op=dist.ReduceOp.MAX)
    return float(step_s)


def message_us(rounds: int) -> float:
    """Return the median time of a message to a rank that sleeps till it comes, in us."""
    send_time = torch.zeros(2, dtype=torch.float64)
    times_us = []
    for _ in range(rounds):
        if dist.get_rank() == 0:
            time.sleep(0.02)
            send_time[0] = time.perf_counter()
            dist.send(send_time, 1)
        elif dist.get_rank() == 1:
            dist.recv(send_time, 0)
            times_us.append(1e6 * (time.perf_counter() - float(send_time[0])))
    median_us = torch.tensor(
        [statistics.median(times_us) if times_us else 0.0], dtype=torch.float64
    )
    dist.broadcast(median_us, 1)
    return float(median_us)


def measure(
    transport: Transport, schedule: Schedule, costs: Costs, iterations: int
) -> tuple[float, float, float]:
    """Return the seconds of all iterations, with a barrier and without, and a message's us."""
    message = message_us(rounds=50)
    program = lower(schedule, simulate(schedule, costs))
    transport.prepare(program)
    waits = iterate(program, transport, costs, iterations, goes_ahead=False)
    ahead = iterate(program, transport, costs, iterations, goes_ahead=True)
    return waits, ahead, message


def main() -> None:
    """Parse the command line, run both variants and print measured and simulated times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="v-zb")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--pass-ms", default="40,40,40", metavar="F,B,W")
    args = parser.parse_args()
    forward, backward, weight = (1000 * float(ms) for ms in args.pass_ms.split(","))
    schedule = make(args.schedule, args.ranks, args.microbatches)
    costs = Costs.uniform(args.ranks, schedule.num_stages, forward, backward, weight)
    chunks = schedule.num_stages / args.ranks
    busy_us = args.microbatches * chunks * (forward + backward + weight)
    *measured, send_us = on_ranks(args.ranks, measure, schedule, costs, args.iterations)
    costs = replace(costs, send_us=send_us)
    apart_us = simulate(schedule, costs).makespan
    together_us = simulate(in_a_row(schedule, args.iterations), costs).makespan / args.iterations
    print(
        f"{args.schedule}, {args.ranks} ranks, {args.microbatches} microbatches, passes sleep "
        f"{args.pass_ms} ms; {args.iterations} iterations, each {busy_us / 1e3:.0f} ms busy; "
        f"message {send_us / 1e3:.2f} ms"
    )
    print(f"{'':24} {'simulated':>10} {'measured':>10}   time per iteration / busy time")
    names = ("with barrier", "with post-validation")
    for name, expected, seconds in zip(names, (apart_us, together_us), measured, strict=True):
        measured_us = 1e6 * seconds / args.iterations
        goal = f"   (goal {GOAL})" if name == names[1] else ""
        print(f"{name:24} {expected / busy_us:10.4f} {measured_us / busy_us:10.4f}{goal}")


if __name__ == "__main__":
    main()
