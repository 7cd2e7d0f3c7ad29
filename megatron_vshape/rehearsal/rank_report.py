"""Result of a dry run of one rank. It crosses processes and is cached as JSON."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Any, TypeVar

from megatron_vshape.rehearsal.phases import Phase
from megatron_vshape.rehearsal.step_time import Scale
from megatron_vshape.rehearsal.work import Work

Part = TypeVar("Part", "MemoryReport", "ModelReport", "StepReport", "Provenance")

Bytes = Mapping[str, float]
"""Bytes by purpose, a name of `PARTS`."""

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "rest")


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Parallel sizes of the run; `vp` is the number of model chunks per pipeline rank."""

    world: int
    dp: int
    tp: int
    pp: int
    vp: int


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """Peaks in bytes with CUDA graphs: of their pool, of other memory and of static inputs."""

    pool: int
    other: int
    inputs: int

    @property
    def total(self) -> int:
        """Sum in bytes: the pool and other memory cannot share blocks."""
        return self.pool + self.other + self.inputs


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The moment of the peak."""

    phase: Phase
    place: str  # path of the allocating module


@dataclass(frozen=True, slots=True)
class Holder:
    """Allocations of a module at the peak."""

    part: str  # one of `PARTS`
    place: str  # path of the allocating module
    code: str  # line of Megatron or Transformer Engine that allocates
    bytes: int
    number: int


@dataclass(frozen=True, slots=True)
class PassReport:
    """Passes of one kind and chunk: medians of their memory, and the work of the least."""

    kind: str
    chunk: int
    number: int  # passes in the step
    adds_bytes: float  # after the pass, relative to its start
    meanwhile_bytes: float  # peak during the pass, relative to its start
    seconds: float  # estimated
    waited_seconds: float  # of these, for collectives
    work: Work
    static_bytes: int | None = None  # static inputs of CUDA graphs, allocated from F to B
    ms: float | None = None  # measured on this machine, without communication

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["work"] = self.work.plain()
        return _without_missing(values, "static_bytes", "ms")

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PassReport:
        """Read the result of `to_json`."""
        return cls(**{**plain, "work": Work.of(plain["work"])})


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of a rank in its second training step, in bytes."""

    peak_bytes: int
    first_peak_bytes: int  # of the first step
    graph_bytes: GraphBytes | None
    reserved_bytes: int  # of torch's allocator, CUDA graphs included
    held_bytes: float  # between steps
    held_parts: Bytes
    replaced_bytes: int  # of these, activations and others that the next step allocates again
    held_between_passes_bytes: int
    parts: Bytes  # at the peak
    when: PeakMoment
    holders: Sequence[Holder]  # the largest at the peak
    curve: Sequence[tuple[float, int, Mapping[str, float]]]  # (s, bytes, bytes by owner)
    update_bytes: float = 0.0  # of `held_parts`, of the optimizer, and freed before the passes


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The model of a rank."""

    parameters: int
    chunk_parameters: Sequence[int]
    chunk_layers: Sequence[int]
    chunk_dummy_bytes: Sequence[int]  # dummy gradients of Transformer Engine
    message_bytes: int  # of a P2P message
    shards_optimizer: bool


@dataclass(frozen=True, slots=True)
class StepReport:
    """Passes, work and time of a step."""

    microbatches: int  # of the batch
    traced_microbatches: int
    kinds: Sequence[PassReport]
    work: Work  # of the traced microbatches and of those that repeat them
    time: Mapping[str, float]  # seconds of a step, by category
    scale: Scale  # only how kernels are launched; its counts are 1

    @property
    def microbatches_text(self) -> str:
        """The number of microbatches with the noun."""
        return f"{self.microbatches} microbatch{'' if self.microbatches == 1 else 'es'}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Programs and measurements behind a report."""

    megatron: str  # version
    transformer_engine: str  # version
    seconds: float  # duration of the dry run
    host_bytes: int  # peak of its process
    measured: str | None = None  # where the passes were measured, see `costs_from_reports`
    memory_measured: bool | None = None  # whether their memory was, too


