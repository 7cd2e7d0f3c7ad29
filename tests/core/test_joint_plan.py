"""Orders with joint passes: the published ones, those made for them, and what a plan chooses.

The figures are of equal stages, F = B = 1 per chunk, of which a share is exchange, hidden where
joint, and W the rest of F: simulated for the reference by another program.
"""

from dataclasses import replace

import pytest
from joint_replay import peak_of, replay

from megatron_vshape.core.ask import Planned, Question, ask, best_order, known_as
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, joint_name
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.paper.catalogue import JOINT_NAMES, NAMES, make, make_block
from megatron_vshape.core.paper.joint import dualpipev
from megatron_vshape.core.planner.joint_orders import joint_orders
from megatron_vshape.core.planner.joint_walk import best_joint, within
from megatron_vshape.core.planner.steps import StepSearch
from megatron_vshape.core.program.lowering import whole_backwards


def exchanging(devices: int, share: float, chunks: int = 2, hidden: float | None = 1.0) -> Costs:
    """Return the costs of the model above."""
    stages, size = chunks * devices, 2 / chunks
    waits = (share * size,) * stages
    equal = Costs.uniform(devices, stages, 1 - share, 1 - share, 1 - share)
    return replace(
        equal, forward_exchange_us=waits, backward_exchange_us=waits, hidden_share=hidden
    )


def replayed(schedule: Schedule, costs: Costs) -> float:
    """Return the step's time by the replay that shares no code with the simulator."""
    times = replay(schedule, costs)
    assert list(map(len, times)) == list(map(len, schedule.order))
    return max(end for row in times for _, end in row)


@pytest.mark.parametrize(
    ("microbatches", "share", "published", "apart", "interleaved"),
    [
        (32, 0.3, 156.5, 153.7, (191.7, 158.7, 182.2, 151.3)),
        (64, 0.3, 290.9, 288.1, (364.5, 293.1, 355.1, 285.8)),
        (32, 0.4, 140.0, 138.6, (184.6, 140.6, 175.5, 134.3)),
        (64, 0.4, 255.2, 253.8, (351.0, 255.8, 341.9, 249.5)),
    ],
)
def test_published_orders_take_what_the_reference_says(
    microbatches: int,
    share: float,
    published: float,
    apart: float,
    interleaved: tuple[float, float, float, float],
) -> None:
    costs = exchanging(8, share)
    schedule = make("dualpipev", 8, microbatches)
    verify(schedule, max_held=17)
    assert simulate(schedule, costs).makespan == pytest.approx(published, abs=0.051)
    assert replayed(schedule, costs) == pytest.approx(published, abs=0.051)
    again = dualpipev(8, microbatches, apart=True)
    assert replayed(again, costs) == pytest.approx(apart, abs=0.051)
    found = [
        replayed(
            make(name, 8, microbatches, num_chunks=chunks), exchanging(8, share, chunks=chunks)
        )
        for chunks in (2, 4)
        for name in ("interleaved-1f1b", "overlapped-interleaved-1f1b")
    ]
    assert found == pytest.approx(interleaved, abs=0.051)


def test_megatrons_overlap_takes_one_more_warm_up() -> None:
    for chunks, peak in ((2, 24.0), (4, 20.0)):
        schedule = make("overlapped-interleaved-1f1b", 8, 32, num_chunks=chunks)
        assert max(peak_held(schedule)) == peak
        for device, row in enumerate(schedule.order):
            warm_up = next(at for at, work in enumerate(row) if work.kind is not Kind.F) - 1
            assert warm_up == 2 * (7 - device) + (chunks - 1) * 8 + 1


@pytest.mark.parametrize(("d", "m"), [(1, 2), (2, 4), (3, 9), (5, 12), (8, 16)])
def test_dualpipev_is_legal_and_holds_what_its_block_says(d: int, m: int) -> None:
    schedule = make("dualpipev", d, m)
    verify(schedule, max_held=2 * d + 1)
    assert max(make_block("dualpipev", d, m).peaks()) == 2 * d + 1
    assert schedule.placement == v_shape(d)


