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
from megatron_vshape.core.model.kinds import HELD, TIMES, Kind
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.core.variable_length import (
    MicrobatchOrder,
    PassGraph,
    make_pass_graph,
    reorder_microbatches,
)
from megatron_vshape.mcore.refusals import RefusedError, UnsupportedError
from megatron_vshape.mcore.setup.plans import PlannedStep
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.microbatches import ForwardingIterator
from megatron_vshape.mcore.step.stage import StepData, StepFeature, TrainerCall
from megatron_vshape.runtime.failures import cause_of_others
from megatron_vshape.runtime.hosts import gather_objects
from megatron_vshape.runtime.p2p import TransportError

logger = logging.getLogger(__name__)

Lengths = Callable[[Any], Sequence[int]]
"""Returns the lengths of the sequences in a microbatch, as the data iterator returns it."""


class _OrderDecision(NamedTuple):
    """The decision of one rank for all ranks that share the microbatches."""

    has_lengths: bool  # whether batches contain lengths
    order: tuple[int, ...] | None = None  # None: the order of the iterator
    fault: str | None = None  # error message, if there is no order


PACKED = ("cu_seqlens", "cu_seqlens_q")
_ATTENTION_BACKWARD_RATIO = 2.5
"""Backward FLOPs of attention relative to forward; without weights, all of them are in B."""


def lengths_of(item: Any, is_unpadded: bool) -> list[int] | None:
    """Return the lengths of the sequences in a microbatch; None if the batch has no lengths.

    Sources are the ends of packed sequences or, if the model gets sequences without padding, a mask
    [b, s] of padded sequences or the shape of the tokens.
    """
    packed = getattr(item, "packed_seq_params", None)
    if isinstance(item, dict):
        packed = item.get("packed_seq_params", packed)
        offsets = next((item[name] for name in PACKED if isinstance(item.get(name), Tensor)), None)
    else:
        offsets = None
    if offsets is None and packed is not None:
        offsets = getattr(packed, "cu_seqlens_q", None)
    if offsets is not None:
        return [int(length) for length in offsets.reshape(-1).diff().tolist() if length > 0]
    if not is_unpadded or not isinstance(item, dict):
        return None
    mask = item.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return [int(length) for length in mask.sum(-1).tolist()]
    tokens = next((item[name] for name in ("tokens", "input_ids") if name in item), None)
    if not isinstance(tokens, Tensor) or tokens.dim() not in (1, 2):
        return None
    return [tokens.shape[-1]] * (tokens.shape[0] if tokens.dim() == 2 else 1)


class InOrder(ForwardingIterator):
    """An iterator over another iterator's microbatches of one step, in the order `order`."""

    def __init__(self, source: Any, order: Sequence[int]) -> None:
        super().__init__(source)
        self._order = list(order)
        self._read: list[Any] = []
        self._num_returned = 0

    def __next__(self) -> Any:
        number = self._order[self._num_returned]
        self._num_returned += 1
        while len(self._read) <= number:
            self._read.append(next(self.source))
        item, self._read[number] = self._read[number], None
        return item


