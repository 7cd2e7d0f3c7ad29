"""Train the same GPT under several pipeline implementations, alternately, and compare their speed.

    python scripts/bench_training.py [--ranks 2] [--microbatches 4] [--rounds 9] [VARIANT ...]

Every variant trains in separate processes, one per rank with one thread each over gloo. All
are started at once, but only one trains at a time, a few steps per round, the variants in another
order every round, so that a disturbance of the machine affects all of them. A round's ratio
compares two times of the same round. Before a turn the script waits for an idle machine,
up to --patience seconds; if other programs still used more than 5% of the processors,
the turn does not count, unless that leaves fewer than three rounds.

| variant | what runs |
|---|---|
| megatron-1f1b | Megatron's forward_backward function, no flag of this package |
| megatron-interleaved | Megatron's interleaved schedule, two chunks per rank |
| torch-zbv | torch.distributed.pipelining's ScheduleZBVZeroBubble over Megatron's layers |
| v-zb, v-half, auto, ... | `--pipeline-schedule`, profiled during warm-up |
| v-zb-profiled | v-zb with every step profiled, to measure the cost of profiling |
| v-zb-tp2, ... | with --tensor-model-parallel-size 2, on twice as many ranks; not torch-zbv |

With --disturb another process uses one processor on and off, for tenths of seconds, while
variants warm up, including the measurement of costs and the trial of auto. It ends before the
rounds, which show the quality of the chosen order. auto is also compared with the best of all
other variants of this package, which have one order each: the goal is a ratio of at least 0.99.

A second table compares the prediction that this package's variants made from four steps of their
warm-up with the next four steps and with the steps of all rounds.

torch-zbv has the same Megatron layers, but torch's linear Function: the
split of torch.distributed.pipelining runs a custom Function twice. It has a plain loss and a plain
Adam with clipping, and no data loader.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
BASELINE = "megatron-1f1b"
INTERLEAVED = "megatron-interleaved"
TORCH = "torch-zbv"
PROFILED = "-profiled"
TENSOR = "-tp2"
DEFAULT = (BASELINE, INTERLEAVED, TORCH, "v-zb", "v-half", "auto", "v-zb-profiled")
GOALS = (
    ("v-zb", BASELINE, 1.15),
    ("v-half", BASELINE, 1.05),
    ("v-zb", TORCH, 1.02),
    ("v-zb-profiled", "v-zb", 0.99),
)
"""Minimum speed of a variant relative to another, for 2 ranks and 4 microbatches."""

AUTO, MIN_SHARE_OF_BEST = "auto", 0.99
"""Minimum speed of auto relative to the best named schedule."""

PROFILE_STEPS = "3:6"
ALL_STEPS = "2:1000000"
WARM_UP = 12  # steps of this package's variants: they predict, plan again, and compare
WARM_UP_OTHERS = 4
DISTURBED = 0.05  # maximum share of the processors that other programs may use in a valid turn
MIN_ROUNDS = 3
FIXED_FLAGS = (
    "--transformer-impl local --distributed-backend gloo --mock-data "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64 "
    "--position-embedding-type rope --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--untie-embeddings-and-output-weights --train-iters 1000000 --lr 1e-3 --min-lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --eval-interval 1000000 --log-interval 1000000 "
    "--num-workers 0"
).split()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model and the step, the same for all variants."""

    ranks: int
    microbatches: int
    microbatch_size: int
    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    vocabulary_size: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    def flags(self) -> list[str]:
        """Return the sizes as flags of Megatron's trainer."""
        values = {
            "pipeline-model-parallel-size": self.ranks,
            "global-batch-size": self.microbatches * self.microbatch_size,
            "micro-batch-size": self.microbatch_size,
            "num-layers": self.layers,
            "hidden-size": self.hidden_size,
            "num-attention-heads": self.heads,
            "seq-length": self.sequence_length,
            "max-position-embeddings": self.sequence_length,
            "vocab-size": self.vocabulary_size - 1,  # the tokenizer adds an end of document
        }
        return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def variant_flags(name: str) -> list[str]:
    """Return the flags that choose a variant of the trainer."""
    if name.endswith(TENSOR):
        return [*variant_flags(name.removesuffix(TENSOR)), "--tensor-model-parallel-size", "2"]
    if name == BASELINE:
        return []
    if name == INTERLEAVED:
        return ["--num-virtual-stages-per-pipeline-rank", "2"]
    steps = ALL_STEPS if name.endswith(PROFILED) else PROFILE_STEPS
    schedule = name.removesuffix(PROFILED)
    return ["--pipeline-schedule", schedule, "--pipeline-profile-iterations", steps]


