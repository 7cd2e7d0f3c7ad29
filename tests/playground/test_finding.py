"""Finding a pass, measuring a stretch of time, and going back, on the page."""

import re

import pytest
from playground.driving import LEFT, RIGHT, ROW, TOP, load, settled, url, wait_for_url

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.paper.catalogue import make

pytestmark = pytest.mark.browser


def chosen(page):
    """Return the name of the pass that is told of."""
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
    for nothing in ("F9.1", "F0.60", "X", "3"):
        find(page, nothing)
        assert page.get_attribute("#find", "aria-invalid") == "true"
        assert page.inner_text('#missed[role="status"]').startswith(f"There is no pass {nothing}:")
    assert chosen(page) == "W3.41"
    find(page, "F0.5")
    assert page.inner_text("#missed") == ""
    load(page, server, "d=4&m=8&s=1f1b")
    find(page, "B2.3")
    assert chosen(page) == "BW2.3"


def test_a_key_leads_to_the_search(page, server):
    load(page, server, "d=4&m=8")
    page.focus("canvas.track")
    page.keyboard.press("/")
    page.keyboard.type("F1.2")
    page.keyboard.press("Enter")
    assert chosen(page) == "F1.2"


def test_the_chosen_pass_stays_where_it_is_under_a_zoom(page, server):
    load(page, server, "d=4&m=60")
    find(page, "F0.5")
    page.focus("canvas.track")
    place = page.locator("#tip").bounding_box()["x"]
    for key in ("+", "+", "-"):
        page.keyboard.press(key)
        page.wait_for_timeout(60)
        assert chosen(page) == "F0.5"
        assert page.is_visible("#tip")
        assert abs(page.locator("#tip").bounding_box()["x"] - place) < 60
    page.focus("#zoom-in")  # the picture loses the focus, not the choice
    page.keyboard.press("Enter")
    page.focus("canvas.track")
    page.keyboard.press("ArrowRight")
    row = [str(work) for work in make("v-half", 4, 60).order[0]]
    assert chosen(page) == row[row.index("F0.5") + 1]


def measured(page):
    page.wait_for_selector("#range p")
    return page.inner_text("#range")


def test_a_stretch_is_measured_with_the_mouse(page, server):
    timeline = simulate(make("v-half", 4, 8))
    load(page, server, "d=4&m=8")
    box = page.locator("canvas.track").bounding_box()
    scale = (box["width"] - LEFT - RIGHT) / timeline.makespan
    at = [box["x"] + LEFT + time * scale for time in (10, 25)]
    page.keyboard.down("Shift")
    page.mouse.move(at[1], box["y"] + TOP + ROW)
    page.mouse.down()
    page.mouse.move(at[0] + 40, box["y"] + TOP + ROW)
    assert measured(page)  # while it is drawn
    page.mouse.move(at[0], box["y"] + TOP + ROW)
    page.mouse.up()
    page.keyboard.up("Shift")
    wait_for_url(page, "r=")
    found = re.search(r"r=([\d.]+),([\d.]+)", url(page))
    assert [float(each) for each in found.groups()] == pytest.approx([10, 25], abs=0.2)
    load(page, server, "d=4&m=8&r=10,25")
    work = {"F": 0.0, "B": 0.0, "W": 0.0}
    for device in range(4):
        for kind_of, start, end in timeline.slots(device):
            work[str(kind_of.kind)] += max(0.0, min(end, 25) - max(start, 10))
    shares = [100 * each / 60 for each in work.values()]
    idle = 100 - sum(shares)
    assert measured(page) == (
        "15 passes, from 10 to 25. Of the devices' time: "
        f"idle {idle:.1f} %, forward {shares[0]:.1f} %, input gradient {shares[1]:.1f} %, "
        f"weight gradient {shares[2]:.1f} %."
    )
    page.click("#no-range")
    wait_for_url(page, "r=", there=False)
    assert page.inner_text("#range") == ""


