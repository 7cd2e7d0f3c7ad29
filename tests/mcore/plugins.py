"""Small plugins of the farm: each function changes Megatron or this package in a rank.

A test names one as `plugin="plugins:NAME"`; the function gets the rank and the
test's arguments.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import megatron.training
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.models.gpt import GPTModel, gpt_model
from megatron.core.pipeline_parallel import schedules, utils
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import arguments, initialize, training
from offloaded import poisoning
from recorder import wrap
from torch.utils.data import Subset

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.observe import profiling, report
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.split import linear_layers
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.stage import MegatronStage
from megatron_vshape.runtime import measure
from megatron_vshape.runtime.weight_jobs import _Open


def two_stacks(rank: int, argument: object) -> None:
    """Give the model the class name of Megatron's T5Model."""
    gpt_model.GPTModel.__name__ = "T5Model"


def wrong_chunks(rank: int, name: str) -> None:
    """Build each chunk with the layer spec, or as the model, of chunk 0."""
    from megatron.training.models import gpt

    wrap(gpt, name, lambda original, *args, **options: original(*args, **options | {"vp_stage": 0}))


def frozen_embedding(rank: int, argument: object) -> None:
    """Freeze the embedding, as where adapters are trained."""

    def build(original: Any, model: GPTModel, *args: Any, **options: Any) -> None:
        original(model, *args, **options)
        if model.pre_process:
            model.embedding.requires_grad_(False)

    wrap(GPTModel, "__init__", build)


def dgrads_without_te(rank: int, argument: object) -> None:
    """Remove the fake layers of Transformer Engine, which are not types, from a list of types."""
    from megatron.training import dgrad_logging

    types = [layer for layer in dgrad_logging.LINEAR_TYPES if isinstance(layer, type)]
    dgrad_logging.LINEAR_TYPES = tuple(types)


def fp8_unquantized(rank: int, argument: object) -> None:
    """Run Megatron's code for FP8, which marks first microbatches, without kernels for FP8."""
    import transformer_engine.pytorch as te

    te.fp8_autocast = lambda **unused: nullcontext()


def in_64_bits(rank: int, argument: object) -> None:
    """Train in 64 bits, where rounding cannot hide a fault."""

    def validate(original: Any, args: Any, *more: Any, **options: Any) -> Any:
        result = original(args, *more, **options)
        args.params_dtype = torch.float64
        torch.set_default_dtype(torch.float64)  # norms have no other type to follow
        return result

    wrap(arguments, "validate_args", validate)
    initialize.validate_args = arguments.validate_args


def poisoned(rank: int, argument: object) -> None:
    """Fill storages that are emptied, or not filled yet, with NaN."""
    torch.UntypedStorage.resize_ = poisoning  # type: ignore[method-assign]


def latent_attention(rank: int, argument: object) -> None:
    """Replace attention by one that multi-latent attention can use on a CPU.

    Megatron's local attention requires keys and values of the same size.
    """

    def init(original: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any):
        original(*args, **options)

    def attend(
        original: Any, self: Any, query: Any, key: Any, value: Any, *args: Any, **unused: Any
    ):
        """Return causal attention of [s, b, n, h] tensors, as [s, b, n * the values' h]."""
        scores = torch.einsum("qbnh,kbnh->bnqk", query, key) / query.shape[-1] ** 0.5
        queries, keys = scores.shape[-2:]  # the queries of a slice are the last ones of the keys
        future = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("bnqk,kbnh->qbnh", weights, value).flatten(2)

    wrap(DotProductAttention, "__init__", init)
    wrap(DotProductAttention, "forward", attend)


def failing_report(rank: int, argument: object) -> None:
    """Make a function of the closing report fail, as an estimate for other stages does."""

    def fail(memories: object) -> None:
        raise ScheduleError("the costs are for 2 stages, the schedule has 4")

    report.byte_costs = fail  # type: ignore[assignment]


def named_wins(rank: int, argument: object) -> None:
    """Let a trial measure and log as usual, and then select the schedule by name."""
    wrap(profiling.Trial, "_faster", lambda original, self: (original(self), profiling.NAMED)[1])


def other_hosts(rank: int, argument: object) -> None:
    """Time the passes of every rank on a clock that is shifted by a day."""
    measure.time = SimpleNamespace(  # type: ignore[attr-defined]
        perf_counter=lambda: time.perf_counter() + 86_400 * rank, thread_time=time.thread_time
    )


def overlapped_jobs(rank: int, is_separate: bool) -> None:
    """Let B run no jobs of a W if `is_separate`, else print a line for each of these jobs."""
    if is_separate:
        Planner._beside = lambda *unused: {}  # type: ignore[method-assign]
        return

    def counted(original: Any) -> None:
        if _Open.may_run:
            print("a job ran inside a B", flush=True)
        original()

    wrap(linear_layers, "run_beside", counted)


def sigterm(rank: int, argument: object) -> None:
    """Send SIGTERM to rank 2 in the middle of its third step."""
    if rank != 2:
        return
    steps: list[int] = []

    def forward(original: Any, stage: Any, microbatch: int, received: Any) -> Any:
        if stage.chunk == 0 and microbatch == 5:
            steps.append(microbatch)
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(stage, microbatch, received)

    wrap(MegatronStage, "forward", forward)


