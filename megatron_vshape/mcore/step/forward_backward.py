"""The replacement of Megatron's forward_backward_func."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import nn

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.early_start import Cut, drain, prefix_before_loss
from megatron_vshape.core.program.hiding import Beside
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.request import AUTO
from megatron_vshape.mcore.features.post_validation.rollback import RandomState, Replay
from megatron_vshape.mcore.features.slices import check_sequence, even_slices
from megatron_vshape.mcore.features.variable_length.reorder import (
    MicrobatchReorderer,
    as_given,
    has_dropout,
    may_reorder,
)
from megatron_vshape.mcore.layout.stages import streams_of
from megatron_vshape.mcore.observe.bubble import BubbleMeter, Logs
from megatron_vshape.mcore.observe.profiling import Profiler
from megatron_vshape.mcore.observe.report import RunReport
from megatron_vshape.mcore.refusals import (
    check_config,
    check_one_module,
    refusing,
)
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.pipeline import Pipeline
from megatron_vshape.mcore.step.first_step import FirstStep
from megatron_vshape.mcore.step.gradient_sync import GradientSync, divide_by_tokens
from megatron_vshape.mcore.step.late_checks import checked_late
from megatron_vshape.mcore.step.loss_reporting import LossGatherer
from megatron_vshape.mcore.step.microbatches import given_iterators, read_again, shared_out
from megatron_vshape.mcore.step.paged_stash import begin_step
from megatron_vshape.mcore.step.router_replay import ForwardCalls
from megatron_vshape.mcore.step.same_plan import Agreement
from megatron_vshape.mcore.step.stage import MegatronStage, zero_tokens
from megatron_vshape.mcore.step.step_hooks import Step, StepContext, device_of, parts_of
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime import first_cause
from megatron_vshape.runtime.hosts import ranks_of_this_host
from megatron_vshape.runtime.p2p import Transport, TransportError
from megatron_vshape.runtime.program_runner import Observer, Place, ProgramRun, run_drain
from megatron_vshape.runtime.stage import Stage
from megatron_vshape.runtime.variable_p2p import VariableTransport


@dataclass(frozen=True, slots=True)
class Call:
    """The trainer's arguments for one step, equal in all training steps of a run.

    These are the parameters of Megatron's function, except adjust_tensor_shapes_fn and
    p2p_communicator.
    """

    forward_step_func: Any
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False


@dataclass(frozen=True, slots=True)
class _StepInProgress:
    """A prepared step, of which no passes or only the first forwards have run."""

    call: Call
    chunks: list[nn.Module]
    groups: Any  # Megatron's ProcessGroupCollection
    transport: Transport
    step: Step
    program: Program
    early_ends: Cut  # number of instructions per rank to run early; () if not early
    run: ProgramRun
    order: Sequence[int] | None  # microbatches in execution order; None: as given

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Enter the contexts of all parts around the passes."""
        with contextlib.ExitStack() as stack:
            for part in self.step.parts:
                stack.enter_context(part.session())
            yield


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The next step, started early, and the state to roll it back."""

    begun: _StepInProgress
    random: RandomState


class PipelineRunner:
    """Runs training and evaluation steps of one schedule; the step function of the trainer.

    Created when the trainer requests its step function, that is, after all process groups exist.
    The transport with its process groups is created in the first step, because this is slow, and
    reused.
    """

    def __init__(self, state: StepState, pipeline: Pipeline, logs: Logs) -> None:
        """Set the state shared with layers, the schedule, and whether the trainer logs a step."""
        self._state = state
        self._pipeline = pipeline
        self._transport: Transport | None = None
        self._place = Place()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        self.report = RunReport(
            state,
            pipeline.choice.name,
            pipeline.stage_map.stages(rank),
            pipeline.planner.training,
        )
        self._profiler = Profiler(pipeline, self.report)
        self.meter = BubbleMeter(logs, pipeline.planner.predicted_bubble)
        self._courier = LossGatherer()
        self._last: Call | None = None  # the last training step, with post-validation
        self._ahead: _Ahead | None = None
        self._early: tuple[Program, tuple[Program, Cut]] | None = None
        self._replays: list[Replay] = []
        self.calls = ForwardCalls(None)  # of the trainer's function, in the last step
        self._agreement = Agreement()
        self._places: MicrobatchReorderer | None = None  # set once microbatches can be reordered
        self._keeps_order: bool | None = None  # agreed by all ranks once; None before
        self.local_ranks: int | None = None  # number of ranks on this host, once known
        parts = (feature.in_steps(self.report) for feature in features())
        self._features = [*(each for each in parts if each is not None), FirstStep()]

    def __call__(
        self, *, adjust_tensor_shapes_fn: Any = None, p2p_communicator: Any = None, **arguments: Any
    ) -> list[Any]:
        """Run one step and return the reports of the loss function, one entry per microbatch.

        The parameters are those of Megatron's function. The reports are returned on the last
        pipeline rank, where the trainer reads them, and on the rank of the last stage.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ValueError("adjust_tensor_shapes_fn is not supported by --pipeline-schedule")
        call = Call(**arguments)
        with refusing():
            check_one_module(self._pipeline.choice.name, p2p_communicator, call.pg_collection)
        for each in self._features:
            each.check(self._pipeline, call.forward_step_func, call.forward_only)
        config = get_model_config(_as_list(call.model)[0])
        check_config(config)
        for feature in features():
            feature.check_config(config, self._pipeline.options)
        with _timed(config), first_cause.telling(TransportError):
            return self._evaluate(call) if call.forward_only else self._train(call)

    def connect(self, model: Any) -> str | None:
        """Create the P2P connections of all ranks now instead of in the first step.

        All ranks of the world call this. Returns a line about the P2P backend with NCCL, else None.
        """
        chunks = _as_list(model)
        group = parallel_state.get_pipeline_model_parallel_group()
        config = get_model_config(chunks[0])
        return self._ready_transport(config, (1, 1, 1), chunks[0], group).summary()

    def tell(self) -> str:
        """Describe the current pass or wait of this rank; can be called from any thread."""
        if self._transport is None:
            return f"rank {dist.get_rank()}: before its first pass"
        return self._transport.tell(self._place)

    def rest(self) -> None:
        """Synchronize the device, and keep the transport idle until the next pass."""
        if self._transport is not None:
            torch.cuda.synchronize()
            self._transport.rest()

    def run_ahead(self) -> None:
        """Start the next training step as far as it can be rolled back.

        Does nothing before the first step, or if the next step is measured from its start.
        """
        call = self._last
        observers = (self.report.measures_next, self._profiler.profiles_next, self.meter.times_next)
        if call is None or any(observers):
            return
        for replay in self._replays:
            replay.mark()
        # Early forwards consume data and random numbers; both must be restored on a rollback.
        random = RandomState.now()
        begun = self._begin(call, is_early=True)
        self._ahead = _Ahead(begun, random)
        begun.run.advance(begun.early_ends[begun.groups.pp.rank()])

    def drop_ahead(self) -> None:
        """Roll back the early part of the next step; all ranks of the pipeline call this together.

        Does nothing if nothing has run early.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        begun = ahead.begun
        # Early forwards may have sent messages without a matching receive yet. Complete them first,
        # so that the transport is consistent for the next step.
        instructions = drain(begun.program, begun.early_ends, begun.groups.pp.rank())
        run_drain(instructions, begun.transport, begun.transport.blank())
        for each in self._features:
            each.forget()
        for replay in self._replays:
            replay.rewind()
        ahead.random.restore()

    def forget_data(self, quietly: bool = False) -> None:
        """Free all state of previous steps, after the last step or a failed one.

        This state includes weight jobs of a failed step, offloaded activations and their host
        memory, the threads of the transport, and data iterators. A data loader stops its worker
        processes when its last reference is gone. With --exit-signal-handler the workers ignore the
        signal that would stop them otherwise, and the trainer would wait for them. `quietly` is for
        a process that trains again.
        """
        self._last, self._ahead, self._replays = None, None, []
        self._state.jobs.clear()
        for kept in self._state.kept:
            kept.clear()
        for each in self._features:
            each.clear()
        if self._transport is not None:
            self._transport.close(quietly)
            self._transport = None
            first_cause.forget()

    def _evaluate(self, call: Call) -> list[Any]:
        self.drop_ahead()
        self.report.interrupt()
        begun = self._begin(call)
        with (
            begun.step.gradient_sync.session(),
            begun.session(),
            checked_late(self._state, self._place) as checks,
        ):
            begun.run.finish()
        checks.make()
        return self._reports(begun)

    def _train(self, call: Call) -> list[Any]:
        self._courier.forget()
        torch_device = device_of(_as_list(call.model)[0])
        profiled = self._profiler.begin_step(torch_device)
        timer = self.meter.begin_step(call.num_microbatches, torch_device, profiled)
        # Measured costs must be those of separate passes, so a profiled B runs no jobs of a W.
        begun = self._take_ahead(call) or self._begin(call, timer, hides=profiled is None)
        tokens = call.num_microbatches * call.micro_batch_size * call.seq_length
        sync = begun.step.gradient_sync
        with (
            self.report.training_step(
                begun.chunks, call.num_microbatches, tokens, begun.program.schedule.slices
            ),
            sync.session(),
            self._state.reducing(sync if sync.overlaps else None),
        ):
            with (
                begun.session(),
                checked_late(self._state, self._place) as checks,
            ):
                begun.run.finish()
            self._profiler.end_step(
                profiled,
                begun.program,
                begun.transport,
                begun.transport.blank(),
                self.report.held,
                begun.groups.pp,
            )
        for each in self._features:
            each.end()
        if begun.step.config.finalize_model_grads_func is not None:
            self._finalize(begun)
        # After finalize, so that the host launches it without waiting for the passes.
        checks.make()
        # Only a step that begins early reads it. Else the data of a step would stay in GPU memory
        # until the next one, which in RL comes after the rollouts.
        self._last = call if self._pipeline.options.post_validates else None
        return self._reports(begun)

    def _take_ahead(self, call: Call) -> _StepInProgress | None:
        """Return the step that was started early if its call equals the current one, else None."""
        ahead = self._ahead
        if ahead is not None and ahead.begun.call != call:
            self.drop_ahead()
            return None
        self._ahead = None
        for replay in self._replays:
            replay.forget()
        return None if ahead is None else ahead.begun

    def _begin(
        self,
        call: Call,
        timer: Observer | None = None,
        is_early: bool = False,
        hides: bool = True,
    ) -> _StepInProgress:
        """Prepare a step with everything that its passes need, without running any pass."""
        chunks = _as_list(call.model)
        iterators = given_iterators(call.data_iterator, len(chunks))
        config, shares = get_model_config(chunks[0]), self._pipeline.choice.shares
        begin_step(config, not call.forward_only and self._profiler.order_is_last)
        groups = _default_groups() if call.pg_collection is None else call.pg_collection
        slices = self._slices(call, config)
        shape = _message_shape(call, config, groups, slices)
        # The message shape can change between steps: for example, evaluation does not slice.
        transport = self._ready_transport(config, shape, chunks[0], groups.pp)
        with refusing():
            how = call.num_microbatches * slices, call.force_all_reduce, call.forward_only
            sync = GradientSync(config, chunks, self._pipeline, *how)
        if not call.forward_only:
            sync.gather_parameters()
            iterators = self._replayed(iterators)
        program, beside = self._program(call, hides)
        # Before `shared_out`, so that chunks that share an iterator also share its order.
        order, iterators = self._order(call, config, iterators, groups, slices)
        # Vocabulary parallelism reads the data of the last chunk once more: a loss of logits is
        # computed on every rank.
        iterators, again = read_again(iterators) if shares else (shared_out(iterators), None)
        program, early_ends = self._begun_early(program) if is_early else (program, ())
        self.calls = ForwardCalls(order)
        step = self._step(call, chunks, groups, gradient_sync=sync, beside=beside, slices=slices)
        beginning = StepContext(
            self._state,
            self._pipeline,
            step,
            chunks,
            iterators,
            groups,
            transport,
            program,
            shape=tuple(shape),
            seq_length=call.seq_length,
            local_ranks=self.local_ranks,
            again=again,
        )
        step.parts += parts_of(self._features, beginning)
        told = timer, self._place, step.handlers()
        run = ProgramRun(program, groups.pp.rank(), _stages(beginning), transport, *told)
        return _StepInProgress(
            call, chunks, groups, transport, step, program, early_ends, run, order
        )

    def _step(self, call: Call, chunks: Sequence[nn.Module], groups: Any, **given: Any) -> Step:
        """Create the step of a call; its forward calls are counted by `self.calls`."""
        is_last = groups.pp.rank() == self._pipeline.stage_map.loss_rank
        return Step(
            get_model_config(chunks[0]),
            self.calls.counting(call.forward_step_func, chunks, self._state, is_last),
            call.num_microbatches,
            groups.cp.size(),
            call.forward_only,
            call.collect_non_loss_data,
            call.first_val_step,
            num_tokens=zero_tokens(device_of(chunks[0])),
            **given,
        )

    def _order(
        self, call: Call, config: Any, iterators: list[Any], groups: Any, slices: int
    ) -> tuple[Sequence[int] | None, list[Any]]:
        """Return the microbatch order of this step (None: as given), and iterators with this order.

        Microbatches are reordered only with a planned schedule. In evaluation, the order does not
        affect the step time. With post-validation, ranks are in different steps and would have to
        wait for each other to agree on an order.
        """
        options, planned = self._pipeline.options, self._pipeline.choice.name == AUTO
        if call.forward_only or options.keep_order or options.post_validates:
            return None, iterators
        if not planned or not may_reorder(config, slices):
            return None, iterators
        if self._keeps_order is None:
            self._keeps_order = has_dropout(_as_list(call.model), groups.pp)
        if self._keeps_order:
            return None, iterators
        if self._places is None:
            self._places = MicrobatchReorderer(config, options.lengths)
        plan = self._pipeline.planner.training(call.num_microbatches)
        first_rank = self._pipeline.choice.placement[0]
        return self._places.order(plan, iterators, call.num_microbatches, groups, first_rank)

    def _program(self, call: Call, hides: bool) -> tuple[Program, Mapping[Pass, Beside]]:
        """Return the program of all ranks, and the W jobs that its B's overlap with."""
        planner = self._pipeline.planner
        if call.forward_only:
            return planner.evaluation(call.num_microbatches), {}
        plan = planner.training(call.num_microbatches)
        with refusing():
            _check_captured(self._state.captured, plan.program)
            self._agreement.check(plan.program, plan.beside)
        return plan.program, plan.beside if hides else {}

    def _slices(self, call: Call, config: Any) -> int:
        """Return the number of slices per microbatch; evaluation does not slice."""
        planner = self._pipeline.planner
        if call.forward_only:
            return 1
        if isinstance(planner.choice.slices, int):
            return planner.choice.slices
        planner.choose_slices(even_slices(planner.choice.slices, call.seq_length, config))
        return planner.training(call.num_microbatches).schedule.slices

    def _begun_early(self, program: Program) -> tuple[Program, Cut]:
        """Return `prefix_before_loss(program)`, cached because most steps run the same program."""
        if self._early is None or self._early[0] is not program:
            self._early = program, prefix_before_loss(program)
        return self._early[1]

    def _replayed(self, iterators: Sequence[Any]) -> list[Any]:
        """Wrap the iterators so that they can replay microbatches, if a step may be rolled back."""
        if not self._pipeline.options.post_validates:
            return list(iterators)
        known = {id(each.source): each for each in self._replays}
        for each in iterators:
            if each is not None and id(each) not in known:
                known[id(each)] = Replay(each)
        self._replays = list(known.values())
        return [each if each is None else known[id(each)] for each in iterators]

    def _reports(self, begun: _StepInProgress) -> list[Any]:
        """Return the losses on the ranks where the trainer reads them."""
        reports = self._courier.send_to_last_rank(
            as_given(begun.step.loss_store, begun.order),
            self._pipeline.stage_map.loss_rank,
            begun.groups.pp,
            device_of(begun.chunks[0]),
        )
        if not self._pipeline.options.post_validates:
            self._courier.forget()
        return reports

    def _ready_transport(
        self,
        config: Any,
        shape: Sequence[int],
        model: nn.Module,
        pipeline_group: dist.ProcessGroup,
    ) -> Transport:
        dtype = config.pipeline_dtype
        if self._transport is None:
            self.local_ranks = ranks_of_this_host()
            kind: type[Transport] = Transport
            if config.variable_seq_lengths:
                kind = VariableTransport
                self._pipeline.planner.expect_any_length()
            self._transport = kind(
                _all_pipelines(pipeline_group),
                shape,
                dtype,
                device_of(model),
                self._pipeline.options.timeout_seconds,
                like=pipeline_group,
            )
            # The first use of a communicator blocks, so warm up all of them before the schedule
            # runs.
            self._transport.prepare(self._pipeline.planner.smallest())
            first_cause.watch_the_end(TransportError)
        self._transport.expect(shape, dtype)
        return self._transport

    def _finalize(self, begun: _StepInProgress) -> None:
        """Call Megatron's finalization of gradients, as its schedules do at their end."""
        step, groups = begun.step, begun.groups
        finalize = step.config.finalize_model_grads_func
        options = {"pg_collection": groups, "force_all_reduce": begun.call.force_all_reduce}
        if not step.config.calculate_per_token_loss:
            finalize(begun.chunks, None, **options)
            return
        late = self._pipeline.options.post_validates
        if late and inspect.unwrap(finalize) is finalize_model_grads:
            loss_rank = self._pipeline.stage_map.loss_rank
            # An all-reduce over the pipeline would make its ranks wait for each other.
            tokens = self._courier.bring_tokens(step.num_tokens, loss_rank, groups.pp)
            finalize(begun.chunks, None, **options)
            divide_by_tokens(begun.chunks, tokens, groups)
            return
        # Megatron uses the count of the last rank, but only the loss rank has counted tokens.
        dist.all_reduce(step.num_tokens, group=groups.pp)
        finalize(begun.chunks, step.num_tokens, **options)


