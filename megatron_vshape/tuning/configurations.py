"""Configurations of a training run: parallel sizes, schedule, recomputation, layers per stage.

One list of reasons rejects configurations for `advise` and `sweep`: see `faults`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Widths, even_layers, even_with_ends
from megatron_vshape.core.model.pieces import Pieces, without_ends
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import estimate_logits_bytes, shared_pieces
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.mcore.layout.sizes import ModelSizes, sizes_of, widths_of
from megatron_vshape.rehearsal.command import SCHEDULE, Command
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.dry_run_flags import count_tokens
from megatron_vshape.rehearsal.start_rules import CONTEXT, EXPERT, TENSOR, violated_rules

LAYER_SPLIT, SHARDED_OUTPUT = "--pipeline-layer-split", "--pipeline-vocab-parallel"

ADAPTIVE = "adaptive"
"""Method that plans for the costs and the memory of each configuration."""

MAX_PASSES = 2_000_000
"""Maximum passes of a step on all devices, which are generated and simulated for a prediction."""

_MAX_VOCAB_PARALLEL_PASSES = 4_000
"""Maximum forward passes per step for which vocabulary parallelism is evaluated (minutes above)."""

NONE, FULL, GIVEN = "none", "full", "given"

FORMATS = {
    GIVEN: "",
    "bf16": "--bf16",
    "fp8": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp8-delayed": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "fp8-blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4",
}
"""Flags of Megatron for each number format."""

_FORMAT_FLAGS = "--fp8 --fp4 --bf16 --fp16".split()
_RECOMPUTE = ("granularity", "method", "num_layers", "modules")


class SweepError(ScheduleError):
    """Invalid input of a sweep; the text contains the fix."""


class Layout(StrEnum):
    """Distribution of layers to stages.

    - balanced: the embedding and the output layer count as one layer each.
    - even: they do not count.
    - auto: they and multi-token prediction count by their GEMMs, for the least work on the busiest
      device.
    """

    BALANCED = "balanced"
    EVEN = "even"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its training settings; `identity` distinguishes its runs from those of others."""

    name: str
    command: Command
    identity: Any
    translated: bool = False  # from a model file, without data
    tokens: int | None = None  # of the tokenizer, if the command does not contain their number

    @classmethod
    def of_command(cls, words: Sequence[str], name: str) -> "Subject":
        """Return the subject of a training command, or of a file with one.

        Raises:
            ScheduleError: there is no command, or the file has none.
        """
        command = read_command(words)
        return cls(name, command, [command.script, *command.flags])

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.command.layers

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.command.number("--num-attention-heads", 1)

    @property
    def experts(self) -> int:
        """Number of experts per layer; 0 for a dense model."""
        return self.command.number("--num-experts", 0)

    @property
    def mtp_layers(self) -> int:
        """Number of multi-token-prediction layers."""
        return self.command.mtp_layers

    @property
    def copies_embedding(self) -> bool:
        """Whether the last stage has a copy of the embedding."""
        tied = not self.command.has("--untie-embeddings-and-output-weights")
        return tied or self.mtp_layers > 0

    @property
    def recompute(self) -> str:
        """Granularity of the command's recomputation."""
        granularity = self.command.value("--recompute-granularity")
        return granularity or ("selective" if self.command.has("--recompute-activations") else NONE)

    @property
    def vocabulary(self) -> int:
        """Number of rows of the output layer, without Megatron's padding."""
        padded_size = self.command.number("--padded-vocab-size", 0)
        size = padded_size or self.command.number("--vocab-size", -1) + 1
        return self.tokens or size or count_tokens(self.command)

    def widths(self, sequence: int) -> Widths:
        """Compute the sizes that determine the GEMMs of a layer and of the output layer."""
        return widths_of(self.command.option, self.vocabulary, sequence)

    def sizes(self, sequence: int) -> ModelSizes:
        """Compute the sizes of the layers, the output layer and multi-token prediction."""
        return sizes_of(self.command.option, self.vocabulary, sequence)

    def flops(self, sequence: int, batch: int) -> float:
        """Compute the model FLOPs of a step for MFU: no recomputation, attention without its mask.

        Megatron's and PaLM's convention; a backward pass counts as two forward passes.
        """
        widths, mtp_layers = self.widths(sequence), self.mtp_layers
        scores = 4.0 * sequence * widths.attention
        layer = 2.0 * (widths.hidden * self.vocabulary / widths.head_in_layers)
        layer += scores - 2.0 * sequence * widths.attention  # which the widths count masked
        head = 2.0 * widths.hidden * self.vocabulary
        sizes = self.sizes(sequence)
        depth = 1.0 if sizes.predicted is None else sizes.predicted.time
        per_token = (sizes.blocks + mtp_layers * depth) * layer + (1 + mtp_layers) * head
        return 3.0 * (per_token + 4.0 * mtp_layers * widths.hidden**2) * sequence * batch


