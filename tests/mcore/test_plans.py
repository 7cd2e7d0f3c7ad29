"""Plans by name and by file, for any number of microbatches."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vshape.core.adaptive import make_plus
from megatron_vshape.core.catalogue import NAMES, make
from megatron_vshape.core.lowering import lower
from megatron_vshape.core.passes import Pass, ScheduleError
from megatron_vshape.core.placement import Placement, linear, looping, v_shape
from megatron_vshape.core.schedule import Schedule
from megatron_vshape.core.simulate import simulate
from megatron_vshape.mcore.plans import Planner, forward_wave, make_planner


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, Placement]:
    devices = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3))
    return devices, tuple(draw(st.permutations(list(range(devices)) * chunks)))


@given(placements(), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_evaluation_runs_every_forward_once_on_any_placement(
    placed: tuple[int, Placement], microbatches: int
) -> None:
    devices, placement = placed
    wave = forward_wave(placement, devices, microbatches)
    passes = [(each.stage, each.microbatch) for row in wave.order for each in row]
    assert sorted(passes) == [(s, m) for s in range(len(placement)) for m in range(microbatches)]
    assert lower(wave).schedule is wave


@pytest.mark.parametrize("placement", [linear(4), looping(4, 2), v_shape(4)])
def test_evaluation_keeps_every_device_busy(placement: Placement) -> None:
    chunks = len(placement) // 4
    wave = forward_wave(placement, 4, 20)
    # One pass of every device per unit, but for the way through the pipeline.
    assert simulate(wave).makespan * chunks / 2 <= 20 * chunks + len(placement) - 1


def test_plans_are_kept_and_made_anew_for_other_microbatches() -> None:
    planner = make_planner("v-half", 4)
    assert planner.training(8) is planner.training(8)
    assert planner.training(5).schedule.num_microbatches == 5
    assert planner.evaluation(3) is planner.evaluation(3)


def test_the_smallest_program_uses_all_streams() -> None:
    for name in ("1f1b", "v-half"):
        planner = Planner(4, name)
        assert planner.smallest().streams == planner.training(9).program.streams


def test_a_file_is_for_its_own_microbatches(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    file.write_text(make("v-min", 3, 7).to_json())
    planner = make_planner(str(file), 3)
    assert planner.training(7).schedule.order == make("v-min", 3, 7).order
    with pytest.raises(ScheduleError, match="is for 7 microbatches, this run has 8 in a step"):
        planner.training(8)
    assert planner.evaluation(8).schedule.num_microbatches == 8


def test_a_name_that_looks_like_no_file() -> None:
    with pytest.raises(ScheduleError, match="there is no schedule 'v-third': choose one of"):
        make_planner("v-third", 4)


def test_a_file_whose_microbatches_run_out_of_turn(tmp_path: Path) -> None:
    """It could run, but the trainer reads the batches in turn, whatever a pass is called."""
    file = tmp_path / "turned.json"
    rows = (("F0.1", "F0.0", "BW0.0", "BW0.1"), ("F1.0", "BW1.0", "F1.1", "BW1.1"))
    order = tuple(tuple(map(Pass.parse, row)) for row in rows)
    file.write_text(Schedule("turned", 2, 2, (0, 1), order).to_json())
    with pytest.raises(ScheduleError, match=r"F0\.1 stands before F0\.0 on device 0") as refused:
        make_planner(str(file), 2)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [*NAMES, "v-half+"])
def test_this_packages_own_orders_may_be_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / "own.json"
    made = make_plus(name, 4, 8) if name.endswith("+") else make(name, 4, 8)
    file.write_text(made.to_json())
    make_planner(str(file), 4)
