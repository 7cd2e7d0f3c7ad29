"""The job of a dry run or a measurement: one rank of a training command, on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from megatron_vshape.rehearsal.gpus import Gpu

DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers with an adapter by default, as in Megatron-Bridge."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of a LoRA run, whose other weights are frozen."""

    rank: int
    targets: tuple[str, ...] = ()  # names or patterns of linear layers; none: DEFAULT_TARGETS
    per_expert: bool = False  # one adapter per expert; otherwise local experts share one


class Reference(StrEnum):
    """A frozen copy of the trained model, for preference training."""

    FORWARD = "forward"  # it runs forward before each forward of the trained model
    IDLE = "idle"  # it runs outside of the step


@dataclass(frozen=True, slots=True)
class RankJob:
    """A rank of a training command."""

    script: str
    flags: Sequence[str]
    gpu: Gpu  # and its links; ignored by measurements
    world: int
    rank: int
    environment: Mapping[str, str] = field(default_factory=dict)
    has_schedule: bool = False  # whether --pipeline-schedule is among the flags
    stage: int = 0
    name: str = ""  # of the result
    imbalance: float = 1.0  # tokens of this rank's experts relative to the mean
    lora: LoraConfig | None = None
    reference: Reference | None = None
    batch_microbatches: int = 0  # of the batch, if the flags have a smaller one; 0: theirs
    checks_only: bool = False  # stop before the first pass: only the start-up checks run
    traces_all: bool = False  # trace microbatches that repeat earlier ones, too
    strict: bool = False  # reject flags that Megatron's parser does not have

    def to_json(self) -> str:
        """Return the job in one line of JSON, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankJob:
        """Return the job of `to_json`."""
        plain = json.loads(text)
        plain["gpu"] = Gpu.from_json(plain["gpu"])
        if plain["lora"] is not None:
            plain["lora"] = LoraConfig(**plain["lora"])
        if plain["reference"] is not None:
            plain["reference"] = Reference(plain["reference"])
        return cls(**plain)
