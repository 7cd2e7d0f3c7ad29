"""The server answers valid requests and rejects all others."""

import asyncio
import json
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from playground.answers import answer, frames, read_payload, refusal, request

from megatron_vshape import Costs, Schedule, make, peak_held, simulate
from megatron_vshape.core.paper.catalogue import EVERY_NAME
from megatron_vshape.core.schedule_names import PLUS_NAMES
from megatron_vshape.playground.html import static_files
from megatron_vshape.playground.request import parse_request
from megatron_vshape.playground.worker import Pool

guard = pytest.importorskip(
    "megatron_vshape.playground.security", reason="the extra `playground` is not installed"
)

FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_schedule_of_the_catalogue(client, name):
    body = request(schedule={"source": "name", "name": name})
    _, (header,) = read_payload(answer(client, body))
    schedule = make(name, 4, 8).split_overlapped()
    assert header["counts"] == [len(row) for row in schedule.order]
    assert header["numbers"]["makespan"] == simulate(schedule).makespan


def test_names_are_those_of_the_command_line(client):
    offered_names = {schedule["name"] for schedule in client.get("/api/offers").json()["schedules"]}
    assert offered_names == {*EVERY_NAME, *PLUS_NAMES}
    body = request(schedule={"source": "name", "name": "interleaved-1f1b:4"})
    _, (header,) = read_payload(answer(client, body))
    assert len(header["placement"]) == 16
    for name in ("interleaved-1f1b:", "interleaved-1f1b:x", "v-half:4", "1f1b+"):
        body = request(schedule={"source": "name", "name": name})
        assert refusal(client, body)["field"] == "schedule"


def test_plus_schedule_keeps_the_memory_of_the_published_one(client):
    body = request(schedule={"source": "name", "name": "v-min+"})
    _, (header,) = read_payload(answer(client, body))
    assert header["title"] == "V-Min+"
    assert max(header["numbers"]["peaks"]) <= max(peak_held(make("v-min", 4, 8)))
    assert header["numbers"]["makespan"] <= simulate(make("v-min", 4, 8)).makespan


def test_embedding_and_head_costs_are_added(client):
    body = request(costs={"embedding": [1, 0, 0], "head": [0, 2, 1]})
    _, (header,) = read_payload(answer(client, body))
    costs = Costs.uniform(4, 8)
    heavy_costs = Costs.of(
        (2.0, *costs.forward_us[1:]),
        (*costs.backward_us[:-1], 3.0),
        (*costs.weight_us[:-1], 2.0),
        0.0,
        costs.held_after_forward_bytes,
        costs.held_after_backward_bytes,
    )
    assert header["numbers"]["makespan"] == simulate(make("v-half", 4, 8), heavy_costs).makespan


def test_costs_from_a_file_are_bytes_and_microseconds(client):
    costs = Costs.of(
        (900.0,) * 8, (1000.0,) * 8, (800.0,) * 8, 40.0, (2.0**30,) * 8, (2.0**29,) * 8
    )
    body = request(costs={"file": {"name": "costs.json", "text": costs.to_json()}})
    _, (header,) = read_payload(answer(client, body))
    assert header["facts"]["in_bytes"]
    assert max(header["numbers"]["peaks"]) > 2.0**30
    error = refusal(client, request(costs=body["costs"], devices=3))
    assert error["field"] == "costs"
    assert "the costs are for 8 stages, this schedule has 6" in error["text"]


def test_plan_reports_lower_bound_and_progress(client):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    plan = {"source": "plan", "limit": 6, "seconds": 1}
    response = client.post("/api/make", json=request(schedule=plan))
    received = frames(response.content)
    assert received[-1][0] == "R", received[-1]
    assert any(json.loads(body)["doing"] == "planning" for kind, body in received if kind == "P")
    _, (header,) = read_payload(received[-1][1])
    assert max(header["numbers"]["peaks"]) <= 6
    assert header["facts"]["lower_bound"] <= header["numbers"]["makespan"] * (1 + 1e-9)


def odd_order() -> str:
    schedule = make("1f1b", 2, 2)
    order = (tuple(reversed(schedule.order[0])), schedule.order[1])
    return Schedule("odd", 2, 2, schedule.placement, order).to_json()


@pytest.mark.parametrize(
    ("schedule", "field", "text"),
    [
        ({"source": "plan", "limit": 0.5}, "limit", "the minimum limit"),
        ({"file": {"name": "odd.json", "text": odd_order()}}, "schedule",
         "odd.json: the schedule deadlocks"),
        ({"file": {"name": "wide.csv", "text": make("1f1b", 257, 1).to_csv()}}, "schedule",
         "wide.csv: it is for 257 ranks; the page draws up to 256"),
    ],
    ids=["limit", "deadlock", "too many devices"],
)  # fmt: skip
def test_error_marks_its_field(client, schedule, field, text):
    error = refusal(client, request(schedule={"source": "file"} | schedule))
    assert error["field"] == field
    assert text in error["text"]


def test_files_are_simulated_and_returned(client):
    text = answer(client, request("schedule-file")).decode()
    assert Schedule.from_json(text) == make("v-half", 4, 8)
    events = json.loads(answer(client, request("trace-file")))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * 8 * 8
    body = request(schedule={"source": "file", "file": {"name": "mine.json", "text": text}})
    _, (header,) = read_payload(answer(client, body))
    assert header["facts"]["recipe"] == "schedule mine.json --cost 1,1,1,0"
    assert header["numbers"]["makespan"] == simulate(make("v-half", 4, 8)).makespan