@dataclass(frozen=True, slots=True)
class RankReport:
    """Memory, passes and work of one rank in its second training step."""

    name: str  # of the job
    rank: int  # in the world
    stage: int  # pipeline rank
    sizes: ParallelSizes
    communicators: int  # of NCCL, with more than one rank
    memory: MemoryReport
    model: ModelReport
    step: StepReport
    provenance: Provenance
    ignored_flags: Sequence[str] = field(default_factory=list)  # unknown to Megatron's parser

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values: the fields of all parts in one object."""
        memory, step = self.memory, self.step
        values = {name: getattr(self, name) for name in _NAMES}
        for part in (memory, self.model, step, self.provenance):
            values |= {field.name: getattr(part, field.name) for field in fields(part)}
        values |= {
            "sizes": asdict(self.sizes),
            "graph_bytes": None if memory.graph_bytes is None else asdict(memory.graph_bytes),
            "when": {"pass": str(memory.when.phase), "place": memory.when.place},
            "holders": [asdict(holder) for holder in memory.holders],
            "kinds": [report.to_json() for report in step.kinds],
            "work": step.work.plain(),
            "scale": {name: getattr(step.scale, name) for name in _LAUNCHES},
        }
        return _without_missing(values, "measured", "memory_measured")

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RankReport:
        """Read the result of `to_json`."""
        when, graphs = plain["when"], plain["graph_bytes"]
        values = {
            **plain,
            "sizes": ParallelSizes(**plain["sizes"]),
            "graph_bytes": None if graphs is None else GraphBytes(**graphs),
            "when": PeakMoment(Phase.parse(when["pass"]), when["place"]),
            "holders": [Holder(**holder) for holder in plain["holders"]],
            "curve": [tuple(point) for point in plain["curve"]],
            "kinds": [PassReport.from_json(report) for report in plain["kinds"]],
            "work": Work.of(plain["work"]),
            "scale": Scale(1, 1, 1, 1, **plain["scale"]),
        }
        return cls.of(values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RankReport:
        """Return the report with these values of the fields of all parts."""

        def part(kind: type[Part]) -> Part:
            names = [field.name for field in fields(kind) if field.name in values]
            return kind(**{name: values[name] for name in names})

        return cls(
            **{name: values[name] for name in _NAMES if name in values},
            memory=part(MemoryReport),
            model=part(ModelReport),
            step=part(StepReport),
            provenance=part(Provenance),
        )

    def without_timeline(self) -> RankReport:
        """Return the report for a cache: without its longest lists."""
        return replace(self, memory=replace(self.memory, curve=[], holders=[]))


REPORT_PARTS = (MemoryReport, ModelReport, StepReport, Provenance)
_NAMES = ("name", "rank", "stage", "sizes", "communicators", "ignored_flags")


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A dry run that ended with an error."""

    name: str
    rank: int
    error: str  # one line
    log: str = ""  # the end of the program's output


@dataclass(frozen=True, slots=True)
class CheckedRank:
    """A dry run of the start-up checks that found no problem."""

    name: str
    rank: int
    stage: int
    notices: Sequence[str]  # log lines about translated or ignored options
    seconds: float
    ignored_flags: Sequence[str] = field(default_factory=list)  # unknown to Megatron's parser

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)


def notes_of_ignored(results: Iterable[RankReport | CheckedRank | FailedRank]) -> list[str]:
    """Name the flags of a command that Megatron's parser does not have."""
    lists = [result.ignored_flags for result in results if not isinstance(result, FailedRank)]
    flags = dict.fromkeys(chain.from_iterable(lists))
    saving = [flag for flag in flags if re.search("swap|offload|recompute|reuse|mem(ory)?-", flag)]
    note = f"Ignored flags that this version of Megatron does not have: {', '.join(flags)}. "
    note += f"Some may lower the memory: {', '.join(saving)}. " if saving else ""
    return [f"{note}--strict rejects them."] if flags else []


_LAUNCHES = ("graphs", "experts_hidden", "shards_overlapped")


def _without_missing(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Drop these optional values if they are None."""
    return {name: value for name, value in values.items() if name not in names or value is not None}


def ending(code: int) -> str:
    """Format how a process ended; a negative exit code is the number of a signal."""
    if code >= 0:
        return f"with exit code {code}"
    name = signal.Signals(-code).name
    fix = "; if the machine is out of memory, set --jobs 1" if code == -signal.SIGKILL else ""
    return f"by {name}{fix}"
