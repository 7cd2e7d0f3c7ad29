"""A plugin of the farm: every training step runs another order, drawn at random."""

from __future__ import annotations

import random
import zlib
from typing import Any

from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.step.forward_backward import PipelineRunner


def drawn(like: Schedule, seed: int) -> Schedule:
    """Return a random schedule of its placement with the microbatches of every stage in order.

    Passes are drawn one by one from the passes that could run next on any device, so no device
    waits for another forever. A draw per stage decides whether its backwards are split.
    """
    rng = random.Random(seed)
    splits = [rng.random() < 0.7 for _ in range(like.num_stages)]
    count, last = like.num_microbatches, like.num_stages - 1
    num_done = [dict.fromkeys((Kind.F, Kind.B, Kind.W), 0) for _ in splits]
    rows: list[list[Pass]] = [[] for _ in range(like.num_devices)]

    def could_run(kind: Kind, stage: int) -> bool:
        local_done = num_done[stage]
        if kind is Kind.F:
            limit = count if stage == 0 else num_done[stage - 1][Kind.F]
        elif kind is Kind.B:
            limit = (
                local_done[Kind.F]
                if stage == last
                else min(num_done[stage + 1][Kind.B], local_done[Kind.F])
            )
        else:
            limit = local_done[Kind.B] if splits[stage] else 0
        return local_done[kind] < limit

    while True:
        ready = [(k, s) for s in range(like.num_stages) for k in num_done[s] if could_run(k, s)]
        if not ready:
            break
        kind, stage = rng.choice(ready)
        is_full = kind is Kind.B and not splits[stage]
        work = Pass(Kind.BW if is_full else kind, stage, num_done[stage][kind])
        rows[like.placement[stage]].append(work)
        num_done[stage][kind] += 1
    name = f"drawn with {seed}"
    schedule = Schedule(name, like.num_devices, count, like.placement, tuple(map(tuple, rows)))
    verify(schedule)
    return schedule


def start(rank: int, argument: object) -> None:
    """Make every training step of this process run a different random schedule."""
    original = PipelineRunner._program
    steps = 0

    def program(self: Any, call: Any, groups: Any, fills_waits: bool) -> Any:
        nonlocal steps
        if not call.forward_only:
            planner: Planner = self.planner
            like = planner.plan_step(call.num_microbatches).schedule
            plan = planner._build_step(drawn(like, steps))
            planner.use(plan)
            print(f"order {zlib.crc32(repr(plan.program.schedule.order).encode()):x} runs")
            steps += 1
        return original(self, call, groups, fills_waits)

    PipelineRunner._program = program  # type: ignore[method-assign]
