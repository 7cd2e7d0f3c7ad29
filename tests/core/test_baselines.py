"""Plans against everything that is known, at the same memory; and what is told beside them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from megatron_vshape.core.check.bounds import least_memory
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import Piece, Pieces, recut
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, OPTIONS, make
from megatron_vshape.core.plan import compare, plan_request
from megatron_vshape.core.request import AUTO, BaselineSpec, PlanRequest, evaluate_named

REAL = (1.0, 1.15, 0.85, 0.05)
CELLS, SEED = 200, 20


@dataclass(frozen=True, slots=True)
class Cell:
    """A random question: sizes, what a device's share of the layers costs, and its ends."""

    devices: int
    microbatches: int
    pieces: Pieces  # of all layers, and of the ends beside them
    most_chunks: int
    place: float  # of the limit, from the least possible (0) to twice what 1F1B holds (1)

    def cut(self, num_stages: int, name: str = "") -> Costs:
        layer = replace(self.pieces, layer=self.pieces.layer.times(1 / num_stages))
        return replace(layer.costs((1,) * num_stages), layers=None)

    def question(self) -> PlanRequest:
        d = self.devices
        costs = self.cut(d * min(self.most_chunks, 4))
        chunks = tuple(range(1, self.most_chunks + 1))
        asked = PlanRequest(
            AUTO, d, self.microbatches, costs, self.cut, chunks=chunks, steps=20_000
        )
        placements = [linear(d), v_shape(d), *(looping(d, each) for each in chunks)]
        least = min(max(least_memory(self.cut(len(each)), each, d)) for each in placements)
        most = 2 * max(evaluate_named("1f1b", asked).peak)
        limit = least + self.place * max(most - least, 0)
        return replace(asked, limit=limit)


def random_cells(count: int, most_devices: int, most_chunks: int) -> Iterator[Cell]:
    luck = random.Random(SEED)
    for _ in range(count):
        d = luck.randint(2, most_devices)
        times = [luck.uniform(0.5, 2.0) * 2 * d for _ in range(3)]
        held = 2.0 * d
        layer = Piece(*times, held, held * luck.choice((1, luck.uniform(0.3, 1))))
        nothing = layer.times(0)
        ends = [nothing, nothing]
        if luck.random() < 0.5:  # unequal stages: an embedding and a head
            ends = [layer.times(luck.uniform(0, x) / (2 * d)) for x in (0.3, 1.5)]
        pieces = Pieces(layer, *ends, luck.choice((0.0, luck.uniform(0, 0.3))))
        microbatches = luck.randint(2, 2 * d + 4)
        yield Cell(d, microbatches, pieces, luck.randint(2, most_chunks), luck.random())


def every_known(cell: Cell) -> Iterator[tuple[str, Schedule]]:
    """Yield the catalogue's schedules at every number of stages a device, by no code of `ask`."""
    sizes = cell.devices, cell.microbatches
    for name in NAMES:
        for chunks in range(2, cell.most_chunks + 1) if name in OPTIONS else (None,):
            try:
                yield f"{name}:{chunks}", make(name, *sizes, num_chunks=chunks)
            except ScheduleError:
                continue


def better_ones(cell: Cell) -> list[str]:
    """Return what is known that fits the limit of the cell and is faster than its answer."""
    question = cell.question()
    answer = plan_request(question)
    assert max(peak_held(answer.schedule, answer.costs)) <= question.limit * (1 + 1e-9)
    value = simulate(answer.schedule, answer.costs).makespan
    assert answer.searched_bound <= answer.plan.value * (1 + 1e-9)
    found = []
    for name, schedule in every_known(cell):
        costs = cell.cut(schedule.num_stages)
        if max(peak_held(schedule, costs)) > question.limit * (1 + 1e-9):
            continue
        theirs = simulate(schedule, costs).makespan
        if theirs < value * (1 - 1e-9):
            found.append(f"{name} {theirs} against {value} in {cell}")
    return found


def test_nothing_known_is_better_in_a_few_small_cells() -> None:
    assert [line for cell in random_cells(8, 4, 6) for line in better_ones(cell)] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_nothing_known_is_better_in_200_cells(part: int) -> None:
    cells = list(random_cells(CELLS, 6, 12))[part::20]
    assert [line for cell in cells for line in better_ones(cell)] == []


