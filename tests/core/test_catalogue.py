"""Every named schedule is valid at any size; peak and bubble match the closed forms."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from strategies import catalogue_schedules

from megatron_vshape import Schedule, ScheduleError, make, peak_held, simulate, verify
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.paper.catalogue import (
    EVERY_NAME,
    NAMES,
    NOT_REORDERED,
    make_block,
    placement_of,
    reorder,
)

DEVICES = range(2, 17)


def figures(schedule: Schedule) -> tuple[float, float, float]:
    """Return peak, makespan - busy and span - busy in chunk passes."""
    timeline = simulate(schedule)
    peak = max(peak_held(schedule))
    return peak, timeline.overhead, timeline.span - timeline.busy


PEAKS = {
    "1f1b": lambda d: 2 * d,
    "eager-1f1b": lambda d: 4 * d - 2,
    "interleaved-1f1b": lambda d: 3 * d - 1,
    "grouped-interleaved-1f1b": lambda d: 2 * d,
    "zb-h1": lambda d: 2 * d,
    "zb-h2": lambda d: 4 * d - 2,
    "1f1b-v": lambda d: 2 * (2 * d // 3 + 1) - (d % 3 == 0),
    "v-two-thirds": lambda d: 2 * (2 * (d // 3) + (1, 2, 2)[d % 3]),
    "v-min": lambda d: 2 * ((d + 4) // 3),
    "v-half": lambda d: 2 * ((d + 2) // 2),
    "v-zb": lambda d: 2 * d,
}

OVERHEADS = {
    "gpipe": lambda d: 6 * (d - 1),
    "1f1b": lambda d: 6 * (d - 1),
    "eager-1f1b": lambda d: 6 * (d - 1),
    "interleaved-1f1b": lambda d: 3 * (d - 1),
    "grouped-interleaved-1f1b": lambda d: d - 1,
    "zb-h1": lambda d: 2 * (d - 1),
    "zb-h2": lambda d: 2 * (d - 1),
    "1f1b-v": lambda d: 5 * d - (5 if d % 3 == 1 else 3),
    "v-min": lambda d: 4 * d - (7 if d % 3 == 0 else 5),
    "v-half": lambda d: 3 * d - (4 if d % 2 else 7 if d > 2 else 5),
    "v-zb": lambda d: d - 1,
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak_matches_closed_form(name: str) -> None:
    for d in DEVICES:
        assert max(peak_held(make(name, d, 4 * d))) == PEAKS[name](d), d


@pytest.mark.parametrize("name", OVERHEADS)
def test_bubble_is_bounded_by_closed_form(name: str) -> None:
    multiples_only = "interleaved" in name
    for d in DEVICES:
        for m in (2 * d, 4 * d) if multiples_only else (2 * d, 2 * d + 1, 4 * d):
            assert figures(make(name, d, m))[1] <= OVERHEADS[name](d), (d, m)


@pytest.mark.parametrize("name", ["v-zb", "zb-h2"])
def test_zero_bubble_schedule_is_never_idle_without_barrier(name: str) -> None:
    for d in DEVICES:
        assert figures(make(name, d, 2 * d))[2] == 0


def test_gpipe_stores_all_microbatches() -> None:
    assert figures(make("gpipe", 4, 9)) == (18, 18, 18)


def test_more_chunks_mean_less_bubble() -> None:
    overheads = [figures(make("interleaved-1f1b", 4, 8, num_chunks=v))[1] for v in (1, 2, 3, 6)]
    assert overheads == pytest.approx([18, 9, 6, 3])


@pytest.mark.parametrize("d", [4, 8, 16])
def test_smaller_groups_need_less_memory(d: int) -> None:
    half = make("grouped-interleaved-1f1b", d, 4 * d, group_size=d // 2)
    peak, overhead, _ = figures(half)
    assert peak == 1.5 * d
    assert overhead <= 2.5 * d - 2


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(schedule=catalogue_schedules())
def test_every_choice_of_options_is_legal_and_within_the_bound(schedule: Schedule) -> None:
    verify(schedule)
    assert sum(map(len, schedule.order)) == schedule.num_microbatches * schedule.num_stages * (
        3 if schedule.splits_backward else 2
    )


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_the_block(name: str) -> None:
    """From two microbatches per device, so that the planner can skip schedules that do not fit."""
    for d in (1, 2, 3, 4, 6, 7, 12):
        for m in (2 * d, 2 * d + 1, 3 * d):
            schedule, block = make(name, d, m), make_block(name, d, m)
            scale = schedule.num_stages / (2 * d)
            peaks = [peak * scale for peak in peak_held(schedule)]
            assert max(peaks) <= max(block.peaks()) + 1e-9
            assert max(block.peaks()) <= max(block.peak_bounds())
            for peak, block_peak in zip(peaks, block.peaks(), strict=True):
                assert peak >= block_peak - 1e-9, (d, m)
            if name in NOT_REORDERED:
                for peak, bound in zip(peaks, block.peak_bounds(), strict=True):
                    assert peak <= bound + 1e-9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 8), (5, 7), (8, 24)])
def test_passes_of_a_stage_are_in_microbatch_order(
    name: str, devices: int, microbatches: int
) -> None:
    """Gradients are added in this order, as with 1F1B: their sums are equal bit for bit."""
    microbatches_of: dict[tuple[Kind, int], list[int]] = {}
    for row in make(name, devices, microbatches).order:
        for work in row:
            microbatches_of.setdefault((work.kind, work.stage), []).append(work.microbatch)
    assert all(numbers == [*range(microbatches)] for numbers in microbatches_of.values())


def test_one_device_is_never_idle() -> None:
    for name in NAMES:
        assert figures(make(name, 1, 6))[1] == 0, name


def test_schedules_with_full_backwards() -> None:
    with_full_backward = {name for name in NAMES if not make(name, 4, 4).splits_backward}
    assert with_full_backward == {"gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "1f1b-v"}


def test_interleaved_order_matches_megatron() -> None:
    """Warm-up of 2 (d - 1 - i) + (v - 1) d forwards, then one forward, one backward."""
    d, v = 4, 3
    schedule = make("interleaved-1f1b", d, 3 * d, num_chunks=v)
    for device, row in enumerate(schedule.order):
        kinds = [work.kind for work in row]
        ahead = 2 * (d - 1 - device) + (v - 1) * d
        steady = 3 * d * v - ahead
        assert kinds == [Kind.F] * ahead + [Kind.F, Kind.BW] * steady + [Kind.BW] * ahead


@pytest.mark.parametrize("name", EVERY_NAME)
def test_placement_of_name_matches_its_schedules(name: str) -> None:
    for d, m in ((2, 4), (4, 8), (4, 11)):
        assert placement_of(name, d) == make(name, d, m).placement


PICTURES = {
    "1f1b": """
