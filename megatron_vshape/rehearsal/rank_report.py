"""Result of a dry run of one rank. It crosses processes and is cached as JSON."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from megatron_vshape.rehearsal.phases import Phase
from megatron_vshape.rehearsal.step_time import Scale
from megatron_vshape.rehearsal.work import Work

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
    """Passes of one kind and chunk: medians of their memory, and the work of the last one."""

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
class RankReport:
    """Memory, passes and work of one rank in its second training step."""

    name: str  # of the job
    rank: int  # in the world
    stage: int  # pipeline rank
    peak_bytes: int
    graph_bytes: GraphBytes | None
    communicators: int  # of NCCL, with more than one rank
    reserved_bytes: int  # of torch's allocator, CUDA graphs included
    held_bytes: float  # between steps
    held_parts: Bytes
    replaced_bytes: int  # of these, allocated again in the next step
    parts: Bytes  # at the peak
    when: PeakMoment
    holders: Sequence[Holder]  # the largest at the peak
    time: Mapping[str, float]  # seconds of a step, by category
    microbatches: int  # of the batch
    traced_microbatches: int
    parameters: int
    chunk_parameters: Sequence[int]
    chunk_layers: Sequence[int]
    chunk_dummy_bytes: Sequence[int]  # dummy gradients of Transformer Engine
    message_bytes: int  # of a P2P message
    shards_optimizer: bool
    scale: Scale  # only how kernels are launched; its counts are 1
    sizes: ParallelSizes
    first_peak_bytes: int  # of the first step
    curve: Sequence[tuple[float, int, Mapping[str, float]]]  # (s, bytes, bytes by owner)
    kinds: Sequence[PassReport]
    held_between_passes_bytes: int
    megatron: str  # version
    transformer_engine: str  # version
    work: Work  # of the traced microbatches
    seconds: float  # duration of the dry run
    host_bytes: int  # peak of its process
    measured: str | None = None  # where `kinds` were measured, see `costs_from_reports`
    memory_measured: bool | None = None  # whether their memory was, too
    ignored_flags: Sequence[str] = field(default_factory=list)  # unknown to Megatron's parser

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["work"] = self.work.plain()
        values["kinds"] = [report.to_json() for report in self.kinds]
        values["holders"] = [asdict(holder) for holder in self.holders]
        values["sizes"] = asdict(self.sizes)
        values["graph_bytes"] = None if self.graph_bytes is None else asdict(self.graph_bytes)
        values["scale"] = {name: getattr(self.scale, name) for name in _LAUNCHES}
        values["when"] = {"pass": str(self.when.phase), "place": self.when.place}
        return _without_missing(values, "measured", "memory_measured")

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RankReport:
        """Read the result of `to_json`."""
        values = dict(plain)
        when, graphs = values["when"], values["graph_bytes"]
        values |= {
            "when": PeakMoment(Phase.parse(when["pass"]), when["place"]),
            "graph_bytes": None if graphs is None else GraphBytes(**graphs),
            "holders": [Holder(**holder) for holder in values["holders"]],
            "kinds": [PassReport.from_json(report) for report in values["kinds"]],
            "scale": Scale(1, 1, 1, 1, **values["scale"]),
            "sizes": ParallelSizes(**values["sizes"]),
            "curve": [tuple(point) for point in values["curve"]],
            "work": Work.of(values["work"]),
        }
        return cls(**values)

    def without_timeline(self) -> RankReport:
        """Return the report for a cache: without its longest lists."""
        return replace(self, curve=[], holders=[])


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
