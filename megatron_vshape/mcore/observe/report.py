"""The report of a run: schedule and static memory before training, speed and memory after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape.core.compiling import processors
from megatron_vshape.core.model.amounts import GIB, Amount
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import COPY_OUT, LOGITS, ScheduleError
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.figures import write_figures
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.plans import PlannedStep, Planner
from megatron_vshape.mcore.setup.run_config import RunConfig
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime import nccl
from megatron_vshape.runtime.activation_tracker import ActivationTracker
from megatron_vshape.runtime.hosts import gather_objects, ranks_in_environment
from megatron_vshape.runtime.weight_jobs import plain_tensors
from megatron_vshape.view.numbers import peak_lines

_MAX_DEVIATION = 0.1
"""Maximum relative deviation from the prediction that is reported as predicted."""

COLUMNS = 120
"""Maximum width of the schedule's picture, in characters."""

MIB = 2**20

T = TypeVar("T")

_PlanOf = Callable[[int], PlannedStep]
"""Returns the plan for a number of microbatches."""


class _ExternalMemory(Protocol):
    """Memory outside of the device that activations are moved to, such as host memory."""

    name: str

    @property
    def bytes_by_stage(self) -> Mapping[int, int]:
        """Return the bytes of a microbatch that can wait, by stage."""

    @property
    def nbytes(self) -> int:
        """Return the size of this memory."""


class Memory(NamedTuple):
    """Measurements of one rank in its first training step."""

    peak_bytes: int
    held: dict[int, tuple[float, float]]  # per stage and microbatch: bytes after F, after B
    # Peak bytes that passes allocate and free, which the plan does not include; 0 without a GPU.
    within_passes: int
    moved: Mapping[int, int] = {}  # per stage: bytes of a microbatch that can leave the device
    external_memory: Mapping[str, int] = {}  # size in bytes by the name of the memory
    # Bytes of a microbatch that passes of features allocate, by the name of the amount in costs.
    allocated: Mapping[Amount, float] = {}
    # Per stage: bytes that the passes of a microbatch share, and bytes of their gradients.
    shared: Mapping[int, tuple[int, int]] = {}
    allocated_bytes: int = 0  # the allocator's peak over the run; 0 without a GPU


class PredictedStep(NamedTuple):
    """Predicted figures of a training step."""

    name: str  # name of the schedule
    num_microbatches: int
    makespan_us: float  # from the first to the last pass
    rest_us: float  # from the last pass of a step to the first of the next, measured
    bubble: float
    peak_bytes: tuple[float, ...]  # peak activation memory per rank

    @property
    def step_us(self) -> float:
        """Return the time from the start of one step to the start of the next."""
        return self.makespan_us + self.rest_us


class Checked(NamedTuple):
    """A prediction with the measurements of later steps."""

    prediction: PredictedStep
    makespan_us: float
    bubble: float
    comparable: bool = True  # no ranks share CPU cores


