"""Verification errors have a drawing, and the verdict agrees with independent replays."""

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import catalogue_schedules, mutated_schedules

from megatron_vshape import Costs, Schedule, ScheduleError, make, verify
from megatron_vshape.core.check.simulate import LISTED
from megatron_vshape.core.model.kinds import KINDS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import looping

OUT_OF_ORDER = "and must run behind it"


def parse(placement: tuple[int, ...], *rows: str) -> Schedule:
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    microbatches = 1 + max(work.microbatch for row in order for work in row)
    return Schedule("test", len(rows), microbatches, placement, order)


def error_of(schedule: Schedule, *arguments: object) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(schedule, *arguments)
    return "\n" + str(error.value)


ERRORS = {
    "deadlock": (
        parse((0, 1), "F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"),
        """
the schedule deadlocks; each pass below waits for the next:
    BW0.0 on device 0 waits for BW1.0: reads its result
    BW1.0 on device 1 waits for F1.1: device 1 runs it first
    F1.1 on device 1 waits for F0.1: reads its result
    F0.1 on device 0 waits for BW0.0: device 0 runs it first""",
    ),
    "deadlock on one device": (
        parse((0, 0), "F1.0 F0.0 B1.0 B0.0 W0.0 W1.0"),
        """
the schedule deadlocks; each pass below waits for the next:
    F1.0 on device 0 waits for F0.0: reads its result
    F0.0 on device 0 waits for F1.0: device 0 runs it first""",
    ),
    "misplaced pass": (
        parse((0, 1), "F0.0 F1.0 BW0.0", "BW1.0"),
        """
F1.0 is on device 0, but its stage is on device 1
    device 0 |  F0.0  [F1.0]  BW0.0   <-- here
    device 1 |  BW1.0""",
    ),
    "unknown stage": (
        parse((0, 1), "F0.0 BW0.0", "F1.0 BW1.0 F2.0"),
        """
F2.0 is on device 1, but the last stage is 1
    device 0 |  F0.0   BW0.0
    device 1 |  F1.0   BW1.0 [F2.0]   <-- here""",
    ),
    "unknown microbatch": (
        replace(parse((0,), "F0.0 BW0.0 F0.7"), num_microbatches=1),
        """
F0.7 is on device 0, but the last microbatch is 0
    device 0 |  F0.0   BW0.0 [F0.7]   <-- here""",
    ),
    "missing pass": (
        parse((0, 1), "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 B1.0 W1.0 F1.1 W1.1"),
        """
B1.1 runs never on device 1; every pass must run once
    device 0 | ...  F0.1  B0.0  W0.0  B0.1  W0.1
    device 1 | ...  B1.0  W1.0  F1.1 [W1.1]   <-- here""",
    ),
    "duplicated part": (
        parse((0,), "F0.0 B0.0 BW0.0"),
        """
B0.0 runs 2 times, as B0.0 and BW0.0, on device 0; every pass must run once
    device 0 |  F0.0   B0.0  [BW0.0]   <-- here""",
    ),
    "duplicated pass": (
        parse((0,), "F0.0 BW0.0 BW0.0 F0.1"),
        """
BW0.0 runs 2 times on device 0; every pass must run once (and 1 more are wrong)
    device 0 |  F0.0   BW0.0 [BW0.0] F0.1   <-- here""",
    ),
    "memory": (
        make("gpipe", 2, 4),
        """
device 0 holds 8 at its peak, more than the limit of 4; it first exceeds that at F0.2
    device 0 |  F0.0   F0.1  [F0.2]  F0.3   BW0.0  BW0.1 ...   <-- here
    device 1 |  F1.0   F1.1   F1.2   F1.3   BW1.0  BW1.1 ...""",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_shows_the_passes(case: str) -> None:
    schedule, text = ERRORS[case]
    assert error_of(schedule, 4) == text


def test_valid_schedules_are_accepted() -> None:
    verify(parse((0, 1), "F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"))  # a late backward
    verify(make("gpipe", 2, 4), 8)


def test_long_cycle_is_truncated() -> None:
    d = 20
    rows = []
    for device in range(d):
        forwards = [f"F{stage}.{m}" for stage in (device, d + device) for m in range(d)]
        backwards = [f"BW{stage}.{m}" for stage in (d + device, device) for m in range(d)]
        backwards.remove(f"BW{device}.{device}")
        rows.append(" ".join([*forwards, f"BW{device}.{device}", *backwards]))
    lines = error_of(parse(looping(d, 2), *rows)).splitlines()
    assert len(lines) == 3 + LISTED
    assert lines[2] == "    BW0.0 on device 0 waits for BW1.0: reads its result"
    assert lines[3] == "    BW1.0 on device 1 waits for BW1.1: device 1 runs it first"
    assert lines[-2:] == [
        f"    ... and {2 * d - LISTED} more waits, until",
        f"    BW{d}.{d - 1} on device 0 waits for BW0.0: device 0 runs it first",
    ]


def test_only_neighbouring_passes_are_shown() -> None:
    schedule = make("1f1b", 16, 64)
    order = list(schedule.order)
    order[8] = order[8][:40] + order[8][41:]
    lines = error_of(replace(schedule, order=tuple(order))).splitlines()[2:]
    assert len(lines) == 5
    assert [line.split()[1] for line in lines] == ["6", "7", "8", "9", "10"]
    assert all(line.startswith("    device") for line in lines)
    assert all("..." in line for line in lines)
    assert all(len(line) < 100 for line in lines)
    assert lines[2].endswith("<-- here")


def test_a_limit_for_every_device() -> None:
    schedule = make("1f1b", 2, 4)  # needs 4 chunks on the first device, 2 on the second
    verify(schedule, (4, 2))
    assert "device 1 holds 2 at its peak, more than the limit of 1;" in error_of(schedule, (4, 1))
    assert "there are 3 limits for 2 devices" in error_of(schedule, (4, 2, 2))


def test_small_excess_over_a_limit_is_visible() -> None:
    costs = Costs.of((1, 1), (1, 1), (1, 1), 0, (2.0**36, 1), (2.0**36, 1))
    limit = 2.0**37 - 2000
    message = error_of(make("1f1b", 2, 4), limit, costs)
    assert "holds 137,438,953,472 at its peak, more than the limit of 137,438,951,472" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0; it must be at least 1"),
        ({"num_devices": 3}, "the schedule has orders for 2 devices and num_devices 3; the two"),
        ({"placement": (0, 2)}, "the placement puts stage 1 on device 2; there are 2 devices"),
        ({"placement": (0, 1, 1)}, "the placement has 3 stages for 2 devices; all devices"),
        ({"placement": (0, 0)}, "the placement puts 2 of 2 stages on device 0; every one of the"),
        ({"placement": ()}, "the placement has 0 stages for 2 devices; all devices need"),
    ],
)
def test_inconsistent_sizes_are_rejected(changes: dict[str, object], message: str) -> None:
    assert message in error_of(replace(make("1f1b", 2, 2), **changes))


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_schedule_is_rejected_or_correct(data: st.DataObject, replay) -> None:
    published = data.draw(catalogue_schedules(max_devices=5, max_microbatches=6))
    schedule, message = data.draw(mutated_schedules(published)), None
    try:
        verify(schedule)
    except ScheduleError as error:
        message = str(error)
    costs = Costs.uniform(schedule.num_devices, schedule.num_stages)
    is_valid = message is None or OUT_OF_ORDER in message
    for figures in replay(schedule, costs):
        assert isinstance(figures, dict if is_valid else str), (message, figures)
    if not is_valid:
        assert len(message.splitlines()) <= 2 + LISTED
        assert len(message) < 2000


