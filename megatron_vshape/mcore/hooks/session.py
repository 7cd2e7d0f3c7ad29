"""The session of a run: the chosen schedule, its runner, and the hooks that run its steps."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_model_config
from torch import nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.mcore.features.slices import share_slices
from megatron_vshape.mcore.frameworks import adapt_frameworks
from megatron_vshape.mcore.hook import Function, Hook, Replaced, Switched, replaces
from megatron_vshape.mcore.layout.built_layers import check_layers
from megatron_vshape.mcore.observe import report
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    check_one_module,
    check_stacks,
    model_with_encoder,
    name_keywords,
    refusing,
    refusing_together,
)
from megatron_vshape.mcore.setup.configure import with_backend_of_run
from megatron_vshape.mcore.setup.environment import Environment
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import RunConfig
from megatron_vshape.mcore.split import graphs
from megatron_vshape.mcore.split.graphs import capture_order, covered, passes_of
from megatron_vshape.mcore.split.linear_layers import defer_weight_gradients, make_split_linear
from megatron_vshape.mcore.step.forward_backward import PipelineRunner, message_bytes
from megatron_vshape.mcore.step.gradient_sync import splits_last
from megatron_vshape.mcore.step.losses import can_wait
from megatron_vshape.mcore.step.microbatches import iterators_by_chunk, schedule_table
from megatron_vshape.mcore.step.stage import Execution
from megatron_vshape.mcore.step_state import MutableState, StepState, unwrapped

if TYPE_CHECKING:  # it needs Megatron-LM's trainer
    from megatron_vshape.mcore.observe.iteration_log import IterationLog

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ProcessState:
    """State of the hooks from `registry.install` to `registry.uninstall`."""

    registered: Options | None = None  # the options of `register`
    chosen_by_flags: bool = False  # Megatron's parser has run; its flags override `registered`
    names_schedule: bool = False  # the flags name a schedule, even if it is rejected later
    megatron_defaults: Mapping[str, Any] = field(default_factory=dict)  # of its own arguments
    execution: Execution = field(default_factory=Execution)  # of the passes
    environment: Environment = field(default_factory=Environment)
    prepared: WeakSet[nn.Module] = field(default_factory=WeakSet)  # first chunks of models
    # Replaced attributes of Megatron and libraries.
    replaced: Replaced = field(default_factory=Replaced)
    pipeline_hooks: Switched = field(default_factory=Switched)


@dataclass(slots=True)
class TrainingState:
    """State of the steps of a run."""

    # The step function of the trainer; created before training starts, or in the first step of a
    # library.
    runner: PipelineRunner | None = None
    iteration_log: IterationLog | None = None  # set while Megatron's trainer runs
    is_capturing: bool = False  # Transformer Engine is capturing CUDA graphs


@dataclass(slots=True)
class BuildState(MutableState):
    """The chunks of this rank while they are built (`core_hooks`), and their optimizer."""

    # True from the end of a chunk's constructor until the optimizer or the first step. A library
    # may extend the model then, and query which chunks are the first and the last stage.
    is_extensible: bool = False
    first_chunk: Callable[[], Any] = lambda: None  # weak reference to this rank's first chunk
    # Chunk that a provider builds now, which calls Megatron without a vp_stage.
    provided_chunk: int | None = None
    # Chunk whose position the trainer queried last; a library's model may then get no vp_stage.
    queried_chunk: int | None = None
    embedding_chunk: nn.Module | None = None  # with the embedding, until the last one is built
    optimizer: Any = None
    # Last chunk -> first chunk of the same rank, whose embedding weights it shares.
    tied_to: WeakKeyDictionary[nn.Module, nn.Module] = field(default_factory=WeakKeyDictionary)

    @property
    def current_chunk(self) -> int | None:
        """Return the chunk that is being built if the library passes no vp_stage."""
        return self.queried_chunk if self.provided_chunk is None else self.provided_chunk


@dataclass(slots=True)
class Session:
    """State shared by the hooks, by lifetime: the process, the model of a run, its steps.

    `pipeline` is None while Megatron's schedules run. Then hooks call upstream; under a schedule of
    Megatron that the user has named, they add log lines and checks.
    """

    # The schedule: of this package, or Megatron's own if the user has named one.
    pipeline: RunConfig | None = None
    planner: Planner | None = None  # of the pipeline
    megatrons_own: str | None = None
    # Keeps the store of the ranks' rendezvous open: some ranks may still read a plan from it.
    rank_zero: RankZeroPlanner | None = None
    arguments: Namespace | None = None  # of Megatron-LM's trainer, once validated
    process: ProcessState = field(default_factory=ProcessState)
    build: BuildState = field(default_factory=BuildState)
    training: TrainingState = field(default_factory=TrainingState)
    step: StepState = field(default_factory=StepState)  # shared with layers and stages

    def choose(
        self,
        pipeline: RunConfig | None,
        megatrons_own: str | None,
        rank_zero: RankZeroPlanner | None = None,
    ) -> None:
        """Set the schedule of the run, install the hooks that need one, and reset the runner.

        `rank_zero` plans for all ranks.
        """
        self.pipeline, self.megatrons_own, self.training.runner = pipeline, megatrons_own, None
        self.rank_zero = rank_zero
        self._reset_planner()
        self.build.is_extensible = False
        self.step.has_own_schedule = pipeline is not None
        # These hooks replace classes and flags, which cannot pass a call to the original.
        self.process.pipeline_hooks.switch(pipeline is not None)

    @property
    def is_idle(self) -> bool:
        """Return whether no schedule is requested; then Megatron runs as without hooks."""
        return self.pipeline is None and self.megatrons_own is None

    def end_run(self, restarts: bool = False) -> None:
        """Free all state of a run that has ended or failed.

        The choice from the flags stays, for another run in this process (`restarts`, Megatron's
        --inprocess-restart). That run plans again: after a failure, only some ranks may have
        measured costs or agreed on a program.
        """
        if self.training.runner is not None:
            self.training.runner.free_state(quietly=restarts)
        self.build, self.training = BuildState(), TrainingState()
        self._reset_planner()

    def _reset_planner(self) -> None:
        """Drop all plans and measured costs."""
        pipeline = self.pipeline
        self.planner = None if pipeline is None else Planner(pipeline.choice, self.rank_zero)

    def use_backend_of_run(self) -> None:
        """Plan for the P2P backend of the run, now that process groups exist."""
        if self.pipeline is not None:
            pipeline = with_backend_of_run(self.pipeline)
            if pipeline is not self.pipeline:
                self.pipeline = pipeline
                self._reset_planner()

    def planner_of_run(self) -> Planner:
        """Return the planner of this package's schedule."""
        assert self.planner is not None, "Megatron runs a schedule of its own"
        return self.planner

    def pipeline_runner(self, pipeline: RunConfig) -> PipelineRunner:
        """Return the runner of this package's schedule; creates it at the first call."""
        if self.training.runner is None:
            planner = self.planner_of_run()
            self.training.runner = PipelineRunner(
                self.step, pipeline, planner, self.logs, self.process.execution
            )
        return self.training.runner

    def prepare_model(self, call: Mapping[str, Any]) -> None:
        """Prepare a model at its first step, connect the ranks, and log the first training plan.

        Ranks differ in layers, stages and data, so a single rank may find an unsupported feature.
        All ranks then fail together (`refusing_together`).
        """
        model = call["model"] if isinstance(call["model"], list) else [call["model"]]
        if self.pipeline is None:
            return
        # By model, not once: RL libraries run an actor, a critic and a reference in one process.
        is_prepared = model[0] in self.process.prepared
        if not is_prepared:
            # Without the agreement, the other ranks would wait for the failed rank in their first
            # receive.
            with refusing_together():
                self._check_model(self.pipeline, model)
                # For its errors only: each step calls it again with its own data iterator.
                iterators_by_chunk(call["data_iterator"], len(model))
                chunks = [unwrapped(chunk) for chunk in model]  # names without wrapper prefixes
                share_slices(self.step, chunks, self.pipeline.choice)
                defer_weight_gradients(self.step, chunks, self.pipeline.splits_graphs)
        with refusing():
            tokens = call["seq_length"] * call["micro_batch_size"]
            # A library may evaluate first: the microbatches of that call are not those of training.
            trains = not call.get("forward_only", False)
            text = self.connect(self.pipeline, model, tokens, call["num_microbatches"], trains)
            if text:
                logger.log(logging.DEBUG if dist.get_rank() else logging.INFO, "%s", text)
        if not is_prepared:
            self.process.environment.withdraw_loading_mode()
            self.process.prepared.add(model[0])

    def _check_model(self, pipeline: RunConfig, model: Sequence[nn.Module]) -> None:
        """Raise UnsupportedError unless `model` has the chunks of this rank as they were built."""
        unwrapped_chunks = [unwrapped(chunk) for chunk in model]
        check_stacks(pipeline.choice.name, unwrapped_chunks)
        chunks = pipeline.stage_map.num_chunks
        if len(model) != chunks:
            raise UnsupportedError(
                f"the library runs {len(model)} of the {chunks} chunks a rank that "
                f"{pipeline.choice.name} has: register before the model's config is made, "
                "or choose a schedule with one where it knows of no more, such as zb-h1"
            )
        rank = parallel_state.get_pipeline_model_parallel_rank()
        check_layers(pipeline.stage_map, rank, unwrapped_chunks)
        for feature in features():
            feature.check_chunks(pipeline, rank, unwrapped_chunks)
        name, choice = model_with_encoder(unwrapped_chunks), pipeline.choice
        if name is not None and choice.costs is None and choice.estimate is None:
            logger.log(
                logging.DEBUG if dist.get_rank() else logging.WARNING,
                "%s has an encoder on the first stage, and all stages have %d layers. Balance them "
                "with --pipeline-layer-split auto and --pipeline-encoder-layers X",
                name,
                pipeline.stage_map.layers[0],
            )

    def connect(
        self,
        pipeline: RunConfig,
        model: Sequence[nn.Module],
        tokens: int,
        num_microbatches: int,
        trains: bool = True,
    ) -> str:
        """Connect the ranks, plan the first training step, and return the log lines of both.

        All ranks call it before a step, with the number of `tokens` per microbatch. Only the first
        call with `trains` plans: it reserves static memory in a memory limit. The text is empty if
        nothing is left to do.

        Raises:
            ScheduleError: No schedule fits the memory limit.
            UnsupportedError: There is a limit, but no optimizer with known memory.
        """
        runner, limit = self.pipeline_runner(pipeline), pipeline.choice.limit_bytes
        # Megatron-LM's `train` hook connects earlier, because it knows the optimizer.
        lines: list[str | None] = [] if runner.is_connected else [runner.connect(model)]
        if trains and not runner.has_first_plan:
            if limit is not None:
                needed_bytes = message_bytes(get_model_config(model[0]), tokens)
                everyones = self._reserve_memory(pipeline, model, needed_bytes, num_microbatches)
                lines.append(report.memory_table(everyones, runner.planner.reserved_bytes, limit))
            lines.append(
                report.opening_lines(pipeline, runner.planner, num_microbatches, runner.local_ranks)
            )
            runner.has_first_plan = True
        return "\n".join(line for line in lines if line is not None)

    def _reserve_memory(
        self,
        pipeline: RunConfig,
        model: Sequence[nn.Module],
        message_bytes: int,
        num_microbatches: int,
    ) -> list[report.StaticMemory]:
        """Reserve static memory and P2P buffers in the limit; return the memory of each rank."""
        if self.build.optimizer is None:
            raise UnsupportedError(
                "a memory limit requires an optimizer from megatron.core.optimizer, whose "
                "state it includes. Create the optimizer there, or remove the limit"
            )
        runner = self.pipeline_runner(pipeline)
        overlaps = runner.overlaps_steps
        local_memory = report.static_memory(model, self.build.optimizer, overlaps)
        group = parallel_state.get_pipeline_model_parallel_group()
        # All data-parallel replicas need one plan, so the replica with the most static memory
        # decides.
        everyones = report.max_of_replicas(
            local_memory, group, lambda rank_memory: rank_memory.total
        )
        runner.planner.reserve([rank_memory.total for rank_memory in everyones], message_bytes)
        # Determines the maximum number of P2P buffers, which are outside the memory of passes.
        runner.planner.plan_step(num_microbatches)
        return everyones

    @property
    def library_options(self) -> Options | None:
        """The options of `register`; None without them, or if flags decide."""
        return None if self.process.chosen_by_flags else self.process.registered

    def name_options(self, error: BaseException) -> None:
        """Name the options in an error as the user gave them: flags, or keywords of `register`."""
        if self.process.registered is not None and not self.process.names_schedule:
            name_keywords(error)

    def logs(self, ahead: int) -> bool:
        """Return whether Megatron's trainer logs the step `ahead` steps after the current one."""
        return self.training.iteration_log is not None and self.training.iteration_log.has(ahead)


