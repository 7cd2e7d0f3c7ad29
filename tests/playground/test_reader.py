"""The page in a browser, as readers use it: no click, key, focus or word of theirs is lost."""

import re
from pathlib import Path
from typing import Any

import pytest
from playground.driving import (
    PATIENCE_MS,
    ROW,
    TOP,
    load,
    numbers,
    picture,
    settled,
    url,
    wait_for_url,
)

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.view.chrome_trace import write_trace

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
    page.keyboard.type("15")  # in place of what is there, which Tab has selected
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
        ("#block", "b=0"),
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
    assert page.inner_text("figcaption p >> nth=0").startswith("5 devices")


def test_a_choice_from_a_list_is_shown_at_once(page, server):
    load(page, server, "d=4&m=8")
    page.hover("#in-costs")
    page.mouse.down()  # the list that opens has the release
    page.evaluate("""() => {
      const list = document.querySelector("#in-costs");
      list.value = "zb-1.5b";
      list.dispatchEvent(new Event("change"));
    }""")
    settled(page)
    wait_for_url(page, "u=ms")
    assert "ms" in page.inner_text("#numbers")
    page.mouse.up()


def test_the_focus_stays_on_what_was_pressed(page, server):
    load(page, server, "d=4&m=16&s=v-half~v-min~v-zb")
    before = numbers(page)
    for target in ("#entry-1", "#block", "#add-entry", "#zoom-in", "#remove-0", "#tab-steps"):
        page.focus(target)
        page.keyboard.press("Enter")
        settled(page)
        assert focused(page) == target[1:]
    assert numbers(page) != before
    for step in (1, 3):
        page.focus(f"#step-{step}")
        page.keyboard.press("Space")
        wait_for_url(page, f"step={step}")
        settled(page)
        assert focused(page) == f"step-{step}"


def test_the_focus_stays_on_a_point_of_the_frontier(page, server):
    load(page, server, "tab=frontier&d=4&m=8")
    page.focus('.point[data-name="zb-h1"]')
    page.keyboard.press("Enter")
    settled(page)
    assert page.inner_text("figcaption h2") == "ZB-H1"
    assert focused(page) == "point-ZB-H1"


def test_the_focus_goes_to_what_is_left(page, server):
    load(page, server, "d=4&m=8&s=v-half~v-min&f=3")
    page.focus("#let-go")
    page.keyboard.press("Enter")
    wait_for_url(page, "f=", there=False)
    assert focused(page) == "earlier"
    page.focus("#remove-1")
    page.keyboard.press("Enter")
    settled(page)
    assert focused(page) == "entry-0"


LINES = """() => {
  const { lineTo } = CanvasRenderingContext2D.prototype;
  window.lines = [];
  CanvasRenderingContext2D.prototype.lineTo = function (x, y) {
    window.lines.push([this.strokeStyle, y]);
    lineTo.call(this, x, y);
  };
}"""


@pytest.mark.parametrize(("limit", "count"), [(6, 4), (60, 0)])
def test_the_limit_is_drawn_in_its_own_rows_alone(page, server, limit, count):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    page.add_init_script(f"({LINES})()")
    load(page, server, f"d=4&m=8&c=1,1.15,0.85,0.05&s=plan:{limit}:makespan:1&t=light")
    found = page.evaluate("window.lines.filter(([colour]) => colour === '#b3001b')")
    assert len({y for _, y in found}) == count
    assert all(y > TOP + 4 * ROW for _, y in found)


def test_a_microbatch_that_is_not_there_has_no_path(page, server):
    load(page, server, "d=4&m=8&f=9&b=0")
    shown = picture(page)
    load(page, server, "d=4&m=8&b=0")
    assert picture(page) == shown
    load(page, server, "d=4&m=8&f=7")
    typed(page, "microbatches", "6")
    page.keyboard.press("Tab")
    settled(page)
    wait_for_url(page, "f=", there=False)
    assert "Following" not in page.inner_text("#bar")


def said(page: Any) -> str:
    """Return what the page says went wrong."""
    page.wait_for_selector('#status[data-wrong="true"]', timeout=PATIENCE_MS)
    return page.inner_text("#status p")