@given(st.text() | st.from_regex(r"(BW|F|B|W)[0-9]{1,3}\.[0-9]{1,3}", fullmatch=True))
@example("F１.0")
@example("F0.0\n")
@example("F-1.0")
@example("F1234567890.0")
def test_pass_text_round_trips(text: str) -> None:
    names = "|".join(KINDS)
    if re.fullmatch(rf"({names})[0-9]{{1,9}}\.[0-9]{{1,9}}", text):
        work = Pass.parse(text)
        assert Pass.parse(str(work)) == work
    else:
        with pytest.raises(ScheduleError, match="is not a pass: expected F, B, W, BW, D, "):
            Pass.parse(text)


ROW = "F0.0 D0.0 L0.0 R0.0 H0.0 F0.1 B0.0 W0.0 BW0.1"


@pytest.mark.parametrize(
    ("first", "second"),
    [("F0.0", "F0.1"), ("B0.0", "BW0.1"), ("D0.0", "F0.0"), ("H0.0", "B0.0"), ("R0.0", "L0.0")],
)
def test_passes_follow_their_inputs_on_every_resource(first: str, second: str) -> None:
    verify(parse((0,), ROW))
    names = {first: second, second: first}
    wrong = parse((0,), " ".join(names.get(name, name) for name in ROW.split()))
    with pytest.raises(ScheduleError, match=f"{OUT_OF_ORDER}|deadlocks"):
        verify(wrong)


def test_dependencies_of_a_pass() -> None:
    assert list(Pass(Kind.F, 0, 2).needs(3)) == []
    assert list(Pass(Kind.BW, 1, 2).needs(3)) == [Pass(Kind.F, 1, 2), Pass(Kind.B, 2, 2)]
    assert list(Pass(Kind.W, 1, 2).needs(3)) == [Pass(Kind.B, 1, 2)]


def test_pass_of_another_kind_does_not_replace_a_missing_pass() -> None:
    order = ((Pass.parse("L0.0"), Pass.parse("BW0.0")),)
    with pytest.raises(ScheduleError, match=r"F0\.0 runs never on device 0"):
        verify(Schedule("mine", 1, 1, (0,), order))