@dataclass(eq=False)
class RunReport:
    """Measures the training steps of a run.

    The first step measures memory. The throughput is that of the median step, from the start of one
    step to the start of the next, without steps that an evaluation follows.
    """

    state: StepState
    name: str
    stages: Sequence[int]  # stages of this rank
    plan_of: _PlanOf  # predicts the memory for a number of microbatches
    # Set once activations may be moved off the device.
    external_memory: _ExternalMemory | None = None
    _plan: PlannedStep | None = None  # plan of the step in which memory was measured
    _memory: Memory | None = None
    _started_s: float | None = None
    _step_s: list[float] = field(default_factory=list)
    last_step_s: float | None = None  # duration of the previous step, if known
    tokens: int = 0  # of this rank's last step
    _checked: Checked | None = None  # set if this run has measured costs

    @property
    def memory(self) -> Memory:
        """The memory of the last step that measured it; zeros before."""
        return Memory(0, {}, 0) if self._memory is None else self._memory

    @property
    def step_s(self) -> float:
        """Return the median step time in seconds; 0 if unknown."""
        return median(self._step_s) if self._step_s else 0.0

    @property
    def measures_next(self) -> bool:
        """Return whether the next training step measures memory."""
        return self._memory is None

    def remeasure(self) -> None:
        """Measure memory and throughput again, from the next step: the schedule has changed."""
        self._memory = None
        self._step_s.clear()

    def compare(self, checked: Checked) -> None:
        """Set the comparison that the end of the run prints."""
        self._checked = checked

    def interrupt(self) -> None:
        """Exclude the time until the next training step, because other work runs in between."""
        self._started_s = None

    @contextmanager
    def training_step(
        self, model: Sequence[nn.Module], num_microbatches: int, tokens: int, passes: int = 1
    ) -> Iterator[None]:
        """Measure a training step of this rank's pipeline with `tokens` tokens in this context.

        Each of the `passes` of a microbatch has an equal part of its sequence.
        """
        now = time.perf_counter()
        self.last_step_s = None
        if self._started_s is not None and tokens == self.tokens:
            self.last_step_s = now - self._started_s
            self._step_s.append(self.last_step_s)
        self._started_s, self.tokens = now, tokens
        if self._memory is not None:
            yield
            return
        # In the first step, and again after `remeasure`: activations are counted after each pass.
        tracker, initial_bytes = ActivationTracker(persistent(model)), torch.cuda.memory_allocated()
        with self.state.setting(tracker=tracker):
            yield
        self._plan = self.plan_of(num_microbatches)
        activation_bytes = {stage: tracker.held_bytes(stage, passes) for stage in self.stages}
        # Before the first step the optimizer has no state. If the peak during model construction
        # was higher, this is an overestimate, which is safe.
        within_passes = max(
            torch.cuda.max_memory_allocated() - initial_bytes - tracker.peak_bytes, 0
        )
        movable = {} if self.external_memory is None else self.external_memory.bytes_by_stage
        moved = {stage: passes * size for stage, size in movable.items()}
        logits_bytes = max(
            (tracker.added_bytes(LOGITS, stage) for stage in self.stages), default=0.0
        )
        allocated = {LOGITS.allocated: logits_bytes}
        shared = {self.stages[chunk]: sizes for chunk, sizes in tracker.shared.items()}
        self._memory = Memory(
            tracker.peak_bytes,
            activation_bytes,
            within_passes,
            moved,
            allocated=allocated,
            shared=shared,
        )
        # The first step also fills caches, so its time is not representative.
        self._started_s = None

    def closing_line(self, pipeline_group: dist.ProcessGroup, copies: int) -> str | None:
        """Return the final report, or None if no step ran; all ranks of the run call this.

        `copies` is the number of data-parallel pipelines.
        """
        if self._memory is None:
            return None
        external_memory = self.external_memory
        local_memory = self._memory._replace(
            external_memory={}
            if external_memory is None or not external_memory.nbytes
            else {external_memory.name: external_memory.nbytes},
            allocated_bytes=torch.cuda.max_memory_allocated(),
        )
        memories = gather_objects(local_memory, pipeline_group)
        speed = "throughput unknown (too few steps)"
        if self._step_s:
            speed = f"{self.tokens * copies / self.step_s:,.0f} tokens/s"
        line = (
            f"{self.name}: {speed}; peak activation memory per rank in MiB: "
            f"measured {_format_mib([memory.peak_bytes for memory in memories])}"
        )
        if self._plan is not None:
            plan = self._plan
            shared = {stage: sizes for memory in memories for stage, sizes in memory.shared.items()}
            line += f", predicted {_format_mib(plan.peak_bytes(byte_costs(memories), shared))}"
        for name in dict.fromkeys(name for memory in memories for name in memory.external_memory):
            line += (
                f", {name} "
                f"{_format_mib([memory.external_memory.get(name, 0) for memory in memories])}"
            )
        allocated = [memory.allocated_bytes for memory in memories]
        if any(allocated):
            line += f", peak allocated memory {_format_mib(allocated)}"
            _write_allocated(allocated)
        if self._checked is not None and self._step_s:
            peaks = [memory.peak_bytes for memory in memories]
            line += "\n" + closing_table(self._checked, self.step_s * 1e6, peaks)
        return line


