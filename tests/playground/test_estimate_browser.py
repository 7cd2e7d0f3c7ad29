"""The tab Estimate in a real browser, with a server that runs the dry run."""

import re
from typing import Any

import pytest
from playground.driving import PATIENCE_MS, load, settled
from playground.test_estimate import GPT

from megatron_vshape.cli.files import is_installed
from megatron_vshape.cli.main import main

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
    assert "B200" in page.text_content("svg.chart")
    bar = page.locator("svg.chart rect[class^=part-]")
    widths = [float(part.get_attribute("width")) for part in bar.all()]
    assert len(widths) == 7  # six parts, and free memory
    assert sum(widths) == pytest.approx(760 - 62, rel=0.01)
    assert page.inner_text("table.facts tbody tr").split()[0] == "0"
    page.click("#tab-timeline")
    settled(page)
    assert page.is_visible("#controls")
    page.click("#tab-estimate")
    settled(page)
    assert page.input_value("#estimate-command") == GPT
    assert page.is_visible("#verdict")


def test_a_page_without_a_server_names_the_command(page: Any, tmp_path: Any) -> None:
    path = tmp_path / "page.html"
    assert main("schedule v-half --devices 4 --microbatches 8 --html".split() + [str(path)]) == 0
    page.goto(path.as_uri())
    page.click("#tab-estimate")
    page.wait_for_selector("#lead p", timeout=PATIENCE_MS)
    assert "run megatron-vshape playground" in page.inner_text("#lead")
