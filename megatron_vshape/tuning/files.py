"""Input files of a sweep in YAML (model, cluster, sweep), with one clear message per fault.

Unknown keys are rejected, since an ignored misspelled key would silently give a wrong result.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from megatron_vshape.core.model.files import fault_of, read_text
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.gpus import Software
from megatron_vshape.rehearsal.hf_config import flags_of_hf_config
from megatron_vshape.tuning.configurations import (
    FLAGS,
    GIVEN,
    NONE,
    Layout,
    Subject,
    SweepError,
    configuration_of_command,
)
from megatron_vshape.tuning.model_names import name_of

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 2**16
"""Larger than any sweep, model or cluster file; PyYAML reads about 50 kB per second."""

_MAX_NAMED_KEYS = 5
"""Maximum number of unknown keys in a message."""

_MAX_COUNT = 10**9
"""Maximum of any size or count; products of a few are still exact enough as floats."""

Positive = Annotated[int, Field(gt=0, le=_MAX_COUNT, strict=True)]
Rate = Annotated[float, Field(ge=1e-9, le=1e12, allow_inf_nan=False)]
FilePath = Annotated[str, Field(min_length=1, max_length=1000)]

_SLURM_LISTS = ("setup", "teardown", "srun_args")
"""Keys under `run: slurm:` with several values."""

Title = Annotated[str, Field(pattern=r"^[^\[\]\p{C}]{1,100}$")]
"""Text for tables, figures and the log: no control characters, no markup."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$")]
"""Also the name of a folder, so it must not contain a path."""


_MODULE = "(core_attn|moe_act|layernorm|mla_up_proj|mlp|moe|shared_experts)"

Recompute = Annotated[
    str, Field(pattern=rf"^(none|full|selective|given|{_MODULE}(,{_MODULE})*)$", max_length=100)
]
"""Recomputation: NONE, FULL, selective, Megatron's modules with commas, or GIVEN (as in the
training command)."""

Format = Literal["given", "bf16", "fp8", "fp8-delayed", "fp8-blockwise", "mxfp8", "nvfp4"]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True)
    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions that are ignored, and the reasons."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_keys(cls, data: Any) -> Any:
        """Reject unknown keys before missing ones, because a missing key may be misspelled."""
        if not isinstance(data, dict):
            return data
        for name, reason in cls.REMOVED.items():
            if data.get(name):
                logger.warning("%s is ignored: %s", name, reason)
        data = {key: value for key, value in data.items() if key not in cls.REMOVED}
        if unknown := [str(key) for key in data if key not in cls.model_fields]:
            unknown_names = ", ".join(f"{key:.60}" for key in unknown[:_MAX_NAMED_KEYS])
            suffix = f" and {len(unknown) - _MAX_NAMED_KEYS} more" * (
                len(unknown) > _MAX_NAMED_KEYS
            )
            known_names = ", ".join(sorted(cls.model_fields))
            raise ValueError(
                f"unknown key{'s' * (len(unknown) > 1)} {unknown_names}{suffix}; known: "
                f"{known_names}"
            )
        return data


class Device(_File):
    """One GPU by its data sheet, and the memory available to programs."""

    name: Title
    memory_gib: Rate
    peak_tflops: Rate  # dense, in the precision of training
    memory_tb_per_s: Rate
    processors: Positive  # streaming multiprocessors, which share a GEMM's tiles


class HostLink(_File):
    """Link of a device to host memory, for offloaded activations."""

    gb_per_s: Rate  # in each direction, while all devices copy in both directions
    memory_gib: Rate | None = None  # per device, for offloaded activations; None: no limit


class Cluster(_File):
    """Nodes of equal devices; rates are in GB/s (10^9) per device and direction."""

    REMOVED = {"shared_processors": "every device is assumed to have processors of its own."}
    name: Title
    nodes: Positive
    devices_per_node: Positive
    device: Device
    inside_node_gb_per_s: Rate
    between_nodes_gb_per_s: Rate
    host_link: HostLink | None = None  # None: no offloading
    backend: Literal["nccl", "gloo"] = "nccl"
    software: Software | None = None  # None: Transformer Engine, as measured on Hopper
    # Rates that differ from those fitted for the GPU; add the source as a comment.
    assumptions: dict[str, Rate] = Field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def flags_of_plans(self) -> list[str]:
        """The trainer's flags for planned schedules."""
        limit_gib = None if self.host_link is None else self.host_link.memory_gib
        return [] if limit_gib is None else ["--pipeline-host-memory-limit", str(limit_gib)]


class Workload(_File):
    """One row of the result: sequence length, and sequences per step."""

    sequence_length: Positive
    global_batch_size: Positive


Choices = Annotated[list[Positive], Field(min_length=1)]


