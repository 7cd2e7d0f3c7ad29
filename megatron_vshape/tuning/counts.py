"""Costs of configurations from counted work, with one estimate per set of sizes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.counting import Counted, Ranks, count_all, counted
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.tuning.configurations import Configuration, Subject, SweepError
from megatron_vshape.tuning.machine import Machine

Key = tuple[object, ...]


@dataclass(slots=True)
class Counts:
    """Count the work of configurations, once per set of sizes, and compute costs for each."""

    subject: Subject
    machine: Machine
    programs: Callable[[], DryRunConfig] | None = None  # None: the installed libraries
    ranks: dict[Key, Ranks | str] = field(default_factory=dict)  # by `key_of_count`
    made: dict[Key, Counted] = field(default_factory=dict)  # by that, GPUs and pipeline ranks

    def count(
        self, configurations: Iterable[Configuration], report: Callable[[int, int], None]
    ) -> tuple[int, int]:
        """Count these configurations; return the numbers of counted and of failed sets of sizes.

        Raises:
            ScheduleError: Megatron or Transformer Engine is not available for the estimate.
        """
        alike = (it.counted_as(self.subject) for it in configurations)
        wanted = {key: it for it in alike if (key := key_of_count(it)) not in self.ranks}
        subject = self.subject
        if not wanted:
            return 0, 0
        if self.programs is None:
            config = DryRunConfig.of(subject.command, self.machine.gpu)
        else:
            config = self.programs()
        commands = [it.counted_command(subject) for it in wanted.values()]
        found = count_all(config, commands, report)
        self.ranks |= zip(wanted, found, strict=True)
        return len(found), sum(isinstance(each, str) for each in found)

    def __call__(self, it: Configuration) -> Counted:
        """Return the costs of a configuration.

        Raises:
            SweepError: the configuration cannot be estimated; the text contains the reason.
        """
        key = key_of_count(it.counted_as(self.subject))
        if key not in self.ranks:
            self.count([it], lambda *_: None)
        ranks, world, pipeline = self.ranks[key], it.num_devices, it.pipeline_parallel
        key = (*key, world, pipeline)
        if key not in self.made:
            command = it.command(self.subject)
            try:
                self.made[key] = counted(ranks, command, self.machine.gpu, world, pipeline)
            except ScheduleError as error:
                raise SweepError(str(error)) from None
        return self.made[key]


def key_of_count(it: Configuration) -> Key:
    """Return the settings that determine the counted work: not the pipeline and its replicas."""
    return (
        it.sequence_length,
        it.microbatch_size,
        it.tensor_parallel,
        it.context_parallel,
        it.expert_parallel,
        it.recompute,
        it.format,
        it.features,
    )