def world_size(name: str, sizes: Sizes) -> int:
    """Return the number of processes of a variant."""
    return sizes.ranks * (2 if name.endswith(TENSOR) else 1)


# --- one rank of one variant --------------------------------------------------------------------


class Turn(NamedTuple):
    """Times of a rank for its steps; later, of one step of all ranks."""

    wall_s: float
    cpu_s: float
    other_share: float = 0.0  # share of the processors that other programs used meanwhile


class Gate:
    """Lets a rank train on command of the parent, and reports the time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 0
        self._wall_s = self._cpu_s = 0.0

    def before_step(self) -> None:
        """Wait for the parent's command if no steps remain; exit the process on 0 steps."""
        if self._left:
            return
        self._left = self._connection.recv()
        if not self._left:
            sys.stdout.flush()
            os._exit(0)
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def after_step(self) -> None:
        """Report to the parent after the last step of its command."""
        self._left -= 1
        if not self._left:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            self._connection.send(Turn(wall_s - self._wall_s, cpu_s - self._cpu_s))

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the trainer's step by the gate."""

        def gated(*args: Any, **options: Any) -> Any:
            self.before_step()
            result = step(*args, **options)
            self.after_step()
            return result

        return gated


def become_rank(
    name: str, sizes: Sizes, rank: int, port: int, log: str, connection: Connection
) -> NoReturn:
    """Train as one rank of a variant in this process until the parent ends it."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size(name, sizes)),
        LOCAL_WORLD_SIZE=str(world_size(name, sizes)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    gate = Gate(connection)
    try:
        if name == TORCH:
            train_by_torch(sizes, rank, gate)
        else:
            train_by_megatron(name, sizes, gate)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # a rank ends successfully only through the gate


def train_by_megatron(name: str, sizes: Sizes, gate: Gate) -> None:
    """Run the training script with the gate around Megatron's step."""
    import megatron.training.training as training

    training.train_step = gate.around(training.train_step)
    sys.argv = [str(SCRIPT), *FIXED_FLAGS, *sizes.flags(), *variant_flags(name)]
    source = compile(SCRIPT.read_text(), str(SCRIPT), "exec")
    exec(source, {"__name__": "__main__", "__file__": str(SCRIPT)})


class PlainLinear:
    """Replaces Megatron's linear Function by torch's linear, which can be split."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        """Return input @ weight^T + bias."""
        return nn.functional.linear(input, weight, bias)


class Chunk(nn.Module):
    """A chunk of Megatron's GPT with the interface of torch.distributed.pipelining."""

    def __init__(self, model: nn.Module, positions: Tensor) -> None:
        super().__init__()
        self.model = model
        self.positions = positions

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output for tokens, [b, s], or for hidden states, [s, b, h]."""
        if self.model.pre_process:
            output: Tensor = self.model(inputs, self.positions.expand_as(inputs), None)
        else:
            self.model.set_input_tensor(inputs)
            output = self.model(None, None, None)
        return output


def train_by_torch(sizes: Sizes, rank: int, gate: Gate) -> None:
    """Train with torch.distributed.pipelining until the gate ends the process."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    dist.init_process_group("gloo", rank=rank, world_size=sizes.ranks)
    num_stages = 2 * sizes.ranks
    local_stages = (rank, num_stages - 1 - rank)
    chunks = [build_chunk(sizes, stage, num_stages) for stage in local_stages]
    device = torch.device("cpu")
    tokens = torch.randint(
        sizes.vocabulary_size, (sizes.microbatches * sizes.microbatch_size, sizes.sequence_length)
    )
    stages = [
        PipelineStage(chunk, stage, num_stages, device)
        for chunk, stage in zip(chunks, local_stages, strict=True)
    ]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    schedule = ScheduleZBVZeroBubble(stages, sizes.microbatches, loss)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    while True:
        gate.before_step()
        if rank == 0:  # has the first and the last stage
            schedule.step(tokens, target=tokens)
        else:
            schedule.step()
        clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        gate.after_step()