def write_allocated(peak_bytes: int, pipeline_group: dist.ProcessGroup) -> None:
    """Write the allocator's peak of every pipeline rank to the file of figures, if on GPUs.

    All ranks of the run call this.
    """
    _write_allocated(gather_objects(peak_bytes, pipeline_group))


def _write_allocated(allocated: Sequence[int]) -> None:
    if any(allocated) and dist.get_rank() == 0:
        write_figures(allocated_bytes=allocated)


def closing_table(checked: Checked, step_us: float, peak_bytes: Sequence[float]) -> str:
    """Format predicted and measured figures: step time, its parts, bubble, and peaks.

    If ranks share CPU cores, times are omitted because they are not comparable with the prediction.
    """
    predicted, comparable = checked.prediction, checked.comparable
    rest_us = step_us - checked.makespan_us
    times = [
        ("step, ms", predicted.step_us / 1e3, step_us / 1e3),
        ("  passes, ms", predicted.makespan_us / 1e3, checked.makespan_us / 1e3),
        ("  gradients, optimizer, ..., ms", predicted.rest_us / 1e3, rest_us / 1e3),
        ("bubble, %", 100 * predicted.bubble, 100 * checked.bubble),
    ]
    peaks = list(zip(predicted.peak_bytes, peak_bytes, strict=True))
    rows = times if comparable else []
    rows += [
        (f"activations of rank {rank}, MiB", expected / MIB, measured / MIB)
        for rank, (expected, measured) in enumerate(peaks)
    ]
    lines = [f"{predicted.name:33}{'predicted':>12}{'measured':>12}{'ratio':>8}"]
    for label, expected, measured in rows:
        ratio = f"{measured / expected:8.3f}" if expected > 0 else ""
        lines.append(f"{label:33}{expected:12.2f}{measured:12.2f}{ratio}")
    max_ratio = max(measured / expected if expected > 0 else 1.0 for expected, measured in peaks)
    memory = _verdict("activation memory", max_ratio)
    if not comparable:
        return "\n".join([*lines, f"{memory}; timing is not comparable: {_format_sharing()}"])
    return "\n".join([*lines, f"{_verdict('step time', step_us / predicted.step_us)}; {memory}"])


def _verdict(figure: str, ratio: float) -> str:
    """Format the deviation of a measured value from its prediction."""
    if abs(ratio - 1) <= _MAX_DEVIATION:
        return f"{figure} as predicted"
    return f"{figure} {100 * (ratio - 1):+.0f} % compared with the prediction"


def shares_processors() -> bool:
    """Return whether this host runs on CPUs with more ranks than cores."""
    return not torch.cuda.is_available() and _local_ranks() > processors()


def _local_ranks() -> int:
    return ranks_in_environment() or (dist.get_world_size() if dist.is_initialized() else 1)


def _format_sharing() -> str:
    return f"{_local_ranks()} ranks share {processors()} CPU cores"