def test_dualpipev_refuses_few_microbatches() -> None:
    with pytest.raises(ScheduleError, match="at least 2 x ranks microbatches, 8 on 4, not 7"):
        make("dualpipev", 4, 7)


def test_names_have_joint_passes_where_costs_or_the_asker_know_of_them() -> None:
    assert not set(JOINT_NAMES) & set(NAMES)
    for name in JOINT_NAMES:
        question = Question(name, 4, 8)
        assert not ask(question).schedule.joint
        assert ask(replace(question, joint=True)).schedule.joint
        assert ask(replace(question, costs=exchanging(4, 0.3))).schedule.joint
        assert known_as(name, replace(question, costs=exchanging(4, 0.3))).schedule.joint


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rounds", [0.5, 1, 4])
def test_orders_made_for_joint_passes_run(d: int, rounds: float) -> None:
    m = max(1, int(d * rounds))
    for schedule in joint_orders(d, m):
        verify(schedule)
        costs = exchanging(d, 0.3)
        value = simulate(schedule, costs).makespan
        assert replayed(schedule, costs) == pytest.approx(value)
        # every block has at least one pair of two in its steady state
        assert len(schedule.joint) >= (m - 2 * d) * d


@pytest.mark.parametrize(
    ("limit", "values"),
    [(11, (183.3, 336.9, 170.4, 311.2)), (16, (164.0, 298.4, 145.2, 260.4))],
)
def test_blocks_take_no_longer_than_the_reference(limit: int, values: tuple[float, ...]) -> None:
    cells = ((32, 0.3), (64, 0.3), (32, 0.4), (64, 0.4))
    for (microbatches, share), value in zip(cells, values, strict=True):
        costs = exchanging(8, share)
        made = joint_orders(8, microbatches)
        fitting = [each for each in made if max(peak_held(each)) <= limit]
        assert min(replayed(each, costs) for each in fitting) <= value + 0.051


def test_a_walk_keeps_pairs_memory_and_turns_and_is_no_slower() -> None:
    costs = replace(exchanging(4, 0.35), send_us=0.05)
    for schedule in joint_orders(4, 10):
        search = StepSearch(schedule, costs, (9.0,) * 4, Objective.MAKESPAN)
        order = search.read(schedule)
        assert order is not None
        walked = search.schedule(search.walked(order, 4000, 1))
        verify(walked)
        assert walked.joint == schedule.joint
        assert walked.beside() == schedule.beside()
        assert simulate(walked, costs).makespan <= simulate(schedule, costs).makespan + 1e-9
        if max(peak_held(schedule)) <= 9:
            assert max(peak_held(walked)) <= 9
        else:
            assert walked == schedule
        for row in walked.order:
            for kind in (Kind.F, Kind.B, Kind.W):
                for stage in range(8):
                    own = [w.microbatch for w in row if w.kind is kind and w.stage == stage]
                    assert own == sorted(own)


def test_weights_move_up_where_an_order_would_not_fit() -> None:
    costs, reached = exchanging(8, 0.4), {}
    for limit in (8.0, 10.0, 14.0):
        for schedule in joint_orders(8, 32):
            fitted = within(schedule, costs, (limit,) * 8)
            if fitted is None:
                assert max(peak_held(schedule)) > limit
                continue
            verify(fitted, max_held=limit)
            assert fitted.joint == schedule.joint
            assert (fitted == schedule) == (max(peak_held(schedule)) <= limit)
            reached[limit] = min(reached.get(limit, 1e9), replayed(fitted, costs))
    assert set(reached) == {10.0, 14.0}
    # The memory of V-Half, which takes 187.0; a walk that is not calm ends at 181.6.
    made = best_joint(costs, 32, (10.0,) * 8, Objective.MAKESPAN, v_shape(8))
    assert made is not None
    assert simulate(made, costs).makespan < 180
    assert reached[10.0] < 187.0


def answered(costs: Costs, limit: float, steps: int = 20_000, chunks: int = 2) -> Planned:
    question = Question("auto", 4, 12, costs, limit=limit, steps=steps, chunks=(1, chunks))
    return best_order(question)


