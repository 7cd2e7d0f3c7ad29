"""Exported schedules run in torch.distributed.pipelining with the gradients of one process."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from runtime.ranks import run_ranks
from torch import Tensor, nn

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement, looping, stages_of, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import EVERY_NAME, make
from megatron_vshape.core.program.lowering import with_full_backwards
from megatron_vshape.core.program.torch_file import to_torch_csv

WORLD_SIZE, MICROBATCHES, LAYERS, WIDTH, ROWS = 4, 8, 24, 8, 2
"""The layers can be divided by the number of stages of every schedule."""

MIXED = "v-half, two stages not split"


def schedules_of_size(devices: int) -> dict[str, Schedule]:
    """Return all schedules by name, three chunks per rank, and a V-Half with some BW."""
    schedules = {name: make(name, devices, MICROBATCHES) for name in EVERY_NAME}
    schedules["interleaved-1f1b:3"] = make("interleaved-1f1b", devices, MICROBATCHES, num_chunks=3)
    schedules[MIXED] = with_full_backwards(schedules["v-half"], stages={0, 2})
    for name in ("v-half", "v-min", "v-zb"):
        schedules[f"{name}, full"] = with_full_backwards(schedules[name])
    return schedules


class SavedBytes:
    """Counts the activations that autograd saves, each until the node that saved it frees it."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.current = self.peak = 0
        parameters = chain.from_iterable(layer.parameters() for layer in layers)
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def hooks(self) -> Any:
        """Return the context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        is_weight = tensor.untyped_storage().data_ptr() in self._weights
        return SavedTensor(self, tensor.detach(), 0 if is_weight else tensor.nbytes)

    def add(self, num_bytes: int) -> None:
        """Count saved or, if negative, freed bytes."""
        self.current += num_bytes
        self.peak = max(self.peak, self.current)


class SavedTensor:
    """A tensor that a node of autograd saved; subtracts its bytes when the node frees it."""

    def __init__(self, counter: SavedBytes, tensor: Tensor, num_bytes: int) -> None:
        self.counter, self.tensor, self.num_bytes = counter, tensor, num_bytes
        counter.add(num_bytes)

    def __del__(self) -> None:
        self.counter.add(-self.num_bytes)


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def gradients_in_order(microbatch_gradients: list[list[Tensor]], order: list[int]) -> list[Tensor]:
    """Add the gradients of the microbatches in the order of a stage's weight gradients."""
    totals = [gradient.clone() for gradient in microbatch_gradients[order[0]]]
    for microbatch in order[1:]:
        for total, gradient in zip(totals, microbatch_gradients[microbatch], strict=True):
            total += gradient
    return totals


def weight_order(schedule: Schedule, stage: int) -> list[int]:
    """Return the microbatches of a stage in the order of its weight gradients."""
    row = schedule.order[schedule.placement[stage]]
    passes = (work for work in row if work.stage == stage and Kind.W in work.kind.does)
    return [work.microbatch for work in passes]


def gradients_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    return [parameter.grad for layer in layers for parameter in layer.parameters()]


class OneProcess(NamedTuple):
    """Losses of the microbatches, and the gradients of each layer of each microbatch."""

    losses: list[Tensor]
    gradients: list[list[list[Tensor]]]


def run_one_process(batch: Tensor, target: Tensor) -> OneProcess:
    result = OneProcess([], [[] for _ in range(LAYERS)])
    for inputs, targets in zip(batch.split(ROWS), target.split(ROWS), strict=True):
        layers = make_layers()
        result.losses.append(squared_error(nn.Sequential(*layers)(inputs), targets))
        result.losses[-1].backward()
        for gradients, layer in zip(result.gradients, layers, strict=True):
            gradients.append(gradients_of([layer]))
    return result


class TorchRun(NamedTuple):
    """The stages of a rank after a step in torch's runtime."""

    modules: dict[int, nn.Sequential]
    losses: list[Tensor]
    saved_bytes: int


def run_in_torch(
    schedule: Schedule, folder: Path, group: dist.ProcessGroup, batch: Tensor, target: Tensor
) -> TorchRun:
    """Write the file of a schedule and run one step of it."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank, layers, num_stages = dist.get_rank(group), make_layers(), schedule.num_stages
    size, saved = LAYERS // num_stages, SavedBytes(layers)
    modules = {
        stage: nn.Sequential(*layers[stage * size : (stage + 1) * size])
        for stage in stages_of(schedule.placement, schedule.num_devices)[rank]
    }
    stages = [
        PipelineStage(module, stage, num_stages, torch.device("cpu"), group=group)
        for stage, module in modules.items()
    ]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, squared_error, scale_grads=False)
    file = folder / f"{dist.get_rank()}.csv"
    file.write_text(to_torch_csv(schedule))
    runtime._load_csv(str(file))
    losses: list[Tensor] = []
    inputs = [batch] if 0 in modules else []
    outputs = {"target": target, "losses": losses} if num_stages - 1 in modules else {}
    with saved.hooks():
        runtime.step(*inputs, **outputs)
    return TorchRun(modules, losses, saved.peak)


class Comparison(NamedTuple):
    """Differences of a rank from one process, and its peak of saved activations in bytes."""

    equal_stages: list[bool]
    equal_losses: list[bool]
    saved_bytes: int


class RankResult(NamedTuple):
    """Comparisons by ranks and schedule, and the text of torch's own schedules by class."""

    comparisons: dict[tuple[int, str], Comparison]
    torch_csv: dict[str, str]


