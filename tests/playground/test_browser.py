"""The playground in a browser: controls, pictures, speed, and the state in the URL."""

from pathlib import Path
from typing import Any

import pytest
from playground.driving import (
    LEFT,
    PATIENCE_MS,
    RIGHT,
    ROW,
    TOP,
    canvas,
    fill,
    load,
    numbers,
    picture,
    pixels,
    settled,
    unreadable_texts,
    url,
    wait_for_other_url,
    wait_for_url,
)

from megatron_vshape import Costs, Schedule, Timeline, make, simulate
from megatron_vshape.core.check.simulate import unit_costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.playground.html import plain_facts, write_html
from megatron_vshape.view.names import shade

pytestmark = pytest.mark.browser


def x_of(time: float, timeline: Timeline, width: float) -> float:
    return LEFT + time / timeline.makespan * (width - LEFT - RIGHT)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["v-half", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_every_pass_and_every_bubble_is_drawn(page, server, name, theme):
    schedule = make(name, 4, 8)
    load(page, server, f"d=4&m=8&s={name}&t={theme}")
    check_drawn(page, simulate(schedule), is_dark=theme == "dark")


def check_drawn(page: Any, timeline: Timeline, *, is_dark: bool = False) -> None:
    """Check the color of every pass and bubble in a picture of four devices."""
    schedule = timeline.schedule
    width = canvas(page)["width"]
    chunks, count = chunks_of(schedule.placement), schedule.num_chunks
    points, expected, idle = [], [], []
    for device in range(4):
        idle_start = 0.0
        for work, start, end in timeline.slots(device):
            y = TOP + device * ROW
            x = x_of(start, timeline, width) + 2.5
            kinds = (Kind.B, Kind.W) if work.kind is Kind.BW else (work.kind,)
            for kind, offset in zip(kinds, (4, 20), strict=False):
                points.append((x, y + offset))
                expected.append(shade(kind, chunks[work.stage], count, is_dark=is_dark))
            left, right = (x_of(time, timeline, width) for time in (idle_start, start))
            if right - left > 4:  # a narrower one shares its pixels with its neighbours
                idle.append(((left + right) / 2, y + 12))
            idle_start = end
    assert pixels(page, points) == expected
    colours = {
        shade(kind, chunk, count, is_dark=is_dark) for kind in PARTS for chunk in range(count)
    }
    assert colours.isdisjoint(pixels(page, idle))
    assert len(idle) > 3


def test_a_plan_of_four_stages_a_device_is_drawn(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    from megatron_vshape.core.planner.search import plan

    costs = Costs.uniform(4, 16, 1, 1.15, 0.85, 0.05)
    schedule = plan(costs, 4, 8, 6).schedule
    assert schedule.num_chunks == 4
    load(page, server, "d=4&m=8&c=1,1.15,0.85,0.05&s=plan:6:&t=light")
    check_drawn(page, simulate(schedule, costs))
    assert page.inner_text("figcaption p").endswith("4 chunks per rank, looping")
    assert "swatches: chunk 0 left, chunk 3 right" in page.inner_text("#bar")
    assert len(page.query_selector_all(".legend svg")[0].query_selector_all("rect")) == 4
    file = "plan-within-6-chunks-d4-m8.json"
    assert page.inner_text("#command-train").startswith(f"--pipeline-schedule {file} ")
    assert page.inner_text("#command-recipe") == (
        "megatron-vshape plan --devices 4 --microbatches 8 --cost 1,1.15,0.85,0.05 "
        f"--memory-limit 6 --chunks 4 --export {file}"
    )
    with page.expect_download() as download:
        page.click("#save-json")
    assert download.value.suggested_filename == file
    assert Schedule.from_json(Path(download.value.path()).read_text()) == schedule


def test_every_control_changes_the_numbers_or_the_picture(page, server):
    load(page, server, "d=4&m=8")
    shown_numbers = [numbers(page)]

    def check_changed() -> None:
        settled(page)
        assert numbers(page) != shown_numbers[-1]
        shown_numbers.append(numbers(page))

    for field, value in (
        ("devices", "5"),
        ("microbatches", "12"),
        ("forward", "1.25"),
        ("backward", "1,5"),
        ("weight", "0.75"),
        ("send", "0.1"),
        ("embedding_forward", "0.5"),
        ("embedding_backward", "0.4"),
        ("embedding_weight", "1.5"),
        ("head_forward", "1.5"),
        ("head_backward", "2.5"),
        ("head_weight", "3.5"),
    ):
        fill(page, field, value)
        check_changed()
    fill(page, "gib", "0.5")
    assert "GiB" in page.inner_text("#numbers")
    page.select_option("#in-unit", "ms")
    settled(page)
    assert "ms;" in page.inner_text("#numbers")
    page.select_option("#in-costs", "zb-1.5b")
    check_changed()
    page.select_option("#in-costs", "unit")
    check_changed()
    page.select_option("#in-schedule", "grouped-interleaved-1f1b")
    check_changed()
    fill(page, "chunks", "3")
    check_changed()
    wait_for_url(page, "grouped-interleaved-1f1b:c3")


def test_files_are_opened(page, server, tmp_path):
    load(page, server, "d=4&m=8")
    costs = Costs.of(
        (900.0,) * 8, (1000.0,) * 8, (800.0,) * 8, 40.0, (2.0**30,) * 8, (2.0**29,) * 8
    )
    (tmp_path / "costs.json").write_text(costs.to_json())
    page.set_input_files("#file", str(tmp_path / "costs.json"))
    settled(page)
    assert "GiB" in numbers(page)["Peak memory"]
    opened_file = tmp_path / "own.csv"
    opened_file.write_text(make("zb-h1", 3, 4).to_csv())
    page.select_option("#in-costs", "unit")
    settled(page)
    page.set_input_files("#file", str(opened_file))
    settled(page)
    assert page.inner_text("figcaption p").startswith("3 ranks, 4 microbatches")
    load(page, server, url(page)[1:])
    assert page.inner_text("figcaption p").startswith("3 ranks, 4 microbatches")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("devices", "0", "0 is outside 1 to 256"),
        ("microbatches", "16000", "the page draws up to"),
        ("forward", "-1", "-1 is too small"),
        ("head_weight", "x", "enter a number of at least 0"),
    ],
)
def test_invalid_input_marks_its_field_with_the_reason(page, server, field, value, message):
    state = "d=256&m=8" if value == "16000" else "d=4&m=8"
    load(page, server, state)
    fill(page, field, value)
    page.wait_for_selector(f"#wrong-{field}")
    assert message in page.inner_text(f"#wrong-{field}")
    assert page.get_attribute(f"#in-{field}", "aria-invalid") == "true"
    assert page.get_attribute(f"#in-{field}", "aria-describedby") == f"wrong-{field}"
    fill(page, field, "2")
    settled(page)
    assert page.query_selector("[aria-invalid]") is None


