"""Run a training command as it is and with other schedules, alternately, and compare the runs."""

import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.schedule_names import AUTO, PLUS_NAMES
from megatron_vshape.mcore.options import schedule_names
from megatron_vshape.rehearsal.command import (
    SCHEDULE,
    Command,
    flag_changes,
    sizes_of,
    words_by_flag,
)
from megatron_vshape.rehearsal.command_reader import read_command, topic_of
from megatron_vshape.rehearsal.dry_run_flags import FILES
from megatron_vshape.rehearsal.megatron_layers import layers_of_command
from megatron_vshape.tuning.configurations import (
    FLAGS,
    Configuration,
    Subject,
    configuration_of_command,
)
from megatron_vshape.tuning.predictor import Prediction
from megatron_vshape.tuning.training_run import (
    Status,
    TrainingLog,
    exit_text,
    is_out_of_memory,
    last_lines,
    run_command,
)

WARM_UP = 5
"""First steps of a run, which are not measured."""

_PLANNING = 30
"""Further such steps of schedules that measure costs, plan for them and compare the plan."""

ROUNDS = 2

_REMOVED_TOPICS = (
    *("evaluation", "logs of tensors, gradients and routers", "log files and services"),
    *("profilers", "injected faults"),
)
_REMOVED = (
    *("--save", "--async-save", "--non-persistent-", "--use-persistent-ckpt", "--ckpt-convert-"),
    *("--exit-", "--adlr-", "--inprocess-", "--enable-ft-", "--calc-ft-", "--result-rejected-"),
    *("--rampup-batch-size", "--step-batch-size-schedule", "--pipeline-trace"),
)
"""Beginnings of flags that write files, end or restart a run, or change the batch size."""

_OUTPUT_OPTIONS = {
    "srun": ("-o", "--output", "-e", "--error"),
    "torch": ("-r", "--redirects", "-t", "--tee", "--log-dir", "--local-ranks-filter"),
}
"""Options by which a launcher writes the output of ranks to other files."""

_ADAPTER = "megatron_vshape.mcore.launch"


@dataclass(frozen=True, slots=True)
class Launch:
    """A training command with the program that starts its ranks."""

    environment: Mapping[str, str]
    launcher: Sequence[str]  # all words before the script
    command: Command

    @classmethod
    def of(cls, words: Sequence[str]) -> "Launch":
        """Split the words of a command.

        Raises:
            ScheduleError: They start no script of Megatron, or only the ranks of one node.
        """
        index = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
        first = next((index for index, word in enumerate(words) if not re.match(r"\w+=", word)), 0)
        if index <= first or not Path(words[index]).is_file():
            raise ScheduleError(
                f"trial runs the command after --, and {' '.join(words[: index + 1])!r:.80} starts "
                "no script: give the whole command, as in -- torchrun --nproc-per-node 8 "
                "pretrain_gpt.py FLAGS... (advise --write FILE.sh writes that of a shell script)"
            )
        command = read_command(words)
        launcher, program, remaining = [], "", iter(words[first:index])
        for word in remaining:
            program = next((name for name in _OUTPUT_OPTIONS if name in word), program)
            option, equals, _ = word.partition("=")
            if option.replace("_", "-") not in _OUTPUT_OPTIONS.get(program, ()):
                launcher.append(word)
            elif not equals:
                next(remaining, None)
        nodes = command.launched.get("--nnodes", "1")
        if nodes != "1" and "srun" not in launcher[0]:
            raise ScheduleError(
                f"--nnodes {nodes}: {launcher[0]} starts the ranks of one node only. Start it with "
                "srun in an allocation, or write such a job with --sbatch"
            )
        environment = dict(word.split("=", 1) for word in words[:first])
        return cls({"SLURM_KILL_BAD_EXIT": "1"} | environment, launcher, command)

    def words(self, command: Command) -> list[str]:
        """Return the words that start another command, with this package if it needs that."""
        adapter: Sequence[str] = ()
        if command.has(SCHEDULE) and _ADAPTER not in self.launcher:
            text = Path(command.script).read_text(errors="replace")
            adapter = () if "megatron_vshape" in text else ("-m", _ADAPTER)
        return [*self.launcher, *adapter, command.script, *command.flags]