def opening_lines(
    pipeline: RunConfig,
    planner: Planner,
    num_microbatches: int,
    local_ranks: int | None = None,
) -> str:
    """Format the schedule: a headline, notes and its picture. `local_ranks` share this host."""
    plan = planner.plan_step(num_microbatches)
    schedule = plan.schedule
    notes = ""
    if shares_processors():
        notes = (
            f"\n{_format_sharing()}: passes wait for a core, so measured times and bubble are "
            "larger"
        )
    notes += _learned_costs_note(pipeline) + _recompute_notes(pipeline)
    notes += "".join(feature.notes(pipeline, plan, local_ranks) for feature in features())
    if pipeline.choice.whole_stages:
        notes += (
            "\nbackward passes are not split (BW) except on the last stage: CUDA graphs cover all "
            "their layers"
        )
    return (
        f"pipeline schedule {schedule.name}, {schedule.size_text}: estimated bubble "
        f"{100 * plan.timeline.bubble:.1f} %, {_format_peak(plan)}; costs: "
        f"{_format_cost_source(planner)}{notes}\n"
        f"passes (upper case: even chunks; one row per rank):\n{plan.timeline.draw(COLUMNS)}"
    )


def _format_peak(plan: PlannedStep) -> str:
    """Format the estimated peak relative to 1F1B: of activations, or of all memory if known."""
    devices = plan.schedule.num_devices
    share = f"{100 * plan.relative_peak:.0f} % of 1F1B at PP {devices}"
    ranks = peak_lines(plan.schedule, plan.costs) if plan.costs is not None else []
    if not ranks:
        chunk = f"1/{2 * devices} of the model"
        return f"peak {plan.peak_chunks:.4g} chunks of {chunk} ({share})"
    return f"peak {share}, by rank {'; '.join(ranks)}"


def _learned_costs_note(pipeline: RunConfig) -> str:
    """Return a note on costs that an earlier run has written to the trace folder, if usable."""
    options, choice = pipeline.options, pipeline.choice
    path = Path(options.trace_folder or "") / "costs.json"
    if choice.name != AUTO or choice.costs is not None or not path.is_file():
        return ""
    try:
        costs = Costs.load(path)
    except ScheduleError:
        return ""
    if costs.num_stages != pipeline.stage_map.last_stage + 1:
        return ""
    source = dict(costs.sources).get("forward_us", "earlier")
    return f"\n{path} was {source}: use it with --pipeline-costs {path}"


def _recompute_notes(pipeline: RunConfig) -> str:
    """Return notes on recomputation in backward passes and its effects, one line each."""
    lines = ""
    if pipeline.choice.keeps_full_backward:
        lines += (
            "\nbackward passes are not split (BW): with --recompute-granularity full, a split "
            "backward would store all recomputed activations"
        )
    if pipeline.recomputed_inputs:
        lines += (
            "\nactivations that B recomputes for "
            f"{', '.join(pipeline.recomputed_inputs)} (--recompute-modules) are stored until W: "
            "the peak may exceed the estimate"
        )
    return lines


def _format_cost_source(planner: Planner) -> str:
    if planner.costs is None and planner.choice.estimate is None:
        return "F = B = W"
    if planner.costs is None:
        return "F = B = W per layer, output layer by its GEMMs"
    return "as given"


def byte_costs(memories: Sequence[Memory]) -> Costs:
    """Return costs with the measured bytes of all ranks; their times are placeholders."""
    activation_bytes = {stage: pair for memory in memories for stage, pair in memory.held.items()}
    ones = (1.0,) * len(activation_bytes)
    after_forward, after_backward = zip(
        *(activation_bytes[stage] for stage in sorted(activation_bytes)), strict=True
    )
    moved = {stage: size for memory in memories for stage, size in memory.moved.items()}
    costs = Costs.of(ones, ones, ones, 0.0, after_forward, after_backward)
    movable = tuple(float(moved.get(stage, 0)) for stage in sorted(activation_bytes))
    if moved:
        costs = costs.having({COPY_OUT.offloaded: movable})
    return with_allocated(costs, [memory.allocated for memory in memories])


def with_allocated(costs: Costs, by_rank: Sequence[Mapping[Amount, float]]) -> Costs:
    """Return costs with the memory of passes of features; the rank with the most decides."""
    max_bytes = {amount: max(amounts[amount] for amounts in by_rank) for amount in by_rank[0]}
    return costs.having({a: (size,) * costs.num_stages for a, size in max_bytes.items() if size})