@dataclass(frozen=True, slots=True)
class Configuration:
    """One training configuration: all settings of a run besides the model and the cluster."""

    schedule: str
    sequence_length: int
    global_batch_size: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    microbatch_size: int
    recompute: str
    layout: Layout
    arguments: tuple[str, ...] = ()
    vocab_parallel: bool = False
    expert_parallel: int = 1
    format: str = GIVEN
    sequence_parallel: bool = True  # if TP > 1

    def __post_init__(self) -> None:
        # With vocabulary parallelism, embedding and output layer do not count as layers of a stage.
        if self.vocab_parallel and self.layout is Layout.BALANCED:
            object.__setattr__(self, "layout", Layout.AUTO)

    @property
    def swept(self) -> dict[str, Any]:
        """The settings of a run of `sweep`, by name; all of its runs use sequence parallelism."""
        settings = asdict(self)
        del settings["sequence_parallel"]
        return settings

    @property
    def workload(self) -> tuple[int, int]:
        """Key for comparable step times: sequence length and global batch size."""
        return self.sequence_length, self.global_batch_size

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        inner = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        return self.data_parallel * inner

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per pipeline and step."""
        return self.global_batch_size // (self.data_parallel * self.microbatch_size)

    def on_devices(self, number: int) -> "Configuration":
        """Return the configuration with the data parallelism of this number of devices."""
        inner = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        return replace(self, data_parallel=max(1, number // inner))

    def __str__(self) -> str:
        text = (
            f"{self.schedule} s{self.sequence_length} gbs{self.global_batch_size} "
            f"dp{self.data_parallel} tp{self.tensor_parallel} pp{self.pipeline_parallel}"
        )
        if self.context_parallel > 1:
            text += f" cp{self.context_parallel}"
        if self.expert_parallel > 1:
            text += f" ep{self.expert_parallel}"
        text += f" mbs{self.microbatch_size} {self.layout}"
        if self.recompute not in (NONE, GIVEN):
            text += f" recompute-{self.recompute}"
        if self.format != GIVEN:
            text += f" {self.format}"
        if self.vocab_parallel:
            text += " vocab-parallel"
        return " ".join((text, *self.arguments))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the enabled features of this package."""
        return ("vocabulary parallelism",) if self.vocab_parallel else ()

    def with_schedule_of(self, command: Command, name: str) -> "Configuration":
        """Set a published schedule of this package, with the features of the command."""
        return replace(self, schedule=name, vocab_parallel=command.has(SHARDED_OUTPUT))

    @property
    def features_in_json(self) -> dict[str, bool]:
        """The features, by their names in the JSON of `advise`."""
        return {"shares_vocabulary": self.vocab_parallel}

    def with_features(self, subject: Subject) -> Iterator["Configuration"]:
        """Yield the configuration with each feature that may make published schedules faster."""
        stages = 2 * self.pipeline_parallel
        few = (
            stages <= subject.layers
            and stages * self.num_microbatches <= _MAX_VOCAB_PARALLEL_PASSES
        )
        if few and not subject.mtp_layers:
            yield replace(self, vocab_parallel=True)

    @property
    def layout_text(self) -> str:
        """Layout and settings besides the sizes, for a table."""
        words = [str(self.layout)]
        if self.recompute not in (NONE, GIVEN):
            words.append(f"{self.recompute} recompute")
        if self.expert_parallel > 1:
            words.append(f"EP {self.expert_parallel}")
        if self.format != GIVEN:
            words.append(self.format)
        if self.vocab_parallel:
            words.append("vocabulary shared")
        return ", ".join(words)

    def schedule_flags(self, schedule: str, split: str = "") -> dict[str, str]:
        """Return this package's flags for a schedule, a layer split and the features."""
        flags = {SCHEDULE: schedule}
        if self.vocab_parallel:
            flags[SHARDED_OUTPUT] = ""
        if split:
            flags[LAYER_SPLIT] = split
        return flags

    def counted_as(self, subject: Subject) -> "Configuration":
        """Return the configuration whose counts it shares."""
        return self if subject.mtp_layers else replace(self, vocab_parallel=False)

    def counted_command(self, subject: Subject) -> Command:
        """Return the training command whose work is counted for this configuration."""
        command = self.command(subject)
        # A shared vocabulary has those layers' parts added to the others.
        return command.without_predicting() if self.vocab_parallel else command

    def adapted(self, pieces: Pieces, subject: Subject) -> Pieces:
        """Return the counted pieces with the passes of the features."""
        if not self.vocab_parallel:
            return pieces
        mtp_layers, ranks = subject.mtp_layers, self.pipeline_parallel
        logits_bytes = estimate_logits_bytes(pieces, ranks) * (1 + mtp_layers)
        # An all-reduce of hidden states crosses each link once, like a message.
        pieces = shared_pieces(pieces, ranks, pieces.send_us, logits_bytes, mtp_layers)
        sizes = subject.sizes(self.sequence_length)
        return pieces.predicting(mtp_layers, sizes.merging_in_layers, sizes.predicted)

    def command(self, subject: Subject) -> Command:
        """Return the training command with this configuration's sizes, without a schedule."""
        megatron_command = subject.command.of_megatron().without_chunks()
        sizes: dict[str, Any] = {
            flag.removeprefix("--"): size
            for name, flag in FLAGS.items()
            if (size := getattr(self, name)) != 1 or megatron_command.has(flag)
        }
        if not megatron_command.has("--micro-batch-size"):  # the only one without a default
            sizes["micro_batch_size"] = self.microbatch_size
        sizes["global_batch_size"] = self.global_batch_size
        if self.sequence_length != megatron_command.number("--seq-length", 0):
            names = ("seq_length", "max_position_embeddings")
            sizes |= dict.fromkeys(names, self.sequence_length)
        if self.tensor_parallel > 1 and self.sequence_parallel:
            sizes["sequence_parallel"] = True
        command = megatron_command.having(**sizes, **_flags_of_recompute(self.recompute))
        if self.format == GIVEN:
            return command
        plain = command.without(lambda flag: flag.startswith(tuple(_FORMAT_FLAGS)))
        return replace(plain, flags=(*plain.flags, *FORMATS[self.format].split()))


