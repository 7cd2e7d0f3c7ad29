"""Variable-length microbatches of a training step: their lengths and their reordering."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from megatron_vshape.core.check.simulate import costs_of
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import HELD, TIMES
from megatron_vshape.core.request import AUTO
from megatron_vshape.core.variable_length import (
    MicrobatchOrder,
    PassGraph,
    make_pass_graph,
    reorder_microbatches,
)
from megatron_vshape.mcore.refusals import RefusedError, UnsupportedError
from megatron_vshape.mcore.setup.plans import PlannedStep
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.stage import StepContext, StepFeature
from megatron_vshape.runtime.failures import cause_of_others
from megatron_vshape.runtime.p2p import TransportError

logger = logging.getLogger(__name__)

Lengths = Callable[[Any], Sequence[int]]
"""Returns the lengths of the sequences in a microbatch, as the data iterator returns it."""


class _FoundOrder(NamedTuple):
    """The decision of one rank for all ranks that share the microbatches."""

    knows: bool  # whether batches contain lengths
    order: tuple[int, ...] | None = None  # None: the order of the iterator
    fault: str | None = None  # error message, if there is no order


PACKED = ("cu_seqlens", "cu_seqlens_q")
BACKWARD_OF_ATTENTION = 2.5
"""Backward FLOPs of attention relative to forward; without weights, all of them are in B."""


def lengths_of(item: Any, is_unpadded: bool) -> list[int] | None:
    """Return the lengths of the sequences in a microbatch; None if the batch has no lengths.

    Sources are the ends of packed sequences or, if the model gets sequences without padding, a mask
    [b, s] of padded sequences or the shape of the tokens.
    """
    packed = getattr(item, "packed_seq_params", None)
    if isinstance(item, dict):
        packed = item.get("packed_seq_params", packed)
        ends = next((item[name] for name in PACKED if isinstance(item.get(name), Tensor)), None)
    else:
        ends = None
    if ends is None and packed is not None:
        ends = getattr(packed, "cu_seqlens_q", None)
    if ends is not None:
        return [int(each) for each in ends.reshape(-1).diff().tolist() if each > 0]
    if not is_unpadded or not isinstance(item, dict):
        return None
    mask = item.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return [int(each) for each in mask.sum(-1).tolist()]
    tokens = next((item[name] for name in ("tokens", "input_ids") if name in item), None)
    if not isinstance(tokens, Tensor) or tokens.dim() not in (1, 2):
        return None
    return [tokens.shape[-1]] * (tokens.shape[0] if tokens.dim() == 2 else 1)


class InOrder:
    """An iterator over another iterator's microbatches of one step, in the order `order`."""

    def __init__(self, source: Any, order: Sequence[int]) -> None:
        """Set the source; all attributes except `next` are forwarded to it."""
        self._source = source
        self._order = list(order)
        self._read: list[Any] = []
        self._given = 0

    def __iter__(self) -> InOrder:
        return self

    def __next__(self) -> Any:
        number = self._order[self._given]
        self._given += 1
        while len(self._read) <= number:
            self._read.append(next(self._source))
        item, self._read[number] = self._read[number], None
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class PeekableIterator:
    """An iterator with lookahead."""

    def __init__(self, source: Any) -> None:
        """Set the source; all attributes except `next` are forwarded to it."""
        self.source = source
        self._read: deque[Any] = deque()

    def look(self, number: int) -> Any:
        """Return the item `number` positions after the next one, without consuming any."""
        while len(self._read) <= number:
            self._read.append(next(self.source))
        return self._read[number]

    def __iter__(self) -> PeekableIterator:
        return self

    def __next__(self) -> Any:
        return self._read.popleft() if self._read else next(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


class MicrobatchReorderer:
    """Chooses the order of a step's microbatches, equal on all ranks that share them.

    The first context- and tensor-parallel rank of the first stage reads the microbatches of the
    step and decides, because other ranks may get only a part of each batch. Data-parallel replicas
    decide independently.
    """

    def __init__(self, config: Any, given: Lengths | None) -> None:
        """Set the model's config, and the user's function for lengths, if any."""
        self._given = given
        self._is_unpadded = bool(config.variable_seq_lengths)
        self._attention = float(config.kv_channels * config.num_attention_heads)
        self._weights = _weights_of_layer(config, self._attention)
        self._knows: bool | None = None  # whether batches have lengths; None before the first step
        self._graphs: dict[int, tuple[PlannedStep, PassGraph]] = {}
        self.last: MicrobatchOrder | None = None
        self._has_told = False

    def order(
        self, plan: PlannedStep, iterators: Sequence[Any], count: int, groups: Any, first_rank: int
    ) -> tuple[Sequence[int] | None, list[Any]]:
        """Return the order of the microbatches (None: as given), and the iterators to use.

        All ranks of the pipeline call this before they read any of the step's `count` microbatches.
        `first_rank` is the pipeline rank of the first stage.

        Raises:
            RefusedError: On all these ranks, if the user's `lengths` function returns no lengths.
        """
        found: list[Any] = [None]
        finds = False
        read = list(iterators)
        # The decision goes from one rank to its context-parallel group, then to the tensor-parallel
        # group, and from the first stage to all others.
        if self._knows is not False and groups.pp.rank() == first_rank:
            if groups.tp.rank() == 0:
                if groups.cp.rank() == 0:
                    finds = True
                    read, found[0] = self._attempted(plan, iterators, count)
                _broadcast(found, groups.cp, 0, groups.pp.rank())
            _broadcast(found, groups.tp, 0, groups.pp.rank())
        if self._knows is not False:
            _broadcast(found, groups.pp, first_rank, groups.pp.rank())
        if self._knows is False or found[0] is None:
            return None, read
        self._knows, order, fault = found[0]
        if fault is not None:
            # Only this replica has the error, and rank 0 may be in another one.
            raise RefusedError(fault, prints=finds)
        if order is None:
            return None, read
        made: dict[int, InOrder] = {}
        for each in read:
            if each is not None and id(each) not in made:
                made[id(each)] = InOrder(each, order)
        return order, [each if each is None else made[id(each)] for each in read]

    def _attempted(
        self, plan: PlannedStep, iterators: Sequence[Any], count: int
    ) -> tuple[list[Any], _FoundOrder]:
        """Decide; an error is also a result, because the other ranks wait for one."""
        try:
            return self._decided(plan, iterators, count)
        except UnsupportedError as error:
            return list(iterators), _FoundOrder(True, fault=str(error))

    def _decided(
        self, plan: PlannedStep, iterators: Sequence[Any], count: int
    ) -> tuple[list[Any], _FoundOrder]:
        """Return iterators that return the inspected microbatches again, and the decision."""
        first = next((each for each in iterators if hasattr(each, "__next__")), None)
        if first is None:
            return list(iterators), _FoundOrder(False)
        ahead = PeekableIterator(first)
        read = [ahead if each is first else each for each in iterators]
        return read, self._found(plan, count, ahead.look)

    def _found(self, plan: PlannedStep, count: int, look: Callable[[int], Any]) -> _FoundOrder:
        lengths: list[list[int]] = []
        for number in range(count):
            own = self._lengths(look(number))
            if own is None and not lengths:  # other microbatches will not have lengths either
                return _FoundOrder(False)
            lengths.append(own or [])
        return _FoundOrder(True, self._chosen(plan, lengths))

    def _lengths(self, item: Any) -> list[int] | None:
        if self._given is None:
            return lengths_of(item, self._is_unpadded)
        lengths = list(self._given(item))
        if not lengths or not all(isinstance(each, int) and each > 0 for each in lengths):
            raise UnsupportedError(
                f"lengths returned {lengths!r:.60} for a microbatch: it must return the lengths of "
                "its sequences, whole numbers above 0"
            )
        return lengths

    def _chosen(
        self, plan: PlannedStep, lengths: Sequence[Sequence[int]]
    ) -> tuple[int, ...] | None:
        """Return the order with the shortest predicted step; None if it is the given order."""
        if len({tuple(sorted(each)) for each in lengths}) == 1 or not all(map(sum, lengths)):
            return None
        schedule = plan.schedule
        costs = plan.costs or Costs.uniform(schedule.num_devices, schedule.num_stages)
        costs = self.unlike(costs, lengths)
        if id(plan) not in self._graphs:  # the plan is stored too, so that its id stays unique
            self._graphs[id(plan)] = plan, make_pass_graph(schedule, costs_of(schedule, costs))
        # No device may exceed its memory peak in the given order.
        self.last = reorder_microbatches(schedule, costs, 0.0, graph=self._graphs[id(plan)][1])
        if self.last.order == tuple(range(len(lengths))):
            return None
        if not self._has_told and dist.get_rank() == 0:
            self._has_told = True
            gain = self.last.initial_us / self.last.best_us - 1
            logger.warning(
                "variable-length microbatches reordered; estimated step time -%.1f %% "
                "(--pipeline-keep-order keeps their order)",
                100 * gain / (1 + gain),
            )
        return self.last.order

    def unlike(self, costs: Costs, lengths: Sequence[Sequence[int]]) -> Costs:
        """Return costs with each microbatch's share, from the number and lengths of its sequences.

        GEMMs with weights scale with the tokens, attention with the squares of the lengths.
        """
        tokens = [float(sum(each)) for each in lengths]
        squares = [float(sum(x * x for x in each)) for each in lengths]

        def share(attention: float) -> tuple[float, ...]:
            work = [
                t * self._weights + attention * self._attention * s
                for t, s in zip(tokens, squares, strict=True)
            ]
            return tuple(each * len(work) / sum(work) for each in work)

        of_times = share(1.0), share(BACKWARD_OF_ATTENTION), share(0.0)
        by_time = dict(zip(TIMES, of_times, strict=True))
        if costs.whole_backward_us is not None:
            # A full backward costs 2x the forward for GEMMs and 2.5x for attention: half of that
            # relative to GEMMs.
            by_time["whole_backward_us"] = share(BACKWARD_OF_ATTENTION / 2)
        by_name = by_time | dict.fromkeys(HELD, share(0.0))
        return replace(costs, by_microbatch=tuple(by_name.items()))


def _broadcast(found: list[Any], group: Any, source: int, device: int) -> None:
    """Broadcast the decision of one rank to the group.

    Raises:
        TransportError: A rank has exited; the message has the error it reported before.
    """
    if group.size() == 1:
        return
    try:
        dist.broadcast_object_list(found, group=group, group_src=source)
    except RuntimeError as error:
        raise TransportError(
            f"rank {dist.get_rank()} (device {device}): asks for the places of a step's "
            f"microbatches, and the connection failed: {error}{cause_of_others()}"
        ) from error


def _weights_of_layer(config: Any, attention: float) -> float:
    """Return the number of weights per layer that a token is multiplied by."""
    hidden = config.hidden_size
    groups = config.num_query_groups or config.num_attention_heads
    own = hidden * (2 * attention + 2 * groups * config.kv_channels)
    inner = config.ffn_hidden_size
    if config.num_moe_experts:
        inner = (config.moe_ffn_hidden_size or inner) * config.moe_router_topk
    return float(own + hidden * inner * (3 if config.gated_linear_unit else 2))


class VariableLength(StepFeature):
    """Reorders the microbatches of a planned schedule if that shortens the step."""

    def __init__(self, runner: PipelineRunner) -> None:
        """Set the runner, whose planner plans the step."""
        self._runner = runner
        self._reorderer: MicrobatchReorderer | None = None  # set once microbatches can be reordered
        self._keeps_order: bool | None = None  # agreed by all ranks once; None before

    def change_data(self, context: StepContext) -> None:
        """Reorder the microbatches of this step, and read them in that order.

        If ranks may be in different steps, they would have to wait for each other to agree on an
        order.
        """
        pipeline, config, count = context.pipeline, context.config, context.num_microbatches
        if pipeline.options.keep_order or self._runner.overlaps_steps:
            return
        if pipeline.choice.name != AUTO or not may_reorder(config):
            return
        plan = pipeline.planner.plan_step(count)
        if plan.schedule.num_microbatches != count:  # parts of microbatches
            return
        if self._keeps_order is None:
            self._keeps_order = has_dropout(context.chunks, context.groups.pp)
        if self._keeps_order:
            return
        if self._reorderer is None:
            self._reorderer = MicrobatchReorderer(config, pipeline.options.lengths)
        first_rank = pipeline.choice.placement[0]
        context.order, context.iterators = self._reorderer.order(
            plan, context.iterators, count, context.groups, first_rank
        )


def has_dropout(chunks: Sequence[nn.Module], group: Any) -> bool:
    """Return whether any rank of the pipeline has an active Dropout that no config describes.

    Adapters (LoRA) have such modules. After reordering, a microbatch would get the random numbers
    of another one. All ranks of `group` call this.
    """
    modules = (each for chunk in chunks for each in chunk.modules())
    own = any(isinstance(each, _DropoutNd) and each.p > 0 for each in modules)
    everyones = [own] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    if any(everyones) and dist.get_rank() == 0:
        logger.info("microbatches keep their order: the model has an active Dropout module")
    return any(everyones)


def may_reorder(config: Any) -> bool:
    """Return whether reordering microbatches changes gradients by rounding only.

    This requires that no microbatch draws random numbers. Megatron's global_aux_loss depends on the
    expert loads of the step so far, so each microbatch's loss depends on the order.
    """
    draws = config.attention_dropout, config.hidden_dropout, config.moe_input_jitter_eps
    balancing = config.moe_router_load_balancing_type
    so_far = "global_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing)
    return not any(draws) and not (config.num_moe_experts and so_far)