def non_loss_data(rank: int, names: list[str]) -> None:
    """Give Megatron's trainer the named functions for data that is no loss."""
    functions = {
        "process_non_loss_data_func": lambda data, iteration, writer: print(
            f"non-loss data of iteration {iteration}: {data}"
        ),
        "non_loss_data_func": lambda model: f"{len(model)} chunks",  # called on all ranks
    }
    chosen = {name: functions[name] for name in names}
    wrap(
        megatron.training,
        "pretrain",
        lambda original, *args, **options: original(*args, **options, **chosen),
    )


def slow_first_call(rank: int, seconds: float) -> None:
    """Sleep in each layer's first call, as if it compiled its kernels; print the time of steps."""
    called: set[int] = set()

    def forward(original: Any, layer: TransformerLayer, *args: Any, **options: Any) -> Any:
        if layer.layer_number not in called:
            called.add(layer.layer_number)
            time.sleep(seconds)
        return original(layer, *args, **options)

    def run_step(original: Any, runner: PipelineRunner, context: Any) -> Any:
        started = time.monotonic()
        result = original(runner, context)
        print(f"step needed {time.monotonic() - started:.3f} s", flush=True)
        return result

    wrap(TransformerLayer, "forward", forward)
    wrap(PipelineRunner, "_train", run_step)


def leaves_nothing(rank: int, argument: object) -> None:
    """Fail if a process or a sending thread outlives the trainer; a normal exit would wait."""

    def exit_rank(original: Any, code: int) -> None:
        children = multiprocessing.active_children()
        sending, deadline = [None], time.monotonic() + 5
        while sending and time.monotonic() < deadline:
            names = [thread.name for thread in threading.enumerate()]
            sending = [name for name in names if name.startswith("sends to device")]
            time.sleep(0.01)
        print(f"rank {rank} leaves {children} and {sending}", flush=True)
        original(code or len(children) + len(sending))

    wrap(os, "_exit", exit_rank)


def loss_queries_stage(rank: int, argument: object) -> None:
    """Make the loss functions fail unless they see the last stage, as in some libraries."""
    signature = inspect.signature(schedules.forward_step_calc_loss)

    def query(original: Any, *args: Any, **options: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        if not (parallel_state.is_pipeline_last_stage() and utils.is_pp_last_stage(group)):
            raise RuntimeError("the loss is made where the last stage is said not to be")
        return original(*args, **options)

    def calculate(original: Any, *args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options).arguments
        if bound["loss_func"] is not None and bound["is_last_stage"]:
            bound["loss_func"] = functools.partial(query, bound["loss_func"])
        return original(**bound)

    wrap(schedules, "forward_step_calc_loss", calculate)


SET_SIZE = 8


class ValidationSet(Subset[Any]):
    """Samples of the mock validation set."""

    split = Split.valid


def several_sets(rank: int, builds_everywhere: bool) -> None:
    """Use two validation sets and no test set; all chunks build data if `builds_everywhere`."""

    def build(original: Any, builder: Any) -> list[Any]:
        if builds_everywhere:
            builder.is_built_on_rank = lambda: True
        builder.sizes = [builder.sizes[0], 2 * SET_SIZE, 0]
        train, valid, _ = original(builder)
        # Without data, Megatron returns a list of None.
        parts = [range(SET_SIZE), range(SET_SIZE, 2 * SET_SIZE)]
        return [train, [valid and ValidationSet(valid, part) for part in parts], None]

    wrap(BlendedMegatronDatasetBuilder, "build", build)


def indexer_on_one_rank(rank: int, argument: object) -> None:
    """Log a loss of 0.25 for an indexer of sparse attention in layer 3, which rank 1 of 2 has.

    The indexer itself needs kernels for GPUs; the log of its losses does not.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper,
    )

    def forward(original: Any, layer: Any, *args: Any, **options: Any) -> Any:
        if layer.layer_number == 3:
            layers = layer.config.num_layers
            DSAIndexerLossLoggingHelper.save_loss_to_tracker(torch.tensor(0.25), 3, layers)
        return original(layer, *args, **options)

    def without_average(
        original: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, **options: Any
    ) -> Any:
        # Gloo cannot average; here it would be over one data-parallel rank.
        return None if op == dist.ReduceOp.AVG else original(tensor, op=op, **options)

    wrap(TransformerLayer, "forward", forward)
    wrap(dist, "all_reduce", without_average)


def printed_checks(rank: int, argument: object) -> None:
    """Print a line for each call of `torch.isnan`: in a pass, after them, or after the gradients.

    Checks of values other than the loss, such as the norm, come later in a step.
    """
    places = ["after the passes"]

    def forward_step(original: Any, *args: Any, **options: Any) -> Any:
        places[:] = ["after the passes", "in a pass"]
        try:
            return original(*args, **options)
        finally:
            places.pop()

    def finalize(original: Any, *args: Any, **options: Any) -> Any:
        places[:] = ["after the gradients"]
        return original(*args, **options)

    def isnan(original: Any, value: torch.Tensor) -> Any:
        print(f"isnan of a loss {places[-1]}", flush=True)
        return original(value)

    wrap(schedules, "forward_step", forward_step)
    wrap(training, "finalize_model_grads", finalize)
    wrap(torch, "isnan", isnan)