def _stages(begun: StepContext) -> Mapping[int, Stage]:
    """Return the objects that run the passes of this rank's chunks, by stage."""
    stage_map = begun.pipeline.stage_map
    return {
        stage: MegatronStage(
            begun.state,
            begun.step,
            begun.chunks[chunk],
            begun.iterators[chunk],
            chunk,
            stage,
            is_last=stage == stage_map.last_stage,
            has_chunks=stage_map.num_chunks > 1,
        )
        for chunk, stage in enumerate(begun.stages)
    }


def _message_shape(call: Call, config: Any, groups: Any, slices: int) -> Sequence[int]:
    """Return the shape [s, b, h] of a P2P message, for one slice or a full microbatch.

    With several residual streams (mHC, in Megatron after 0.19) h includes all of them.
    """
    with refusing():
        check_sequence(slices, call.seq_length, config)
    *shape, hidden = schedules.get_tensor_shapes(
        seq_length=call.seq_length // slices,
        micro_batch_size=call.micro_batch_size,
        decoder_seq_length=call.decoder_seq_length and call.decoder_seq_length // slices,
        config=_of_one_length(config),
        tp_group=groups.tp,
        cp_group=groups.cp,
    )[0]
    return *shape, hidden * streams_of(config)


def _check_captured(captured: Program | None, program: Program) -> None:
    """Raise ScheduleError if CUDA graphs were captured for another program."""
    if captured is not None and captured is not program:
        had, has = captured.schedule.num_microbatches, program.schedule.num_microbatches
        raise ScheduleError(
            f"CUDA graphs were captured for the passes of {had} microbatches in one order, and a "
            f"step of {has} would run in another: keep the batch size, or train without CUDA graphs"
        )