def test_a_stretch_is_measured_by_keyboard(page, server):
    load(page, server, "d=4&m=8")
    find(page, "F0.1")
    page.focus("canvas.track")
    page.keyboard.press("m")
    assert measured(page).startswith("1 passes, from 1 to 2.")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("m")
    assert measured(page).startswith("3 passes, from 1 to 4.")
    page.keyboard.press("Escape")
    wait_for_url(page, "r=", there=False)


def test_back_leads_from_state_to_state(page, server):
    load(page, server, "d=4&m=8")
    page.select_option("#in-schedule", "v-min")
    settled(page)
    wait_for_url(page, "s=v-min")
    page.click("#tab-compare")
    settled(page)
    wait_for_url(page, "tab=compare")
    page.click("#zoom-in")  # is no state of its own
    wait_for_url(page, "w=")
    page.go_back()
    wait_for_url(page, "tab=compare", there=False)
    settled(page)
    assert page.inner_text("figcaption h2") == "V-Min"
    page.go_back()
    wait_for_url(page, "v-min", there=False)
    settled(page)
    assert page.inner_text("figcaption h2") == "V-Half"
    page.go_forward()
    wait_for_url(page, "s=v-min")
    settled(page)
    assert page.inner_text("figcaption h2") == "V-Min"


def test_the_legend_names_what_is_drawn(page, server):
    load(page, server, "d=4&m=8&s=1f1b")
    assert "whole backward" in page.inner_text(".legend")
    assert "gradient" not in page.inner_text(".legend")
    load(page, server, "d=4&m=8&s=v-half")
    assert "whole backward" not in page.inner_text(".legend")
    assert "weight gradient" in page.inner_text(".legend")


def test_nothing_is_cut_off_at_400_pixels(page, server):
    page.set_viewport_size({"width": 400, "height": 844})
    cut = """() => [...document.querySelectorAll("button, h1, h2, figcaption p, .legend span")]
        .filter((each) => each.offsetParent)
        .filter((each) => each.scrollWidth > each.clientWidth + 1 ||
                each.scrollHeight > each.clientHeight + 3 ||
                each.getBoundingClientRect().right > innerWidth)
        .filter((each) => getComputedStyle(each).display !== "inline")
        .map((each) => each.outerHTML)"""
    for state in ("d=4&m=8&f=2&r=1,5", "tab=steps&d=4&m=8", "tab=frontier&d=4&m=8"):
        load(page, server, state)
        assert page.evaluate(cut) == []
    page.set_viewport_size({"width": 1280, "height": 900})


def test_a_large_schedule_opens_on_a_part_that_can_be_read(page, server):
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
    before = url(page)
    page.reload()
    settled(page)
    assert url(page) == before
    assert "its beginning" not in page.inner_text("figcaption p")


def test_tabs_open_with_an_example_and_say_what_they_show(page, server):
    load(page, server, "d=4&m=8")
    assert "Every row is a device" in page.inner_text("#about")
    page.click("#tab-compare")
    settled(page)
    assert page.locator("figcaption h2").all_inner_texts() == ["V-Half", "1F1B"]
    page.click("#tab-measured")
    settled(page)
    assert "An example" in page.inner_text("#lead")
    assert page.locator("figcaption h2").all_inner_texts() == ["Planned", "Measured"]


CHART = """async () => {
  const { drawChart } = await import("/static/chart.js");
  const units = { heldDivisor: 1, heldName: "chunks", held: String };
  const points = [
    { source: "name", name: "v-min", title: "V-Min", peak: 8, makespan: 115 },
    { source: "name", name: "v-zb", title: "V-ZB", peak: 16, makespan: 100 },
    { source: "plan", limit: 2, peak: 2, makespan: 400 },
    { source: "plan", limit: 12, peak: 12, makespan: 101 },
  ];
  const how = { width: 900, units, chosen: () => false, choose() {} };
  return [...drawChart(points, how).querySelectorAll("text")].map((each) => each.textContent);
}"""


def test_the_frontier_is_scaled_to_what_is_published(page, server):
    load(page, server, "d=4&m=8")
    texts = page.evaluate(CHART)
    assert max(float(each[:-2]) for each in texts if re.fullmatch(r"[\d.]+ %", each)) == 15
    assert [each for each in texts if "↑" in each] == ["↑ 300.0 %"]  # the plan in little memory
