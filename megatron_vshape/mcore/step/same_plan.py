"""Check before a step that all ranks run the same program.

One rank plans for all, but each rank builds its program from its own copy of costs and files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch.distributed as dist

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import Beside
from megatron_vshape.mcore.setup.recent import keep, recall


class Agreement:
    """Compares the programs of all ranks of the world, once per program."""

    def __init__(self) -> None:
        self._agreed: dict[int, Program] = {}  # by number of microbatches

    def check(self, program: Program, beside: Mapping[Pass, Beside] | None = None) -> None:
        """Check that all ranks run this program; all ranks call this for the same steps.

        If data-parallel replicas ran different schedules, they would start their reductions in
        different orders, which hangs or sums wrong tensors. The same is true for tensor-parallel
        ranks that run different jobs inside a B. Ranks of one pipeline with different programs
        could wait for each other forever.

        Args:
            program: The program of this step.
            beside: The W jobs that run inside each B.

        Raises:
            ScheduleError: On all ranks, if one has a different program.
        """
        schedule = program.schedule
        if recall(self._agreed, schedule.num_microbatches) is program:
            return
        text = f"{schedule.placement} {program.text()} {sorted((beside or {}).items())}"
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