def _of_one_length(config: Any) -> Any:
    """Return a config for which Megatron computes the shape of full-length messages."""
    if not config.variable_seq_lengths:
        return config
    whole = copy.copy(config)
    whole.variable_seq_lengths = False
    return whole


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Run Megatron's timer of a step in this context; evaluation has none."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()


def _as_list(model: Any) -> list[nn.Module]:
    return model if isinstance(model, list) else [model]


def _all_pipelines(pipeline_group: dist.ProcessGroup) -> list[list[int]]:
    """Return the ranks of every pipeline of the world, in the same order on every rank."""
    own = dist.get_process_group_ranks(pipeline_group)
    everyones: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return [list(ranks) for ranks in sorted(set(map(tuple, everyones)))]


def _default_groups() -> ProcessGroupCollection:
    """Return the process groups that Megatron's schedules use if the trainer passes none."""
    state = parallel_state
    groups = ProcessGroupCollection()
    groups.tp = state.get_tensor_model_parallel_group()
    groups.cp = state.get_context_parallel_group()
    groups.pp = state.get_pipeline_model_parallel_group()
    groups.embd = state.get_embedding_group(check_initialized=False)
    groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
    groups.dp = state.get_data_parallel_group()
    groups.dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    groups.tp_dp_cp = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups
