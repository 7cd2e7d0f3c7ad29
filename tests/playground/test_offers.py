"""The files of the command line that the page offers."""

import shlex
from pathlib import Path

from playground.answers import read_payload, request

from megatron_vshape.cli.main import main
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.playground.answer import make_answer
from megatron_vshape.playground.given import read_given
from megatron_vshape.playground.request import parse_request

COSTS = Costs((900.0,) * 8, (1000.0,) * 8, (800.0,) * 8, 0.0, (2.0**30,) * 8, (2.0**29,) * 8)


def test_the_command_that_makes_it_again_finds_the_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "costs.json").write_text(COSTS.to_json())
    monkeypatch.chdir(tmp_path)
    (given,) = read_given([Path("configs/costs.json")])
    assert given.offer()["stages"] == 8
    body = request(costs={"file": {"key": given.key}})
    asked = parse_request(body, {given.key: given.file})
    _, (found,) = read_payload(make_answer(asked, lambda _: None))
    recipe = found["facts"]["recipe"]
    assert recipe.endswith("--costs configs/costs.json")
    assert main(shlex.split(recipe)) == 0
