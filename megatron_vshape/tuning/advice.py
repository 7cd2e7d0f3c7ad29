"""Compare a run with the best of stock Megatron, and the best with this package."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import sub

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.layers import AUTO_SPLIT, even_layers, even_with_ends
from megatron_vshape.core.model.placement import Placement, looping, v_shape
from megatron_vshape.core.plan import published_schedule
from megatron_vshape.core.planner.vocabulary import without_shared
from megatron_vshape.core.schedule_names import (
    AUTO,
    MEMORY_NAMES,
    PLUS_NAMES,
    is_megatrons_own,
    megatrons_name,
    why_not_stock,
    with_chunks,
)
from megatron_vshape.mcore.layout.stage_map import specified_layers
from megatron_vshape.mcore.options import UnsupportedError
from megatron_vshape.mcore.setup.translate import translate
from megatron_vshape.rehearsal import accuracy
from megatron_vshape.rehearsal.command import SCHEDULE, Command
from megatron_vshape.rehearsal.megatron_layers import layers_of_command
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.tuning import fsdp
from megatron_vshape.tuning.comparison import Comparison, describe
from megatron_vshape.tuning.configurations import (
    ADAPTIVE,
    FULL,
    LAYER_SPLIT,
    SHARDED_OUTPUT,
    Configuration,
    SweepError,
    count_stages,
)
from megatron_vshape.tuning.predictor import (
    TIME_LIMIT,
    Prediction,
    Predictor,
    Verdict,
    step_seconds,
)
from megatron_vshape.tuning.row_command import StartChecks

_MAX_PLANNED_CONFIGS = 3
"""Maximum number of other configurations to plan for, the best first."""

NEAR = 0.02
"""Minimum possible gain over the best known step for a strategy to be evaluated."""

_GAIN_BY_VOCABULARY_PASSES = 0.1
"""Above the largest share of the step that inserted vocabulary passes saved: other passes fill idle
time. It was 5.5% in one of 60 random cases, and 0 in the others."""

_VIRTUAL_STAGES = (
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
"""Megatron's flags for several stages per rank."""

INTERLEAVED_CHUNKS = 2
"""Stages per rank of interleaved-1f1b without a number, as in training."""