FFF    BWFBWFBW BW BW
 FF  BWFBWFBWFBW BW
  FBWFBWFBWFBWFBW""",
    "v-half": """
FFF  fbw  fbBWFwfbBWFwfbBWwfbBWw BW
 FFFf  bwfBWbwfFBWbwfFBWbwf BbWwBW
  FfFf  bBWFwfbBWFwfbBWFwfbBWwbBWw""",
}


@pytest.mark.parametrize("name", PICTURES)
def test_drawing(name: str) -> None:
    """Upper case is chunk 0, lower case chunk 1."""
    picture = simulate(make(name, 3, 5)).draw()
    assert "\n" + picture == PICTURES[name]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ("v-third", 4, 4),
            {},
            "there is no schedule 'v-third'; did you mean v-two-thirds? The names are gpipe, ",
        ),
        (("v-half", 0, 4), {}, "num_devices of v-half is 0; it must be a whole number of at "),
        (("v-half", True, 4), {}, "num_devices of v-half is True; it must be a whole number of "),
        (
            ("v-half", 4, 4),
            {"num_chunks": 3},
            "v-half has no option num_chunks, an option of interleaved-1f1b and "
            "grouped-interleaved-1f1b",
        ),
        (
            ("interleaved-1f1b", 4, 4),
            {"group_size": 3},
            "interleaved-1f1b has no option group_size, an option of grouped-interleaved-1f1b",
        ),
        (
            ("interleaved-1f1b", 4, 4),
            {"num_chunks": 0},
            "num_chunks of interleaved-1f1b is 0; it must be a whole number of at least 1",
        ),
        (
            ("1f1b", 1000, 1000000),
            {},
            "1000 stages and 1000000 microbatches are more than the 20000000 passes",
        ),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: tuple[str, int, int], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ScheduleError) as error:
        make(*arguments, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_reordering_errors_name_the_pass() -> None:
    with pytest.raises(ScheduleError) as error:
        reorder(make("v-half", 3, 5), 1)
    assert str(error.value) == (
        "F3.0 does not fit on device 2, which holds 1 stage activations then and its limit is 1"
    )
    schedule = make("1f1b", 2, 2)
    first_row, *remaining_rows = schedule.order
    incomplete_row = tuple(work for work in first_row if str(work) != "F0.1")
    with pytest.raises(ScheduleError, match="waits for F0.1, which no device runs"):
        reorder(replace(schedule, order=(incomplete_row, *remaining_rows)), 2)