def test_a_server_that_is_too_busy_is_told(page, server):
    page.route("**/api/make", lambda route: route.fulfill(status=503, body="Service Unavailable"))
    page.goto(f"{server}#d=4&m=8")
    assert said(page) == "The server answered 503. Try again in a moment."
    page.unroute("**/api/make")
    page.click("#status button")
    settled(page)
    assert numbers(page)


def test_an_answer_that_breaks_off_is_told(page, mortal_server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    process, url = mortal_server
    page.goto(f"{url}#d=8&m=24&c=1,1.15,0.85,0.05&s=plan:9:makespan:500")
    page.wait_for_selector("#status progress")
    process.kill()
    assert said(page) == "The answer broke off."
    page.click("#status button")
    page.wait_for_selector("#status p >> text=The server does not answer. Is it still running?")


@pytest.mark.parametrize(
    ("answer", "text"),
    [({"status": 500, "body": "no"}, "The server answered 500"), (None, "does not answer")],
)
def test_a_page_that_cannot_begin_says_why(page, server, answer, text):
    page.route("**/api/offers", lambda route: route.fulfill(**answer) if answer else route.abort())
    page.goto(server)
    assert text in said(page)


def test_a_fault_of_the_page_is_told_and_stays_in_the_console(browser, server):
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route("**/api/make", lambda route: route.fulfill(body=b"R\x02\x00\x00\x00no"))
    page.goto(f"{server}#d=4&m=8")
    assert said(page)
    page.wait_for_timeout(100)
    assert errors
    page.close()


def test_the_steps_are_in_passes_whatever_the_costs_are_in(page, server):
    load(page, server, "tab=steps&step=4&d=4&m=8&c=9,9,5,0.6&u=ms")
    assert page.inner_text("#numbers").count("passes; busiest works 48") == 1
    assert "ms" not in page.inner_text("#numbers")


def test_what_a_plan_has_found_has_the_unit_of_its_costs(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    key = "!0-measured_costs.json"
    page.goto(f"{server}#d=4&m=24&costs={key}&s=plan:5GiB:makespan:500")
    test = "() => / best .* bound /.test(document.querySelector('#status').innerText)"
    page.wait_for_function(test, timeout=PATIENCE_MS)
    found = re.search(r"best ([\d.,]+) +bound ([\d.,]+) ms", page.inner_text("#status p"))
    assert 24 * 2 * 2.7 <= float(found[1]) < 200  # F, B and W of two chunks take 5.4 ms
    page.click("#status button")


def test_what_a_pass_waited_for_has_a_unit(page, server):
    load(page, server, "d=4&m=8&c=9,9,5,0.6&u=ms")
    page.focus("canvas.track")
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert "waited for F0.0 from device 0, there at 9.6 ms" in page.inner_text("#tip")


def test_nothing_stays_that_another_state_stood_for(page, server):
    load(page, server, "tab=compare&d=4&m=8&s=v-half~v-min")
    typed(page, "devices", "0")
    page.keyboard.press("Tab")
    assert said(page) == "V-Half: 0 is outside 1 to 256"
    assert page.get_attribute("#in-devices", "aria-invalid") == "true"
    for place in ("lead", "numbers", "bar", "pictures", "share"):
        assert page.inner_text(f"#{place}") == ""
    typed(page, "devices", "3")
    page.keyboard.press("Tab")
    settled(page)
    assert len(page.query_selector_all("canvas.track")) == 2


def test_what_is_saved_is_what_is_shown(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    load(page, server, "d=4&m=8&s=v-min")
    page.evaluate("location.hash = 'd=8&m=24&c=1,1.15,0.85,0.05&s=plan:9:makespan:500'")
    page.wait_for_selector("#status progress")
    dimmed = "() => getComputedStyle(document.querySelector('#pictures')).opacity < 0.5"
    page.wait_for_function(dimmed, timeout=PATIENCE_MS)
    with page.expect_download() as download:
        page.click("#save-json")
    assert download.value.suggested_filename == "v-min-d4-m8.json"
    assert Schedule.from_json(Path(download.value.path()).read_text()) == make("v-min", 4, 8)
    page.click("#status button")
    assert page.inner_text("#pictures") == ""


def test_compare_says_which_schedule_failed_and_shows_the_others(page, server):
    for active, marked in ((0, 0), (1, 1)):
        page.goto("about:blank")
        page.goto(f"{server}#tab=compare&d=4&m=8&s=v-half~interleaved-1f1b:c129&a={active}")
        assert said(page) == "Interleaved-1F1B: 129 is outside 1 to 128"
        page.wait_for_selector('#stage[aria-busy="false"]')
        assert len(page.query_selector_all("[aria-invalid]")) == marked
        assert len(page.query_selector_all("canvas.track")) == 1


def view(page: Any) -> list[float]:
    return page.evaluate("import('/static/page.js').then(({ view }) => [view.start, view.end])")


def test_back_leads_to_the_state_before_a_pasted_address(page, server):
    load(page, server, "d=5&m=8")
    typed(page, "microbatches", "10")
    page.keyboard.press("Tab")
    wait_for_url(page, "d=5&m=10")
    page.evaluate("location.hash = 'd=4&m=8'")
    page.wait_for_selector("figcaption p >> text=4 devices, 8 microbatches")
    page.go_back()
    page.wait_for_selector("figcaption p >> text=5 devices, 10 microbatches")


def test_the_last_state_is_in_the_address_however_long_an_earlier_one_takes(page, server):
    load(page, server, "d=4&m=8")
    page.evaluate("""async () => {
      const { change } = await import("/static/page.js");
      const text = Array.from({ length: 300_000 }, Math.random).join();
      change({ entries: [{ source: "file", file: { name: "long.json", text } }] });
      change({ entries: [{ source: "name", name: "v-min" }] });
    }""")
    wait_for_url(page, "s=v-min")
    page.wait_for_timeout(1500)
    assert "s=v-min" in url(page)


def test_a_step_shows_the_stretch_that_the_address_says(page, server):
    load(page, server, "tab=steps&step=1&d=4&m=8&w=6,20")
    assert view(page) == [6, 20]
    longest = simulate(make("v-half", 4, 8)).makespan
    load(page, server, "tab=steps&step=4&d=4&m=8")
    assert view(page)[1] > longest


def test_a_zoom_is_not_that_of_the_next_tab(page, server):
    load(page, server, "d=4&m=8&s=v-half~v-min")
    page.evaluate("""() => {
      document.querySelector("#zoom-in").click();
      document.querySelector("#tab-compare").click();
    }""")
    wait_for_url(page, "tab=compare")
    assert "w=" not in url(page)
    page.click("#zoom-in")
    wait_for_url(page, "w=")


def test_files_of_any_name_are_in_the_address(page, server):
    load(page, server)
    found = page.evaluate("""async () => {
      const { firstState, readState, writeState } = await import("/static/state.js");
      const keys = ["0-a~b%7E%25é.json", "1-100 %.csv"];
      const entries = keys.map((key) => ({ source: "file", file: { key } }));
      const given = { ...firstState(), entries, costsFile: { key: keys[0] } };
      const state = await readState((await writeState(given)).text);
      return JSON.stringify(state) === JSON.stringify(given);
    }""")
    assert found


def test_a_plan_goes_on_in_chunks_without_its_costs_file(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    load(page, server, "d=4&m=8&costs=!0-measured_costs.json&s=plan:5GiB:makespan:1")
    page.select_option("#in-costs", "own")
    settled(page)
    assert page.inner_text(".entry") == "Plan ≤ 6 chunks"


def test_the_chosen_schedule_stays_chosen(page, server, tmp_path):
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
    for at in (3, 2, 1):
        page.click(f"#remove-{at}")
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
    seen = view(page)
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    assert view(page) == seen


def test_a_drag_whose_end_was_elsewhere_is_over(page, server):
    load(page, server, "d=4&m=8&w=10,30")
    page.evaluate("""() => {
      const canvas = document.querySelector("canvas.track");
      const { left, top } = canvas.getBoundingClientRect();
      const send = (type, x, buttons) => canvas.dispatchEvent(new PointerEvent(type,
        { pointerType: "mouse", clientX: left + x, clientY: top + 60, buttons, bubbles: true }));
      send("pointerdown", 500, 1);
      for (const x of [400, 300]) send("pointermove", x, 0);
    }""")
    assert view(page) == [10, 30]


def test_the_block_s_repeat_comes_back_from_a_followed_microbatch(page, server):
    load(page, server, "d=4&m=16&f=3")
    assert page.get_attribute("#block", "aria-pressed") == "false"
    page.click("#block")
    assert page.get_attribute("#block", "aria-pressed") == "true"
    wait_for_url(page, "f=", there=False)
    assert "b=0" not in url(page)


def test_answers_are_kept_by_their_size_not_their_number(page, server):
    load(page, server, "d=2&m=2")
    asked = page.evaluate("""async () => {
      const { makeAnswer } = await import("/static/api.js");
      const { timelineRequest } = await import("/static/asking.js");
      const request = timelineRequest({ source: "name", name: "1f1b" });
      const { fetch } = window;
      let asked = 0;
      window.fetch = (path, how) => {
        asked += 1;
        return fetch(path, how);
      };
      for (let round = 0; round < 2; round++) {
        for (let microbatches = 1; microbatches < 16; microbatches++) {
          await makeAnswer({ ...request, microbatches });
        }
      }
      return asked;
    }""")
    assert asked == 15


def saved_svg(page: Any) -> str:
    with page.expect_download() as download:
        page.click("#save-svg")
    return Path(download.value.path()).read_text()


def test_the_svg_has_the_limit_and_what_is_held(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    load(page, server, "d=4&m=8&c=1,1.15,0.85,0.05&s=plan:6:makespan:1")
    svg = saved_svg(page)
    assert svg.count('class="limit"') == 4
    assert "Activations held</tspan>  peak 6 chunks, limit 6</text>" in svg
    assert svg.count(">6</text>") >= 1


def test_the_svg_marks_what_was_late(page, server, tmp_path):
    timeline = simulate(make("1f1b", 2, 4))
    ends = [list(row) for row in timeline.ends]
    ends[1][-1] += 3
    path = tmp_path / "late.json"
    with path.open("w") as stream:
        write_trace(Timeline(timeline.schedule, timeline.starts, tuple(map(tuple, ends))), stream)
    load(page, server, "tab=measured")
    page.set_input_files("#trace-file", str(path))
    settled(page)
    marks = re.findall(r'class="late"[^>]* d="([^"]*)"', saved_svg(page))
    assert [each.count("M") for each in marks] == [2]


def test_a_picture_too_large_for_a_png_is_told(page, server):
    load(page, server, "d=4&m=8")
    page.evaluate("() => { HTMLCanvasElement.prototype.toBlob = (done) => done(null); }")
    page.click("#save-png")
    assert said(page) == "The picture is too large for a PNG; take the SVG."


def test_a_bad_file_among_good_ones_is_told(page, server, tmp_path):
    bad, good = tmp_path / "bad.json", tmp_path / "good.csv"
    bad.write_text("{}")
    good.write_text(make("1f1b", 2, 4).to_csv())
    load(page, server, "d=4&m=8")
    page.set_input_files("#file", [str(bad), str(good)])
    page.wait_for_selector("figcaption p >> text=2 devices, 4 microbatches")
    settled(page)
    assert page.inner_text("#wrong-file") == "bad.json: no schedule, no costs and no trace."
    typed(page, "devices", "5")
    page.keyboard.press("Tab")
    settled(page)
    assert not page.query_selector("#wrong-file")


def test_the_seconds_that_a_plan_takes_are_not_read_out(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    page.goto(f"{server}#d=8&m=24&c=1,1.15,0.85,0.05&s=plan:9:makespan:500")
    page.wait_for_selector("#status span")
    assert re.fullmatch(r"[\d.]+ s", page.inner_text('#status span[aria-hidden="true"]'))
    assert not re.search(r"\d s\b", page.inner_text("#status p"))
    page.click("#status button")


def test_why_no_command_makes_a_plan_is_said(page, server):
    pytest.importorskip("numba", reason="without numba a plan takes minutes")
    load(page, server, "d=4&m=8&h=0.5,0.5,0.5,1&s=plan:6:makespan:1")
    assert not page.query_selector("#command-recipe")
    assert "No command makes this plan" in page.inner_text("#share")