def persistent(model: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors that live as long as the model: parameters, main_grads and buffers."""
    for chunk in model:
        # Not chunk.buffers(): Megatron's DDP has a list by that name.
        yield from nn.Module.buffers(chunk)
        for parameter in chunk.parameters():
            yield parameter
            main_grad = getattr(parameter, "main_grad", None)
            if isinstance(main_grad, Tensor):
                yield main_grad


def _format_mib(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value / MIB:.2f}" for value in values) + "]"


_ADAM_STATES = 2
"""Number of fp32 moments per parameter in Adam."""


class StaticMemory(NamedTuple):
    """Bytes of one rank, by the categories in the log."""

    parameters: int
    gradients: int
    optimizer: int
    copy: int  # backup to roll back a step: see `features.post_validation.backup`
    no_tensors: int  # NCCL buffers, CUDA context, loaded kernels: see nccl.outside_allocator

    @property
    def total(self) -> int:
        """Return the sum of all categories."""
        return sum(self)


def static_memory(
    model: Sequence[nn.Module], optimizer: Any, post_validates: bool = False
) -> StaticMemory:
    """Return this rank's bytes before the first step, after the P2P communicators exist.

    The optimizer state is an estimate of Adam's allocation in its first step. It has two fp32
    moments of every parameter in this rank's shard (distributed optimizer), plus fp32 copies of
    parameters if the optimizer keeps them. With `post_validates`, the updated parameters and
    moments count twice.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    main_grads = [getattr(parameter, "main_grad", None) for parameter in parameters]
    gradients = [main_grad for main_grad in main_grads if isinstance(main_grad, Tensor)]
    updated_parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    model_storages = {_storage(parameter) for parameter in parameters}
    # A stepped parameter outside the model's storages is an fp32 copy.
    copies = [
        parameter for parameter in updated_parameters if _storage(parameter) not in model_storages
    ]
    moments = _ADAM_STATES * 4 * sum(parameter.numel() for parameter in updated_parameters)
    return StaticMemory(
        _bytes(parameters),
        _bytes(gradients),
        _bytes(copies) + moments,
        _bytes(updated_parameters) + moments if post_validates else 0,
        nccl.outside_allocator(parameters[0].device),
    )


def _storage(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage; quantized tensors have no data pointer."""
    name: int = tensor.untyped_storage()._cdata
    return name


def _bytes(tensors: Iterable[Tensor]) -> int:
    plain = [part for tensor in tensors for part in plain_tensors(tensor)]
    return sum(part.numel() * part.element_size() for part in plain)


def max_of_replicas(
    local_memory: T, pipeline_group: dist.ProcessGroup, size: Callable[[T], float]
) -> list[T]:
    """Return the largest value among data-parallel replicas, per pipeline rank.

    All ranks of the world call this and get the same result. Replicas may differ, for example if an
    optimizer shards by layer, and each would then plan a different schedule.
    """
    memories = gather_objects((pipeline_group.rank(), local_memory))
    return [
        max((memory for memory_rank, memory in memories if memory_rank == rank), key=size)
        for rank in range(pipeline_group.size())
    ]


def memory_table(
    memories: Sequence[StaticMemory], reserved_bytes: Sequence[float], limit_bytes: float
) -> str:
    """Format how the memory limit is divided, one line per rank, in GiB.

    `reserved_bytes` minus the static memory is reserved for P2P buffers.
    """
    names = [category.replace("_", " ") for category in StaticMemory._fields]
    lines = ["GiB per rank: " + ", ".join([*names, "messages", "activations may take"])]
    for rank, (memory, reserved) in enumerate(zip(memories, reserved_bytes, strict=True)):
        values = [*memory, reserved - memory.total, limit_bytes - reserved]
        lines.append(f"  rank {rank}: " + ", ".join(f"{value / GIB:.3f}" for value in values))
    return "\n".join(lines)