class Grid(_File):
    """Values to combine; data parallelism defaults to the remaining devices.

    Values that are not given default to those of the training command.
    """

    schedule: Annotated[list[str], Field(min_length=1)]
    vpp: Choices | None = None  # stages per device, for schedules with this option
    pipeline_parallel: Choices
    tensor_parallel: Choices = [1]
    context_parallel: Choices = [1]
    expert_parallel: Choices = [1]
    data_parallel: Choices | None = None
    microbatch_size: Choices = [1]
    recompute: Annotated[list[Recompute], Field(min_length=1)] = [NONE]
    format: Annotated[list[Format], Field(min_length=1)] = ["given"]
    layout: Annotated[list[Layout], Field(min_length=1)] = [Layout.BALANCED]
    # Vocabulary parallelism over all pipeline ranks; layout balanced then becomes auto.
    vocab_parallel: Annotated[list[StrictBool], Field(min_length=1)] = [False]


class Also(_File):
    """An additional run besides the grid, with additional flags for the trainer."""

    schedule: str
    pipeline_parallel: Positive
    tensor_parallel: Positive = 1
    context_parallel: Positive = 1
    expert_parallel: Positive = 1
    data_parallel: Positive = 1
    microbatch_size: Positive = 1
    recompute: Recompute = NONE
    format: Format = "given"
    layout: Layout = Layout.BALANCED
    vocab_parallel: StrictBool = False
    arguments: list[str] = []


class Pruning(_File):
    """Limits for runs that are worth it."""

    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1  # maximum slowdown to the best
    at_most: Positive | None = None  # maximum runs per workload, best predictions first


