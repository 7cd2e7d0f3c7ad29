"""The replacement of Megatron's forward_backward_func."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import DeferredWgradOverlap
from megatron_vshape.mcore.observe.profiling import BubbleMeter, Logs, Profiler
from megatron_vshape.mcore.observe.report import RunReport
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    check_config,
    check_one_module,
    refusing,
    uses_stash,
)
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.plans import Agreement, Planner
from megatron_vshape.mcore.setup.run_config import RunConfig, check_sequence, even_slices
from megatron_vshape.mcore.step.first_step import FirstStepWarnings
from megatron_vshape.mcore.step.gradient_sync import GradientSync, divide_by_tokens
from megatron_vshape.mcore.step.losses import LossGatherer, checked_late
from megatron_vshape.mcore.step.microbatches import (
    ForwardCalls,
    in_data_order,
    iterators_by_chunk,
    read_again,
    share_iterators,
)
from megatron_vshape.mcore.step.stage import (
    Execution,
    MegatronStage,
    PreparedStep,
    StepContext,
    StepData,
    StepFeature,
    StepRequest,
    TrainerCall,
)
from megatron_vshape.mcore.step_state import StepState, device_of
from megatron_vshape.runtime.failures import forget_cause, publish_cause_at_exit, publishing_cause
from megatron_vshape.runtime.hosts import gather_objects, ranks_of_this_host
from megatron_vshape.runtime.p2p import Transport, TransportError
from megatron_vshape.runtime.program_runner import Observer, Place, ProgramRun
from megatron_vshape.runtime.variable_p2p import VariableTransport

Used = TypeVar("Used", bound=StepFeature)


class PipelineRunner:
    """Runs training and evaluation steps of one schedule; the step function of the trainer.

    Megatron-LM's `train` hook creates it with its transport before the first step, other libraries
    create both in the first step: creating process groups is slow and collective.
    """

    def __init__(
        self,
        state: StepState,
        pipeline: RunConfig,
        planner: Planner,
        logs: Logs,
        execution: Execution,
    ) -> None:
        """Set the state shared with layers, the schedule, and whether the trainer logs a step."""
        self._state, self._execution = state, execution
        self.pipeline, self.planner = pipeline, planner
        self._transport: Transport | None = None
        self._place = Place()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        stages = pipeline.stage_map.stages(rank)
        self.report = RunReport(state, pipeline.choice.name, stages, planner.plan_step)
        self._profiler = Profiler(pipeline, planner, self.report)
        self.meter = BubbleMeter(logs, planner.predicted_bubble)
        self._gatherer = LossGatherer()
        self.calls = ForwardCalls(None)  # of the trainer's function, in the last step
        self._agreement = Agreement()
        self.local_ranks: int | None = None  # number of ranks on this host, once known
        self.has_first_plan = False  # the first training step has been planned and logged
        # Every feature is called; most return a StepFeature that does nothing unless the schedule
        # or the options use it.
        step_features = (feature.in_steps(self) for feature in features())
        self._step_features = [*filter(None, step_features), FirstStepWarnings()]

    def __call__(
        self, *, adjust_tensor_shapes_fn: Any = None, p2p_communicator: Any = None, **arguments: Any
    ) -> list[Any]:
        """Run one step and return the reports of the loss function, one entry per microbatch.

        The parameters are those of Megatron's function. The reports are returned on the last
        pipeline rank, where the trainer reads them, and on the rank of the last stage.
        """
        schedule = self.pipeline.choice.name
        with refusing():
            if adjust_tensor_shapes_fn is not None:
                raise UnsupportedError(
                    f"--pipeline-schedule {schedule} does not support adjust_tensor_shapes_fn: a "
                    "message between stages is one tensor [s, b, h], with the sizes of the model's "
                    "config. Call the schedule without adjust_tensor_shapes_fn, or remove "
                    "--pipeline-schedule"
                )
        # Megatron calls by keyword. A parameter that a later release adds fails here, by its name.
        call = TrainerCall(**arguments)
        with refusing():
            check_one_module(schedule, p2p_communicator, call.pg_collection)
        # In every step: scripts and libraries change the config after all checks of arguments.
        check_config(call.config)
        # If this rank fails, its error is sent to the ranks that wait for it, so that they report
        # the cause instead of a timeout.
        with _megatrons_timer(call.config), publishing_cause(TransportError):
            return self._evaluate(call) if call.forward_only else self._train(call)

    def connect(self, model: Any) -> str | None:
        """Create the P2P connections of all ranks now instead of in the first step.

        All ranks of the world call this. Returns a line about the P2P backend with NCCL, else None.
        """
        chunk = model[0] if isinstance(model, list) else model
        group = parallel_state.get_pipeline_model_parallel_group()
        device = device_of([chunk])
        # Any shape will do here: each step announces its own.
        return self._ready_transport(get_model_config(chunk), (1, 1, 1), device, group).summary()

    @property
    def is_connected(self) -> bool:
        """Return whether the ranks have P2P connections."""
        return self._transport is not None

    def describe_position(self) -> str:
        """Describe the current pass or wait of this rank; can be called from any thread."""
        if self._transport is None:
            return f"rank {dist.get_rank()}: before its first pass"
        return self._transport.describe(self._place)

    def rest(self) -> None:
        """Synchronize the device, and keep the transport idle until the next pass."""
        if self._transport is not None:
            torch.cuda.synchronize()
            self._transport.rest()

    def step_feature(self, kind: type[Used]) -> Used | None:
        """Return the step feature of this type, or None if the run does not use it."""
        return next((part for part in self._step_features if isinstance(part, kind)), None)

    @property
    def observes_next(self) -> bool:
        """Return whether the next step is measured from its start."""
        profiles = self._profiler.profiles_next or self.meter.times_next
        return self.report.measures_next or profiles

    def free_state(self, quietly: bool = False) -> None:
        """Free all state of previous steps, after the last step or a failed one.

        This state includes weight jobs of a failed step, activations in host memory, the threads of
        the transport, and data iterators. A data loader stops its worker processes when its last
        reference is gone. With --exit-signal-handler the workers ignore the signal that would stop
        them otherwise, and the trainer would wait for them. `quietly` is for a process that trains
        again.
        """
        self._state.jobs.clear()
        for drop_values in self._state.drop_values:
            drop_values()
        for step_feature in self._step_features:
            step_feature.clear()
        if self._transport is not None:
            self._transport.close(quietly)
            self._transport = None
            forget_cause()

    def _request(self, call: TrainerCall) -> StepRequest:
        """Let features prepare for the step of this call."""
        request = StepRequest(call)
        for step_feature in self._step_features:
            request = step_feature.prepare(request)
        return request

    def _evaluate(self, call: TrainerCall) -> list[Any]:
        """Run the forward passes of an evaluation step, and return the loss reports."""
        request = self._request(call)
        self.report.interrupt()
        context, run = self.prepare_step(request.call)
        # DDP's `no_sync` as in training: Megatron's schedules enter it for evaluation, too.
        with (
            context.gradient_sync.without_ddp(),
            context.around_passes(),
            checked_late(self._state, self._place) as checks,
        ):
            run.finish()
        checks.make()
        _release_inputs(context.chunks)
        return self._reports(context)

    def _train(self, call: TrainerCall) -> list[Any]:
        """Run all passes of a training step, finalize gradients, and return the loss reports."""
        # Buffers of the last step's losses were kept while a slower rank could still receive them.
        self._gatherer.wait_for_sends()
        request = self._request(call)
        profiled = self._profiler.begin_step(call.torch_device)
        timer = self.meter.begin_step(call.num_microbatches, call.torch_device, profiled)
        # A feature may have run the first passes of this step already, at the end of the last one.
        # Measured costs must be those of separate passes, so a profiled B runs no jobs of a W.
        context, run = request.started or self.prepare_step(
            request.call, timer, fills_waits=profiled is None
        )
        tokens = call.num_microbatches * call.micro_batch_size * call.seq_length
        sync = context.gradient_sync
        with (
            self.report.training_step(
                context.chunks, context.num_microbatches, tokens, context.passes_per_microbatch
            ),
            # DDP's own reductions are off: autograd ends before the W that complete the gradients.
            sync.without_ddp(),
            self._state.setting(gradient_sync=sync if sync.overlaps else None),
        ):
            with context.around_passes(), checked_late(self._state, self._place) as checks:
                # All passes and messages of this rank, in program order. It is where Megatron's
                # schedules have their loops for warm-up, steady state and cool-down.
                run.finish()
            self._profiler.end_step(profiled, context.program, context.transport, context.groups.pp)
        # Before the gradients are final: a feature may still reject the step here.
        for step_feature in self._step_features:
            step_feature.end(context)
        # It waits for the data-parallel reductions, and sums gradients of tied embeddings and of
        # norms.
        if context.config.finalize_model_grads_func is not None:
            self._finalize(context)
        # After finalize, so that the host launches it without waiting for the passes.
        checks.make()
        _release_inputs(context.chunks)
        return self._reports(context)

    def prepare_step(
        self,
        call: TrainerCall,
        timer: Observer | None = None,
        fills_waits: bool = True,
        cut_program: Callable[[Program], Program] | None = None,
    ) -> PreparedStep:
        """Prepare a step with everything that its passes need, without running any pass.

        Args:
            call: The trainer's arguments.
            timer: Measures the passes of the step.
            fills_waits: Whether a B that waits runs weight gradients meanwhile.
            cut_program: Returns the program to run in place of that of the plan.
        """
        config, device = call.config, call.torch_device
        # The paged stash records the order of the passes, so it has to see the final one.
        _begin_paged_stash(config, not call.forward_only and self._profiler.order_is_last)
        # Callers may pass their own groups; the default is that of Megatron's schedules.
        groups = _default_groups() if call.pg_collection is None else call.pg_collection
        # Before the transport, because the parts of a microbatch have smaller messages.
        passes = self._passes_per_microbatch(call)
        shape = _message_shape(call, groups, passes)
        # The message shape can change between steps: evaluation runs every microbatch in one pass.
        transport = self._ready_transport(config, shape, device, groups.pp)
        # Before planning, which a parameter all-gather can overlap with.
        gradient_sync = _gradient_sync(call, self.pipeline, passes)
        program, wgrad_overlaps = self._program(call, groups, fills_waits)
        # After planning: reordering microbatches needs the plan.
        data, second_reader = self._data(call, groups)
        # A new object per step: a library reads it after the step, for the order of its records.
        self.calls = ForwardCalls(data.order)
        context = StepContext(
            call,
            self._state,
            self.pipeline,
            groups,
            passes,
            shape,
            transport,
            gradient_sync,
            program if cut_program is None else cut_program(program),
            wgrad_overlaps,
            data,
            forward_step=self.calls.recording(
                call.forward_step_func,
                call.chunks,
                self._state,
                has_loss=groups.pp.rank() == self.pipeline.stage_map.loss_rank,
            ),
            num_tokens=torch.zeros([], dtype=torch.int, device=device),
            second_reader=second_reader,
            local_ranks=self.local_ranks,
        )
        # Last, because the StepHooks read everything above, and register for the passes.
        hooks = (step_feature.begin(context) for step_feature in self._step_features)
        context.hooks += [hook for hook in hooks if hook is not None]
        stages = _stages(context, self._execution.stage)
        run = ProgramRun(
            program=context.program,
            device=groups.pp.rank(),
            stages=stages,
            transport=transport,
            observer=timer,
            place=self._place,
            handlers=self._execution.adapt_handlers(context.handlers(), stages),
            executor=self._execution.executor,
        )
        return PreparedStep(context, run)

    def _passes_per_microbatch(self, call: TrainerCall) -> int:
        """Return the number of F passes of a microbatch per stage: slices, in training only."""
        slices = self.planner.choice.slices
        if call.forward_only:
            return 1
        if isinstance(slices, int):
            with refusing():
                check_sequence(slices, call.seq_length, call.config)
            return slices
        self.planner.narrow_slices(even_slices(slices, call.seq_length, call.config))
        return self.planner.plan_step(call.num_microbatches).schedule.slices

    def _data(self, call: TrainerCall, groups: Any) -> tuple[StepData, Any]:
        """Return the data of a step, and a second reader of the last chunk's data, if needed."""
        data = StepData(iterators_by_chunk(call.data_iterator, len(call.chunks)))
        if not call.forward_only:
            # Before `share_iterators`, so that chunks that share an iterator also share its order.
            for step_feature in self._step_features:
                data = step_feature.change_data(call, groups, data)
        # A loss of logits is computed on every rank, which reads the last chunk's data once more.
        if not self.pipeline.choice.shards_output_layer:
            return data._replace(iterators=share_iterators(data.iterators)), None
        iterators, second_reader = read_again(data.iterators)
        return data._replace(iterators=iterators), second_reader

    def _program(
        self, call: TrainerCall, groups: Any, fills_waits: bool
    ) -> tuple[Program, Mapping[Pass, DeferredWgradOverlap]]:
        """Return the program of all ranks, and the W jobs that its B's overlap with."""
        if call.forward_only:
            return self.planner.evaluation_program(call.num_microbatches), {}
        plan = self.planner.plan_step(call.num_microbatches)
        # Collective, and before any pass: later, a rank with another program would only be noticed
        # as a message that never arrives.
        with refusing():
            _check_captured(self._state.captured, plan.program)
            self._agreement.check(
                plan.program,
                plan.wgrad_overlaps,
                call.num_microbatches,
                self._dependent_groups(call.config, groups),
            )
        return plan.program, plan.wgrad_overlaps if fills_waits else {}

    def _dependent_groups(self, config: Any, groups: Any) -> Sequence[dist.ProcessGroup | None]:
        """Return the groups whose ranks need the same program; None is the group of all ranks.

        Data-parallel replicas may run different numbers of microbatches, as with Megatron's
        schedules: in a named schedule the chunks of a rank end in the same order for any number, so
        their gradient reductions match.
        """
        tensor = config.tensor_model_parallel_size
        expert_tensor = config.expert_tensor_parallel_size or tensor
        has_expert_groups = config.expert_model_parallel_size > 1 or expert_tensor != tensor
        choice = self.pipeline.choice
        # Groups of experts span replicas. A searched schedule is one for all replicas, and a file
        # may differ between nodes.
        if has_expert_groups or choice.plans_by_costs or choice.from_file is not None:
            return (None,)
        return groups.tp, groups.cp, groups.pp

    def _reports(self, context: StepContext) -> list[Any]:
        """Return the losses on the ranks where the trainer reads them."""
        # Megatron reads losses on the last pipeline rank; in a V, the last stage is on rank 0.
        reports = self._gatherer.send_to_last_rank(
            in_data_order(context.loss_store, context.data.order),
            self.pipeline.stage_map.loss_rank,
            context.groups.pp,
            context.call.torch_device,
        )
        if not self.overlaps_steps:
            self._gatherer.wait_for_sends()
        return reports

    def _ready_transport(
        self,
        config: Any,
        shape: Sequence[int],
        torch_device: torch.device,
        pipeline_group: dist.ProcessGroup,
    ) -> Transport:
        """Create the transport at the first call, later reconnect it; set the message shape."""
        dtype = config.pipeline_dtype
        # One transport for all steps: each edge has its own communicator, which is slow to create.
        if self._transport is None:
            self.local_ranks = ranks_of_this_host()
            kind: type[Transport] = Transport
            if config.variable_seq_lengths:
                kind = VariableTransport
                self.planner.expect_length_on_arrival()
            self._transport = kind(
                _all_pipelines(pipeline_group),
                shape,
                dtype,
                torch_device,
                self.pipeline.options.timeout_seconds,
                like=pipeline_group,
            )
            # The first use of a communicator blocks, so warm up all of them before the schedule
            # runs.
            self._transport.prepare(self.planner.smallest())
            publish_cause_at_exit(TransportError)
        else:
            self._transport.reconnect()
        self._transport.expect(shape, dtype)
        return self._transport

    @property
    def overlaps_steps(self) -> bool:
        """Return whether a rank may start the next step before others have ended this one."""
        return self.pipeline.options.post_validates

    def _finalize(self, context: StepContext) -> None:
        """Call Megatron's finalization of gradients, as its schedules do at their end."""
        groups, finalize = context.groups, context.config.finalize_model_grads_func
        options = {"pg_collection": groups, "force_all_reduce": context.call.force_all_reduce}
        if not context.config.calculate_per_token_loss:
            finalize(context.chunks, None, **options)
            return
        if self.overlaps_steps and inspect.unwrap(finalize) is finalize_model_grads:
            loss_rank = self.pipeline.stage_map.loss_rank
            # An all-reduce over the pipeline would make its ranks wait for each other.
            # Without the tokens, Megatron's function reduces only; the division follows below.
            tokens = self._gatherer.broadcast_tokens(context.num_tokens, loss_rank, groups.pp)
            finalize(context.chunks, None, **options)
            divide_by_tokens(context.chunks, tokens, groups)
            return
        # Megatron uses the count of the last rank, but only the loss rank has counted tokens.
        dist.all_reduce(context.num_tokens, group=groups.pp)
        finalize(context.chunks, context.num_tokens, **options)


