"""The files that the page offers: those of the command line, and the presets of configs/costs."""

import json
import shlex
from pathlib import Path

import pytest
from playground.answers import read_payload, request

from megatron_vshape.cli.main import main
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.playground.answer import make_answer
from megatron_vshape.playground.given import read_given, read_presets
from megatron_vshape.playground.offers import offers
from megatron_vshape.playground.request import parse_request

COSTS = Costs((900.0,) * 8, (1000.0,) * 8, (800.0,) * 8, 0.0, (2.0**30,) * 8, (2.0**29,) * 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configs/costs folder with a costs file, its `about` file, a plan and a README."""
    folder = tmp_path / "configs" / "costs"
    folder.mkdir(parents=True)
    (folder / "gpt_9_6b-p4.json").write_text(COSTS.to_json())
    (folder / "gpt_9_6b-p4.about.json").write_text(json.dumps({"device": "none", "ranks": []}))
    (folder / "README.md").write_text("# Measured costs")
    return folder


def test_a_costs_file_is_a_preset_and_what_is_about_it_is_not(folder, given_files):
    given = [*read_given(given_files), *read_presets(folder)]
    files = {each["name"]: each for each in offers([each.offer() for each in given])["files"]}
    assert files["gpt_9_6b-p4.json"]["preset"] is True
    assert files["gpt_9_6b-p4.json"]["stages"] == 8
    assert files["measured_costs.json"]["preset"] is False
    assert not any("about" in name or "README" in name for name in files)


def test_the_command_looks_where_the_presets_are(folder, monkeypatch):
    from megatron_vshape.cli import playground

    monkeypatch.chdir(folder.parent.parent)
    assert [each.key for each in read_presets(playground.COSTS)] == ["preset-gpt_9_6b-p4.json"]


def test_the_command_that_makes_it_again_finds_the_file(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent.parent)
    (given,) = read_presets(Path("configs/costs"))
    body = request(costs={"file": {"key": given.key}})
    asked = parse_request(body, {given.key: given.file})
    _, (found,) = read_payload(make_answer(asked, lambda _: None))
    recipe = found["facts"]["recipe"]
    assert recipe.endswith("--costs configs/costs/gpt_9_6b-p4.json")
    assert main(shlex.split(recipe)) == 0


def test_what_is_no_costs_file_is_told(folder):
    (folder / "plan.json").write_text('{"traceEvents": []}')
    with pytest.raises(ScheduleError, match=r"plan\.json is a trace, and .* is for costs"):
        read_presets(folder)