FLAGS = {
    "tensor_parallel": TENSOR,
    "pipeline_parallel": "--pipeline-model-parallel-size",
    "context_parallel": CONTEXT,
    "expert_parallel": EXPERT,
    "microbatch_size": "--micro-batch-size",
}
"""Megatron's flags of the sizes."""

_SEQUENCE_PARALLEL = "--sequence-parallel"

POST_VALIDATION = {"optimizer_post_validation": True, "rerun_mode": "disabled"}
"""Options of runs with post-validation: Megatron's rerun check would synchronize all ranks."""


SIZES = {
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "microbatch_size": "microbatch",
    "expert_parallel": "ep",
    "context_parallel": "cp",
}
"""Short names of the sizes, as in --keep."""

KEEP = ("recompute", *SIZES.values())
"""Settings that --keep accepts."""


def _flags_of_recompute(setting: str) -> dict[str, Any]:
    """Return the flags of a recomputation setting; None for flags to remove."""
    if setting == GIVEN:
        return {}
    unset = {f"recompute_{name}": None for name in _RECOMPUTE} | {"recompute_activations": None}
    if setting == NONE:
        return unset
    if setting == FULL:
        options = {"granularity": FULL, "method": "uniform", "num_layers": 1}
    else:
        options = {"granularity": "selective"}
        if setting != "selective":
            options["modules"] = setting.split(",")
    return unset | {f"recompute_{name}": value for name, value in options.items()}


def configuration_of_command(subject: Subject, num_devices: int) -> Configuration:
    """Return the command's configuration on these devices; its schedule is planned."""
    number = subject.command.number
    sizes: dict[str, Any] = {name: number(flag, 1) for name, flag in FLAGS.items()}
    config = Configuration(
        ADAPTIVE,
        sequence_length=number("--seq-length", 0),
        global_batch_size=1,
        data_parallel=1,
        recompute=NONE if subject.recompute == NONE else GIVEN,
        layout=Layout.AUTO,
        sequence_parallel=sizes["tensor_parallel"] == 1 or subject.command.has(_SEQUENCE_PARALLEL),
        **sizes,
    ).on_devices(num_devices)
    batch = number("--global-batch-size", config.microbatch_size * config.data_parallel)
    return replace(config, global_batch_size=batch)


