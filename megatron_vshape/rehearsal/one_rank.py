"""Run the training program of one rank for two steps in fake tensors, and report its memory.

The program is the user's script: its arguments, model, DDP, optimizer, schedule and train_step are
Megatron's. The data is replaced, and the program ends after the second step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_vshape.mcore.refusals import captures_graphs
from megatron_vshape.rehearsal import adjustments, exchanges, lora, reference_model, routing
from megatron_vshape.rehearsal.adjustments import training_iterators, wrap
from megatron_vshape.rehearsal.device import Current, on_host
from megatron_vshape.rehearsal.graph_pools import GraphPool
from megatron_vshape.rehearsal.ledger import Ledger
from megatron_vshape.rehearsal.pass_tracker import PassTracker
from megatron_vshape.rehearsal.phases import MODEL, OPTIMIZER, Phase
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import CheckedRank, RankReport
from megatron_vshape.rehearsal.step_time import step_time
from megatron_vshape.rehearsal.trace_report import launches_of, report_of_trace
from megatron_vshape.rehearsal.traced_steps import STEPS, BuiltModel, TracedSteps
from megatron_vshape.runtime.weight_jobs import plain_tensors


class _StepsDone(BaseException):
    """Ends the program after its last measured step; no handler of Megatron catches it."""


def rehearse(job: RankJob) -> RankReport | CheckedRank:
    """Run the program of a rank and report its memory and passes, or the start-up checks only.

    Run this in a separate process, after `worker.prepare`.
    """
    start = time.monotonic()
    gpu = job.gpu
    _set_environment(job)
    Current.gpu = gpu
    workspace_bytes = gpu.workspace_bytes(os.environ)
    Current.ledger = ledger = Ledger(workspace_bytes, gpu.multiprocessors)
    exchanges.start_process_group(job.rank, job.world)
    replacements = _Replacements(job, ledger)
    sys.argv = [job.script, *job.flags]
    # As `python SCRIPT` does, for imports of modules next to the script.
    sys.path.insert(0, str(Path(job.script).parent))
    with ExitStack() as stack:
        # The last mode sees an operation first: the ledger, around the inference of fake tensors.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ledger)
        replacements.install_all()
        try:
            runpy.run_path(job.script, run_name="__main__")
        except _StepsDone:
            pass
        else:
            num_started = len(replacements.steps.peaks)
            raise RuntimeError(
                f"{job.script} ended after {num_started} training steps, and a rehearsal lasts "
                f"until the start of step {STEPS + 1}: have the script train for more"
            )
        finally:
            Current.ledger = None
    seconds = round(time.monotonic() - start, 2)
    ignored_flags = replacements.ignored_flags
    if job.checks_only:
        notices = replacements.notices
        return CheckedRank(job.name, job.rank, job.stage, notices, seconds, ignored_flags)
    report = report_of_trace(job, ledger, replacements.model, replacements.steps, seconds)
    return replace(report, ignored_flags=ignored_flags)


def _set_environment(job: RankJob) -> None:
    per_host = min(job.gpu.per_host, job.world)
    rank_variables = {
        "RANK": job.rank,
        "WORLD_SIZE": job.world,
        "LOCAL_RANK": job.rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # may be set by this package
    os.environ.update(job.environment)
    os.environ.update({name: str(value) for name, value in rank_variables.items()})
    if not any("fsdp" in flag for flag in job.flags):  # FSDP requires another value or none
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _stop(phase: Phase) -> AbstractContextManager[None]:
    """End the program before its first pass."""
    raise _StepsDone


class _Replacements:
    """Replaces functions of Megatron: it gets data, and its steps and passes are observed."""

    def __init__(self, job: RankJob, ledger: Ledger) -> None:
        self._job, self._ledger = job, ledger
        self.steps = TracedSteps(job, ledger)
        self._passes = PassTracker(ledger, self.steps.start_forward)
        self._args: Any = None  # Megatron's
        self._chunks: list[Any] = []
        self._pool: GraphPool | None = None
        self.ignored_flags: list[str] = []  # that Megatron's parser does not have
        self.notices: list[str] = []  # log lines about translated or ignored options

    @property
    def model(self) -> BuiltModel:
        """The model that Megatron has built."""
        return BuiltModel(self._args, self._chunks, self._pool)

    def install_all(self) -> None:
        """Install the replacements and observers."""
        from megatron.core.pipeline_parallel import schedules
        from megatron.training import training

        adjustments.skip_driver_and_other_ranks()
        if not self._job.strict:
            wrap(argparse.ArgumentParser, "parse_args", self._parse)
        if self._job.lora is not None:
            lora.adapt_built_chunks(self._job.lora)
        if self._job.reference is not None:
            reference_model.add_to_built_chunks(self._job.reference, self._job.lora is not None)
        wrap(training, "setup_model_and_optimizer", self._setup)
        wrap(training, "train_step", self._train_step)
        wrap(training, "get_num_microbatches", self._num_microbatches)
        if hasattr(training, "get_megatron_optimizer"):
            wrap(training, "get_megatron_optimizer", self._in_optimizer)
        wrap(training, "build_train_valid_test_data_iterators", self._iterators)
        if self._job.checks_only:
            self._log_notices()
        if self._job.has_schedule:
            from megatron_vshape.mcore.hooks import registry
            from megatron_vshape.rehearsal.single_rank import watched_execution

            watch = _stop if self._job.checks_only else self._ledger.during
            registry.install({}, watched_execution(watch))
        else:
            self._passes.mark_megatrons_passes(schedules)

    def _parse(self, call: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
        """Ignore flags that the parser does not have, as those of forks of Megatron."""
        namespace, words = parser.parse_known_args(*args, **kwargs)
        self.ignored_flags += [word.partition("=")[0] for word in words if word.startswith("--")]
        return namespace

    def _log_notices(self) -> None:
        """Collect the log lines about options that are translated, ignored or unused."""
        from megatron_vshape.mcore.setup import configure, translate

        handler = logging.Handler()
        emit: Any = handler
        emit.emit = lambda record: self.notices.append(record.getMessage())
        translate.logger.setLevel(logging.INFO)
        for module in (configure, translate):
            module.logger.addHandler(handler)

    def _in_optimizer(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._ledger.during(OPTIMIZER):
            return call(*args, **kwargs)

    def _setup(self, call: Callable[..., Any], *args_of_call: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        args = self._args = get_args()
        gpu, launches = self._job.gpu, launches_of(args)
        self._ledger.estimate_seconds = lambda work: step_time(work, gpu, launches)["step_s"]
        args.cuda_graph_warmup_steps = sys.maxsize  # nothing can be captured here
        if args.num_experts:
            routing.route_by_counts(args, self._job.imbalance)
        with self._ledger.during(MODEL):
            model, optimizer, scheduler = call(*args_of_call, **kwargs)
        self._chunks = list(model)
        # A shorter run would end before the memory between two steps is recorded.
        args.train_iters = max(args.train_iters or 0, STEPS + 1)
        _set_purposes(self._ledger, self._chunks, optimizer)
        self._passes.register_modules(self._chunks)
        if captures_graphs(args):
            self._pool = GraphPool(self._ledger, self._chunks)
        return model, optimizer, scheduler

    def _num_microbatches(self, call: Callable[..., Any]) -> int:
        return self.steps.limit_microbatches(int(call()), self.model)

    def _train_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Cycles that Python has not collected yet would count as memory between two steps.
        gc.collect()
        self.steps.end_step()
        # Our schedules check the model in the first step, so `check` stops at the first pass.
        if self._job.checks_only and not self._job.has_schedule:
            from megatron_vshape.mcore.setup.megatron_schedules import check_first_step

            check_first_step(self._args)
            raise _StepsDone
        if self.steps.num_ended == STEPS:
            raise _StepsDone
        self.steps.start_step()
        self._passes.begin_step()
        # train_step(forward_step_func, data_iterator, model, optimizer, ...).
        optimizer: Any = kwargs["optimizer"] if "optimizer" in kwargs else args[3]
        step = optimizer.step

        optimizer.step = functools.partial(self._in_optimizer, step)
        try:
            return call(*args, **kwargs)
        finally:
            optimizer.step = step

    def _iterators(self, call: Callable[..., Any], *unused: Any, **options: Any) -> Any:
        # Called once per chunk. An evaluation would run between the traced steps.
        return training_iterators(self._args, _batches(self._args))


def _set_purposes(ledger: Ledger, chunks: list[Any], optimizer: Any) -> None:
    """Set the purpose of existing storages: weights, gradients or optimizer."""
    # By phase first, because some storages have no tensor in the lists below.
    for record in ledger.held_at(ledger.clock):
        record.what = {MODEL: "weights", OPTIMIZER: "optimizer"}.get(record.phase, "")
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    weights = set(map(id, parameters))
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    main_grads = [getattr(parameter, "main_grad", None) for parameter in parameters]
    # The last name counts: an optimizer may step views of the weights.
    tensors_by_purpose = {
        "gradients": [*filter(torch.is_tensor, main_grads), *_grad_buffers(chunks)],
        "optimizer": _parts_of(parameter for parameter in stepped if id(parameter) not in weights),
        "weights": _parts_of(parameter.detach() for parameter in parameters),
    }
    for what, tensors in tensors_by_purpose.items():
        for tensor in tensors:
            ledger.name(tensor, what)


def _grad_buffers(chunks: Iterable[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, name, None)  # in a plain module it is a method
            for buffer in () if buffers is None or callable(buffers) else buffers:
                if isinstance(buffer.grad_data, Tensor):
                    yield buffer.grad_data


def _parts_of(tensors: Iterable[Any]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from plain_tensors(tensor)


def _batches(args: Any) -> Iterator[dict[str, Tensor]]:
    """Yield batches in host memory, as the data loader does."""
    shape = (args.micro_batch_size, args.seq_length)
    while True:
        with on_host():
            batch = {
                "tokens": torch.zeros(shape, dtype=torch.int64),
                "labels": torch.zeros(shape, dtype=torch.int64),
                "loss_mask": torch.zeros(shape),
                "position_ids": torch.zeros(shape, dtype=torch.int64),
            }
            if getattr(args, "create_attention_mask_in_dataloader", False):
                mask = (shape[0], 1, shape[1], shape[1])
                batch["attention_mask"] = torch.zeros(mask, dtype=torch.bool)
        yield dict(batch)  # a copy: the program stores its GPU tensors in the batch
