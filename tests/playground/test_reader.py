"""Interaction in a browser: no click, key press, focus or input is lost."""

import re
from pathlib import Path
from typing import Any

import pytest
from playground.driving import (
    LEFT,
    PATIENCE_MS,
    RIGHT,
    ROW,
    TOP,
    load,
    numbers,
    settled,
    url,
    wait_for_url,
)

from megatron_vshape import Schedule, make, simulate

pytestmark = pytest.mark.browser


def typed(page: Any, field: str, value: str) -> None:
    """Type into a field and stay in it."""
    page.focus(f"#in-{field}")
    page.keyboard.press("Control+a")
    page.keyboard.type(value)


def focused(page: Any) -> str:
    return page.evaluate("document.activeElement.id")


def test_tab_after_a_number_leads_to_the_next(page, server):
    load(page, server, "d=4&m=8")
    typed(page, "devices", "5")
    page.keyboard.press("Tab")
    settled(page)
    assert focused(page) == "in-microbatches"
    page.keyboard.type("15")  # replaces the text, which Tab has selected
    page.keyboard.press("Tab")
    settled(page)
    wait_for_url(page, "d=5&m=15")
    assert focused(page) == "in-costs"
    page.keyboard.press("Shift+Tab")
    assert focused(page) == "in-microbatches"


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("#tab-compare", "tab=compare"),
        ("#entry-1", "a=1"),
        ("#remove-1", "s=v-half"),
        ("#add-entry", "s=v-half~v-min~1f1b"),
    ],
)
def test_a_click_right_after_a_number_counts(page, server, target, part):
    load(page, server, "d=4&m=8&s=v-half~v-min")
    typed(page, "devices", "5")
    page.hover(target)
    page.mouse.down()
    page.wait_for_timeout(120)  # as long as a finger needs
    page.mouse.up()
    wait_for_url(page, part)
    settled(page)
    assert "d=5" in url(page)
    assert page.input_value("#in-devices") == "5"
    assert page.inner_text("figcaption p >> nth=0").startswith("5 ranks")


def test_focus_stays_on_the_pressed_control(page, server):
    load(page, server, "d=4&m=16&s=v-half~v-min~v-zb")
    numbers_before = numbers(page)
    for target in ("#entry-1", "#add-entry", "#zoom-in", "#remove-0", "#tab-steps"):
        page.focus(target)
        page.keyboard.press("Enter")
        settled(page)
        assert focused(page) == target[1:]
    assert numbers(page) != numbers_before
    for step in (1, 3):
        page.focus(f"#step-{step}")
        page.keyboard.press("Space")
        wait_for_url(page, f"step={step}")
        settled(page)
        assert focused(page) == f"step-{step}"


def error_text(page: Any) -> str:
    """Return the error that the playground shows."""
    page.wait_for_selector('#status[data-wrong="true"]', timeout=PATIENCE_MS)
    return page.inner_text("#status p")


def test_busy_server_is_reported(page, server):
    page.route("**/api/make", lambda route: route.fulfill(status=503, body="Service Unavailable"))
    page.goto(f"{server}#d=4&m=8")
    assert error_text(page) == "The server answered 503. Try again in a moment."
    page.unroute("**/api/make")
    page.click("#status button")
    settled(page)
    assert numbers(page)