@replaces
def get_forward_backward_func(
    session: Session, original: Function, *args: Any, **options: Any
) -> Any:
    """Return this package's step function, or Megatron's under a schedule of Megatron."""
    pipeline = session.pipeline
    if pipeline is None:
        return original(*args, **options)
    with refusing():
        check_one_module(pipeline.choice.name, *args, *options.values())
    session.build.is_extensible = False
    # A library registers before it initializes process groups, so the P2P backend was a guess.
    if session.training.runner is None:
        session.use_backend_of_run()
        pipeline = session.pipeline or pipeline
    # Megatron gets a function for training and one per evaluation. All of them use one runner
    # (`step/forward_backward.py`), with its transport and its plans.
    runner = session.pipeline_runner(pipeline)

    @functools.wraps(original)
    def run(**call: Any) -> Any:
        session.build.is_extensible = False  # a second model may have been built since
        try:
            # Not earlier: a library may add modules to the model until its first step.
            session.prepare_model(call)
            return runner(**call)
        except (ValueError, SystemExit) as error:
            session.name_options(error)
            raise

    return run


@replaces
def convert_schedule_table_to_order(
    session: Session, original: Function, num_warmup: int, num_chunks: int, table: Any
) -> list[int]:
    """Return this rank's pass order to Transformer Engine for CUDA graph capture."""
    if session.pipeline is None:
        return list(original(num_warmup, num_chunks, table))
    rank = parallel_state.get_pipeline_model_parallel_rank()
    # The helper of a vision encoder has one chunk, the first, and captures it separately.
    stages = session.pipeline.stage_map.stages(rank)[:num_chunks]
    program = session.planner_of_run().plan_step(len(table) // num_chunks).program
    # Replays must follow the captured order, so the step rejects any other program from now on.
    session.step.captured = program
    return capture_order(program, rank, stages)


@replaces
def create_cudagraphs(session: Session, original: Function, helper: Any) -> None:
    """Capture CUDA graphs while the transport is idle, and record their memory."""
    pipeline = session.pipeline
    if pipeline is None:
        original(helper)
        return
    session.pipeline_runner(pipeline).rest()
    capture = _capture_of_weights(session, pipeline, helper) if pipeline.splits_graphs else None
    # So that `get_schedule_table` does not reject the call that the capture makes.
    session.training.is_capturing = True
    try:
        with graphs.capturing(helper, capture, session.step):
            original(helper)
        # The helper of a vision encoder has only the first chunk.
        if capture is not None and helper.num_model_chunks == pipeline.stage_map.num_chunks:
            # Passes of features have no graphs.
            session.step.captured_passes = [
                work for work in capture.passes if work.kind in (Kind.F, Kind.B, Kind.W, Kind.BW)
            ]
    finally:
        session.training.is_capturing = False


def _capture_of_weights(session: Session, pipeline: RunConfig, helper: Any) -> graphs.Capture:
    """Return a capture of weight gradients in the order of this rank's W passes."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = pipeline.stage_map.stages(rank)[: helper.num_model_chunks]
    program = session.planner_of_run().plan_step(get_num_microbatches()).program
    passes = passes_of(program, rank, stages)
    if splits_last(pipeline, helper.model[0]):
        passes = graphs.with_last_split(passes)
    return graphs.Capture(helper.callables_per_chunk, covered(helper.model), passes)


@replaces
def get_schedule_table(
    session: Session,
    original: Function,
    num_microbatches: int,
    num_model_chunks: int,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the order in which the last step called the trainer's forward step on this rank.

    Libraries sort the expert choices by it that they have recorded in that step, and then gather
    those of all ranks.
    """
    # Transformer Engine's capture uses only the number of passes in the table.
    if session.pipeline is None or session.training.is_capturing or num_model_chunks == 1:
        return original(num_microbatches, num_model_chunks, *args, **options)
    adapt_frameworks(session)
    runner = session.training.runner
    calls = runner.calls if isinstance(runner, PipelineRunner) else None
    layers = session.pipeline.stage_map.layers
    return schedule_table(calls, layers, num_microbatches, num_model_chunks)


@replaces
def validate_result(
    session: Session,
    original: Function,
    machine: Any,
    result: Any,
    rejection_func: Any,
    message: str,
    comparison_func: Any = None,
    *args: Any,
    **options: Any,
) -> None:
    """Check a loss after the passes of its step, to avoid a device synchronization per loss."""

    def check(value: Any) -> None:
        original(machine, value, rejection_func, message, comparison_func, *args, **options)

    checks = session.step.late_checks
    if checks is None:
        check(result)
    elif can_wait(machine, result, rejection_func, comparison_func):
        checks.add(check, result)
    else:
        checks.make()  # in order: Megatron acts on the first of several bad results
        check(result)


def linear_function(session: Session, original: type) -> type:
    """Return the linear function that can defer its weight gradient."""
    # Megatron looks the class up in its module in every forward, so built layers use this one.
    return make_split_linear(session.step, layers, original)


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_GRAPHS = "megatron.core.transformer.cuda_graphs"
_LAYERS = "megatron.core.tensor_parallel.layers"

HOOKS = (
    Hook(
        _SCHEDULES,
        "get_forward_backward_func",
        (),
        "hands the trainer this package's function instead of Megatron's",
        get_forward_backward_func,
        everywhere=True,
    ),
    Hook(
        _SCHEDULES,
        "get_schedule_table",
        ("num_microbatches", "num_model_chunks"),
        "gives libraries the order of the passes of the schedule, to sort recorded expert choices",
        get_schedule_table,
        everywhere=True,
    ),
    Hook(
        _GRAPHS,
        "convert_schedule_table_to_order",
        ("num_warmup_microbatches", "num_model_chunks", "schedule_table"),
        "has CUDA graphs captured in the order of the schedule's passes, which replays follow",
        convert_schedule_table_to_order,
    ),
    Hook(
        _GRAPHS,
        "TECudaGraphHelper.create_cudagraphs",
        ("self",),
        "finds out which memory graphs have, of which messages and weight jobs keep copies",
        create_cudagraphs,
    ),
    Hook(
        "megatron.core.rerun_state_machine",
        "RerunStateMachine.validate_result",
        ("result", "rejection_func", "message", "comparison_func", "tolerance", "fatal"),
        "checks the losses of a step at its end: each check is a wait of the host for the device",
        validate_result,
    ),
    # Only while a schedule is chosen: all linear layers of the process would see these.
    Hook(
        _LAYERS,
        "LinearWithGradAccumulationAndAsyncCommunication",
        (
            "input",
            "weight",
            "bias",
            "gradient_accumulation_fusion",
            "allreduce_dgrad",
            "sequence_parallel",
            "tp_group",
        ),
        "lets W run later than B",
        linear_function,
        only_with_pipeline=True,
    ),
)
"""The functions of megatron.core that run a step, for every trainer."""