@dataclass(frozen=True, slots=True)
class Variant:
    """A command to run."""

    name: str
    command: Command
    prediction: Prediction | None = None

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        name = self.command.value(SCHEDULE)
        if name is None:
            ranks = self.command.number("--pipeline-model-parallel-size", 1)
            return layers_of_command(self.command, self.command.layers, ranks).schedule
        return name if name.partition(":")[0] in schedule_names() else "planned schedule"

    @property
    def subject(self) -> Subject:
        """Model and training settings."""
        return Subject("", self.command, [])

    def configuration(self, num_ranks: int) -> Configuration:
        """Return the parallel sizes on this number of ranks."""
        return configuration_of_command(self.subject, num_ranks)

    @property
    def is_planned_in_run(self) -> bool:
        """Whether the run measures costs and plans for them."""
        is_planned = self.command.value(SCHEDULE) in (AUTO, *PLUS_NAMES)
        return is_planned and not self.command.has("--pipeline-costs")

    @property
    def warm_up(self) -> int:
        """First steps, which are not measured."""
        return WARM_UP + _PLANNING * self.is_planned_in_run

    def command_of(self, steps: int) -> Command:
        """Return the command that ends after the warm-up and a number of further steps.

        Data, seed and learning rate are those of the whole run, because `--exit-interval` ends it.
        A checkpoint to load provides the weights only. Nothing is saved, evaluated or written to
        the user's logs.
        """
        command = self.command.without(
            lambda flag: topic_of(flag) in _REMOVED_TOPICS or flag.startswith(_REMOVED)
        )
        end = self.warm_up + steps
        if self.is_planned_in_run:
            command = command.having(pipeline_profile_iterations="2:5")
        return command.having(
            finetune=command.has("--load"),
            exit_interval=end,
            log_memory_interval=end,
            log_interval=1,
            eval_iters=0,
            eval_interval=10**6,
        )


def with_schedule(command: Command, name: str) -> Command:
    """Return the command with a named schedule or a schedule file, in the same sizes."""
    if name == "1f1b":
        return command.of_megatron().without_chunks()
    return command.without_chunks().having(pipeline_schedule=name)


@dataclass(slots=True)
class VariantRun:
    """A run of a variant in a round."""

    variant: Variant
    log: TrainingLog
    status: Status = Status.FAILED
    reason: str = "interrupted"
    seconds: float = 0.0

    @property
    def step_s(self) -> list[float]:
        """Seconds of the measured steps."""
        return [seconds for step, seconds in self.log.step_s.items() if step > self.variant.warm_up]


@dataclass(slots=True)
class CommandTrial:
    """Runs of variants, the first of which is today's command."""

    launch: Launch
    variants: Sequence[Variant]
    steps: int  # measured, of each run
    patience_s: float  # time without a step after which a run has hung
    folder: Path  # of the logs
    report: Callable[[str], None]  # receives the progress
    runs: list[VariantRun] = field(default_factory=list)

    def run(self) -> None:
        """Run the variants in each round, in alternating order; failed ones are not repeated.

        Raises:
            ScheduleError: the launcher cannot be started.
        """
        for number in range(1, ROUNDS + 1):
            failed_names = [run.variant.name for run in self.runs if run.reason]
            for variant in self.variants if number % 2 else self.variants[::-1]:
                if variant.name not in failed_names:
                    log = self.folder / f"{variant.name.replace(' ', '-')}-{number}.log"
                    self.runs.append(VariantRun(variant, TrainingLog(log)))
                    self._run_variant(self.runs[-1])

    def _run_variant(self, run: VariantRun) -> None:
        """Run a variant, follow its log, and record how it ended."""
        words = self.launch.words(run.variant.command_of(self.steps))
        start_s = last_s = time.monotonic()
        num_steps = 0

        def is_hung() -> bool:
            nonlocal last_s, num_steps
            run.log.update()
            run.seconds = time.monotonic() - start_s
            if len(run.log.step_s) > num_steps:
                last_s, num_steps = time.monotonic(), len(run.log.step_s)
            self.report(self._progress(run))
            return time.monotonic() > last_s + self.patience_s

        with run.log.path.open("w") as output:
            try:
                code = run_command(words, self.launch.environment, output.fileno(), is_hung)
            except OSError as error:
                raise ScheduleError(f"{words[0]} cannot be started: {error.strerror}") from None
            finally:
                run.log.update()
        text = run.log.path.read_text(errors="replace")
        if len(run.step_s) >= self.steps:
            run.status, run.reason = Status.OK, ""
        elif code:
            run.reason = (last_lines(text) or exit_text(code)).splitlines()[-1]
        else:
            run.reason = f"ended after {len(run.log.step_s)} steps"
            run.reason += "" if code == 0 else f", {self.patience_s:.0f} s without another"
        if run.reason and is_out_of_memory(text, code):
            run.status = Status.OUT_OF_MEMORY

    def _progress(self, run: VariantRun) -> str:
        """Format the run, its step and the remaining time of the trial."""
        step_s, total = run.log.step_s.values(), ROUNDS * len(self.variants)
        end = run.variant.warm_up + self.steps
        text = f"run {len(self.runs)} of {total}, {run.variant.name}, step {len(step_s)} of {end}"
        if not step_s:
            return text
        remaining_s = max(end - len(step_s), 0) * statistics.mean(step_s)
        run_s = [*(earlier.seconds for earlier in self.runs[:-1]), run.seconds + remaining_s]
        remaining_s += (total - len(self.runs)) * statistics.mean(run_s)
        return f"{text}, about {remaining_s / 60:.1f} min left"

    def rows(self) -> Iterator["TrialRow"]:
        """Compare the variants that have run with today's command."""
        today = [run for run in self.runs if run.variant is self.variants[0]]
        for variant in self.variants:
            runs = [run for run in self.runs if run.variant is variant]
            if runs:
                yield _row_of(variant, runs, today)