_MOVES: tuple[dict[str, float], ...] = (
    {"tensor_parallel": 0.5},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"pipeline_parallel": 0.5},
    {"tensor_parallel": 0.5, "pipeline_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 0.5},
    {"microbatch_size": 2},
    {"microbatch_size": 0.5},
    {"expert_parallel": 2},
    {"expert_parallel": 0.5},
    {"context_parallel": 2},
    {"context_parallel": 0.5},
    {"tensor_parallel": 0.5, "context_parallel": 2},
)
"""Factors of one or two parallel sizes, relative to the command."""

_LARGER: tuple[dict[str, float], ...] = ({"microbatch_size": 2}, {"tensor_parallel": 0.5})
"""Changes that need more memory, for which selective recompute may be necessary."""


def neighbors(
    config: Configuration, subject: Subject, num_devices: int, keep: Sequence[str]
) -> Iterator[Configuration]:
    """Yield configurations next to the command's, nearest first; `keep` has values of `SIZES`.

    The command's own sizes are also tried without recompute, and stock Megatron without a pipeline.
    Other sizes drop recompute where possible; selective recompute is also tried if they need more
    memory. All use sequence parallelism if TP > 1, even if the command does not.
    """
    command_config, config = config, replace(config, sequence_parallel=True)
    without_recompute = config if "recompute" in keep else replace(config, recompute=NONE)
    for neighbor in dict.fromkeys((without_recompute, config)):
        if neighbor != command_config:
            yield neighbor
    if "pp" not in keep:
        without_pipeline = replace(without_recompute, pipeline_parallel=1, schedule="1f1b")
        yield without_pipeline.on_devices(num_devices)
    for move in _MOVES:
        sizes = {name: int(getattr(config, name) * factor) for name, factor in move.items()}
        min_sizes = {"pipeline_parallel": 2}
        if any(
            size < min_sizes.get(name, 1) or SIZES[name] in keep for name, size in sizes.items()
        ):
            continue
        if "expert_parallel" in sizes and not subject.experts:
            continue
        tries_selective = subject.recompute == "selective" and move in _LARGER
        for base in dict.fromkeys(
            (without_recompute, config) if tries_selective else (without_recompute,)
        ):
            yield replace(base, **sizes).on_devices(num_devices)  # type: ignore[arg-type]


