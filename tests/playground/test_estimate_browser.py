"""The tab Estimate in a real browser, with a server that runs the dry run."""

import json
import re
from typing import Any

import pytest
from playground.driving import PATIENCE_MS, load, settled, unreadable_texts
from playground.test_estimate import GPT

from megatron_vshape.cli.files import is_installed
from megatron_vshape.playground.worker import Frame, frame

pytestmark = pytest.mark.browser


def test_a_command_is_estimated_by_keyboard(page: Any, server: str) -> None:
    if not (is_installed("torch") and is_installed("megatron.training")):
        pytest.skip("Megatron is not installed")
    load(page, server, "tab=estimate")
    assert page.is_hidden("#controls")
    page.get_by_label("Number of GPUs").fill("2")
    page.select_option("#estimate-gpu", "b200")
    page.get_by_label("Training command").fill(f"{GPT} --tensor-model-parallel-size 4")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector('#status[data-wrong="true"]', timeout=PATIENCE_MS)
    assert page.inner_text("#status").startswith("2 GPUs do not divide among TP 4")
    assert page.locator("#verdict").count() == 0
    page.get_by_label("Training command").fill(GPT)
    page.focus("#estimate-run")
    page.keyboard.press("Enter")
    page.wait_for_selector("#verdict", timeout=PATIENCE_MS)
    settled(page)
    assert page.inner_text("#verdict").startswith("Fits: rank 0 reserves about")
    assert re.match(r"Step time\n0\.\d\d s", page.inner_text("#numbers div"))
    assert page.inner_text("figure .legend").endswith("GiB of the B200")
    parts = page.locator(".bars svg rect").all()
    widths = [float(part.get_attribute("width")) for part in parts]
    assert len(widths) == 9  # six parts, and memory that is cached, outside of torch, and spare
    assert sum(widths) == pytest.approx(1, rel=0.01)
    assert page.inner_text("table.facts tbody tr").split()[0] == "0"
    page.click("#tab-timeline")
    settled(page)
    assert page.is_visible("#controls")
    page.click("#tab-estimate")
    settled(page)
    assert page.input_value("#estimate-command") == GPT
    assert page.is_visible("#verdict")


GIB = 2**30


def answer() -> bytes:
    """Return the frame of an estimate of two ranks, the second of which does not fit."""
    names = ("weights", "gradients", "optimizer", "activations", "logits", "rest")
    ranks = [
        {
            "rank": rank,
            "parts": dict.fromkeys(names, 4 * scale * GIB),
            "peak_bytes": 24 * scale * GIB,
            "reserved_bytes": 26 * scale * GIB,
            "spare_bytes": (77 - 26 * scale) * GIB,
        }
        for rank, scale in enumerate((1, 4))
    ]
    report = {
        "run": "1F1B, TP 1 x PP 2",
        "step_s": 2.5,
        "step_estimate": "16 microbatches",
        "verdict": "Does not fit.",
        "remedies": [],
        "gpu": "h100",
        "gpu_memory_bytes": 80 * GIB,
        "ranks": ranks,
    }
    return frame(Frame.RESULT, json.dumps(report).encode())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_example_is_requested_and_its_memory_is_readable(
    page: Any, server: str, theme: str
) -> None:
    requests: list[dict[str, Any]] = []

    def reply(route: Any) -> None:
        requests.append(route.request.post_data_json)
        route.fulfill(body=answer(), content_type="application/octet-stream")

    page.route("**/api/estimate", reply)
    load(page, server, f"tab=estimate&t={theme}")
    page.get_by_role("button", name="Try Llama 3 8B").click()
    page.wait_for_selector("#verdict", timeout=PATIENCE_MS)
    settled(page)
    assert requests[0]["command"] == page.input_value("#estimate-command")
    assert requests[0]["vocabulary"] == 128256
    assert unreadable_texts(page) == []
    assert [page.inner_text(f".bars span >> nth={index}") for index in range(4)] == [
        "Rank 0",
        "24.0 GiB",
        "Rank 1",
        "96.0 GiB",
    ]
    spare = page.locator(".bars rect.part-spare")
    widths = [float(box.get_attribute("width")) for box in spare.all()]
    assert widths == [pytest.approx(51 / 107, rel=0.01), 0]
    cards = page.inner_text("#numbers")
    assert "-27.0 GiB" in cards
    assert page.inner_text("table.facts tbody tr >> nth=1").split()[-1] == "-27.0"
    sizes = []
    for width in (900, 1900):
        page.set_viewport_size({"width": width, "height": 900})
        sizes.append(page.locator(".bars span").first.bounding_box()["height"])
    page.set_viewport_size({"width": 1280, "height": 900})
    assert sizes[0] == sizes[1]
