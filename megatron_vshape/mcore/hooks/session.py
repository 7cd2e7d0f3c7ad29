"""The state behind the hooks: which schedule runs, and by what."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import nn

from megatron_vshape.mcore.layout import vocabulary
from megatron_vshape.mcore.layout.stages import streams_of
from megatron_vshape.mcore.observe import report, static_memory
from megatron_vshape.mcore.observe.megatrons_own import MeteredSchedule
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError, refusing, refusing_together
from megatron_vshape.mcore.replaced import Replaced
from megatron_vshape.mcore.setup import configure
from megatron_vshape.mcore.setup.library import with_messages_of_this_run
from megatron_vshape.mcore.setup.one_planner import OnePlanner
from megatron_vshape.mcore.setup.pipeline import Pipeline
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.microbatches import given_iterators
from megatron_vshape.mcore.step_state import StepState, unwrapped

if TYPE_CHECKING:  # they need Megatron-LM's trainer
    from megatron_vshape.mcore.early.post_validation import PostValidation
    from megatron_vshape.mcore.observe.iteration_log import IterationLog

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """What the hooks of one `hooks.install` share.

    `pipeline` is None while Megatron's own schedules run: then every hook does what upstream does.
    """

    pipeline: Pipeline | None = None
    megatrons_own: str | None = None  # the schedule of Megatron's that the user has named
    # What the trainer calls for every step; made when it asks for that.
    runner: PipelineRunner | MeteredSchedule | None = None
    post_validation: PostValidation | None = None  # while a run that asks for it trains
    iteration_log: IterationLog | None = None  # once Megatron's trainer runs, which logs
    step: StepState = field(default_factory=StepState)
    tries_again: bool = False  # in this process, where a run fails (--inprocess-restart)
    # Where a library has its own configuration and trainer:
    library: Options | None = None  # what `register` was given
    chosen_by_flags: bool = False  # Megatron's parser was asked all the same
    once: OnePlanner | None = None  # where ranks met to plan, which some may be about to leave
    is_named: bool = False  # the flags have named a schedule, whatever becomes of it
    optimizer: Any = None
    registers: bool = False  # NCCL registers buffers, by the config of data parallelism
    set_variables: frozenset[str] = frozenset()  # of the process, for the schedule
    has_opened: bool = False  # the schedule has been shown
    captures: bool = False  # Transformer Engine records CUDA graphs now
    loads: Any = None  # the model whose checkpoint is being read
    embedding_end: nn.Module | None = None  # the chunk that has it, until the last one is built
    # Last chunks that have the weights of their rank's first, which is the value.
    joined: WeakKeyDictionary[nn.Module, nn.Module] = field(default_factory=WeakKeyDictionary)
    # From the end of a chunk's constructor until the optimizer or the first step: a library may
    # extend the model meanwhile, and asks which of its chunks have the ends.
    is_building: bool = False
    provided_chunk: int | None = None  # while a provider that knows of no chunks builds this one
    providers: list[type] = field(default_factory=list)  # that have been taught to build chunks
    replaced: Replaced = field(default_factory=Replaced)  # undone when the hooks are
    chosen: Replaced = field(default_factory=Replaced)  # the same, while a schedule is chosen
    on_choice: list[tuple[Any, str, Any]] = field(default_factory=list)  # put there then
    ready: WeakSet[nn.Module] = field(default_factory=WeakSet)  # first chunks of models that are

    def choose(self, pipeline: Pipeline | None, megatrons_own: str | None) -> None:
        """Take what the flags ask for; what has run by other flags is over."""
        self.pipeline, self.megatrons_own, self.runner = pipeline, megatrons_own, None
        self.has_opened = self.is_building = False
        self.step.splits_backward = pipeline is not None
        self.chosen.undo()
        for each in self.on_choice if pipeline is not None else ():
            self.chosen.put(*each)

    @property
    def is_idle(self) -> bool:
        """Return whether nobody has asked for a schedule: then Megatron is as without hooks."""
        return self.pipeline is None and self.megatrons_own is None

    def forget(self) -> None:
        """Let go of all that a run has left, whether it has ended or failed.

        What the flags have decided stays, for another run by them in this process (Megatron's
        --inprocess-restart): that one plans anew, since of the ranks that failed some may have
        measured costs, or agreed on a program, and others not.
        """
        if isinstance(self.runner, PipelineRunner):
            self.runner.forget_data(quietly=self.tries_again)
        self.runner = self.post_validation = self.iteration_log = self.optimizer = None
        self.embedding_end, self.has_opened, self.is_building = None, False, False
        if self.pipeline is not None:
            planner = Planner(self.pipeline.choice, self.pipeline.planner.once)
            self.pipeline = replace(self.pipeline, planner=planner)

    def own_runner(self, pipeline: Pipeline) -> PipelineRunner:
        """Return what runs the steps of this package's schedule; made when first asked for."""
        runner = self.runner or PipelineRunner(self.step, pipeline, self.logs)
        if not isinstance(runner, PipelineRunner):
            raise RuntimeError(
                "a schedule of this package is to run, and one of Megatron's own runs"
            )
        self.runner = runner
        return runner

    def own_function(self, original: Callable[..., Any]) -> Any:
        """Return what takes the place of Megatron's function, which prepares the model if need be.

        Whoever has built the model may have added modules to it until the first step.
        """
        self.is_building = False
        if self.runner is None and self.pipeline is not None:
            self.pipeline = with_messages_of_this_run(self.pipeline)
        assert self.pipeline is not None
        runner = self.own_runner(self.pipeline)

        @functools.wraps(original)
        def run(**call: Any) -> Any:
            self.is_building = False  # a second model may have been built since
            self._prepare(call)
            return runner(**call)

        return run

    def _prepare(self, call: Mapping[str, Any]) -> None:
        """Prepare the model of the steps that begin.

        Ranks have other layers, ends and data, so one alone may find what it does not support.
        """
        model = call["model"] if isinstance(call["model"], list) else [call["model"]]
        if model[0] in self.ready or self.pipeline is None:
            return
        with refusing_together():
            self._check_model(self.pipeline, model)
            given_iterators(call["data_iterator"], len(model))
            configure.prepare_layers(
                self.step,
                model,
                self.pipeline.choice.most_slices,
                self.pipeline.splits_graphs,
            )
        with refusing():
            if not self.has_opened:
                tokens = call["seq_length"] * call["micro_batch_size"]
                text = self.opening(self.pipeline, model, tokens, call["num_microbatches"])
                level = logging.DEBUG if dist.get_rank() else logging.INFO
                logger.log(level, "%s", text)
        self.ready.add(model[0])

    def _check_model(self, pipeline: Pipeline, model: Sequence[nn.Module]) -> None:
        """Raise UnsupportedError unless these are the chunks of this rank, as they were built."""
        chunks = pipeline.stage_map.num_chunks
        if len(model) != chunks:
            raise UnsupportedError(
                f"the library runs {len(model)} of the {chunks} chunks a rank that "
                f"{pipeline.choice.name} has: register before the model's config is made, "
                "or choose a schedule with one where it knows of no more, such as zb-h1"
            )
        if pipeline.choice.shares:
            rank = parallel_state.get_pipeline_model_parallel_rank()
            ends = pipeline.ends(rank, 0)[0], pipeline.ends(rank, chunks - 1)[1]
            vocabulary.check_ends(unwrapped(model[0]), unwrapped(model[-1]), ends)

    def opening(
        self, pipeline: Pipeline, model: Sequence[nn.Module], tokens: int, num_microbatches: int
    ) -> str:
        """Return the schedule's picture, what carries messages, and with a limit what is left.

        All ranks call it before the first step, of microbatches of so many tokens.

        Raises:
            ScheduleError: nothing fits the limit.
            UnsupportedError: there is a limit, and no optimizer whose memory is known.
        """
        self.has_opened = True
        planner, limit, lines = pipeline.planner, pipeline.choice.limit_bytes, []
        carrier = self.own_runner(pipeline).connect(model)
        if carrier is not None:
            lines.append(carrier)
        if limit is not None:
            if self.optimizer is None:
                raise UnsupportedError(
                    "a memory limit requires an optimizer from megatron.core.optimizer, whose "
                    "state it includes. Create the optimizer there, or remove the limit"
                )
            config = get_model_config(model[0])
            shards = config.context_parallel_size * (
                config.tensor_model_parallel_size if config.sequence_parallel else 1
            )
            width = config.hidden_size * streams_of(config)
            width_bytes = width * config.pipeline_dtype.itemsize
            message_bytes = tokens * width_bytes // shards
            own = static_memory.static_memory(
                model, self.optimizer, pipeline.options.post_validates
            )
            group = parallel_state.get_pipeline_model_parallel_group()
            everyones = static_memory.most_of_replicas(own, group, lambda each: each.total)
            planner.reserve([each.total for each in everyones], message_bytes)
            planner.training(num_microbatches)  # says how many messages there are at most
            lines.append(static_memory.table(everyones, planner.reserved_bytes, limit))
        local_ranks = self.own_runner(pipeline).local_ranks
        lines.append(report.opening_lines(pipeline, num_microbatches, local_ranks))
        return "\n".join(lines)

    def metered_runner(self, function: Callable[..., Any], name: str) -> Any:
        """Return Megatron's `function` with a meter; made when first asked for."""
        if self.runner is None:
            self.runner = MeteredSchedule(self.step, self.logs, function, name)
        return self.runner

    def end_validation(self) -> str | None:
        """Validate at once from now on; return how it went, or None where that was so all along."""
        post_validation, self.post_validation = self.post_validation, None
        if post_validation is None:
            return None
        post_validation.end()
        return post_validation.closing_line()

    @property
    def is_librarys(self) -> bool:
        """Return whether a library's trainer runs, by what `register` was given."""
        return self.library is not None and not self.chosen_by_flags

    def logs(self, ahead: int) -> bool:
        """Return whether Megatron's trainer runs, and logs the step `ahead` of the one it runs."""
        return self.iteration_log is not None and self.iteration_log.has(ahead)