def faults(
    config: Configuration,
    model: Subject,
    num_devices: int,
    node: int,
    post_validation: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the configuration is infeasible; each may rely on the earlier ones.

    A reason is a pair: its kind, and a sentence with the numbers. `node` is the number of devices
    that share fast links.
    """
    if config.num_devices != num_devices:
        yield (
            "another number of devices than the cluster's",
            f"DP {config.data_parallel} x TP {config.tensor_parallel} x PP "
            f"{config.pipeline_parallel} x CP {config.context_parallel} takes {config.num_devices} "
            f"devices, the cluster has {num_devices}",
        )
    if fault := _tensor_fault(config, model, node) or _expert_fault(config, model):
        yield "sizes that TP, CP or EP do not divide", fault
    if config.global_batch_size % (config.data_parallel * config.microbatch_size):
        yield (
            "a global batch that does not divide",
            f"the global batch of {config.global_batch_size} is not a multiple of DP "
            f"{config.data_parallel} x microbatch size {config.microbatch_size}",
        )
    if fault := _size_fault(config, model):
        yield "too many passes", fault
    if fault := _vocabulary_fault(config, post_validation):
        yield "a vocabulary that cannot be shared", fault
    if fault := _layer_fault(config, model):
        yield "layers that do not divide, or a schedule that cannot be", fault


_NAMES_OF_NUMBERS = {
    "--num-attention-heads": "attention_heads",
    "--num-query-groups": "query_groups",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--vocab-size": "vocabulary_size",
}
"""Names in model files."""


def _tensor_fault(config: Configuration, model: Subject, node: int) -> str | None:
    if config.tensor_parallel > node:
        return f"TP {config.tensor_parallel} does not fit into a node of {node} devices"
    number = model.command.number
    numbers = {
        "--num-attention-heads": model.heads,
        "--num-query-groups": number("--num-query-groups", model.heads),
        "--ffn-hidden-size": number("--ffn-hidden-size", 0),
        "--vocab-size": model.vocabulary if model.translated else 0,
    }
    for rule in violated_rules(numbers, {TENSOR: config.tensor_parallel}):
        name = _NAMES_OF_NUMBERS[rule.number_flag]
        return f"TP {config.tensor_parallel} does not divide {name} {numbers[rule.number_flag]}"
    # Sequence parallelism also shards the tokens of a context-parallel rank.
    shards = {CONTEXT: config.tensor_parallel * config.context_parallel}
    if any(violated_rules({"--seq-length": config.sequence_length}, shards)):
        return (
            f"sequence_length {config.sequence_length} does not divide into 2 x CP "
            f"{config.context_parallel} x TP {config.tensor_parallel} parts"
        )
    return None


def _expert_fault(config: Configuration, model: Subject) -> str | None:
    if config.expert_parallel == 1:
        return None
    if not model.experts:
        return f"EP {config.expert_parallel}: the model has no experts"
    if any(violated_rules({"--num-experts": model.experts}, {EXPERT: config.expert_parallel})):
        return f"EP {config.expert_parallel} does not divide {model.experts} experts"
    shards = model.command.number("--expert-tensor-parallel-size", config.tensor_parallel)
    ranks = config.data_parallel * config.tensor_parallel * config.context_parallel
    if ranks % (config.expert_parallel * shards):
        return (
            f"EP {config.expert_parallel} x ETP {shards} does not divide the {ranks} ranks of a "
            "stage"
        )
    return None


def _size_fault(config: Configuration, model: Subject) -> str | None:
    """Return the reason if the prediction would need minutes and GiB."""
    if config.pipeline_parallel > model.layers + 2:
        return (
            f"PP {config.pipeline_parallel} has more devices than {model.layers} layers and two "
            "ends"
        )
    passes = 3 * 2 * config.pipeline_parallel * config.num_microbatches
    if passes > MAX_PASSES:
        return f"its step of {passes} passes is longer than the {MAX_PASSES} that are predicted"
    return None


def _vocabulary_fault(config: Configuration, post_validation: bool) -> str | None:
    """Return the reason if the trainer does not support vocabulary parallelism here."""
    if not config.vocab_parallel:
        return None
    if config.pipeline_parallel == 1:
        return "one pipeline device has nobody to share the vocabulary with"
    if post_validation:
        return "post_validation does not go with vocab_parallel yet"
    return None


def _layer_fault(config: Configuration, model: Subject) -> str | None:
    try:
        stages = count_stages(config.schedule, config.pipeline_parallel)
    except ScheduleError as error:
        return str(error)
    if config.pipeline_parallel == 1 and config.schedule != "1f1b":
        return f"{config.schedule} on one pipeline device is 1f1b with more overhead"
    layers = model.layers
    if config.layout is Layout.BALANCED and model.command.pattern:
        return "layout balanced counts both ends as layers, and a hybrid model's differ: use auto"
    if config.layout is Layout.AUTO:
        few = layers < max(stages - 2, 1)
        return f"{layers} layers are too few for {stages} stages" if few else None
    counted = layers + 2 if config.layout is Layout.BALANCED else layers
    if counted % stages:
        ends = " and both ends" if config.layout is Layout.BALANCED else ""
        return f"{layers} layers{ends} do not divide among {stages} stages"
    if stages == 1 and config.layout is Layout.BALANCED:
        return "one stage has no ends to balance; its layout is even"
    return None


@lru_cache(maxsize=256)
def count_stages(schedule: str, num_devices: int) -> int:
    """Return the number of stages of a schedule; the adaptive method has two per device.

    Raises:
        ScheduleError: the schedule does not exist or does not support `num_devices`.
    """
    if schedule == ADAPTIVE:
        return 2 * num_devices
    return plan_request(PlanRequest(schedule, num_devices, 1)).schedule.num_stages


def layers_of_stages(
    config: Configuration, model: Subject, placement: Placement
) -> tuple[int, ...]:
    """Return the number of layers per stage; with layout auto, as in the trainer."""
    num_stages = len(placement)
    if config.layout is Layout.EVEN:
        return (model.layers // num_stages,) * num_stages
    if config.layout is Layout.AUTO:
        sizes = model.sizes(config.sequence_length)
        pieces = Pieces.estimated(sizes.head_in_layers, sizes.blocks / num_stages)
        pieces = replace(pieces, shares=sizes.shares)
        if config.vocab_parallel:
            pieces = without_ends(pieces)
        pieces = pieces.predicting(sizes.predicting, sizes.merging_in_layers, sizes.predicted)
        return pieces.balanced(model.layers, placement)
    return even_with_ends(model.layers, num_stages) or even_layers(model.layers, placement)
