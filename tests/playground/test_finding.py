"""Find a pass, measure a time range, and go back, in a browser."""

import re

import pytest
from playground.driving import LEFT, RIGHT, ROW, TOP, load, settled, url, wait_for_url

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.paper.catalogue import make

pytestmark = pytest.mark.browser


def chosen(page):
    """Return the name of the pass in the tooltip."""
    return page.inner_text("#tip b")


def find(page, text):
    page.fill("#find", text)
    page.press("#find", "Enter")


def test_a_pass_is_found_by_its_name(page, server):
    load(page, server, "d=4&m=60")
    find(page, "w3.41")
    assert chosen(page) == "W3.41"
    assert "microbatch 41" in page.inner_text("#tip")
    wait_for_url(page, "w=")  # far off, and too narrow to be seen before
    assert page.get_attribute("#find", "aria-invalid") == "false"
    for name in ("F9.1", "F0.60", "X", "3"):
        find(page, name)
        assert page.get_attribute("#find", "aria-invalid") == "true"
        assert page.inner_text('#missed[role="status"]').startswith(f"There is no pass {name}:")
    assert chosen(page) == "W3.41"
    find(page, "F0.5")
    assert page.inner_text("#missed") == ""
    load(page, server, "d=4&m=8&s=1f1b")
    find(page, "B2.3")
    assert chosen(page) == "BW2.3"


def measured(page):
    page.wait_for_selector("#range p")
    return page.inner_text("#range")


def test_time_range_is_measured_with_the_mouse(page, server):
    timeline = simulate(make("v-half", 4, 8))
    load(page, server, "d=4&m=8")
    box = page.locator("canvas.track").bounding_box()
    scale = (box["width"] - LEFT - RIGHT) / timeline.makespan
    positions = [box["x"] + LEFT + time * scale for time in (10, 25)]
    page.keyboard.down("Shift")
    page.mouse.move(positions[1], box["y"] + TOP + ROW)
    page.mouse.down()
    page.mouse.move(positions[0] + 40, box["y"] + TOP + ROW)
    assert measured(page)  # while it is drawn
    page.mouse.move(positions[0], box["y"] + TOP + ROW)
    page.mouse.up()
    page.keyboard.up("Shift")
    wait_for_url(page, "r=")
    match = re.search(r"r=([\d.]+),([\d.]+)", url(page))
    assert [float(number) for number in match.groups()] == pytest.approx([10, 25], abs=0.2)
    load(page, server, "d=4&m=8&r=10,25")
    work_by_kind = {"F": 0.0, "B": 0.0, "W": 0.0}
    for device in range(4):
        for work, start, end in timeline.slots(device):
            work_by_kind[str(work.kind)] += max(0.0, min(end, 25) - max(start, 10))
    shares = [100 * time / 60 for time in work_by_kind.values()]
    idle = 100 - sum(shares)
    assert measured(page) == (
        "15 passes, from 10 to 25. Of the ranks' time: "
        f"idle {idle:.1f} %, forward {shares[0]:.1f} %, input gradient {shares[1]:.1f} %, "
        f"weight gradient {shares[2]:.1f} %."
    )
    page.click("#no-range")
    wait_for_url(page, "r=", is_present=False)
    assert page.inner_text("#range") == ""


def test_browser_back_restores_earlier_states(page, server):
    load(page, server, "d=4&m=8")
    page.select_option("#in-schedule", "v-min")
    settled(page)
    wait_for_url(page, "s=v-min")
    page.click("#tab-compare")
    settled(page)
    wait_for_url(page, "tab=compare")
    page.click("#zoom-in")  # not a separate state
    wait_for_url(page, "w=")
    page.go_back()
    wait_for_url(page, "tab=compare", is_present=False)
    settled(page)
    assert page.inner_text("figcaption h2") == "V-Min"
    page.go_back()
    wait_for_url(page, "v-min", is_present=False)
    settled(page)
    assert page.inner_text("figcaption h2") == "V-Half"
    page.go_forward()
    wait_for_url(page, "s=v-min")
    settled(page)
    assert page.inner_text("figcaption h2") == "V-Min"


def test_large_schedule_opens_at_a_readable_zoom(page, server):
    load(page, server, "d=16&m=400")
    row = make("v-half", 16, 400).order[0]
    assert "its beginning is shown" in page.inner_text("figcaption p")
    box = page.locator("canvas.track").bounding_box()
    page.mouse.move(box["x"] + LEFT + 2, box["y"] + TOP + 4)
    first = chosen(page)
    page.mouse.move(box["x"] + LEFT + 7, box["y"] + TOP + 4)  # a pass is wider than 4 pixels
    assert [first, chosen(page)] == [str(row[0]), str(row[1])]
    page.click("#zoom-all")
    wait_for_url(page, "w=")
    hash_before = url(page)
    page.reload()
    settled(page)
    assert url(page) == hash_before
    assert "its beginning" not in page.inner_text("figcaption p")
