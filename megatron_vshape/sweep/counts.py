"""Costs of combinations from counted work, with one estimate per set of sizes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.counting import Ranks, count_all
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.rehearsal.shapes import Counted, counted, of_pattern
from megatron_vshape.sweep.configurations import Configuration, Subject, SweepError
from megatron_vshape.sweep.machine import Machine

Key = tuple[object, ...]


@dataclass(slots=True)
class Counts:
    """Count the work of combinations, once per set of sizes, and compute costs for each."""

    subject: Subject
    machine: Machine
    megatron: Path | None = None  # checkout; None: the installed megatron-core
    te: Path | None = None
    ranks: dict[Key, Ranks | str] = field(default_factory=dict)  # by `key_of_count`

    def count(
        self, combinations: Iterable[Configuration], tell: Callable[[int, int], None]
    ) -> tuple[int, int]:
        """Count these combinations; return the numbers of counted and of failed sets of sizes.

        Raises:
            ScheduleError: Megatron or Transformer Engine is not available for the estimate.
        """
        wanted = {key_of_count(it): it for it in combinations}
        wanted = {key: it for key, it in wanted.items() if key not in self.ranks}
        subject = self.subject
        if not wanted:
            return 0, 0
        asked = DryRunConfig.of(subject.command, self.machine.gpu, self.megatron, self.te)
        commands = []
        for it in wanted.values():
            command = it.command(subject)
            # A shared vocabulary has those layers' parts added to what others take.
            commands.append(command.without_predicting() if it.vocab_parallel else command)
        found = count_all(asked, commands, tell)
        self.ranks |= zip(wanted, found, strict=True)
        return len(found), sum(isinstance(each, str) for each in found)

    def __call__(self, it: Configuration) -> Counted:
        """Return the costs of a combination.

        Raises:
            SweepError: the combination cannot be estimated; the text contains the reason.
        """
        key = key_of_count(it)
        if key not in self.ranks:
            self.count([it], lambda *_: None)
        ranks = self.ranks[key]
        if isinstance(ranks, str):
            raise SweepError(f"cannot be rehearsed: {ranks}")
        machine = self.machine
        try:
            given = machine.gpu, it.num_devices, it.pipeline_parallel, machine.rates
            return of_pattern(counted(ranks, *given), self.subject.command)
        except ScheduleError as error:
            raise SweepError(str(error)) from None


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
        it.vocab_parallel,
    )
