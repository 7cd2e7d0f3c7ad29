"""The playground as one HTML file: complete, with a security policy, and without requests."""

import base64
import hashlib
import json
import re
import zlib

import pytest
from playground.answers import read_payload

from megatron_vshape import Schedule, ScheduleError, make, simulate
from megatron_vshape.cli.main import main
from megatron_vshape.core.check.simulate import unit_costs
from megatron_vshape.playground import html
from megatron_vshape.playground.html import static_files


def text_of(schedule: Schedule) -> str:
    timeline = simulate(schedule)
    return html.html_text(timeline, unit_costs(schedule), html.plain_facts(timeline))


def data_in(page: str) -> dict:
    match = re.search(r'id="embedded">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def tabs_in(page: str) -> list[str]:
    return [tab["name"] for tab in data_in(page)["offers"]["tabs"]]


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def test_html_file_contains_the_timeline(tmp_path, capsys):
    schedule, path = make("v-half", 4, 8), tmp_path / "v-half.html"
    command = ["schedule", "v-half", "--devices", "4", "--microbatches", "8", "--html"]
    assert main([*command, str(path)]) == 0
    page = path.read_text(encoding="utf-8")
    data = data_in(page)
    assert tabs_in(page) == ["timeline", "steps"]  # the others need a server
    _, (header,) = read_payload(unpacked(data["answers"]["timeline"]))
    assert header["counts"] == [len(row) for row in schedule.order]
    assert Schedule.from_json(unpacked(data["texts"]["schedule-file"]).decode()) == schedule
    assert len(json.loads(unpacked(data["texts"]["trace-file"]))["traceEvents"]) > 3 * 8 * 8
    assert header["facts"]["base_peak"] == 8
    _, steps = read_payload(unpacked(data["answers"]["steps"]))
    assert len(steps) == 4
    assert main([*command, str(tmp_path / "page.txt")]) == 2
    assert "must end in .html" in capsys.readouterr().err


def test_html_fetches_nothing_and_policy_allows_only_embedded_parts():
    page = text_of(make("v-min", 4, 8))
    head, policy = page, re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", head.split('<script type="app')[0])
    for kind, inner in (
        ("script", re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)),
        ("style", re.search(r"<style>(.*?)</style>", page, re.DOTALL)),
    ):
        assert inner
        digest = base64.b64encode(hashlib.sha256(inner[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]


def test_schedule_name_is_escaped():
    schedule = make("1f1b", 2, 2)
    schedule_with_markup = Schedule("</script><b>", 2, 2, schedule.placement, schedule.order)
    page = text_of(schedule_with_markup)
    assert "</script><b>" not in page
    assert data_in(page)["state"]["name"] == "</script><b>"


def test_changed_schedule_has_no_steps():
    schedule = make("v-half", 4, 8)
    renamed = Schedule("v-min", 4, 8, schedule.placement, schedule.order)
    assert "steps" not in data_in(text_of(renamed))["answers"]
    assert tabs_in(text_of(renamed)) == ["timeline"]


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (make("v-half", 4, 8), "v-half"),
        (make("interleaved-1f1b", 4, 8), "interleaved-1f1b"),
        (make("interleaved-1f1b", 4, 8, num_chunks=4), ""),
        (Schedule("v-half", 2, 2, (0, 1), make("1f1b", 2, 2).order), ""),
        (Schedule("v-half+", 2, 2, (0, 1), make("1f1b", 2, 2).order), ""),
    ],
)
def test_training_flag_is_shown_only_for_catalogue_schedules(schedule, name):
    assert html.plain_facts(simulate(schedule)).train == name


def test_modules_have_no_import_cycle():
    imports = {
        name.removesuffix(".js"): set(html._IMPORT.findall(content.decode()))
        for name, (content, _) in static_files().items()
        if name.endswith(".js")
    }
    while leaves := {name for name, imported in imports.items() if not imported & imports.keys()}:
        for name in leaves:
            del imports[name]
    assert not imports


def test_duplicate_top_level_name_is_rejected():
    files = {
        "app.js": 'import { a } from "./b.js";\nconst a2 = 1;\n',
        "b.js": "export const a2 = 2;\n",
    }
    with pytest.raises(ScheduleError, match=r"a2 stands in b.js and in app.js"):
        html._bundle(files)