def _stages(context: StepContext, stage_type: type[MegatronStage]) -> Mapping[int, MegatronStage]:
    """Return the objects that run the passes of this rank's chunks, by stage."""
    stage_map = context.pipeline.stage_map
    return {
        stage: stage_type(
            context,
            chunk,
            stage,
            is_last=stage == stage_map.last_stage,
            has_several_chunks=stage_map.num_chunks > 1,
        )
        for chunk, stage in enumerate(context.stages)
    }


def _gradient_sync(call: TrainerCall, pipeline: RunConfig, passes: int) -> GradientSync:
    """Create the data-parallel communication of the step, and start its gathers."""
    with refusing():
        sync = GradientSync(
            call.config,
            call.chunks,
            pipeline,
            num_microbatches=call.num_microbatches * passes,
            force_all_reduce=call.force_all_reduce,
            forward_only=call.forward_only,
        )
    # Starts the gathers of all chunks now; layers wait for theirs in the first F.
    if not call.forward_only:
        sync.gather_parameters()
    return sync


def _message_shape(call: TrainerCall, groups: Any, passes: int) -> tuple[int, ...]:
    """Return the shape [s, b, h] of a P2P message; each pass has an equal part of the sequence.

    With several residual streams (mHC, in Megatron after 0.19) h includes all of them.
    """
    config = call.config
    if config.variable_seq_lengths:  # Megatron computes the shape of full-length messages
        config = copy.copy(config)
        config.variable_seq_lengths = False
    decoder_length = call.decoder_seq_length
    *shape, hidden = schedules.get_tensor_shapes(
        seq_length=call.seq_length // passes,
        micro_batch_size=call.micro_batch_size,
        decoder_seq_length=decoder_length and decoder_length // passes,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )[0]
    return *shape, hidden * _num_streams(config)


def message_bytes(config: Any, tokens: int) -> int:
    """Return the size of a P2P message for a microbatch with this number of tokens."""
    shards = config.context_parallel_size * (
        config.tensor_model_parallel_size if config.sequence_parallel else 1
    )
    width_bytes = config.hidden_size * _num_streams(config) * config.pipeline_dtype.itemsize
    return int(tokens * width_bytes // shards)


def _num_streams(config: Any) -> int:
    """Return the number of residual streams of the hidden size that a stage sends.

    Hyper-connections (mHC) have more than one. The option names differ between Megatron's main and
    dev branches.
    """
    for enabled, count in (
        ("enable_mhc_connections", "mhc_num_residual_streams"),
        ("enable_hyper_connections", "num_residual_streams"),
    ):
        if getattr(config, enabled, False):
            return int(getattr(config, count))
    return 1


def _check_captured(captured: Program | None, program: Program) -> None:
    """Raise ScheduleError if CUDA graphs were captured for another program."""
    if captured is not None and captured is not program:
        raise ScheduleError(
            f"CUDA graphs were captured for the passes of {captured.schedule.num_microbatches} "
            f"microbatches in one order, and a step of {program.schedule.num_microbatches} would "
            "run in another: keep the batch size, or train without CUDA graphs"
        )


@contextlib.contextmanager
def _megatrons_timer(config: Any) -> Iterator[None]:
    """Run Megatron's timer of a step in this context; evaluation has none."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()


def _release_inputs(chunks: Sequence[nn.Module]) -> None:
    """Free the last message that each chunk has received, and its gradient.

    Megatron's models store it until their next forward. In RL an inference engine runs before that,
    and a rank with several chunks would store more of them than under 1F1B.
    """
    for chunk in chunks:
        # The input of a first stage in `schedules.forward_step`, so every model accepts it.
        get_attr_wrapped_model(chunk, "set_input_tensor")([None])


def _all_pipelines(pipeline_group: dist.ProcessGroup) -> list[list[int]]:
    """Return the ranks of every pipeline of the world, in the same order on every rank."""
    # Every rank has to take part in the creation of every process group, so it needs them all.
    everyones = gather_objects(tuple(dist.get_process_group_ranks(pipeline_group)))
    return [list(ranks) for ranks in sorted(set(everyones))]


def _default_groups() -> ProcessGroupCollection:
    """Return the process groups that Megatron's schedules use if the trainer passes none."""
    state = parallel_state
    # Those that finalize_model_grads and the schedules read, under the same names.
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


def _begin_paged_stash(config: Any, trains: bool) -> None:
    """Notify Megatron's paged stash of a new step, as Megatron's schedules do (since 0.18).

    It stores activations of experts for B in pages, records the pass order of its first enabled
    step, and requires the same order in every later step. After an overflow, the step runs again
    without the stash. `trains` enables it in this step; it must be false until the order is final.
    """
    if not uses_stash(config):
        return
    from megatron.core.transformer.moe.paged_stash import PagedStashManager, paged_stash_reset

    stash = PagedStashManager.get_instance()
    if stash.status == "begin":
        stash.current_layer = None  # the stash counts microbatches even while disabled
    paged_stash_reset(enabled=trains, config=config)
