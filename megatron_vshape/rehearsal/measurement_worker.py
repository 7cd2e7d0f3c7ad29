"""Runs one rank of a training command on this machine's GPU or CPU and times its passes.

`measurement` starts it as `python -m megatron_vshape.rehearsal.measurement_worker STEPS
[MEGATRON]`. It imports everything, reads a job from stdin and prints the result as its last line.
The other ranks of the job do not exist: collectives and P2P messages end as they begin, and
received tensors are random. So times contain no communication. A pass lasts from the start of its
first kernel to the end of its last one, Python's launch time included.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_vshape.rehearsal.phases import Phase
from megatron_vshape.rehearsal.rank_job import RankJob

WARM_UP = 2
"""Steps before the timed ones: the first compiles, the second allocates the optimizer's state."""

ON_CPU = "--no-masked-softmax-fusion --no-gradient-accumulation-fusion".split()
"""A CPU has no fused kernels."""

SMALL_STEPS = "--lr 1e-9 --min-lr 0 --no-check-for-nan-in-loss-and-grad".split()
"""Random messages give random gradients: weights must stay finite."""


class _StepsMeasured(BaseException):
    """Ends the program after its last step; no handler of Megatron's catches it."""


class Watched:
    """Counts and times the steps and the passes of the program of a rank."""

    def __init__(self, steps: int) -> None:
        import torch

        self.cuda, self.steps = torch.cuda, steps
        self.held: list[int] = []
        self.peaks: list[int] = []
        self.step_s: list[float] = []
        self.passes: list[tuple[str, int, Any, Any, int, int]] = []
        self.chunks: dict[int, int] = {}
        self.parameters = self.peak = 0

    @property
    def on_gpu(self) -> bool:
        """Return False in CPU mode."""
        return str(self.cuda.get_device_name(0)) != "cpu"

    def setup(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Set the model up."""
        from megatron.training import get_args

        result = call(*args, **kwargs)
        get_args().train_iters = max(get_args().train_iters or 0, self.steps + 1)
        self.chunks = {id(chunk): index for index, chunk in enumerate(result[0])}
        self.parameters = sum(p.numel() for chunk in result[0] for p in chunk.parameters())
        return result

    def train_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, or end the program after the last one."""
        gc.collect()
        self.cuda.synchronize()
        self.held.append(self.cuda.memory_allocated())
        if len(self.step_s) == self.steps:
            raise _StepsMeasured
        if len(self.step_s) <= WARM_UP:
            self.passes.clear()
        self.peak = 0
        self.cuda.reset_peak_memory_stats()
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            return call(*args, **kwargs)
        finally:
            end.record()
            self.cuda.synchronize()
            self.step_s.append(start.elapsed_time(end) / 1e3)
            self.peaks.append(self._reset_peak())

    def _reset_peak(self) -> int:
        """Start a new peak of the allocator; return that of the step so far."""
        self.peak = max(self.peak, self.cuda.max_memory_allocated())
        self.cuda.reset_peak_memory_stats()
        return self.peak

    @contextmanager
    def watch(self, phase: Phase) -> Iterator[None]:
        """Record the start and end of a pass, and the memory that it adds and needs meanwhile."""
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self._reset_peak()
        start_bytes = self.cuda.memory_allocated()
        start.record()
        try:
            yield
        finally:
            end.record()
            adds = self.cuda.memory_allocated() - start_bytes
            meanwhile = self.cuda.max_memory_allocated() - start_bytes
            self.passes.append((phase.kind, phase.chunk, start, end, adds, meanwhile))

    def of_megatron(self, name: str) -> Callable[..., Any]:
        """Wrap a pass of Megatron's own schedules."""

        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            model = kwargs.get("model", args[2] if len(args) > 2 else None)
            with self.watch(Phase(name, self.chunks.get(id(model), 0))):
                return call(*args, **kwargs)

        return run

    def report(self) -> dict[str, Any]:
        """Return the figures as JSON values; passes as medians over the timed steps."""
        kinds: dict[tuple[str, int], list[tuple[float, int, int]]] = {}
        for name, chunk, start, end, adds, meanwhile in self.passes:
            ran = start.elapsed_time(end), adds, meanwhile
            kinds.setdefault((name, chunk), []).append(ran)
        return {
            "device": self.cuda.get_device_name(0),
            "on_gpu": self.on_gpu,
            "peak_bytes": max(self.peaks),
            "held_bytes": self.held[-1],
            "step_s": self.step_s,
            "reserved_bytes": self.cuda.max_memory_reserved(),
            "parameters": self.parameters,
            "kinds": [
                {
                    "kind": name,
                    "chunk": chunk,
                    "number": len(runs) // max(self.steps - WARM_UP, 1),
                    "ms": statistics.median(ms for ms, *_ in runs),
                    "adds_bytes": statistics.median(size for _, size, _ in runs),
                    "meanwhile_bytes": statistics.median(size for *_, size in runs),
                }
                for (name, chunk), runs in sorted(kinds.items())
            ],
        }


def import_all(watched: Watched) -> None:
    """Import all modules of a rank, with collectives that end as they begin.

    The passes of this package's schedules report to `watched`.
    """
    from megatron_vshape.environment import set_missing

    set_missing(os.environ, kernels=True, ordered=True)
    import torch

    from megatron_vshape.mcore import cpu

    cpu.install()  # without effect on a machine with a GPU
    from megatron_vshape.rehearsal import exchanges

    exchanges.complete_at_once()
    _let_exchanges_write()
    from megatron_vshape.mcore.hooks import registry
    from megatron_vshape.mcore.step.stage import Execution
    from megatron_vshape.rehearsal.single_rank import watched_stage

    registry.install({}, Execution(watched_stage(watched.watch)))
    import megatron.training.training  # noqa: F401

    torch.manual_seed(1)


def _let_exchanges_write() -> None:
    """Fill the outputs of communication: unwritten memory may be NaN, which can change times."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    def writing(call: Callable[..., Any], write: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            write(*args, **kwargs)
            return call(*args, **kwargs)

        return run

    for names, write in (
        (("recv", "irecv"), _receive),
        (("all_gather_into_tensor", "_all_gather_base"), _gather),
        (("reduce_scatter_tensor", "_reduce_scatter_base"), _scatter),
        (("all_to_all_single",), _scatter),
    ):
        for name in names:
            replacement = writing(getattr(dist, name), write)
            for module in (dist, c10d):
                setattr(module, name, replacement)


def _receive(tensor: Any, *unused: Any, **options: Any) -> None:
    if tensor.is_floating_point():
        tensor.detach().normal_(std=1e-2)


def _gather(*args: Any, **options: Any) -> None:
    output, source = _both(("output_tensor", "input_tensor"), args, options)
    if not _is_part(output, source):
        output.view(-1, *source.shape).copy_(source)


def _scatter(*args: Any, **options: Any) -> None:
    output, source = _both(("output", "input"), args, options)
    if _is_part(output, source):
        return
    if output.shape[0] <= source.shape[0]:
        output.copy_(source[: output.shape[0]])
    else:
        _receive(output)


def _both(names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    return [options[name] if name in options else args[index] for index, name in enumerate(names)]


def _is_part(output: Any, source: Any) -> bool:
    """Return whether one tensor is part of the other, which then has its values."""
    return bool(output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr())


def run_rank(job: RankJob, watched: Watched) -> dict[str, Any]:
    """Run the program of a rank for the steps of `watched` and return the figures."""
    os.environ |= {
        **job.environment,
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    from megatron.training import training

    from megatron_vshape.rehearsal import exchanges, lora
    from megatron_vshape.rehearsal.adjustments import skip_driver, wrap

    exchanges.start_process_group(job.rank, job.world)
    if job.lora is not None:
        lora.adapt_built_chunks(job.lora)
    wrap(training, "setup_model_and_optimizer", watched.setup)
    wrap(training, "train_step", watched.train_step)
    data: Any = training
    data.build_train_valid_test_data_iterators = _iterators
    skip_driver()
    if not job.has_schedule:
        from megatron.core.pipeline_parallel import schedules

        wrap(schedules, "forward_step", watched.of_megatron("F"))
        wrap(schedules, "backward_step", watched.of_megatron("BW"))
    on_cpu = [] if watched.on_gpu else ON_CPU
    sys.argv = [job.script, *job.flags, *SMALL_STEPS, *on_cpu]
    sys.path.insert(0, str(Path(job.script).parent))
    try:
        runpy.run_path(job.script, run_name="__main__")
    except _StepsMeasured:
        return watched.report()
    raise RuntimeError("the program ended before its last step")


def _iterators(*unused: Any, **options: Any) -> Any:
    from megatron.training import get_args

    from megatron_vshape.rehearsal.adjustments import training_iterators

    return training_iterators(get_args(), _batches(get_args()))


def _batches(args: Any) -> Iterator[dict[str, Any]]:
    import torch

    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(args.padded_vocab_size, shape, generator=generator)
        batch = {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        }
        if getattr(args, "create_attention_mask_in_dataloader", False):
            above = torch.ones(shape[1], shape[1], dtype=torch.bool).triu(1)
            batch["attention_mask"] = above.expand(shape[0], 1, *above.shape).contiguous()
        yield batch


def main() -> None:
    """Import, wait for a job on stdin, run it, and print the result as the last line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps, *paths = sys.argv[1:]
    sys.path[:0] = paths
    watched = Watched(int(steps))
    import_all(watched)
    line = sys.stdin.readline()
    if line:
        try:
            result = run_rank(RankJob.from_json(line), watched)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
        print(json.dumps(result), file=out, flush=True)
        os._exit(0)  # some threads wait for other ranks


if __name__ == "__main__":
    main()