class RunPart(_File):
    """Settings for launching runs."""

    executor: Literal["local", "slurm"] = "slurm"
    at_once: Positive = 1  # concurrent runs
    warmup_steps: Positive = 3
    measured_steps: Positive = 5
    # Use the fastest step where other programs disturb, as on a laptop.
    statistic: Literal["median", "fastest"] = "median"
    timeout_minutes: Positive = 30
    threads: Positive = 1  # OMP_NUM_THREADS of every rank
    script: str = "scripts/pretrain_gpt.py"  # relative to the folder where the sweep is started
    arguments: list[str] = []  # flags for the trainer, common to all runs
    environment: dict[str, str] = Field(default_factory=dict)
    # partition, account, qos, ...; false removes a default flag of the launcher
    slurm: dict[str, str | int | bool | list[str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_slurm_lists(self) -> "RunPart":
        for name, value in self.slurm.items():
            if isinstance(value, list) != (name in _SLURM_LISTS) and value is not False:
                raise ValueError(
                    f"slurm.{name:.60} is {_short(value)}, but {', '.join(_SLURM_LISTS)} are lists "
                    "of commands or flags, and only they"
                )
        return self


class Sweep(_File):
    """A complete sweep; model and cluster are paths relative to the sweep file.

    The model may be a file with a training command's arguments. It can be omitted if the command is
    given directly. Workloads default to the command's.
    """

    REMOVED = {
        "measured_costs": "sweep counts the work of every configuration. Use plan --costs to plan "
        "for measured costs."
    }
    name: Name
    model: FilePath | None = None
    cluster: FilePath
    workloads: list[Workload] = []
    grid: Grid
    also: list[Also] = []
    # Gradient-norm and inf checks do not delay the pipeline (--optimizer-post-validation).
    post_validation: bool = False
    pruning: Pruning = Pruning()
    run: RunPart = RunPart()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A sweep with its model and its cluster."""

    path: Path
    sweep: Sweep
    subject: Subject
    cluster: Cluster


Kind = TypeVar("Kind", bound=BaseModel)


def load_sweep(path: str | Path, words: Sequence[str] = ()) -> Loaded:
    """Load the sweep at `path` with its model and its cluster.

    The model is the training command in `words`, or the file that the sweep names: a model file, or
    any file that `rehearse` supports.

    Raises:
        ScheduleError: a file cannot be read, or has an invalid key or value; the text names the
            file, the key and the value.
    """
    path = Path(path)
    sweep = load(path, Sweep)
    cluster = load(_named_file(path, "cluster", sweep.cluster), Cluster)
    _check_executor(sweep.run, cluster, path)
    if words:
        subject = Subject.of_command(words, sweep.name)
    elif sweep.model is None:
        raise SweepError(
            f"{path}: model is missing: name a model file or a file of arguments, or give the "
            "training command after --"
        )
    else:
        subject = _subject(_named_file(path, "model", sweep.model), cluster)
    return Loaded(path, _with_defaults(sweep, subject, path), subject, cluster)


def _named_file(path: Path, key: str, name: str) -> Path:
    """Return the file that a sweep names, relative to the sweep's folder.

    Raises:
        SweepError: it does not exist.
    """
    file = path.parent / name
    if not file.exists():
        raise SweepError(
            f"{path}: {key}: there is no file {file}: paths in a sweep file are relative to the "
            "folder of the sweep file, so change the path, or move the files together"
        )
    return file


def _subject(path: Path, cluster: Cluster) -> Subject:
    """Load a model file (detected by its keys), or a training command."""
    text = read_text(path, "the file", MAX_FILE_BYTES)
    is_yaml = path.suffix in (".yaml", ".yml")
    is_model = is_yaml and not re.search(r"^\s*(MODEL_ARGS:|[\"']?--)", text, re.MULTILINE)
    if is_model or (path.suffix == ".json" and "model_type" in _read_mapping(path)):
        return load_model(path, cluster.backend == "gloo")
    return Subject.of_command([str(path)], path.stem)


_CPU = """
    --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
""".split()


def load_model(path: Path, on_cpu: bool = False) -> Subject:
    """Load the fields of a Hugging Face config.json, in JSON or YAML, as Megatron's flags.

    Raises:
        SweepError: the file cannot be read, or its model is not supported.
    """
    data = _read_mapping(path)
    if "model_type" not in data:
        raise SweepError(
            f"{path}: model_type is missing: a model has the fields of a Hugging Face config.json, "
            "as the files in configs/models"
        )
    try:
        flags, note = flags_of_hf_config(data)
    except ScheduleError as error:
        raise SweepError(f"{path}: {error}") from None
    except ValidationError as error:
        raise SweepError(f"{path}: {_format_first_fault(error)}") from None
    if note:
        logger.warning("%s: %s", path, note)
    flags += _CPU if on_cpu else ["--bf16", "--use-distributed-optimizer"]
    logger.info("%s as Megatron's arguments: %s", path, " ".join(flags))
    command = read_command(flags)  # with the script of hybrid models
    return Subject(name_of(path), command, data, translated=True)


def _with_defaults(sweep: Sweep, subject: Subject, path: Path) -> Sweep:
    """Fill in defaults from the training command."""
    if subject.translated:
        if not sweep.workloads:
            raise SweepError(f"{path}: workloads is missing: sequence_length, global_batch_size")
        return sweep
    grid, config = sweep.grid, configuration_of_command(subject, 1)
    sizes = {name: [getattr(config, name)] for name in FLAGS} | {"recompute": [GIVEN]}
    defaults = {name: value for name, value in sizes.items() if name not in grid.model_fields_set}
    workloads = sweep.workloads or [
        Workload(
            sequence_length=max(1, config.sequence_length),
            global_batch_size=config.global_batch_size,
        )
    ]
    updates = {"grid": grid.model_copy(update=defaults), "workloads": workloads}
    return sweep.model_copy(update=updates)


def _check_executor(run: RunPart, cluster: Cluster, path: Path) -> None:
    """Raise SweepError for runs that this machine cannot launch alone."""
    if run.executor != "local":
        return
    if cluster.nodes > 1:
        raise SweepError(
            f"{path}: run.executor is local, but the cluster {cluster.name} has {cluster.nodes} "
            "nodes; only slurm starts a run on several"
        )
    if cluster.backend == "nccl" and run.at_once > 1:
        raise SweepError(
            f"{path}: run.at_once is {run.at_once}, but with run.executor local every run has all "
            "GPUs of the node: make it 1, or let slurm share them out"
        )


def load(path: Path, kind: type[Kind]) -> Kind:
    """Load and validate the YAML file at `path`."""
    try:
        return kind.model_validate(_read_mapping(path))
    except ValidationError as error:
        raise SweepError(f"{path}: {_format_first_fault(error)}") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file with keys and values."""
    text = read_text(path, "the file", MAX_FILE_BYTES)
    try:
        # YAML reads 1e-05 in a JSON file as text.
        data = json.loads(text) if path.suffix == ".json" else yaml.load(text, _Loader)
    except RecursionError:
        raise SweepError(f"{path} is not YAML: it is nested too deep") from None
    except _NotReadError as error:
        raise SweepError(f"{path}: {error}") from None
    # PyYAML raises these for invalid dates and numbers.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise SweepError(f"{path} is not {kind}: {fault_of(error)}") from None
    if not isinstance(data, dict):
        raise SweepError(f"{path} must have keys with values, not {_short(data)}")
    return data


class _NotReadError(Exception):
    """A YAML feature that is not supported here; the text names it with its line."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader without aliases, tags and duplicate keys.

    Nested aliases (nine of nine of nine ...) can exhaust memory. A value that does not match its
    tag, such as !!bool x, raises arbitrary exceptions in PyYAML. For duplicate keys, PyYAML uses
    the last.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise _NotReadError(
                f"line {line} has the alias *{event.anchor:.60}, and aliases are not read: write "
                "the value out"
            )
        if getattr(event, "tag", None) is not None:
            raise _NotReadError(
                f"line {line} has the tag {event.tag:.60}, and tags are not read: remove it"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            if name in lines:
                raise _NotReadError(
                    f"the key {name:.60} occurs twice, in lines {lines[name]} and {line}"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def _format_first_fault(error: ValidationError) -> str:
    """Format the first fault as one sentence with the key's path and the value."""
    fault, *other_faults = error.errors(include_url=False)
    suffix = f" (and {len(other_faults)} more)" if other_faults else ""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f"the key {key} is missing{suffix}"
    if fault["type"] == "too_short":
        return f"{key} is empty; it needs at least one value{suffix}"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if fault["type"] == "value_error":
        return f"{key}: {message}{suffix}" if key else f"{message}{suffix}"
    return f"{key or 'the file'} is {_short(fault['input'])}: {message}{suffix}"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number of more than 4300 digits"
    return text if len(text) <= 60 else text[:57] + "..."
