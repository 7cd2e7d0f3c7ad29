"""The function that takes the place of Megatron's forward_backward_func."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import nn

from megatron_vshape.mcore.finite import inspected, repeats_a_bad_step
from megatron_vshape.mcore.gradient_sync import GradientSync
from megatron_vshape.mcore.iteration_log import BubbleMeter
from megatron_vshape.mcore.loss_reporting import bring_losses
from megatron_vshape.mcore.profiling import Profiler
from megatron_vshape.mcore.refusals import check_config
from megatron_vshape.mcore.report import RunReport
from megatron_vshape.mcore.session import Pipeline, Session
from megatron_vshape.mcore.stage import MegatronStage, Step, zero_tokens
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import Place, run_program
from megatron_vshape.runtime.stage import Stage
from megatron_vshape.runtime.variable_p2p import VariableTransport


class PipelineRunner:
    """Runs training and evaluation steps of one schedule; what Megatron's trainer calls.

    Made when the trainer asks for its function, that is when all process groups exist. What
    takes long, the process groups of the transport, is made at the first step and kept.
    """

    def __init__(self, session: Session, pipeline: Pipeline) -> None:
        self._session = session
        self._pipeline = pipeline
        self._transport: Transport | None = None
        self._place = Place()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        self.report = RunReport(
            session,
            pipeline.planner.name,
            pipeline.stage_map.stages(rank),
            pipeline.planner.training,
        )
        self._profiler = Profiler(pipeline, self.report)
        self.meter = BubbleMeter(session, pipeline.planner.predicted_bubble)

    def __call__(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run one step and return what the loss function reported, one entry per microbatch.

        The parameters are those of Megatron's own function. The reports come back on the last
        pipeline rank, where the trainer reads them, and on the rank of the last stage.
        """
        chunks, iterators = _as_lists(model, data_iterator)
        config = get_model_config(chunks[0])
        check_config(config)
        if adjust_tensor_shapes_fn is not None:
            raise ValueError("adjust_tensor_shapes_fn is not supported by --pipeline-schedule")
        groups = _default_groups() if pg_collection is None else pg_collection
        with _timed(config):
            shape = schedules.get_tensor_shapes(
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                config=_of_one_length(config),
                tp_group=groups.tp,
                cp_group=groups.cp,
            )[0]
            transport = self._ready_transport(config, shape, chunks[0], groups.pp)
            step = Step(
                config=config,
                forward_step_func=forward_step_func,
                num_microbatches=num_microbatches,
                context_parallel_size=groups.cp.size(),
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                gradient_sync=GradientSync(
                    config, chunks, self._pipeline, num_microbatches, force_all_reduce
                ),
                num_tokens=zero_tokens(_device_of(chunks[0])),
            )
            tokens = num_microbatches * micro_batch_size * seq_length
            with self._measured(step, chunks, tokens), self._reducing(step):
                self._run(step, chunks, iterators, transport, groups.pp)
            if not forward_only and config.finalize_model_grads_func is not None:
                self._finalize(step, chunks, groups, force_all_reduce)
            loss_rank = self._pipeline.stage_map.loss_rank
            return bring_losses(step.loss_store, loss_rank, groups.pp, _device_of(chunks[0]))

    def tell(self) -> str:
        """Return what this rank does or waits for, whatever thread asks."""
        if self._transport is None:
            return f"rank {dist.get_rank()}: before its first pass"
        return self._transport.tell(self._place)

    def _measured(
        self, step: Step, model: Sequence[nn.Module], tokens: int
    ) -> contextlib.AbstractContextManager[None]:
        if step.forward_only:
            self.report.interrupt()
            return contextlib.nullcontext()
        return self.report.training_step(model, step.num_microbatches, tokens)

    @contextlib.contextmanager
    def _reducing(self, step: Step) -> Iterator[None]:
        """Hold DDP's own reductions back inside, and start them from W where they overlap."""
        sync = step.gradient_sync
        reduces = sync if sync.overlaps and not step.forward_only else None
        with sync.session(step.forward_only), self._session.reduce_with(reduces):
            yield

    def _run(
        self,
        step: Step,
        model: Sequence[nn.Module],
        data_iterator: Sequence[Any],
        transport: Transport,
        pipeline_group: dist.ProcessGroup,
    ) -> None:
        planner, stage_map = self._pipeline.planner, self._pipeline.stage_map
        rank = pipeline_group.rank()
        stages = {
            stage: MegatronStage(
                self._session,
                step,
                model[chunk],
                data_iterator[chunk],
                chunk,
                stage,
                is_last=stage == stage_map.last_stage,
                has_chunks=stage_map.num_chunks > 1,
            )
            for chunk, stage in enumerate(stage_map.stages(rank))
        }
        if step.forward_only:
            program = planner.evaluation(step.num_microbatches)
            run_program(program, rank, stages, transport, place=self._place)
            return
        running: Mapping[int, Stage] = stages
        if repeats_a_bad_step():
            who = f"rank {dist.get_rank()} (device {rank})"
            running = inspected(stages, who, step.gradient_sync.overlaps)
        program = planner.training(step.num_microbatches).program
        torch_device = _device_of(model[0])
        profiled = self._profiler.begin_step(torch_device)
        timer = self.meter.begin_step(step.num_microbatches, torch_device, profiled)
        run_program(program, rank, running, transport, timer, self._place)
        self._profiler.end_step(
            profiled, program, transport, transport.blank(), self.report.held, pipeline_group
        )

    def _ready_transport(
        self,
        config: Any,
        shape: Sequence[int],
        model: nn.Module,
        pipeline_group: dist.ProcessGroup,
    ) -> Transport:
        dtype = config.pipeline_dtype
        if self._transport is None:
            kind = VariableTransport if config.variable_seq_lengths else Transport
            self._transport = kind(
                _all_pipelines(pipeline_group),
                shape,
                dtype,
                _device_of(model),
                self._pipeline.options.timeout_seconds,
            )
            self._transport.prepare(self._pipeline.planner.smallest())
        self._transport.expect(shape, dtype)
        return self._transport

    def _finalize(
        self,
        step: Step,
        model: Sequence[nn.Module],
        groups: Any,
        force_all_reduce: bool | None,
    ) -> None:
        """Have Megatron finish the gradients, as its own schedules do at their end."""
        config, num_tokens = step.config, None
        if config.calculate_per_token_loss:
            # Megatron takes the last rank's count for the pipeline's; only the loss rank has one.
            dist.all_reduce(step.num_tokens, group=groups.pp)
            num_tokens = step.num_tokens
        config.finalize_model_grads_func(
            model, num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce
        )


def _of_one_length(config: Any) -> Any:
    """Return a config for which Megatron tells the shape of messages, those of full length."""
    if not config.variable_seq_lengths:
        return config
    whole = copy.copy(config)
    whole.variable_seq_lengths = False
    return whole


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Run Megatron's timer of a step meanwhile; evaluation has none."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()


def _as_lists(model: Any, data_iterator: Any) -> tuple[list[nn.Module], list[Any]]:
    """Return the chunks and their iterators; with one chunk Megatron may pass the bare things."""
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if len(chunks) != len(iterators):
        raise ValueError(f"{len(chunks)} model chunks have {len(iterators)} data iterators")
    return chunks, iterators


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _all_pipelines(pipeline_group: dist.ProcessGroup) -> list[list[int]]:
    """Return the ranks of every pipeline of the world, in the same order on every rank."""
    own = dist.get_process_group_ranks(pipeline_group)
    everyones: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return [list(ranks) for ranks in sorted(set(map(tuple, everyones)))]


def _default_groups() -> ProcessGroupCollection:
    """Return the process groups that Megatron's own schedules take when none are passed."""
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
