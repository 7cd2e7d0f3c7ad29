"""Schedule files and costs files round-trip; invalid files raise errors of one sentence."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import catalogue_schedules, costs_of

from megatron_vshape import Costs, Schedule, ScheduleError, load_schedule, make
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.program.torch_file import find_torch_name, to_torch_csv

VALID = {
    "format": 1,
    "name": "mine",
    "num_devices": 2,
    "num_microbatches": 1,
    "placement": [0, 1],
    "order": [["F0.0", "BW0.0"], ["F1.0", "B1.0", "W1.0"]],
}
NO_FILE = "No such file or directory"


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(schedule=catalogue_schedules())
def test_json_and_csv_round_trip(schedule: Schedule) -> None:
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule
    reloaded = Schedule.from_csv(schedule.to_csv(), schedule.placement, schedule.name)
    assert reloaded == schedule
    assert Schedule.from_csv(to_torch_csv(schedule), name=schedule.name) == schedule


def test_torch_csv() -> None:
    """Idle and communication cells are ignored; the forward of a pair may be its second pass."""
    cells = "0UNSHARD,0F0,0SEND_F0,,0F1, 0RECV_B0,(0B0;0F2)OVERLAP_F_B,0WAIT_SEND_F0,0I1,0W1,0B2"
    others = "1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1F2,1B2,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD"
    schedule = Schedule.from_csv(f"{cells}\n{others}\n")
    assert schedule.to_csv() == (
        "F0.0,F0.1,F0.2&BW0.0,B0.1,W0.1,BW0.2\nF1.0,BW1.0,F1.1,BW1.1,F1.2,BW1.2\n"
    )
    assert to_torch_csv(schedule).startswith("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0I1,0W1,0B2\n")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("0BW1", "'0BW1' is not a pass of torch.distributed.pipelining: expected a stage, one of"),
        ("(0F1;0F2)OVERLAP_F_B", "is not an overlapped pass"),
    ],
)
def test_invalid_torch_csv_is_rejected(cell: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule.from_csv(f"0F0,{cell}\n")


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        ((0, 1), "1F1B"),
        ((0, 1, 0, 1), "Interleaved1F1B"),
        ((0, 1, 1, 0), "ZBVZeroBubble"),
        ((0, 1, 1, 0, 0, 1, 1, 0), None),
        ((1, 0), None),
    ],
)
def test_torch_schedule_with_the_placement(placement: Placement, name: str | None) -> None:
    assert find_torch_name(placement, 2) == name


def test_file_format() -> None:
    data = json.loads(make("v-half", 2, 1).to_json())
    assert list(data) == [
        "format", "name", "num_devices", "num_microbatches", "placement", "order"
    ]  # fmt: skip
    assert data["placement"] == [0, 1, 1, 0]
    assert data["order"][1][:2] == ["F1.0", "F2.0"]
    assert make("v-half", 2, 1).to_csv().splitlines()[1].startswith("F1.0,F2.0,")


def test_csv_of_a_spreadsheet_is_read() -> None:
    plain = Schedule.from_csv("F0.0,BW0.0\nF1.0,BW1.0\n")
    assert (plain.placement, plain.num_microbatches) == ((0, 1), 1)
    assert Schedule.from_csv("F0.0, BW0.0\n F1.0 ,BW1.0\n") == plain
    assert Schedule.from_csv("\ufeffF0.0,BW0.0,,\r\nF1.0,BW1.0, ,\r\n\r\n,,,\r\n") == plain


INVALID_TEXTS = {
    "": "the schedule file is not valid JSON: Expecting value: line 1 column 1 (char 0)",
    '{"format": 1': "the schedule file is not valid JSON: Expecting ',' delimiter: line 1",
    "[" * 100_000: "the schedule file is not valid JSON: it is nested too deep",
    "[]": "the schedule file contains a JSON list; it must be an object",
    "null": "the schedule file contains a JSON null; it must be an object",
    "NaN": "NaN is not a number that JSON allows; write a finite one",
    '{"format": 1, "format": 1}': "the key 'format' occurs twice in one JSON object",
    "9" * 5000: "the schedule file is not valid JSON: it has a number of more than 4300 digits",
    "{}": "the format is None; this version reads 1",
}


@pytest.mark.parametrize("text", INVALID_TEXTS, ids=range(len(INVALID_TEXTS)))
def test_invalid_file_is_rejected(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.from_json(text)
    assert str(error.value).startswith(INVALID_TEXTS[text])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "the format is 2; this version reads 1"),
        ({"format": True}, "the format is True; this version reads 1"),
        ({"order": None}, "order is None; it must contain one list per device, num_devices is 2"),
        ({"order": [[]]}, "order is 1 lists; it must contain one list per device, num_devices is"),
        ({"order": ["F0.0", []]}, "the order of device 0 is 'F0.0'; it must be a list of passes"),
        ({"order": [["F0.0"], [3]]}, "3 is not a pass: expected F, B, W, BW, D, "),
        ({"order": [["X0.0"], []]}, "'X0.0' is not a pass: expected F, B, W, BW, D, "),
        ({"num_devices": True}, "num_devices is True; it must be a whole number of at least 1"),
        ({"num_devices": 2.0}, "num_devices is 2.0; it must be a whole number of at least 1"),
        ({"num_devices": 10**9}, "order is 2 lists; it must contain one list per device,"),
        ({"num_microbatches": 0}, "num_microbatches is 0; it must be a whole number of at least 1"),
        ({"num_microbatches": 10**12}, "2 stages and 1000000000000 microbatches are more than the"),
        ({"placement": [0, True]}, "placement must be a list with the device of every stage"),
        ({"placement": [0, 5]}, "the placement puts stage 1 on device 5; there are 2 devices, cou"),
        ({"placement": [0, 0]}, "the placement puts 2 of 2 stages on device 0; every one of the 2"),
        ({"name": 3}, "name is 3; it must be printable text of up to 200 characters"),
        ({"name": "a\nb"}, "name is 'a\\nb'; it must be printable text of up to 200 characters"),
        ({"colour": 1}, "the schedule file has the unknown key 'colour'; supported keys: format,"),
    ],
)
def test_invalid_value_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.from_json(json.dumps(VALID | changes))
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("key", [key for key in VALID if key != "format"])
def test_missing_key_is_rejected(key: str) -> None:
    text = json.dumps({name: VALID[name] for name in VALID if name != key})
    with pytest.raises(ScheduleError) as error:
        Schedule.from_json(text)
    assert str(error.value) == f"the key '{key}' is missing from the schedule file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the CSV has no passes; it needs one line per device"),
        ("F0.0,,B0.0\n", "'' is not a pass: expected F, B, W, BW, D, "),
        ("F0.0,BW0.0\nF1.0,F0.0\n", "F0.0 is on device 1, but stage 0 has passes on device 0"),
        ("F0.0\nF2.0\n", "stage 1 has no pass, but stage 2 has"),
        ("F0.0\nF1.0,F2.0\n", "the placement has 3 stages for 2 devices; all devices need"),
        ("F0.999999999\n", "1 stages and 1000000000 microbatches are more than the 20000000"),
        ("F" * 200_000, "the CSV cannot be read: field larger than field limit (131072)"),
    ],
)
def test_invalid_csv_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.from_csv(text)
    assert str(error.value).startswith(message)


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=8,
    ).flatmap(lambda junk: st.sampled_from(list(VALID)).map(lambda key: VALID | {key: junk}))
)
def test_random_values_raise_only_schedule_errors(data: object) -> None:
    message = "it was a schedule"
    try:
        Schedule.from_json(json.dumps(data))
    except ScheduleError as error:
        message = str(error)
    assert 0 < len(message) < 600


@given(text=st.text(), length=st.integers(0, 400))
def test_damaged_files_raise_only_schedule_errors(text: str, length: int) -> None:
    complete = make("v-half", 2, 2).to_json()
    for reader in (Schedule.from_json, Schedule.from_csv, Costs.from_json):
        for damaged in (text, complete[:length], complete[:length] + text):
            try:
                reader(damaged)
            except ScheduleError:
                continue


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    binary, truncated, good = (tmp_path / name for name in ("b.json", "t.json", "g.csv"))
    binary.write_bytes(b'{"format": \xff\xfe}')
    truncated.write_text(json.dumps(VALID)[:50])
    good.write_text("F0.0,BW0.0\nF1.0,BW1.0\n")
    assert load_schedule(good).num_devices == 2
    messages = {
        tmp_path / "none.json": f"the schedule file {tmp_path}/none.json cannot be read: {NO_FILE}",
        tmp_path: f"the schedule file {tmp_path} cannot be read: Is a directory",
        Path("/dev/zero"): "the schedule file /dev/zero is not a regular file",
        binary: f"the schedule file {binary} is not UTF-8 text: byte 11 cannot be decoded",
        truncated: f"the schedule file {truncated} is not valid JSON: ",
        "a\0b": "the schedule file a\0b cannot be read: embedded null byte",
    }
    for path, message in messages.items():
        with pytest.raises(ScheduleError) as error:
            load_schedule(path)
        assert str(error.value).startswith(message)
    with pytest.raises(ScheduleError, match=r"^the costs file .*none\.json cannot be read: No"):
        Costs.load(tmp_path / "none.json")


@given(data=st.data(), num_stages=st.integers(1, 6))
def test_costs_round_trip(data: st.DataObject, num_stages: int) -> None:
    costs = data.draw(costs_of(num_stages))
    assert Costs.from_json(costs.to_json()) == costs


def test_files_of_earlier_versions_with_recomputation_by_stage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Costs without recomputation are still read; plans with recomputation by stage are not."""
    data = json.loads(make("v-half", 2, 2).to_json())
    assert Schedule.from_json(json.dumps(data | {"recompute": ["none"] * 4})).num_stages == 4
    with pytest.raises(ScheduleError, match="recomputes by stage .*: plan again, and use Megatron"):
        Schedule.from_json(json.dumps(data | {"recompute": ["none", "mlp", "full", "none"]}))
    old = {
        "recompute": {"full": {"backward_us": [2, 2]}},
        "sources": {"recompute": "measured"},
        "half_duplex": True,
    }
    assert Costs.from_json(json.dumps(COSTS | old)).backward_us == tuple(COSTS["backward_us"])
    assert "has recompute, half_duplex, which this version does not use: ignored" in caplog.text