def test_hover_names_the_pass_and_click_follows_its_microbatch(page, server):
    timeline = simulate(make("v-half", 4, 8))
    load(page, server, "d=4&m=8")
    box = canvas(page)
    slot = list(timeline.slots(2))[5]
    x = box["x"] + x_of((slot.start + slot.end) / 2, timeline, box["width"])
    y = box["y"] + TOP + 2 * ROW + 10
    page.mouse.move(x, y)
    tooltip = page.inner_text("#tip")
    assert tooltip.startswith(str(slot.work))
    assert f"microbatch {slot.work.microbatch}" in tooltip
    assert "waited for" in tooltip
    assert "activation memory" in tooltip
    page.mouse.click(x, y)
    wait_for_url(page, f"f={slot.work.microbatch}")
    assert f"Following microbatch {slot.work.microbatch}" in page.inner_text("#bar")
    page.mouse.click(x, y)
    wait_for_url(page, "f=", is_present=False)


def test_by_keyboard_alone(page, server):
    load(page, server, "d=4&m=8")
    page.focus("canvas.track")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("p.unseen").startswith("F0.1: forward of microbatch 1")
    page.keyboard.press("ArrowDown")
    assert "rank 1" in page.inner_text("p.unseen")
    page.keyboard.press("Enter")
    wait_for_url(page, "f=")
    page.keyboard.press("Escape")
    wait_for_url(page, "f=", is_present=False)
    page.keyboard.press("+")
    wait_for_url(page, "w=")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("0")
    wait_for_url(page, "w=", is_present=False)
    page.focus("#tab-timeline")
    page.keyboard.press("ArrowRight")
    settled(page)
    wait_for_url(page, "tab=steps")
    assert page.evaluate("document.activeElement.id") == "tab-steps"


def test_zoom_pan_and_wheel(page, server):
    load(page, server, "d=4&m=8")
    for label in ("Zoom in", "Later", "Zoom in", "Earlier", "Zoom out"):
        hash_before = url(page)
        page.click(f'button[aria-label="{label}"]')
        wait_for_other_url(page, hash_before)
    page.click('button[aria-label="Show all of it"]')
    wait_for_url(page, "w=", is_present=False)
    box = canvas(page)
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    wait_for_url(page, "w=")
    zoomed = url(page)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    page.mouse.up()
    wait_for_other_url(page, zoomed)


def test_the_four_steps(page, server):
    load(page, server, "tab=steps&d=4&m=8")
    headings = [heading.inner_text() for heading in page.query_selector_all("figcaption h2")]
    assert headings == ["1 Building block", "2 Repeated", "3 Squeezed", "4 Reordered"]
    for step, name in enumerate(("1 Block", "2 Repeat", "3 Squeeze", "4 Reorder"), 1):
        page.click(f"#lead >> text={name}")
        wait_for_url(page, f"step={step}")
        settled(page)
        assert len(page.query_selector_all("canvas.track")) == 1
    assert numbers(page)["Makespan"] == f"{simulate(make('v-half', 4, 8)).makespan:g}"
    page.click("#lead >> text=Play")
    for step in (1, 2, 3, 4):
        wait_for_url(page, f"step={step}")