def test_a_plan_pairs_where_that_is_faster_and_fits() -> None:
    costs = exchanging(4, 0.35)
    plain = answered(costs.never_joined(), 9.0)
    paired = answered(costs, 9.0)
    assert not plain.schedule.joint
    assert paired.schedule.joint
    assert paired.plan.value < 0.9 * plain.plan.value
    assert replayed(paired.schedule, costs) == pytest.approx(paired.plan.value)
    assert peak_of(paired.schedule, costs) == max(paired.plan.peak) <= 9.0
    assert paired.searched_bound <= paired.plan.value
    assert {str(known.rival) for known in paired.known} >= {"dualpipev"}
    assert paired.schedule.name == "plan"


def test_a_plan_is_never_slower_than_without_pairs() -> None:
    for limit in (3.0, 5.0):
        costs = exchanging(4, 0.35)
        plain, paired = answered(costs.never_joined(), limit), answered(costs, limit)
        assert paired.plan.value <= plain.plan.value * (1 + 1e-9)
        assert max(paired.plan.peak) <= limit
    slow = exchanging(4, 0.35, hidden=0.0)
    assert not answered(slow, 9.0).schedule.joint


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("m", [3, 8, 11])
def test_orders_of_a_loop_are_megatrons_with_w_by_itself(chunks: int, m: int) -> None:
    (schedule,) = joint_orders(4, m, looping(4, chunks))
    verify(schedule)
    whole = make("overlapped-interleaved-1f1b", 4, m, num_chunks=chunks)
    assert whole_backwards(schedule) == whole
    assert max(peak_held(schedule)) == max(peak_held(whole))
    costs = replace(exchanging(4, 0.3, chunks), send_us=0.05)
    assert list(joint_orders(4, 10, looping(4, chunks))) == []  # Megatron's hangs
    assert replayed(schedule, costs) == pytest.approx(simulate(schedule, costs).makespan)


def test_a_loop_is_planned_with_pairs() -> None:
    costs = exchanging(4, 0.35, chunks=4)
    question = Question("auto", 4, 12, costs, limit=10.0, steps=60_000, chunks=(2, 4))
    overlapped = known_as("overlapped-interleaved-1f1b:4", question)
    assert max(overlapped.peak) == 10.0
    plan = best_order(question)
    assert plan.schedule.placement == looping(4, 4)
    assert replayed(plan.schedule, costs) == pytest.approx(plan.plan.value)
    assert peak_of(plan.schedule, costs) == max(plan.plan.peak) <= 10.0
    on_the_v = best_order(replace(question, chunks=(2,)))
    assert plan.plan.value < 0.99 * min(overlapped.timeline.makespan, on_the_v.plan.value)
    tighter = replace(question, limit=9.0, placements=(looping(4, 4),))
    assert not best_order(tighter).schedule.joint
    assert best_joint(costs, 8, (0.5,) * 4, Objective.MAKESPAN, looping(4, 4), 100) is None


@pytest.mark.parametrize(("whole", "joins_weights"), [(1.5, True), (2.2, False)])
def test_measured_prices_decide_whether_w_is_in_the_pair(whole: float, joins_weights: bool) -> None:
    """F, B with exchange 1 each, W .65; F beside B 1.3, beside BW as given."""
    devices = v_shape(4)
    pairs = [(f, b) for f in range(8) for b in range(8) if devices[f] == devices[b]]
    joint = {joint_name(f, Kind.B, b): 1.3 for f, b in pairs}
    joint |= {joint_name(f, Kind.BW, b): whole for f, b in pairs}
    costs = replace(exchanging(4, 0.35, hidden=None), joint=tuple(joint.items()))
    plan = answered(costs, 9.0)
    beside = plan.schedule.beside()
    kinds = [work.kind for work in beside.values()]
    assert kinds.count(Kind.BW) > 0.8 * len(kinds) if joins_weights else Kind.BW not in kinds
    assert replayed(plan.schedule, costs) == pytest.approx(plan.plan.value)
    if joins_weights:
        rival = simulate(make("dualpipev", 4, 12), costs).makespan
        assert plan.plan.value <= rival * (1 + 1e-9)