# Requests that must be rejected


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example:8765", 421), ("127.0.0.1", 421), ("127.0.0.1:80", 421), ("", 421),
     ("127.0.0.1:8765.evil", 421), ("127.0.0.1:8765", 200), ("LOCALHOST:8765", 200)],
)  # fmt: skip
def test_only_loopback_hosts_are_accepted(client, host, status):
    assert client.get("/", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8765"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"origin": "http://127.0.0.1:8765", "sec-fetch-site": "cross-site"},
    ],
)
@pytest.mark.parametrize("path", ["/api/offers", "/api/make", "/static/app.js"])
def test_other_origins_are_rejected(client, headers, path):
    method = client.post if path == "/api/make" else client.get
    options = {"json": request()} if path == "/api/make" else {}
    assert method(path, headers=headers, **options).status_code == 403


def test_link_from_another_site_opens_the_page_only(client):
    headers = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert client.get("/", headers=headers).status_code == 200
    assert client.get("/api/offers", headers=headers).status_code == 403
    iframe_headers = {**headers, "sec-fetch-dest": "iframe"}
    assert client.get("/", headers=iframe_headers).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_form_of_another_page_cannot_post(client, kind):
    body = json.dumps(request()).encode()
    response = client.post("/api/make", content=body, headers={"content-type": kind})
    assert response.status_code == 415


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_other_methods(client, method):
    assert client.request(method, "/api/make").status_code == 405


@pytest.mark.parametrize("length", ["99999999999", "-1", "1e9", "٣"])
def test_invalid_content_length_is_rejected(client, length):
    headers = {"content-type": "application/json", "content-length": length.encode()}
    response = client.post("/api/make", content=b"{}", headers=headers)
    assert response.status_code in (400, 413)


def test_body_without_length_is_limited(client, monkeypatch):
    monkeypatch.setattr("megatron_vshape.playground.server.MAX_BODY", 1000)
    chunks = (b" " * 400 for _ in range(5))
    headers = {"content-type": "application/json"}
    assert client.post("/api/make", content=chunks, headers=headers).status_code == 413


PATHS = (
    "/static/../server.py",
    "/static/..%2fserver.py",
    "/static/%2e%2e/server.py",
    "/static//etc/passwd",
    "/static/",
    "/static/index.html%00.js",
    "/static/app.js/",
    "//etc/passwd",
    "/api/",
)


@pytest.mark.parametrize("path", PATHS)
def test_paths_outside_static_files_are_not_found(client, path):
    assert client.get(path, follow_redirects=False).status_code == 404


@FUZZ
@given(path=st.text(st.characters(codec="utf-8"), max_size=40))
@example("\n")
@example("api/offers\n")
def test_arbitrary_path_is_not_found(client, path):
    served_paths = {f"static/{name}" for name in static_files()} | {"", "api/offers"}
    url = "http://127.0.0.1:8765/" + "".join(f"%{byte:02x}" for byte in path.encode())
    assert client.get(url).status_code == (200 if path in served_paths else 404) or "/" in path


@FUZZ
@given(body=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_body_is_rejected(client, body):
    response = client.post("/api/make", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["field"]


@pytest.mark.parametrize("body", ["[" * 100_000, '{"devices": ' + "9" * 5000 + "}", "nul", "\x00"])
def test_hostile_json_is_rejected(client, body):
    headers = {"content-type": "application/json"}
    response = client.post("/api/make", content=body.encode(), headers=headers)
    assert response.status_code == 422


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        '{"format": 1, "name": "x", "num_devices": 1e9, "num_microbatches": 1, "placement": [0],'
        ' "order": []}',
        "F0.0,B0.0,W0.0\n\x00",
        "\ud800",
    ],
)
@pytest.mark.parametrize("name", ["x.json", "x.csv"])
def test_hostile_files_are_rejected(client, text, name):
    file = {"name": name, "text": text}
    for body in (
        request(schedule={"source": "file", "file": file}),
        request(costs={"file": file}),
    ):
        content = json.dumps(body).encode()
        response = client.post(
            "/api/make", content=content, headers={"content-type": "application/json"}
        )
        if response.status_code == 200:
            kind, result = frames(response.content)[-1]
            assert kind == "E"
            assert json.loads(result)["field"] in ("schedule", "costs")


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/offers", "/nothing"])
def test_responses_have_security_headers(client, path):
    headers = client.get(path).headers
    for name, value in guard.HEADERS.items():
        assert headers[name] == value
    assert "unsafe" not in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers


def test_the_page_fetches_nothing_from_elsewhere():
    for name, (content, _) in static_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, name
        assert "https:" not in text, name
        assert "eval(" not in text, name
        assert "innerHTML" not in text, name


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """Run in a separate thread, because Playwright keeps an event loop running in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


def test_abandoned_work_is_ended():
    slow = parse_request(request(schedule={"source": "plan", "limit": 6, "seconds": 60}))
    quick = parse_request(request())

    async def run() -> float:
        pool = Pool(workers=1)
        start = time.monotonic()
        answers = pool.answer(slow)
        first = await anext(answers)
        assert first[:1] == b"P"
        await answers.aclose()  # type: ignore[attr-defined]
        async for answer_frame in pool.answer(quick):
            last_frame = answer_frame
        assert last_frame[:1] == b"R"
        await pool.close()
        return time.monotonic() - start

    assert finished(run()) < 30
