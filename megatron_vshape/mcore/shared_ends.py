"""Measure the passes of vocabulary parallelism on the available ranks.

Each rank has the rows of one of `devices` devices, whatever the number of ranks. All ranks run the
computation of training (`step.vocabulary`) at the same time. Reductions need ranks of several
stages.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.model.kinds import (
    HEAD_WEIGHT,
    LOGITS,
    LOOKED_UP,
    LOOKUP,
    LOOKUP_WEIGHT,
    LOSS,
)
from megatron_vshape.mcore.one_device import WARM_UP, Model, observed
from megatron_vshape.runtime.measure import PassTimer
from megatron_vshape.runtime.together import Together
from megatron_vshape.runtime.vocabulary import Logits, Rows, Statistics, add_rows, look_up
from megatron_vshape.runtime.weight_jobs import fused_kernel

TIMEOUT_S = 600.0


def measure(model: Model, devices: int, heads: int, repeats: int) -> dict[str, float]:
    """Return the median times of these passes in us with `heads` output layers, by cost name.

    Without ranks of other stages, the times of reductions are missing.
    """
    together = _together(model)
    timer = PassTimer(torch.device(model.device))
    ends = _Ends(model, devices, heads, together, timer)
    for microbatch in range(WARM_UP + repeats):
        ends.run(microbatch)
    times: dict[str, list[float]] = {}
    for work, start, end in timer.slots():
        if work.microbatch >= WARM_UP:
            times.setdefault(work.kind.time, []).append(end - start)
    if together is not None:
        together.close()
    return {name: median(each) for name, each in times.items()}


def _together(model: Model) -> Together | None:
    """Return the collectives over one rank per stage; None with one stage."""
    world, of_stage = dist.get_world_size(), model.ranks
    if world <= of_stage:
        return None
    pipelines = [list(range(at, world, of_stage)) for at in range(of_stage)]
    place = dist.get_rank() % of_stage

    def make_group(what: str) -> Any:
        return [dist.new_group(ranks, group_desc=f"{what}, {ranks}") for ranks in pipelines][place]

    return Together(pipelines[place], make_group, torch.device(model.device), TIMEOUT_S)


class _Ends:
    """A rank's rows of the embedding and the output layer."""

    def __init__(
        self, model: Model, devices: int, heads: int, together: Together | None, timer: PassTimer
    ) -> None:
        make = partial(torch.randn, device=model.device, dtype=model.torch_dtype)
        self.vocabulary = model.vocabulary_size
        rows = -(-self.vocabulary // (model.tensor_parallel * devices))
        self.table = make(rows, model.hidden_size)
        self.table.main_grad = torch.zeros_like(  # type: ignore[attr-defined]
            self.table, dtype=torch.float32
        )
        shape = (heads, model.microbatch_size, model.sequence_length)
        self.tokens = torch.randint(self.vocabulary, shape, device=model.device)
        self.hidden = make(self.tokens.numel(), model.hidden_size)
        self.gradient = torch.rand(self.tokens.numel(), device=model.device)
        self.kernel = fused_kernel(self.table.device.type, torch.float32, model.torch_dtype)
        self.together, self.timer = together, timer

    def run(self, microbatch: int) -> None:
        """Run all passes of a microbatch one after another."""
        labels, table = self.tokens.flatten(), self.table
        with observed(self.timer, LOOKUP, microbatch):
            embedded = [look_up(table, each, 0) for each in self.tokens]
        with observed(self.timer, LOGITS, microbatch):
            made = Logits.of(table, self.hidden, labels, 0, asks_best=len(self.tokens) > 1)
            product = made.softmax @ table
            own = torch.stack(made.statistics)
        whole = Statistics.whole(own.unsqueeze(0), labels, self.vocabulary)
        if self.together is not None:
            self._sum(self.together, microbatch, embedded, made, product, own)
        with observed(self.timer, HEAD_WEIGHT, microbatch):
            made.add_weight_gradient(table, whole, self.gradient, self.kernel)
        with observed(self.timer, LOOKUP_WEIGHT, microbatch):
            add_rows(table, Rows.of(labels, 0, len(table)), self.hidden)

    def _sum(
        self,
        together: Together,
        microbatch: int,
        embedded: list[Tensor],
        made: Logits,
        product: Tensor,
        own: Tensor,
    ) -> None:
        """Run LOOKED_UP and LOSS, which all ranks start at the same time."""

        def sum_embedded() -> Tensor:
            return [together.sum_to(0, each, "the embeddings' sum") for each in embedded][0]

        def sum_logits() -> Tensor:
            everyones = together.gather(own, "the maxima and sums")
            whole = Statistics.whole(everyones, self.tokens.flatten(), self.vocabulary)
            part = made.input_gradient(self.table, product, whole)
            return together.sum_to(0, part, "the gradients")

        for kind, job in (LOOKED_UP, sum_embedded), (LOSS, sum_logits):
            together.begin(lambda: together.gather(own[0, :1], "all ranks"), [own]).result()
            with observed(self.timer, kind, microbatch):
                together.begin(job, [own]).result()