def clip(parameters: Sequence[nn.Parameter], limit: float = 1.0) -> None:
    """Clip the gradient of the full model, as Megatron's optimizer does."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(total)
    nn.utils.clip_grads_with_norm_(parameters, limit, total.sqrt())


def build_chunk(sizes: Sizes, stage: int, num_stages: int) -> Chunk:
    """Build a stage of the model from Megatron's layers with torch's linear."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()  # for the layers, this rank is alone
        random.model_parallel_cuda_manual_seed(1)
        layers.LinearWithGradAccumulationAndAsyncCommunication = PlainLinear
    config = TransformerConfig(
        num_layers=sizes.layers // num_stages,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        sizes.vocabulary_size,
        sizes.sequence_length,
        pre_process=stage == 0,
        post_process=stage == num_stages - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return Chunk(model, torch.arange(sizes.sequence_length))


# --- the parent ---------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """Times of the steps that a variant has logged, in ms."""

    step_ms: float
    passes_ms: float
    measured_passes_ms: float


class Variant:
    """The ranks of one variant, seen from the parent."""

    def __init__(self, name: str, sizes: Sizes, folder: Path) -> None:
        context = multiprocessing.get_context("fork")  # the imports are shared
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.name = name
        self._connections: list[Connection] = []
        self._logs: list[Path] = []
        for rank in range(world_size(name, sizes)):
            parent_end, rank_end = context.Pipe()
            log = folder / f"{name}-{rank}.log"
            arguments = (name, sizes, rank, port, str(log), rank_end)
            context.Process(target=become_rank, args=arguments, daemon=True).start()
            rank_end.close()
            self._connections.append(parent_end)
            self._logs.append(log)

    def run(self, steps: int) -> Turn:
        """Train `steps` steps; return the time of the slowest rank and the total CPU time.

        Raises:
            SystemExit: a rank failed.
        """
        try:
            for connection in self._connections:
                connection.send(steps)
            turns = [connection.recv() for connection in self._connections]
        except (EOFError, OSError):
            tails = [f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self._logs]
            raise SystemExit(f"{self.name} failed:\n" + "\n".join(tails)) from None
        return Turn(max(turn.wall_s for turn in turns), sum(turn.cpu_s for turn in turns))

    def end(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.send(0)

    def log(self) -> str:
        """Return the logs of the ranks."""
        return "\n".join(log.read_text() for log in self._logs)


def disturb(seed: int = 1) -> NoReturn:
    """Work and rest alternately, each for a random time, until the process is stopped."""
    rng = random.Random(seed)
    while True:
        until = time.perf_counter() + rng.random() / 2
        while time.perf_counter() < until:
            sum(range(1000))
        time.sleep(rng.random())


@contextlib.contextmanager
def disturbed(is_enabled: bool) -> Iterator[None]:
    """Run a disturbing process during the context, if enabled."""
    process = multiprocessing.Process(target=disturb, daemon=True)
    if is_enabled:
        process.start()
    yield
    if is_enabled:
        process.terminate()
        process.join()


def end_trial(variant: Variant) -> None:
    """Run the steps of auto's trial, and the steps that compare its winner with the prediction."""
    is_comparing = "comparing the plan with" in variant.log()
    while is_comparing and "measured steps: " not in variant.log():
        variant.run(WARM_UP)
    if is_comparing:
        variant.run(WARM_UP)


def predicted_in(log: str) -> Prediction | None:
    """Return the prediction and the next measurement in a variant's log; None if absent."""
    step_times_ms = re.findall(r"measured costs: .*step ([\d.]+) ms", log)
    compared = re.findall(r"predicted for .*: passes ([\d.]+) ms, ([\d.]+) ms", log)
    if not step_times_ms or not compared:
        return None
    return Prediction(float(step_times_ms[0]), *map(float, compared[-1]))


class Quiet:
    """Waits for other programs to pause, up to a total time, and measures their load."""

    def __init__(self, patience_s: float) -> None:
        self._left_s = patience_s

    def wait(self) -> None:
        """Return when the processors have been idle for a moment, or the total time is used up."""
        while self._left_s > 0:
            busy_before_s, start = busy_s(), time.perf_counter()
            time.sleep(0.25)
            passed = time.perf_counter() - start
            if self.share(busy_before_s, passed, 0.0) < DISTURBED:
                return
            self._left_s -= passed

    @staticmethod
    def share(before_s: float, wall_s: float, own_s: float) -> float:
        """Return the share of the processors used by others since `busy_s` was `before_s`."""
        others_s = busy_s() - before_s - own_s
        return max(others_s / (wall_s * (os.cpu_count() or 1)), 0.0)


def busy_s() -> float:
    """Return the total busy time of the processors since the machine started.

    It includes time that a hypervisor gave to others; 0 if the system does not report it.
    """
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure(
    variants: Sequence[Variant], rounds: int, steps: int, quiet: Quiet
) -> dict[str, list[Turn]]:
    """Return every variant's turns, in times per step; each round starts with another variant."""
    turns_by_variant: dict[str, list[Turn]] = {variant.name: [] for variant in variants}
    for round_index in range(rounds):
        shift = round_index % len(variants)
        order = [*variants[shift:], *variants[:shift]]
        for variant in order if round_index % 2 == 0 else reversed(order):
            quiet.wait()
            busy_before_s = busy_s()
            turn = variant.run(steps)
            other_share = quiet.share(busy_before_s, turn.wall_s, turn.cpu_s)
            turns_by_variant[variant.name].append(
                Turn(turn.wall_s / steps, turn.cpu_s / steps, other_share)
            )
        print(
            f"round {round_index + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr
        )
    return turns_by_variant


def undisturbed_rounds(*turns: Sequence[Turn]) -> list[int]:
    """Return the rounds without a disturbed turn; all rounds if too few remain."""
    rounds = range(len(turns[0]))
    quiet = [
        index
        for index in rounds
        if all(variant_turns[index].other_share < DISTURBED for variant_turns in turns)
    ]
    return quiet if len(quiet) >= MIN_ROUNDS else list(rounds)


def ratios(turns_by_variant: Mapping[str, Sequence[Turn]], name: str, baseline: str) -> list[float]:
    """Return the speed of a variant relative to `baseline`, by round."""
    variant_turns, baseline_turns = turns_by_variant[name], turns_by_variant[baseline]
    return [
        baseline_turns[index].wall_s / variant_turns[index].wall_s
        for index in undisturbed_rounds(variant_turns, baseline_turns)
    ]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(turns_by_variant: Mapping[str, Sequence[Turn]], sizes: Sizes) -> str:
    """Return the Markdown table of all variants."""
    baselines = [name for name in (BASELINE, TORCH, BASELINE + TENSOR) if name in turns_by_variant]
    heads = ["variant", "quiet", "step ms (quartiles)", "fastest", "tokens/s", "CPU ms"]
    heads += [f"x {name} (quartiles)" for name in baselines]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for name, turns in turns_by_variant.items():
        quiet = sum(turn.other_share < DISTURBED for turn in turns)
        counted = [turns[index] for index in undisturbed_rounds(turns)]
        low, middle, high = quartiles([turn.wall_s for turn in counted])
        cpu_s = statistics.median(turn.cpu_s for turn in counted)
        cells = [
            name,
            f"{quiet} of {len(turns)}",
            f"{1e3 * middle:.0f} ({1e3 * low:.0f}-{1e3 * high:.0f})",
            f"{1e3 * min(turn.wall_s for turn in turns):.0f}",
            f"{sizes.tokens / middle:.0f}",
            f"{1e3 * cpu_s:.0f}",
        ]
        for baseline in baselines:
            low, middle, high = quartiles(ratios(turns_by_variant, name, baseline))
            cells.append(f"{middle:.3f} ({low:.3f}-{high:.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def prediction_table(
    turns_by_variant: Mapping[str, Sequence[Turn]], predicted: Mapping[str, Prediction]
) -> str:
    """Return the Markdown table of predictions; the goal is a ratio from 0.95 to 1.05."""
    lines = [
        "| variant | passes ms, predicted | measured | ratio | step ms, predicted | measured "
        "| ratio |",
        "|---" + "|---:" * 6 + "|",
    ]
    for name, prediction in predicted.items():
        turns = turns_by_variant[name]
        step_ms = 1e3 * statistics.median(
            turns[index].wall_s for index in undisturbed_rounds(turns)
        )
        lines.append(
            f"| {name} | {prediction.passes_ms:.0f} | {prediction.measured_passes_ms:.0f} | "
            f"{prediction.measured_passes_ms / prediction.passes_ms:.3f} | "
            f"{prediction.step_ms:.0f} | {step_ms:.0f} | {step_ms / prediction.step_ms:.3f} |"
        )
    return "\n".join(lines)


def verdicts(turns_by_variant: Mapping[str, Sequence[Turn]]) -> list[str]:
    """Return a line for every goal with both variants."""
    lines = []
    package_variants = [
        name for name in turns_by_variant if name not in (BASELINE, INTERLEAVED, TORCH, AUTO)
    ]
    best = max(
        package_variants,
        key=lambda name: statistics.median(ratios(turns_by_variant, name, package_variants[0])),
        default="",
    )
    for name, baseline, goal in (*GOALS, (AUTO, best, MIN_SHARE_OF_BEST)):
        if name in turns_by_variant and baseline in turns_by_variant:
            pairs = ratios(turns_by_variant, name, baseline)
            middle = statistics.median(pairs)
            verdict = "reached" if middle >= goal else "MISSED"
            quiet = all(
                turns_by_variant[variant][index].other_share < DISTURBED
                for variant in (name, baseline)
                for index in undisturbed_rounds(turns_by_variant[name], turns_by_variant[baseline])
            )
            note = "" if quiet else "; the machine was not quiet"
            lines.append(
                f"{name} / {baseline}: {middle:.3f} in {len(pairs)} rounds, goal {goal:.2f}: "
                f"{verdict}{note}"
            )
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", default=list(DEFAULT))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--vocabulary-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="per variant and round")
    parser.add_argument(
        "--patience", type=float, default=0.0, metavar="S", help="seconds to wait for quiet, in all"
    )
    parser.add_argument(
        "--disturb", action="store_true", help="have another process work while variants warm up"
    )
    return parser.parse_args(arguments)


def prepare_imports() -> None:
    """Import the modules of all ranks before the ranks are forked."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        PYTHONWARNINGS="ignore",
    )
    sys.argv = [str(SCRIPT)]
    source = compile(SCRIPT.read_text(), str(SCRIPT), "exec")
    # Under another name, the script only imports and defines.
    exec(source, {"__name__": "imports", "__file__": str(SCRIPT)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and return 1 where a goal is missed."""
    args = parse(arguments)
    if TORCH + TENSOR in args.variants:
        raise SystemExit(
            f"bench_training.py: {TORCH} has no tensor parallelism: leave {TENSOR} out"
        )
    sizes = Sizes(
        args.ranks,
        args.microbatches,
        args.microbatch_size,
        args.layers,
        args.hidden_size,
        args.heads,
        args.sequence_length,
        args.vocabulary_size,
    )
    prepare_imports()
    quiet = Quiet(args.patience)
    with tempfile.TemporaryDirectory() as folder:
        variants = []
        for name in args.variants:
            quiet.wait()
            variants.append(Variant(name, sizes, Path(folder)))
            is_package_schedule = "--pipeline-schedule" in variant_flags(name) and name != TORCH
            with disturbed(args.disturb):
                variants[-1].run(WARM_UP if is_package_schedule else WARM_UP_OTHERS)
                end_trial(variants[-1])
            print(f"{name} is warm", file=sys.stderr)
        turns_by_variant = measure(variants, args.rounds, args.steps, quiet)
        predictions = {variant.name: predicted_in(variant.log()) for variant in variants}
        for variant in variants:
            variant.end()
    predicted = {
        name: prediction for name, prediction in predictions.items() if prediction is not None
    }
    print(f"{sizes}\n{args.rounds} rounds of {args.steps} steps, load {os.getloadavg()}\n")
    print(table(turns_by_variant, sizes))
    print("\n".join(["", *verdicts(turns_by_variant), ""]))
    print(prediction_table(turns_by_variant, predicted))
    return int(any("MISSED" in line for line in verdicts(turns_by_variant)))


if __name__ == "__main__":
    raise SystemExit(main())