def test_more_chunks_than_four_are_found_where_they_win() -> None:
    """The cell in which a plan of up to four stages a device took 65.18, told with no gap."""
    cost = (1.0, 1.99, 0.55, 0.0)
    asked = PlanRequest(
        AUTO,
        8,
        8,
        Costs.uniform(8, 32, *cost),
        lambda stages, name: Costs.uniform(8, stages, *cost),
        limit=16,
        chunks=(1, 2, 3, 4, 5, 6),
        steps=60_000,
    )
    answer = plan_request(asked)
    assert answer.schedule.num_chunks == 6
    assert answer.plan.value <= 62.34
    assert answer.searched_bound < answer.plan.value


def test_no_chunk_is_held_that_buys_nothing() -> None:
    cost = (1.0, 1.0, 1.0, 0.0)
    costs = Costs.uniform(4, 16, *cost)
    answers = [plan_request(PlanRequest(AUTO, 4, 12, costs, limit=limit)) for limit in (8, 12, 16)]
    assert len({round(each.plan.value, 9) for each in answers}) == 1
    assert {max(each.plan.peak) for each in answers} == {8.0}


def test_megatrons_own_is_recommended_where_it_wins() -> None:
    """A whole backward takes no longer than B alone, and stages cannot be made smaller."""
    costs = Costs.uniform(4, 4, 1, 1.2, 0.8, 0.05)
    dear = replace(costs, whole_backward_us=costs.backward_us)
    answer = plan_request(PlanRequest(AUTO, 4, 8, dear, limit="1f1b"))
    assert answer.is_megatrons
    assert answer.baseline == BaselineSpec("1f1b")
    assert answer.schedule.order == make("1f1b", 4, 8).order
    known = {
        each.baseline: each for each in compare(PlanRequest(AUTO, 4, 8, dear, limit=8), answer)
    }
    own = known[BaselineSpec("1f1b")]
    assert answer.plan.value <= own.timeline.makespan


def test_interleaved_is_megatrons_in_whole_groups() -> None:
    assert BaselineSpec("interleaved-1f1b", 4).is_megatrons(4, 8)
    assert not BaselineSpec("interleaved-1f1b", 4).is_megatrons(4, 9)
    assert BaselineSpec("1f1b").is_megatrons(4, 9)
    assert not BaselineSpec("zb-h1").is_megatrons(4, 8)


@pytest.mark.parametrize("name", ["interleaved-1f1b:3", "v-half"])
def test_a_name_as_a_limit_means_its_peak(name: str) -> None:
    question = PlanRequest(AUTO, 3, 6, None, limit=name, steps=2000)
    answer = plan_request(question)
    peak = max(evaluate_named(name, question).peak)
    assert answer.limits == (peak,) * 3
    chunks = {"num_chunks": 3} if ":" in name else {}
    made = make(name.partition(":")[0], 3, 6, **chunks)
    assert peak == pytest.approx(max(peak_held(made)))


def test_without_a_limit_it_is_what_1f1b_really_holds() -> None:
    """The logits that the last stage holds once are not held by the first, d times."""
    held = (1.0,) * 7 + (9.0,)
    costs = Costs((1.0,) * 8, (1.2,) * 8, (0.8,) * 8, 0.05, held, held)
    answer = plan_request(PlanRequest(AUTO, 4, 8, costs, steps=2000))
    assert answer.limits == (10.0,) * 4
    one = make("1f1b", 4, 8)
    assert max(peak_held(one, evaluate_named("1f1b", PlanRequest(AUTO, 4, 8, costs)).costs)) == 10.0


@pytest.mark.parametrize("text", ["v-half:2", "interleaved-1f1b:", "interleaved-1f1b:x"])
def test_a_name_with_a_wrong_number_of_stages_is_told(text: str) -> None:
    with pytest.raises(ScheduleError, match="a number of chunks per rank"):
        evaluate_named(text, PlanRequest(AUTO, 4, 8))


def test_layers_are_dealt_out_anew_for_other_numbers_of_stages() -> None:
    layer = Piece(10.0, 12.0, 8.0, 4.0, 3.0)
    pieces = Pieces(layer, layer.times(0.1), layer.times(0.5), 1.0)
    costs = pieces.costs((3,) * 8)
    finer = recut(costs, 12, 4, "a plan")
    assert finer.layers == (2,) * 12
    assert sum(finer.forward_us) == pytest.approx(sum(costs.forward_us))
    assert finer.forward_us[1] == pytest.approx(20)
    unknown = replace(costs, layers=None)
    assert recut(unknown, 12, 4, "a plan", 24).forward_us == pytest.approx(finer.forward_us)
    with pytest.raises(ScheduleError, match="the costs are for 8 stages, a plan has 12"):
        recut(unknown, 12, 4, "a plan")