class PeekableIterator(ForwardingIterator):
    """An iterator with lookahead."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._read: deque[Any] = deque()

    def look(self, number: int) -> Any:
        """Return the item `number` positions after the next one, without consuming any."""
        while len(self._read) <= number:
            self._read.append(next(self.source))
        return self._read[number]

    def __next__(self) -> Any:
        return self._read.popleft() if self._read else next(self.source)


class MicrobatchReorderer:
    """Chooses the order of a step's microbatches, equal on all ranks that share them.

    The first context- and tensor-parallel rank of the first stage reads the microbatches of the
    step and decides, because other ranks may get only a part of each batch. Data-parallel replicas
    decide independently.
    """

    def __init__(self, config: Any, lengths_function: Lengths | None) -> None:
        """Set the model's config, and the user's function for lengths, if any."""
        self._lengths_function = lengths_function
        self._is_unpadded = bool(config.variable_seq_lengths)
        self._attention = float(config.kv_channels * config.num_attention_heads)
        self._weights = _weights_of_layer(config, self._attention)
        self._has_lengths: bool | None = None  # of the batches; None before the first step
        self._graphs: dict[int, tuple[PlannedStep, PassGraph]] = {}
        self.last: MicrobatchOrder | None = None
        self._has_logged = False

    def order(
        self, plan: PlannedStep, iterators: Sequence[Any], count: int, groups: Any, first_rank: int
    ) -> tuple[Sequence[int] | None, list[Any]]:
        """Return the order of the microbatches (None: as given), and the iterators to use.

        All ranks of the pipeline call this before they read any of the step's `count` microbatches.
        `first_rank` is the pipeline rank of the first stage.

        Raises:
            RefusedError: On all these ranks, if the user's `lengths` function returns no lengths.
        """
        decision: list[Any] = [None]
        is_deciding = False
        readers = list(iterators)
        # The decision goes from one rank to its context-parallel group, then to the tensor-parallel
        # group, and from the first stage to all others.
        if self._has_lengths is not False and groups.pp.rank() == first_rank:
            if groups.tp.rank() == 0:
                if groups.cp.rank() == 0:
                    is_deciding = True
                    readers, decision[0] = self._try_to_decide(plan, iterators, count)
                _broadcast(decision, groups.cp, 0, groups.pp.rank())
            _broadcast(decision, groups.tp, 0, groups.pp.rank())
        if self._has_lengths is not False:
            _broadcast(decision, groups.pp, first_rank, groups.pp.rank())
        if self._has_lengths is False or decision[0] is None:
            return None, readers
        self._has_lengths, order, fault = decision[0]
        if fault is not None:
            # Only this replica has the error, and rank 0 may be in another one.
            raise RefusedError(fault, prints=is_deciding)
        if order is None:
            return None, readers
        reordered: dict[int, InOrder] = {}
        for reader in readers:
            if reader is not None and id(reader) not in reordered:
                reordered[id(reader)] = InOrder(reader, order)
        return order, [reader if reader is None else reordered[id(reader)] for reader in readers]

    def _try_to_decide(
        self, plan: PlannedStep, iterators: Sequence[Any], count: int
    ) -> tuple[list[Any], _OrderDecision]:
        """Decide; an error is also a result, because the other ranks wait for one."""
        try:
            return self._decide_order(plan, iterators, count)
        except UnsupportedError as error:
            return list(iterators), _OrderDecision(True, fault=str(error))

    def _decide_order(
        self, plan: PlannedStep, iterators: Sequence[Any], count: int
    ) -> tuple[list[Any], _OrderDecision]:
        """Return iterators that return the inspected microbatches again, and the decision."""
        first = next((iterator for iterator in iterators if hasattr(iterator, "__next__")), None)
        if first is None:
            return list(iterators), _OrderDecision(False)
        peekable = PeekableIterator(first)
        readers = [peekable if iterator is first else iterator for iterator in iterators]
        return readers, self._find_order(plan, count, peekable.look)

    def _find_order(
        self, plan: PlannedStep, count: int, look: Callable[[int], Any]
    ) -> _OrderDecision:
        lengths: list[list[int]] = []
        for number in range(count):
            sequence_lengths = self._lengths(look(number))
            # If the first microbatch has no lengths, the others will not have lengths either.
            if sequence_lengths is None and not lengths:
                return _OrderDecision(False)
            lengths.append(sequence_lengths or [])
        return _OrderDecision(True, self._choose_order(plan, lengths))

    def _lengths(self, item: Any) -> list[int] | None:
        if self._lengths_function is None:
            return lengths_of(item, self._is_unpadded)
        lengths = list(self._lengths_function(item))
        if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
            raise UnsupportedError(
                f"lengths returned {lengths!r:.60} for a microbatch: it must return the lengths of "
                "its sequences, whole numbers above 0"
            )
        return lengths

    def _choose_order(
        self, plan: PlannedStep, lengths: Sequence[Sequence[int]]
    ) -> tuple[int, ...] | None:
        """Return the order with the shortest predicted step; None if it is the given order."""
        if len({tuple(sorted(sequence_lengths)) for sequence_lengths in lengths}) == 1 or not all(
            map(sum, lengths)
        ):
            return None
        schedule = plan.schedule
        costs = plan.costs or Costs.uniform(schedule.num_devices, schedule.num_stages)
        costs = self.variable_length_costs(costs, lengths)
        if id(plan) not in self._graphs:  # the plan is stored too, so that its id stays unique
            self._graphs[id(plan)] = plan, make_pass_graph(schedule, costs_of(schedule, costs))
        # No device may exceed its memory peak in the given order.
        self.last = reorder_microbatches(schedule, costs, 0.0, graph=self._graphs[id(plan)][1])
        if self.last.order == tuple(range(len(lengths))):
            return None
        if not self._has_logged and dist.get_rank() == 0:
            self._has_logged = True
            gain = self.last.initial_us / self.last.best_us - 1
            logger.warning(
                "variable-length microbatches reordered; estimated step time -%.1f %% "
                "(--pipeline-keep-order keeps their order)",
                100 * gain / (1 + gain),
            )
        return self.last.order

    def variable_length_costs(self, costs: Costs, lengths: Sequence[Sequence[int]]) -> Costs:
        """Return costs with each microbatch's share, from the number and lengths of its sequences.

        GEMMs with weights scale with the tokens, attention with the squares of the lengths.
        """
        tokens = [float(sum(sequence_lengths)) for sequence_lengths in lengths]
        squares = [float(sum(x * x for x in sequence_lengths)) for sequence_lengths in lengths]

        def share(attention: float) -> tuple[float, ...]:
            work = [
                t * self._weights + attention * self._attention * s
                for t, s in zip(tokens, squares, strict=True)
            ]
            return tuple(microbatch_work * len(work) / sum(work) for microbatch_work in work)

        shares = share(1.0), share(_ATTENTION_BACKWARD_RATIO), share(0.0)
        factors = dict(zip(TIMES, shares, strict=True))
        if Kind.BW.time in costs.by_stage:
            # A full backward costs 2x the forward for GEMMs and 2.5x for attention: half of that
            # relative to GEMMs.
            factors[Kind.BW.time] = share(_ATTENTION_BACKWARD_RATIO / 2)
        factors |= dict.fromkeys(HELD, share(0.0))
        return replace(costs, by_microbatch=tuple(factors.items()))


def _broadcast(decision: list[Any], group: Any, source: int, device: int) -> None:
    """Broadcast the decision of one rank to the group.

    Raises:
        TransportError: A rank has exited; the message has the error it reported before.
    """
    if group.size() == 1:
        return
    try:
        dist.broadcast_object_list(decision, group=group, group_src=source)
    except RuntimeError as error:
        raise TransportError(
            f"rank {dist.get_rank()} (device {device}): asks for the places of a step's "
            f"microbatches, and the connection failed: {error}{cause_of_others()}"
        ) from error


def _weights_of_layer(config: Any, attention: float) -> float:
    """Return the number of weights per layer that a token is multiplied by."""
    hidden = config.hidden_size
    groups = config.num_query_groups or config.num_attention_heads
    attention_weights = hidden * (2 * attention + 2 * groups * config.kv_channels)
    inner = config.ffn_hidden_size
    if config.num_moe_experts:
        inner = (config.moe_ffn_hidden_size or inner) * config.moe_router_topk
    return float(attention_weights + hidden * inner * (3 if config.gated_linear_unit else 2))


class VariableLength(StepFeature):
    """Reorders the microbatches of a planned schedule if that shortens the step."""

    def __init__(self, runner: PipelineRunner) -> None:
        """Set the runner, whose planner plans the step."""
        self._runner = runner
        self._reorderer: MicrobatchReorderer | None = None  # set once microbatches can be reordered
        self._keeps_order: bool | None = None  # agreed by all ranks once; None before

    def change_data(self, call: TrainerCall, groups: Any, data: StepData) -> StepData:
        """Reorder the microbatches of this step, and read them in that order.

        If ranks may be in different steps, they would have to wait for each other to agree on an
        order.
        """
        pipeline, config, count = self._runner.pipeline, call.config, call.num_microbatches
        if pipeline.options.keep_order or self._runner.overlaps_steps:
            return data
        if pipeline.choice.name != AUTO or not may_reorder(config):
            return data
        plan = self._runner.planner.plan_step(count)
        if plan.schedule.num_microbatches != count:  # parts of microbatches
            return data
        if self._keeps_order is None:
            self._keeps_order = _has_dropout(call.chunks, groups.pp)
        if self._keeps_order:
            return data
        if self._reorderer is None:
            self._reorderer = MicrobatchReorderer(config, pipeline.options.lengths)
        first_rank = pipeline.choice.placement[0]
        order, iterators = self._reorderer.order(plan, data.iterators, count, groups, first_rank)
        return StepData(iterators, order)


def _has_dropout(chunks: Sequence[nn.Module], group: Any) -> bool:
    """Return whether any rank of the pipeline has an active Dropout that no config describes.

    Adapters (LoRA) have such modules. After reordering, a microbatch would get the random numbers
    of another one. All ranks of `group` call this.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    is_active = any(isinstance(module, _DropoutNd) and module.p > 0 for module in modules)
    is_active_anywhere = any(gather_objects(is_active, group))
    if is_active_anywhere and dist.get_rank() == 0:
        logger.info("microbatches keep their order: the model has an active Dropout module")
    return is_active_anywhere


def may_reorder(config: Any) -> bool:
    """Return whether reordering microbatches changes gradients by rounding only.

    This requires that no microbatch draws random numbers. Megatron's global_aux_loss depends on the
    expert loads of the step so far, so each microbatch's loss depends on the order.
    """
    draws = config.attention_dropout, config.hidden_dropout, config.moe_input_jitter_eps
    balancing = config.moe_router_load_balancing_type
    depends_on_order = "global_aux_loss" in (
        [balancing] if isinstance(balancing, str) else balancing
    )
    return not any(draws) and not (config.num_moe_experts and depends_on_order)