TORCH_MAKESPANS = {
    "Interleaved1F1B": 57,
    "InterleavedZeroBubble": 51,
    "ZBVZeroBubble": 51,
    "DualPipeV": 54,
}
"""Makespans of torch's schedules by class, with passes of length 1."""

REVERSED = "LoopedBFS"
"""torch's schedule whose backwards run from the last microbatch to the first."""


def placement_of(name: str) -> Placement:
    is_v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    return v_shape(WORLD_SIZE) if is_v_shaped else looping(WORLD_SIZE, 2)


def write_torch_schedules(rank: int, folder: Path) -> dict[str, str]:
    """Return the files of torch's schedules, with their communication."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    texts = {}
    for name in (*TORCH_MAKESPANS, REVERSED):
        stages = [
            PipelineStage(nn.Identity(), stage, 2 * WORLD_SIZE, torch.device("cpu"))
            for stage in stages_of(placement_of(name), WORLD_SIZE)[rank]
        ]
        runtime = get_schedule_class(name)(stages, MICROBATCHES, squared_error)
        file = folder / f"{name}.{rank}.csv"
        runtime._dump_csv(str(file), format="compute_comms")
        texts[name] = file.read_text()
    return texts


def run_rank(rank: int, folder: str) -> RankResult:
    """Run all schedules of two and of four ranks."""
    batch, target = torch.arange(2.0 * MICROBATCHES * ROWS * WIDTH).sin().view(2, -1, WIDTH)
    expected = run_one_process(batch, target)
    groups = {4: dist.group.WORLD}
    for ranks in ([0, 1], [2, 3]):
        group = dist.new_group(ranks)
        groups |= {2: group} if rank in ranks else {}
    comparisons = {}
    for devices, group in groups.items():
        for name, schedule in schedules_of_size(devices).items():
            run = run_in_torch(schedule, Path(folder), group, batch, target)
            equal_stages = []
            for stage, module in run.modules.items():
                first = stage * len(module)
                expected_gradients = [
                    gradients_in_order(gradients, weight_order(schedule, stage))
                    for gradients in expected.gradients[first : first + len(module)]
                ]
                pairs = zip(gradients_of(module), chain(*expected_gradients), strict=True)
                equal_stages.append(all(starmap(torch.equal, pairs)))
            equal_losses = list(map(torch.equal, run.losses, expected.losses))
            comparisons[devices, name] = Comparison(equal_stages, equal_losses, run.saved_bytes)
    return RankResult(comparisons, write_torch_schedules(rank, Path(folder)))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    folder = tmp_path_factory.mktemp("torch")
    return run_ranks(WORLD_SIZE, run_rank, str(folder), timeout_s=300)


@pytest.mark.parametrize("devices", [2, 4])
def test_gradients_and_losses_equal_one_process(ranks: list[RankResult], devices: int) -> None:
    """Bit for bit, with microbatches added in the order of the schedule's weight gradients."""
    for name, schedule in schedules_of_size(devices).items():
        results = [rank.comparisons[devices, name] for rank in ranks[:devices]]
        assert [result.equal_stages for result in results] == (
            [[True] * schedule.num_chunks] * devices
        ), name
        assert [result.equal_losses for result in results if result.equal_losses] == [
            [True] * MICROBATCHES
        ], name


@pytest.mark.parametrize(("name", "share"), [("v-half", 0.75), ("v-min", 0.5), ("v-zb", 1.0)])
def test_saved_activations_relative_to_1f1b(
    ranks: list[RankResult], name: str, share: float
) -> None:
    """The fullest rank has the peak of the schedule, split or not; the loss saves one tensor."""

    def peak_bytes(schedule: str) -> int:
        return max(rank.comparisons[WORLD_SIZE, schedule].saved_bytes for rank in ranks)

    loss_bytes = ROWS * WIDTH * torch.float32.itemsize
    for schedule in (name, f"{name}, full"):
        assert peak_bytes(schedule) <= share * peak_bytes("1f1b") + loss_bytes


@pytest.mark.parametrize(("name", "makespan"), TORCH_MAKESPANS.items())
def test_torch_schedules_are_read(ranks: list[RankResult], name: str, makespan: float) -> None:
    """Verify files that have the communication of torch as well."""
    schedule = Schedule.from_csv(ranks[0].torch_csv[name])
    verify(schedule)
    assert simulate(schedule).makespan == makespan
    assert bool(schedule.overlapped) == (name == "DualPipeV")
    assert schedule.placement == placement_of(name)


def test_reversed_backwards_are_rejected(ranks: list[RankResult]) -> None:
    schedule = Schedule.from_csv(ranks[0].torch_csv[REVERSED])
    with pytest.raises(ScheduleError, match="in the order of the microbatches"):
        verify(schedule)
