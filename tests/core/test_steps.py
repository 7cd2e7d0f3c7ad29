"""Steps of several passes, walked over as one: whole backwards, forwards beside them, copies."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_vshape.core.ask import Question, best_order
from megatron_vshape.core.check.simulate import peak_held, peak_in_host, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import COPY_OUT, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner import improve
from megatron_vshape.core.planner.job_shop import choose
from megatron_vshape.core.planner.joint_orders import joint_orders
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.planner.steps import StepSearch, best_steps, stepped
from megatron_vshape.core.program.kernels import waits_for_ever
from megatron_vshape.core.program.lowering import lower

DEVICES, MICROBATCHES = 4, 10


def costs_of(whole: float = 1.7, hidden: float | None = None, works: bool = False) -> Costs:
    """Return costs of a V in which a whole backward takes less than its two passes."""
    stages = 2 * DEVICES
    each = {"forward_exchange_us": (0.3,) * stages, "backward_exchange_us": (0.2,) * stages}
    each |= {"whole_exchange_us": (0.1,) * stages}
    if works:
        each |= {
            f"{name}_work_bytes": (0.25,) * stages for name in ("forward", "backward", "whole")
        }
    own = Costs.uniform(DEVICES, stages, 0.7, 0.95, 0.85, 0.05)
    return replace(own, whole_backward_us=(whole - 0.1,) * stages, hidden_share=hidden, **each)


def mixed(schedule: Schedule) -> Schedule:
    """Return the schedule with every second backward whole, and each W before those that follow."""
    made = overtaking(schedule)
    rows = []
    for device, row in enumerate(made.order):
        left = [work for work in row if work.kind is Kind.W]
        own: list[Pass] = []
        for step in made.steps(device):
            adds = step[-1] if step[-1].kind in (Kind.W, Kind.BW) else None
            if adds is not None:
                sooner = [w for w in left if w.stage == adds.stage and w[2] <= adds[2]]
                own += sooner
                left = [w for w in left if w not in sooner]
            own += [work for work in step if work.kind is not Kind.W]
        rows.append(tuple(own))
    return replace(made, order=tuple(rows))


def overtaking(schedule: Schedule) -> Schedule:
    """Return the schedule with every second backward whole, and each W where it was."""
    rows = []
    for row in schedule.order:
        whole = {work[1:] for work in row if work.kind is Kind.B and work.microbatch % 2}
        made = [w._replace(kind=Kind.BW) if w.kind is Kind.B and w[1:] in whole else w for w in row]
        rows.append(tuple(w for w in made if w.kind is not Kind.W or w[1:] not in whole))
    return replace(schedule, order=tuple(rows))


def orders() -> list[Schedule]:
    joint = list(joint_orders(DEVICES, MICROBATCHES))[::2]
    plain = [make(name, DEVICES, MICROBATCHES) for name in ("v-half", "v-zb", "1f1b-v")]
    return [*plain, *joint, *map(mixed, [*plain[:2], *joint])]


@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("objective", list(Objective))
def test_a_step_takes_and_holds_what_its_passes_do(objective: Objective, works: bool) -> None:
    costs = costs_of(hidden=0.8, works=works)
    for schedule in orders():
        search = StepSearch(schedule, costs, (99.0,) * DEVICES, objective)
        order = search.read(schedule)
        assert order is not None
        assert search.schedule(order) == schedule
        timeline = simulate(schedule, costs)
        ticks = search.problem.ticks_per_us
        assert order.value / ticks == pytest.approx(objective.of(timeline))
        shop = stepped(search.problem, search.shop, search._then(order.whole))
        chosen = choose(shop, order.row)
        ways = max(chosen.shop.before.shape[1], chosen.shop.after.shape[1])
        state = improve.new_state(chosen.row(order.row), 1, ways)
        assert improve.settle(chosen.shop, state)
        assert improve.objective(chosen.shop, state) == order.value
        over = chosen.shop.over[chosen.shop.sort[state.row]]
        there = state.row != improve.NONE
        held = np.where(there, state.held + over, 0).max(axis=1) / search.problem.units_per_byte
        assert held == pytest.approx(peak_held(schedule, costs))


def test_a_walk_keeps_steps_turns_and_memory_and_is_no_slower() -> None:
    costs = costs_of(hidden=0.8)
    for schedule in orders():
        limits = peak_held(schedule, costs)
        search = StepSearch(schedule, costs, limits, Objective.MAKESPAN)
        order = search.read(schedule)
        assert order is not None
        walked = search.schedule(search.walked(order, 6000, 1))
        verify(walked, limits, costs)
        assert walked.beside() == schedule.beside()
        assert sorted(walked.order[0]) == sorted(schedule.order[0])
        value = simulate(walked, costs).makespan
        assert value <= simulate(schedule, costs).makespan + 1e-9


def test_what_is_joined_and_parted_again_is_what_it_was() -> None:
    costs = costs_of(hidden=0.8)
    for schedule in orders():
        search = StepSearch(schedule, costs, (99.0,) * DEVICES, Objective.MAKESPAN)
        order = search.read(schedule)
        assert order is not None
        shape = order.whole.shape
        for stage, first in product(range(0, shape[0], 3), (0, 4)):
            other = order.whole.copy()
            other[stage, first : first + 5] ^= True
            made = search._with(order, other)
            if made is None:  # a chain of B that W delay may deadlock beside pairs
                continue
            verify(search.schedule(made))
            again = search._with(made, order.whole)
            assert again is not None
            assert sorted(search.schedule(again).order[0]) == sorted(schedule.order[0])
            told = simulate(search.schedule(made), costs).makespan
            assert made.value / search.problem.ticks_per_us == pytest.approx(told)


def test_a_backward_runs_whole_beside_a_forward_where_that_is_cheaper() -> None:
    """Joined with W a pair spares what a whole backward does; parted it holds up nobody."""
    costs = costs_of(whole=1.2, hidden=1.0)
    starts = list(joint_orders(DEVICES, 24))
    made = best_steps(starts, costs, (12.0,) * DEVICES, Objective.MAKESPAN, 20_000)
    assert made is not None
    verify(made, 12.0, costs)
    beside = [work.kind for work in made.beside().values()]
    assert beside.count(Kind.BW) > len(beside) / 2
    fastest = min(simulate(each, costs).makespan for each in starts)
    assert simulate(made, costs).makespan < 0.95 * fastest


@pytest.mark.parametrize("half_duplex", [False, True])
def test_a_plan_with_copies_has_its_backwards_joined_where_that_pays(half_duplex: bool) -> None:
    costs = replace(costs_of(1.4), whole_exchange_us=None).with_copies(1.0, half_duplex)
    sizes, limits = (DEVICES, 12), (4.0,) * DEVICES
    copied = plan(costs, *sizes, limits, trades=True, in_host=4.0, steps=20_000).schedule
    assert COPY_OUT in copied.kinds
    made = best_steps([copied], costs, limits, Objective.MAKESPAN, 20_000, in_host=4.0)
    assert made is not None
    verify(made, limits, costs)
    assert {Kind.BW, COPY_OUT} <= made.kinds
    assert made.half_duplex == half_duplex
    assert simulate(made, costs).makespan < 0.97 * simulate(copied, costs).makespan


@pytest.mark.parametrize("half_duplex", [False, True])
def test_copies_are_put_into_orders_with_pairs(half_duplex: bool) -> None:
    """Pairs stay pairs, in less memory than any block of theirs needs, and it is faster so."""
    costs = costs_of(1.9, 1.0).with_copies(0.8, half_duplex)
    question = Question("auto", DEVICES, 16, limit=4.0, in_host=6.0, steps=20_000)
    both = best_order(replace(question, costs=costs))
    assert {Kind.BW, COPY_OUT} <= both.schedule.kinds
    assert len(both.schedule.joint) > 16
    verify(both.schedule, both.limits, costs)
    assert waits_for_ever(lower(both.schedule, simulate(both.schedule, costs), kernels=True)) == {}
    assert max(peak_in_host(both.schedule, costs)) <= 6.0 + 1e-9
    assert both.plan.lower_bound <= both.plan.value
    for each in (costs.never_joined(), costs.without_copies()):
        alone = best_order(replace(question, costs=each))
        assert both.plan.value < 0.97 * alone.plan.value


def test_pairs_part_where_copies_turn_them_round() -> None:
    """With few devices a B may be due before the F that runs beside it; they then run apart."""
    costs = Costs.uniform(2, 4, 0.7, 0.9, 0.85, 0.05).with_copies(1.0)
    costs = replace(costs.having(forward_exchange_us=(0.3,) * 4), hidden_share=1.0)
    for microbatches, limit in ((6, 3.0), (5, 2.0), (9, 2.5)):
        made = best_order(Question("auto", 2, microbatches, costs, limit=limit, steps=2_000))
        verify(made.schedule, limit, costs)


def test_nothing_is_joined_where_that_is_dearer() -> None:
    costs = costs_of(whole=2.1)
    schedule = make("v-zb", DEVICES, MICROBATCHES)
    search = StepSearch(schedule, costs, (9.0,) * DEVICES, Objective.MAKESPAN)
    assert not search.cheaper.any()
    assert search.like.placement == v_shape(DEVICES)
    (only,) = search.patterns(search.read(schedule))  # type: ignore[arg-type]
    assert search.schedule(search.flipped(only, 1000)) == schedule


def test_weight_gradients_are_added_microbatch_by_microbatch() -> None:
    """No BW overtakes an earlier W of its stage: in another order the sum has other last bits."""
    costs = costs_of(1.6)
    starts = [
        overtaking(make(name, DEVICES, MICROBATCHES)) for name in ("v-half", "v-zb", "1f1b-v")
    ]
    assert not all(map(adds_in_turn, starts))
    for start in starts:
        search = StepSearch(start, costs, (9.0,) * DEVICES, Objective.MAKESPAN)
        read = search.read(start)
        assert read is not None
        walked = search.walked(read, 20_000, seed=1)
        for each in (read, *search.patterns(read), walked, search.flipped(walked, 200)):
            made = search.schedule(each)
            assert adds_in_turn(made)
            verify(made)
            assert simulate(made, costs).makespan == pytest.approx(
                each.value / search.problem.ticks_per_us, rel=1e-3
            )


def adds_in_turn(schedule: Schedule) -> bool:
    done: dict[int, list[int]] = {}
    for work in (work for row in schedule.order for work in row):
        if Kind.W in work.kind.does:
            done.setdefault(work.stage, []).append(work.microbatch)
    return all(each == sorted(each) for each in done.values())
