"""Before a step runs, ranks make sure that all run the same, of a plan that one has made for all.

Each has made its program of that by itself, from the costs and files that it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch.distributed as dist

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.hiding import Beside
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.mcore.setup.recent import keep, recall


class Agreement:
    """Compares the programs of all ranks of the world, each once."""

    def __init__(self) -> None:
        self._agreed: dict[int, Program] = {}  # by number of microbatches

    def check(self, program: Program, beside: Mapping[Pass, Beside] | None = None) -> None:
        """Return if all ranks run this program in the step; all call this for the same steps.

        Replicas that run unlike orders would start their reductions in unlike orders, which hangs
        or adds up what does not belong together. So would tensor-parallel ranks of which not all
        run the same jobs inside a B: `beside` says which. Ranks of one pipeline that post receives
        by unlike programs could wait for each other for ever.

        Raises:
            ScheduleError: on all ranks, if one has another.
        """
        schedule = program.schedule
        if recall(self._agreed, schedule.num_microbatches) is program:
            return
        settings = f"{schedule.placement} {schedule.half_duplex}"
        text = f"{settings} {program.text()} {sorted((beside or {}).items())}"
        own = hashlib.sha256(text.encode()).hexdigest()
        everyones = [own] * dist.get_world_size()
        dist.all_gather_object(everyones, own)
        others = [rank for rank, each in enumerate(everyones) if each != everyones[0]]
        if others:
            raise ScheduleError(
                f"rank {others[0]} has planned another order than rank 0 for "
                f"{schedule.num_microbatches} microbatches: give every node the same costs and "
                "schedule files"
            )
        keep(self._agreed, schedule.num_microbatches, program)
