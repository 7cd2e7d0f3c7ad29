"""megatron-vshape playground: requests it rejects, and its address."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playground.answers import request

from megatron_vshape.cli import playground
from megatron_vshape.cli.main import main

httpx = pytest.importorskip("httpx", reason="the extra `dev` is not installed")
pytest.importorskip("starlette", reason="the extra `playground` is not installed")


def test_server_listens_on_loopback_only(server):
    assert server.startswith("http://127.0.0.1:")
    response = httpx.get(server)
    assert response.status_code == 200
    assert "server" not in response.headers


def test_port_in_use_is_rejected(capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert main(["playground", "--port", port]) == 2
    assert "cannot listen there" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["65536", "-1", "abc", "٣"])
def test_invalid_port_is_rejected(capsys, port):
    assert main(["playground", f"--port={port}"]) == 2
    assert "is not a port" in capsys.readouterr().err


def test_printed_address_is_served(capsys, monkeypatch):
    served_ports = []
    monkeypatch.setattr(playground, "_serve", lambda listener, port: served_ports.append(port))
    assert main(["playground", "--port", "0"]) == 0
    match = re.search(r"at http://127\.0\.0\.1:(\d+)/ ", capsys.readouterr().out)
    assert [int(match[1])] == served_ports


def test_host_header_without_port_80_is_accepted():
    from megatron_vshape.playground.server import loopback_hosts

    assert {"localhost", "127.0.0.1:80"} <= set(loopback_hosts(80))
    assert "localhost" not in loopback_hosts(8080)


def test_ctrl_c_ends_the_workers_without_a_traceback(mortal_server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    process, url = mortal_server
    costs = {"backward": 1.15, "weight": 0.85, "send": 0.05}
    schedule = {"source": "plan", "limit": 9, "seconds": 500}
    slow = request(devices=8, microbatches=24, costs=costs, schedule=schedule)
    with httpx.stream("POST", f"{url}api/make", json=slow, timeout=120) as answer:
        parts = answer.iter_raw()
        next(parts)
        httpx.post(f"{url}api/make", json=request(), timeout=120)
        workers = workers_of(process.pid)
        assert len(workers) == 2  # one at work and one idle
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert "KeyboardInterrupt" not in errors
    assert "Event loop is closed" not in errors
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def workers_of(server: int) -> list[int]:
    tasks = Path(f"/proc/{server}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_disconnected_client_leaves_no_traceback(mortal_server):
    process, url = mortal_server
    host = httpx.URL(url).netloc.decode()
    body = json.dumps(request(devices=16, microbatches=256)).encode()
    for num_bytes in (0, 5, len(body)):  # before its request, in it, and before its answer
        for _ in range(4):
            with socket.create_connection(host.split(":"), timeout=60) as client:
                client.sendall(posted(host, len(body)) + body[:num_bytes])
                time.sleep(0.05)
    assert httpx.post(f"{url}api/make", json=request(), timeout=120).status_code == 200
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=60)[1]


def test_slow_request_body_times_out(monkeypatch):
    from megatron_vshape.playground import server

    monkeypatch.setattr(server, "BODY_S", 0.2)
    messages: list[dict[str, Any]] = []

    async def never() -> dict[str, Any]:
        await asyncio.sleep(30)
        raise AssertionError("the body was waited for")

    async def keep(message: dict[str, Any]) -> None:
        messages.append(message)

    async def ask() -> None:
        app = server.make_app(("desk",))
        headers = [(b"host", b"desk"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/api/make", "headers": headers}
        await app({**scope, "query_string": b"", "http_version": "1.1"}, never, keep)

    with ThreadPoolExecutor(1) as threads:  # Playwright keeps a loop running in this one
        threads.submit(asyncio.run, ask()).result()
    assert messages[0]["status"] == 408
    assert b"had not come within 0.2 s" in messages[1]["body"]


def posted(host: str, length: int) -> bytes:
    return (
        f"POST /api/make HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()