@dataclass(slots=True)
class Advice:
    """Search the configurations next to a command's, or those of a grid."""

    predictor: Predictor
    command_config: Configuration
    case: str  # of `accuracy`
    seconds: float  # time limit of the search for schedules
    make_dry_run_config: Callable[[], DryRunConfig]
    neighbors: list[Configuration] = field(default_factory=list)
    grid: list[Configuration] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # not evaluated, with the reasons
    with_fsdp: bool = True  # FSDP2's row is for runs that train all weights
    command_name: str = "today"  # in reports

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.predictor.subject.layers

    def compare(self) -> Comparison:
        """Predict the configurations and compare the best ones of those that start."""
        # Dry runs and start-up checks are other processes, which can run during the search.
        with ThreadPoolExecutor(1) as executor:
            subject, machine = self.predictor.subject, self.predictor.machine
            checks = StartChecks(subject, machine.num_devices, self.make_dry_run_config, executor)
            without_pipeline = executor.submit(self._without_pipeline, checks)
            comparison = self._of_grid() if self.grid else self._with_pipeline(checks)
            comparison = replace(comparison, fsdp=without_pipeline.result())
            return self._starting(comparison, checks)

    def _with_pipeline(self, checks: StartChecks) -> Comparison:
        """Predict pipeline schedules, start the first checks, and return the fastest of each kind.

        These are stock schedules of all configurations, and schedules of this package for the
        command's sizes and for the most promising other configurations.
        """
        today = self.today()
        configs = [self.command_config, *self.neighbors]
        stock = [prediction for config in configs for prediction in self.stock(config)]
        stock += [today] if today.is_stock else []
        if not any(map(_fits, stock)):
            stock += self._with_full_recompute()
        best_stock = min(filter(_fits, stock), key=step_seconds, default=None)
        avoided = None
        if self.predictor.subject.recompute == "full":
            avoided = self.published("v-half", self.command_config, is_stock=False)
        checks.start(best_stock)
        checks.start(avoided)
        seconds = self.seconds / _MAX_PLANNED_CONFIGS
        # A configuration that does not fit is no baseline: any plan that fits is better.
        same_sizes = self._with_package(
            self.command_config, seconds, step_seconds(today) if today.fits else math.inf
        )
        checks.start(same_sizes)
        fitting = [prediction for prediction in (same_sizes, best_stock) if prediction is not None]
        pipelines = [config for config in self.neighbors if config.pipeline_parallel > 1]
        planned, least_s = 0, {config: self._mean_busy_s(config) for config in pipelines}
        for config in sorted(pipelines, key=least_s.__getitem__):
            fastest = min(map(step_seconds, fitting), default=math.inf)
            # Sorted by lower bound: none of the remaining configurations can be faster.
            if planned == _MAX_PLANNED_CONFIGS or least_s[config] > fastest:
                break
            prediction = self._with_package(config, seconds, fastest)
            if prediction is not None:
                fitting.append(prediction)
                planned += 1
        best = min(fitting, key=step_seconds, default=None)
        least_memory = self._least_memory([*filter(_fits, stock), *fitting], best)
        return Comparison(today, best_stock, best, same_sizes, least_memory, avoided)

    def _of_grid(self) -> Comparison:
        """Predict the configurations of the grid, and return the fastest of each kind."""
        survey = list(self.predictor.survey(self.grid, NEAR, Budget(self.seconds)))
        num_unplanned = sum(prediction.reason == TIME_LIMIT for prediction in survey)
        self.left_out += [f"{num_unplanned} {ADAPTIVE} configurations: {TIME_LIMIT}"] * bool(
            num_unplanned
        )
        fitting = [prediction for prediction in map(self._as_stock, survey) if prediction.fits]
        stock = [prediction for prediction in fitting if prediction.is_stock]
        best = min(fitting, key=step_seconds, default=None)
        return Comparison(
            self.today(),
            stock=min(stock, key=step_seconds, default=None),
            best=best,
            least_memory=self._least_memory(fitting, best),
        )

    def _starting(self, comparison: Comparison, checks: StartChecks) -> Comparison:
        """Return the comparison without the rows whose command does not start."""
        subject = self.predictor.subject
        rows = comparison.distinct_rows(subject)
        faults = checks.faults([row.prediction for row in rows if row.key != "today"])
        for prediction, fault in faults:
            self.left_out.append(f"{describe(prediction, subject)}: does not start: {fault}")
        return comparison.without([prediction for prediction, _ in faults])

    def _without_pipeline(self, checks: StartChecks) -> Prediction | None:
        if not self.with_fsdp:
            return None
        prediction = fsdp.best(self.predictor, self.command_config)
        checks.start(prediction)
        return prediction

    def _as_stock(self, row: Prediction) -> Prediction:
        """Predict a schedule of Megatron again, as stock Megatron runs it."""
        config, ranks = row.configuration, row.configuration.pipeline_parallel
        is_megatron = is_megatrons_own(config.schedule) and not config.features
        if not is_megatron or why_not_stock(config.schedule, ranks, config.num_microbatches):
            return row
        name = megatrons_name(count_stages(config.schedule, ranks) // ranks)
        return self.published(name, config, is_stock=True, layers=row.layers, always=False) or row

    def _least_memory(
        self, predictions: Sequence[Prediction], best: Prediction | None
    ) -> Prediction | None:
        """Return the smallest peak of those as fast as the best within the error."""
        if best is None:
            return None
        slowest_s = step_seconds(best) / (1 - accuracy.threshold(self.case))
        near = [prediction for prediction in predictions if step_seconds(prediction) <= slowest_s]
        return min(near, key=lambda prediction: (prediction.peak_bytes, step_seconds(prediction)))

    def today(self) -> Prediction:
        """Predict the command as it is; with the nearest layer split if Megatron rejects its own.

        Raises:
            ScheduleError: the schedule does not exist or does not support its sizes, layer split or
                features; or advise does not support it.
        """
        command = self.predictor.subject.command
        name = command.value(SCHEDULE)
        if name is not None and not is_megatrons_own(name):
            config = self.command_config.with_schedule_of(command, name)
            return self.predictor.published(config, self._training_layers(name), always=True)
        command = _with_virtual_stages(command, name)
        name, layers, why = layers_of_command(
            command, self.layers, self.command_config.pipeline_parallel
        )
        if command.has(LAYER_SPLIT):
            config = replace(self.command_config, schedule=name)
            return self.predictor.published(config, self._training_layers(name), True, always=True)
        prediction = self.published(name, self.command_config, is_stock=True, layers=layers)
        if prediction is None:
            microbatches, ranks = (
                self.command_config.num_microbatches,
                self.command_config.pipeline_parallel,
            )
            why = why_not_stock(name, ranks, microbatches) or "they are not supported"
            raise ScheduleError(f"Megatron's {name} does not support these sizes: {why}")
        return replace(prediction, verdict=Verdict.REJECTED, reason=why) if why else prediction

    def _training_layers(self, name: str) -> tuple[int, ...] | None:
        """Return the layers per stage that training gives the named schedule; None: balanced.

        Raises:
            ScheduleError: the schedule or the layers do not fit these sizes.
        """
        config, command = self.command_config, self.predictor.subject.command
        schedule = published_schedule(name, config.pipeline_parallel, config.num_microbatches)
        names = {word.partition("=")[0] for word in command.flags if word.startswith("--")}
        options = (flag.removeprefix("--").replace("-", "_") for flag in names)
        arguments = Namespace(**{option: command.option(option) for option in options})
        text = command.value(LAYER_SPLIT)
        try:
            text = translate(arguments, schedule.placement, text).layer_split
        except UnsupportedError as error:
            raise ScheduleError(str(error)) from None
        if text == AUTO_SPLIT:
            return None
        return specified_layers(arguments, schedule.placement, text, None)[0]

    def stock(self, config: Configuration) -> Iterator[Prediction]:
        """Yield Megatron's schedules for all numbers of chunks that divide the layers, or for all.

        Each has an even split of the layers and one balanced by work, or the closest to it that
        fits.
        """
        ranks = config.pipeline_parallel
        max_chunks = (self.layers + 2) // ranks
        counts = [n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12) if n <= max_chunks]
        layer_counts = (self.layers, self.layers + 2 * (not self.predictor.subject.command.pattern))
        dividing = [
            n for n in counts if any(not num_layers % (n * ranks) for num_layers in layer_counts)
        ]
        for chunks in dividing or counts:
            if chunks > 1 and (ranks == 1 or config.num_microbatches % ranks):
                continue
            splits = self._splits(config, looping(ranks, chunks))
            for layers in (*splits, *_between(splits[-1], splits[0])):
                name = megatrons_name(chunks)
                # The comparison has only those that fit, so the others need no simulation.
                prediction = self.published(
                    name, config, is_stock=True, layers=layers, always=False
                )
                if prediction is not None:
                    yield prediction
                    if prediction.fits and layers not in splits[:-1]:
                        break

    def _with_full_recompute(self) -> list[Prediction]:
        """Predict stock Megatron in the sizes of the command with full recomputation."""
        config = replace(self.command_config, recompute=FULL, sequence_parallel=True)
        try:
            return list(self.stock(config))
        except SweepError as error:  # cannot be rehearsed
            self.left_out.append(f"full recompute: {error}")
            return []

    def _splits(self, config: Configuration, placement: Placement) -> list[tuple[int, ...]]:
        """Return the layer splits to try with Megatron's flags: even if possible, and balanced."""
        stages, even = len(placement), None
        if not self.layers % stages:
            even = even_layers(self.layers, placement)
        elif not self.predictor.subject.command.pattern:  # Megatron counts ends of a GPT only
            even = even_with_ends(self.layers, stages)
        balanced = self.predictor.pieces(config).balanced(self.layers, placement)
        return [balanced] if even in (None, balanced) else [even, balanced]

    def published(
        self,
        name: str,
        config: Configuration,
        is_stock: bool,
        layers: tuple[int, ...] | None = None,
        always: bool = True,
    ) -> Prediction | None:
        """Predict a published schedule in a configuration; None if it does not support its sizes.

        Other layers than those of the number of stages are replaced by the first of `_splits`. If
        the schedule does not fit, its times are predicted only with `always`.
        """
        config, ranks = replace(config, schedule=name), config.pipeline_parallel
        try:
            stages = count_stages(name, ranks)
            if layers is None or len(layers) != stages:
                layers = self._splits(config, looping(ranks, stages // ranks))[0]
            return self.predictor.published(config, layers, is_stock, always)
        except ScheduleError:
            return None

    def _with_package(
        self, config: Configuration, seconds: float, known_s: float
    ) -> Prediction | None:
        """Predict the fastest of a plan, a plan with copies, and schedules with further features.

        All but the first are evaluated only if they may be clearly faster than the best so far.
        """
        pieces = self.predictor.pieces(config)
        move_s = pieces.layer[Kind.F.allocated] / self.predictor.machine.gpu.host_rate
        with_moves = pieces.with_copies(1e6 * move_s / pieces.layer[Kind.F.time])
        predictions: list[Prediction] = []
        mean_busy_s = self._mean_busy_s(config)
        for costs, least_s in ((pieces, 0.0), (with_moves, mean_busy_s)):
            if least_s <= (1 - NEAR) * min([known_s, *map(step_seconds, predictions)]):
                prediction = self.predictor.planned_with_layers(config, costs, seconds / 2)
                predictions += [] if prediction is None else [prediction]
        clearly_s = (1 - NEAR) * min([known_s, *map(step_seconds, predictions)])
        for feature_config in config.with_features(self.predictor.subject):
            if mean_busy_s <= clearly_s:
                prediction = self._fastest_v_schedule(feature_config, clearly_s)
                predictions += [] if prediction is None else [prediction]
        return min(predictions, key=step_seconds, default=None)

    def _fastest_v_schedule(self, config: Configuration, slowest_s: float) -> Prediction | None:
        """Return the V schedule with the largest memory that fits, which is the fastest of them.

        A plan of a 70B model needed 22 s and was 0.2% faster. None if the step takes longer than
        `slowest_s`.
        """
        ranks = config.pipeline_parallel
        layers = self.predictor.pieces(config).balanced(self.layers, v_shape(ranks))
        costs = self.predictor.costs(config, v_shape(ranks), layers)
        for name in reversed(MEMORY_NAMES):
            v_config = replace(config, schedule=name)
            schedule = published_schedule(name, ranks, config.num_microbatches)
            # Inserting vocabulary passes takes seconds with many ranks.
            prediction = self.predictor.evaluated(v_config, schedule, without_shared(costs))
            if prediction.fits:
                if step_seconds(prediction) * (1 - _GAIN_BY_VOCABULARY_PASSES) > slowest_s:
                    return None
                prediction = self.predictor.evaluated(v_config, schedule, costs)
            if prediction.fits:
                return prediction
        return None

    def _mean_busy_s(self, config: Configuration) -> float:
        """Compute the mean work of a rank per step, in seconds: no schedule is faster.

        The busiest rank of a placement is no such bound: other layer splits and placements balance
        the ranks, and embedding and output layer can be sharded over all of them.
        """
        costs = self.predictor.pieces(config).costs((self.layers,))
        busy_us = costs.busy_us((0,), 1, config.num_microbatches)
        return 1e-6 * busy_us / config.pipeline_parallel


def check_schedule_flags(command: Command) -> None:
    """Raise ScheduleError if a flag does not fit the schedule, or advise does not support it."""
    name = command.value(SCHEDULE)
    if name == AUTO or name in PLUS_NAMES:
        raise ScheduleError(
            f"advise does not support {SCHEDULE} {name}, because training plans this schedule for "
            f"measured costs: name another one, such as v-half, or remove {SCHEDULE}"
        )
    if command.value("--pipeline-slices", "1") != "1":
        raise ScheduleError(
            "advise does not support --pipeline-slices: remove it, or estimate the command with "
            "rehearse"
        )
    is_megatron = name is None or is_megatrons_own(name)
    for flag, has_no_effect in ((LAYER_SPLIT, name is None), (SHARDED_OUTPUT, is_megatron)):
        if command.has(flag) and has_no_effect:
            raise ScheduleError(
                f"{flag} has no effect with {name or 'the schedule of Megatron'}: remove it, or "
                f"set {SCHEDULE} to a schedule of this package, such as v-half"
            )


def _with_virtual_stages(command: Command, name: str | None) -> Command:
    """Set Megatron's flag for the virtual stages of the schedule that `name` requests.

    Raises:
        ScheduleError: another flag defines their number, too.
    """
    has_chunks = any(map(command.has, _VIRTUAL_STAGES))
    if name is None or (name == "interleaved-1f1b" and has_chunks):
        return command
    if has_chunks:
        raise ScheduleError(
            f"{SCHEDULE} {name} defines the number of virtual stages per rank: remove it, or "
            "Megatron's option for virtual stages"
        )
    of_name = with_chunks(name)
    chunks = of_name.chunks if of_name else 1 if name == "1f1b" else INTERLEAVED_CHUNKS
    return command.having(num_virtual_stages_per_pipeline_rank=chunks)


def _fits(prediction: Prediction) -> bool:
    return prediction.fits


def _between(far: Sequence[int], near: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the layer splits between two splits, one layer closer at a time."""
    layers = list(far)
    while sum(map(abs, map(sub, layers, near))) > 2:
        apart = list(map(sub, layers, near))
        layers[apart.index(max(apart))] -= 1
        layers[apart.index(min(apart))] += 1
        yield tuple(layers)
