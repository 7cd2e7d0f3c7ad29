"""Bad input names its field; whatever comes, nothing but a FieldError is raised."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playground.answers import request

from megatron_vshape.playground.request import (
    FieldError,
    FileText,
    Request,
    Want,
    parse_request,
)

FILES = {"0-mine.json": FileText("mine.json", "{}")}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=15,
)


def test_a_request():
    found = parse_request(request(costs={"backward": 2, "head": [1, 2, 3]}), {})
    assert found.want is Want.TIMELINE
    assert found.costs.backward == 2.0
    assert found.costs.head == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"devices": 0}, "devices", "0 is outside 1 to 256"),
        ({"devices": 10**400}, "devices", "outside 1 to 256"),
        ({"devices": "abc"}, "devices", "enter a whole number from 1 to 256"),
        ({"devices": True}, "devices", "enter a whole number"),
        ({"microbatches": 2.5}, "microbatches", "enter a whole number"),
        ({"microbatches": None}, "microbatches", "enter a whole number"),
        ({"devices": 256, "microbatches": 16384}, "microbatches", "25,165,824 passes; the page"),
        ({"costs": {"forward": 0}}, "forward", "0 is too small; enter a number above 0"),
        ({"costs": {"weight": -1}}, "weight", "-1 is too small"),
        ({"costs": {"send": float("nan")}}, "send", "enter a number of at least 0"),
        ({"costs": {"backward": 1e300}}, "backward", "at most 1e+12"),
        ({"costs": {"head": [1, 2]}}, "head", "three numbers"),
        ({"costs": {"head": [1, 2, "x"]}}, "head_weight", "enter a number"),
        ({"costs": {"file": {"key": "../../etc/passwd"}}}, "costs", "there is no file"),
        ({"costs": {"colour": 1}}, "request", "there is no field 'colour'"),
        ({"schedule": {"source": "name", "name": "v-full"}}, "schedule", "'v-full' is none of"),
        ({"schedule": {"source": "file", "file": {"path": "/etc/passwd"}}}, "schedule", "'path'"),
        ({"schedule": {"source": "file", "file": {"text": ""}}}, "schedule", "empty"),
        ({"schedule": {"source": "plan"}}, "limit", "enter a number above 0"),
        ({"schedule": {"source": "plan", "limit": 8, "seconds": 1e9}}, "seconds", "at most 600"),
        ({"schedule": {"source": "plan", "limit": 8, "objective": "x"}}, "objective", "none of"),
        (
            {"schedule": {"source": "plan", "limit": 8, "chunks": 3}},
            "chunks",
            "or 4 chunks per rank",
        ),
        ({"schedule": {"source": "plan", "limit": 8, "chunks": "4"}}, "chunks", "a whole number"),
        (
            {"schedule": {"source": "name", "name": "interleaved-1f1b", "chunks": 0}},
            "chunks",
            "0 is outside 1 to 128",
        ),
        (
            {
                "want": "frontier",
                "schedule": None,
                "devices": 256,
                "microbatches": 600,
                "plans": True,
            },
            "microbatches",
            "1,843,200 passes",
        ),
        ({"want": "everything"}, "want", "none of timeline"),
        ({"more": 1}, "request", "there is no field 'more'"),
    ],
)
def test_what_is_wrong_names_its_field(change, field, text):
    with pytest.raises(FieldError) as caught:
        parse_request(request(**change), FILES)
    assert caught.value.field == field
    assert text in str(caught.value)


def test_a_schedule_is_drawn_up_to_the_passes_that_it_has():
    """1,100 microbatches on 256 devices: one stage of 1F1B each, and two of a V."""
    sizes = {"devices": 256, "microbatches": 1_100}
    assert parse_request(request(**sizes, schedule={"source": "name", "name": "1f1b"}), {})
    with pytest.raises(FieldError, match="1,689,600 passes"):
        parse_request(request(**sizes, schedule={"source": "name", "name": "v-half+"}), {})


def test_a_file_goes_by_its_key():
    schedule = {"source": "file", "file": {"key": "0-mine.json"}}
    found = parse_request(request(schedule=schedule), FILES)
    assert found.schedule is not None
    assert found.schedule.file == FILES["0-mine.json"]


def _parsed(data: object) -> Request | None:
    """Return the request; None if it is refused with a field and a sentence."""
    refused = None
    try:
        return parse_request(data, FILES)
    except FieldError as error:
        refused = error
    assert refused.field
    assert str(refused)
    return None


@given(JSON)
def test_anything_at_all(data):
    _parsed(data)


@given(st.data())
def test_a_request_with_anything_in_one_place(data):
    body = json.loads(json.dumps(request(costs={"forward": 1, "head": [0, 0, 0]})))
    where = data.draw(st.sampled_from([body, body["costs"], body["schedule"]]))
    keys = [*where, "file", "limit", "trace", "plans", "seconds", "chunks", "embedding"]
    where[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    _parsed(body)


@given(st.dictionaries(st.sampled_from(["key", "name", "text", "path"]), JSON))
def test_any_file(file):
    schedule = {"source": "file", "file": file}
    found = _parsed(request(schedule=schedule))
    assert found is None or found.schedule.file.text