def test_first_page_compares_v_half_with_1f1b(page, server):
    load(page, server)
    assert page.get_attribute("#tabs button >> nth=0", "id") == "tab-compare"
    assert page.get_attribute("#tab-compare", "aria-selected") == "true"
    rows = [row.inner_text().split("\t")[0] for row in page.query_selector_all(".facts tbody tr")]
    assert rows == ["V-Half", "1F1B"]
    page.set_viewport_size({"width": 1280, "height": 900})
    second = canvas(page, 1)
    assert second["y"] + TOP + 4 * ROW < 900  # both are visible without scrolling


def test_compare_up_to_six(page, server):
    load(page, server, "tab=compare&d=4&m=8&s=v-half")
    for count in range(2, 7):
        page.click("text=+ Add to compare")
        settled(page)
        assert len(page.query_selector_all("canvas.track")) == count
        assert len(page.query_selector_all(".facts tbody tr")) == count
    assert not page.query_selector_all("text=+ Add to compare")
    page.click('.entry button[aria-label^="Remove"]')
    settled(page)
    assert len(page.query_selector_all("canvas.track")) == 5


def test_a_long_plan_shows_progress_and_can_be_cancelled(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    load(page, server, "d=4&m=8")
    page.select_option("#in-schedule", "plan")
    settled(page)
    assert numbers(page)["Gap"].endswith("%")
    page.goto("about:blank")
    page.goto(f"{server}#d=8&m=24&c=1,1.15,0.85,0.05&s=plan:9:500")
    page.wait_for_selector("#status progress")
    progress_shown = (
        "() => /^Planning.*best .*bound /.test(document.querySelector('#status').innerText)"
    )
    page.wait_for_function(progress_shown, timeout=PATIENCE_MS)
    page.click("#status >> text=Cancel")
    assert "Cancelled" in page.inner_text("#status")
    page.select_option("#in-schedule", "v-min")
    settled(page)
    assert page.inner_text("figcaption h2") == "V-Min"


def test_url_restores_the_complete_state(page, server):
    state = (
        "tab=timeline&d=4&m=12&c=1,1.15,0.85,0.05&u=ms&e=0.5,0,0,1&h=0,1,0,0&gib=0.25"
        "&s=v-min~zb-h1~interleaved-1f1b:c3&a=2&f=3&w=10,40&t=dark"
    )
    load(page, server, state)
    shown = (url(page), numbers(page), picture(page))
    expected = dict(pair.split("=") for pair in state.split("&"))
    assert dict(pair.split("=") for pair in shown[0][1:].split("&")) == expected
    second_page = page.context.new_page()
    load(second_page, server, shown[0][1:])
    assert (url(second_page), numbers(second_page), picture(second_page)) == shown
    second_page.close()


@pytest.mark.parametrize("tab", ["timeline", "steps", "compare"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_layout_fits_narrow_and_wide_windows_in_both_themes(page, server, tab, theme):
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        load(page, server, f"tab={tab}&d=4&m=8&s=v-half~v-min&t={theme}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
        fold = page.locator("#controls").bounding_box()
        assert width > 860 or fold["height"] < 90  # folded, it leaves the place to the picture
        small = page.evaluate("""() => [...document.querySelectorAll("button, a, input, select")]
            .filter((each) => each.offsetParent && each.getBoundingClientRect().height < 15)
            .map((each) => each.outerHTML)""")
        assert not small
    page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_are_readable(page, server, theme):
    load(page, server, f"d=4&m=8&s=v-half~v-min&t={theme}&f=2")
    assert unreadable_texts(page) == []


def test_html_file_works_without_a_server(page, tmp_path):
    schedule = make("v-half", 4, 8)
    path = tmp_path / "page.html"
    timeline = simulate(schedule)
    write_html(path, timeline, unit_costs(schedule), plain_facts(timeline))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    settled(page)
    assert numbers(page)["Makespan"] == f"{simulate(schedule).makespan:g}"
    assert page.inner_text("#tabs").split("\n") == ["Timeline", "Four steps"]
    page.click("#tab-steps")
    settled(page)
    assert len(page.query_selector_all("canvas.track")) == 4
    page.click("#tab-timeline")
    settled(page)
    with page.expect_download() as download:
        page.click("#save-json")
    assert Schedule.from_json(Path(download.value.path()).read_text()) == schedule
    external_requests = [
        request for request in requests if not request.startswith(("file:", "blob:", "data:"))
    ]
    assert not external_requests


def test_invalid_urls_do_not_break_the_page(page, server):
    for state in (
        "d=&m=x&s=~~&a=99&w=1&f=-5&x=%00&t=pink&tab=none&c=1,2",
        "s=plan:&a=-1",
        "s=@7~!no",
    ):
        page.goto("about:blank")
        page.goto(f"{server}#{state}")
        page.wait_for_timeout(600)
        assert page.query_selector("#in-schedule")
