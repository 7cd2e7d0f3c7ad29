"""Decode the answers of the server, as the playground does."""

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_vshape.playground.picture import ARRAYS
from megatron_vshape.playground.worker import HEAD

if TYPE_CHECKING:
    from starlette.testclient import TestClient


def request(answer_kind: str = "timeline", **changes: Any) -> dict[str, Any]:
    body = {
        "want": answer_kind,
        "devices": 4,
        "microbatches": 8,
        "costs": {},
        "schedule": {"source": "name", "name": "v-half"},
    }
    return {**body, **changes}


def frames(data: bytes) -> list[tuple[str, bytes]]:
    """Return the frames of an answer."""
    decoded, offset = [], 0
    while offset < len(data):
        kind, length = HEAD.unpack_from(data, offset)
        offset += HEAD.size
        decoded.append((kind.decode(), data[offset : offset + length]))
        offset += length
    return decoded


def answer(client: "TestClient", body: dict[str, Any]) -> bytes:
    """Return the result of a request that must succeed."""
    response = client.post("/api/make", json=body)
    assert response.status_code == 200, response.text
    kind, result = frames(response.content)[-1]
    assert kind == "R", result
    return result


def refusal(client: "TestClient", body: object) -> dict[str, str]:
    """Return the error of a request that must be rejected."""
    response = client.post("/api/make", json=body)
    if response.status_code == 200:
        kind, result = frames(response.content)[-1]
        assert kind == "E"
        return dict(json.loads(result))
    assert response.status_code == 422
    return dict(response.json())


def read_payload(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header, and a header with arrays for every timeline."""
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    offset, timelines = 4 + length, []
    for timeline in header["timelines"]:
        size = sum(timeline["counts"])
        for name, dtype in ARRAYS:
            assert offset % 8 == 0
            timeline[name] = np.frombuffer(data, dtype, size, offset)
            offset += -(-timeline[name].nbytes // 8) * 8
        timelines.append(timeline)
    assert offset == len(data)
    return header, timelines
