"""Invalid input raises only a FieldError, which names the field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playground.answers import request

from megatron_vshape.playground.request import (
    AnswerKind,
    FieldError,
    Request,
    parse_request,
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=15,
)


def test_valid_request_is_parsed():
    parsed = parse_request(request(costs={"backward": 2, "head": [1, 2, 3]}))
    assert parsed.answer_kind is AnswerKind.TIMELINE
    assert parsed.costs.backward == 2.0
    assert parsed.costs.head == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"devices": 0}, "devices"),
        ({"devices": 10**400}, "devices"),
        ({"devices": True}, "devices"),
        ({"microbatches": 2.5}, "microbatches"),
        ({"devices": 256, "microbatches": 16384}, "microbatches"),
        ({"costs": {"forward": 0}}, "forward"),
        ({"costs": {"send": float("nan")}}, "send"),
        ({"costs": {"backward": 1e300}}, "backward"),
        ({"costs": {"head": [1, 2]}}, "head"),
        ({"costs": {"head": [1, 2, "x"]}}, "head_weight"),
        ({"costs": {"file": {"key": "../../etc/passwd"}}}, "costs"),
        ({"costs": {"colour": 1}}, "request"),
        ({"schedule": {"source": "name", "name": "v-full"}}, "schedule"),
        ({"schedule": {"source": "file", "file": {"path": "/etc/passwd"}}}, "schedule"),
        ({"schedule": {"source": "file", "file": {"text": ""}}}, "schedule"),
        ({"schedule": {"source": "plan"}}, "limit"),
        ({"schedule": {"source": "plan", "limit": 8, "seconds": 1000000000.0}}, "seconds"),
        ({"schedule": {"source": "plan", "limit": 8, "objective": "x"}}, "request"),
        ({"schedule": {"source": "name", "name": "interleaved-1f1b", "chunks": 0}}, "chunks"),
        ({"want": "everything"}, "want"),
        ({"more": 1}, "request"),
    ],
)
def test_invalid_value_names_its_field(change, field):
    with pytest.raises(FieldError) as caught:
        parse_request(request(**change))
    assert caught.value.field == field


def test_pass_limit_depends_on_the_stages_of_the_schedule():
    """1,100 microbatches on 256 devices: one stage of 1F1B each, and two of a V."""
    sizes = {"devices": 256, "microbatches": 1_100}
    assert parse_request(request(**sizes, schedule={"source": "name", "name": "1f1b"}))
    with pytest.raises(FieldError, match="1,689,600 passes"):
        parse_request(request(**sizes, schedule={"source": "name", "name": "v-half+"}))


def _parsed(data: object) -> Request | None:
    """Return the request; None if it is rejected with a field and a message."""
    refusal = None
    try:
        return parse_request(data)
    except FieldError as error:
        refusal = error
    assert refusal.field
    assert str(refusal)
    return None


@given(JSON)
def test_arbitrary_json_raises_only_field_errors(data):
    _parsed(data)


@given(st.data())
def test_arbitrary_value_in_a_request_raises_only_field_errors(data):
    body = json.loads(json.dumps(request(costs={"forward": 1, "head": [0, 0, 0]})))
    target = data.draw(st.sampled_from([body, body["costs"], body["schedule"]]))
    keys = [*target, "file", "limit", "seconds", "chunks", "embedding"]
    target[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    _parsed(body)


@given(st.dictionaries(st.sampled_from(["key", "name", "text", "path"]), JSON))
def test_arbitrary_file_raises_only_field_errors(file):
    schedule = {"source": "file", "file": file}
    parsed = _parsed(request(schedule=schedule))
    assert parsed is None or parsed.schedule.file.text