@dataclass(frozen=True, slots=True)
class TrialRow:
    """Comparison of a variant with today's command, for trial.json."""

    name: str
    schedule: str
    sizes: Mapping[str, int | str]
    changes: Sequence[str]  # of today's flags
    status: Status
    reason: str
    step_s: Sequence[float]  # quartiles
    tokens_per_s_per_gpu: float | None
    speedups: Sequence[float]  # relative to today, of each round
    peak_bytes: Sequence[float]  # of each pipeline rank
    loss_difference: float | None  # relative to today, maximum of all steps
    predicted_step_s: float | None
    predicted_peak_bytes: Sequence[float]


def _row_of(variant: Variant, runs: Sequence[VariantRun], today: Sequence[VariantRun]) -> TrialRow:
    seconds = [step_s for run in runs for step_s in run.step_s]
    quartiles = statistics.quantiles(seconds, method="inclusive") if len(seconds) > 1 else seconds
    num_ranks = max(run.log.num_ranks for run in runs)
    config, prediction = variant.configuration(num_ranks), variant.prediction
    tokens = config.sequence_length * config.global_batch_size
    failed = next(
        (run for run in runs if run.reason), VariantRun(variant, runs[0].log, Status.OK, "")
    )
    losses, today_losses = runs[-1].log.losses, today[0].log.losses
    differences = [
        abs(losses[step] / today_losses[step] - 1) for step in losses if today_losses.get(step)
    ]
    return TrialRow(
        variant.name,
        variant.schedule,
        {name: getattr(config, name) for name in ("data_parallel", *FLAGS)}
        | {"recompute": variant.subject.recompute},
        flag_changes(*map(_without_path, (today[0].variant.command, variant.command))),
        failed.status,
        failed.reason,
        quartiles,
        tokens / quartiles[len(quartiles) // 2] / num_ranks if num_ranks and quartiles else None,
        [
            statistics.median(baseline.step_s) / statistics.median(run.step_s)
            for run, baseline in zip(runs, today, strict=False)
            if run.step_s and baseline.step_s
        ],
        _peaks_of_stages(variant.command, runs, num_ranks),
        max(differences, default=None),
        prediction.step_s if prediction else None,
        [rank.allocated for rank in prediction.ranks] if prediction else [],
    )


def _without_path(command: Command) -> Command:
    """Name a schedule file without its folder."""
    name = command.value(SCHEDULE)
    return command if name is None else command.having(pipeline_schedule=Path(name).name)


def _peaks_of_stages(command: Command, runs: Sequence[VariantRun], num_ranks: int) -> list[float]:
    """Return the peak bytes of each pipeline rank; empty without GPUs."""
    sizes = sizes_of(command, num_ranks or None)
    peaks = [0.0] * sizes.pipeline
    for run in runs:
        for rank, peak_bytes in run.log.peak_bytes.items():
            stage = rank // sizes.stage_stride % sizes.pipeline
            peaks[stage] = max(peaks[stage], peak_bytes)
    return peaks if any(peaks) else []


def without_names(text: str, command: Command) -> str:
    """Remove paths, names of data and of hosts from a message."""
    words = words_by_flag(command.flags)
    names = [socket.gethostname(), *(name for flag in FILES for name in words.get(flag, ()))]
    for name in names:
        text = text.replace(name, "...") if re.search("[A-Za-z]{3}", name) else text
    nodes = re.match(r"[A-Za-z-]+", os.environ.get("SLURM_JOB_NODELIST", ""))
    text = re.sub(rf"\b{nodes[0]}\d\S*", "...", text) if nodes else text
    return re.sub(r"\S*/\S*|\b\d+\.\d+\.\d+\.\d+\S*", "...", text)