def test_interrupted_answer_is_reported(page, mortal_server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    process, url = mortal_server
    page.goto(f"{url}#d=8&m=24&c=1,1.15,0.85,0.05&s=plan:9:500")
    page.wait_for_selector("#status progress")
    process.kill()
    assert error_text(page) == "The answer broke off."
    page.click("#status button")
    page.wait_for_selector("#status p >> text=The server does not answer. Is it still running?")


@pytest.mark.parametrize(
    ("answer", "text"),
    [({"status": 500, "body": "no"}, "The server answered 500"), (None, "does not answer")],
)
def test_page_reports_why_it_cannot_start(page, server, answer, text):
    page.route("**/api/offers", lambda route: route.fulfill(**answer) if answer else route.abort())
    page.goto(server)
    assert text in error_text(page)


def test_invalid_state_clears_the_page(page, server):
    load(page, server, "tab=compare&d=4&m=8&s=v-half~v-min")
    typed(page, "devices", "0")
    page.keyboard.press("Tab")
    assert error_text(page) == "V-Half: 0 is outside 1 to 256"
    assert page.get_attribute("#in-devices", "aria-invalid") == "true"
    for element_id in ("lead", "numbers", "bar", "pictures", "share"):
        assert page.inner_text(f"#{element_id}") == ""
    typed(page, "devices", "3")
    page.keyboard.press("Tab")
    settled(page)
    assert len(page.query_selector_all("canvas.track")) == 2


def test_saved_file_is_the_shown_schedule(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    load(page, server, "d=4&m=8&s=v-min")
    page.evaluate("location.hash = 'd=8&m=24&c=1,1.15,0.85,0.05&s=plan:9:500'")
    page.wait_for_selector("#status progress")
    is_dimmed = "() => getComputedStyle(document.querySelector('#pictures')).opacity < 0.5"
    page.wait_for_function(is_dimmed, timeout=PATIENCE_MS)
    with page.expect_download() as download:
        page.click("#save-json")
    assert download.value.suggested_filename == "v-min-d4-m8.json"
    assert Schedule.from_json(Path(download.value.path()).read_text()) == make("v-min", 4, 8)
    page.click("#status button")
    assert page.inner_text("#pictures") == ""


def view(page: Any) -> list[float]:
    return page.evaluate("import('/static/page.js').then(({ view }) => [view.start, view.end])")


def test_selected_schedule_stays_selected(page, server, tmp_path):
    load(page, server, "d=4&m=8&s=v-half~v-min~v-zb~zb-h1~zb-h2&a=1")
    page.click("#add-entry")
    wait_for_url(page, "&a=5")
    page.click("#entry-2")
    wait_for_url(page, "&a=2")
    page.click("#remove-0")
    wait_for_url(page, "s=v-min~v-zb~zb-h1~zb-h2~1f1b&a=1")
    settled(page)
    assert page.inner_text("figcaption h2") == "V-ZB"
    page.click("#remove-2")
    wait_for_url(page, "s=v-min~v-zb~zb-h2~1f1b&a=1")
    for entry in (3, 2, 1):
        page.click(f"#remove-{entry}")
        settled(page)
    assert page.inner_text("figcaption h2") == "V-Min"
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text(make("1f1b", 2, 4).to_csv())
        page.set_input_files("#file", str(tmp_path / name))
        settled(page)
        wait_for_url(page, "x=")
        chosen = "document.querySelector('#in-schedule').selectedOptions[0].text"
        assert page.evaluate(chosen) == name


def test_only_the_first_button_drags(page, server):
    load(page, server, "d=4&m=8&w=10,30")
    box = page.locator("canvas.track").bounding_box()
    for button, moves in (("right", False), ("middle", False), ("left", True)):
        page.mouse.move(box["x"] + 500, box["y"] + 60)
        page.mouse.down(button=button)
        page.mouse.move(box["x"] + 400, box["y"] + 60, steps=4)
        page.mouse.up(button=button)
        page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
        assert (view(page) != [10, 30]) == moves
    view_before = view(page)
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    assert view(page) == view_before


def test_invalid_file_among_valid_ones_is_reported(page, server, tmp_path):
    bad, good = tmp_path / "bad.json", tmp_path / "good.csv"
    bad.write_text("{}")
    good.write_text(make("1f1b", 2, 4).to_csv())
    load(page, server, "d=4&m=8")
    page.set_input_files("#file", [str(bad), str(good)])
    page.wait_for_selector("figcaption p >> text=2 ranks, 4 microbatches")
    settled(page)
    assert page.inner_text("#wrong-file") == "bad.json: not a schedule or costs file."
    typed(page, "devices", "5")
    page.keyboard.press("Tab")
    settled(page)
    assert not page.query_selector("#wrong-file")


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
