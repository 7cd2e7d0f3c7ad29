"""Measure the runtime: its overhead per pass, and the ratio of a run to its simulation.

    python scripts/bench_runtime.py [--ranks 8] [--microbatches 32] [--rounds 3]

Part (a): every pass sleeps (20 / 23 / 17 ms for F / B / W), so that 8 ranks fit on any machine;
the measured makespan is compared with the simulated one. Part (b): empty passes without
communication, to measure the runner alone; one rank, time per pass. It also prints the
time of one label (see docs/troubleshooting.md); the runner sets one for each pass and wait.
Part (c), real training against other implementations, is `scripts/bench_training.py`.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Message
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program
from megatron_vshape.runtime.weight_jobs import label

MARGIN_S = 0.0003  # delay of a sleep on an idle machine
NAMES = ("v-min", "v-half", "v-zb")
PASS_MS = (20.0, 23.0, 17.0)
SHAPE = (64, 1, 64)


def sleep_exactly(seconds: float) -> None:
    """Sleep for exactly this time: a plain sleep ends about 0.2 ms late, unlike a real pass."""
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - MARGIN_S, 0.0))
    while time.perf_counter() < end:
        os.sched_yield()


class SleepingStage:
    """A stage whose passes sleep for a given time."""

    def __init__(self, costs: Costs, stage: int) -> None:
        self.forward_s = costs.forward_us[stage] / 1e6
        self.backward_s = costs.backward_us[stage] / 1e6
        self.weight_s = costs.weight_us[stage] / 1e6

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep for the time of F."""
        sleep_exactly(self.forward_s)
        return torch.zeros(SHAPE)

    def backward_inputs(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep for the time of B."""
        sleep_exactly(self.backward_s)
        return torch.zeros(SHAPE)

    def backward_weights(self, microbatch: int) -> None:
        """Sleep for the time of W."""
        sleep_exactly(self.weight_s)

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep for the time of B and W."""
        sleep_exactly(self.backward_s + self.weight_s)
        return torch.zeros(SHAPE)


class IdleStage:
    """A stage whose passes do nothing."""

    def __init__(self) -> None:
        self.result = torch.zeros(SHAPE)

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Do nothing."""
        return self.result

    backward_inputs = backward = forward

    def backward_weights(self, microbatch: int) -> None:
        """Do nothing."""


class NoTransport:
    """A transport without communication."""

    def __init__(self) -> None:
        self.result = torch.zeros(SHAPE)

    def post(self, message: Message) -> None:
        """Do nothing."""

    def wait(self, message: Message) -> torch.Tensor:
        """Return the same tensor for every message."""
        return self.result

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    drain = poll


def costs_of(schedule: Schedule) -> Costs:
    """Return the costs of the sleeping passes in us; messages are free."""
    forward, backward, weight = (1000 * ms for ms in PASS_MS)
    return Costs.uniform(schedule.num_devices, schedule.num_stages, forward, backward, weight)


def on_ranks(num_ranks: int, measure: Callable[..., Any], *args: object) -> Any:
    """Run `measure(transport, *args)` on gloo ranks and return the result of the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_run_rank, args=(queue, rank, num_ranks, store, measure, args))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        measured = queue.get()
        for process in ranks:
            process.join()
    return measured


def _run_rank(
    queue: "multiprocessing.Queue[Any]",
    rank: int,
    num_ranks: int,
    store: str,
    measure: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    transport = Transport([list(range(num_ranks))], SHAPE, torch.float32, torch.device("cpu"))
    measured = measure(transport, *args)
    if rank == 0:
        queue.put(measured)
    transport.close()
    dist.destroy_process_group()


def measure_makespan(transport: Transport, schedules: list[Schedule], rounds: int) -> list[float]:
    """Return the median time of the slowest rank, per schedule, in us."""
    rank = transport.device
    medians = []
    for schedule in schedules:
        costs = costs_of(schedule)
        program = lower(schedule, simulate(schedule, costs))
        transport.prepare(program)
        local_stages = stages_of(schedule.placement, schedule.num_devices)[rank]
        stages = {stage: SleepingStage(costs, stage) for stage in local_stages}
        times = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            run_program(program, rank, stages, transport)
            end = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(end, op=dist.ReduceOp.MAX)
            times.append(1e6 * float(end))
        medians.append(statistics.median(times))
    return medians


def print_efficiency(num_ranks: int, num_microbatches: int, rounds: int) -> None:
    """Print part (a)."""
    schedules = [make(name, num_ranks, num_microbatches) for name in NAMES]
    measured = on_ranks(num_ranks, measure_makespan, schedules, rounds)
    print(f"(a) {num_ranks} ranks, {num_microbatches} microbatches, passes sleep {PASS_MS} ms")
    print(f"    {'schedule':10} {'simulated ms':>13} {'measured ms':>12} {'ratio':>7}  (goal 1.03)")
    for schedule, measured_us in zip(schedules, measured, strict=True):
        expected = simulate(schedule, costs_of(schedule)).makespan
        ratio = measured_us / expected
        print(
            f"    {schedule.name:10} {expected / 1e3:13.1f} {measured_us / 1e3:12.1f} {ratio:7.4f}"
        )


def print_overhead(rounds: int) -> None:
    """Print part (b)."""
    schedule = make("v-half", 4, 64)
    program = lower(schedule)
    stages = {stage: IdleStage() for stage in stages_of(schedule.placement, 4)[1]}
    passes = len(schedule.order[1])
    times = []
    for _ in range(10 * rounds):
        start = time.perf_counter()
        run_program(program, 1, stages, NoTransport())
        times.append((time.perf_counter() - start) / passes * 1e6)
    print(f"(b) the runner alone: {statistics.median(times):.2f} us per pass  (goal 60)")

    def labelled() -> None:
        with label(str, schedule.order[1][0]):
            pass

    label_us = min(timeit.repeat(labelled, number=1000, repeat=10 * rounds)) * 1e3
    print(f"    a label where nothing records: {label_us:.2f} us  (goal 1)")


def main() -> None:
    """Parse the command line and print both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print_efficiency(args.ranks, args.microbatches, args.rounds)
    print_overhead(args.rounds)


if __name__ == "__main__":
    main()