COSTS = json.loads(Costs.uniform(1, 2).to_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_us": [1, 0]}, "forward_us of stage 1 is 0.0; it must be a finite number above"),
        ({"weight_us": [-2, 1]}, "weight_us of stage 0 is -2.0; it must be a finite number above"),
        ({"backward_us": [1, 1e999]}, "Infinity is not a number that JSON allows; write a finite"),
        ({"backward_us": [1, True]}, "backward_us holds True, which is not a number"),
        ({"backward_us": [1, "2"]}, "backward_us holds '2', which is not a number"),
        ({"backward_us": [1, 10**400]}, "backward_us contains a number too large for a float"),
        ({"backward_us": 3}, "backward_us is 3; it must be a list with a number per stage"),
        ({"backward_us": [1]}, "the costs have 1 values of backward_us and 2 of forward_us; there"),
        ({"send_us": -1}, "send_us is -1.0; it must be finite and not below 0"),
        ({"device_bytes": "x"}, "device_bytes holds 'x', which is not a number"),
        ({"held_after_backward_bytes": [1, -1]}, "held_after_backward_bytes of stage 1 is -1.0; "),
        ({"bytes": 3}, "the costs file has the unknown key 'bytes'; supported keys: forward_us,"),
        ({"layers": [1]}, "the costs have 1 values of layers and 2 of forward_us"),
        ({"layers": [1, -1]}, "layers holds -1"),
        ({"layers": [1, 2.5]}, "layers is [1, 2.5]; it must be a whole number per stage"),
        ({"whole_backward_us": [1, 0]}, "whole_backward_us of stage 1 is 0.0; it must be a finite"),
        ({"host_us": -1}, "host_us is -1.0; it must be finite and not below 0"),
        ({"forward_exchange_us": [1]}, "the costs have 1 values of forward_exchange_us and 2 of"),
        ({"sources": 3}, "sources is 3; it must be an object with a text per name"),
        ({"sources": {"x": "measured"}}, "sources names 'x', which no costs file has"),
        ({"sources": {"send_us": "guessed"}}, "the source of send_us is 'guessed'; it must begin"),
    ],
)
def test_invalid_costs_are_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Costs.from_json(json.dumps(COSTS | changes))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"forward": math.inf}, "forward_us of stage 0 is inf; it must be a finite"),
        ({"forward": math.nan}, "forward_us of stage 0 is nan; it must be a finite"),
        ({"send": math.nan}, "send_us is nan; it must be finite and not below 0"),
    ],
)
def test_infinite_costs_are_rejected(cost: dict[str, float], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Costs.uniform(2, 4, **cost)


def test_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(make("v-half", 2, 2).to_json(), encoding="utf-8-sig")
    assert load_schedule(path).order == make("v-half", 2, 2).order
